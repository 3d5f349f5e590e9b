"""Packs of several corpora, mixed in fixed proportions that hold at every prefix of a run."""

import os
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from math import lcm

import numpy as np

from megaenc.data.packing.packed_dataset import Pack, PackedDataset
from megaenc.errors import InputError

PERIOD = 1 << 16  # longest period of the corpus order, in samples; also the resolution of weights


def parse_data_path(words: Sequence[str]) -> list[tuple[Fraction | None, str]]:
    """Return (weight, prefix) of each corpus in --data-path `0.3 A 0.7 B` or `A B` (weights None); InputError for others."""
    weights = [parse_weight(word) for word in words[::2]]
    if None not in weights and len(words) % 2 == 0:
        pairs = list(zip(weights, words[1::2], strict=True))
    elif all(parse_weight(word) is None for word in words):
        pairs = [(None, word) for word in words]
    else:
        raise InputError(f"--data-path {' '.join(words)}: expected one prefix, prefixes, or a weight before each: 0.3 A 0.7 B")
    for number, (weight, prefix) in enumerate(pairs):
        if not prefix:
            raise InputError("--data-path: found an empty text, expected the prefix of a .bin and an .idx file")
        if weight is not None and weight <= 0:
            raise InputError(f"--data-path {' '.join(words)}: found weight {words[2 * number]}, expected more than 0")
        if os.path.realpath(prefix) in [os.path.realpath(earlier) for _, earlier in pairs[:number]]:
            raise InputError(f"--data-path {' '.join(words)}: {prefix} is given twice, expected each corpus once")
    return pairs


def parse_weight(word: str) -> Fraction | None:
    """Return a word of --data-path as a number, or None if it is none, and so the prefix of a corpus."""
    if re.search(r"[eE][+-]?\d{4}", word):
        return None  # a number with this exponent would fill the memory
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def compute_sample_counts(weights: Sequence[Fraction]) -> list[int]:
    """Return each corpus's samples per repeating period (at most PERIOD), by `weights`; InputError if one has none.

    The counts are exact if the weights allow it. Raises InputError, with the number of the corpus, for a weight that rounds to
    zero.
    """
    shares = [Fraction(weight) / sum(weights) for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period <= PERIOD:
        return [int(share * period) for share in shares]
    counts = [int(share * PERIOD) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda at: counts[at] - shares[at] * PERIOD)
    for at in by_remainder[: PERIOD - sum(counts)]:
        counts[at] += 1
    if 0 in counts:
        number = counts.index(0)
        raise InputError(
            f"--data-path: corpus {number + 1} of {len(shares)} would give one pack in {float(1 / shares[number]):,.0f}, "
            f"expected at least one in {PERIOD:,}; give it a greater weight (0.3 A 0.7 B) or leave it out"
        )
    return counts


def interleave_corpora(counts: Sequence[int]) -> np.ndarray:
    """Return the corpus number of each sample of a period, uint16[sum(counts)], c occurring counts[c] times, evenly spread.

    After any number of samples each corpus is less than one sample away from its share. The rule is Tijdeman's (The chairman
    assignment problem, 1980): of the corpora that are behind by at least 1 / (2 corpora - 2), take the one that will be a whole
    sample behind first.
    """
    corpora, period = len(counts), sum(counts)
    if corpora == 1:
        return np.zeros(period, dtype=np.uint16)
    owed = [0] * corpora  # how far each corpus is behind, in integer units of 1 / `parts` samples
    parts = period * (2 * corpora - 2)
    steps = [count * (2 * corpora - 2) for count in counts]
    order = np.empty(period, dtype=np.uint16)
    for sample in range(period):
        owed = [debt + step for debt, step in zip(owed, steps, strict=True)]
        behind = [corpus for corpus in range(corpora) if owed[corpus] >= period]
        chosen = min(behind, key=lambda corpus: (parts - period - owed[corpus]) / counts[corpus])
        owed[chosen] -= parts
        order[sample] = chosen
    return order


class BlendedDataset:
    """Endless packs of several corpora mixed evenly by weight: `dataset[s]` is the Pack of sample s, from one corpus.

    The order of corpora repeats after at most PERIOD samples and depends only on the weights. Within a corpus, packs keep the
    order that they have without the other corpora.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[Fraction]):
        """Blend `datasets` by one positive weight each, in any unit. Raises InputError for a weight that rounds to zero."""
        self.datasets = list(datasets)
        self.seq_length = datasets[0].seq_length
        self._counts = compute_sample_counts(weights)
        self._corpus_order = interleave_corpora(self._counts)
        self.first_sample = 0
        self._offsets = [0] * len(self.datasets)
        self._earlier = np.empty(len(self._corpus_order), dtype=np.int32)  # earlier samples of the same corpus in the period
        for corpus, count in enumerate(self._counts):
            self._earlier[self._corpus_order == corpus] = np.arange(count)

    def starting_at(self, first_sample: int, offsets: Sequence[int]) -> "BlendedDataset":
        """Return a copy whose samples are numbered from `first_sample`, and which omits each corpus's first `offsets` packs."""
        shifted = copy(self)
        shifted.first_sample, shifted._offsets = first_sample, list(offsets)
        return shifted

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of sample number `sample`, counted from `first_sample` (0 unless changed) without end."""
        if sample < self.first_sample:
            raise IndexError(f"samples are numbered from {self.first_sample}, found {sample}")
        period, place = divmod(sample - self.first_sample, len(self._corpus_order))
        corpus = int(self._corpus_order[place])
        number = self._offsets[corpus] + period * self._counts[corpus] + int(self._earlier[place])
        return replace(self.datasets[corpus][number], sample=sample)

    def corpus_of_sample(self, sample: int) -> int:
        """Return the index in `datasets` of the corpus that gives sample number `sample`."""
        return int(self._corpus_order[(sample - self.first_sample) % len(self._corpus_order)])

    def next_pack(self, corpus: int, sample: int) -> int:
        """Return the number of the first pack of corpus `corpus`, an index of `datasets`, from sample number `sample` on."""
        periods, rest = divmod(sample - self.first_sample, len(self._corpus_order))
        in_period = int(np.count_nonzero(self._corpus_order[:rest] == corpus))
        return self._offsets[corpus] + periods * self._counts[corpus] + in_period

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples before the first one with which any corpus starts its second epoch."""
        unread = [max(0, each.samples_before_repeat - offset) for each, offset in zip(self.datasets, self._offsets, strict=True)]
        return min(self._find_sample(corpus, number) for corpus, number in enumerate(unread))

    def _find_sample(self, corpus: int, number: int) -> int:
        """Return how many samples precede the one that is pack `number` (0, 1, ...) of a corpus, not counting omitted packs."""
        periods, turn = divmod(number, self._counts[corpus])
        return periods * len(self._corpus_order) + int(np.flatnonzero(self._corpus_order == corpus)[turn])
