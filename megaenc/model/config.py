"""Model shape, presets, and parameter and FLOP counts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megaenc.console import truncate_text
from megaenc.errors import InputError


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a Llama-like transformer (RMSNorm, SwiGLU, rotary positions, grouped-query attention)."""

    num_layers: int = 4
    """transformer layers"""
    hidden_size: int = 256
    """width of the residual stream"""
    ffn_hidden_size: int = 768
    """width inside the gated MLP"""
    num_attention_heads: int = 4
    """query heads"""
    num_query_groups: int = 2
    """key/value heads"""
    kv_channels: int | None = None
    """width of an attention head; --hidden-size / --num-attention-heads unless given"""
    add_qkv_bias: bool = False
    """add a bias to queries, keys and values, as Qwen2 does"""
    qk_layernorm: bool = False
    """normalize queries and keys by RMSNorm in each head, as Qwen3 does"""
    rotary_base: float = 10000.0
    """base period of the rotary positions"""
    use_rope_scaling: bool = False
    """scale the low frequencies of the rotary positions, as Llama 3.1 and later do (original context: 8,192 tokens)"""
    rope_scaling_factor: float = 8.0
    """factor of --use-rope-scaling; Llama 3.1 has 8, Llama 3.2 has 32"""
    norm_epsilon: float = 1e-5
    """epsilon of RMSNorm"""
    init_method_std: float = 0.02
    """standard deviation of the initial weights, without depth scaling"""
    untie_embeddings_and_output_weights: bool = True
    """give the output layer its own matrix, as in the study; otherwise it shares the embedding's"""
    vocab_size: int | None = None
    """rows of the embedding; the tokenizer's vocabulary size unless given (converted models may have spare rows)"""
    make_vocab_size_divisible_by: int = 128
    """pad each tensor-parallel rank's share of the vocabulary to a multiple of this; exports omit the padding"""

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head: `kv_channels`, or the hidden size divided by the number of heads."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Return the total width of all query heads, which is also the width of the attention output."""
        return self.num_attention_heads * self.head_dim

    def parameter_count(self, vocab_size: int, *, lm_head: bool = True) -> int:
        """Return the number of parameters with `vocab_size` embedding rows; `lm_head`: include an untied output matrix."""
        hidden = self.hidden_size
        vectors = 2 * hidden + self.add_qkv_bias * self._qkv_size + self.qk_layernorm * 2 * self.head_dim
        matrices = 2 if lm_head and self.untie_embeddings_and_output_weights else 1
        return self.num_layers * (self._layer_matrices + vectors) + hidden + matrices * vocab_size * hidden

    @property
    def _qkv_size(self) -> int:
        """Return the total width of queries, keys and values."""
        return self.query_size + 2 * self.num_query_groups * self.head_dim

    @property
    def _layer_matrices(self) -> int:
        """Return the number of weights in the matrices of one layer."""
        return self.hidden_size * (self._qkv_size + self.query_size + 3 * self.ffn_hidden_size)

    def linear_shapes(self, tensor_parallel: int) -> dict[str, tuple[int, int]]:
        """Return one of `tensor_parallel` ranks' (output, input) widths of a layer's four matrices, by name."""
        return {
            "linear_qkv": (self._qkv_size // tensor_parallel, self.hidden_size),
            "linear_proj": (self.hidden_size, self.query_size // tensor_parallel),
            "linear_fc1": (2 * self.ffn_hidden_size // tensor_parallel, self.hidden_size),
            "linear_fc2": (self.hidden_size, self.ffn_hidden_size // tensor_parallel),
        }

    def layer_flops_per_token(self) -> int:
        """Return the forward and backward FLOPs of all layers' matrix products for one token, 6 per weight; no attention."""
        return 6 * self.num_layers * self._layer_matrices

    def attention_flops(self, length: int, *, prefix: int) -> int:
        """Return forward and backward FLOPs of attention, all layers, for `length` tokens, the first `prefix` bidirectional.

        6 (s^2 + p^2) q per layer; s: `length`; q: the width of all heads; p: the length of the bidirectional `prefix` (0 if
        causal, s if bidirectional).
        """
        return 6 * self.num_layers * self.query_size * (length * length + prefix * prefix)

    def training_flops(self, vocab_size: int, predicted: int, spans: Iterable[tuple[int, int, int]]) -> int:
        """Return both passes' FLOPs of documents `spans` (start, prefix end, stop), with output at `predicted` positions.

        `spans`: (start, prefix end, stop) of each document. Recomputation and vocabulary padding are not counted.
        """
        head = 6 * self.hidden_size * vocab_size * predicted
        documents = sum(
            self.layer_flops_per_token() * (stop - start) + self.attention_flops(stop - start, prefix=prefix - start)
            for start, prefix, stop in spans
        )
        return head + documents

    def check(self, tensor_parallel: int = 1) -> None:
        """Raise InputError, naming the flag, if the shape is invalid or cannot be split over `tensor_parallel` ranks."""
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
        for name in names:
            self._check_field(name, lambda value: value is None or value >= 1, "1 or more")
        if self.kv_channels is None:
            self._check_multiple("hidden_size", self.num_attention_heads, "--num-attention-heads")
        if self.head_dim % 2:
            source = "--hidden-size / --num-attention-heads is" if self.kv_channels is None else "--kv-channels: found"
            raise InputError(f"{source} {self.head_dim}, expected an even head width for rotary positions")
        for name in ("rotary_base", "norm_epsilon"):
            self._check_field(name, lambda value: 0 < value < math.inf, "a number above 0")
        self._check_field("rope_scaling_factor", lambda value: value >= 1, "1 or more")
        if not self.use_rope_scaling:
            self._check_field("rope_scaling_factor", ModelConfig.rope_scaling_factor.__eq__, "--use-rope-scaling with it")
        self._check_multiple("num_attention_heads", self.num_query_groups, "--num-query-groups")
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            self._check_multiple(name, tensor_parallel, "--tensor-model-parallel-size")

    def _check_multiple(self, name: str, divisor: int, divisor_flag: str) -> None:
        """Raise InputError unless the field `name` is a multiple of `divisor`, the value of `divisor_flag`."""
        self._check_field(name, lambda value: value % divisor == 0, f"a multiple of {divisor_flag} {divisor}")

    def _check_field(self, name: str, is_valid: Callable[[Any], bool], expected: str) -> None:
        """Raise InputError, naming the flag, unless the value of field `name` is valid."""
        if not is_valid(value := getattr(self, name)):
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected {expected}")


# The study's three sizes (arXiv 2507.00994), then two for machines without an accelerator.
PRESETS = {
    "210m": ModelConfig(12, 768, 3072, 12, 12),
    "610m": ModelConfig(26, 1152, 4096, 18, 6),
    "1b": ModelConfig(28, 1728, 5120, 18, 6),
    "small": ModelConfig(8, 512, 1536, 8, 4),
    "tiny": ModelConfig(4, 256, 768, 4, 2),
}


def get_preset(name: str) -> ModelConfig:
    """Return the ModelConfig of the preset `name`, such as 610m, in any case; InputError, listing all, if unknown."""
    if name.lower() not in PRESETS:
        raise InputError(f"--model: unknown preset {truncate_text(repr(name))}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name.lower()]


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Return `vocab_size` rounded up so that each of `tensor_parallel` ranks holds a multiple of `multiple` rows."""
    total = multiple * tensor_parallel
    return -(-vocab_size // total) * total
