"""A Hugging Face model without its head that reads packed texts, which lie end to end without padding, in either direction."""

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

AttentionDirection = Literal["bidirectional", "causal"]

# torch 2.11 finds out about grouped heads by itself and does not know the keyword that later versions want.
_GQA_OPTIONS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_ATTENTION_NAME = "megaenc_packed"
"""Name of packed attention in transformers, which has no mask function of that name, so that models build no mask."""
_ACTIVE_PACK: ContextVar[tuple["Backbone", "PackedTexts"]] = ContextVar("reading")
"""The reader and its texts: not every model passes unknown arguments on to its attention."""


@dataclass(frozen=True)
class PackedTexts:
    """Texts end to end, the shortest first: those of one length are a rectangle without padding."""

    tokens: Tensor
    """int64[T]"""
    lengths: tuple[int, ...]
    """tokens of each text, at least 1; their sum is T"""
    position_ids: Tensor
    """int64[T]: 0, 1, ... in each text"""

    @cached_property
    def length_groups(self) -> list[tuple[int, int]]:
        """(texts, tokens of each) of each length."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32[texts + 1]: where each text begins, then T."""
        return torch.tensor(np.cumsum([0, *self.lengths]), dtype=torch.int32, device=self.tokens.device)


def pack_texts(texts: Sequence[np.ndarray], device: torch.device | str) -> PackedTexts:
    """Lay `texts` (integer[tokens]) end to end. Raises ValueError for an empty one, and for one longer than the next."""
    lengths = [len(text) for text in texts]
    if not lengths or not lengths[0] or lengths != sorted(lengths):
        raise ValueError("found no text or an empty one, expected at least one token in each, and the shortest text first")
    tokens = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    places = torch.cat([torch.arange(length) for length in lengths])
    return PackedTexts(tokens.to(device), tuple(lengths), places.to(device))


def batch_by_tokens(lengths: np.ndarray, tokens_per_forward: int) -> list[np.ndarray]:
    """Return which rows a model reads at once: int64 rows in groups of at most so many tokens, the shortest texts first.

    A longer text is alone. Every row is in one group; equal lengths keep their order. Within a group lengths differ little.
    """
    rows = np.argsort(lengths, kind="stable")
    groups, start, held = [], 0, 0
    for at, length in enumerate(lengths[rows].tolist()):
        if held and held + length > tokens_per_forward:
            groups.append(rows[start:at])
            start, held = at, 0
        held += length
    return [*groups, rows[start:]] if len(rows) else []


class Backbone(nn.Module):
    """Token states of packed texts, by the transformers model `model`.

    `packed`: texts are read end to end. Else, for a model that cannot do that, in padded rectangles of texts of like length.
    """

    def __init__(self, model: Any, attention: AttentionDirection):
        super().__init__()
        self.model = model
        self.attention: AttentionDirection = attention
        self.is_packed = False
        self.use_varlen_kernel = True
        """Whether packed attention may use an accelerator's kernel for all texts."""
        self.hidden_size: int = model.config.hidden_size
        # In models like RoBERTa learned positions are an embedding with a padding index, and begin after that.
        tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
        padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
        self.position_offset = next((index + 1 for index in padding if index is not None), 0)
        self.context_length: int = model.config.max_position_embeddings - self.position_offset
        """The longest text, in tokens."""
        self.sliding_windows: set[int] = set()
        """The sliding windows that layers have asked packed attention for."""
        self.has_wide_window = any(getattr(module, "is_causal", False) for module in model.modules())
        """Whether a bidirectional window of w has w tokens to each side, not w - 1: so transformers reads a decoder with
        `is_causal: false`. (An encoder's own window arrives one too large, as some kernels want it.)"""
        self.accepts_position_ids = "position_ids" in inspect.signature(model.forward).parameters
        self._own_attention = model.config._attn_implementation
        self._padding = model.config.pad_token_id or 0

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def compute_states(self, packed: PackedTexts) -> Tensor:
        """Compute the last layer's states after the final norm, [T, hidden_size]."""
        if not self.is_packed:
            shapes = group_padded_lengths(packed.length_groups)
            rows = packed.tokens.split([sum(lengths) for lengths in shapes])
            return torch.cat([self._forward_padded(*shape, positions=True) for shape in zip(rows, shapes, strict=True)])
        before = _ACTIVE_PACK.set((self, packed))
        try:
            out = self.model(input_ids=packed.tokens[None], position_ids=packed.position_ids[None] + self.position_offset)
        finally:
            _ACTIVE_PACK.reset(before)
        return out.last_hidden_state[0]

    def compute_padded_states(self, packed: PackedTexts) -> Tensor:
        """Compute states to compare with: all texts in one rectangle, positions left to the model. [T, hidden]"""
        return self._forward_padded(packed.tokens, packed.lengths, positions=False)

    def _forward_padded(self, tokens: Tensor, lengths: Sequence[int], *, positions: bool) -> Tensor:
        """Compute states of texts that are padded and masked at their ends, [T, hidden]; `positions`: pass them to the model."""
        columns = torch.arange(lengths[-1], device=tokens.device)
        seen = columns < torch.tensor(lengths, device=tokens.device)[:, None]
        ids = torch.full(seen.shape, self._padding, device=tokens.device).masked_scatter(seen, tokens)
        told = (
            {"position_ids": (columns + self.position_offset).expand_as(ids)} if positions and self.accepts_position_ids else {}
        )
        return self.model(input_ids=ids, attention_mask=seen.long(), **told).last_hidden_state[seen]

    def set_packed(self, packed: bool) -> None:
        """Make the model read packed texts, by the attention below, or padded ones by its own."""
        self.model.set_attn_implementation(_ATTENTION_NAME if packed else self._own_attention)
        self.is_packed = packed

    def set_direction(self, attention: AttentionDirection) -> None:
        """Make the model itself read that way, as far as transformers lets it; packed attention does not ask it."""
        for holder in (self.model.config, *self.model.modules()):
            if hasattr(holder, "is_causal") or holder is self.model.config:  # which attention without a mask goes by
                holder.is_causal = attention == "causal"


