"""Supported families of Hugging Face models, and conversion of their config.json.

A config.json is converted to `ModelConfig` and back. The layers and fields of the families are in
`megaenc.convert.families`, the names of their weights in `megaenc.convert.param_mapping`.
"""

import json
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, Literal

import torch

from megaenc.convert.families import gemma3, llama, modernbert, neobert
from megaenc.errors import InputError
from megaenc.hf.checkpoint import shorten_repr
from megaenc.hf.model import build_hf_config, is_causal_decoder, register_neobert
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention

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


@dataclass(frozen=True)
class ModelFamily:
    """Family of Hugging Face models with one `model_type`, its key in FAMILIES.

    layers: module of megaenc.convert.families, with options of the layers and their fields in
    config.json. architecture: name of transformers' class with output layer; for NeoBERT, of the
    Hub's; empty with `export_as`. qkv_bias: whether queries, keys and values have biases: never,
    always or optional (by `attention_bias`). qk_norms: whether each head normalizes queries and
    keys. is_encoder: whether attention is bidirectional by default. export_as: `model_type` of the
    family to export as, if transformers does not know this one; else empty. poolings: values of an
    encoder's `classifier_pooling`.
    """

    model_type: str
    layers: ModuleType
    architecture: str
    # With an optional bias (`attention_bias`), attention's output has one too.
    qkv_bias: Literal["never", "always", "optional"]
    qk_norms: bool = False
    # A decoder is bidirectional too if its config has `is_causal: false` or
    # `use_bidirectional_attention: true`.
    is_encoder: bool = False
    export_as: str = ""
    poolings: tuple[str, ...] = ("mean",)

    @property
    def export_family(self) -> "ModelFamily":
        """Return the family as which models of this one are exported.

        It is the family `export_as` if that is set, else this one.
        """
        return FAMILIES[self.export_as or self.model_type]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attentions that transformers' class of the family can have.

        Encoders have only the bidirectional one, ModernBERT's decoder only the causal one, other
        decoders (bidirectional, causal).
        """
        if self.model_type == modernbert.DECODER_TYPE:
            return (Attention.CAUSAL,)
        return (
            (Attention.BIDIRECTIONAL,)
            if self.is_encoder
            else (Attention.BIDIRECTIONAL, Attention.CAUSAL)
        )

    def unsupported_feature(self, model: ModelConfig, attention: Attention) -> str | None:
        """Return, as text, the first feature of `model` that this family lacks.

        The text follows "has no": a noun phrase, or a flag with its value. None if the family
        supports all features of `model` under `attention`.
        """
        if attention not in self.attentions:
            return f"{attention} attention"
        if model.qk_layernorm != self.qk_norms:
            return (
                "norms of queries and keys"
                if model.qk_layernorm
                else "queries and keys without norms"
            )
        if model.add_qkv_bias and self.qkv_bias == "never":
            return "biases of queries, keys and values"
        if not model.add_qkv_bias and self.qkv_bias == "always":
            return "queries, keys and values without biases"
        options = self.options
        for option in fields(ModelConfig):
            value, text = self.layers.FIXED.get(
                option.name, (option.default, option.metadata.get("feature"))
            )
            actual = getattr(model, option.name)
            if actual != value and option.name not in options:
                return text or f"--{option.name.replace('_', '-')} {actual}"
        return self.layers.find_unsupported_shape(model)

    @property
    def options(self) -> set[str]:
        """Return the names of the fields of ModelConfig that this family does not fix.

        Fields without an effect on the weights are among them. A family may restrict values and
        their combinations further (`find_unsupported_shape` of its module).
        """
        free = {
            option.name for option in fields(ModelConfig) if option.metadata.get("weights") == "any"
        }
        return {
            *free,
            *self.layers.FIELDS.values(),
            *self.layers.OPTIONS,
            "add_qkv_bias",
            "qk_layernorm",
            "vocab_size",
        }

    def without_output_bias(self, model: ModelConfig) -> ModelConfig:
        """Return `model` without a bias of the output layer if this family has none.

        It is a copy, or `model` itself if the family has one. Exports must then check that the bias
        is zero.
        """
        has_bias = "output_layer_bias" in {*self.layers.FIXED, *self.options}
        return model if has_bias else replace(model, output_layer_bias=False)

    def zero_bias_names(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the Hugging Face names of attention output biases that must be zero.

        There is one for each layer, in order, if the family's bias is optional and `model` has
        biases of queries, keys and values; else none. Exports write zeros, and imports accept only
        zeros.
        """
        if self.qkv_bias != "optional" or not model.add_qkv_bias:
            return ()
        return tuple(
            f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(model.num_layers)
        )


