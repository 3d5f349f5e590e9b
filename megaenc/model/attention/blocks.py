"""Attention with a window through torch's scaled dot product, on every device.

Queries are cut into blocks, each of which attends to itself and a window to each side, so that time
and memory are linear in the length. All blocks of a pack are one batch, whose mask is shared by all
layers with the window.
"""

import contextlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaenc.model.packed_sequences import PackedSequences, copy_to_device

_MIN_BLOCK = 64  # queries; smaller blocks share fewer keys

_SDPA_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def sdpa_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that keeps torch's scaled dot product from cuDNN.

    cuDNN would build a plan for each document length. Within the `with` block it counts for the
    whole process. On a CPU nothing is restricted.
    """
    return contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(list(_SDPA_KERNELS))


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float, window: int
) -> Tensor:
    """Return attention [S, H, D] within documents and a window, by blocks of queries.

    It runs on any device and has gradients. The mask is kept in `packing.cache`.

    Args:
        q: Queries [S, H, D].
        k: Keys [S, G, D].
        v: Values [S, G, D].
        packing: Documents of the S tokens, and their mask: bidirectional, causal or prefix.
        scale: Factor of the scores.
        window: Tokens to each side that a token attends to, if the mask allows.
    """
    tokens = len(q)
    block = max(window, _MIN_BLOCK)
    count = -(-tokens // block)
    padding = count * block - tokens
    key = ("blocks", window)
    if key not in packing.cache:  # once for all layers
        packing.cache[key] = copy_to_device(
            torch.from_numpy(_build_mask(packing, tokens, block, window)), q.device
        )
    # [count, H, block, D]
    queries = F.pad(q, (0, 0, 0, 0, 0, padding)).unflatten(0, (count, block)).transpose(1, 2)
    # Keys and values, [count, G, block + 2 window, D] each.
    neighbors = (
        F.pad(x, (0, 0, 0, 0, window, padding + window))
        .unfold(0, block + 2 * window, block)
        .transpose(2, 3)
        for x in (k, v)
    )
    with sdpa_kernels(q.device):
        out = F.scaled_dot_product_attention(
            queries,
            *neighbors,
            attn_mask=packing.cache[key],
            scale=scale,
            enable_gqa=k.size(1) != q.size(1),
        )
    return out.transpose(1, 2).flatten(0, 1)[:tokens]


def _build_mask(packing: PackedSequences, tokens: int, block: int, window: int) -> np.ndarray:
    """Return the mask of a pack in blocks, True if a query attends to a key.

    Its shape is [blocks, 1, block, block + 2 window]. Queries in the padding attend to the padding,
    because a softmax over nothing would be NaN; their results are discarded.
    """
    blocks = -(-tokens // block)
    query = np.arange(blocks * block, dtype=np.int32).reshape(blocks, block, 1)
    key = np.arange(-window, block + window, dtype=np.int32) + query[:, :1]
    # Document of each key, from the padding before the first key on.
    document = np.full(blocks * block + 2 * window, -1, dtype=np.int32)
    prefix_end = np.zeros(blocks * block, dtype=np.int32)
    for document_index, (start, prefix, stop) in enumerate(packing.spans()):
        document[window + start : window + stop] = document_index
        prefix_end[start:stop] = prefix
    same = document[window + query] == document[window + key]
    ahead = (query < prefix_end[query]) & (key < prefix_end[query])  # both in the prefix
    is_visible = same & (np.abs(key - query) <= window) & ((key <= query) | ahead)
    return is_visible[:, None]
