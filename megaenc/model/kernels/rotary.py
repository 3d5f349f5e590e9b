"""Triton rotary positions in one pass: each head is read once, rotated in float32 and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.model.kernels.launch import DO_NOT_SPECIALIZE, next_power_of_2, row_tile_constants


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def rotary_kernel(
    x, cos, sin, out, token_stride, head_stride, heads, half, SIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write ROWS heads of one token of `x` per program to `out`, rotated by SIGN times the token's angles."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < heads) & (column < half)
    angle = token * half + column
    along = tl.load(cos + angle, mask=column < half, other=0.0)
    across = tl.load(sin + angle, mask=column < half, other=0.0) * SIGN
    source = x + token * token_stride + head * head_stride + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * (2 * half) + column
    tl.store(target, (first * along - second * across).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * along + first * across).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return x [S, 1, heads, dim] rotated by `sign` times the angles of cos and sin, contiguous float32[S, 1, 1, dim / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, _, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        constants = row_tile_constants(width // 2)
        constants["ROWS"] = min(constants["ROWS"], next_power_of_2(heads))
        constants["num_warps"] = max(1, constants["ROWS"] * constants["COLUMNS"] // 256)
        programs = tokens, triton.cdiv(heads, constants["ROWS"])
        strides = x.stride(0), x.stride(2)
        rotary_kernel[programs](x, cos, sin, out, *strides, heads, width // 2, SIGN=sign, **constants)
    return out
