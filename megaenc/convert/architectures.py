"""Which families of Hugging Face models can be trained here, and what config.json says of a model, read in both directions.

A family is a way to write a model down, not another model: EuroBERT, Llama, Mistral, Qwen2 and Qwen3 differ in which options of
one layer they have, and name their weights alike (`megaenc.convert.param_mapping`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megaenc.convert.hf_checkpoint import shorten_repr
from megaenc.convert.hf_model import build_hf_config
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

_FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Of config.json's fields those that only have another name in ModelConfig."""
# What megatron-core has for the stretched positions of Llama 3; the factor alone is free.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelFamily:
    """What transformers calls a model type."""

    model_type: str
    architecture: str  # the class that transformers loads it with, output layer included
    # Whether queries, keys and values have a bias; an optional one (`attention_bias`) attention's output has too.
    qkv_bias: Literal["never", "always", "optional"]
    qk_norms: bool = False  # whether queries and keys are normalised head by head
    encoder: bool = False  # whether it is bidirectional by itself; a decoder is with `is_causal: false` in its config.json
    export_as: str = ""  # the family that stands in for it on the way out, for one that transformers does not know

    @property
    def export_family(self) -> "ModelFamily":
        """The family as which a model of this one goes out."""
        return FAMILIES[self.export_as or self.model_type]

    def unsupported_feature(self, model: ModelConfig, attention: Attention) -> str | None:
        """What this family cannot say of `model` read under `attention`; None where it says all."""
        if attention not in ((Attention.BIDIRECTIONAL,) if self.encoder else (Attention.BIDIRECTIONAL, Attention.CAUSAL)):
            return f"{attention} attention"
        if model.qk_layernorm != self.qk_norms:
            return "norms of queries and keys" if model.qk_layernorm else "queries and keys without norms"
        if model.add_qkv_bias and self.qkv_bias == "never":
            return "biases of queries, keys and values"
        if not model.add_qkv_bias and self.qkv_bias == "always":
            return "queries, keys and values without biases"
        return None

    def zero_bias_names(self, model: ModelConfig) -> tuple[str, ...]:
        """Weights that this family has beyond the mapping's for `model`, zeros of [hidden size]: biases of attention's output."""
        if self.qkv_bias != "optional" or not model.add_qkv_bias:
            return ()
        return tuple(f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(model.num_layers))


FAMILIES = {
    family.model_type: family
    for family in (
        ModelFamily("eurobert", "EuroBertForMaskedLM", "optional", encoder=True),
        ModelFamily("llama", "LlamaForCausalLM", "optional"),
        ModelFamily("mistral", "MistralForCausalLM", "never"),
        ModelFamily("qwen2", "Qwen2ForCausalLM", "always"),
        ModelFamily("qwen3", "Qwen3ForCausalLM", "optional", qk_norms=True),
        # The study's released models: EuroBERT's weights under a name of their own, with code that is never run.
        ModelFamily("sl_model", "", "optional", encoder=True, export_as="eurobert"),
    )
}
KNOWN_FAMILIES = ", ".join(FAMILIES)
_FIELDS_WITHOUT_SHAPE = (
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)  # no shape contradicts them


def find_family(values: dict[str, Any], where: str) -> ModelFamily:
    """The family of a config.json that holds `values`; `where` names it. InputError lists the known ones."""
    found = values.get("model_type")
    if not isinstance(found, str) or found not in FAMILIES:
        raise InputError(f"{where}: field `model_type`: found {shorten_repr(found)}, expected one of {KNOWN_FAMILIES}")
    return FAMILIES[found]


def parse_hf_config(values: dict[str, Any], where: str) -> Any:
    """transformers' own config of a config.json that holds `values`, so that fields of older versions are understood.

    Its class follows from the family alone: code that the folder holds is never run. InputError for what is no such config.
    """
    family = find_family(values, where)
    if family.export_as:  # what that family's config would put there is of another model
        said = values | (rope if isinstance(rope := values.get("rope_parameters"), dict) else {})
        for name in _FIELDS_WITHOUT_SHAPE:
            if name not in said:
                raise InputError(f"{where}: field `{name}`: missing, expected what the model was trained with")
    return build_hf_config(values, family.export_family.model_type, where)


def to_model_config(config: Any, family: ModelFamily, where: str) -> ModelConfig:
    """The shape of the model that transformers' `config` is of.

    InputError names the field of what cannot be computed here.
    """
    _check_supported_layers(config, where)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    optional_bias = family.qkv_bias == "optional" and bool(config.attention_bias)
    shape = ModelConfig(
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        kv_channels=None if head_dim * heads == config.hidden_size else head_dim,
        add_qkv_bias=family.qkv_bias == "always" or optional_bias,
        qk_layernorm=family.qk_norms,
        **_read_rotary_fields(config.rope_parameters, where),
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
    )
    try:
        shape.check()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return shape


