"""Output layer and loss in one, some predictions at a time: the logits of all of them never exist."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.functional import row_slices
from megaenc.model.kernels.selftest import NO_FUSED_KERNELS, FusedKernels

CHUNK_LOGITS = 2**26
"""Logits that exist at a time, as float32 a quarter of a GiB: enough rows for the matrix products to be as fast as undivided."""
FUSED_CHUNK_BYTES = 2**30
"""Bytes of the logits that exist at a time with the kernels of accelerators.

Each part of n predictions reads and writes the weight's float32 gradient, 8 V H bytes, beside products of 6 n V H operations: at
240 operations to a byte (650 TFLOP/s and 2.7 TB/s, assumed of an H100) 320 / n of their time. With 2^26 logits, n = 523 of a
vocabulary of 128,256, that is three fifths; with a GiB of bfloat16, n = 4,186, a thirteenth.
"""
_ROW_MULTIPLE = 128
"""Rows of a part: whole tiles of the matrix products."""
_CACHE_ELEMENTS = 2**20
"""Logits that the host widens to float32 at a time for the softmax."""


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    columns: int,
    group: dist.ProcessGroup,
    fused: FusedKernels = NO_FUSED_KERNELS,
    at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and correct guesses of softmax(hidden weight^T), summed over the N predictions: (float32, int64).

    `weight_VH` is this rank's share of the vocabulary, rows from `columns` on being padding; `labels_N` are ids of the whole
    one; N may be 0. Of equally likely tokens the lowest id is the guess. `at_once`: how many logits may exist at a time, with
    `fused.loss` their bytes. The gradients are exact and made on the way; backward scales them and adds those of `hidden_NH` up
    over `group`. So one softmax serves both ways, and nothing of it is kept.
    """
    row, most = weight_VH.size(0), at_once or CHUNK_LOGITS
    if fused.loss:
        row, most = row * hidden_NH.element_size(), at_once or FUSED_CHUNK_BYTES
    rows = rows_per_chunk(len(labels_N), row, most)
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, labels_N, columns, group, fused, rows, torch.is_grad_enabled())


