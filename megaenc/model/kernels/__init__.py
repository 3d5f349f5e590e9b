"""Triton kernels for operations between matrix products, and their self-test.

The self-test selects the kernels that are used.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedKernels:
    """Flags that enable Triton kernels, and float32 sums of weight gradients."""

    norm: bool = False
    """RMSNorm"""
    layer_norm: bool = False
    """LayerNorm without bias"""
    rotary: bool = False
    swiglu: bool = False
    geglu: bool = False
    dropout: bool = False
    """of attention's output"""
    loss: bool = False
    sum: bool = False


NO_FUSED_KERNELS = FusedKernels()
