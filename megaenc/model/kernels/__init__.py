"""Triton kernels for the operations between matrix products, and the self-test that selects them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedKernels:
    """Flags that enable the Triton kernels of norm, rotary positions, SwiGLU, dropout and loss, and float32 weight gradients."""

    norm: bool = False
    rotary: bool = False
    swiglu: bool = False
    dropout: bool = False
    loss: bool = False
    sum: bool = False


NO_FUSED_KERNELS = FusedKernels()