FAMILIES = {
    family.model_type: family
    for family in (
        ModelFamily(
            "eurobert",
            llama,
            "EuroBertForMaskedLM",
            "optional",
            is_encoder=True,
            poolings=("bos", "mean", "late"),
        ),
        ModelFamily("llama", llama, "LlamaForCausalLM", "optional"),
        ModelFamily("mistral", llama, "MistralForCausalLM", "never"),
        ModelFamily("qwen2", llama, "Qwen2ForCausalLM", "always"),
        ModelFamily("qwen3", llama, "Qwen3ForCausalLM", "optional", qk_norms=True),
        ModelFamily(
            modernbert.MODEL_TYPE,
            modernbert,
            "ModernBertForMaskedLM",
            "never",
            is_encoder=True,
            poolings=("cls", "mean"),
        ),
        ModelFamily(modernbert.DECODER_TYPE, modernbert, "ModernBertDecoderForCausalLM", "never"),
        ModelFamily(neobert.MODEL_TYPE, neobert, "NeoBERTLMHead", "never", is_encoder=True),
        ModelFamily(gemma3.MODEL_TYPE, gemma3, "Gemma3ForCausalLM", "never", qk_norms=True),
        # The study's released models: EuroBERT's weights under another name, with custom code that
        # is never run.
        ModelFamily("sl_model", llama, "", "optional", is_encoder=True, export_as="eurobert"),
    )
}
KNOWN_FAMILIES = ", ".join(FAMILIES)
# No tensor shape would contradict wrong values of these fields.
_FIELDS_WITHOUT_SHAPE = (
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)


