"""Conversion between config.json and `ModelConfig` for families like Llama.

EuroBERT, Llama, Mistral, Qwen2 and Qwen3 differ only in the options of one layer. Each module of
this package has the same tables and functions, from which `megaenc.convert.architectures` converts
in both directions.
"""

import math
from typing import Any

from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Fields of config.json with another name in ModelConfig."""
# megatron-core's fixed values for the scaled rotary positions of Llama 3; only the factor is
# configurable.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Options of YaRN whose only supported value is transformers' default.
_YARN = {
    "beta_fast": (None, 32),
    "beta_slow": (None, 1),
    "mscale_all_dim": (None, 0),
    "truncate": (True,),
}
OPTIONS = (
    "kv_channels",
    "untie_embeddings_and_output_weights",
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
)
"""Other fields of ModelConfig that these families have, which `read_fields` returns. All others
have their default."""
FIXED: dict[str, tuple[Any, str]] = {}
"""Fields of ModelConfig with another value than the default in all models, and the text of the
default for errors."""


def find_unsupported_shape(model: ModelConfig) -> str | None:
    """Return None: these families have all shapes."""
    return None


def read_fields(config: Any, file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig, by name, that neither FIELDS nor FIXED gives.

    Args:
        config: Transformers' config object.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: A field, which the message names, asks for an unsupported feature.
    """
    _check_supported_layers(config, file)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return {
        "kv_channels": None if head_dim * heads == config.hidden_size else head_dim,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        **_read_rotary_fields(config.rope_parameters, file),
    }


def _check_supported_layers(config: Any, file: str) -> None:
    """Raise InputError, naming file and field, for layers that are not supported here."""
    if getattr(config, "mlp_bias", False):
        raise InputError(f"{file}: field `mlp_bias`: found true, expected false")
    if config.hidden_act != "silu":
        raise InputError(
            f"{file}: field `hidden_act`: found {shorten_repr(config.hidden_act)}, expected silu"
        )
    window = getattr(config, "sliding_window", None)
    context = config.max_position_embeddings
    for name in ("max_position_embeddings", "rms_norm_eps", "initializer_range"):
        check_positive(getattr(config, name), name, file)
    kinds = getattr(config, "layer_types", None) or ()
    # Mistral has no list: all of its layers have the window.
    windowed = "sliding_attention" in kinds or not kinds
    if window is not None and window < context and windowed:
        raise InputError(
            f"{file}: field `sliding_window`: found {window}, "
            f"expected none or at least the {context} tokens of "
            "`max_position_embeddings`, as attention here has no window; "
            "set `max_position_embeddings` to "
            f"{window} there to read no more tokens than the window"
        )
    for kind in kinds:
        # A window as long as the context has no effect.
        if kind != "full_attention" and window is None:
            raise InputError(
                f"{file}: field `layer_types`: found {kind!r}, "
                "expected full_attention in every layer"
            )


def _read_rotary_fields(rope: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the rotary fields of ModelConfig for `rope_parameters` of a config.json."""
    kind = rope.get("rope_type")
    if kind not in ("default", "llama3", "yarn"):
        raise InputError(
            f"{file}: field `rope_type`: found {shorten_repr(kind)}, expected default, "
            "llama3 or yarn"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"{file}: field `partial_rotary_factor`: found {rope['partial_rotary_factor']}, "
            "expected 1.0"
        )
    base = {"rotary_base": check_positive(rope.get("rope_theta"), "rope_theta", file)}
    if kind == "default":
        return base
    if kind == "yarn":
        return base | _read_yarn_fields(rope, file)
    for name, expected in _LLAMA3.items():
        if rope.get(name) != expected:
            raise InputError(
                f"{file}: field `{name}`: found {rope.get(name)}, "
                f"expected {expected} (only the factor is configurable)"
            )
    return base | {
        "use_rope_scaling": True,
        "rope_scaling_factor": check_positive(rope.get("factor"), "factor", file),
    }


def _read_yarn_fields(rope: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig for `rope_parameters` of type yarn.

    Raises:
        InputError: An option without a flag does not have its default.
    """
    factor = check_positive(rope.get("factor"), "factor", file)
    context = check_positive(
        rope.get("original_max_position_embeddings"), "original_max_position_embeddings", file
    )
    if not context.is_integer():
        raise InputError(
            f"{file}: field `original_max_position_embeddings`: found {context}, "
            "expected a whole number"
        )
    for name, values in _YARN.items():
        if (value := rope.get(name, values[0])) not in values:
            raise InputError(
                f"{file}: field `{name}`: found {shorten_repr(value)}, expected {values[-1]}, "
                "the default of YaRN"
            )
    default = 0.1 * math.log(max(factor, 1)) + 1
    scale = rope.get("attention_factor")
    if scale is not None and not (
        isinstance(scale, int | float) and math.isclose(scale, default, rel_tol=1e-6)
    ):
        raise InputError(
            f"{file}: field `attention_factor`: found {shorten_repr(scale)}, expected {default:g}, "
            "that of YaRN"
        )
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(context),
    }


def export_fields(model: ModelConfig, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Return the fields head_dim, hidden_act and rope_parameters of a config.json.

    It is the inverse of `read_fields`. `tokenizer` and `attention`, which other families need, are
    unused.
    """
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    if model.yarn_rotary_scaling_factor is not None:
        context = model.yarn_original_max_position_embeddings
        rope |= {
            "rope_type": "yarn",
            "factor": model.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": context,
        }
    return {"head_dim": model.head_dim, "hidden_act": "silu", "rope_parameters": rope}
