"""Output layer and loss in one as megaenc.model.loss has it, by two kernels: a pass over the logits, and one for their gradient.

The logits stay in the numbers that the matrix product gives, and their gradient takes their place.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.kernels.cross_entropy import statistics, to_gradient_
from megaenc.model.kernels.products import add_product
from megaenc.model.loss import over_ranks

_AT_ONCE = 2**30
"""Bytes of the logits that exist at a time.

Each part of n predictions reads and writes the weight's float32 gradient, 8 V H bytes, beside products of 6 n V H operations.
At 240 operations to a byte of memory (650 TFLOP/s and 2.7 TB/s, assumed of an H100) that is 320 / n of their time: with the 2^26
logits of the host, n = 523 of a vocabulary of 128,256, three fifths; with a GiB of bfloat16, n = 4,186, a thirteenth. More would
save less than it takes of memory.
"""
_MULTIPLE = 128
"""Rows of a part: whole tiles of the matrix products."""


def fused_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    columns: int,
    group: dist.ProcessGroup,
    *,
    sum_in_float32: bool,
    at_once: int = _AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """As `summed_loss`, which describes all but two: `sum_in_float32`, whether products are added up unrounded (`add_product`),
    and `at_once`, the bytes of logits that may exist at a time."""
    rows = rows_at_once(len(labels_N), weight_VH.size(0) * hidden_NH.element_size(), at_once)
    return _FusedLoss.apply(hidden_NH, weight_VH, labels_N, columns, group, rows, sum_in_float32, torch.is_grad_enabled())


def rows_at_once(predictions: int, row_bytes: int, at_once: int) -> int:
    """Rows of each part of `predictions`, of which `at_once` bytes may exist: as few parts as can be, as large as each other."""
    most = max(1, at_once // row_bytes)
    if most > _MULTIPLE:
        most -= most % _MULTIPLE
    parts = max(1, -(-predictions // most))
    even = -(-predictions // parts)
    return max(1, min(most, -(-even // _MULTIPLE) * _MULTIPLE))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, labels_N, columns, group, rows, sum_in_float32, train):
        first = weight_VH.size(0) * group.rank()
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_NH.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NH.device)
        train = train and any(ctx.needs_input_grad[:2])
        to_hidden_NH = torch.empty_like(hidden_NH) if train else None
        to_weight_VH = None  # float32
        for start in range(0, len(labels_N), rows):
            part = slice(start, start + rows)
            hidden_nH, labels_n = hidden_NH[part], labels_N[part]
            logits_nV = torch.mm(hidden_nH, weight_VH.t())
            own_4n = statistics(logits_nV, labels_n, first, columns)
            top_n, sum_n, target_n, token_n = over_ranks(own_4n, group)
            losses_N[part] = sum_n.log() + top_n - target_n
            correct += (token_n == labels_n).sum()
            if train:
                error_nV = to_gradient_(logits_nV, labels_n, top_n, sum_n, first, columns)
                torch.mm(error_nV, weight_VH, out=to_hidden_NH[part])
                to_weight_VH = add_product(to_weight_VH, error_nV.t(), hidden_nH, in_float32=sum_in_float32)
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
