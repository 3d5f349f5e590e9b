"""Packs of exactly `seq_length` tokens, the samples of a run, and packings.

A packing cuts packs from the document stream. The contents of a pack are a pure function of the
data, the seed, seq_length and the sample's number.
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
"""Largest `seq_length` in tokens; a longer pack is a typing mistake that would exhaust the
memory."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Sample of a run: `seq_length` tokens, cut from one or more documents.

    It has the 0-based index `sample` in the run, the 0-based pass over the corpus in which it
    starts (`epoch`), int64[T] token ids (`tokens`), and int32[D + 1] cumulative lengths of its D
    documents, from 0 to T (`cu_seqlens`): attention never crosses their boundaries. Objectives must
    not change the arrays.
    """

    sample: int
    """Number of the sample in the run, from 0."""
    epoch: int
    """Pass over its corpus, from 0, in which the pack starts."""
    tokens: np.ndarray
    """int64[T], token ids."""
    cu_seqlens: np.ndarray
    """int32[D + 1], cumulative lengths of the documents, strictly increasing from 0 to T."""

    @property
    def edges(self) -> np.ndarray:
        """Earlier name of `cu_seqlens`."""
        return self.cu_seqlens

    @property
    def positions(self) -> np.ndarray:
        """Return int64[T], the position of each token, from 0 at each of `cu_seqlens`."""
        return position_ids(self.cu_seqlens)


def position_ids(cu_seqlens: np.ndarray) -> np.ndarray:
    """Return int64[T], the position of each token in its document, from 0.

    `cu_seqlens`, int[D + 1], are the cumulative lengths of the D documents, from 0 to T.
    """
    return concat_ranges(np.diff(cu_seqlens))


def concat_ranges(lengths: np.ndarray) -> np.ndarray:
    """Return int64[sum(lengths)], 0 to n - 1 for each length n in turn."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class PackedDataset(Protocol):
    """Interface of packs of `seq_length` tokens of one corpus or a blend.

    `dataset[s]` is the Pack of the 0-based sample s of the run; only a blend whose corpora all
    leave it has a last one, and raises InputError after it. All ranks see the same packs; a sampler
    decides which of them a rank reads.
    """

    seq_length: int

    def __getitem__(self, sample: int) -> Pack: ...

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples before the first one that starts a second epoch.

        In a blend, it is the second epoch of any corpus.
        """


class CorpusPackedDataset(ABC):
    """Base class of the endless packs of one corpus, cut from its token stream.

    It takes a `corpus`, the `documents` of it to read, int64[D] indices or DocumentBlocks,
    `seq_length` in tokens, and a `seed`; InputError if they hold no token. `dataset[s]` is the Pack
    of the 0-based sample s, a pure function of these and s. Within each epoch packs are in random
    order. Otherwise the pieces of one long document would meet in one batch. Subclasses implement
    `epoch_of_sample`, `first_sample_of_epoch` and `start_of_pack`.
    """

    def __init__(
        self,
        corpus: DocumentSource | BlockSource,
        documents: np.ndarray | DocumentBlocks,
        seq_length: int,
        seed: int,
    ):
        """Cut packs of `seq_length` tokens from a part of a corpus.

        Args:
            documents: Part of the corpus: int64[D] document indices, of which all are shuffled, or
                blocks of documents, of which all blocks and the documents of a few of them are.
            seed: Seed of the order of documents and packs.

        Raises:
            InputError: The documents hold no token.
        """
        kind = BlockStream if isinstance(documents, DocumentBlocks) else DocumentStream
        self.stream: TokenStream = kind(corpus, documents, seed)
        self.seq_length = seq_length
        self.seed = seed
        self._pack_order = lru_cache(maxsize=1)(self._compute_pack_order)

    @abstractmethod
    def epoch_of_sample(self, sample: int) -> int:
        """Return the 0-based epoch in which the pack of the 0-based `sample` starts."""

    @abstractmethod
    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the index of the first sample that starts in or after `epoch`.

        In a tiny corpus, an epoch may have no start of a pack.
        """

    @abstractmethod
    def start_of_pack(self, pack: int) -> int:
        """Return the position, in tokens of the endless stream, at which a pack begins.

        `pack` is its 0-based index in the stream, over all epochs. It differs from that of its
        sample, as the packs of an epoch are in random order.
        """

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of the 0-based `sample`; there is no last one."""
        epoch = self.epoch_of_sample(sample)
        first = self.first_sample_of_epoch(epoch)
        pack = first + int(self._pack_order(epoch)[sample - first])
        tokens, cu_seqlens = self.stream.read(self.start_of_pack(pack), self.seq_length)
        return Pack(sample, epoch, tokens, cu_seqlens)

    @property
    def tokens_per_epoch(self) -> int:
        """Return the number of tokens of the dataset's documents, the length of one epoch."""
        return self.stream.tokens_per_epoch

    @property
    def samples_before_repeat(self) -> int:
        """Return the number of samples whose pack starts in the first epoch."""
        return self.first_sample_of_epoch(1)

    def packs_of_epochs(self, epochs: int) -> int:
        """Return the number of packs that start in the first `epochs` epochs.

        A blend ends a corpus after so many packs (--blend-max-epochs). A packing may only estimate
        it.
        """
        return self.first_sample_of_epoch(epochs)

    @property
    def dropped(self) -> float:
        """Return the fraction (0 to 1) of the tokens that is in no pack, here 0.0.

        A packing that drops tokens overrides this.
        """
        return 0.0

    def epochs_after(self, samples: int) -> float:
        """Return the number of epochs, such as 1.25, that the first `samples` cover.

        All packs of an epoch count equally.
        """
        epoch = self.epoch_of_sample(samples)
        first = self.first_sample_of_epoch(epoch)
        end = self.first_sample_of_epoch(epoch + 1)
        return epoch + (samples - first) / (end - first)

    def _compute_pack_order(self, epoch: int) -> Sequence[int] | np.ndarray:
        """Compute the random order of the packs that start in `epoch`.

        They are numbered from the first of them.
        """
        return self.stream.permute_packs(
            self.first_sample_of_epoch(epoch + 1) - self.first_sample_of_epoch(epoch), epoch
        )


