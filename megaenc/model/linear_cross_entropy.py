"""Chunked output layer with cross-entropy.

The logits of all predictions never exist at the same time.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.backend.main_grad import accumulate_matmul
from megaenc.model.functional import row_slices
from megaenc.model.kernels import NO_FUSED_KERNELS, FusedKernels

CHUNK_LOGITS = 2**26
"""Logits per chunk (256 MiB in float32): enough rows for the matrix products to reach full
speed."""
FUSED_CHUNK_BYTES = 2**30
"""Bytes of logits per chunk with the fused kernel.

Each chunk of n predictions reads and writes the weight's float32 gradient, 8 V H bytes, next to
products of 6 n V H FLOPs: at 240 FLOPs per byte (650 TFLOP/s and 2.7 TB/s, assumed for an H100) 320
/ n of their time. With 2^26 logits, n = 523 for a vocabulary of 128,256, that is three fifths; with
a GiB of bfloat16, n = 4,186, a thirteenth.
"""
_ROW_MULTIPLE = 128
"""Chunks have a multiple of this many rows: whole tiles of the matrix products."""
_CACHE_ELEMENTS = 2**20
"""Logits that the CPU casts to float32 at a time for the softmax."""


@dataclass(frozen=True)
class Predictions:
    """Positions of a row whose outputs are scored, with their N labels; N may be 0.

    positions: int64[N], increasing; None: all rows. labels: int64[N], ids in the whole vocabulary,
    or classes; None: logits are returned in place of losses. weights: float32[N], factors of the
    losses; None: 1. soft_labels: (ids int64[N, K], probabilities float32[N, K]), whose
    cross-entropy replaces that of the labels, which then count only for accuracy. classes: number
    of classes, the first rows of the output layer; 0: labels are token ids. per_token: return
    losses float32[N] in place of their sum; only without gradients.
    """

    positions: Tensor | None
    labels: Tensor | None = None
    weights: Tensor | None = None
    soft_labels: tuple[Tensor, Tensor] | None = None
    classes: int = 0
    per_token: bool = False


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    predictions: Predictions,
    columns: int,
    group: dist.ProcessGroup,
    fused: FusedKernels = NO_FUSED_KERNELS,
    chunk_size: int | None = None,
    bias_V: Tensor | None = None,
    main_grad_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the output layer, and the number correct.

    The loss, float32[], sums the cross-entropies of softmax(hidden weight^T + bias) in nats times
    their weights; with `predictions.per_token`, only without gradients, they stay float32[N]. The
    number correct, int64[], counts labels that are the likeliest token, the lowest id on a tie,
    without weights. All ranks of `group` call it together with equal `hidden_NH` and `predictions`,
    and get equal results; backward may run once only and sums the gradient of `hidden_NH` over
    `group`. With label distributions q, a cross-entropy is logsumexp(z) - sum_k q_k z[id_k].

    Args:
        hidden_NH: Hidden states [N, H] at the positions of `predictions`.
        weight_VH: This rank's rows of the output layer's weight, in the dtype of `hidden_NH`.
        predictions: Labels, which are required, weights and label distributions; `positions` is not
            read.
        columns: Rows of `weight_VH` without padding, which follows them.
        group: Ranks that share the vocabulary.
        fused: Kernels to use; `loss` counts only without label distributions and classes.
        chunk_size: Logits of this rank per chunk, or their bytes with `fused.loss`; None:
            CHUNK_LOGITS or FUSED_CHUNK_BYTES.
        bias_V: This rank's part of the biases.
        main_grad_VH: float32 buffer to which forward adds the weight's gradient of the summed loss,
            so that backward, which then accepts no scale but 1, returns an empty one.

    Raises:
        ValueError: `predictions.per_token` is set and gradients are enabled.
    """
    count = len(predictions.labels)
    # The fused kernel reads one label and is made for wide rows.
    if predictions.soft_labels is not None or predictions.classes:
        fused = dataclasses.replace(fused, loss=False)
    if fused.loss:
        row_size = weight_VH.size(0) * hidden_NH.element_size()
        rows = rows_per_chunk(count, row_size, chunk_size or FUSED_CHUNK_BYTES)
    else:
        row_size = min(predictions.classes or weight_VH.size(0), weight_VH.size(0))
        rows = rows_per_chunk(count, row_size, chunk_size or CHUNK_LOGITS)
    train = torch.is_grad_enabled()
    if predictions.per_token and train:
        raise ValueError("per_token: found gradients enabled, expected torch.no_grad()")
    options = _LossOptions(predictions, main_grad_VH, columns, group, fused, rows, train)
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, bias_V, options)


