"""A Hugging Face model without its head on packed texts.

Attention is bidirectional or causal.
"""

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

from megaenc.hf.model import find_position_offset

AttentionDirection = Literal["bidirectional", "causal"]

# torch 2.11 detects grouped heads itself; later versions require the keyword.
_GQA_OPTIONS = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
_ATTENTION_NAME = "megaenc_packed"
"""Name of packed attention in transformers. As no mask function has this name, models build no
mask."""
_ACTIVE_PACK: ContextVar[tuple["Backbone", "PackedTexts"]] = ContextVar("reading")
"""The backbone and pack of the current forward pass: not every model passes unknown arguments on to
its attention."""


@dataclass(frozen=True)
class PackedTexts:
    """Tokenized texts concatenated without padding, shortest first.

    `pack_texts` builds it from texts that are sorted by length. `tokens` and `position_ids` (from 0
    in each text) are int64[T], the tuple `lengths` has the number of tokens of each text,
    ascending, at least 1.
    """

    tokens: Tensor
    """int64[T]: token ids"""
    lengths: tuple[int, ...]
    """length of each text in tokens, ascending, at least 1; they add up to T"""
    position_ids: Tensor
    """int64[T]: position of each token in its text, from 0"""

    @cached_property
    def length_groups(self) -> list[tuple[int, int]]:
        """Return (number of texts, length in tokens) of each distinct length, ascending."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return the start offset of each text in `tokens`, then T: int32[texts + 1].

        The tensor is on the device of `tokens`.
        """
        return torch.tensor(
            np.cumsum([0, *self.lengths]), dtype=torch.int32, device=self.tokens.device
        )


def pack_texts(texts: Sequence[np.ndarray], device: torch.device | str) -> PackedTexts:
    """Return `texts`, int[tokens] each, shortest first, as PackedTexts on `device`.

    Raises:
        ValueError: There is no text, one is empty, or a longer text precedes a shorter one.
    """
    lengths = [len(text) for text in texts]
    if not lengths or not lengths[0] or lengths != sorted(lengths):
        raise ValueError(
            "found no text or an empty one, expected at least one token in each, "
            "and the shortest text first"
        )
    tokens = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    return PackedTexts(tokens.to(device), tuple(lengths), position_ids.to(device))


def batch_by_tokens(lengths: np.ndarray, tokens_per_forward: int) -> list[np.ndarray]:
    """Return batches of text indices, int64, of at most `tokens_per_forward` tokens.

    Shorter texts come first; equal lengths keep their order. A text longer than that is a batch of
    its own.

    Args:
        lengths: Number of tokens of each text, int[texts].
    """
    rows = np.argsort(lengths, kind="stable")
    groups = []
    start = 0
    tokens = 0
    for index, length in enumerate(lengths[rows].tolist()):
        if tokens and tokens + length > tokens_per_forward:
            groups.append(rows[start:index])
            start = index
            tokens = 0
        tokens += length
    return [*groups, rows[start:]] if len(rows) else []


class Backbone(nn.Module):
    """A transformers model without head that computes token states of texts.

    `load_backbone` builds and tests it, `compute_states` returns states, of `hidden_size`.
    `attention` is the direction in effect, `context_length` the maximum number of tokens of a text,
    which is not checked. A model that does not support packing (`is_packed` False) gets padded
    batches of texts of similar length; the states are the same.

    Args:
        model: Base model of transformers.
        attention: Direction of attention; None: the model's own, which `load_backbone` finds.
    """

    def __init__(self, model: Any, attention: AttentionDirection | None):
        super().__init__()
        self.model = model
        self.attention = attention
        """None until `load_backbone` has tested the model's own."""
        self.is_packed = False
        self.use_varlen_kernel = True
        """True if packed attention on a GPU uses torch's variable-length kernel."""
        self.hidden_size: int = model.config.hidden_size
        # Learned positions of models like RoBERTa start after the padding index of their embedding.
        self.position_offset = find_position_offset(model)
        self.context_length: int = model.config.max_position_embeddings - self.position_offset
        """Maximum length of a text in tokens."""
        self.sliding_windows: set[int] = set()
        """Sizes of the sliding windows that the layers have passed to packed attention."""
        self.has_wide_window = not self._is_gemma3 and any(
            getattr(module, "is_causal", False) for module in model.modules()
        )
        """True if a bidirectional window of w spans w tokens to each side instead of w - 1, as in
        transformers' decoders with `is_causal: false`. Encoders pass a window that is one too
        large."""
        self.accepts_position_ids = "position_ids" in inspect.signature(model.forward).parameters
        self._model_attention = model.config._attn_implementation
        self._padding = model.config.pad_token_id or 0

    @property
    def device(self) -> torch.device:
        """Return the torch device of the model's weights."""
        return self.model.device

    def compute_states(self, packed: PackedTexts) -> Tensor:
        """Return all tokens' states after the final norm, [T, hidden_size].

        They are in the order of `packed.tokens` and in the dtype of the weights, with a graph if
        gradients are enabled.
        """
        if not self.is_packed:
            shapes = group_padded_lengths(packed.length_groups)
            rows = packed.tokens.split([sum(lengths) for lengths in shapes])
            return torch.cat(
                [
                    self._forward_padded(*shape, positions=True)
                    for shape in zip(rows, shapes, strict=True)
                ]
            )
        before = _ACTIVE_PACK.set((self, packed))
        try:
            out = self.model(
                input_ids=packed.tokens[None],
                position_ids=packed.position_ids[None] + self.position_offset,
            )
        finally:
            _ACTIVE_PACK.reset(before)
        return out.last_hidden_state[0]

    def compute_padded_states(self, packed: PackedTexts) -> Tensor:
        """Return states of all texts in one padded batch, [T, hidden_size], for tests.

        They are those of `compute_states`, but by the model's own attention and positions, so
        `is_packed` must be False, which is not checked.
        """
        return self._forward_padded(packed.tokens, packed.lengths, positions=False)

    def _forward_padded(self, tokens: Tensor, lengths: Sequence[int], *, positions: bool) -> Tensor:
        """Compute the states of one right-padded batch, [T, hidden_size].

        Args:
            positions: Pass position ids to the model.
        """
        columns = torch.arange(lengths[-1], device=tokens.device)
        attention_mask = columns < torch.tensor(lengths, device=tokens.device)[:, None]
        ids = torch.full(attention_mask.shape, self._padding, device=tokens.device).masked_scatter(
            attention_mask, tokens
        )
        position_arguments = (
            {"position_ids": (columns + self.position_offset).expand_as(ids)}
            if positions and self.accepts_position_ids
            else {}
        )
        return self.model(
            input_ids=ids, attention_mask=attention_mask.long(), **position_arguments
        ).last_hidden_state[attention_mask]

    def set_packed(self, packed: bool) -> None:
        """Switch to packed attention (True), or back to the model's own in padded batches.

        Packed attention is this project's: texts of a pack do not see each other. Whether the model
        supports it is not checked: `load_backbone` tests it.
        """
        self.model.set_attn_implementation(_ATTENTION_NAME if packed else self._model_attention)
        self.is_packed = packed

    def set_direction(self, attention: AttentionDirection) -> None:
        """Set the direction of the model's own attention in its config and modules.

        It has no effect on packed attention, which follows the attribute `attention`; that is not
        changed.
        """
        for module in self.model.modules():
            if hasattr(module, "is_causal"):  # read by attention without a mask
                module.is_causal = attention == "causal"
        if self._is_gemma3:
            self.model.config.use_bidirectional_attention = attention == "bidirectional"
        else:
            self.model.config.is_causal = attention == "causal"

    @property
    def _is_gemma3(self) -> bool:
        """Return whether the config has the direction in `use_bidirectional_attention`.

        Windows of such a model have equal size in both directions.
        """
        return self.model.config.model_type == "gemma3_text"


