"""Packs: exactly `seq_length` tokens, the unit of work of a run, and the named ways to cut them from the stream of documents.

What is in a pack is a pure function of the data, the seed, seq_length and the sample's number.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from megaenc import counter_rng
from megaenc.data.packing.token_stream import DocumentSource, TokenStream, narrow_to_int32
from megaenc.errors import InputError

LONGEST_PACK = 1 << 24
"""Tokens. A longer pack is a typing mistake: cutting it takes minutes, and then the memory does not suffice."""


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
        return position_ids(self.edges)


def position_ids(edges: np.ndarray) -> np.ndarray:
    """int64[T]: from 0 on between neighbouring `edges`, which begin with 0 and end with T."""
    starts = edges[:-1].astype(np.int64)
    return np.arange(edges[-1]) - np.repeat(starts, np.diff(edges))


class PackedDataset(Protocol):
    """What a run reads: the packs of one corpus or of a blend, `packs[s]` being that of sample s = 0, 1, 2, ... without end."""

    seq_length: int

    def __getitem__(self, sample: int) -> Pack: ...

    @property
    def samples_before_repeat(self) -> int:
        """How many of the first samples read no token a second time, but for the start of the next epoch in the last one."""


class CorpusPackedDataset(ABC):
    """The packs of one corpus. The packs that start in an epoch are visited in random order: otherwise the pieces of one long
    document would meet in one batch."""

    def __init__(self, corpus: DocumentSource, documents: np.ndarray, seq_length: int, seed: int):
        """`documents`: int64[D], the numbers of those to use. Raises InputError when they hold no token."""
        self.stream = TokenStream(corpus, documents, seed)
        self.seq_length = seq_length
        self.seed = seed
        self._visits = lru_cache(maxsize=1)(self._make_visits)

    @abstractmethod
    def epoch_of_sample(self, sample: int) -> int:
        """The epoch in which a sample's pack starts: an epoch's samples and packs have the same numbers, in another order."""

    @abstractmethod
    def first_sample_of_epoch(self, epoch: int) -> int:
        """The number of the first sample that starts in `epoch` or, where none does (a corpus shorter than a pack), after it."""

    @abstractmethod
    def start_of_pack(self, pack: int) -> int:
        """The position in the stream at which a pack begins; packs are numbered as they lie there."""

    def __getitem__(self, sample: int) -> Pack:
        """The Pack of sample number `sample`, from 0 on without end."""
        epoch = self.epoch_of_sample(sample)
        first = self.first_sample_of_epoch(epoch)
        pack = first + int(self._visits(epoch)[sample - first])
        tokens, edges = self.stream.read(self.start_of_pack(pack), self.seq_length)
        return Pack(sample, epoch, tokens, edges)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all documents together."""
        return self.stream.tokens_per_epoch

    @property
    def samples_before_repeat(self) -> int:
        return self.first_sample_of_epoch(1)

    @property
    def dropped(self) -> float:
        """The share of the data that is in no pack."""
        return 0.0

    def epochs_after(self, samples: int) -> float:
        """How often the first `samples` samples go through the data."""
        epoch = self.epoch_of_sample(samples)
        first, end = self.first_sample_of_epoch(epoch), self.first_sample_of_epoch(epoch + 1)
        return epoch + (samples - first) / (end - first)

    def _make_visits(self, epoch: int) -> np.ndarray:
        """The order in which the packs that start in `epoch` are visited, counted from the first of them."""
        count = self.first_sample_of_epoch(epoch + 1) - self.first_sample_of_epoch(epoch)
        make = partial(counter_rng.permutation, self.seed, "packs", count, counters=(epoch,))
        return self.stream.shared(("visits", count, epoch), lambda: (narrow_to_int32(make()),))[0]


class ConcatPackedDataset(CorpusPackedDataset):
    """The stream cut every `seq_length` tokens, so that nothing is wasted; an edge wherever a document ends."""

    def epoch_of_sample(self, sample: int) -> int:
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        return sample * self.seq_length // self.tokens_per_epoch

    def first_sample_of_epoch(self, epoch: int) -> int:
        return -(-epoch * self.tokens_per_epoch // self.seq_length)

    def start_of_pack(self, pack: int) -> int:
        return pack * self.seq_length


SHORTEST_CHUNK = 12  # tokens; the study's


def check_two_chunks_fit(seq_length: int) -> None:
    """InputError where a pack of --packing random-length has no room for two chunks."""
    if seq_length < 2 * SHORTEST_CHUNK:
        raise InputError(
            f"--packing random-length: found --seq-length {seq_length}, expected at least {2 * SHORTEST_CHUNK} "
            f"(two chunks of {SHORTEST_CHUNK} tokens)"
        )


def mean_squared_chunk_lengths(seq_length: int) -> float:
    """Return the mean, over all places of the cut, of the sum of the squared lengths of a pack's two chunks."""
    shortest, longest = SHORTEST_CHUNK, seq_length - SHORTEST_CHUNK
    to_longest, below = (end * (end + 1) * (2 * end + 1) // 6 for end in (longest, shortest - 1))  # 1 + 4 + 9 + ... + end^2
    return 2 * (to_longest - below) / (longest - shortest + 1)  # the left chunk's squares; the right one has the same


class RandomLengthPackedDataset(ConcatPackedDataset):
    """The study's way (arXiv 2507.00994): each pack is cut at a random place into two chunks of at least 12 tokens.

    A chunk may span documents; there is no edge inside it, so attention sees across their ends.
    """

    def __init__(self, corpus: DocumentSource, documents: np.ndarray, seq_length: int, seed: int):
        """See CorpusPacks. Raises InputError when a pack has no room for two chunks."""
        check_two_chunks_fit(seq_length)
        super().__init__(corpus, documents, seq_length, seed)

    def __getitem__(self, sample: int) -> Pack:
        """The Pack of sample number `sample`, from 0 on without end; edges: int32[3]."""
        pack = super().__getitem__(sample)
        draw = float(counter_rng.uniforms(self.seed, "chunks", 1, counters=(sample,))[0])
        cut = SHORTEST_CHUNK + int(draw * (self.seq_length - 2 * SHORTEST_CHUNK + 1))
        return Pack(sample, pack.epoch, pack.tokens, np.array([0, cut, self.seq_length], dtype=np.int32))