def rows_per_chunk(predictions: int, row_size: int, chunk_size: int) -> int:
    """Return the number of predictions of a chunk, so that few equal chunks suffice.

    It is at most `chunk_size // row_size`, rounded to a multiple of 128 if possible, and at least
    1.

    Args:
        predictions: Predictions of all chunks; may be 0.
        row_size: Size of the logits of one, in the unit of `chunk_size`: logits or bytes.
        chunk_size: Largest size of a chunk.
    """
    max_rows = max(1, chunk_size // row_size)
    if max_rows > _ROW_MULTIPLE:
        max_rows -= max_rows % _ROW_MULTIPLE
    chunks = max(1, -(-predictions // max_rows))
    even = -(-predictions // chunks)
    return max(1, min(max_rows, -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE))


@dataclass(frozen=True)
class _LossOptions:
    """Arguments of `linear_cross_entropy` without a gradient."""

    predictions: Predictions
    main_grad_VH: Tensor | None
    columns: int
    group: dist.ProcessGroup
    fused: FusedKernels
    rows: int
    """Predictions per chunk."""
    train: bool
    """True if gradients are enabled, which they never are inside an autograd function."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked output layer and cross-entropy.

    Forward computes the exact gradients, so that one softmax suffices; backward scales and reduces
    them.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, options):
        if options.fused.loss:
            from megaenc.model.kernels.cross_entropy import logits_to_gradient_, softmax_statistics
        else:
            softmax_statistics = _softmax_statistics
            logits_to_gradient_ = _logits_to_gradient_
        predictions = options.predictions
        labels_N = predictions.labels
        weights_N = predictions.weights
        columns = options.columns
        first = weight_VH.size(0) * options.group.rank()
        used = weight_VH.size(0)
        if predictions.classes:
            columns = min(max(predictions.classes - first, 0), columns)
            used = max(columns, 1)  # a rank without a class has a row of padding
        weight_UH = weight_VH[:used]
        bias_U = None if bias_V is None else bias_V[:used]
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=hidden_NH.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NH.device)
        train = options.train and any(ctx.needs_input_grad[:3])
        to_hidden_NH = torch.empty_like(hidden_NH) if train else None
        # float32: in bfloat16 the sum would be rounded after each chunk
        to_weight_UH = None if options.main_grad_VH is None else options.main_grad_VH[:used]
        to_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start in range(0, len(labels_N), options.rows):
            part = slice(start, start + options.rows)
            hidden_nH = hidden_NH[part]
            labels_n = labels_N[part]
            # Label distributions are further arguments of the torch functions.
            soft_labels = [tensor_NK[part] for tensor_NK in predictions.soft_labels or ()]
            product = (hidden_nH, weight_UH.t())
            logits_nU = torch.mm(*product) if bias_U is None else torch.addmm(bias_U, *product)
            local_4n = softmax_statistics(logits_nU, labels_n, first, columns, *soft_labels)
            highest_n, sum_n, target_n, token_n = _gather_statistics(local_4n, options.group)
            losses_N[part] = sum_n.log() + highest_n - target_n
            correct += (token_n == labels_n).sum()
            if train:
                error_nU = logits_to_gradient_(
                    logits_nU, labels_n, highest_n, sum_n, first, columns, *soft_labels
                )
                if weights_N is not None:
                    error_nU *= weights_N[part, None]
                torch.mm(error_nU, weight_UH, out=to_hidden_NH[part])
                to_weight_UH = accumulate_matmul(
                    to_weight_UH, error_nU.t(), hidden_nH, in_float32=options.fused.sum
                )
                if bias_V is not None:
                    to_bias_V[:used] += error_nU.sum(dim=0, dtype=torch.float32)
        to_weight_VH = None
        if train and options.main_grad_VH is not None:
            weight_VH.grad_added_to_main_grad = (
                True  # read by megatron-core, which then ignores the empty gradient
            )
        elif train:
            if to_weight_UH is None:
                to_weight_UH = torch.zeros_like(weight_UH, dtype=torch.float32)
            unused = weight_VH.size(0) - used
            to_weight_VH = F.pad(to_weight_UH, (0, 0, 0, unused)) if unused else to_weight_UH
        ctx.gradients = (to_hidden_NH, to_weight_VH, to_bias_V)
        ctx.group = options.group
        ctx.weight = (weight_VH.shape, weight_VH.dtype)
        ctx.mark_non_differentiable(correct)
        if weights_N is not None:
            losses_N *= weights_N
        return losses_N if predictions.per_token else losses_N.sum(), correct

    @staticmethod
    @once_differentiable
    def backward(ctx, scale, _):
        to_hidden_NH, to_weight_VH, to_bias_V = ctx.gradients
        del ctx.gradients
        to_hidden_NH.mul_(scale)
        if ctx.group.size() > 1:
            dist.all_reduce(to_hidden_NH, group=ctx.group)
        shape, dtype = ctx.weight
        if to_weight_VH is None:
            torch._assert_async(
                scale == 1,
                "the output layer's gradient is already in main_grad, expected an unscaled loss",
            )
            scaled_VH = to_hidden_NH.new_empty(shape)
        else:
            # Scaled while it is cast to the weight's dtype, which autograd would do anyway.
            scaled_VH = (
                to_weight_VH
                if dtype == torch.float32
                else torch.empty_like(to_weight_VH, dtype=dtype)
            )
            torch.mul(to_weight_VH, scale, out=scaled_VH)
        to_bias_V = None if to_bias_V is None else to_bias_V.mul_(scale).to(dtype)
        return to_hidden_NH, scaled_VH, to_bias_V, None


def _softmax_statistics(
    logits_nV: Tensor,
    labels_n: Tensor,
    first: int,
    columns: int,
    ids_nK: Tensor | None = None,
    probabilities_nK: Tensor | None = None,
) -> Tensor:
    """Return the softmax statistics of each row of logits, float32[4, n], in torch.

    They are those of `kernels.cross_entropy.softmax_statistics`, except that padding columns are
    overwritten. The label's score is the mean score of a label distribution if one is given (see
    `linear_cross_entropy`). If the label is not the likeliest token, the token may be any other: on
    a CPU the highest column takes longer to find than the softmax.
    """
    # Not -inf: a rank may have only padding.
    lowest = max(torch.finfo(dtype).min for dtype in (logits_nV.dtype, torch.float32))
    logits_nV[:, columns:].fill_(lowest)
    column_nK, is_local_nK = _label_columns(
        logits_nV, labels_n[:, None] if ids_nK is None else ids_nK, first, columns
    )
    scores_nK = logits_nV.gather(1, column_nK).float()
    scores_nK = scores_nK if probabilities_nK is None else scores_nK * probabilities_nK
    target_n = torch.where(is_local_nK, scores_nK, 0.0).sum(dim=1)
    label_n1, _ = _label_columns(logits_nV, labels_n[:, None], first, columns)
    statistics = []
    for piece in _row_chunks(logits_nV):
        scores = logits_nV[piece].to(torch.float32, copy=True)
        token = (
            _label_if_likeliest(scores, label_n1[piece], lowest)
            if _is_on_host(scores)
            else scores.argmax(1)
        ).float()
        highest = scores.amax(1)
        # The probability of the highest score is 1 / sum.
        largest_probability = torch.softmax(scores, 1, out=scores).amax(1)
        statistics.append(torch.stack([highest, 1 / largest_probability, token + first]))
    highest_n, sum_n, token_n = torch.cat(statistics, dim=1)
    return torch.stack([highest_n, sum_n, target_n, token_n])


def _label_if_likeliest(scores_pV: Tensor, label_p1: Tensor, lowest: float) -> Tensor:
    """Return the label's column of each row if it is the likeliest, else another.

    The columns are int64[p]. The likeliest is the first with the highest score.
    """
    score_p1 = scores_pV.gather(1, label_p1)
    highest_other_p1 = scores_pV.scatter_(1, label_p1, lowest).amax(1, keepdim=True)
    scores_pV.scatter_(1, label_p1, score_p1)
    column = torch.where(score_p1 > highest_other_p1, label_p1, (label_p1 == 0).long())[:, 0]
    ties = (score_p1 == highest_other_p1).nonzero()[:, 0]
    column[ties] = scores_pV[ties].argmax(1)
    return column


def _logits_to_gradient_(
    logits_nV: Tensor,
    labels_n: Tensor,
    highest_n: Tensor,
    sum_n: Tensor,
    first: int,
    columns: int,
    ids_nK: Tensor | None = None,
    probabilities_nK: Tensor | None = None,
) -> Tensor:
    """Overwrite logits by the loss's gradient, in torch.

    It does what `kernels.cross_entropy.logits_to_gradient_` does. `_softmax_statistics` must have
    been called on the logits, with the same labels.
    """
    column_nK, is_local_nK = _label_columns(
        logits_nV, labels_n[:, None] if ids_nK is None else ids_nK, first, columns
    )
    hit_nK = (
        is_local_nK.float()
        if probabilities_nK is None
        else torch.where(is_local_nK, probabilities_nK, 0.0)
    )
    for piece in _row_chunks(logits_nV):
        scores = logits_nV[piece].to(torch.float32, copy=True)
        highest_p1 = scores.amax(1, keepdim=True)
        probabilities = torch.softmax(
            scores, 1, out=scores
        )  # of this rank's vocabulary; faster than exp
        scale_p1 = (highest_p1 - highest_n[piece, None]).exp() / (
            sum_n[piece, None] * probabilities.amax(1, keepdim=True)
        )
        logits_nV[piece] = probabilities.mul_(scale_p1).scatter_add_(
            1, column_nK[piece], -hit_nK[piece]
        )
    return logits_nV


def _label_columns(
    logits_nV: Tensor, ids_nK: Tensor, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Return the column of each label in this rank's share, and whether it has it.

    Returns:
        (columns int64[n, K], clamped; bool[n, K], whether this rank has the label).
    """
    is_local_nK = (ids_nK >= first) & (ids_nK < first + columns)
    return (ids_nK - first).clamp(0, logits_nV.size(1) - 1), is_local_nK


def _row_chunks(logits_nV: Tensor) -> Iterator[slice]:
    """Yield slices of rows that fit into a CPU's caches as float32.

    On an accelerator it is one slice of all rows.
    """
    rows, width = logits_nV.shape
    return (
        row_slices(rows, width, _CACHE_ELEMENTS) if _is_on_host(logits_nV) else iter([slice(None)])
    )


def _is_on_host(x: Tensor) -> bool:
    """Return whether a tensor is on a CPU.

    There no kernel waits for the host to read a result.
    """
    return x.is_cpu


def _gather_statistics(local_4n: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Gather the softmax statistics of all ranks and combine them.

    The result is that of `combine_statistics`.
    """
    if group.size() == 1:
        return local_4n.unbind()
    ranks_R4n = local_4n.new_empty(group.size(), *local_4n.shape)
    dist.all_gather_into_tensor(ranks_R4n.flatten(0, 1), local_4n, group=group)
    return combine_statistics(ranks_R4n)


def combine_statistics(ranks_R4n: Tensor) -> tuple[Tensor, ...]:
    """Return the softmax statistics of the vocabulary from those of its parts.

    Args:
        ranks_R4n: float32[R, 4, n], statistics of the parts of R ranks.

    Returns:
        (highest score, sum of exp(score - highest), label's score, likeliest token), float32[n]
        each. The token is the lowest id on a tie, exact below 2^24.
    """
    highest_Rn, sum_Rn, target_Rn, token_Rn = ranks_R4n.unbind(1)
    highest_n = highest_Rn.amax(0)
    token_n = torch.where(highest_Rn == highest_n, token_Rn, float("inf")).amin(0)
    return highest_n, (sum_Rn * (highest_Rn - highest_n).exp()).sum(0), target_Rn.sum(0), token_n
