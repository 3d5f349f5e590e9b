"""Which weights of megatron-core's layers are which of Hugging Face's, and how their shapes differ.

A rule turns one megatron-core tensor into named Hugging Face tensors and back. `{}` in a name stands for the number of the layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaenc.model.config import ModelConfig


@dataclass(frozen=True)
class ParamMapping:
    """One line of the table: the same tensor under another name."""

    core: str
    hf: tuple[str, ...]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors, in the order of `hf`, that `tensor` holds."""
        return (tensor,)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """Return the way back."""
        return tensors[0]


class QKVMapping(ParamMapping):
    """linear_qkv holds, for each key/value group, the rows of its query heads, then of its key, then of its value."""

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        heads = model.num_attention_heads // model.num_query_groups
        rows = tensor.view(model.num_query_groups, (heads + 2) * model.head_dim, *tensor.shape[1:])
        parts = rows.split([heads * model.head_dim, model.head_dim, model.head_dim], dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        groups = [tensor.unflatten(0, (model.num_query_groups, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)


class GatedMLPMapping(ParamMapping):
    """linear_fc1 holds the rows of the gate, then those of the up projection."""

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in tensor.chunk(2))

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        return torch.cat(tensors)


def _qkv_mapping(kind: str) -> QKVMapping:
    names = tuple(f"model.layers.{{}}.self_attn.{name}_proj.{kind}" for name in "qkv")
    return QKVMapping(f"decoder.layers.{{}}.self_attention.linear_qkv.{kind}", names)


# EuroBERT, Llama, Mistral and Qwen name their weights alike.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = ParamMapping("embedding.word_embeddings.weight", (EMBEDDING,))
_LAYER: tuple[ParamMapping, ...] = (
    ParamMapping("decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)),
    _qkv_mapping("weight"),
    ParamMapping("decoder.layers.{}.self_attention.linear_proj.weight", ("model.layers.{}.self_attn.o_proj.weight",)),
    ParamMapping("decoder.layers.{}.pre_mlp_layernorm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    GatedMLPMapping(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ),
    ParamMapping("decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.down_proj.weight",)),
)
_QKV_BIAS: tuple[ParamMapping, ...] = (_qkv_mapping("bias"),)
_HEAD_NORMS: tuple[ParamMapping, ...] = tuple(
    ParamMapping(
        f"decoder.layers.{{}}.self_attention.{name}_layernorm.weight", (f"model.layers.{{}}.self_attn.{name}_norm.weight",)
    )
    for name in "qk"
)
_NORM = ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",))
_HEAD = ParamMapping("output_layer.weight", (HEAD,))
VOCABULARY_ROWS = (_EMBEDDING.core, _HEAD.core)


def iter_mappings(model: ModelConfig) -> Iterator[tuple[ParamMapping, str, tuple[str, ...]]]:
    """Yield each rule of a model for each layer, with its names filled in. A tied output layer is not there twice."""
    layer = (*_LAYER, *(_QKV_BIAS if model.add_qkv_bias else ()), *(_HEAD_NORMS if model.qk_layernorm else ()))
    for rule in (_EMBEDDING, *layer, _NORM, *((_HEAD,) if model.untie_embeddings_and_output_weights else ())):
        for number in range(model.num_layers) if "{}" in rule.core else (0,):
            yield rule, rule.core.format(number), tuple(name.format(number) for name in rule.hf)


def iter_hf_tensors(parameters: Mapping[str, Tensor], model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of megatron-core's `parameters` under Hugging Face's names, without the rows that pad the vocabulary."""
    for rule, core, names in iter_mappings(model):
        tensor = parameters[core][:vocab_size] if core in VOCABULARY_ROWS else parameters[core]
        yield from zip(names, rule.to_hf(tensor, model), strict=True)
