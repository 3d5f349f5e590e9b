"""Conversion between config.json and `ModelConfig` for ModernBERT.

Ettin encoders and mmBERT are ModernBERT models. Ettin decoders have the same layers with causal
attention (transformers' ModernBertDecoder). A window of w tokens in their config.json includes the
token itself, so that it spans w - 1 tokens; ModernBERT's spans w tokens to each side.
"""

from collections.abc import Callable
from typing import Any

from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.hf.model import FULL, LOCAL
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

MODEL_TYPE = "modernbert"
DECODER_TYPE = "modernbert-decoder"
DECODER_IDS = ("bos_token_id", "cls_token_id", "sep_token_id")
"""Special token ids that the config.json of a decoder must have."""
FIELDS = {
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
ACTIVATIONS = ("gelu", "silu", "gelu_pytorch_tanh")
LAYER_TYPE_OPTIONS = (
    "rotary_base",
    "window_size",
    "global_attn_every_n_layers",
    "first_global_layer",
    "local_rotary_base",
)
OPTIONS = (
    "num_query_groups",
    "kv_channels",
    "untie_embeddings_and_output_weights",
    *LAYER_TYPE_OPTIONS,
)
FIXED = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "embedding_norm": (True, "embedding without norm"),
    "prediction_head": (True, "output without prediction head"),
}


def find_unsupported_shape(model: ModelConfig) -> str | None:
    """Return, as text, a feature of `model` that ModernBERT lacks; None if it has all.

    Each of its heads has its own keys and values, and the widths of the heads add up to the hidden
    size. Only the shape and the activation are checked. The text follows "has no".
    """
    if model.num_query_groups != model.num_attention_heads:
        return "queries that share keys and values"
    if model.query_size != model.hidden_size:
        return "heads of another width than --hidden-size / --num-attention-heads"
    return find_unsupported_activation(model)


def find_unsupported_activation(model: ModelConfig) -> str | None:
    """Return `--activation NAME` of `model` if transformers lacks it, else None.

    An activation of the same name that computes something else counts as lacking.
    """
    return None if model.activation in ACTIVATIONS else f"--activation {model.activation}"


