"""Attention by cuDNN through torch's scaled dot product, which takes batches of one shape: documents are padded to few shapes.

cuDNN's plan for each shape takes tens to hundreds of milliseconds. So documents of lengths up to 128, 256, 512, ... are a batch
each, whose size is rounded up to a power of two: some tens of shapes, and mostly less than twice the tokens. Unless the mask is
causal, a batch has a mask of [documents, length, length] numbers, which is kept for all layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaenc.model.kernels.launch import next_power_of_2
from megaenc.model.packed_sequences import PackedSequences, copy_to_device
from megaenc.objectives import Attention

_MIN_LENGTH = 128
MASK_BYTES_LIMIT = 4 * 2**30
"""Of the masks of a micro-batch: what a run may begin with."""


@dataclass(frozen=True)
class PaddedBatch:
    """Documents of similar length, padded: B of length L, of which some are empty."""

    shape: tuple[int, int]  # B, L
    tokens: int  # N, padding not counted
    places: Tensor  # int64[N], of the tokens in the padded batch, its rows end to end
    bias: Tensor | None  # [B, 1, L, L], 0 where a query sees a key, else -inf; None for a causal mask


@dataclass(frozen=True)
class PaddedBatches:
    """All documents of a row in batches."""

    order: Tensor  # int64[S], the tokens as the batches have them, one after the other
    back: Tensor  # int64[S], where each token is in `order`
    batches: list[PaddedBatch]

    @classmethod
    def from_packed(cls, packing: PackedSequences, device: torch.device, dtype: torch.dtype) -> "PaddedBatches":
        """Worked out on the host; nothing waits for the device."""
        spans = np.array(packing.spans())
        lengths, prefixes = spans[:, 2] - spans[:, 0], spans[:, 1] - spans[:, 0]
        sort = np.maximum(_MIN_LENGTH, 1 << np.ceil(np.log2(lengths)).astype(np.int64))
        rows, batches = [], []
        for length in np.unique(sort):
            found = np.flatnonzero(sort == length)
            rows += [np.arange(start, stop) for start, _, stop in spans[found]]
            places = [at * length + np.arange(lengths[document]) for at, document in enumerate(found)]
            count = next_power_of_2(len(found))
            # Those that fill the batch up have one token: a softmax over nothing would be no number.
            sizes = np.ones((2, count), dtype=np.int64)
            sizes[:, : len(found)] = lengths[found], prefixes[found]
            bias = None
            if packing.attention != Attention.CAUSAL:
                bias = _build_mask(copy_to_device(torch.from_numpy(sizes), device), int(length), dtype)
            at = np.concatenate(places)
            batches.append(PaddedBatch((count, int(length)), len(at), copy_to_device(torch.from_numpy(at), device), bias))
        order = np.concatenate(rows)
        return cls(*(copy_to_device(torch.from_numpy(array), device) for array in (order, np.argsort(order))), batches)


def max_mask_bytes(packs: int, seq_length: int, dtype: torch.dtype) -> int:
    """Return about the most that the masks of a micro-batch can take: where documents fill their packs."""
    length = max(_MIN_LENGTH, next_power_of_2(seq_length))
    return next_power_of_2(packs) * length**2 * dtype.itemsize


def _build_mask(sizes: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """`sizes`: int64[2, B], lengths and prefixes."""
    # What lies beyond a document sees it too; what comes of that is left out.
    at = torch.arange(length, device=sizes.device)
    lengths, prefixes = sizes[:, :, None, None]
    query, key = at[:, None], at[None]
    seen = ((key <= query) | ((key < prefixes) & (query < prefixes))) & (key < lengths)
    bias = torch.zeros(seen.shape, dtype=dtype, device=sizes.device)
    return bias.masked_fill_(~seen, float("-inf"))[:, None]


def attend_padded(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float) -> Tensor:
    """q [S, H, D], k and v [S, G, D] -> [S, H, D]."""
    key = ("padded", q.dtype)
    if key not in packing.cache:  # once for all layers
        packing.cache[key] = PaddedBatches.from_packed(packing, q.device, q.dtype)
    padded = packing.cache[key]
    sizes = [batch.tokens for batch in padded.batches]
    sorted_by_length = zip(*(x.index_select(0, padded.order).split(sizes) for x in (q, k, v)), strict=True)
    with cudnn_only():
        parts = [_attend_batch(batch, *tensors, scale) for batch, tensors in zip(padded.batches, sorted_by_length, strict=True)]
    return torch.cat(parts).index_select(0, padded.back)


def cudnn_only():
    """A context in which torch's scaled dot product is cuDNN's or an error."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def _attend_batch(batch: PaddedBatch, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[N, heads, D] each -> [N, H, D]. Under a causal mask nothing sees the padding, which comes last."""
    count, length = batch.shape

    def padded(x: Tensor) -> Tensor:
        whole = x.new_zeros(count * length, *x.shape[1:]).index_copy(0, batch.places, x)
        return whole.unflatten(0, (count, length)).transpose(1, 2)  # [B, heads, L, D]

    out = F.scaled_dot_product_attention(
        *(padded(x) for x in (q, k, v)),
        attn_mask=batch.bias,
        is_causal=batch.bias is None,
        scale=scale,
        enable_gqa=k.size(1) != q.size(1),
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, batch.places)
