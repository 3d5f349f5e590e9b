"""Mapping between megatron-core's and Hugging Face's parameter names and shapes.

A mapping converts one megatron-core tensor to Hugging Face tensors and back; `{}` in a name is the
layer number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaenc.convert.families import modernbert, neobert
from megaenc.model.config import ModelConfig


@dataclass(frozen=True)
class ParamMapping:
    """Mapping of one megatron-core tensor to Hugging Face tensors.

    In this class only the name differs; subclasses also split or reorder rows. Tensors are those of
    the whole model, as with one tensor-parallel rank.

    Args:
        core: Name of the megatron-core tensor, with `{}` for the layer index, from 0.
        hf: Names of the Hugging Face tensors, with `{}` for the layer index, from 0.
        first_layer: Index of the first layer that has the tensor.
    """

    core: str
    hf: tuple[str, ...]
    first_layer: int = 0

    @property
    def is_per_layer(self) -> bool:
        """Return whether each layer from `first_layer` on has the tensor."""
        return "{}" in self.core

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors of a megatron-core tensor, in the order of `hf`.

        They may share memory with `tensor`. `model` is read for the shape of the heads.
        """
        return (tensor,)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """Return the megatron-core tensor of the Hugging Face `tensors`.

        They are in the order of `hf`. It may share memory with them. It is the inverse of `to_hf`.
        """
        return tensors[0]