def group_padded_lengths(groups: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group lengths, shortest first, into rectangles that are padded: at most 8 tokens or a tenth longer than its first."""
    found: list[list[int]] = []
    for texts, length in groups:
        if not found or length > found[-1][0] + max(8, found[-1][0] // 10):
            found.append([])
        found[-1] += [length] * texts
    return found


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Compute softmax(scaling * q k^T) v inside each text of a row.

    query [1, heads, T, dim], key and value [1, groups, T, dim] -> [1, T, heads, dim]. NotImplementedError for a score bias, a
    cap, sinks, more than one row, and other keys than those of the row.
    """
    backbone, packed = _ACTIVE_PACK.get()
    asked = [name for name in ("position_bias", "softcap", "s_aux", "cache") if others.get(name) is not None]
    if asked or attention_mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"packed attention: found {asked or 'another mask or shape'}, expected plain self-attention")
    causal, before = backbone.attention == "causal", -1
    if sliding_window is not None:
        backbone.sliding_windows.add(sliding_window)
        before = sliding_window if backbone.has_wide_window and not causal else sliding_window - 1
    reach = (before, 0 if causal else before)  # how many tokens before and behind itself a token sees; -1: all
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, dim]
    if backbone.use_varlen_kernel and query.is_cuda and query.dtype != torch.float32 and not dropout:
        # One kernel over all texts; it takes 16-bit numbers on an accelerator and drops nothing.
        ends, longest = packed.cu_seqlens, packed.lengths[-1]
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=reach, **_GQA_OPTIONS)
    else:
        out = _sdpa_by_length(q, k, v, packed, reach, scaling, dropout)
    return out.unsqueeze(0), None


AttentionInterface.register(_ATTENTION_NAME, packed_attention_forward)


def _sdpa_by_length(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedTexts, reach: tuple[int, int], scaling: float | None, dropout: float
) -> Tensor:
    """Compute torch's scaled dot product over the texts of each length at once: views of the row, without padding or masks.

    Fastest on short texts (forward and backward, one thread, float32, 4 heads of 64, 256 texts of 40 tokens in the mean: 90 ms;
    text by text 109, rectangles padded by at most a quarter 142, one padded rectangle 148).
    """
    before, after = reach
    sizes = [texts * length for texts, length in packed.length_groups]
    parts = []
    for (texts, length), *states in zip(packed.length_groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_, k_, v_ = (x.unflatten(0, (texts, length)).transpose(1, 2) for x in states)  # [texts, heads, length, dim]
        mask = None  # or bool[length, length]: which keys (columns) each query sees
        if 0 <= before < length - 1:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(-before).tril(after)
        causal = mask is None and after == 0 and length > 1
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q_, k_, v_, mask, dropout, causal, scale=scaling, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
