"""Conversion between the config.json of Gemma 3's text models and `ModelConfig`; EmbeddingGemma is one of them."""

from typing import Any

from megaenc.convert.families.modernbert import (
    FULL,
    LOCAL,
    check_activation,
    find_other_value,
    layer_type_fields,
    read_layer_types,
    read_rotary_base,
)
from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

MODEL_TYPE = "gemma3_text"

_FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "norm_epsilon",
    "hidden_activation": "activation",
    "initializer_range": "init_method_std",
}
"""Fields of config.json with another name in ModelConfig."""
# Each option that has one value in this family, and the text of any other for errors.
_FIXED = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "apply_layernorm_1p": (True, "norms by weight without + 1"),
    "post_norms": (True, "layers without norms after attention and MLP"),
    "qk_layernorm": (True, "queries and keys without norms"),
    "scale_embedding": (True, "embedding without scaling"),
    "add_qkv_bias": (False, "biases of queries, keys and values"),
    "use_rope_scaling": (False, "Llama 3's scaled rotary positions"),
    "yarn_rotary_scaling_factor": (None, "rotary positions scaled by YaRN"),
    "embedding_norm": (False, "norm of the embedding"),
    "prediction_head": (False, "prediction head"),
    "output_layer_bias": (False, "bias of the output layer"),
}


def unsupported_feature(model: ModelConfig) -> str | None:
    """Return, as text, a feature of `model` that Gemma 3 lacks; None if it has all."""
    if model.hidden_size % model.num_attention_heads:  # transformers refuses it, whatever the width of a head
        return "heads whose number does not divide the hidden size"
    return find_other_value(model, _FIXED)


def to_model_config(config: Any, file: str) -> ModelConfig:
    """Return the ModelConfig of transformers' `config`; InputError, naming file and field, for unsupported features."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name) is not None:
            raise InputError(f"{file}: field `{name}`: found {shorten_repr(getattr(config, name))}, expected none")
    if config.attention_bias:
        raise InputError(f"{file}: field `attention_bias`: found true, expected false")
    if not getattr(config, "is_causal", True):  # transformers' windows would be one token wider
        raise InputError(f"{file}: field `is_causal`: found false, expected `use_bidirectional_attention` true instead")
    check_activation(config.hidden_activation, file)
    for name in ("max_position_embeddings", "rms_norm_eps", "initializer_range", "query_pre_attn_scalar"):
        check_positive(getattr(config, name), name, file)
    ropes, factor = dict(config.rope_parameters), None
    if ropes[FULL].get("rope_type") == "linear":
        factor = check_positive(ropes[FULL].get("factor"), "factor", file)
        ropes[FULL] = ropes[FULL] | {"rope_type": "default"}
    bases = {kind: read_rotary_base(ropes[kind], kind, file) for kind in (FULL, LOCAL)}
    head_dim, scalar = config.head_dim, config.query_pre_attn_scalar
    return ModelConfig(
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        **{name: value for name, (value, _) in _FIXED.items()},
        kv_channels=None if head_dim * config.num_attention_heads == config.hidden_size else head_dim,
        query_pre_attn_scalar=None if scalar == head_dim else scalar,
        rotary_seq_len_interpolation_factor=factor if FULL in config.layer_types else None,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        **read_layer_types(config.layer_types, bases, lambda: _read_window(config.sliding_window, file), file),
    )


def _read_window(sliding_window: Any, file: str) -> int:
    """Return the tokens to each side that `sliding_window` stands for; transformers counts the token itself."""
    if not isinstance(sliding_window, int) or sliding_window < 2:
        raise InputError(f"{file}: field `sliding_window`: found {shorten_repr(sliding_window)}, expected 2 or more tokens")
    return sliding_window - 1


def export_fields(model: ModelConfig, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Return the fields of a Gemma 3 config.json for `model`; the inverse of `to_model_config`."""
    window = model.window_size or model.hidden_size  # unused without local layers, but transformers requires it
    is_bidirectional = attention == Attention.BIDIRECTIONAL
    fields = {theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()} | layer_type_fields(model)
    if model.rotary_seq_len_interpolation_factor is not None:
        fields["rope_parameters"][FULL] |= {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return fields | {
        "head_dim": model.head_dim,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "use_bidirectional_attention": is_bidirectional,
        "sliding_window": 2 * window if is_bidirectional else window + 1,  # transformers halves the one of both sides
    }
