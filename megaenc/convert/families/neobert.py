"""Conversion between config.json and `ModelConfig` for NeoBERT.

Its layers (arXiv 2502.19587) are Llama's, with names of their own.
"""

from typing import Any

from megaenc.convert.families import modernbert
from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

MODEL_TYPE = "neobert"
HUB_CODE = "chandar-lab/NeoBERT"
"""Repository of the Hub with the code that loads NeoBERT in transformers, which has no class for
it."""
_AUTO_MAP = {
    "AutoConfig": f"{HUB_CODE}--model.NeoBERTConfig",
    "AutoModel": f"{HUB_CODE}--model.NeoBERT",
    "AutoModelForMaskedLM": f"{HUB_CODE}--model.NeoBERTLMHead",
    "AutoModelForSequenceClassification": f"{HUB_CODE}--model.NeoBERTForSequenceClassification",
}
# Constants of its code: base period of the positions, and what divides the width inside the MLP.
_ROTARY_BASE = 10000.0
_MULTIPLE = 8
FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "norm_eps": "norm_epsilon",
    "decoder_init_range": "init_method_std",
}
"""Fields of config.json with another name in ModelConfig."""
# Fields of NeoBERT's variants that change its layers, with NeoBERT's value, which config.json need
# not have.
_VARIANTS = {
    "rms_norm": True,
    "rope": True,
    "ngpt": False,
    "rope_theta": _ROTARY_BASE,
    "tie_word_embeddings": False,
}
OPTIONS = ("num_query_groups", "kv_channels", "ffn_hidden_size")
FIXED = {"output_layer_bias": (True, "output layer without bias")}


def find_unsupported_shape(model: ModelConfig) -> str | None:
    """Return, as text, a feature of `model` that NeoBERT lacks; None if it has all.

    The text follows "has no". Only the shape and the activation are checked.
    """
    if model.ffn_hidden_size % _MULTIPLE:
        return f"--ffn-hidden-size that is no multiple of {_MULTIPLE}"
    return modernbert.find_unsupported_shape(model)


def read_fields(config: Any, file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig, by name, that neither FIELDS nor FIXED gives.

    Args:
        config: Transformers' config object.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: A field, which the message names, asks for an unsupported feature.
    """
    from megaenc.hf.neobert_model import inner_size  # here, because transformers takes seconds

    for name, expected in _VARIANTS.items():
        value = getattr(config, name, expected)
        if value != expected:
            raise InputError(
                f"{file}: field `{name}`: found {shorten_repr(value)}, "
                f"expected {expected} as in NeoBERT"
            )
    activation = getattr(config, "hidden_act", "swiglu")
    if str(activation).lower() != "swiglu":
        raise InputError(
            f"{file}: field `hidden_act`: found {shorten_repr(activation)}, expected swiglu"
        )
    for name in (
        "max_length",
        "norm_eps",
        "decoder_init_range",
        "num_attention_heads",
        "intermediate_size",
    ):
        check_positive(getattr(config, name), name, file)
    width = config.hidden_size // config.num_attention_heads
    if getattr(config, "dim_head", width) != width:
        text = shorten_repr(config.dim_head)
        raise InputError(
            f"{file}: field `dim_head`: found {text}, expected {width}, "
            "hidden_size / num_attention_heads"
        )
    return {
        "num_query_groups": config.num_attention_heads,
        "ffn_hidden_size": inner_size(config.intermediate_size),
    }


def export_fields(model: ModelConfig, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Return the fields of a NeoBERT config.json that `FIELDS` lacks, by name.

    It is the inverse of `read_fields`; `tokenizer` and `attention` are unused.
    """
    return {
        "intermediate_size": model.ffn_hidden_size * 3 // 2,
        "dim_head": model.head_dim,
        "embedding_init_range": model.init_method_std,
        "auto_map": _AUTO_MAP,
    }
