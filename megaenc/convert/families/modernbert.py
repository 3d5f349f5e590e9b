"""Conversion between ModernBERT's config.json and `ModelConfig`; Ettin encoders and mmBERT are ModernBERT models.

Ettin decoders have the same layers with causal attention (transformers' ModernBertDecoder). A window of w tokens in their
config.json includes the token itself, so that it spans w - 1 tokens; ModernBERT's spans w tokens to each side.
"""

from typing import Any

from megaenc.convert.hf_checkpoint import shorten_repr
from megaenc.convert.hf_model import check_positive
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

MODEL_TYPE, DECODER_TYPE = "modernbert", "modernbert-decoder"

DECODER_IDS = ("bos_token_id", "cls_token_id", "sep_token_id")
"""Special token ids that the config.json of a decoder must have."""
_FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "norm_eps": "norm_epsilon",
    "norm_bias": "norm_bias",
    "hidden_activation": "activation",
    "initializer_range": "init_method_std",
    "decoder_bias": "output_layer_bias",
}
"""Fields of config.json with another name in ModelConfig."""
_FULL, _LOCAL = "full_attention", "sliding_attention"
# Each option that has one value in this family, and the text of any other for errors.
_FIXED = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "embedding_norm": (True, "embedding without norm"),
    "prediction_head": (True, "output without prediction head"),
    "add_qkv_bias": (False, "biases of queries, keys and values"),
    "qk_layernorm": (False, "norms of queries and keys"),
    "use_rope_scaling": (False, "scaled rotary positions"),
    "yarn_rotary_scaling_factor": (None, "rotary positions scaled by YaRN"),
}


def unsupported_feature(model: ModelConfig, attention: Attention, *, is_encoder: bool) -> str | None:
    """Return, as text, a feature of `model` under `attention` that ModernBERT or its decoder lacks; None if it has all."""
    if attention != (Attention.BIDIRECTIONAL if is_encoder else Attention.CAUSAL):
        return f"{attention} attention"
    for name, (expected, other) in _FIXED.items():
        if getattr(model, name) != expected:
            return other
    if model.num_query_groups != model.num_attention_heads:
        return "queries that share keys and values"
    if model.query_size != model.hidden_size:
        return "heads of another width than --hidden-size / --num-attention-heads"
    return None


def to_model_config(config: Any, file: str, *, is_encoder: bool) -> ModelConfig:
    """Return the ModelConfig of transformers' `config`; InputError, naming file and field, for unsupported features."""
    if not is_encoder and not getattr(config, "is_causal", True):
        raise InputError(f"{file}: field `is_causal`: found false, expected true: transformers' {DECODER_TYPE} is only causal")
    for name in ("attention_bias", "mlp_bias", "classifier_bias"):
        if getattr(config, name):
            raise InputError(f"{file}: field `{name}`: found true, expected false")
    if config.hidden_activation not in ("gelu", "silu"):
        raise InputError(
            f"{file}: field `hidden_activation`: found {shorten_repr(config.hidden_activation)}, expected gelu or silu"
        )
    if config.classifier_activation != config.hidden_activation:
        text = shorten_repr(config.classifier_activation)
        raise InputError(f"{file}: field `classifier_activation`: found {text}, expected `hidden_activation`'s")
    for name in ("max_position_embeddings", "norm_eps", "initializer_range"):
        check_positive(getattr(config, name), name, file)
    bases = {kind: _read_rotary_base(config.rope_parameters[kind], kind, file) for kind in (_FULL, _LOCAL)}
    local = _LOCAL in config.layer_types
    return ModelConfig(
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        **{name: value for name, (value, _) in _FIXED.items()},
        num_query_groups=config.num_attention_heads,
        rotary_base=bases[_FULL] if _FULL in config.layer_types else bases[_LOCAL],
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        window_size=(_read_window if is_encoder else _read_causal_window)(config, file) if local else None,
        global_attn_every_n_layers=_read_global_layers(config.layer_types, file) if local else None,
        local_rotary_base=bases[_LOCAL] if local and _FULL in config.layer_types and bases[_LOCAL] != bases[_FULL] else None,
    )


def _read_rotary_base(rope: dict[str, Any], kind: str, file: str) -> float:
    """Return the base period in `rope_parameters` of layers of `kind`."""
    if rope.get("rope_type") != "default":
        text = shorten_repr(rope.get("rope_type"))
        raise InputError(f"{file}: field `rope_type` of {kind}: found {text}, expected default")
    return check_positive(rope.get("rope_theta"), f"rope_theta` of `{kind}", file)


def _read_window(config: Any, file: str) -> int:
    """Return the tokens to each side that `local_attention` stands for, as transformers reads it."""
    tokens = config.local_attention
    if not isinstance(tokens, int) or tokens < 2:
        raise InputError(f"{file}: field `local_attention`: found {shorten_repr(tokens)}, expected 2 or more tokens")
    return tokens // 2


def _read_causal_window(config: Any, file: str) -> int:
    """Return the tokens before a token that it attends to in a decoder's local layers.

    transformers derives `sliding_window`, which counts the token itself, from `local_attention` if config.json lacks it.
    """
    tokens = config.sliding_window
    if not isinstance(tokens, int) or tokens < 2:
        raise InputError(
            f"{file}: field `sliding_window` (or half of `local_attention`): found {shorten_repr(tokens)}, expected 2 or more "
            "tokens"
        )
    return tokens - 1


def _read_global_layers(kinds: list[str], file: str) -> int | None:
    """Return n if the first and every n-th layer after it are global, None if none is; else InputError."""
    global_layers = [number for number, kind in enumerate(kinds) if kind == _FULL]
    if not global_layers:
        return None
    every = (*global_layers, len(kinds))[1]
    if global_layers != list(range(0, len(kinds), every)):
        raise InputError(
            f"{file}: field `layer_types`: found {_FULL} in layers {str(global_layers)[:60]}, expected 0, n, 2 n, ... for some n"
        )
    return every


def export_fields(model: ModelConfig, tokenizer: Any, *, is_encoder: bool) -> dict[str, Any]:
    """Return the fields of a config.json of ModernBERT or its decoder for `model`; the inverse of `to_model_config`."""
    window = (model.window_size or model.hidden_size) + (not is_encoder)  # unused without local layers
    kinds = [_FULL if window is None else _LOCAL for window in model.layer_windows]
    bases = {_FULL: model.rotary_base, _LOCAL: model.local_rotary_base or model.rotary_base}
    return {theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()} | {
        "classifier_activation": model.activation,
        "layer_types": kinds,
        "local_attention": 2 * window,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
    }