def _check_supported_layers(config: Any, where: str) -> None:
    """InputError for a field that asks for a layer which is not built here."""
    if getattr(config, "mlp_bias", False):
        raise InputError(f"{where}: field `mlp_bias`: found true, expected false")
    if config.hidden_act != "silu":
        raise InputError(f"{where}: field `hidden_act`: found {shorten_repr(config.hidden_act)}, expected silu")
    window, context = getattr(config, "sliding_window", None), config.max_position_embeddings
    for name in ("max_position_embeddings", "rms_norm_eps", "initializer_range"):
        _check_positive(getattr(config, name), name, where)
    kinds = getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in kinds or not kinds  # Mistral has no list: all of its layers look through the window
    if window is not None and window < context and windowed:
        raise InputError(
            f"{where}: field `sliding_window`: found {window}, expected none or at least the {context} tokens of "
            "`max_position_embeddings`: attention here sees the whole document; put "
            f"{window} for `max_position_embeddings` there to read no further than the window"
        )
    for kind in kinds:
        if kind != "full_attention" and window is None:  # a window as long as the context is no window
            raise InputError(f"{where}: field `layer_types`: found {kind!r}, expected full_attention in every layer")


def _read_rotary_fields(rope: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of ModelConfig that `rope_parameters` decides."""
    kind = rope.get("rope_type")
    if kind not in ("default", "llama3"):
        raise InputError(f"{where}: field `rope_type`: found {shorten_repr(kind)}, expected default or llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{where}: field `partial_rotary_factor`: found {rope['partial_rotary_factor']}, expected 1.0")
    base = {"rotary_base": _check_positive(rope.get("rope_theta"), "rope_theta", where)}
    if kind == "default":
        return base
    for name, expected in _LLAMA3.items():
        if rope.get(name) != expected:
            raise InputError(f"{where}: field `{name}`: found {rope.get(name)}, expected {expected} (the factor alone is free)")
    return base | {"use_rope_scaling": True, "rope_scaling_factor": _check_positive(rope.get("factor"), "factor", where)}


def _check_positive(found: Any, name: str, where: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise InputError(f"{where}: field `{name}`: found {shorten_repr(found)}, expected a number above 0")
    return float(found)


def native_attention(config: Any, family: ModelFamily) -> Attention:
    """The attention under which transformers reads a model with this `config`."""
    causal = not family.encoder and getattr(config, "is_causal", True)
    return Attention.CAUSAL if causal else Attention.BIDIRECTIONAL


def infer_objective(config: Any, family: ModelFamily) -> str:
    """The objective that a model with this `config` was last trained on, as far as its mask and `prediction_shift` tell."""
    if native_attention(config, family) == Attention.CAUSAL:
        return "clm"
    return "mntp" if getattr(config, "prediction_shift", 0) else "mlm"


def build_export_config(
    family: ModelFamily,
    attention: Attention,
    model: ModelConfig,
    *,
    vocab_size: int,
    context: int,
    tokenizer: Any,
    dtype: torch.dtype,
) -> Any:
    """transformers' config of `model` as `family`, read under `attention`: the way back from `to_model_config`.

    `vocab_size`: rows of the embedding; `context`: tokens; `tokenizer`: transformers', for the ids of special tokens. InputError
    where the family cannot say what the model is, naming those that can.
    """
    if missing := family.unsupported_feature(model, attention):
        able = [
            name for name, other in FAMILIES.items() if not other.export_as and not other.unsupported_feature(model, attention)
        ]
        raise InputError(f"--as {family.model_type}: has no {missing}; expected --as {' or '.join(able) or 'nothing known'}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family.encoder and tokenizer.mask_token_id is None:
        raise InputError(
            f"--as {family.model_type}: found a tokenizer without a mask token, expected --as llama or another decoder"
        )
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    values = dict(
        architectures=[family.architecture],
        vocab_size=vocab_size,
        **{theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()},
        head_dim=model.head_dim,
        hidden_act="silu",
        max_position_embeddings=context,
        rope_parameters=rope,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        pad_token_id=eos if pad is None else pad,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos,
        dtype=dtype,
    )
    if family.qkv_bias == "optional":
        values["attention_bias"] = model.add_qkv_bias
    if family.model_type == "mistral":
        values["sliding_window"] = None
    if family.encoder:
        values |= {"mask_token_id": tokenizer.mask_token_id, "classifier_pooling": "mean"}
    elif attention == Attention.BIDIRECTIONAL:
        values["is_causal"] = False
    return CONFIG_MAPPING[family.export_family.model_type](**values)
