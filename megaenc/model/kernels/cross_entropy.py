"""Triton cross-entropy in two passes over the logits.

The first computes softmax statistics, the second the gradient in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaenc.model.kernels.launch import DO_NOT_SPECIALIZE, column_block_constants, next_power_of_2

LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)
NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE, do_not_specialize_on_alignment=DO_NOT_SPECIALIZE)
def cross_entropy_statistics_kernel(
    logits, labels, out, rows, stride, first, columns, width, COLUMNS: tl.constexpr
):
    """Write the softmax statistics of one row per program to `out` [4, rows].

    They are those of `softmax_statistics`. `logits` points to [rows, width], with `stride` elements
    from row to row; `labels` to int64[rows], ids in the whole vocabulary. `first` is the id of
    column 0; columns from `columns` on are padding. COLUMNS, a power of two, are read at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    highest = LOWEST
    total = 0.0
    token = 0
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # Loaded including the padding, to a round number: vectorized for every vocabulary size.
        scores = tl.load(row_logits + column, mask=column < width, other=0.0).to(tl.float32)
        scores = tl.where(column < columns, scores, float("-inf"))
        block_highest = tl.max(scores, axis=0)
        likeliest = tl.min(tl.where(scores == block_highest, column, NO_TOKEN), axis=0)
        token = tl.where(block_highest > highest, likeliest, token)
        before = highest
        highest = tl.maximum(highest, block_highest)
        total = total * tl.exp(before - highest) + tl.sum(tl.exp(scores - highest), axis=0)
    label_column = tl.load(labels + row) - first
    is_local = (label_column >= 0) & (label_column < columns)
    target = tl.load(row_logits + label_column, mask=is_local, other=0.0).to(tl.float32)
    tl.store(out + row, highest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, target)
    tl.store(out + 3 * rows + row, (token + first).to(tl.float32))


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE, do_not_specialize_on_alignment=DO_NOT_SPECIALIZE)
def cross_entropy_gradient_kernel(
    logits, labels, highest, total, stride, first, columns, width, COLUMNS: tl.constexpr
):
    """Overwrite logits in place by the gradient of each row's loss.

    A program (row, block) computes COLUMNS columns of one row, up to `width`. The gradient is the
    softmax, minus 1 at the label, and 0 in padding. `highest` and `total` point to the highest
    score and the sum of exp(score - highest) of each row in the whole vocabulary, float32[rows];
    other arguments are as in `cross_entropy_statistics_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pointers = logits + row * stride + column
    scores = tl.load(pointers, mask=column < width, other=0.0).to(tl.float32)
    scores = tl.where(column < columns, scores, float("-inf"))
    probability = tl.exp(scores - tl.load(highest + row)) / tl.load(total + row)
    label_column = tl.load(labels + row) - first
    error = tl.where((column == label_column) & (column < columns), probability - 1.0, probability)
    tl.store(pointers, error.to(logits.dtype.element_ty), mask=column < width)


def softmax_statistics(logits_nV: Tensor, labels_n: Tensor, first: int, columns: int) -> Tensor:
    """Return the softmax statistics of each row of logits, float32[4, n].

    They are the highest score, the sum of exp(score - highest), the label's score and the likeliest
    token, over this rank's part of the vocabulary. The label's score is 0 if it is another rank's;
    the token is the lowest id on a tie, exact below 2^24. A part of only padding has float32's
    lowest number, 0, 0 and `first`.

    Args:
        logits_nV: This rank's logits [n, V] with padding; elements of a row are adjacent.
        labels_n: int64[n], token ids of the whole vocabulary.
        first: Token id at which the rank's part begins.
        columns: Number of columns before the padding.
    """
    rows, width = logits_nV.shape
    out_4n = torch.empty(4, rows, dtype=torch.float32, device=logits_nV.device)
    if rows:
        block = min(next_power_of_2(width), 4096)
        constants = {"COLUMNS": block, "num_warps": min(max(block // 256, 1), 8)}
        cross_entropy_statistics_kernel[(rows,)](
            logits_nV,
            labels_n,
            out_4n,
            rows,
            logits_nV.stride(0),
            first,
            columns,
            width,
            **constants,
        )
    return out_4n


def logits_to_gradient_(
    logits_nV: Tensor, labels_n: Tensor, highest_n: Tensor, sum_n: Tensor, first: int, columns: int
) -> Tensor:
    """Overwrite logits by the gradient of each row's loss, and return them.

    The gradient is exp(score - highest) / sum, minus 1 at the label, and 0 in padding.

    Args:
        logits_nV: As for `softmax_statistics`; overwritten.
        labels_n: int64[n], token ids of the whole vocabulary.
        highest_n: float32[n], highest scores in the whole vocabulary.
        sum_n: float32[n], sums of exp(score - highest) over the whole vocabulary.
        first: As for `softmax_statistics`.
        columns: As for `softmax_statistics`.
    """
    rows, width = logits_nV.shape
    if rows:
        constants = column_block_constants(width)
        programs = rows, triton.cdiv(width, constants["COLUMNS"])
        cross_entropy_gradient_kernel[programs](
            logits_nV,
            labels_n,
            highest_n,
            sum_n,
            logits_nV.stride(0),
            first,
            columns,
            width,
            **constants,
        )
    return logits_nV
