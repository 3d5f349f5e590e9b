"""Packs that each start at a sentence, from a corpus whose documents were split into sentences."""

from array import array
from bisect import bisect_right
from functools import lru_cache

import numpy as np

from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.metadata import CorpusMetadata
from megaenc.data.packing.block_stream import DocumentBlocks
from megaenc.data.packing.packed_dataset import CorpusPackedDataset
from megaenc.errors import InputError


def check_has_sentences(
    prefix: str, metadata: CorpusMetadata | None, *, sequences: int, documents: int
) -> None:
    """Raise InputError if `metadata` records no sentence splitting (or is None) and `sequences` equals `documents`.

    Only the metadata distinguishes documents of one sentence each from whole documents.
    """
    if not (metadata and metadata.sentences) and sequences == documents:
        raise InputError(
            f"--packing sentences: {prefix} holds whole documents, expected one that was preprocessed with --split-sentences"
        )


class SentencePackedDataset(CorpusPackedDataset):
    """Packs of one corpus that each start at a sentence; the rest of a sentence that a pack cuts is dropped.

    Attention ends where a document ends, not where a sentence does. A sentence longer than a pack fills one pack.
    """

    def __init__(
        self, corpus: Corpus, documents: np.ndarray | DocumentBlocks, seq_length: int, seed: int
    ):
        """Cut packs as CorpusPackedDataset. Raises InputError if every document of the corpus is one sequence."""
        check_has_sentences(
            getattr(corpus, "prefix", "the corpus"),
            getattr(corpus, "metadata", None),
            sequences=len(corpus.sequence_lengths),
            documents=len(corpus.first_sequences) - 1,
        )
        super().__init__(corpus, documents, seq_length, seed)
        # The packs of an epoch start where those of the previous one end, so epochs are computed in order. Index e: the number of
        # packs before epoch e, and the tokens of epoch e that an earlier epoch's last pack reads.
        self._first_samples = [0]
        self._consumed = [0]
        self._pack_starts = lru_cache(maxsize=2)(self._compute_pack_starts)

    def epoch_of_sample(self, sample: int) -> int:
        """Return the number of the epoch in which the pack of `sample` starts, from 0; IndexError if negative."""
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        while self._first_samples[-1] <= sample:
            self._append_epoch(len(self._first_samples) - 1)
        return bisect_right(self._first_samples, sample) - 1

    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the number of the first sample whose pack starts in or after `epoch`."""
        while len(self._first_samples) <= epoch:
            self._append_epoch(len(self._first_samples) - 1)
        return self._first_samples[epoch]

    def start_of_pack(self, pack: int) -> int:
        """Return the token position, in the stream of all epochs, at which pack number `pack` (in stream order) begins."""
        epoch = self.epoch_of_sample(pack)
        return epoch * self.tokens_per_epoch + int(
            self._pack_starts(epoch)[pack - self._first_samples[epoch]]
        )

    def packs_of_epochs(self, epochs: int) -> int:
        """Return `epochs` times the packs of the first epoch; for the exact number all epochs would be shuffled."""
        return epochs * self.first_sample_of_epoch(1)

    @property
    def dropped(self) -> float:
        """Return the share of the first epoch's tokens that is in no pack: the rests of cut sentences."""
        packs = self.first_sample_of_epoch(1)
        return 1 - packs * self.seq_length / self.start_of_pack(packs)

    def _append_epoch(self, epoch: int) -> None:
        """Compute the number of packs of `epoch`, the last known one, and the tokens of the next epoch that they read."""
        starts = self._pack_starts(epoch)
        # End of the last pack; less than an epoch if only the rest of a sentence follows.
        end = int(starts[-1]) + self.seq_length if len(starts) else self._consumed[epoch]
        self._first_samples.append(self._first_samples[epoch] + len(starts))
        self._consumed.append(max(0, end - self.tokens_per_epoch))

    def _compute_pack_starts(self, epoch: int) -> np.ndarray:
        """Compute int64[packs], the starts of the packs of `epoch` in tokens from the epoch's start."""
        sentences = self._compute_sentence_starts(epoch)
        following = np.searchsorted(
            sentences, sentences + self.seq_length
        )  # first sentence after a pack that starts here
        next_pack = memoryview(
            following
        )  # indexing it is several times faster than indexing an array
        sentence = int(np.searchsorted(sentences, self._consumed[epoch]))
        pack_sentences = array("q")
        while sentence < len(sentences):
            pack_sentences.append(sentence)
            sentence = next_pack[sentence]
        return (
            sentences[np.frombuffer(pack_sentences, np.int64)] if pack_sentences else sentences[:0]
        )

    def _compute_sentence_starts(self, epoch: int) -> np.ndarray:
        """Compute int64[sentences], the starts of the sentences of `epoch` in tokens from the epoch's start."""
        documents = self.stream.epoch_documents(epoch)
        corpus = self.stream.corpus
        firsts = corpus.first_sequences[documents]
        counts = np.diff(corpus.first_sequences)[documents]
        del documents  # with 100 million sentences each array takes nearly a gigabyte
        # All sequences of the first document, then those of the second, ...
        sequences = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        del firsts, counts
        sequences += np.arange(len(sequences))
        lengths = corpus.sequence_lengths[sequences]
        del sequences
        lengths = lengths[lengths > 0]
        starts = np.cumsum(lengths, dtype=np.int64)
        starts -= lengths
        return starts
