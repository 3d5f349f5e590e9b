"""Blends: packs of several corpora in fixed proportions, which hold for every stretch of a run and not only on average."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

import numpy as np

from megaenc.data.packing.packed_dataset import Pack, PackedDataset
from megaenc.errors import InputError

PERIOD = 1 << 16  # samples after which an order repeats at the latest; weights are kept to one part in as many


def parse_data_path(words: Sequence[str]) -> list[tuple[Fraction | None, str]]:
    """`A`, `0.3 A 0.7 B` or `A B` as (weight, prefix) of each corpus; None where no weights are given. Raises InputError."""
    weights = [parse_weight(word) for word in words[::2]]
    if None not in weights and len(words) % 2 == 0:
        pairs = list(zip(weights, words[1::2], strict=True))
    elif all(parse_weight(word) is None for word in words):
        pairs = [(None, word) for word in words]
    else:
        raise InputError(f"--data-path {' '.join(words)}: expected one prefix, prefixes, or a weight before each: 0.3 A 0.7 B")
    for number, (weight, prefix) in enumerate(pairs):
        if weight is not None and weight <= 0:
            raise InputError(f"--data-path {' '.join(words)}: found weight {words[2 * number]}, expected more than 0")
        if os.path.realpath(prefix) in [os.path.realpath(earlier) for _, earlier in pairs[:number]]:
            raise InputError(f"--data-path {' '.join(words)}: {prefix} is there twice, expected each corpus once")
    return pairs


def parse_weight(word: str) -> Fraction | None:
    """A word of --data-path as a weight; None where it is a corpus."""
    if re.search(r"[eE][+-]?\d{4}", word):
        return None  # not a weight: its digits would fill the memory
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def compute_sample_counts(weights: Sequence[Fraction]) -> list[int]:
    """How many of some number of samples (at most PERIOD) each corpus gives: exact where the weights allow it.

    Raises InputError, with the number of the corpus, for a weight that rounds to no part in PERIOD.
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
    """uint16[sum(counts)]: which corpus gives each sample, corpus c being there counts[c] times.

    After any number of samples each corpus has given its share of them but for less than one sample. The rule is Tijdeman's
    (The chairman assignment problem, 1980): among those whose share has fallen behind by 1 / (2 corpora - 2), the one that will
    first be a whole sample behind.
    """
    corpora, period = len(counts), sum(counts)
    if corpora == 1:
        return np.zeros(period, dtype=np.uint16)
    owed = [0] * corpora  # what each corpus is behind, in samples times `datasets`, so that all is whole numbers
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
    """Packs of several corpora: `packs[s]` is the Pack of sample s, the next one of the corpus whose turn it is.

    The turns repeat after at most PERIOD samples; they depend on the weights alone, and within a corpus packs come as they would
    without the others.
    """

    def __init__(self, parts: Sequence[PackedDataset], weights: Sequence[Fraction]):
        """One weight above 0, in any unit, for each of `datasets`. Raises InputError for one that is too small to be kept."""
        self.datasets = list(parts)
        self.seq_length = parts[0].seq_length
        self._counts = compute_sample_counts(weights)
        self._turns = interleave_corpora(self._counts)
        self._before = np.empty(len(self._turns), dtype=np.int32)  # turns that the corpus had earlier in the period
        for corpus, count in enumerate(self._counts):
            self._before[self._turns == corpus] = np.arange(count)

    def __getitem__(self, sample: int) -> Pack:
        """The Pack of sample number `sample`, from 0 on without end."""
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        period, place = divmod(sample, len(self._turns))
        corpus = int(self._turns[place])
        pack = self.datasets[corpus][period * self._counts[corpus] + int(self._before[place])]
        return replace(pack, sample=sample)

    def corpus_of_sample(self, sample: int) -> int:
        """Which of `datasets` gives the pack of sample number `sample`."""
        return int(self._turns[sample % len(self._turns)])

    def count_samples(self, corpus: int, samples: int) -> int:
        """How many of the first `samples` samples come from one of `datasets`."""
        periods, rest = divmod(samples, len(self._turns))
        return periods * self._counts[corpus] + int(np.count_nonzero(self._turns[:rest] == corpus))

    @property
    def samples_before_repeat(self) -> int:
        return min(self._sample_of(corpus, part.samples_before_repeat) for corpus, part in enumerate(self.datasets))

    def _sample_of(self, corpus: int, number: int) -> int:
        """The sample that is pack `number` (0, 1, ...) of a corpus."""
        periods, turn = divmod(number, self._counts[corpus])
        return periods * len(self._turns) + int(np.flatnonzero(self._turns == corpus)[turn])
