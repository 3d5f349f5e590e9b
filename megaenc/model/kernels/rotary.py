"""Triton rotary positions in one pass over memory.

Each head is read once, rotated in float32 and written once. The joint projection of queries, keys
and values is split in the same pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.model.kernels.launch import DO_NOT_SPECIALIZE, next_power_of_2, row_tile_constants


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def rotary_kernel(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    heads,
    half,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the heads of `x` rotated by SIGN, 1 or -1, times the angles to `out`.

    A program (token, block) rotates ROWS heads of one token, column i together with column i +
    `half`. `x` points to [tokens, heads, 2 half], with strides in elements from token to token and
    from head to head; `out` is contiguous. `cos` and `sin` of the angles are float32[tokens, half].
    COLUMNS is at least `half`.
    """
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
    """Return heads [S, 1, heads, dim] rotated by `sign` times the angles.

    Element i of a head is rotated together with element i + dim / 2. The tensor is new and has the
    dtype of `x`. It has no gradient: `megaenc.model.functional.Rotation` calls it in both passes.

    Args:
        cos: Cosines of the angles, contiguous float32[S, 1, 1, dim / 2].
        sin: Sines, like `cos`.
        sign: 1, or -1 to rotate back.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, _, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        constants = _head_tile_constants(heads, width)
        programs = tokens, triton.cdiv(heads, constants["ROWS"])
        strides = x.stride(0), x.stride(2)
        rotary_kernel[programs](
            x, cos, sin, out, *strides, heads, width // 2, SIGN=sign, **constants
        )
    return out


def _head_tile_constants(heads: int, width: int) -> dict[str, int]:
    """Return the `row_tile_constants` of kernels whose rows are halves of heads."""
    constants = row_tile_constants(width // 2)
    constants["ROWS"] = min(constants["ROWS"], next_power_of_2(heads))
    constants["num_warps"] = max(1, constants["ROWS"] * constants["COLUMNS"] // 256)
    return constants


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def qkv_rotary_kernel(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    heads,
    groups,
    per_group,
    half,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy heads of `mixed` to q, k and v, or back if BACKWARD.

    A program (token, block) copies ROWS heads of one token. q and k are rotated, column i together
    with column i + `half`, backward by the negative angles. `mixed`, [tokens, heads, 2 half], has
    for each of `groups` groups `per_group` queries, a key and a value: `heads` is groups *
    (per_group + 2). All tensors are contiguous. `cos` and `sin` are float32[tokens, half]. COLUMNS
    is at least `half`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    group = head // (per_group + 2)
    place = head % (per_group + 2)
    inside = (head < heads) & (column < half)
    is_query = inside & (place < per_group)
    is_key = inside & (place == per_group)
    is_value = inside & (place > per_group)
    angle = token * half + column
    along = tl.where(is_value, 1.0, tl.load(cos + angle, mask=column < half, other=0.0))
    across = tl.where(is_value, 0.0, tl.load(sin + angle, mask=column < half, other=0.0))
    if BACKWARD:
        across = -across
    joint = mixed + (token * heads + head) * (2 * half) + column
    query = q + ((token * groups + group) * per_group + place) * (2 * half) + column
    key = k + (token * groups + group) * (2 * half) + column
    value = v + (token * groups + group) * (2 * half) + column
    if BACKWARD:
        first = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
        first += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
        first += tl.load(value, mask=is_value, other=0.0).to(tl.float32)
        second = tl.load(query + half, mask=is_query, other=0.0).to(tl.float32)
        second += tl.load(key + half, mask=is_key, other=0.0).to(tl.float32)
        second += tl.load(value + half, mask=is_value, other=0.0).to(tl.float32)
    else:
        first = tl.load(joint, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(joint + half, mask=inside, other=0.0).to(tl.float32)
    low = (first * along - second * across).to(mixed.dtype.element_ty)
    high = (second * along + first * across).to(mixed.dtype.element_ty)
    if BACKWARD:
        tl.store(joint, low, mask=inside)
        tl.store(joint + half, high, mask=inside)
    else:
        tl.store(query, low, mask=is_query)
        tl.store(query + half, high, mask=is_query)
        tl.store(key, low, mask=is_key)
        tl.store(key + half, high, mask=is_key)
        tl.store(value, low, mask=is_value)
        tl.store(value + half, high, mask=is_value)


def copy_qkv(
    mixed: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Copy the joint projection to q, k and v, with q and k rotated, or back.

    They are rotated as by `rotate`. All tensors are contiguous (not checked). There is no gradient.

    Args:
        mixed: [S, G, R + 2, dim].
        q: [S, G, R, dim].
        k: [S, G, 1, dim].
        v: [S, G, 1, dim].
        cos: float32[S, 1, 1, dim / 2].
        sin: float32[S, 1, 1, dim / 2].
        backward: Whether to copy from q, k and v to `mixed`, rotated by the negative angles.
    """
    tokens, groups, heads, width = mixed.shape
    if mixed.numel():
        constants = _head_tile_constants(groups * heads, width)
        programs = tokens, triton.cdiv(groups * heads, constants["ROWS"])
        sizes = groups * heads, groups, heads - 2, width // 2
        qkv_rotary_kernel[programs](
            mixed, q, k, v, cos, sin, *sizes, BACKWARD=backward, **constants
        )
