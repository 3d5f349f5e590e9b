"""Attention by cuDNN on padded batches, through torch's scaled dot product.

cuDNN needs tens to hundreds of milliseconds to plan each shape. So documents are padded to lengths
of 128, 256, 512, ..., with a batch for each length whose size is rounded up to a power of two: some
tens of shapes, and mostly less than twice the tokens. Unless attention is causal and global, a
batch has a mask of [documents, length, length] elements, which all layers share.
"""

import contextlib
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
"""Largest size of a micro-batch's masks with which a run may start."""


@dataclass(frozen=True)
class PaddedBatch:
    """Token positions and attention mask of documents of similar length.

    shape: (B, L), documents and tokens of each with padding; some rows may be empty. tokens: number
    N of tokens without padding. positions: int64[N], their indices in the flattened [B * L]. bias:
    [B, 1, L, L], 0 if the query attends to the key, else -inf; queries in the padding attend to the
    document too. None for a causal mask without window.
    """

    shape: tuple[int, int]
    tokens: int
    positions: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class PaddedBatches:
    """Padded batches of all documents of a row, and the order of the tokens in them.

    order: int64[S], the row's tokens in the order of the batches; inverse_order: int64[S], the
    position of each token in `order`; batches: list of PaddedBatch. Built by `from_packed`.
    """

    order: Tensor
    inverse_order: Tensor
    batches: list[PaddedBatch]

    @classmethod
    def from_packed(
        cls,
        packing: PackedSequences,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> "PaddedBatches":
        """Return the PaddedBatches of a row, with tensors on `device`.

        The host does not wait for the device.

        Args:
            packing: Documents of the row, and their mask.
            dtype: Dtype of the masks, of 0 and -inf; causal attention without window has none.
            window: Tokens to each side that are attended to; None: all.
        """
        spans = np.array(packing.spans())
        lengths = spans[:, 2] - spans[:, 0]
        prefixes = spans[:, 1] - spans[:, 0]
        padded_lengths = np.maximum(_MIN_LENGTH, 1 << np.ceil(np.log2(lengths)).astype(np.int64))
        rows = []
        batches = []
        for length in np.unique(padded_lengths):
            documents = np.flatnonzero(padded_lengths == length)
            rows += [np.arange(start, stop) for start, _, stop in spans[documents]]
            positions = [
                row * length + np.arange(lengths[document])
                for row, document in enumerate(documents)
            ]
            count = next_power_of_2(len(documents))
            # Empty rows have one token: a softmax over nothing would be NaN.
            sizes = np.ones((2, count), dtype=np.int64)
            sizes[:, : len(documents)] = lengths[documents], prefixes[documents]
            bias = None
            if packing.attention != Attention.CAUSAL or window is not None:
                bias = _build_mask(
                    copy_to_device(torch.from_numpy(sizes), device), int(length), dtype, window
                )
            flat = np.concatenate(positions)
            batches.append(
                PaddedBatch(
                    (count, int(length)),
                    len(flat),
                    copy_to_device(torch.from_numpy(flat), device),
                    bias,
                )
            )
        order = np.concatenate(rows)
        return cls(
            *(
                copy_to_device(torch.from_numpy(array), device)
                for array in (order, np.argsort(order))
            ),
            batches,
        )


def max_mask_bytes(packs: int, seq_length: int, dtype: torch.dtype) -> int:
    """Return about the maximum bytes of the masks of a micro-batch, for one window.

    It is reached if each document fills a pack. Masks of a layer with another window take as much
    again.

    Args:
        packs: Packs of a micro-batch, each a row of `seq_length` tokens.
        seq_length: Tokens of a pack.
        dtype: Dtype of the masks.
    """
    length = max(_MIN_LENGTH, next_power_of_2(seq_length))
    return next_power_of_2(packs) * length**2 * dtype.itemsize


def _build_mask(sizes: Tensor, length: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """Return the mask of a padded batch, [B, 1, length, length], of 0 and -inf.

    Args:
        sizes: int64[2, B], document lengths and prefix lengths.
        length: Padded length.
        window: Tokens to each side that are attended to; None: all.
    """
    # Queries in the padding attend to the document too; their results are discarded.
    position = torch.arange(length, device=sizes.device)
    lengths, prefixes = sizes[:, :, None, None]
    query = position[:, None]
    key = position[None]
    is_visible = ((key <= query) | ((key < prefixes) & (query < prefixes))) & (key < lengths)
    if window is not None:  # queries in the padding attend to the last token at least
        is_visible &= (query.clamp(max=lengths - 1) - key).abs() <= window
    bias = torch.zeros(is_visible.shape, dtype=dtype, device=sizes.device)
    return bias.masked_fill_(~is_visible, float("-inf"))[:, None]


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: PackedSequences,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return attention [S, H, D] within documents, by cuDNN on padded batches.

    It has gradients. Batches and masks are kept in `packing.cache`. Errors are of `cudnn_only`.

    Args:
        q: Queries [S, H, D], on a GPU in bfloat16 or float16; D is a multiple of 8.
        k: Keys [S, G, D].
        v: Values [S, G, D].
        packing: Documents of the S tokens, and their mask: bidirectional, causal or prefix.
        scale: Factor of the scores.
        window: Tokens to each side that a token attends to, if the mask allows; None: all of its
            document.
    """
    key = ("padded", q.dtype, window)
    if key not in packing.cache:  # once for all layers
        packing.cache[key] = PaddedBatches.from_packed(packing, q.device, q.dtype, window)
    padded = packing.cache[key]
    sizes = [batch.tokens for batch in padded.batches]
    sorted_by_length = zip(
        *(x.index_select(0, padded.order).split(sizes) for x in (q, k, v)), strict=True
    )
    with cudnn_only():
        parts = [
            _attend_batch(batch, *tensors, scale)
            for batch, tensors in zip(padded.batches, sorted_by_length, strict=True)
        ]
    return torch.cat(parts).index_select(0, padded.inverse_order)


def cudnn_only() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that restricts torch's scaled dot product to cuDNN.

    Within the `with` block, which counts for the whole process, the product raises RuntimeError if
    cuDNN cannot compute it.
    """
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def _attend_batch(batch: PaddedBatch, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention [N, H, D] of one batch's tokens.

    Args:
        q: Queries [N, H, D].
        k: Keys [N, G, D].
        v: Values [N, G, D].
        scale: Factor of the scores.
    """
    count, length = batch.shape

    def pad(x: Tensor) -> Tensor:
        flat = x.new_zeros(count * length, *x.shape[1:]).index_copy(0, batch.positions, x)
        return flat.unflatten(0, (count, length)).transpose(1, 2)  # [B, heads, L, D]

    out = F.scaled_dot_product_attention(
        *(pad(x) for x in (q, k, v)),
        attn_mask=batch.bias,
        is_causal=batch.bias is None,  # padding comes last, so that no token attends to it
        scale=scale,
        enable_gqa=k.size(1) != q.size(1),
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, batch.positions)
