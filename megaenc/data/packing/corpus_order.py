"""Orders of the corpora of a blend: the corpus and pack of each sample."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from megaenc.data.packing.packed_dataset import concat_ranges

PERIOD = 1 << 16
"""Longest period of an order, and samples of a block of one without period."""

_GOLDEN_RATIO = (5**0.5 - 1) / 2
_MOST_PACKS = 1 << 62
_LEAST_WEIGHT = 2.0**-500  # no corpus of less weight is ever read, and float64 divides by it


def find_period_counts(
    weights: Sequence[Fraction], *, is_tempered: bool = False, has_limits: bool = False
) -> list[int] | None:
    """Return each corpus's number of samples in a period of at most PERIOD samples.

    The counts are proportional to the weights: exactly if the period allows it, else rounded to the
    nearest counts that add up to PERIOD. None for an order without a period: if a corpus would then
    have no sample, or by an argument.

    Args:
        weights: Weight of each corpus, positive, in any unit.
        is_tempered: The weights are powers of sizes, which a short period would round.
        has_limits: Corpora end.
    """
    if is_tempered or has_limits:
        return None
    scale = lcm(*(Fraction(weight).denominator for weight in weights))
    parts = [int(weight * scale) for weight in weights]
    divisor = gcd(*parts)
    total = sum(parts)
    if total // divisor <= PERIOD:
        return [part // divisor for part in parts]
    counts = [part * PERIOD // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda corpus: -(parts[corpus] * PERIOD % total))
    for corpus in by_remainder[: PERIOD - sum(counts)]:
        counts[corpus] += 1
    return None if 0 in counts else counts


def interleave_corpora(counts: Sequence[int]) -> np.ndarray:
    """Return the index of the corpus of each sample of a period, int32[sum(counts)].

    Corpus c occurs counts[c] times, 1 or more, evenly spread: after any number of samples each
    corpus is less than one sample away from its part of them. The rule is Tijdeman's (The chairman
    assignment problem, 1980): of the corpora that are behind by at least 1 / (2 corpora - 2), take
    the one that will be a whole sample behind first.
    """
    corpora = len(counts)
    period = sum(counts)
    if corpora == 1:
        return np.zeros(period, dtype=np.int32)
    # A turn of a corpus begins when the corpus is far enough behind, and ends before it is a whole
    # sample behind. With each sample it falls behind by `step`, in units of 1 / `parts` samples.
    period_counts = np.array(counts, dtype=np.int64)
    corpus_of_turn = np.repeat(np.arange(corpora), period_counts)
    turns = concat_ranges(period_counts)
    count = period_counts[corpus_of_turn]
    step = count * (2 * corpora - 2)
    parts = period * (2 * corpora - 2)
    begins = -(-(turns * parts + period) // step)
    # The end as a whole number and 32 binary digits, which tell any two quotients by numbers up to
    # PERIOD apart.
    quotient, remainder = np.divmod((turns + 1) * parts - period, count)
    by_end = np.lexsort((corpus_of_turn, (remainder << 32) // count, quotient))
    rank = np.empty(period, dtype=np.int64)
    rank[by_end] = np.arange(period)
    by_begin = np.argsort(begins, kind="stable")
    ranks = rank[by_begin].tolist()
    stops = np.searchsorted(begins[by_begin], np.arange(1, period + 1), side="right").tolist()
    waiting: list[int] = []
    chosen = []
    start = 0
    for stop in stops:
        for turn_rank in ranks[start:stop]:
            heappush(waiting, turn_rank)
        chosen.append(heappop(waiting))
        start = stop
    return corpus_of_turn[by_end[chosen]].astype(np.int32)


class CorpusOrder(ABC):
    """Base class of orders of a blend: the corpus of each sample, and its pack there.

    Corpora, samples, packs of a corpus and blocks have 0-based indices. The packs of a corpus come
    in order. `samples` is the number of samples, None if there is no end; methods do not check that
    a sample is below it. Samples are computed in blocks of `block_size`, when one is needed.
    Subclasses set `samples` and `block_size`, and implement `count_packs`, `arrange_block` and
    `skip_packs`.
    """

    block_size: int
    samples: int | None

    @abstractmethod
    def count_packs(self, block: int) -> np.ndarray:
        """Return int64[corpora], how many packs of each corpus come before block `block`."""

    @abstractmethod
    def arrange_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each sample of block `block`.

        Returns:
            Two arrays int32[block_size], shorter in the last block: the index of the corpus, and
            the number of earlier samples of the same corpus in the block.
        """

    @abstractmethod
    def skip_packs(self, packs: np.ndarray) -> "CorpusOrder":
        """Return the order that remains after so many `packs` of each corpus.

        `packs` is int64[corpora]. In the returned order, samples and packs count from 0 again. This
        order is not changed, and may itself be returned.
        """

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the index of the corpus that gives `sample`, and of its pack there."""
        block, place = divmod(sample, self.block_size)
        corpora, earlier = self.arrange_block(block)
        corpus = int(corpora[place])
        return corpus, int(self.count_packs(block)[corpus] + earlier[place])

    def packs_before(self, sample: int) -> np.ndarray:
        """Return int64[corpora], how many packs of each corpus come before `sample`."""
        block, place = divmod(sample, self.block_size)
        packs = self.count_packs(block)
        if not place:
            return packs
        return packs + np.bincount(self.arrange_block(block)[0][:place], minlength=len(packs))

    def find_first(self, packs: np.ndarray) -> int:
        """Return the index of the first sample whose pack is packs[corpus] or later.

        `packs`, int64[corpora], has a pack index for each corpus. The result is `samples` if there
        is no such sample.
        """
        blocks = 1 if self.samples is None else -(-self.samples // self.block_size)
        while self.samples is None and not (self.count_packs(blocks) > packs).any():
            blocks *= 2
        block = bisect_left(
            range(1, blocks + 1), True, key=lambda end: bool((self.count_packs(end) > packs).any())
        )
        if block == blocks:
            return self.samples
        corpora, earlier = self.arrange_block(block)
        pack_indices = self.count_packs(block)[corpora] + earlier
        return block * self.block_size + int(np.argmax(pack_indices >= packs[corpora]))


class PeriodicOrder(CorpusOrder):
    """Endless CorpusOrder that repeats a period of counts[c] samples of each corpus c.

    `counts` are those of `find_period_counts`, and `block_size` is their sum. After any number of
    samples each corpus is less than one sample away from its part of them.
    """

    samples = None

    def __init__(self, counts: Sequence[int]):
        """Repeat a period of counts[c] samples of each corpus c."""
        self.block_size = sum(counts)
        self._counts = np.array(counts, dtype=np.int64)
        self._period: tuple[np.ndarray, np.ndarray] | None = None

    def count_packs(self, block: int) -> np.ndarray:
        """Return int64[corpora], how many packs of each corpus come before block `block`."""
        return block * self._counts

    def arrange_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return corpora and earlier samples, int32[block_size], the same for each block."""
        if self._period is None:
            corpora = interleave_corpora(self._counts.tolist())
            earlier = np.empty(self.block_size, dtype=np.int32)
            by_corpus = np.argsort(corpora, kind="stable")
            earlier[by_corpus] = concat_ranges(self._counts)
            self._period = corpora, earlier
        return self._period

    def skip_packs(self, packs: np.ndarray) -> "PeriodicOrder":
        """Return this order itself, which has no memory of what has been read."""
        return self


