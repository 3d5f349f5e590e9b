"""Packs of exactly `seq_length` tokens, the samples of a run, and the packings that cut them from the document stream.

The contents of a pack are a pure function of the data, the seed, seq_length and the sample's number.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import counter_rng
from megaenc.data.packing.block_stream import BlockSource, BlockStream, DocumentBlocks
from megaenc.data.packing.token_stream import DocumentSource, DocumentStream, TokenStream
from megaenc.errors import InputError

LONGEST_PACK = 1 << 24
"""Largest `seq_length` in tokens; a longer pack is a typing mistake that would exhaust the memory."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Sample of a run: number, epoch in which it starts, T token ids, and document edges that attention never crosses.

    sample: its number in the run; epoch: the pass over the data in which it starts; tokens: int64[T];
    edges: int32[D + 1], 0 first, T last, strictly increasing (the `cu_seqlens` of packed attention).
    """

    sample: int
    epoch: int
    tokens: np.ndarray
    edges: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Return int64[T], the position of each token within its document or chunk, 0 at each edge."""
        return position_ids(self.edges)


def position_ids(edges: np.ndarray) -> np.ndarray:
    """Return int64[T], the position of each token after the last of `edges`, int[D + 1] which begin with 0, end with T."""
    starts = edges[:-1].astype(np.int64)
    return np.arange(edges[-1]) - np.repeat(starts, np.diff(edges))


class PackedDataset(Protocol):
    """Interface of endless packs of one corpus or a blend: `dataset[s]` is the Pack of sample s, of `seq_length` tokens."""

    seq_length: int

    def __getitem__(self, sample: int) -> Pack: ...

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples before the first that starts a second epoch (in a blend, of any corpus)."""


class CorpusPackedDataset(ABC):
    """Base class of the endless packs of one corpus, cut from its token stream, in random order within each epoch.

    Without that order the pieces of one long document would meet in one batch.
    """

    def __init__(
        self,
        corpus: DocumentSource | BlockSource,
        documents: np.ndarray | DocumentBlocks,
        seq_length: int,
        seed: int,
    ):
        """Cut packs from `documents`, int64[D] numbers or blocks of documents. Raises InputError if they hold no token.

        All documents are shuffled, or all blocks and documents within groups of them.
        """
        kind = BlockStream if isinstance(documents, DocumentBlocks) else DocumentStream
        self.stream: TokenStream = kind(corpus, documents, seed)
        self.seq_length = seq_length
        self.seed = seed
        self._pack_order = lru_cache(maxsize=1)(self._compute_pack_order)

    @abstractmethod
    def epoch_of_sample(self, sample: int) -> int:
        """Return the number of the epoch, from 0, in which the pack of sample number `sample` starts."""

    @abstractmethod
    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the number of the first sample that starts in `epoch`, or after it if none does (tiny corpus)."""

    @abstractmethod
    def start_of_pack(self, pack: int) -> int:
        """Return the token position in the stream at which pack number `pack`, in stream order, begins."""

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of sample number `sample`, counted from 0 without end."""
        epoch = self.epoch_of_sample(sample)
        first = self.first_sample_of_epoch(epoch)
        pack = first + int(self._pack_order(epoch)[sample - first])
        tokens, edges = self.stream.read(self.start_of_pack(pack), self.seq_length)
        return Pack(sample, epoch, tokens, edges)

    @property
    def tokens_per_epoch(self) -> int:
        """Return the number of tokens of all documents, the length of one epoch of the token stream."""
        return self.stream.tokens_per_epoch

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples whose pack starts in the first epoch."""
        return self.first_sample_of_epoch(1)

    def packs_of_epochs(self, epochs: int) -> int:
        """Return the number of packs of the first `epochs` epochs, for --blend-max-epochs."""
        return self.first_sample_of_epoch(epochs)

    @property
    def dropped(self) -> float:
        """Return 0.0, the share of the tokens that is in no pack; a packing that drops tokens overrides this."""
        return 0.0

    def epochs_after(self, samples: int) -> float:
        """Return the number of epochs, such as 1.25, that the first `samples` samples cover."""
        epoch = self.epoch_of_sample(samples)
        first = self.first_sample_of_epoch(epoch)
        end = self.first_sample_of_epoch(epoch + 1)
        return epoch + (samples - first) / (end - first)

    def _compute_pack_order(self, epoch: int) -> Sequence[int] | np.ndarray:
        """Compute the random order of the packs that start in `epoch`, numbered from the first of them."""
        return self.stream.permute_packs(
            self.first_sample_of_epoch(epoch + 1) - self.first_sample_of_epoch(epoch), epoch
        )


class ConcatPackedDataset(CorpusPackedDataset):
    """Packs of one corpus cut from the stream every `seq_length` tokens without loss, with an edge at each document end."""

    def epoch_of_sample(self, sample: int) -> int:
        """Return the number of the epoch in which the pack of `sample` starts, from 0; IndexError if negative."""
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        return sample * self.seq_length // self.tokens_per_epoch

    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the number of the first sample whose pack starts in or after `epoch`."""
        return -(-epoch * self.tokens_per_epoch // self.seq_length)

    def start_of_pack(self, pack: int) -> int:
        """Return `pack` * `seq_length`, the token position in the stream at which pack number `pack` begins."""
        return pack * self.seq_length


SHORTEST_CHUNK = 12  # tokens, as in arXiv 2507.00994


def check_two_chunks_fit(seq_length: int) -> None:
    """Raise InputError if `seq_length` is below 24, the two shortest chunks of a pack of --packing random-length."""
    if seq_length < 2 * SHORTEST_CHUNK:
        raise InputError(
            f"--packing random-length: found --seq-length {seq_length}, expected at least {2 * SHORTEST_CHUNK} "
            f"(two chunks of {SHORTEST_CHUNK} tokens)"
        )


def mean_squared_chunk_lengths(seq_length: int) -> float:
    """Return the mean, over all cut positions of a pack, of the sum of its two squared chunk lengths (random-length)."""
    shortest = SHORTEST_CHUNK
    longest = seq_length - SHORTEST_CHUNK
    to_longest, below = (
        end * (end + 1) * (2 * end + 1) // 6 for end in (longest, shortest - 1)
    )  # 1 + 4 + 9 + ... + end^2
    return (
        2 * (to_longest - below) / (longest - shortest + 1)
    )  # both chunks have the same distribution


class RandomLengthPackedDataset(ConcatPackedDataset):
    """Packs of one corpus, each cut at random into two chunks of at least 12 tokens, the only edges of attention.

    As in arXiv 2507.00994. A chunk may span documents: attention crosses their ends.
    """

    def __init__(
        self,
        corpus: DocumentSource | BlockSource,
        documents: np.ndarray | DocumentBlocks,
        seq_length: int,
        seed: int,
    ):
        """Cut packs as CorpusPackedDataset. Raises InputError if a pack has no room for two chunks."""
        check_two_chunks_fit(seq_length)
        super().__init__(corpus, documents, seq_length, seed)

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of sample number `sample`, with edges int32[3]."""
        pack = super().__getitem__(sample)
        draw = float(counter_rng.uniforms(self.seed, "chunks", 1, counters=(sample,))[0])
        cut = SHORTEST_CHUNK + int(draw * (self.seq_length - 2 * SHORTEST_CHUNK + 1))
        return Pack(
            sample, pack.epoch, pack.tokens, np.array([0, cut, self.seq_length], dtype=np.int32)
        )