class QKVMapping(ParamMapping):
    """ParamMapping of linear_qkv, its weight or bias, to query, key and value.

    linear_qkv interleaves their rows by group. With three names in `hf` each has a matrix; with
    one, this matrix has the rows of query, key and value one after another.
    """

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """Return query, key and value of linear_qkv, `tensor`, as contiguous tensors.

        With one name in `hf` they are one matrix, with the rows of query, key and value in turn.
        """
        heads = model.num_attention_heads // model.num_query_groups
        rows = tensor.view(model.num_query_groups, (heads + 2) * model.head_dim, *tensor.shape[1:])
        parts = rows.split([heads * model.head_dim, model.head_dim, model.head_dim], dim=1)
        matrices = tuple(part.flatten(0, 1).contiguous() for part in parts)
        return (torch.cat(matrices),) if len(self.hf) == 1 else matrices

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """Return linear_qkv: the rows of query, key and value, interleaved by group.

        `tensors` are as `to_hf` returns them.
        """
        if len(self.hf) == 1:
            tensors = tensors[0].split(
                [model.query_size, *[model.num_query_groups * model.head_dim] * 2]
            )
        groups = [tensor.unflatten(0, (model.num_query_groups, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)


class NeoBERTQKVMapping(ParamMapping):
    """ParamMapping of linear_qkv to NeoBERT's matrix with the rows in another order.

    There are no query groups; both matrices have query, key and value of each head together. Rotary
    positions rotate neighbouring rows of a query or key in NeoBERT, and rows of its two halves in
    megatron-core.
    """

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """Return NeoBERT's matrix, the only tensor of the tuple, from linear_qkv.

        In queries and keys, the rows of both halves alternate.
        """
        return (self._reorder(tensor, model, (2, -1)),)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """Return linear_qkv from NeoBERT's matrix, the only one of `tensors`.

        In queries and keys, the odd rows follow the even ones.
        """
        return self._reorder(tensors[0], model, (-1, 2))

    def _reorder(self, tensor: Tensor, model: ModelConfig, split: tuple[int, int]) -> Tensor:
        """Split the rows of each query and key in two dimensions and transpose these."""
        heads = tensor.unflatten(0, (model.num_attention_heads, 3, -1))
        rotated = heads[:, :2].unflatten(2, split).transpose(2, 3).flatten(2, 3)
        return torch.cat([rotated, heads[:, 2:]], dim=1).flatten(0, 2)


class GatedMLPMapping(ParamMapping):
    """ParamMapping of linear_fc1 to the matrices of the gate and of the up projection."""

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """Return (gate, up projection), the halves of linear_fc1, as contiguous tensors."""
        return tuple(part.contiguous() for part in tensor.chunk(2))

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """Return linear_fc1 of (gate, up projection): their rows one after another."""
        return torch.cat(tensors)


def _qkv_mapping(kind: str) -> QKVMapping:
    """Return the mapping of linear_qkv's "weight" or "bias"."""
    names = tuple(f"model.layers.{{}}.self_attn.{name}_proj.{kind}" for name in "qkv")
    return QKVMapping(f"decoder.layers.{{}}.self_attention.linear_qkv.{kind}", names)


# EuroBERT, Llama, Mistral and Qwen name their weights alike, and Gemma 3 all but its norms.
_EMBEDDING = ParamMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
_OUTPUT_LAYER = ParamMapping("output_layer.weight", ("lm_head.weight",))
_LLAMA_ATTENTION: tuple[ParamMapping, ...] = (
    ParamMapping(
        "decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)
    ),
    _qkv_mapping("weight"),
    ParamMapping(
        "decoder.layers.{}.self_attention.linear_proj.weight",
        ("model.layers.{}.self_attn.o_proj.weight",),
    ),
)
_LLAMA_MLP_NORM = ParamMapping(
    "decoder.layers.{}.pre_mlp_layernorm.weight",
    ("model.layers.{}.post_attention_layernorm.weight",),
)
_LLAMA_MLP: tuple[ParamMapping, ...] = (
    GatedMLPMapping(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ),
    ParamMapping(
        "decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.down_proj.weight",)
    ),
)
_QKV_BIAS = _qkv_mapping("bias")
_QK_NORMS: tuple[ParamMapping, ...] = tuple(
    ParamMapping(
        f"decoder.layers.{{}}.self_attention.{name}_layernorm.weight",
        (f"model.layers.{{}}.self_attn.{name}_norm.weight",),
    )
    for name in "qk"
)
# Gemma 3's norms of a layer, two of which have Llama's names with another meaning.
_GEMMA3_NORMS: tuple[ParamMapping, ...] = tuple(
    ParamMapping(
        f"decoder.layers.{{}}.{core}.weight", (f"model.layers.{{}}.{hf}_layernorm.weight",)
    )
    for core, hf in (
        ("self_attn_bda.norm", "post_attention"),
        ("pre_mlp_layernorm", "pre_feedforward"),
        ("mlp_bda.norm", "post_feedforward"),
    )
)
_FINAL_NORM = ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",))

# ModernBERT's names. Its joint gate and up projection, Wi, has the rows of linear_fc1 in the same
# order.
_MODERNBERT_EMBEDDING = ParamMapping(_EMBEDDING.core, ("model.embeddings.tok_embeddings.weight",))
_MODERNBERT_OUTPUT_LAYER = ParamMapping(_OUTPUT_LAYER.core, ("decoder.weight",))
_MODERNBERT_QKV = QKVMapping(
    "decoder.layers.{}.self_attention.linear_qkv.weight", ("model.layers.{}.attn.Wqkv.weight",)
)
# Its decoder has separate queries, keys and values.
_MODERNBERT_DECODER_QKV = QKVMapping(
    _MODERNBERT_QKV.core, tuple(f"model.layers.{{}}.attn.{name}_proj.weight" for name in "qkv")
)
_MODERNBERT_LAYER: tuple[ParamMapping, ...] = (
    ParamMapping(
        "decoder.layers.{}.self_attention.linear_proj.weight", ("model.layers.{}.attn.Wo.weight",)
    ),
    ParamMapping("decoder.layers.{}.mlp.linear_fc1.weight", ("model.layers.{}.mlp.Wi.weight",)),
    ParamMapping("decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.Wo.weight",)),
)
_OUTPUT_BIAS = ParamMapping("output_layer.bias", ("decoder.bias",))
# NeoBERT's names. Its joint gate and up projection, w12, has the rows of linear_fc1 in the same
# order.
_NEOBERT: tuple[ParamMapping, ...] = (
    ParamMapping(_EMBEDDING.core, ("model.encoder.weight",)),
    ParamMapping(
        "decoder.layers.{}.input_layernorm.weight",
        ("model.transformer_encoder.{}.attention_norm.weight",),
    ),
    NeoBERTQKVMapping(
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        ("model.transformer_encoder.{}.qkv.weight",),
    ),
    ParamMapping(
        "decoder.layers.{}.self_attention.linear_proj.weight",
        ("model.transformer_encoder.{}.wo.weight",),
    ),
    ParamMapping(
        "decoder.layers.{}.pre_mlp_layernorm.weight",
        ("model.transformer_encoder.{}.ffn_norm.weight",),
    ),
    ParamMapping(
        "decoder.layers.{}.mlp.linear_fc1.weight", ("model.transformer_encoder.{}.ffn.w12.weight",)
    ),
    ParamMapping(
        "decoder.layers.{}.mlp.linear_fc2.weight", ("model.transformer_encoder.{}.ffn.w3.weight",)
    ),
    ParamMapping("decoder.final_layernorm.weight", ("model.layer_norm.weight",)),
    ParamMapping(_OUTPUT_LAYER.core, ("decoder.weight",)),
    _OUTPUT_BIAS,
)
VOCABULARY_ROWS = (_EMBEDDING.core, _OUTPUT_LAYER.core, _OUTPUT_BIAS.core)


