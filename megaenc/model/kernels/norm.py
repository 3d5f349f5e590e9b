"""Triton RMSNorm and LayerNorm, one pass over memory each way.

The residual addition before the norm may be part of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.kernels.launch import (
    DO_NOT_SPECIALIZE,
    flatten_rows,
    resident_programs,
    row_tile_constants,
)


@triton.jit
def subtract_mean(numbers, inside, width):
    """Return each row of a block minus its mean, and 0 outside of the matrix.

    `numbers` is float32[ROWS, COLUMNS], 0 after the first `width` columns; `inside`, of the same
    shape, is true for elements of the matrix.
    """
    mean = tl.sum(numbers, axis=1)[:, None] / width
    return tl.where(inside, numbers - mean, 0.0)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def norm_forward_kernel(
    x, residual, weight, sum_out, out, rows, x_stride, residual_stride, width, epsilon,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write x / rms(x) * weight of a tile of ROWS rows per program to `out`.

    CENTERED: of x minus the row's mean (LayerNorm). RESIDUAL: of x + residual, rounded and written
    to `sum_out`; else `residual` and `sum_out` are not used. `x` and `residual` point to [rows,
    width], with strides in elements from row to row; `weight` to [width]; `sum_out` and `out` are
    contiguous. COLUMNS is at least `width`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        numbers += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = numbers.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * width + column, rounded, mask=inside)
        numbers = rounded.to(tl.float32)  # as backward and the next addition read it
    if CENTERED:
        numbers = subtract_mean(numbers, inside, width)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=1)[:, None] / width + epsilon)
    tl.store(
        out + row * width + column, (numbers * shrink * scale).to(out.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def norm_backward_kernel(
    gradient, to_sum, x, weight, to_x, to_weight,
    rows, gradient_stride, to_sum_stride, x_stride, width, epsilon,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x to `to_x`, and parts of the weight's to `to_weight`.

    Any number of programs share the rows. Program p writes its part of the weight's gradient, to be
    summed, to row p of `to_weight`, float32[programs, width]. `x` is the input of the norm,
    `gradient` the gradient of its output; `to_x` is contiguous. CENTERED: the norm subtracts the
    mean. RESIDUAL: add `to_sum`, the gradient that reaches x directly. All else is as in
    `norm_forward_kernel`.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < width)
        numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        if CENTERED:
            numbers = subtract_mean(numbers, inside, width)
        shrink = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=1)[:, None] / width + epsilon)
        normed = numbers * shrink
        total += above * normed
        above = above * scale
        along = tl.sum(above * normed, axis=1)[:, None] / width
        if CENTERED:
            above = subtract_mean(above, inside, width)
        below = shrink * (above - normed * along)
        if RESIDUAL:
            below += tl.load(to_sum + row * to_sum_stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(to_x + row * width + column, below.to(to_x.dtype.element_ty), mask=inside)
    sums = tl.sum(total, axis=0)[None, :]
    tl.store(to_weight + tl.program_id(0) * width + column, sums, mask=column < width)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight in the dtype of `x`, by Triton, with gradients.

    With `residual` it returns (x + residual in the dtype of `x`, the norm of that). It is computed
    in float32.

    Args:
        x: [..., H].
        weight: [H].
        epsilon: Number that is added to the mean square.
        residual: [..., H] to add before the norm, or None.
    """
    return _TritonNorm.apply(x, residual, weight, epsilon, False)


def layer_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return (x - mean(x)) / std(x) * weight, without a bias, by Triton.

    With `residual` it returns (x + residual, the norm of that sum). `epsilon` is added to the
    variance; all else is as in `rms_norm`.
    """
    return _TritonNorm.apply(x, residual, weight, epsilon, True)


class _TritonNorm(torch.autograd.Function):
    """Norm with the Triton kernels.

    It saves only what it normalizes and the weight.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, epsilon, is_centered):
        rows_RH = flatten_rows(x)
        is_sum = residual is not None
        residual_RH = flatten_rows(residual) if is_sum else rows_RH
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm_input = torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_sum else rows_RH
        ctx.save_for_backward(norm_input, weight)
        ctx.shape = x.shape
        ctx.epsilon = epsilon
        ctx.is_sum = is_sum
        ctx.is_centered = is_centered
        if out.numel():
            rows, width = rows_RH.shape
            constants = row_tile_constants(width)
            strides = rows_RH.stride(0), residual_RH.stride(0)
            norm_forward_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
                rows_RH, residual_RH, weight, norm_input, out, rows, *strides, width, epsilon,
                CENTERED=is_centered, RESIDUAL=is_sum, **constants,
            )  # fmt: skip
        return (norm_input, out) if is_sum else out

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        rows_RH = flatten_rows(x)
        gradient_RH = flatten_rows(gradients[-1])
        to_sum_RH = flatten_rows(gradients[0])
        to_x = torch.empty(ctx.shape, dtype=x.dtype, device=x.device)
        if not to_x.numel():
            return to_x, to_x if ctx.is_sum else None, torch.zeros_like(weight), None, None
        rows, width = rows_RH.shape
        constants = row_tile_constants(width)
        programs = min(triton.cdiv(rows, constants["ROWS"]), resident_programs(x.device))
        # One sum per program, in a deterministic order, unlike atomic additions.
        to_weight_PH = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        strides = gradient_RH.stride(0), to_sum_RH.stride(0), rows_RH.stride(0)
        norm_backward_kernel[(programs,)](
            gradient_RH, to_sum_RH, rows_RH, weight, to_x, to_weight_PH,
            rows, *strides, width, ctx.epsilon,
            CENTERED=ctx.is_centered, RESIDUAL=ctx.is_sum, **constants,
        )  # fmt: skip
        return to_x, to_x if ctx.is_sum else None, to_weight_PH.sum(0).to(weight.dtype), None, None
