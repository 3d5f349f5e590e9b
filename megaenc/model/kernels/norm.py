"""Triton RMSNorm with one pass over memory in forward and one in backward, for both gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.kernels.launch import DO_NOT_SPECIALIZE, flatten_rows, resident_programs, row_tile_constants


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def rms_norm_forward_kernel(x, weight, out, rows, x_stride, width, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write x / rms(x) * weight of a tile of ROWS rows per program to `out`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=1)[:, None] / width + epsilon)
    tl.store(out + row * width + column, (numbers * shrink * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def rms_norm_backward_kernel(
    gradient, x, weight, to_x, to_weight, rows, gradient_stride, x_stride, width, epsilon,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x to `to_x`, and each program's part of the weight's gradient to its row of `to_weight`."""
    column = tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < width)
        numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        shrink = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=1)[:, None] / width + epsilon)
        normed = numbers * shrink
        total += above * normed
        above = above * scale
        along = tl.sum(above * normed, axis=1)[:, None] / width
        tl.store(to_x + row * width + column, (shrink * (above - normed * along)).to(to_x.dtype.element_ty), mask=inside)
    sums = tl.sum(total, axis=0)[None, :]
    tl.store(to_weight + tl.program_id(0) * width + column, sums, mask=column < width)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x [..., H] / rms(x) * weight [H] in the dtype of `x`, computed in float32 by Triton, with gradients."""
    return _TritonRMSNorm.apply(x, weight, epsilon)


class _TritonRMSNorm(torch.autograd.Function):
    """RMSNorm with the Triton kernels, which saves only its inputs."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        rows_RH = flatten_rows(x)
        ctx.save_for_backward(rows_RH, weight)
        ctx.shape, ctx.epsilon = x.shape, epsilon
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            rows, width = rows_RH.shape
            constants = row_tile_constants(width)
            programs = triton.cdiv(rows, constants["ROWS"])
            rms_norm_forward_kernel[(programs,)](rows_RH, weight, out, rows, rows_RH.stride(0), width, epsilon, **constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        rows_RH, weight = ctx.saved_tensors
        gradient_RH = flatten_rows(gradient)
        to_x = torch.empty(ctx.shape, dtype=rows_RH.dtype, device=rows_RH.device)
        if not to_x.numel():
            return to_x, torch.zeros_like(weight), None
        rows, width = rows_RH.shape
        constants = row_tile_constants(width)
        programs = min(triton.cdiv(rows, constants["ROWS"]), resident_programs(rows_RH.device))
        # One sum per program, in a deterministic order, unlike atomic additions.
        to_weight_PH = torch.empty(programs, width, dtype=torch.float32, device=rows_RH.device)
        strides = gradient_RH.stride(0), rows_RH.stride(0)
        rms_norm_backward_kernel[(programs,)](
            gradient_RH, rows_RH, weight, to_x, to_weight_PH, rows, *strides, width, ctx.epsilon, **constants
        )
        return to_x, to_weight_PH.sum(0).to(weight.dtype), None
