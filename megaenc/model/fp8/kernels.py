"""Triton kernels for float8 quantization, each in one pass over memory.

The functions are those of `Float8Recipe`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.backend.parallel_config import FLOAT8_ALIGNMENT

_BLOCK = 4096
_PROGRAMS = 1024  # of `amax`: each processes many blocks, so that few write to the one result
_TILE = 64


def amax_bits(x: Tensor) -> Tensor:
    """Return the float32 bit pattern of max abs(x), as int32[] on the device of `x`.

    NaN is the largest, then infinity. `x` has any shape, strides and floating-point dtype.
    """
    x = x.contiguous()
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    programs = min(triton.cdiv(x.numel(), _BLOCK), _PROGRAMS)
    _amax_kernel[(programs,)](x, bits, x.numel(), BLOCK=_BLOCK)
    return bits


def quantize(
    x: Tensor, amax_bits: Tensor, dtype: torch.dtype, max_bits: int
) -> tuple[Tensor, Tensor]:
    """Return a tensor as float8, scaled by a power of two, and the inverse scale.

    The float8 tensor is contiguous; `x` need not be. The inverse scale, float32[], is NaN if
    `amax_bits` is not finite, and the tensor then has no meaning.

    Args:
        amax_bits: Result of the function `amax_bits`, int32[], for `x`, or for a matrix of which
            `x` is a part.
        dtype: float8 dtype of the result.
        max_bits: `max_value_bits` of `dtype`.
    """
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = torch.empty((), dtype=torch.float32, device=x.device)
    _quantize_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x, amax_bits, out, inverse, x.numel(), MAX_BITS=max_bits, BLOCK=_BLOCK
    )
    return out, inverse


def transpose(x: Tensor) -> Tensor:
    """Return the transpose of a float8 matrix, padded for matrix products.

    It is a contiguous float8[columns, rows rounded up to a multiple of 16], 0 in the padding.
    """
    rows, columns = x.shape
    width = triton.cdiv(rows, FLOAT8_ALIGNMENT) * FLOAT8_ALIGNMENT
    out = torch.empty(columns, width, dtype=x.dtype, device=x.device)
    tiles = (triton.cdiv(width, _TILE), triton.cdiv(columns, _TILE))
    _transpose_kernel[tiles](
        x.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, width, TILE=_TILE
    )
    return out


@triton.jit
def _amax_kernel(x, amax_bits, elements, BLOCK: tl.constexpr):
    """Update `amax_bits` with the largest magnitude of every num_programs-th block."""
    # As integers, the bits of magnitudes are ordered like the magnitudes, with NaN last.
    most = tl.zeros([BLOCK], dtype=tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, elements, tl.num_programs(0) * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        values = tl.load(x + offset, mask=offset < elements, other=0.0).to(tl.float32)
        most = tl.maximum(most, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax_bits, tl.max(most, axis=0))


@triton.jit
def _quantize_kernel(
    x, amax_bits, out, inverse, elements, MAX_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize one block per program with the scale for `amax_bits`.

    The first program writes the inverse scale.
    """
    # The bits of 2^-100, infinity and NaN, as in Float8Recipe.quantize.
    bits = tl.load(amax_bits)
    exponent = (MAX_BITS - tl.maximum(bits, 226492416)) >> 23
    if tl.program_id(0) == 0:
        back = tl.where(bits < 2139095040, (127 - exponent) << 23, 2143289344)
        tl.store(inverse, back.to(tl.float32, bitcast=True))
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offset, mask=offset < elements, other=0.0).to(tl.float32) * scale
    tl.store(out + offset, values.to(out.dtype.element_ty), mask=offset < elements)


# One variant, which the self-test has run, for any number of rows, which are tokens.
@triton.jit(do_not_specialize=["rows"])
def _transpose_kernel(x, out, rows, columns, width, TILE: tl.constexpr):
    """Transpose one tile per program, as bytes, with zeros beyond the last row."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)
    fits = (column[:, None] < columns) & (row[None, :] < width)
    tl.store(out + column[:, None] * width + row[None, :], tl.trans(tile), mask=fits)