def group_padded_lengths(groups: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the lengths of the texts of each padded batch, in tokens, ascending.

    Texts of a batch exceed its shortest by at most 8 tokens, or 10 % of it if that is more.

    Args:
        groups: (number of texts, length in tokens) pairs, of ascending lengths, as
            `PackedTexts.length_groups`.
    """
    batches: list[list[int]] = []
    for texts, length in groups:
        if not batches or length > batches[-1][0] + max(8, batches[-1][0] // 10):
            batches.append([])
        batches[-1] += [length] * texts
    return batches


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
    """Return (attention [1, T, heads, dim], None) within each text, for transformers.

    Texts and direction are those of the `Backbone.compute_states` in progress.

    Args:
        query, key, value: [1, heads, T, dim], for key and value with groups instead of heads.
        scaling: Factor of the scores; None: dim ** -0.5.
        sliding_window: Visible tokens to a side, with itself (see `has_wide_window`); None: all.

    Raises:
        NotImplementedError: A score bias, softcap, sinks, a cache, an attention mask, a batch of
            more than one row, or cross-attention is passed.
    """
    backbone, packed = _ACTIVE_PACK.get()
    unsupported = [
        name
        for name in ("position_bias", "softcap", "s_aux", "cache")
        if others.get(name) is not None
    ]
    if (
        unsupported
        or attention_mask is not None
        or query.shape[0] != 1
        or query.shape[2] != key.shape[2]
    ):
        raise NotImplementedError(
            f"packed attention: found {unsupported or 'another mask or shape'}, "
            "expected plain self-attention"
        )
    causal = backbone.attention == "causal"
    before = -1
    if sliding_window is not None:
        backbone.sliding_windows.add(sliding_window)
        before = sliding_window if backbone.has_wide_window and not causal else sliding_window - 1
    reach = (before, 0 if causal else before)  # visible tokens before and after a token; -1: all
    # [T, heads, dim] each.
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    if (
        backbone.use_varlen_kernel
        and query.is_cuda
        and query.dtype != torch.float32
        and not dropout
    ):
        # The kernel supports only 16-bit numbers on a GPU and no dropout.
        cu_seqlens = packed.cu_seqlens
        longest = packed.lengths[-1]
        out = varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=scaling,
            window_size=reach,
            **_GQA_OPTIONS,
        )
    else:
        out = _sdpa_by_length(q, k, v, packed, reach, scaling, dropout)
    return out.unsqueeze(0), None


AttentionInterface.register(_ATTENTION_NAME, packed_attention_forward)


def _sdpa_by_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedTexts,
    reach: tuple[int, int],
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Compute attention, [T, heads, dim], with torch's SDPA, a batch per text length.

    Batches are views without padding. Fastest on short texts (forward and backward, one thread,
    float32, 4 heads of 64, 256 texts of 40 tokens on average: 90 ms; text by text 109 ms, batches
    padded by at most 25 % 142 ms, one padded batch 148 ms).
    """
    before, after = reach
    sizes = [texts * length for texts, length in packed.length_groups]
    parts = []
    for shape, q_, k_, v_ in zip(
        packed.length_groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True
    ):
        length = shape[1]
        mask = None  # or bool[length, length]: the visible keys (columns) of each query
        if 0 <= before < length - 1:
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=q.device)
                .triu(-before)
                .tril(after)
            )
        causal = mask is None and after == 0 and length > 1
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(
            q_.unflatten(0, shape).transpose(1, 2),  # [texts, heads, length, dim]
            k_.unflatten(0, shape).transpose(1, 2),
            v_.unflatten(0, shape).transpose(1, 2),
            mask,
            dropout,
            causal,
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
