"""Supported families of Hugging Face models, and conversion between their config.json and `ModelConfig`.

EuroBERT, Llama, Mistral, Qwen2 and Qwen3 differ only in the options of one layer, and name their weights alike. ModernBERT, its
decoder and Gemma 3 have their own layers and names, NeoBERT only its own names (`megaenc.convert.families`,
`megaenc.convert.param_mapping`).
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megaenc.convert.families import gemma3, modernbert, neobert
from megaenc.errors import InputError
from megaenc.hf.checkpoint import check_positive, shorten_repr
from megaenc.hf.model import build_hf_config, is_causal_decoder, register_neobert
from megaenc.model.config import ADDED_OPTIONS, ModelConfig
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
"""Fields of config.json with another name in ModelConfig."""
_SPECIAL_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "cls_token_id",
    "sep_token_id",
    "mask_token_id",
)
SOURCE_FIELDS = ("classifier_pooling", *_SPECIAL_IDS)
"""Fields of a source's config.json that exports keep if their family accepts them."""
# megatron-core's fixed values for the scaled rotary positions of Llama 3; only the factor is configurable.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Options of YaRN whose only supported value is transformers' default.
_YARN = {"beta_fast": (None, 32), "beta_slow": (None, 1), "mscale_all_dim": (None, 0), "truncate": (True,)}
# Options of a model that Llama and its like lack, for errors.
_OTHER_LAYERS = {
    "normalization": "LayerNorm",
    "activation": "GELU",
    "window_size": "attention windows",
    "embedding_norm": "norm of the embedding",
    "prediction_head": "prediction head",
    "output_layer_bias": "bias of the output layer",
    "rotary_seq_len_interpolation_factor": "linearly scaled rotary positions",
    "query_pre_attn_scalar": "scaling of queries",
    "apply_layernorm_1p": "norms by weight + 1",
    "post_norms": "norms after attention and MLP",
    "scale_embedding": "scaling of the embedding",
}
_OWN_LAYERS = {module.MODEL_TYPE: module for module in (modernbert, neobert, gemma3)} | {modernbert.DECODER_TYPE: modernbert}