def read_fields(config: Any, file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig, by name, that neither FIELDS nor FIXED gives.

    Args:
        config: Transformers' config object.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: A field, which the message names, asks for an unsupported feature.
    """
    is_encoder = config.model_type == MODEL_TYPE
    if not is_encoder and not getattr(config, "is_causal", True):
        raise InputError(
            f"{file}: field `is_causal`: found false, expected true: "
            f"transformers' {DECODER_TYPE} is only causal"
        )
    for name in ("attention_bias", "mlp_bias", "classifier_bias"):
        if getattr(config, name):
            raise InputError(f"{file}: field `{name}`: found true, expected false")
    check_activation(config.hidden_activation, file)
    if config.classifier_activation != config.hidden_activation:
        text = shorten_repr(config.classifier_activation)
        raise InputError(
            f"{file}: field `classifier_activation`: found {text}, expected `hidden_activation`'s"
        )
    for name in ("max_position_embeddings", "norm_eps", "initializer_range"):
        check_positive(getattr(config, name), name, file)
    bases = {
        kind: read_rotary_base(config.rope_parameters[kind], kind, file) for kind in (FULL, LOCAL)
    }

    def read_window() -> int:
        """Return the tokens to each side, or before a token, that local layers attend to."""
        if is_encoder:
            return read_tokens(config.local_attention, "`local_attention`", file) // 2
        # It counts the token itself, and without it transformers derives it from `local_attention`.
        return (
            read_tokens(
                config.sliding_window, "`sliding_window` (or half of `local_attention`)", file
            )
            - 1
        )

    return {
        "num_query_groups": config.num_attention_heads,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        **read_layer_types(config.layer_types, bases, read_window, file),
    }


def check_activation(name: Any, file: str) -> None:
    """Raise InputError if the gated MLP has no activation `name`.

    `name` is any value of `hidden_activation` in config.json. The error begins with `file`, the
    path of the config.json.
    """
    if name not in ACTIVATIONS:
        raise InputError(
            f"{file}: field `hidden_activation`: found {shorten_repr(name)}, "
            f"expected {' or '.join(ACTIVATIONS)}"
        )


def read_layer_types(
    kinds: list[str], bases: dict[str, float], read_window: Callable[[], int], file: str
) -> dict[str, Any]:
    """Return the fields of ModelConfig that the kinds of layers decide, by name.

    `rotary_base` (of local layers if all are); with local layers `window_size`; with both kinds
    `global_attn_every_n_layers`, `first_global_layer` (from 1), `local_rotary_base` (None: equal).

    Args:
        kinds: The `layer_types` of a config.json, each FULL (global) or LOCAL.
        bases: Rotary base by kind, of each kind that occurs.
        read_window: Returns `window_size` of ModelConfig; called only with local layers.
        file: File that errors name.

    Raises:
        InputError: A kind is unknown, or the global layers, if any, are not m, m + n, m + 2 n, ...
            to the end of the model, with any m, and an n of 2 or more.
    """
    if unknown_kinds := [kind for kind in kinds if kind not in (FULL, LOCAL)]:
        raise InputError(
            f"{file}: field `layer_types`: found {shorten_repr(unknown_kinds[0])}, "
            f"expected {FULL} or {LOCAL}"
        )
    if LOCAL not in kinds:
        return {"rotary_base": bases[FULL]}
    options = {"window_size": read_window(), "rotary_base": bases[FULL if FULL in kinds else LOCAL]}
    global_layers = [layer_index for layer_index, kind in enumerate(kinds) if kind == FULL]
    if not global_layers:
        return options
    first, second = (*global_layers, None)[:2]
    every = max(first + 1, len(kinds) - first) if second is None else second - first
    if global_layers != list(range(first, len(kinds), every)) or every < 2:
        layers = str(global_layers)[:60]
        raise InputError(
            f"{file}: field `layer_types`: found {FULL} in layers {layers}, expected m, m + n, "
            "m + 2 n, ... to the last"
        )
    local_base = None if bases[LOCAL] == bases[FULL] else bases[LOCAL]
    return options | {
        "global_attn_every_n_layers": every,
        "first_global_layer": first + 1,
        "local_rotary_base": local_base,
    }


def read_rotary_base(rope: dict[str, Any], kind: str, file: str) -> float:
    """Return the base (`rope_theta`) of the rotary positions in layers of one kind.

    Args:
        rope: Entry of `rope_parameters` for the kind.
        kind: FULL or LOCAL, for errors.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: The positions are scaled, or the base is no positive number.
    """
    if rope.get("rope_type") != "default":
        text = shorten_repr(rope.get("rope_type"))
        raise InputError(f"{file}: field `rope_type` of {kind}: found {text}, expected default")
    return check_positive(rope.get("rope_theta"), f"rope_theta` of `{kind}", file)


def read_tokens(value: Any, field: str, file: str) -> int:
    """Return `value`, the number of tokens of a window in config.json.

    Args:
        field: Name of the field, with its backticks, for errors.
        file: Path of the config.json, for errors.

    Raises:
        InputError: It is no integer of 2 or more; the message names `file` and `field`.
    """
    if not isinstance(value, int) or value < 2:
        raise InputError(
            f"{file}: field {field}: found {shorten_repr(value)}, expected 2 or more tokens"
        )
    return value


def export_fields(model: ModelConfig, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Return the fields of ModernBERT's config.json that `FIELDS` lacks, by name.

    It is the inverse of `read_fields`. ModernBERT's decoder has the same fields. The ids of the
    special tokens are those of `tokenizer`; `attention` decides how a window is counted.
    """
    # Unused without local layers.
    window = (model.window_size or model.hidden_size) + (attention == Attention.CAUSAL)
    return {
        "classifier_activation": model.activation,
        "local_attention": 2 * window,
        **layer_type_fields(model),
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
    }


def layer_type_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields `layer_types` and `rope_parameters` of a config.json.

    It is the inverse of `read_layer_types`.
    """
    bases = {FULL: model.rotary_base, LOCAL: model.local_rotary_base or model.rotary_base}
    return {
        "layer_types": [FULL if window is None else LOCAL for window in model.layer_windows],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
    }
