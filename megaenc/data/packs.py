"""Packs: exactly `seq_length` tokens, documents or pieces of them laid end to end, the unit of work of a run.

What is in a pack is a pure function of the data, the seed, seq_length and the sample's number.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import randomness
from megaenc.errors import InputError


class Documents(Protocol):
    """Where packs get tokens from; a Corpus is one."""

    document_lengths: np.ndarray
    """int64[D] in tokens."""

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int64[stop - start]."""


@dataclass(frozen=True, eq=False)
class Pack:
    """T tokens in which attention never crosses an edge.

    sample: its number in the run's order; epoch: the pass over the data in which it starts; tokens: int64[T];
    edges: int32[D + 1], 0 first, T last, strictly increasing (the `cu_seqlens` of packed attention).
    """

    sample: int
    epoch: int
    tokens: np.ndarray
    edges: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """int64[T]: place within the document or piece, 0 at each edge."""
        starts = self.edges[:-1].astype(np.int64)
        return np.arange(len(self.tokens)) - np.repeat(starts, np.diff(self.edges))


class ConcatPacks:
    """Packs cut from one endless stream of tokens, so that nothing is wasted: `packs[s]` is the Pack of sample s = 0, 1, 2, ...

    In every epoch all documents are laid end to end in a new random order, and epoch follows epoch without a gap. Pack k holds
    tokens k*T..(k+1)*T-1 of that stream and belongs to the epoch in which it starts. The packs of an epoch are visited in random
    order: otherwise the pieces of one long document would meet in one batch. Documents without tokens take no part.
    """

    def __init__(self, corpus: Documents, documents: np.ndarray, seq_length: int, seed: int):
        """`documents`: int64[D], the numbers of those to use. Raises InputError when they hold no token."""
        lengths = corpus.document_lengths[documents]
        self._corpus = corpus
        self._documents = documents[lengths > 0]
        self._lengths = lengths[lengths > 0]
        self.seq_length = seq_length
        self.seed = seed
        self.tokens_per_epoch = int(self._lengths.sum())
        if self.tokens_per_epoch == 0:
            raise InputError(
                f"{getattr(corpus, 'prefix', 'corpus')}: found no tokens in {len(documents)} documents, expected at least one"
            )
        # Two: the last pack of an epoch reaches into the next one, and random order may visit it at any time.
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)
        self._visits = lru_cache(maxsize=1)(self._make_visits)

    def __getitem__(self, sample: int) -> Pack:
        """The Pack of sample number `sample`, from 0 on without end."""
        epoch = self.epoch_of_sample(sample)
        first = self.first_sample_of_epoch(epoch)
        pack = first + int(self._visits(epoch)[sample - first])
        tokens, edges = self._cut(pack * self.seq_length)
        return Pack(sample, epoch, tokens, edges)

    def epoch_of_sample(self, sample: int) -> int:
        """The epoch in which a sample's pack starts: an epoch's samples and packs have the same numbers, in another order."""
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        return sample * self.seq_length // self.tokens_per_epoch

    def first_sample_of_epoch(self, epoch: int) -> int:
        """The number of the first sample that starts in `epoch` or, where none does (a corpus shorter than a pack), after it."""
        return -(-epoch * self.tokens_per_epoch // self.seq_length)

    def _cut(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64[T] and edges int32[D + 1] of the stream from token `start` on."""
        tokens = np.empty(self.seq_length, dtype=np.int64)
        edges = [0]
        while edges[-1] < self.seq_length:
            epoch, begin = divmod(start + edges[-1], self.tokens_per_epoch)
            order, ends = self._epoch_order(epoch)
            end = min(begin + self.seq_length - edges[-1], self.tokens_per_epoch)
            first, last = np.searchsorted(ends, (begin, end - 1), side="right")  # the places that hold tokens begin and end - 1
            for place in range(first, last + 1):
                at = int(order[place])
                offset = int(ends[place] - self._lengths[at])  # of the document's first token within the epoch
                piece = self._corpus.tokens(int(self._documents[at]), max(begin - offset, 0), min(end, int(ends[place])) - offset)
                tokens[edges[-1] : edges[-1] + len(piece)] = piece
                edges.append(edges[-1] + len(piece))
        return tokens, np.array(edges, dtype=np.int32)

    def _make_epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Which document lies at each place of the epoch, and int64[D] where it ends, in tokens from the epoch's start."""
        order = _narrow(randomness.permutation(self.seed, "documents", len(self._lengths), counters=(epoch,)))
        return order, np.cumsum(self._lengths[order])

    def _make_visits(self, epoch: int) -> np.ndarray:
        """The order in which the packs that start in `epoch` are visited, counted from the first of them."""
        count = self.first_sample_of_epoch(epoch + 1) - self.first_sample_of_epoch(epoch)
        return _narrow(randomness.permutation(self.seed, "packs", count, counters=(epoch,)))


def _narrow(order: np.ndarray) -> np.ndarray:
    """int32 wherever it suffices: a hundred million documents are 400 MB less."""
    return order.astype(np.int32) if len(order) < 2**31 else order
