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


# EuroBERT and Llama name their weights alike.
LLAMA_LIKE: tuple[Rule, ...] = (
    Plain("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Plain("decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)),
    GroupedQKV(
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        (
            "model.layers.{}.self_attn.q_proj.weight",
            "model.layers.{}.self_attn.k_proj.weight",
            "model.layers.{}.self_attn.v_proj.weight",
        ),
    ),
    Plain("decoder.layers.{}.self_attention.linear_proj.weight", ("model.layers.{}.self_attn.o_proj.weight",)),
    Plain("decoder.layers.{}.pre_mlp_layernorm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    GatedMLP(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ),
    Plain("decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.down_proj.weight",)),
    Plain("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Plain("output_layer.weight", ("lm_head.weight",)),
)
_VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")


def _lines(rules: tuple[Rule, ...], model: ModelConfig) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    """Each rule for each layer it is about, with its names filled in."""
    for rule in rules:
        for layer in range(model.num_layers) if "{}" in rule.core else (0,):
            yield rule, rule.core.format(layer), tuple(name.format(layer) for name in rule.hf)


def core_to_hf(state: dict[str, Tensor], model: ModelConfig, vocab_size: int, rules=LLAMA_LIKE) -> dict[str, Tensor]:
    """Hugging Face's state dict of a whole megatron-core one; rows that pad the vocabulary are left out."""
    out: dict[str, Tensor] = {}
    if not model.untie_embeddings_and_output_weights:
        state = state | {"output_layer.weight": state["embedding.word_embeddings.weight"]}
    for rule, core, names in _lines(rules, model):
        tensor = state[core][:vocab_size] if core in _VOCABULARY_ROWS else state[core]
        out.update(zip(names, rule.to_hf(tensor, model), strict=True))
    return out


def hf_to_core(state: dict[str, Tensor], model: ModelConfig, rules=LLAMA_LIKE) -> dict[str, Tensor]:
    """The way back, without vocabulary padding."""
    return {core: rule.to_core(tuple(state[name] for name in names), model) for rule, core, names in _lines(rules, model)}
