"""Which weights of megatron-core's layers are which of Hugging Face's, and how their shapes differ.

A rule turns one megatron-core tensor into named Hugging Face tensors and back. `{}` in a name stands for the number of the layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaenc.model.config import ModelConfig


class Rule(Protocol):
    """One line of a family's table."""

    core: str
    hf: tuple[str, ...]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        """The Hugging Face tensors, in the order of `hf`, that `tensor` holds."""

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        """The way back."""


@dataclass(frozen=True)
class Plain:
    """The same tensor under another name."""

    core: str
    hf: tuple[str]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        return (tensor,)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class GroupedQKV:
    """linear_qkv holds, for each key/value group, the rows of its query heads, then of its key, then of its value."""

    core: str
    hf: tuple[str, str, str]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        heads = model.num_attention_heads // model.num_query_groups
        rows = tensor.view(model.num_query_groups, (heads + 2) * model.head_dim, *tensor.shape[1:])
        parts = rows.split([heads * model.head_dim, model.head_dim, model.head_dim], dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        groups = [tensor.unflatten(0, (model.num_query_groups, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class GatedMLP:
    """linear_fc1 holds the rows of the gate, then those of the up projection."""

    core: str
    hf: tuple[str, str]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in tensor.chunk(2))

    def to_core(self, tensors: tuple[Tensor, ...], model: ModelConfig) -> Tensor:
        return torch.cat(tensors)


def _qkv(kind: str) -> GroupedQKV:
    names = tuple(f"model.layers.{{}}.self_attn.{name}_proj.{kind}" for name in "qkv")
    return GroupedQKV(f"decoder.layers.{{}}.self_attention.linear_qkv.{kind}", names)


# EuroBERT, Llama, Mistral and Qwen name their weights alike.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = Plain("embedding.word_embeddings.weight", (EMBEDDING,))
_LAYER: tuple[Rule, ...] = (
    Plain("decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)),
    _qkv("weight"),
    Plain("decoder.layers.{}.self_attention.linear_proj.weight", ("model.layers.{}.self_attn.o_proj.weight",)),
    Plain("decoder.layers.{}.pre_mlp_layernorm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    GatedMLP(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ),
    Plain("decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.down_proj.weight",)),
)
_QKV_BIAS: tuple[Rule, ...] = (_qkv("bias"),)
_HEAD_NORMS: tuple[Rule, ...] = tuple(
    Plain(f"decoder.layers.{{}}.self_attention.{name}_layernorm.weight", (f"model.layers.{{}}.self_attn.{name}_norm.weight",))
    for name in "qk"
)
_NORM = Plain("decoder.final_layernorm.weight", ("model.norm.weight",))
_HEAD = Plain("output_layer.weight", (HEAD,))
VOCABULARY_ROWS = (_EMBEDDING.core, _HEAD.core)


def rules(model: ModelConfig) -> tuple[Rule, ...]:
    """The table of a model: what it has, in the order in which data meets it. A tied output layer is not there twice."""
    layer = (*_LAYER, *(_QKV_BIAS if model.add_qkv_bias else ()), *(_HEAD_NORMS if model.qk_layernorm else ()))
    return (_EMBEDDING, *layer, _NORM, *((_HEAD,) if model.untie_embeddings_and_output_weights else ()))


def lines(model: ModelConfig) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    """Each rule for each layer it is about, with its names filled in."""
    for rule in rules(model):
        for layer in range(model.num_layers) if "{}" in rule.core else (0,):
            yield rule, rule.core.format(layer), tuple(name.format(layer) for name in rule.hf)