@dataclass(frozen=True)
class ModelFamily:
    """Family of Hugging Face models (a model type): transformers' class, attention biases and norms, encoder or decoder."""

    model_type: str
    architecture: str  # transformers' class with output layer; for NeoBERT, the Hub's
    # Biases of queries, keys and values; with an optional bias (`attention_bias`), attention's output has one too.
    qkv_bias: Literal["never", "always", "optional"]
    qk_norms: bool = False  # whether queries and keys are normalized in each head
    is_encoder: bool = False  # bidirectional; decoder families are with `is_causal: false` or `use_bidirectional_attention: true`
    export_as: str = ""  # the family to export as, if transformers does not know this one
    poolings: tuple[str, ...] = ("mean",)  # values of an encoder's `classifier_pooling`

    @property
    def export_family(self) -> "ModelFamily":
        """Return the family as which models of this one are exported: `export_as` if it is set, else this family."""
        return FAMILIES[self.export_as or self.model_type]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attention that transformers' class of the family can have."""
        if self.model_type == modernbert.DECODER_TYPE:
            return (Attention.CAUSAL,)
        return (Attention.BIDIRECTIONAL,) if self.is_encoder else (Attention.BIDIRECTIONAL, Attention.CAUSAL)

    def unsupported_feature(self, model: ModelConfig, attention: Attention) -> str | None:
        """Return, as text, a feature of `model` under `attention` that this family lacks; None if it supports all."""
        if attention not in self.attentions:
            return f"{attention} attention"
        if own := _OWN_LAYERS.get(self.model_type):
            return own.unsupported_feature(model)
        if model.qk_layernorm != self.qk_norms:
            return "norms of queries and keys" if model.qk_layernorm else "queries and keys without norms"
        if model.add_qkv_bias and self.qkv_bias == "never":
            return "biases of queries, keys and values"
        if not model.add_qkv_bias and self.qkv_bias == "always":
            return "queries, keys and values without biases"
        return next((text for name, text in _OTHER_LAYERS.items() if getattr(model, name) != ADDED_OPTIONS[name]), None)

    def without_output_bias(self, model: ModelConfig) -> ModelConfig:
        """Return `model` without a bias of the output layer if this family has none, which exports must then check to be zero."""
        has_bias = self.model_type in _OWN_LAYERS and self.model_type != gemma3.MODEL_TYPE
        return model if has_bias else replace(model, output_layer_bias=False)

    def zero_bias_names(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the names of attention output biases that an export of `model` must fill with zeros; often empty."""
        if self.qkv_bias != "optional" or not model.add_qkv_bias:
            return ()
        return tuple(f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(model.num_layers))


FAMILIES = {
    family.model_type: family
    for family in (
        ModelFamily("eurobert", "EuroBertForMaskedLM", "optional", is_encoder=True, poolings=("bos", "mean", "late")),
        ModelFamily("llama", "LlamaForCausalLM", "optional"),
        ModelFamily("mistral", "MistralForCausalLM", "never"),
        ModelFamily("qwen2", "Qwen2ForCausalLM", "always"),
        ModelFamily("qwen3", "Qwen3ForCausalLM", "optional", qk_norms=True),
        ModelFamily(modernbert.MODEL_TYPE, "ModernBertForMaskedLM", "never", is_encoder=True, poolings=("cls", "mean")),
        ModelFamily(modernbert.DECODER_TYPE, "ModernBertDecoderForCausalLM", "never"),
        ModelFamily(neobert.MODEL_TYPE, "NeoBERTLMHead", "never", is_encoder=True),
        ModelFamily(gemma3.MODEL_TYPE, "Gemma3ForCausalLM", "never"),
        # The study's released models: EuroBERT's weights under another name, with custom code that is never run.
        ModelFamily("sl_model", "", "optional", is_encoder=True, export_as="eurobert"),
    )
}
KNOWN_FAMILIES = ", ".join(FAMILIES)
_FIELDS_WITHOUT_SHAPE = (
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)  # no tensor shape would contradict wrong values


def find_family(values: dict[str, Any], file: str) -> ModelFamily:
    """Return the ModelFamily for `model_type` in a config.json's content `values`; InputError, naming `file`, if unknown."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"{file}: field `model_type`: found {shorten_repr(model_type)}, expected one of {KNOWN_FAMILIES}")
    return FAMILIES[model_type]


def parse_hf_config(values: dict[str, Any], file: str) -> Any:
    """Return transformers' config for config.json's `values`, also of old versions; InputError, naming `file`, if wrong.

    Its class follows from the family: code in the folder is never run. Raises InputError, naming `file`, for an invalid config.
    """
    family = find_family(values, file)
    if family.is_encoder and values.get("is_causal"):  # only some of transformers' kernels follow it
        raise InputError(f"{file}: field `is_causal`: found true, expected false: {family.model_type} models are bidirectional")
    if family.export_as:  # defaults of the export family are of another model
        fields = values | (rope if isinstance(rope := values.get("rope_parameters"), dict) else {})
        for name in _FIELDS_WITHOUT_SHAPE:
            if name not in fields:
                raise InputError(f"{file}: field `{name}`: missing, expected the value that the model was trained with")
    return build_hf_config(values, family.export_family.model_type, file)


def to_model_config(config: Any, family: ModelFamily, file: str) -> ModelConfig:
    """Return the ModelConfig of transformers' `config`; InputError, naming file and field, for unsupported features."""
    if own := _OWN_LAYERS.get(family.model_type):
        return _check_shape(own.to_model_config(config, file), file)
    _check_supported_layers(config, file)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    optional_bias = family.qkv_bias == "optional" and bool(config.attention_bias)
    shape = ModelConfig(
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        kv_channels=None if head_dim * heads == config.hidden_size else head_dim,
        add_qkv_bias=family.qkv_bias == "always" or optional_bias,
        qk_layernorm=family.qk_norms,
        **_read_rotary_fields(config.rope_parameters, file),
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
    )
    return _check_shape(shape, file)


def _check_shape(shape: ModelConfig, file: str) -> ModelConfig:
    """Return `shape`; InputError, naming `file`, if it is invalid."""
    try:
        shape.check()
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return shape


def _check_supported_layers(config: Any, file: str) -> None:
    """Raise InputError, naming `file` and field, if `config` has layers that are not supported here."""
    if getattr(config, "mlp_bias", False):
        raise InputError(f"{file}: field `mlp_bias`: found true, expected false")
    if config.hidden_act != "silu":
        raise InputError(f"{file}: field `hidden_act`: found {shorten_repr(config.hidden_act)}, expected silu")
    window, context = getattr(config, "sliding_window", None), config.max_position_embeddings
    for name in ("max_position_embeddings", "rms_norm_eps", "initializer_range"):
        check_positive(getattr(config, name), name, file)
    kinds = getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in kinds or not kinds  # Mistral has no list: all of its layers have the window
    if window is not None and window < context and windowed:
        raise InputError(
            f"{file}: field `sliding_window`: found {window}, expected none or at least the {context} tokens of "
            "`max_position_embeddings`, as attention here has no window; set `max_position_embeddings` to "
            f"{window} there to read no more tokens than the window"
        )
    for kind in kinds:
        if kind != "full_attention" and window is None:  # a window as long as the context has no effect
            raise InputError(f"{file}: field `layer_types`: found {kind!r}, expected full_attention in every layer")


def _read_rotary_fields(rope: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the rotary fields of ModelConfig for `rope_parameters` of a config.json."""
    kind = rope.get("rope_type")
    if kind not in ("default", "llama3", "yarn"):
        raise InputError(f"{file}: field `rope_type`: found {shorten_repr(kind)}, expected default, llama3 or yarn")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{file}: field `partial_rotary_factor`: found {rope['partial_rotary_factor']}, expected 1.0")
    base = {"rotary_base": check_positive(rope.get("rope_theta"), "rope_theta", file)}
    if kind == "default":
        return base
    if kind == "yarn":
        return base | _read_yarn_fields(rope, file)
    for name, expected in _LLAMA3.items():
        if rope.get(name) != expected:
            raise InputError(
                f"{file}: field `{name}`: found {rope.get(name)}, expected {expected} (only the factor is configurable)"
            )
    return base | {"use_rope_scaling": True, "rope_scaling_factor": check_positive(rope.get("factor"), "factor", file)}


def _read_yarn_fields(rope: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the fields of ModelConfig for `rope_parameters` of type yarn; InputError for options without a flag."""
    factor = check_positive(rope.get("factor"), "factor", file)
    context = check_positive(rope.get("original_max_position_embeddings"), "original_max_position_embeddings", file)
    if not context.is_integer():
        raise InputError(f"{file}: field `original_max_position_embeddings`: found {context}, expected a whole number")
    for name, values in _YARN.items():
        if (value := rope.get(name, values[0])) not in values:
            raise InputError(f"{file}: field `{name}`: found {shorten_repr(value)}, expected {values[-1]}, the default of YaRN")
    default, scale = 0.1 * math.log(max(factor, 1)) + 1, rope.get("attention_factor")
    if scale is not None and not (isinstance(scale, int | float) and math.isclose(scale, default, rel_tol=1e-6)):
        raise InputError(f"{file}: field `attention_factor`: found {shorten_repr(scale)}, expected {default:g}, that of YaRN")
    return {"yarn_rotary_scaling_factor": factor, "yarn_original_max_position_embeddings": int(context)}


def native_attention(config: Any, family: ModelFamily) -> Attention:
    """Return the attention that transformers uses for `config`: causal for a decoder unless the config says otherwise."""
    return Attention.BIDIRECTIONAL if family.is_encoder or not is_causal_decoder(config) else Attention.CAUSAL


def infer_objective(config: Any, family: ModelFamily) -> str:
    """Return clm if transformers' attention for `config` is causal, else mntp if `config.prediction_shift` is set, else mlm."""
    if native_attention(config, family) == Attention.CAUSAL:
        return "clm"
    return "mntp" if getattr(config, "prediction_shift", 0) else "mlm"


def able_families(model: ModelConfig, attention: Attention) -> list[str]:
    """Return the names of the families that exports of `model` under `attention` can have."""
    return [name for name, other in FAMILIES.items() if not other.export_as and not other.unsupported_feature(model, attention)]


def build_export_config(
    family: ModelFamily,
    attention: Attention,
    model: ModelConfig,
    *,
    vocab_size: int,
    context: int,
    tokenizer: Any,
    dtype: torch.dtype,
    source: dict[str, Any] | None = None,
) -> Any:
    """Return transformers' config for `model` as `family` under `attention`; InputError, naming others, if unsupported.

    The inverse of `to_model_config`. `vocab_size`: rows of the embedding; `context`: tokens; `tokenizer`: transformers', for
    special token ids; `source`: SOURCE_FIELDS of the model that came in, if any, which are kept unless the tokenizer or the
    family contradicts. Raises InputError that names other families if this one does not support the model.
    """
    if missing := family.unsupported_feature(family.without_output_bias(model), attention):
        able = able_families(model, attention)
        others = f"expected --as {' or '.join(able)}" if able else "no family here has all layers of this model"
        raise InputError(f"--as {family.model_type}: has no {missing}; {others}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family.is_encoder and tokenizer.mask_token_id is None:
        raise InputError(
            f"--as {family.model_type}: found a tokenizer without a mask token, expected --as llama or another decoder"
        )
    pad = tokenizer.pad_token_id
    bos = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    own = _OWN_LAYERS.get(family.model_type)
    values = own.export_fields(model, tokenizer, attention) if own else _llama_fields(family, model)
    values |= dict(
        architectures=[family.architecture],
        vocab_size=vocab_size,
        max_position_embeddings=context,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        pad_token_id=eos if pad is None else pad,
        bos_token_id=bos,
        eos_token_id=eos,
        dtype=dtype,
    )
    if family.is_encoder:
        values |= {"mask_token_id": tokenizer.mask_token_id, "classifier_pooling": "mean"}
    elif attention == Attention.BIDIRECTIONAL:
        values["use_cache"] = False  # keys of a text read both ways are of no use later, and cannot go to ONNX
        if not own:
            values["is_causal"] = False
    source = source or {}
    if source.get("classifier_pooling") in family.poolings and family.is_encoder:
        values["classifier_pooling"] = source["classifier_pooling"]
    for name in _SPECIAL_IDS:
        if name in values and name in source and _is_kept_id(name, source[name], tokenizer, vocab_size):
            values[name] = source[name]
    if family.model_type == modernbert.DECODER_TYPE:  # its class refuses null there
        values |= {name: values["pad_token_id"] for name in modernbert.DECODER_IDS if values[name] is None}
    register_neobert(family.model_type)
    return CONFIG_MAPPING[family.export_family.model_type](**values)


def _is_kept_id(name: str, came: Any, tokenizer: Any, vocab_size: int) -> bool:
    """Return whether an export keeps a source's special token id, or list of EOS ids.

    It does if all ids are in the vocabulary and the tokenizer's token of that role, if any, is among them.
    """
    role = getattr(tokenizer, name)
    if came is None:
        return role is None
    ids = came if isinstance(came, list) and name == "eos_token_id" else [came]
    in_vocabulary = all(type(token) is int and 0 <= token < vocab_size for token in ids)
    return in_vocabulary and (role is None or role in ids)


def describe_changed_fields(config: Any, source: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return a console line for each field of `source` that an export changes.

    `config`: of the export, by `build_export_config`. Fields that the export does not have are skipped.
    """
    lines = []
    for name in SOURCE_FIELDS:
        if name not in source or not hasattr(config, name):
            continue
        came = source[name]
        value = getattr(config, name)
        if value == came:
            continue
        is_role = value == getattr(tokenizer, name, None)
        reason = "as in the tokenizer" if is_role else f"which this {config.model_type} model cannot have"
        lines.append(f"config.json: {name} {json.dumps(value)} instead of the {json.dumps(came)} that came in, {reason}")
    return lines


def _llama_fields(family: ModelFamily, model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that describe the layers of `model` in a family of Llama's layers."""
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    if model.yarn_rotary_scaling_factor is not None:
        context = model.yarn_original_max_position_embeddings
        rope |= {"rope_type": "yarn", "factor": model.yarn_rotary_scaling_factor, "original_max_position_embeddings": context}
    values = {theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()}
    values |= {"head_dim": model.head_dim, "hidden_act": "silu", "rope_parameters": rope}
    if family.qkv_bias == "optional":
        values["attention_bias"] = model.add_qkv_bias
    if family.model_type == "mistral":
        values["sliding_window"] = None
    return values
