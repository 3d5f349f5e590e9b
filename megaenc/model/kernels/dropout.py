"""Triton dropout by a hash of counters.

It drops the same elements as `megaenc.model.functional.dropout`, bit by bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.model.kernels.launch import column_block_constants, flatten_rows


@triton.jit(do_not_specialize=("first", "limit"))
def dropout_kernel(x, out, low, high, first, limit, scale, x_stride, width, COLUMNS: tl.constexpr):
    """Write x * `scale`, or 0 if the hash is below `limit`, to the contiguous `out`.

    A program (row, block) computes COLUMNS columns of one row. `x` points to [rows, width], with
    `x_stride` elements from row to row; `low` and `high` to the int32 of each row, which is added
    to the column's number and multiplies the hash. `first` is added to all columns' numbers, and
    `limit` is the fraction that becomes 0, times 2**32; see `drop`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    start = tl.load(low + row).to(tl.uint32, bitcast=True)
    factor = tl.load(high + row).to(tl.uint32, bitcast=True)
    number = column.to(tl.uint32) * 0x9E3779B1 + first.to(tl.uint32) + start
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15)) * 0x846CA68B
    number = (number ^ (number >> 16)) * factor
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(number < limit.to(tl.uint32), 0.0, values * scale)
    tl.store(out + row * width + column, kept.to(out.dtype.element_ty), mask=inside)


def drop(x: Tensor, low: Tensor, high: Tensor, first: int, limit: int, scale: float) -> Tensor:
    """Return hidden states [..., H] times `scale`, or 0 if the hash is below `limit`.

    It has no gradient: `megaenc.model.functional.dropout` calls it in both passes. The result has
    the dtype of `x`. `low`, `high`, `first` and `limit` are unsigned 32-bit numbers, given as the
    signed ones of the same bits.

    Args:
        low: int32[rows], numbers of the rows that are added to those of the channels.
        high: int32[rows], odd numbers of the rows by which the hash is multiplied.
        first: Offset of the layer, a multiple of its index, added to the numbers of all channels.
        limit: Fraction of the elements that become 0, times 2**32.
        scale: Factor of the elements that are kept.
    """
    rows_RH = flatten_rows(x)
    width = x.size(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        constants = column_block_constants(width)
        programs = len(rows_RH), triton.cdiv(width, constants["COLUMNS"])
        dropout_kernel[programs](
            rows_RH, out, low, high, first, limit, scale, rows_RH.stride(0), width, **constants
        )
    return out
