"""Conversion between config.json and `ModelConfig` for Gemma 3's text models.

EmbeddingGemma is one of them.
"""

from typing import Any

from megaenc.convert.families import llama
from megaenc.convert.families.modernbert import (
    FULL,
    LAYER_TYPE_OPTIONS,
    LOCAL,
    check_activation,
    find_unsupported_activation,
    layer_type_fields,
    read_layer_types,
    read_rotary_base,
    read_tokens,
)
from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

MODEL_TYPE = "gemma3_text"

FIELDS = llama.FIELDS | {"hidden_activation": "activation"}
"""Fields of config.json with another name in ModelConfig."""
OPTIONS = (
    "kv_channels",
    "query_pre_attn_scalar",
    "rotary_seq_len_interpolation_factor",
    "untie_embeddings_and_output_weights",
    *LAYER_TYPE_OPTIONS,
)
FIXED = {
    "apply_layernorm_1p": (True, "norms by weight without + 1"),
    "post_norms": (True, "layers without norms after attention and MLP"),
    "scale_embedding": (True, "embedding without scaling"),
}


def find_unsupported_shape(model: ModelConfig) -> str | None:
    """Return, as text, a feature of `model` that Gemma 3 lacks; None if it has all.

    The text follows "has no". Only the shape and the activation are checked.
    """
    # transformers refuses it, whatever the width of a head.
    if model.hidden_size % model.num_attention_heads:
        return "heads whose number does not divide the hidden size"
    return find_unsupported_activation(model)


def read_fields(config: Any, file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig, by name, that neither FIELDS nor FIXED gives.

    Args:
        config: Transformers' config object.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: A field, which the message names, asks for an unsupported feature.
    """
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name) is not None:
            raise InputError(
                f"{file}: field `{name}`: found {shorten_repr(getattr(config, name))}, "
                "expected none"
            )
    if config.attention_bias:
        raise InputError(f"{file}: field `attention_bias`: found true, expected false")
    if not getattr(config, "is_causal", True):  # transformers' windows would be one token wider
        raise InputError(
            f"{file}: field `is_causal`: found false, "
            "expected `use_bidirectional_attention` true instead"
        )
    check_activation(config.hidden_activation, file)
    for name in (
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "query_pre_attn_scalar",
    ):
        check_positive(getattr(config, name), name, file)
    ropes = dict(config.rope_parameters)
    factor = None
    if ropes[FULL].get("rope_type") == "linear":
        factor = check_positive(ropes[FULL].get("factor"), "factor", file)
        ropes[FULL] = ropes[FULL] | {"rope_type": "default"}
    bases = {kind: read_rotary_base(ropes[kind], kind, file) for kind in (FULL, LOCAL)}
    head_dim = config.head_dim
    scalar = config.query_pre_attn_scalar
    return {
        "kv_channels": None
        if head_dim * config.num_attention_heads == config.hidden_size
        else head_dim,
        "query_pre_attn_scalar": None if scalar == head_dim else scalar,
        "rotary_seq_len_interpolation_factor": factor if FULL in config.layer_types else None,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        # transformers counts the token itself.
        **read_layer_types(
            config.layer_types,
            bases,
            lambda: read_tokens(config.sliding_window, "`sliding_window`", file) - 1,
            file,
        ),
    }


def export_fields(model: ModelConfig, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Return the fields of a Gemma 3 config.json that `FIELDS` lacks, by name.

    It is the inverse of `read_fields`. `tokenizer` is unused; `attention` decides how a window is
    counted.
    """
    # Unused without local layers, but transformers requires it.
    window = model.window_size or model.hidden_size
    is_bidirectional = attention == Attention.BIDIRECTIONAL
    fields = layer_type_fields(model)
    if model.rotary_seq_len_interpolation_factor is not None:
        fields["rope_parameters"][FULL] |= {
            "rope_type": "linear",
            "factor": model.rotary_seq_len_interpolation_factor,
        }
    return fields | {
        "head_dim": model.head_dim,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "use_bidirectional_attention": is_bidirectional,
        # transformers halves the one of both sides.
        "sliding_window": 2 * window if is_bidirectional else window + 1,
    }
