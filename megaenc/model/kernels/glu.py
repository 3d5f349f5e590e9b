"""Triton gated activations: SwiGLU and GeGLU.

Forward and backward take one pass each; backward recomputes the activation.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.kernels.launch import column_block_constants, flatten_rows

ROOT_HALF: tl.constexpr = tl.constexpr(math.sqrt(0.5))
NORMAL_PEAK: tl.constexpr = tl.constexpr(1 / math.sqrt(2 * math.pi))
# GELU's approximation (1 + tanh(u)) / 2 is the sigmoid of
# 2 u = TANH_SCALE * (x + TANH_CUBIC * x^3).
TANH_SCALE: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))
TANH_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def gate_factor(gate, ACTIVATION: tl.constexpr):
    """Return activation(gate) / gate, which is 1/2 at 0.

    ACTIVATION is silu, gelu or gelu_pytorch_tanh.
    """
    if ACTIVATION == "gelu":
        factor = 0.5 * (1.0 + tl.erf(gate * ROOT_HALF))
    elif ACTIVATION == "gelu_pytorch_tanh":
        argument = (gate + gate * gate * gate * TANH_CUBIC) * TANH_SCALE
        factor = 1.0 / (1.0 + tl.exp(-argument))
    else:
        factor = 1.0 / (1.0 + tl.exp(-gate))
    return factor


@triton.jit
def glu_forward_kernel(x, out, x_stride, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Write activation(gate) * up to `out`.

    A program (row, block) computes COLUMNS columns of one row. `x` points to [rows, 2 width], gate
    and then up, with `x_stride` elements from row to row; `out` is contiguous [rows, width].
    ACTIVATION is as in `glu`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    target = out + row * width + column
    # By a division, silu is rounded once less than by its factor.
    activated = (
        gate / (1.0 + tl.exp(-gate))
        if ACTIVATION == "silu"
        else gate * gate_factor(gate, ACTIVATION)
    )
    tl.store(target, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward_kernel(
    gradient,
    x,
    to_x,
    gradient_stride,
    x_stride,
    width,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradients of gate and up to `to_x`, contiguous [rows, 2 width].

    `gradient` points to the gradient of the output, [rows, width]; strides are elements from row to
    row. All else is as in `glu_forward_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(
        tl.float32
    )
    factor = gate_factor(gate, ACTIVATION)
    activated = gate * factor
    to_activated = above * up
    # The derivative of the activation is the factor plus gate times the factor's own derivative.
    if ACTIVATION == "gelu":
        growth = gate * tl.exp(-0.5 * gate * gate) * NORMAL_PEAK
    elif ACTIVATION == "gelu_pytorch_tanh":
        growth = activated * (1.0 - factor) * (1.0 + gate * gate * (3.0 * TANH_CUBIC)) * TANH_SCALE
    else:
        growth = activated * (1.0 - factor)
    to_gate = to_activated * (factor + growth)
    target = to_x + row * (2 * width) + column
    tl.store(target, to_gate.to(to_x.dtype.element_ty), mask=inside)
    tl.store(target + width, (above * activated).to(to_x.dtype.element_ty), mask=inside)


def glu(x: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, [..., F], computed in float32 by Triton.

    It has the dtype of `x`, and gradients.

    Args:
        x: [..., 2 F], whose halves are gate and up.
        activation: silu, gelu or gelu_pytorch_tanh; any other name counts as silu.
    """
    return _TritonGLU.apply(x, activation)


class _TritonGLU(torch.autograd.Function):
    """Gated activation with the Triton kernels, which saves only its input."""

    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        rows_R2F = flatten_rows(x)
        width = x.size(-1) // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        if out.numel():
            constants = column_block_constants(width)
            programs = len(rows_R2F), triton.cdiv(width, constants["COLUMNS"])
            glu_forward_kernel[programs](
                rows_R2F, out, rows_R2F.stride(0), width, ACTIVATION=activation, **constants
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        rows_R2F = flatten_rows(x)
        gradient_RF = flatten_rows(gradient)
        width = gradient.size(-1)
        to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if to_x.numel():
            constants = {"ACTIVATION": ctx.activation} | column_block_constants(width)
            programs = len(rows_R2F), triton.cdiv(width, constants["COLUMNS"])
            strides = gradient_RF.stride(0), rows_R2F.stride(0)
            glu_backward_kernel[programs](gradient_RF, rows_R2F, to_x, *strides, width, **constants)
        return to_x, None
