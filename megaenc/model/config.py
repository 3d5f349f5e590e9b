"""The shape of a model, its presets and what follows from them by arithmetic alone."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megaenc.errors import InputError


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped transformer, as EuroBERT is: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

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
    """normalise queries and keys by RMSNorm, head by head, as Qwen3 does"""
    rotary_base: float = 10000.0
    """base period of the rotary positions"""
    use_rope_scaling: bool = False
    """stretch the long periods of the rotary positions, as Llama 3.1 and later do (from a context of 8,192 tokens on)"""
    rope_scaling_factor: float = 8.0
    """by how much; Llama 3.1 has 8, Llama 3.2 has 32"""
    norm_epsilon: float = 1e-5
    """epsilon of RMSNorm"""
    init_method_std: float = 0.02
    """standard deviation of the initial weights, without depth scaling"""
    untie_embeddings_and_output_weights: bool = True
    """the output layer has a matrix of its own, as in the study; otherwise it is the embedding"""
    vocab_size: int | None = None
    """rows of the embedding; the tokenizer's number of ids unless given (weights that come from elsewhere may have spare rows)"""
    make_vocab_size_divisible_by: int = 128
    """each tensor-parallel rank's share of the vocabulary is padded to a multiple of this; exports are stripped of it"""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads, and of what attention gives back."""
        return self.num_attention_heads * self.head_dim

    def parameter_count(self, vocab_size: int, *, lm_head: bool = True) -> int:
        """Number of parameters, vocabulary padding not counted, with or without an output matrix of its own."""
        hidden = self.hidden_size
        small = 2 * hidden + self.add_qkv_bias * self._qkv_size + self.qk_layernorm * 2 * self.head_dim
        matrices = 2 if lm_head and self.untie_embeddings_and_output_weights else 1
        return self.num_layers * (self._layer_matrices + small) + hidden + matrices * vocab_size * hidden

    @property
    def _qkv_size(self) -> int:
        return self.query_size + 2 * self.num_query_groups * self.head_dim

    @property
    def _layer_matrices(self) -> int:
        """Weights of the matrix products of one layer."""
        return self.hidden_size * (self._qkv_size + self.query_size + 3 * self.ffn_hidden_size)

    def linear_shapes(self, tensor_parallel: int) -> dict[str, tuple[int, int]]:
        """Return by name the rows and columns, output and input, that each of `tensor_parallel` ranks has of a layer."""
        return {
            "linear_qkv": (self._qkv_size // tensor_parallel, self.hidden_size),
            "linear_proj": (self.hidden_size, self.query_size // tensor_parallel),
            "linear_fc1": (2 * self.ffn_hidden_size // tensor_parallel, self.hidden_size),
            "linear_fc2": (self.hidden_size, self.ffn_hidden_size // tensor_parallel),
        }

    def layer_flops_per_token(self) -> int:
        """Return the operations of the layers' matrix products for one token, forward and backward (6 a weight)."""
        return 6 * self.num_layers * self._layer_matrices

    def attention_flops(self, length: int, *, prefix: int) -> int:
        """Return the operations of one document's attention in all layers, forward and backward: 6 (s^2 + p^2) q a layer.

        q: the width of all heads; p, the `prefix`: tokens that see each other (0 if causal, s if bidirectional).
        """
        return 6 * self.num_layers * self.query_size * (length * length + prefix * prefix)

    def training_flops(self, vocab_size: int, predicted: int, spans: Iterable[tuple[int, int, int]]) -> int:
        """Return the operations of a row's matrix products, forward and backward, for `predicted` positions.

        `spans`: see `Packing.spans`. What recomputation repeats and padding of the vocabulary adds is not counted.
        """
        head = 6 * self.hidden_size * vocab_size * predicted
        documents = sum(
            self.layer_flops_per_token() * (stop - start) + self.attention_flops(stop - start, prefix=prefix - start)
            for start, prefix, stop in spans
        )
        return head + documents

    def check(self, tensor_parallel: int = 1) -> None:
        """InputError, naming the flag, if the shape is impossible or `tensor_parallel` ranks cannot share its layers."""
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
        for name in names:
            self._right(name, lambda value: value is None or value >= 1, "1 or more")
        if self.kv_channels is None:
            self._divides("hidden_size", self.num_attention_heads, "--num-attention-heads")
        if self.head_dim % 2:
            found = "--hidden-size / --num-attention-heads is" if self.kv_channels is None else "--kv-channels: found"
            raise InputError(f"{found} {self.head_dim}, expected an even head width for rotary positions")
        for name in ("rotary_base", "norm_epsilon"):
            self._right(name, lambda value: 0 < value < math.inf, "a number above 0")
        self._right("rope_scaling_factor", lambda value: value >= 1, "1 or more")
        if not self.use_rope_scaling:
            self._right("rope_scaling_factor", ModelConfig.rope_scaling_factor.__eq__, "--use-rope-scaling beside it")
        self._divides("num_attention_heads", self.num_query_groups, "--num-query-groups")
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            self._divides(name, tensor_parallel, "--tensor-model-parallel-size")

    def _divides(self, name: str, divisor: int, what: str) -> None:
        self._right(name, lambda value: value % divisor == 0, f"a multiple of {what} {divisor}")

    def _right(self, name: str, right: Callable[[Any], bool], expected: str) -> None:
        """Raise InputError naming the flag, unless its value is `right`."""
        if not right(value := getattr(self, name)):
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
    """Return the preset called `name`, in any case; InputError lists the known ones."""
    if name.lower() not in PRESETS:
        raise InputError(f"--model: unknown preset {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name.lower()]


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that each tensor-parallel rank holds a multiple of `multiple`."""
    step = multiple * tensor_parallel
    return -(-vocab_size // step) * step
