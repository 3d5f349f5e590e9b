"""What the loss asks of logits, in one pass over them, and their gradient in their own place, in a second."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.model.kernels.launch import DO_NOT_SPECIALIZE, next_power_of_2, column_block_constants

LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)
NOBODY: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE, do_not_specialize_on_alignment=DO_NOT_SPECIALIZE)
def cross_entropy_statistics_kernel(logits, labels, out, rows, stride, first, columns, width, COLUMNS: tl.constexpr):
    """One program takes a row, a block at a time: what it has added up shrinks where a higher score comes."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    highest = LOWEST
    total = 0.0
    token = 0
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # Loaded to the padding's end, which is a round number: many at a time, whatever the size of the vocabulary.
        scores = tl.load(here + column, mask=column < width, other=0.0).to(tl.float32)
        scores = tl.where(column < columns, scores, float("-inf"))
        top = tl.max(scores, axis=0)
        likeliest = tl.min(tl.where(scores == top, column, NOBODY), axis=0)
        token = tl.where(top > highest, likeliest, token)
        before = highest
        highest = tl.maximum(highest, top)
        total = total * tl.exp(before - highest) + tl.sum(tl.exp(scores - highest), axis=0)
    at = tl.load(labels + row) - first
    own = (at >= 0) & (at < columns)
    target = tl.load(here + at, mask=own, other=0.0).to(tl.float32)
    tl.store(out + row, highest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, target)
    tl.store(out + 3 * rows + row, (token + first).to(tl.float32))


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE, do_not_specialize_on_alignment=DO_NOT_SPECIALIZE)
def cross_entropy_gradient_kernel(logits, labels, top, total, stride, first, columns, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = logits + row * stride + column
    scores = tl.load(here, mask=column < width, other=0.0).to(tl.float32)
    scores = tl.where(column < columns, scores, float("-inf"))
    chance = tl.exp(scores - tl.load(top + row)) / tl.load(total + row)
    at = tl.load(labels + row) - first
    error = tl.where((column == at) & (column < columns), chance - 1.0, chance)
    tl.store(here, error.to(logits.dtype.element_ty), mask=column < width)


def softmax_statistics(logits_nV: Tensor, labels_n: Tensor, first: int, columns: int) -> Tensor:
    """Return float32[4, n] of this rank's share of the vocabulary: ids from `first` on, columns from `columns` on being padding.

    Of each row the highest score, the sum of exp(score - highest), the label's score (0 if another rank's) and the likeliest
    token, the lowest of equals, exact below 2^24; of padding alone float32's lowest number, 0, 0 and `first`.
    """
    rows, width = logits_nV.shape
    out_4n = torch.empty(4, rows, dtype=torch.float32, device=logits_nV.device)
    if rows:
        block = min(next_power_of_2(width), 4096)
        constants = {"COLUMNS": block, "num_warps": min(max(block // 256, 1), 8)}
        cross_entropy_statistics_kernel[(rows,)](
            logits_nV, labels_n, out_4n, rows, logits_nV.stride(0), first, columns, width, **constants
        )
    return out_4n


def logits_to_gradient_(logits_nV: Tensor, labels_n: Tensor, top_n: Tensor, sum_n: Tensor, first: int, columns: int) -> Tensor:
    """Overwrite logits by the loss's gradient: exp(score - top) / sum of all ranks, less 1 at the label; 0 in padding."""
    rows, width = logits_nV.shape
    if rows:
        constants = column_block_constants(width)
        programs = rows, triton.cdiv(width, constants["COLUMNS"])
        cross_entropy_gradient_kernel[programs](
            logits_nV, labels_n, top_n, sum_n, logits_nV.stride(0), first, columns, width, **constants
        )
    return logits_nV