class DueOrder(CorpusOrder):
    """CorpusOrder without a period for any number of corpora, each of which may end.

    `DueOrder(weights, limits)` takes a positive weight per corpus, in any unit, and the packs after
    which each ends, int64[corpora] (None: no corpus ends). Pack j of a corpus of weight w is due at
    time (j + phase) / w, and packs come in the order of their times, corpora with equal times in
    theirs. A corpus that has ended has no more packs, so that the others take its place in
    proportion. The phases 0 < phase < 1 differ, so that corpora of equal weight take turns. A place
    is computed without the places before it.
    """

    block_size = PERIOD

    def __init__(self, weights: Sequence[Fraction], limits: np.ndarray | None = None):
        """Order corpora by one positive weight each, in any unit.

        Args:
            limits: int64[corpora], number of packs after which each corpus ends; None: no end.
        """
        total = sum(weights)
        self._weights = np.array([max(float(weight / total), _LEAST_WEIGHT) for weight in weights])
        # By weight, so that also corpora of similar weight have phases far apart.
        ranks = np.empty(len(weights))
        ranks[np.argsort(-self._weights, kind="stable")] = np.arange(1, len(weights) + 1)
        self._phases = ranks * _GOLDEN_RATIO % 1
        self._set_limits(limits)

    def _set_limits(self, limits: np.ndarray | None) -> None:
        """Let the corpora end after `limits` packs, and forget earlier blocks."""
        self._limits = limits
        self.samples = None if limits is None else int(limits.sum())
        # Consecutive samples may be on both sides of the border of two blocks.
        self._remember_counts = lru_cache(maxsize=4)(self._compute_counts)
        self._remember_block = lru_cache(maxsize=2)(self._compute_block)

    def count_packs(self, block: int) -> np.ndarray:
        """Return int64[corpora], how many packs of each corpus come before block `block`."""
        return self._remember_counts(block)

    def arrange_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return int32[block_size or less], corpora and earlier samples of block `block`."""
        return self._remember_block(block)

    def skip_packs(self, packs: np.ndarray) -> "DueOrder":
        """Return a copy of the order whose corpora end `packs`, int64[corpora], earlier.

        A corpus with no more packs than that has none left. The result is this order itself if no
        corpus ends.
        """
        if self._limits is None:
            return self
        order = copy(self)
        order._set_limits(np.maximum(self._limits - packs, 0))
        return order

    def _count_due(self, time: float) -> np.ndarray:
        """Return int64[corpora], the packs of each corpus that are due up to `time`."""
        due = np.floor(time * self._weights - self._phases) + 1
        return np.clip(due, 0, _MOST_PACKS if self._limits is None else self._limits).astype(
            np.int64
        )

    def _compute_counts(self, block: int) -> np.ndarray:
        """Find the time up to which the earlier blocks are due, and count packs."""
        samples = block * PERIOD
        if self.samples is not None and samples >= self.samples:
            return self._limits
        before = 0.0
        after = float(samples + len(self._weights))
        while self._count_due(after).sum() <= samples:
            after *= 2
        while before < (middle := (before + after) / 2) < after:
            if self._count_due(middle).sum() <= samples:
                before = middle
            else:
                after = middle
        counts = self._count_due(before)
        equal = self._count_due(after) - counts  # packs that are due at the same time
        return counts + np.clip(samples - counts.sum() - (np.cumsum(equal) - equal), 0, equal)

    def _compute_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Sort the packs of a block by the times at which they are due."""
        before = self.count_packs(block)
        counts = self.count_packs(block + 1) - before
        corpora = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        earlier = concat_ranges(counts)
        due = (before[corpora] + earlier + self._phases[corpora]) / self._weights[corpora]
        order = np.argsort(due, kind="stable")
        return corpora[order], earlier[order].astype(np.int32)
