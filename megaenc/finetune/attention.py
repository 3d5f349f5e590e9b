"""Attention inside each text of a packed row, for transformers' models: every direction, whatever the model's own is."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from megaenc.finetune.packing import Packed

# torch 2.11 finds out about grouped heads by itself and does not know the keyword that later versions want.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

NAME = "megaenc_packed"
"""What transformers knows this attention by. It has no mask function of that name, so a model builds no mask for it."""


@dataclass(frozen=True)
class Reading:
    """What is read and how; attention finds it in a context variable: not every model hands down what it does not know."""

    packed: Packed
    causal: bool
    wide_window: bool = False
    """Whether a window of w is w tokens to each side in bidirectional reading, and not w - 1: transformers' reading of a decoder
    with `is_causal: false`. (An encoder's own window arrives here one larger than it is, for the kernels that want it so.)"""
    windows: set[int] = field(default_factory=set)
    """The sliding windows that the model's layers asked for."""
    one_kernel: bool = True
    """Whether an accelerator's kernel for all texts may be used."""

    def reach(self, window: int | None) -> tuple[int, int]:
        """How many tokens before and behind itself a token sees; -1: all."""
        before = -1 if window is None else window if self.wide_window and not self.causal else window - 1
        return before, 0 if self.causal else before


_READING: ContextVar[Reading] = ContextVar("reading")


@contextmanager
def reading(how: Reading) -> Iterator[None]:
    """Around the forward pass of a model whose attention is NAME."""
    token = _READING.set(how)
    try:
        yield
    finally:
        _READING.reset(token)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others,
) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T) v inside each text of a row that lies in the order of `Packed`'s texts by length.

    query [1, heads, T, dim], key and value [1, groups, T, dim] -> [1, T, heads, dim]. NotImplementedError where a model asks for
    what this does not compute: a score bias, a cap, sinks, more than one row, other keys than those of the row.
    """
    how = _READING.get()
    asked = [name for name in ("position_bias", "softcap", "s_aux", "cache") if others.get(name) is not None]
    if asked or attention_mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"packed attention: found {asked or 'another mask or shape'}, expected plain self-attention")
    if sliding_window is not None:
        how.windows.add(sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, dim]
    if how.one_kernel and query.is_cuda and query.dtype != torch.float32 and not dropout:
        out = _varlen(q, k, v, how.packed, how.reach(sliding_window), scaling)
    else:
        out = _by_length(q, k, v, how.packed, how.reach(sliding_window), scaling, dropout)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, reach: tuple[int, int], scaling: float | None) -> Tensor:
    """One kernel over all texts; it takes 16-bit numbers on an accelerator and drops nothing."""
    ends, longest = packed.cu_seqlens, packed.longest
    return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=reach, **_GROUPED)


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, reach: tuple[int, int], scaling: float | None, dropout: float
) -> Tensor:
    """torch's scaled dot product over the texts of each length at once: views of the row, without padding or masks.

    Fastest of what was tried on short texts (forward and backward, one thread, float32, 4 heads of 64, 256 texts of 40 tokens in
    the mean: 90 ms; text by text 109, rectangles padded by at most a quarter 142, one padded rectangle 148).
    """
    sizes = [texts * length for texts, length in packed.groups]
    parts = []
    for (texts, length), *states in zip(packed.groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_, k_, v_ = (x.unflatten(0, (texts, length)).transpose(1, 2) for x in states)  # [texts, heads, length, dim]
        mask = _window(length, reach, q.device) if 0 <= reach[0] < length - 1 else None
        out = F.scaled_dot_product_attention(
            q_,
            k_,
            v_,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and reach[1] == 0 and length > 1,
            scale=scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _window(length: int, reach: tuple[int, int], device: torch.device) -> Tensor:
    """bool[length, length]: which keys (columns) each query sees."""
    before, after = reach
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(-before).tril(after)