class ConcatPackedDataset(CorpusPackedDataset):
    """Endless packs of one corpus, cut from its stream every `seq_length` tokens.

    It is built like a CorpusPackedDataset, from `corpus`, `documents`, `seq_length` and `seed`. No
    token is lost or padded: a pack may go on into the next document and the next epoch. Each end of
    a document is a boundary in `cu_seqlens`.
    """

    def epoch_of_sample(self, sample: int) -> int:
        """Return the 0-based epoch in which the pack of the 0-based `sample` starts.

        Raises:
            IndexError: `sample` is negative.
        """
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        return sample * self.seq_length // self.tokens_per_epoch

    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the index of the first sample whose pack starts in or after `epoch`."""
        return -(-epoch * self.tokens_per_epoch // self.seq_length)

    def start_of_pack(self, pack: int) -> int:
        """Return `pack` * `seq_length`, the token position at which a pack begins."""
        return pack * self.seq_length


SHORTEST_CHUNK = 12  # tokens, as in arXiv 2507.00994


def check_two_chunks_fit(seq_length: int) -> None:
    """Raise InputError if a pack has no room for the two shortest chunks, 24 tokens.

    It is for --packing random-length.
    """
    if seq_length < 2 * SHORTEST_CHUNK:
        raise InputError(
            f"--packing random-length: found --seq-length {seq_length}, expected at least "
            f"{2 * SHORTEST_CHUNK} "
            f"(two chunks of {SHORTEST_CHUNK} tokens)"
        )


def mean_squared_chunk_lengths(seq_length: int) -> float:
    """Return the mean sum of the two squared chunk lengths of a pack (random-length).

    The work of attention is proportional to it. The mean is over all cut positions. `seq_length`,
    in tokens, must be 24 or more; see `check_two_chunks_fit`.
    """
    shortest = SHORTEST_CHUNK
    longest = seq_length - SHORTEST_CHUNK
    # Sums of squares 1 + 4 + 9 + ... + n^2.
    to_longest = longest * (longest + 1) * (2 * longest + 1) // 6
    below = (shortest - 1) * shortest * (2 * shortest - 1) // 6
    # Both chunks have the same distribution.
    return 2 * (to_longest - below) / (longest - shortest + 1)


class RandomLengthPackedDataset(ConcatPackedDataset):
    """Packs of one corpus, each cut at random into two chunks of 12 or more tokens.

    It is built like a CorpusPackedDataset, from `corpus`, `documents`, `seq_length` and `seed`;
    InputError if a pack has no room for two chunks, or the documents hold no token. As in arXiv
    2507.00994, the cut is the only boundary of attention: a chunk may span documents, whose ends
    attention crosses.
    """

    def __init__(
        self,
        corpus: DocumentSource | BlockSource,
        documents: np.ndarray | DocumentBlocks,
        seq_length: int,
        seed: int,
    ):
        """Cut packs as CorpusPackedDataset does.

        Raises:
            InputError: A pack has no room for two chunks, or the documents hold no token.
        """
        check_two_chunks_fit(seq_length)
        super().__init__(corpus, documents, seq_length, seed)

    def __getitem__(self, sample: int) -> Pack:
        """Return the Pack of the 0-based `sample`, whose `cu_seqlens` are 0, cut and T."""
        pack = super().__getitem__(sample)
        draw = float(counter_rng.uniforms(self.seed, "chunks", 1, counters=(sample,))[0])
        cut = SHORTEST_CHUNK + int(draw * (self.seq_length - 2 * SHORTEST_CHUNK + 1))
        return Pack(
            sample, pack.epoch, pack.tokens, np.array([0, cut, self.seq_length], dtype=np.int32)
        )
