"""Attention on a CPU in bfloat16 by oneDNN's matrix products.

torch's scaled dot product multiplies bfloat16 no faster than float32 on processors without AMX.
Here scores and their softmax are float32, because scores rounded to bfloat16 are too coarse, and
the five other products of both passes are bfloat16.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.model.packed_sequences import PackedSequences

KEPT_KEYS = 1024
"""Most keys of a query whose probabilities are saved for backward; others are computed again."""
# Documents are padded to a multiple of tokens, short ones to another: few shapes need few compiled
# products.
_ALIGNMENT = 32
_SHORT = 16
_SHORT_ALIGNMENT = 8
_QUERY_BLOCK = 256  # queries that share keys under a causal mask or a window
_MAX_SCORES = 2**21
_precision_lock = threading.Lock()
_precision_users = [0]


@dataclass(frozen=True)
class QueryBlock:
    """Block of queries of a padded document, with their keys and mask.

    `queries` and `keys` are (start, stop) of the document's padded tokens. All queries attend to
    the first `masked_from` of the `keys`. For the further keys, if any, `hidden`, bool[queries, 1,
    further keys], is True if the query does not attend to the key; None means True for all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    masked_from: int
    hidden: Tensor | None

    @property
    def is_kept(self) -> bool:
        """Return whether the block's probabilities are saved for backward.

        They are saved with at most KEPT_KEYS keys; otherwise backward computes them again.
        """
        return self.keys[1] - self.keys[0] <= KEPT_KEYS


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of equal length and prefix length in the layout of a pack.

    Args:
        start: First padded token of the batch in the layout.
        size: Padded length of a document.
        count: Number of documents.
        blocks: Blocks of queries of one document.
    """

    start: int
    size: int
    count: int
    blocks: list[QueryBlock]


@dataclass(frozen=True)
class PackLayout:
    """Layout of a row's tokens for batched products, with documents by length.

    Each document is padded and has the shape [groups, padded tokens, width], with `groups`
    key/value heads. For queries each token has `repeats` rows, one for each query head of the
    group, so that keys and values are not copied. Tokens are padded to a multiple of 8 or 32. Built
    by `from_packed`; `gather` and `scatter` copy tensors into the layout and back. `batches` has
    the documents, in order of their lengths. Rows are int64 indices: `source_rows` has that of
    [tokens * groups] for each row of the layout, `layout_rows` the inverse, and `padding_rows` are
    the rows of the layout that are padding.
    """

    groups: int
    repeats: int
    source_rows: Tensor  # int64[rows of the layout], in [tokens * groups]
    layout_rows: Tensor  # int64[tokens * groups], the inverse
    padding_rows: Tensor  # int64, in the layout
    batches: list[DocumentBatch]

    @classmethod
    def from_packed(
        cls, packing: PackedSequences, heads: int, groups: int, window: int | None
    ) -> "PackLayout":
        """Return the PackLayout of a row, with tensors on the CPU.

        Args:
            packing: Documents of the row, and their mask.
            heads: Query heads, a multiple of `groups`.
            groups: Key/value heads.
            window: Tokens to each side that are attended to; None: all.
        """
        source_rows = []
        padding_rows = []
        batches = []
        end = 0
        layout_rows = np.empty((packing.spans()[-1][2], groups), np.int64)
        build_mask = functools.cache(_build_mask)  # most blocks have the same one
        starts: dict[tuple[int, int], list[int]] = {}
        for start, prefix, stop in packing.spans():
            starts.setdefault((stop - start, prefix - start), []).append(start)
        group = np.arange(groups)[:, None]
        for (length, prefix), firsts in sorted(starts.items()):
            alignment = _ALIGNMENT if length > _SHORT else _SHORT_ALIGNMENT
            size = -(-length // alignment) * alignment
            blocks = list(_split_queries(length, prefix, size, heads // groups, window, build_mask))
            batches.append(DocumentBatch(end, size, len(firsts), blocks))
            for start in firsts:
                # Padding repeats the document's last token, so that it has no number of another
                # document.
                padded = start + np.minimum(np.arange(size), length - 1)
                rows = end * groups + group * size
                source_rows.append((padded * groups + group).ravel())
                layout_rows[start : start + length] = (rows + np.arange(length)).T
                padding_rows.append((rows + np.arange(length, size)).ravel())
                end += size
        return cls(
            groups,
            heads // groups,
            torch.from_numpy(np.concatenate(source_rows)),
            torch.from_numpy(layout_rows.ravel()),
            torch.from_numpy(np.concatenate(padding_rows)),
            batches,
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return a tensor of heads in this layout.

        Args:
            x: [S, heads, D]: queries, keys, values or their gradients, with any multiple of
                `groups` heads.

        Returns:
            [padded tokens, groups, heads / groups * D], of which only the rows of the view [padded
            tokens * groups, -1] have a meaning, in the order of (document, group, token). The
            padding repeats each document's last token. Gradients may not flow through it: use it
            inside an autograd Function.
        """
        rows = x.reshape(len(self.layout_rows), -1)
        return _select_rows(rows, self.source_rows).view(-1, self.groups, rows.size(1))

    def scatter(self, x: Tensor, width: int) -> Tensor:
        """Return a tensor of this layout as [S, heads, width], without its padding.

        It is the inverse of `gather`. Gradients may not flow through it: use it inside an autograd
        Function.

        Args:
            x: [padded tokens * groups, heads / groups * width], contiguous, or a view of it.
            width: Width of one head, into which the last dimension of `x` is split.
        """
        rows = _select_rows(x.view(-1, x.size(-1)), self.layout_rows)
        return rows.view(len(self.layout_rows) // self.groups, -1, width)

    def clear_padding(self, x: Tensor) -> Tensor:
        """Write zeros to the padding of a tensor of this layout in place, and return it."""
        x.view(-1, x.size(-1)).index_fill_(0, self.padding_rows, 0)
        return x


def _select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a contiguous matrix."""
    if x.size(1) * x.itemsize % 4:
        return x.index_select(0, rows)
    # As int32 it is four times as fast as in bfloat16.
    return x.view(torch.int32).index_select(0, rows).view(x.dtype)


def _split_queries(
    length: int, prefix: int, size: int, repeats: int, window: int | None, build_mask: Any
) -> Iterator[QueryBlock]:
    """Yield the QueryBlocks of a document.

    Args:
        length: Tokens of the document.
        prefix: Tokens at its start that attend to each other.
        size: Padded length.
        repeats: Query heads of a group.
        window: Tokens to each side that are attended to; None: all.
        build_mask: `_build_mask`, cached.
    """
    rows = max(_ALIGNMENT, _MAX_SCORES // (repeats * size) // _ALIGNMENT * _ALIGNMENT)
    if prefix < length or window is not None:
        rows = min(rows, _QUERY_BLOCK)
    for begin in range(0, size, rows):
        end = min(begin + rows, size)
        # Keys from `first` to `last`.
        first = 0
        last = prefix if begin < prefix else 0
        if end > prefix:
            last = max(last, min(end, length))
        masked_from = min([prefix] * (begin < prefix) + [max(begin, prefix) + 1] * (end > prefix))
        if window is not None:
            first = max(0, min(begin, length - 1) - window) // _ALIGNMENT * _ALIGNMENT
            last = min(last, end + window)
            masked_from = first
        stop = min(size, -(-last // _ALIGNMENT) * _ALIGNMENT)
        hidden = None
        if prefix == length and window is None:
            masked_from = length
        elif masked_from < stop:
            limits = (limit - masked_from for limit in (begin, end, length, prefix, stop))
            hidden = build_mask(*limits, window)
        yield QueryBlock((begin, end), (first, stop), masked_from - first, hidden)


def _build_mask(
    begin: int, end: int, length: int, prefix: int, keys: int, window: int | None
) -> Tensor:
    """Return whether a key is hidden from a query, bool[end - begin, 1, keys].

    Positions are counted from the first key. Queries in the padding attend to keys as the
    document's last token does: a softmax over nothing would be NaN.
    """
    query = np.minimum(np.arange(begin, end), length - 1)[:, None]
    key = np.arange(keys)
    is_visible = ((key <= query) | ((key < prefix) & (query < prefix))) & (key < length)
    if window is not None:
        is_visible &= np.abs(key - query) <= window
    return torch.from_numpy(~is_visible)[:, None]


@contextlib.contextmanager
def float32_by_onednn() -> Iterator[None]:
    """Return a context in which torch computes float32 products by oneDNN.

    MKL, which torch uses otherwise, is slower on AMD's processors. The setting counts for the whole
    process; threads may use it at the same time. It lets oneDNN round float32 factors to bfloat16,
    which happens only with AMX: they must be representable in bfloat16. If
    `torch.backends.mkldnn.matmul.fp32_precision` is set already, nothing is changed; else the last
    thread to leave the `with` block resets it.
    """
    matmul = torch.backends.mkldnn.matmul
    with _precision_lock:
        is_changed = _precision_users[0] > 0 or matmul.fp32_precision == "none"
        if is_changed:
            matmul.fp32_precision = "bf16"
            _precision_users[0] += 1
    try:
        yield
    finally:
        if is_changed:
            with _precision_lock:
                _precision_users[0] -= 1
                if not _precision_users[0]:
                    matmul.fp32_precision = "none"


def attend_by_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: PackedSequences,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return attention [S, H, D] within documents and a window, by oneDNN's products.

    It has first gradients only, and the dtype of `q`. The layout is kept in `packing.cache`.

    Args:
        q: Queries [S, H, D], on a CPU, in bfloat16 (or float32), as `k` and `v`.
        k: Keys [S, G, D].
        v: Values [S, G, D].
        packing: Documents of the S tokens, and their mask: bidirectional, causal or prefix.
        scale: Factor of the scores.
        window: Tokens to each side that a token attends to, if the mask allows; None: all of its
            document.
    """
    key = ("onednn", q.size(1), k.size(1), window)
    if key not in packing.cache:  # once for all layers
        packing.cache[key] = PackLayout.from_packed(packing, q.size(1), k.size(1), window)
    is_training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _Attention.apply(q, k, v, packing.cache[key], scale, is_training)


@dataclass(frozen=True)
class _Products:
    """Matrix products of one block of queries for some groups of a batch's documents."""

    block: QueryBlock
    groups: slice
    queries: slice  # rows of these in their document
    keys: slice

    @classmethod
    def of_batch(cls, layout: PackLayout, batch: DocumentBatch) -> Iterator["_Products"]:
        """Yield the products of a batch of documents, about _MAX_SCORES scores each.

        Each block is split by documents and groups only, so that one may have more scores.
        """
        for block in batch.blocks:
            queries = slice(*(layout.repeats * end for end in block.queries))
            keys = slice(*block.keys)
            step = max(
                1, _MAX_SCORES // ((queries.stop - queries.start) * (keys.stop - keys.start))
            )
            for group in range(0, batch.count * layout.groups, step):
                yield cls(block, slice(group, group + step), queries, keys)

    def compute_probabilities(
        self, q: Tensor, k: Tensor, scale: float, is_training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the attention probabilities, and the tensor to save for backward.

        Args:
            q: Queries of a batch of documents, [documents * groups, rows, D].
            k: Keys of the batch, [documents * groups, keys, D].
            scale: Factor of the scores.
            is_training: Whether a backward pass follows; if not, the second tensor is unused.

        Returns:
            Probabilities in the dtype of `q`, [groups, queries, keys] by the slices of these names,
            which select from `q` and `k`; and the tensor to save: the probabilities, or in training
            for a block that is not `is_kept` the largest score of each query.
        """
        q = q[self.groups, self.queries]
        k = k[self.groups, self.keys]
        is_exact = q.dtype == torch.bfloat16  # float32 numbers would be rounded with AMX
        with float32_by_onednn() if is_exact else contextlib.nullcontext():
            scores = self._compute_scores(q.float(), k.float(), scale)
        largest = scores.amax(-1, keepdim=True) if is_training and not self.block.is_kept else None
        probabilities = torch.softmax(scores, -1, out=scores).to(q.dtype)
        return probabilities, probabilities if largest is None else largest

    def restore_probabilities(self, saved: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the attention probabilities again, up to rounding, in backward.

        Those of a block that `is_kept` are `saved` itself. For others, the product subtracts the
        largest score of each query, by another column, before it rounds scores to bfloat16: those
        that matter are then near zero.

        Args:
            saved: Tensor to save that `compute_probabilities` returned.
            q: Queries that it got.
            k: Keys that it got.
            scale: Factor of the scores that it got.
        """
        if self.block.is_kept:
            return saved
        q = q[self.groups, self.queries]
        k = k[self.groups, self.keys]
        scores = self._compute_scores(
            torch.cat([q, (saved / -scale).to(q.dtype)], -1), F.pad(k, (0, 1), value=1.0), scale
        )
        return torch.softmax(scores, -1, out=scores)

    def _compute_scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return scale q k^T in the dtype of `q`, -inf for hidden keys."""
        scores = q.new_empty(q.size(0), q.size(1), k.size(1))
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
        if self.block.masked_from < k.size(1):
            by_token = scores.view(
                len(scores), self.block.queries[1] - self.block.queries[0], -1, k.size(1)
            )
            masked = by_token[..., self.block.masked_from :]
            if self.block.hidden is None:
                masked.fill_(float("-inf"))
            else:
                masked.masked_fill_(self.block.hidden, float("-inf"))
        return scores


class _Attention(torch.autograd.Function):
    """Attention in a PackLayout.

    Probabilities are saved in the dtype of the inputs, if KEPT_KEYS allows.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout, scale, is_training):
        width = q.size(2)
        kept = []
        queries = layout.gather(q)
        keys = layout.gather(k)
        values = layout.gather(v)
        out = torch.empty_like(queries)
        for batch in layout.batches:
            q_rows = _view_batch(queries, batch, width)
            k_rows = _view_batch(keys, batch, width)
            v_rows = _view_batch(values, batch, width)
            out_rows = _view_batch(out, batch, width)
            for part in _Products.of_batch(layout, batch):
                probabilities, saved = part.compute_probabilities(
                    q_rows, k_rows, scale, is_training
                )
                torch.bmm(
                    probabilities,
                    v_rows[part.groups, part.keys],
                    out=out_rows[part.groups, part.queries],
                )
                if is_training:
                    kept.append(saved)
        if is_training:
            ctx.save_for_backward(q, k, v, *kept)
            ctx.layout = layout
            ctx.scale = scale
        return layout.scatter(out, width)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        layout = ctx.layout
        scale = ctx.scale
        q, k, v, *kept = ctx.saved_tensors
        kept = iter(kept)
        width = q.size(2)
        dtype = q.dtype
        queries = layout.gather(q)
        keys = layout.gather(k)
        values = layout.gather(v)
        upstream = layout.clear_padding(layout.gather(gradient))
        to_q = torch.empty_like(queries)
        to_k = torch.empty_like(keys)
        to_v = torch.empty_like(values)
        for batch in layout.batches:
            q_rows = _view_batch(queries, batch, width)
            k_rows = _view_batch(keys, batch, width)
            v_rows = _view_batch(values, batch, width)
            g_rows = _view_batch(upstream, batch, width)
            dq_rows = _view_batch(to_q, batch, width)
            dk_rows = _view_batch(to_k, batch, width)
            dv_rows = _view_batch(to_v, batch, width)
            is_single = len(batch.blocks) == 1
            # Keys of several blocks sum their gradients in float32.
            dk = dk_rows if is_single else torch.zeros(dk_rows.shape)
            dv = dv_rows if is_single else torch.zeros(dv_rows.shape)
            for part in _Products.of_batch(layout, batch):
                probabilities = part.restore_probabilities(next(kept), q_rows, k_rows, scale)
                query_rows = (part.groups, part.queries)
                q_part = q_rows[query_rows]
                g_part = g_rows[query_rows]
                dq_part = dq_rows[query_rows]
                key_rows = (part.groups, part.keys)
                k_part = k_rows[key_rows]
                v_part = v_rows[key_rows]
                dk_part = dk[key_rows]
                dv_part = dv[key_rows]
                scores = torch.bmm(g_part, v_part.mT)
                torch._softmax_backward_data(scores, probabilities, -1, dtype, grad_input=scores)
                torch.baddbmm(dq_part, scores, k_part, beta=0, alpha=scale, out=dq_part)
                if is_single:
                    torch.bmm(probabilities.mT, g_part, out=dv_part)
                    torch.baddbmm(dk_part, scores.mT, q_part, beta=0, alpha=scale, out=dk_part)
                else:
                    dv_part += torch.bmm(probabilities.mT, g_part)
                    dk_part.add_(torch.bmm(scores.mT, q_part), alpha=scale)
            if not is_single:
                dk_rows.copy_(dk)
                dv_rows.copy_(dv)
        return *(layout.scatter(x, width) for x in (to_q, to_k, to_v)), None, None, None


def _view_batch(x: Tensor, batch: DocumentBatch, width: int) -> Tensor:
    """Return a batch's rows of a tensor in a PackLayout.

    The result is a view [documents * groups, rows, width].
    """
    return x[batch.start : batch.start + batch.count * batch.size].view(
        batch.count * x.size(1), -1, width
    )
