"""The shape of a model, its presets and what follows from them by arithmetic alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from megaenc.errors import InputError


@dataclass(frozen=True)
class ModelConfig:
    """A EuroBERT-shaped encoder: RMSNorm, SwiGLU, rotary positions, grouped-query attention, no bias."""

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
    rotary_base: float = 10000.0
    """base period of the rotary positions"""
    norm_epsilon: float = 1e-5
    """epsilon of RMSNorm"""
    init_method_std: float = 0.02
    """standard deviation of the initial weights, without depth scaling"""
    untie_embeddings_and_output_weights: bool = True
    """the output layer has a matrix of its own, as in the study; otherwise it is the embedding"""
    make_vocab_size_divisible_by: int = 128
    """each tensor-parallel rank's share of the vocabulary is padded to a multiple of this; exports are stripped of it"""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def parameters(self, vocab_size: int, *, lm_head: bool = True) -> int:
        """Number of parameters, vocabulary padding not counted, with or without an output matrix of its own."""
        hidden, kv_size = self.hidden_size, self.num_query_groups * self.head_dim
        attention = 2 * hidden * hidden + 2 * hidden * kv_size
        layer = attention + 3 * hidden * self.ffn_hidden_size + 2 * hidden
        matrices = 2 if lm_head and self.untie_embeddings_and_output_weights else 1
        return self.num_layers * layer + hidden + matrices * vocab_size * hidden

    def body_flops_per_token(self) -> int:
        """Floating-point operations of the layers' matrix products for one token, forward and backward (6 a weight)."""
        matrices = self.parameters(0) - self.hidden_size * (2 * self.num_layers + 1)
        return 6 * matrices

    def attention_flops(self, length: int, *, prefix: int) -> int:
        """Operations of one document's attention in all layers, forward and backward: 6 (s^2 + p^2) h a layer.

        p, the `prefix`, counts tokens that see each other: none under causal attention, all s under bidirectional attention.
        The half of the scores that a causal mask hides is not counted: kernels leave it out.
        """
        return 6 * self.num_layers * self.hidden_size * (length * length + prefix * prefix)

    def training_flops(self, vocab_size: int, predicted: int, spans: Iterable[tuple[int, int, int]]) -> int:
        """Operations of the matrix products of a row, forward and backward, as executed: documents and predictions.

        `spans`: (start, prefix, stop) of each document, as `Packing.spans` has them; the head computes `predicted` positions.
        What recomputation repeats is not counted, nor what padding of the vocabulary adds.
        """
        head = 6 * self.hidden_size * vocab_size * predicted
        documents = sum(
            self.body_flops_per_token() * (stop - start) + self.attention_flops(stop - start, prefix=prefix - start)
            for start, prefix, stop in spans
        )
        return head + documents

    def check(self, tensor_parallel: int = 1) -> None:
        """InputError, naming the flag, if the shape is impossible or `tensor_parallel` ranks cannot share its layers."""
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}: found {getattr(self, name)}, expected 1 or more")
        self._divides("hidden_size", self.num_attention_heads, "--num-attention-heads")
        if self.head_dim % 2:
            raise InputError(
                f"--hidden-size / --num-attention-heads is {self.head_dim}, expected an even head width for rotary positions"
            )
        self._divides("num_attention_heads", self.num_query_groups, "--num-query-groups")
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            self._divides(name, tensor_parallel, "--tensor-model-parallel-size")

    def _divides(self, name: str, divisor: int, what: str) -> None:
        if getattr(self, name) % divisor:
            raise InputError(f"--{name.replace('_', '-')}: found {getattr(self, name)}, expected a multiple of {what} {divisor}")


# The study's three sizes (arXiv 2507.00994), then two for machines without an accelerator.
PRESETS = {
    "210m": ModelConfig(12, 768, 3072, 12, 12),
    "610m": ModelConfig(26, 1152, 4096, 18, 6),
    "1b": ModelConfig(28, 1728, 5120, 18, 6),
    "small": ModelConfig(8, 512, 1536, 8, 4),
    "tiny": ModelConfig(4, 256, 768, 4, 2),
}


def preset(name: str) -> ModelConfig:
    """The preset called `name`, in any case; InputError lists the known ones."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise InputError(f"--model: unknown preset {name!r}, expected one of {', '.join(PRESETS)}")
    return found


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that each tensor-parallel rank holds a multiple of `multiple`."""
    step = multiple * tensor_parallel
    return -(-vocab_size // step) * step
