"""Packs mixed from several corpora, in proportions that hold all along a run."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction

import numpy as np

from megaenc.data.packing.corpus_order import (
    CorpusOrder,
    DueOrder,
    PeriodicOrder,
    find_period_counts,
)
from megaenc.data.packing.packed_dataset import Pack, PackedDataset
from megaenc.errors import InputError


class BlendedDataset:
    """Packs of several corpora, mixed evenly by weight.

    `BlendedDataset(datasets, weights)` takes the endless packs of each corpus and its weight, a
    positive Fraction in any unit. Each corpus ends after its number of packs in `limits`, if given;
    the others then take its place in proportion. `dataset[s]` is the Pack of the 0-based sample s
    of the run, from one corpus; IndexError if s is below `first_sample`, InputError after the end
    of all corpora. Within a corpus, packs keep the order that they have without the others. The
    order of corpora depends only on these arguments. It repeats after at most PERIOD (65,536)
    samples if every corpus has one there, without `limits`, and unless `is_tempered` (weights are
    powers of sizes, which a period would round). `sources` are the corpora's words of --data-path.
    """

    def __init__(
        self,
        datasets: Sequence[PackedDataset],
        weights: Sequence[Fraction],
        *,
        limits: Sequence[int] | None = None,
        is_tempered: bool = False,
        sources: Sequence[str] = (),
    ):
        """Blend `datasets` by one positive weight each, in any unit.

        Args:
            datasets: Endless packs of each corpus, all of one `seq_length`.
            weights: Weight of each corpus.
            limits: Number of packs after which each corpus ends, and the others take its place in
                proportion; None: no end.
            is_tempered: See `find_period_counts`.
            sources: Word of --data-path that each corpus is from, for losses by word.
        """
        self.datasets = list(datasets)
        self.seq_length = datasets[0].seq_length
        ends = None if limits is None else np.array(limits, dtype=np.int64)
        counts = find_period_counts(weights, is_tempered=is_tempered, has_limits=limits is not None)
        self._order: CorpusOrder = (
            DueOrder(weights, ends) if counts is None else PeriodicOrder(counts)
        )
        self.sources = tuple(sources)
        self.first_sample = 0
        self._offsets = np.zeros(len(self.datasets), dtype=np.int64)

    @property
    def is_periodic(self) -> bool:
        """Return whether the order of corpora repeats after at most PERIOD samples."""
        return isinstance(self._order, PeriodicOrder)

    @property
    def samples(self) -> int | None:
        """Return the number of samples from `first_sample` until all corpora have ended.

        None without an end.
        """
        return self._order.samples

    def continue_from(self, first_sample: int, offsets: Sequence[int]) -> "BlendedDataset":
        """Return a copy that continues a run with sample `first_sample`.

        The order of corpora starts anew; `limits` count the omitted packs too. The copy shares the
        datasets. `continue_from` must not be called on the copy, which is not checked: the packs
        that the copy omits would count twice towards `limits`.

        Args:
            first_sample: 0-based index, in the run, of the copy's first sample.
            offsets: For each corpus, the number of its first packs to omit, which have been read.
        """
        shifted = copy(self)
        shifted.first_sample = first_sample
        shifted._offsets = np.array(offsets, dtype=np.int64)
        shifted._order = self._order.skip_packs(shifted._offsets)
        return shifted

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of the 0-based `sample`, which is `first_sample` or later.

        Raises:
            IndexError: `sample` is before `first_sample`.
            InputError: All corpora have ended before it.
        """
        corpus, pack = self._order.locate(self._place_of(sample))
        return replace(self.datasets[corpus][int(self._offsets[corpus]) + pack], sample=sample)

    def corpus_of_sample(self, sample: int) -> int:
        """Return the index in `datasets` of the corpus that gives the 0-based `sample`.

        Errors are those of `dataset[sample]`.
        """
        return self._order.locate(self._place_of(sample))[0]

    def next_packs(self, sample: int) -> list[int]:
        """Return the index of each corpus's first pack that is not before `sample`.

        It is an index in the corpus's dataset, so that omitted packs count too. `sample`, which is
        not checked, is `first_sample` or later, and at most the end.
        """
        return (self._offsets + self._order.packs_before(sample - self.first_sample)).tolist()

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples before any corpus starts its second epoch.

        They are counted from `first_sample`. If none starts it, they are all `samples`.
        """
        first_epochs = np.array(
            [part.samples_before_repeat for part in self.datasets], dtype=np.int64
        )
        return self._order.find_first(np.maximum(first_epochs - self._offsets, 0))

    def _place_of(self, sample: int) -> int:
        """Return the place of sample number `sample` in the order.

        Raises:
            IndexError: `sample` is before `first_sample`.
            InputError: All corpora have ended before it.
        """
        if sample < self.first_sample:
            raise IndexError(f"samples are numbered from {self.first_sample}, found {sample}")
        place = sample - self.first_sample
        if self.samples is not None and place >= self.samples:
            raise InputError(
                f"--blend-max-epochs: it ends all corpora after {self.samples:,} packs, found pack "
                f"{place + 1:,} of the run or phase; give a greater number"
            )
        return place
