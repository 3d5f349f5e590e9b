"""Texts laid end to end, so that nothing is computed for padding, and which texts are read together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Texts end to end, in the caller's order, and the same texts by length, which is how a model reads them.

    Texts of one length that are neighbours are a rectangle without padding: attention then needs no mask and no copies.
    """

    tokens: Tensor
    """int64[T]"""
    lengths: tuple[int, ...]
    """tokens of each text, at least 1; their sum is T"""
    order: Tensor | None
    """int64[T]: where each token of the texts by length stands in `tokens`; None where they are in that order already"""
    back: Tensor | None
    """int64[T]: where each token of `tokens` stands among the texts by length"""
    position_ids: Tensor
    """int64[T], of the texts by length: 0, 1, ... in each"""
    groups: tuple[tuple[int, int], ...]
    """(texts, tokens of each) of the texts by length, shortest first"""

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32[texts + 1]: where each of the texts by length begins, then T."""
        ends = np.cumsum([0, *sorted(self.lengths)])
        return torch.from_numpy(ends.astype(np.int32)).to(self.tokens.device)

    @property
    def longest(self) -> int:
        return self.groups[-1][1]


def pack(texts: Sequence[np.ndarray], device: torch.device | str) -> Packed:
    """`texts`: token ids, integer[tokens], none of them empty (ValueError)."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    if not lengths.size or not lengths.min():
        raise ValueError("found no text or an empty one, expected at least one token in each")
    tokens = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    order = back = None
    by_length = np.argsort(lengths, kind="stable")
    ordered = lengths[by_length]
    places = np.arange(len(tokens)) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    if (np.diff(lengths) < 0).any():
        order = np.repeat((np.cumsum(lengths) - lengths)[by_length], ordered) + places
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
    return Packed(
        tokens.to(device),
        tuple(lengths.tolist()),
        *(None if index is None else torch.from_numpy(index).to(device) for index in (order, back)),
        torch.from_numpy(places).to(device),
        tuple((len(list(same)), length) for length, same in groupby(ordered.tolist())),
    )


def forwards(lengths: np.ndarray, tokens_per_forward: int) -> list[np.ndarray]:
    """Which rows a model reads at once: int64 rows in groups of at most `tokens_per_forward` tokens, the shortest texts first.

    A text that is longer than that is alone. Every row is in one group; equal lengths keep their order. Texts of one group are
    of like length, so a model that must pad them pads little.
    """
    rows = np.argsort(lengths, kind="stable")
    groups, start, held = [], 0, 0
    for at, length in enumerate(lengths[rows].tolist()):
        if held and held + length > tokens_per_forward:
            groups.append(rows[start:at])
            start, held = at, 0
        held += length
    return [*groups, rows[start:]] if len(rows) else []
