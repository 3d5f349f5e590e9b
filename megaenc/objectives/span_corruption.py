"""Span corruption: an exact number of hidden spans in each document.

They are read and predicted bidirectionally.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack, concat_ranges
from megaenc.objectives.base import option
from megaenc.objectives.masking import MaskedLanguageModeling
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class SpanCorruption(MaskedLanguageModeling):
    """Objective `span_corruption`: T5's hidden spans, with tokens predicted in place.

    It follows Raffel et al. 2020 (arXiv 1910.10683). Of the n text tokens of a document, or cut
    piece, m = n * `mask` are hidden in m / `span` spans: hidden and visible tokens are each cut
    into as many parts at random and alternate. A T5 decoder writes the spans; here an encoder
    predicts each token at its position, so the length of a span is visible. m is rounded up or down
    at random and the pattern rotated by a random distance, so that each token is hidden with
    probability `mask`; T5 rounds m and starts with a visible part.

    Hidden tokens become the mask token, except for the options `random` and `keep` of `mlm`. Its
    limits with spans hold: `span` * (1 - `mask`) is at least 1, and `unit` is `token`.
    """

    name = "span_corruption"
    _requires_span = True

    mask: float = option(0.15, "share of the tokens to predict", above=0, below=1)
    span: float = option(3.0, "mean length of hidden spans", low=1)

    def _choose_tokens(self, pack: Pack, randomness: SampleRandomness) -> np.ndarray:
        """Draw the tokens to hide and predict, bool[T]."""
        length = len(pack.tokens)
        document_count = len(pack.cu_seqlens) - 1
        (positions,) = self.eligible(pack).nonzero()
        document_of = np.repeat(np.arange(document_count), np.diff(pack.cu_seqlens))[positions]
        counts = np.bincount(document_of, minlength=document_count)
        hidden, visible, spans = self._draw_counts(counts, randomness)
        visible_lengths = _cut_randomly(
            visible, spans, randomness.uniforms("visible parts", length)
        )
        hidden_lengths = _cut_randomly(hidden, spans, randomness.uniforms("hidden parts", length))
        # In each document a visible part comes first, then they alternate.
        part_lengths = np.stack([visible_lengths, hidden_lengths], axis=1).ravel()
        pattern = np.repeat(np.arange(len(part_lengths)) % 2 == 1, part_lengths)
        rotations = (randomness.uniforms("rotation", document_count) * counts).astype(np.int64)
        chosen = np.zeros(length, dtype=bool)
        chosen[positions] = _rotate(pattern, counts, rotations)
        return chosen

    def _draw_counts(
        self, counts: np.ndarray, randomness: SampleRandomness
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of hidden tokens, visible tokens and spans of each document.

        Args:
            counts: Number of text tokens of each document, int64[documents].
        """
        rounding = randomness.uniforms("rounding", len(counts))
        # Rounded up with the probability of the fraction, so that the mean is `counts * mask`. The
        # float sum itself may be rounded up to one token too many.
        hidden = np.minimum(np.floor(counts * self.mask + rounding), counts).astype(np.int64)
        visible = counts - hidden
        # No part is empty, unless all tokens of the document are hidden, or none is.
        most_spans = np.maximum(1, np.minimum(hidden, visible))
        spans = np.clip(np.rint(hidden / self.span), 1, most_spans).astype(np.int64)
        return hidden, visible, spans


def _cut_randomly(totals: np.ndarray, part_counts: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the lengths of random parts of groups of items, int64[part_counts.sum()].

    Every choice of cuts between the items is equally likely. No part is empty, except the one of a
    group without items.

    Args:
        totals: Number of items of each group.
        part_counts: Number of parts of each group, from 1 to `max(1, totals)`.
        draws: Uniform numbers, at least one for each item.
    """
    group_of = np.repeat(np.arange(len(totals)), totals)
    offset = concat_ranges(totals)
    # The items with the lowest draws start a part; the first item comes last: no cut before it.
    order = np.lexsort((np.where(offset == 0, 2.0, draws[: len(group_of)]), group_of))
    is_cut = np.zeros(len(group_of), dtype=bool)
    is_cut[order] = offset < (part_counts - 1)[group_of]
    # Each earlier group has one part more than cuts.
    part_of = np.cumsum(is_cut) + group_of
    return np.bincount(part_of, minlength=part_counts.sum())


def _rotate(pattern: np.ndarray, counts: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return `pattern` with the values of each document rotated to the left.

    The values a b c d e of documents of 3 and 2 tokens become c a b e d by distances 2 and 1.

    Args:
        pattern: A value for each token, document after document.
        counts: Number of tokens of each document.
        distances: Number of places by which to rotate each document.
    """
    offset = concat_ranges(counts)
    rotated = (offset + np.repeat(distances, counts)) % np.repeat(counts, counts)
    return pattern[np.arange(len(pattern)) - offset + rotated]
