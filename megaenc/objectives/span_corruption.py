"""Span corruption: an exact number of hidden spans in each document.

They are read and predicted bidirectionally.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import option
from megaenc.objectives.masking import MaskedLanguageModeling
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class SpanCorruption(MaskedLanguageModeling):
    """Objective `span_corruption`: T5's hidden spans, with tokens predicted in place.

    It follows Raffel et al. 2020 (arXiv 1910.10683). Of the n text tokens of a document, or cut
    piece, m = n `mask` are hidden in m / `span` spans: hidden and visible tokens are each cut into
    as many parts at random and alternate. A T5 decoder writes the spans; here an encoder predicts
    each token at its position, so the length of a span is visible. m is rounded up or down at
    random and the pattern rotated by a random distance, so that each token is hidden with
    probability `mask`; T5 rounds m and starts with a visible part.
    """

    name = "span_corruption"

    mask: float = option(0.15, "share of the tokens to predict", above=0, high=1)
    span: float = option(3.0, "mean length of hidden spans", low=1)

    def _choose_tokens(self, pack: Pack, randomness: SampleRandomness) -> np.ndarray:
        """Draw the tokens to hide and predict, bool[T]."""
        length = len(pack.tokens)
        documents = len(pack.cu_seqlens) - 1
        (positions,) = self.eligible(pack).nonzero()
        document = np.repeat(np.arange(documents), np.diff(pack.cu_seqlens))[positions]
        counts = np.bincount(document, minlength=documents)
        hidden = np.floor(counts * self.mask + randomness.uniforms("rounding", documents)).astype(
            np.int64
        )
        hidden = np.minimum(hidden, counts)
        visible = counts - hidden
        spans = np.maximum(np.rint(hidden / self.span).astype(np.int64), 1)
        spans = np.maximum(np.minimum(spans, np.minimum(hidden, visible)), 1)
        parts = [
            _cut_randomly(total, spans, randomness.uniforms(purpose, length))
            for purpose, total in (("visible parts", visible), ("hidden parts", hidden))
        ]
        pattern = np.repeat(
            np.tile([False, True], int(spans.sum())), np.stack(parts, axis=1).ravel()
        )
        starts = np.cumsum(counts) - counts
        rotations = (randomness.uniforms("rotation", documents) * counts).astype(np.int64)
        place = np.arange(len(positions)) - starts[document]
        chosen = np.zeros(length, dtype=bool)
        chosen[positions] = pattern[
            starts[document] + (place + rotations[document]) % counts[document]
        ]
        return chosen


def _cut_randomly(totals: np.ndarray, parts: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the lengths of random parts of groups of items, int64[parts.sum()].

    Every choice of cuts between the items is equally likely. No part is empty if the items suffice.

    Args:
        totals: Number of items of each group.
        parts: Number of parts of each group.
        draws: Uniform numbers, at least one for each item.
    """
    group = np.repeat(np.arange(len(totals)), totals)
    starts = np.cumsum(totals) - totals
    is_first = np.arange(len(group)) == starts[group]
    # The first item comes last: no cut before it.
    order = np.lexsort((np.where(is_first, 2.0, draws[: len(group)]), group))
    is_cut = np.zeros(len(group), dtype=bool)
    is_cut[order] = np.arange(len(group)) - starts[group] < (parts - 1)[group]
    cuts = np.cumsum(is_cut)
    first_part = np.cumsum(parts) - parts
    part = first_part[group] + cuts - (cuts - is_cut)[starts[group]] if len(group) else group
    return np.bincount(part, minlength=int(parts.sum()))