def find_family(values: dict[str, Any], file: str) -> ModelFamily:
    """Return the family of a config.json.

    Args:
        values: Content of the config.json.
        file: Its path, with which errors begin.

    Raises:
        InputError: Its `model_type` is unknown.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"{file}: field `model_type`: found {shorten_repr(model_type)}, "
            f"expected one of {KNOWN_FAMILIES}"
        )
    return FAMILIES[model_type]


def parse_hf_config(values: dict[str, Any], file: str) -> Any:
    """Return transformers' config object for the content of a config.json.

    Files of old versions of transformers are read too. The class is that of the family's
    `export_family`, so that `model_type` can differ from the file's: for `sl_model` it is
    EuroBERT's. Code in the directory is never run.

    Args:
        values: Content of the config.json, which is not changed.
        file: Its path, with which errors begin.

    Raises:
        InputError: The family is unknown, a field is missing or invalid, or an encoder is causal.
    """
    family = find_family(values, file)
    # Only some of transformers' kernels follow it.
    if family.is_encoder and values.get("is_causal"):
        raise InputError(
            f"{file}: field `is_causal`: found true, expected false: "
            f"{family.model_type} models are bidirectional"
        )
    if family.export_as:  # defaults of the export family are of another model
        rope = values.get("rope_parameters")
        fields = values | (rope if isinstance(rope, dict) else {})
        for name in _FIELDS_WITHOUT_SHAPE:
            if name not in fields:
                raise InputError(
                    f"{file}: field `{name}`: missing, expected the value that the model was "
                    "trained with"
                )
    return build_hf_config(values, family.export_family.model_type, file)


def to_model_config(config: Any, family: ModelFamily, file: str) -> ModelConfig:
    """Convert transformers' config object to a ModelConfig.

    Its `vocab_size` stays None.

    Args:
        config: Config object by `parse_hf_config`.
        family: Its family, by `find_family`.
        file: Path of the config.json, with which errors begin.

    Raises:
        InputError: A field is invalid or asks for an unsupported feature; the message names it.
    """
    layers = family.layers
    options = layers.read_fields(config, file)
    options |= {name: value for name, (value, _) in layers.FIXED.items()}
    options |= {ours: getattr(config, theirs) for theirs, ours in layers.FIELDS.items()}
    model = ModelConfig(
        **options,
        add_qkv_bias=family.qkv_bias == "always"
        or (family.qkv_bias == "optional" and bool(config.attention_bias)),
        qk_layernorm=family.qk_norms,
    )
    try:
        model.check()
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return model


def native_attention(config: Any, family: ModelFamily) -> Attention:
    """Return the attention that transformers uses for a config object of `family`.

    Encoders are bidirectional, decoders causal unless the config says otherwise.
    """
    return (
        Attention.BIDIRECTIONAL
        if family.is_encoder or not is_causal_decoder(config)
        else Attention.CAUSAL
    )


def infer_objective(config: Any, family: ModelFamily) -> str:
    """Return the objective that fits a Hugging Face model: clm, mntp or mlm.

    It is clm if transformers' attention is causal, else mntp if `config.prediction_shift` is set
    (not 0), else mlm. `config` is transformers' config object.
    """
    if native_attention(config, family) == Attention.CAUSAL:
        return "clm"
    return "mntp" if getattr(config, "prediction_shift", 0) else "mlm"


def able_families(model: ModelConfig, attention: Attention) -> list[str]:
    """Return the families, by `model_type`, as which `model` can be exported.

    They are in the order of FAMILIES, without those that are exported as another (`export_as`). The
    list is empty if none has all features of `model` under `attention`.
    """
    return [
        name
        for name, family in FAMILIES.items()
        if not family.export_as and not family.unsupported_feature(model, attention)
    ]


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
    """Return transformers' config of an export, the inverse of `to_model_config`.

    `family` has no `export_as`, and the config no `prediction_shift`. A bias of the output layer is
    accepted even if the family has none (`without_output_bias`). InputErrors are any other feature
    that the family lacks (they name other families), and for encoders no mask token in `tokenizer`.

    Args:
        vocab_size: Rows of the embedding, without padding for tensor parallelism.
        context: Context length in tokens.
        tokenizer: Transformers' tokenizer, for the special token ids.
        dtype: Dtype of the weights, which the config names.
        source: SOURCE_FIELDS of a converted model, kept unless tokenizer or family contradict.
    """
    if missing := family.unsupported_feature(family.without_output_bias(model), attention):
        able = able_families(model, attention)
        alternatives = (
            f"expected --as {' or '.join(able)}"
            if able
            else "no family here has all layers of this model"
        )
        raise InputError(f"--as {family.model_type}: has no {missing}; {alternatives}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family.is_encoder and tokenizer.mask_token_id is None:
        raise InputError(
            f"--as {family.model_type}: found a tokenizer without a mask token, "
            "expected --as llama or another decoder"
        )
    pad = tokenizer.pad_token_id
    bos = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    layers = family.layers
    values = {theirs: getattr(model, ours) for theirs, ours in layers.FIELDS.items()}
    values |= layers.export_fields(model, tokenizer, attention)
    if family.qkv_bias == "optional":
        values["attention_bias"] = model.add_qkv_bias
    if family.model_type == "mistral":
        values["sliding_window"] = None
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
        # Keys of a text read both ways are of no use later, and cannot go to ONNX.
        values["use_cache"] = False
        if layers is llama:
            values["is_causal"] = False
    source = source or {}
    if source.get("classifier_pooling") in family.poolings and family.is_encoder:
        values["classifier_pooling"] = source["classifier_pooling"]
    for name in _SPECIAL_IDS:
        if (
            name in values
            and name in source
            and _is_kept_id(name, source[name], tokenizer, vocab_size)
        ):
            values[name] = source[name]
    if family.model_type == modernbert.DECODER_TYPE:  # its class refuses null there
        values |= {
            name: values["pad_token_id"] for name in modernbert.DECODER_IDS if values[name] is None
        }
    register_neobert(family.model_type)
    return CONFIG_MAPPING[family.export_family.model_type](**values)


def _is_kept_id(name: str, source_value: Any, tokenizer: Any, vocab_size: int) -> bool:
    """Return whether an export keeps a source's special token id, or list of EOS ids.

    All ids must be in the vocabulary, and the tokenizer's token of that role, if any, among them.
    """
    role = getattr(tokenizer, name)
    if source_value is None:
        return role is None
    ids = (
        source_value
        if isinstance(source_value, list) and name == "eos_token_id"
        else [source_value]
    )
    in_vocabulary = all(type(token) is int and 0 <= token < vocab_size for token in ids)
    return in_vocabulary and (role is None or role in ids)


def describe_changed_fields(config: Any, source: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return a console line for each field of `source` that an export changes.

    Nothing is printed. Fields that the export does not have are skipped.

    Args:
        config: Config of the export, by `build_export_config`.
        source: SOURCE_FIELDS of the model that was converted.
        tokenizer: Tokenizer of the export, for the reason of a change.
    """
    lines = []
    for name in SOURCE_FIELDS:
        if name not in source or not hasattr(config, name):
            continue
        source_value = source[name]
        value = getattr(config, name)
        if value == source_value:
            continue
        is_role = value == getattr(tokenizer, name, None)
        reason = (
            "as in the tokenizer"
            if is_role
            else f"which this {config.model_type} model cannot have"
        )
        lines.append(
            f"config.json: {name} {json.dumps(value)} instead of the {json.dumps(source_value)} "
            f"that came in, {reason}"
        )
    return lines
