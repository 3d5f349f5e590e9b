"""Triton kernels for operations between matrix products, and their self-test.

The self-test selects the kernels that are used.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedKernels:
    """Flags of the Triton kernels to use, by `select_fused_kernels`.

    Torch computes the rest; by default that is all. `norm` is RMSNorm, `layer_norm` LayerNorm
    without bias, `rotary` the rotary positions, `swiglu` and `geglu` are the gated activations,
    `dropout` that of attention's output, and `loss` the cross-entropy. `sum` is no kernel, although
    it is tested like one: torch then adds up the output layer's weight gradients in float32.
    """

    norm: bool = False
    """RMSNorm"""
    layer_norm: bool = False
    """LayerNorm without bias"""
    rotary: bool = False
    """rotary positions, and the split of the joint projection"""
    swiglu: bool = False
    """gated activation by silu"""
    geglu: bool = False
    """gated activation by gelu or gelu_pytorch_tanh"""
    dropout: bool = False
    """of attention's output"""
    loss: bool = False
    """cross-entropy of the output layer"""
    sum: bool = False
    """float32 sum of the chunks' gradients of the output layer's weight, by torch"""


NO_FUSED_KERNELS = FusedKernels()
