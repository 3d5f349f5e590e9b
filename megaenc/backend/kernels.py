"""By which kernels a model is computed: what changes time and memory and, but for rounding, nothing else."""

from dataclasses import dataclass
from typing import Literal

FLOAT8_WIDTH = 16
"""Of what the widths of matrices must be multiples for float8 products."""


@dataclass(frozen=True)
class Kernels:
    """By which kernels the layers are computed; every process of a run computes by the same."""

    attention_backend: Literal["auto", "varlen", "sdpa"] = "auto"
    """attention inside documents. varlen: one kernel of torch's over all documents of a row, on an accelerator in bfloat16; sdpa:
    torch's scaled dot product, document by document, anywhere; auto: the first of them that can"""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """linear layers and norms. local: megatron-core's own and this package's; transformer_engine: Transformer Engine's, where it
    is installed"""
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """matrix products of the layers, not of embedding and head, in 8-bit floating point, where the machine has them (H100, L40S,
    MI300X or later; slowly on the host). hybrid: gradients with 5 bits of exponent and 2 of mantissa, all else with 4 and 3;
    e4m3: all with 4 and 3"""