def rows_per_chunk(predictions: int, row: int, at_once: int) -> int:
    """Return the rows of each part of `predictions`, a row taking `row` of `at_once`: few parts, as large as each other."""
    most = max(1, at_once // row)
    if most > _ROW_MULTIPLE:
        most -= most % _ROW_MULTIPLE
    parts = max(1, -(-predictions // most))
    even = -(-predictions // parts)
    return max(1, min(most, -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, labels_N, columns, group, fused, rows, train):
        softmax_statistics, logits_to_gradient_ = _softmax_statistics, _logits_to_gradient_
        if fused.loss:  # in one pass over the logits each
            from megaenc.model.kernels.cross_entropy import logits_to_gradient_, softmax_statistics
        first = weight_VH.size(0) * group.rank()
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_NH.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NH.device)
        train = train and any(ctx.needs_input_grad[:2])
        to_hidden_NH = torch.empty_like(hidden_NH) if train else None
        to_weight_VH = None  # float32: in bfloat16 the sum over parts would be rounded as often as there are parts
        for start in range(0, len(labels_N), rows):
            part = slice(start, start + rows)
            hidden_nH, labels_n = hidden_NH[part], labels_N[part]
            logits_nV = torch.mm(hidden_nH, weight_VH.t())
            top_n, sum_n, target_n, token_n = _gather_statistics(softmax_statistics(logits_nV, labels_n, first, columns), group)
            losses_N[part] = sum_n.log() + top_n - target_n
            correct += (token_n == labels_n).sum()
            if train:
                error_nV = logits_to_gradient_(logits_nV, labels_n, top_n, sum_n, first, columns)
                torch.mm(error_nV, weight_VH, out=to_hidden_NH[part])
                to_weight_VH = accumulate_matmul(to_weight_VH, error_nV.t(), hidden_nH, in_float32=fused.loss and fused.sum)
        if train and to_weight_VH is None:
            to_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        ctx.gradients, ctx.group, ctx.dtype = (to_hidden_NH, to_weight_VH), group, weight_VH.dtype
        ctx.mark_non_differentiable(correct)
        return losses_N.sum(), correct

    @staticmethod
    @once_differentiable
    def backward(ctx, scale, _):
        to_hidden_NH, to_weight_VH = ctx.gradients
        del ctx.gradients
        to_hidden_NH.mul_(scale)
        if ctx.group.size() > 1:
            dist.all_reduce(to_hidden_NH, group=ctx.group)
        # Scaled on the way to the weight's numbers, into which autograd would cast it anyway.
        scaled_VH = to_weight_VH if ctx.dtype == torch.float32 else torch.empty_like(to_weight_VH, dtype=ctx.dtype)
        torch.mul(to_weight_VH, scale, out=scaled_VH)
        return to_hidden_NH, scaled_VH, None, None, None, None, None, None


def _softmax_statistics(logits_nV: Tensor, labels_n: Tensor, first: int, columns: int) -> Tensor:
    """Return what kernels.cross_entropy.statistics does, by torch's operations; columns of padding become -inf."""
    logits_nV[:, columns:].fill_(float("-inf"))
    at_n1, own_n = _label_columns(logits_nV, labels_n, first, columns)
    target_n = torch.where(own_n, logits_nV.gather(1, at_n1).squeeze(1).float(), 0.0)
    found = []
    for piece in _row_chunks(logits_nV):
        scores = logits_nV[piece].float()
        highest, token = scores.max(dim=1)
        highest.clamp_(min=torch.finfo(torch.float32).min)  # a rank may hold padding alone
        found.append(torch.stack([highest, (scores - highest[:, None]).exp_().sum(dim=1), token.float() + first]))
    highest_n, sum_n, token_n = torch.cat(found, dim=1)
    return torch.stack([highest_n, sum_n, target_n, token_n])


def _logits_to_gradient_(logits_nV: Tensor, labels_n: Tensor, top_n: Tensor, sum_n: Tensor, first: int, columns: int) -> Tensor:
    """Return what kernels.cross_entropy.to_gradient_ does, by torch's operations, for logits that `_softmax_statistics` has seen."""
    at_n1, own_n = _label_columns(logits_nV, labels_n, first, columns)
    hit_n1, shift_n1 = own_n[:, None].float(), (top_n + sum_n.log())[:, None]
    for piece in _row_chunks(logits_nV):
        logits_nV[piece] = (logits_nV[piece] - shift_n1[piece]).exp_().scatter_add_(1, at_n1[piece], -hit_n1[piece])
    return logits_nV


def _label_columns(logits_nV: Tensor, labels_n: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label, int64[n, 1], and bool[n]: whether it is this rank's."""
    own_n = (labels_n >= first) & (labels_n < first + columns)
    return (labels_n - first).clamp(0, logits_nV.size(1) - 1)[:, None], own_n


def _row_chunks(logits_nV: Tensor) -> Iterator[slice]:
    """Yield rows whose float32 numbers stay in a host's caches; an accelerator takes all at once."""
    rows, width = logits_nV.shape
    return row_slices(rows, width, _CACHE_ELEMENTS) if logits_nV.device.type == "cpu" else iter([slice(None)])


def _gather_statistics(own_4n: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return the statistics of the whole vocabulary from those of each rank's share."""
    if group.size() == 1:
        return own_4n.unbind()
    all_R4n = own_4n.new_empty(group.size(), *own_4n.shape)
    dist.all_gather_into_tensor(all_R4n.flatten(0, 1), own_4n, group=group)
    return combine_statistics(all_R4n)


def combine_statistics(all_R4n: Tensor) -> tuple[Tensor, ...]:
    """Combine the shares' highest score, sum of exp(score - highest), label's score and likeliest token (exact below 2^24)."""
    highest_Rn, sum_Rn, target_Rn, token_Rn = all_R4n.unbind(1)
    top_n = highest_Rn.amax(0)
    token_n = torch.where(highest_Rn == top_n, token_Rn, float("inf")).amin(0)
    return top_n, (sum_Rn * (highest_Rn - top_n).exp()).sum(0), target_Rn.sum(0), token_n


def accumulate_matmul(sum_VH: Tensor | None, a_Vn: Tensor, b_nH: Tensor, *, in_float32: bool) -> Tensor:
    """Return float32 `sum_VH` (None: 0) + a b, in place; `in_float32`: unrounded, which torch can on accelerators."""
    if in_float32 and a_Vn.dtype != torch.float32:
        if sum_VH is None:
            return torch.mm(a_Vn, b_nH, out_dtype=torch.float32)
        return torch.addmm(sum_VH, a_Vn, b_nH, out_dtype=torch.float32, out=sum_VH)
    if sum_VH is None:
        return torch.mm(a_Vn, b_nH).float()
    return sum_VH.addmm_(a_Vn, b_nH) if a_Vn.dtype == sum_VH.dtype else sum_VH.add_(torch.mm(a_Vn, b_nH))
