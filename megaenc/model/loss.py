"""Output layer and loss in one, some predictions at a time: the logits of all of them never exist."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.elementwise import parts

_AT_ONCE = 2**26
"""Logits that exist at a time, as float32 a quarter of a GiB: enough rows for the matrix products to be as fast as undivided."""
_IN_CACHE = 2**20
"""Of these, so many at a time are widened to float32 for the softmax."""


def summed_loss(
    hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, columns: int, group: dist.ProcessGroup, at_once: int = _AT_ONCE
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and correct guesses of softmax(hidden weight^T), each summed over the N predictions: (float32, int64).

    `weight_VH` is this rank's share of the vocabulary, rows from `columns` on being padding; `labels_N` are ids of the whole
    one; N may be 0. Of equally likely tokens the lowest id is the guess. At most `at_once` logits exist at a time.

    The gradients are exact and made on the way, since a sum needs nothing of what comes after it; backward scales them and adds
    those of `hidden_NH` up over `group`. So one softmax serves both ways, and nothing of it is kept.
    """
    rows = max(1, at_once // weight_VH.size(0))
    return _SummedLoss.apply(hidden_NH, weight_VH, labels_N, columns, group, rows, torch.is_grad_enabled())


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, labels_N, columns, group, rows, train):
        first = weight_VH.size(0) * group.rank()
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_NH.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NH.device)
        train = train and any(ctx.needs_input_grad[:2])
        # Parts are added up in float32: in bfloat16 each sum would be rounded as often as there are parts.
        to_hidden_NH = torch.empty_like(hidden_NH) if train else None
        to_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if train else None
        for start in range(0, len(labels_N), rows):
            part = slice(start, start + rows)
            hidden_nH, labels_n = hidden_NH[part], labels_N[part]
            logits_nV = torch.mm(hidden_nH, weight_VH.t())
            logits_nV[:, columns:].fill_(float("-inf"))
            own_n = (labels_n >= first) & (labels_n < first + columns)
            at_n1 = (labels_n - first).clamp(0, weight_VH.size(0) - 1)[:, None]
            target_n = torch.where(own_n, logits_nV.gather(1, at_n1).squeeze(1).float(), 0.0)
            highest_n, sum_n, token_n = _statistics(logits_nV)
            top_n, sum_n, target_n, token_n = _over_ranks(highest_n, sum_n, target_n, token_n + first, group)
            top_n += sum_n.log_()  # by which exp(logit - top) is the probability
            losses_N[part] = top_n - target_n
            correct += (token_n == labels_n).sum()
            if train:
                error_nV = _errors(logits_nV, top_n, at_n1, own_n)
                to_hidden_NH[part] = torch.mm(error_nV, weight_VH)
                _add_product(to_weight_VH, error_nV.t(), hidden_nH)
        ctx.gradients, ctx.group = (to_hidden_NH, to_weight_VH), group
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
        return to_hidden_NH, to_weight_VH.mul_(scale), None, None, None, None, None


def _pieces(logits_nV: Tensor) -> Iterator[slice]:
    """Rows whose float32 numbers stay in a host's caches; an accelerator takes all at once."""
    rows, width = logits_nV.shape
    return parts(rows, width, _IN_CACHE) if logits_nV.device.type == "cpu" else iter([slice(None)])


def _statistics(logits_nV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the highest logit, the sum of exp(logit - highest), both float32, and where it is the highest."""
    found = []
    for piece in _pieces(logits_nV):
        scores = logits_nV[piece].float()
        highest, token = scores.max(dim=1)
        highest.clamp_(min=torch.finfo(torch.float32).min)  # a rank may hold padding alone
        found.append((highest, (scores - highest[:, None]).exp_().sum(dim=1), token))
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def _errors(logits_nV: Tensor, top_n: Tensor, at_n1: Tensor, own_n: Tensor) -> Tensor:
    """exp(logits - top), less one where this rank has the label: the loss's gradient, in the place of the logits."""
    hit_n1 = own_n[:, None].float()
    for piece in _pieces(logits_nV):
        error = (logits_nV[piece] - top_n[piece, None]).exp_().scatter_add_(1, at_n1[piece], -hit_n1[piece])
        logits_nV[piece] = error
    return logits_nV


def _over_ranks(highest_n: Tensor, sum_n: Tensor, target_n: Tensor, token_n: Tensor, group: dist.ProcessGroup) -> tuple:
    if group.size() == 1:
        return highest_n, sum_n, target_n, token_n
    return over_ranks(torch.stack([highest_n, sum_n, target_n, token_n.float()]), group)  # ids below 2^24 are exact


def over_ranks(own_4n: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Of the whole vocabulary, from each share: highest score, sum of exp(score - highest), label's score, likeliest token."""
    if group.size() == 1:
        return own_4n.unbind()
    all_R4n = own_4n.new_empty(group.size(), *own_4n.shape)
    dist.all_gather_into_tensor(all_R4n.flatten(0, 1), own_4n, group=group)
    return combined(all_R4n)


def combined(all_R4n: Tensor) -> tuple[Tensor, ...]:
    """The same of shares that are here."""
    highest_Rn, sum_Rn, target_Rn, token_Rn = all_R4n.unbind(1)
    top_n = highest_Rn.amax(0)
    token_n = torch.where(highest_Rn == top_n, token_Rn, float("inf")).amin(0)
    return top_n, (sum_Rn * (highest_Rn - top_n).exp()).sum(0), target_Rn.sum(0), token_n


def _add_product(sum_VH: Tensor, a_Vn: Tensor, b_nH: Tensor) -> None:
    if a_Vn.dtype == sum_VH.dtype:
        sum_VH.addmm_(a_Vn, b_nH)
    else:
        sum_VH.add_(torch.mm(a_Vn, b_nH))
