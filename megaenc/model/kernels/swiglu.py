"""Triton SwiGLU in one pass each for forward and backward, which recomputes silu(gate)."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.kernels.launch import column_block_constants, flatten_rows


@triton.jit
def swiglu_forward_kernel(x, out, x_stride, width, COLUMNS: tl.constexpr):
    """Write silu(gate) * up of a block of COLUMNS columns of one row per program to `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(gradient, x, to_x, gradient_stride, x_stride, width, COLUMNS: tl.constexpr):
    """Write the gradients of gate and up for a block of COLUMNS columns of one row per program to `to_x`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    to_gate = above * up * (sigmoid + silu * (1.0 - sigmoid))
    target = to_x + row * (2 * width) + column
    tl.store(target, to_gate.to(to_x.dtype.element_ty), mask=inside)
    tl.store(target + width, (above * silu).to(to_x.dtype.element_ty), mask=inside)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] of the halves of x [..., 2 F], in its dtype, computed in float32 by Triton."""
    return _TritonSwiGLU.apply(x)


class _TritonSwiGLU(torch.autograd.Function):
    """SwiGLU with the Triton kernels, which saves only its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        rows_R2F, width = flatten_rows(x), x.size(-1) // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        if out.numel():
            constants = column_block_constants(width)
            programs = len(rows_R2F), triton.cdiv(width, constants["COLUMNS"])
            swiglu_forward_kernel[programs](rows_R2F, out, rows_R2F.stride(0), width, **constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        rows_R2F, gradient_RF, width = flatten_rows(x), flatten_rows(gradient), gradient.size(-1)
        to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if to_x.numel():
            constants = column_block_constants(width)
            programs = len(rows_R2F), triton.cdiv(width, constants["COLUMNS"])
            strides = gradient_RF.stride(0), rows_R2F.stride(0)
            swiglu_backward_kernel[programs](gradient_RF, rows_R2F, to_x, *strides, width, **constants)
        return to_x