def _modernbert_mappings(model: ModelConfig, is_decoder: bool) -> tuple[ParamMapping, ...]:
    """Return the mappings of a model with the names of ModernBERT or its decoder."""
    head = "lm_head" if is_decoder else "head"
    norms = []
    # The first layer has no norm before its attention.
    for core, hf, first_layer in (
        ("embedding_norm", "model.embeddings.norm", 0),
        ("decoder.layers.{}.input_layernorm", "model.layers.{}.attn_norm", 1),
        ("decoder.layers.{}.pre_mlp_layernorm", "model.layers.{}.mlp_norm", 0),
        ("decoder.final_layernorm", "model.final_norm", 0),
        ("prediction_head.norm", f"{head}.norm", 0),
    ):
        for kind in ("weight", "bias") if model.norm_bias else ("weight",):
            norms.append(ParamMapping(f"{core}.{kind}", (f"{hf}.{kind}",), first_layer))
    return (
        _MODERNBERT_EMBEDDING,
        _MODERNBERT_DECODER_QKV if is_decoder else _MODERNBERT_QKV,
        *_MODERNBERT_LAYER,
        *norms,
        ParamMapping("prediction_head.dense.weight", (f"{head}.dense.weight",)),
        _MODERNBERT_OUTPUT_LAYER,
        *([_OUTPUT_BIAS] if model.output_layer_bias else []),
    )


def _model_mappings(model: ModelConfig, family: str | None) -> tuple[ParamMapping, ...]:
    """Return the mappings of `model`'s weights, including the output layer's matrix.

    Names of weights in layers have `{}`.
    """
    if model.embedding_norm:
        return _modernbert_mappings(model, is_decoder=family == modernbert.DECODER_TYPE)
    if family == neobert.MODEL_TYPE:
        return _NEOBERT
    layer = (*_LLAMA_ATTENTION, _LLAMA_MLP_NORM, *_LLAMA_MLP)
    if model.post_norms:
        layer = (*_LLAMA_ATTENTION, *_LLAMA_MLP, *_GEMMA3_NORMS)
    return (
        _EMBEDDING,
        *layer,
        *([_QKV_BIAS] if model.add_qkv_bias else []),
        *(_QK_NORMS if model.qk_layernorm else []),
        _FINAL_NORM,
        _OUTPUT_LAYER,
        *([_OUTPUT_BIAS] if model.output_layer_bias else []),
    )


def vocabulary_names(model: ModelConfig, family: str) -> tuple[str, str]:
    """Return the Hugging Face names of the embedding and of the output layer's matrix.

    A tied model has both names too.

    Args:
        family: Hugging Face `model_type` whose names they are; of an unknown one, Llama's names.
    """
    names = {mapping.core: mapping.hf[0] for mapping in _model_mappings(model, family)}
    return names[_EMBEDDING.core], names[_OUTPUT_LAYER.core]


def iter_mappings(
    model: ModelConfig, family: str | None = None
) -> Iterator[tuple[ParamMapping, str, tuple[str, ...]]]:
    """Yield the mapping and the names of each weight of `model`.

    A tied output layer is omitted. Layers are numbered from 0; a kind of weight is yielded for all
    layers before the next kind.

    Args:
        family: Hugging Face `model_type` whose names they are; None or unknown: one that has all
            weights of the model.

    Yields:
        (mapping, megatron-core name, Hugging Face names), all with the layer index.
    """
    for mapping in _model_mappings(model, family):
        if mapping.core == _OUTPUT_LAYER.core and not model.untie_embeddings_and_output_weights:
            continue
        layers = range(mapping.first_layer, model.num_layers) if mapping.is_per_layer else (0,)
        for layer_index in layers:
            yield (
                mapping,
                mapping.core.format(layer_index),
                tuple(name.format(layer_index) for name in mapping.hf),
            )


def drop_padding_rows(core: str, tensor: Tensor, vocab_size: int) -> Tensor:
    """Return a weight without the rows that pad the vocabulary, if it has any.

    It shares memory with `tensor`.

    Args:
        core: Megatron-core name of the weight.
    """
    return tensor[:vocab_size] if core in VOCABULARY_ROWS else tensor


def iter_hf_tensors(
    parameters: Mapping[str, Tensor], model: ModelConfig, vocab_size: int, family: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each weight with Hugging Face's names.

    The order is that of `iter_mappings`; a tied output layer is omitted. Tensors may share memory
    with `parameters`.

    Args:
        parameters: Megatron-core's weights of the whole model by name, as with one rank.
        vocab_size: Rows of the vocabulary that are kept, without padding.
        family: Hugging Face `model_type` whose names they are; None: see `iter_mappings`.
    """
    for mapping, core, names in iter_mappings(model, family):
        tensor = drop_padding_rows(core, parameters[core], vocab_size)
        yield from zip(names, mapping.to_hf(tensor, model), strict=True)
