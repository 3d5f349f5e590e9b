"""Packs that each start at a sentence, from documents split into sentences."""

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
    """Raise InputError unless a corpus was split into sentences.

    Args:
        prefix: Path of the corpus without extension, for the error.
        metadata: Metadata of the corpus, which may record the splitting; None for a corpus of
            Megatron's own tool. Without metadata or this record, `sequences` must not equal
            `documents`.
        sequences: Number of sequences in the .idx.
        documents: Number of documents in the .idx.
    """
    if not (metadata and metadata.sentences) and sequences == documents:
        raise InputError(
            f"--packing sentences: {prefix} holds whole documents, expected one that was "
            "preprocessed with --split-sentences"
        )


class SentencePackedDataset(CorpusPackedDataset):
    """Packs of one corpus that each start at a sentence.

    It is built like a CorpusPackedDataset, from a Corpus, `documents`, `seq_length` and `seed`;
    InputError if the corpus was not split into sentences (`check_has_sentences`), or the documents
    hold no token. The rest of a sentence that a pack cuts is dropped, however long the rest is.
    Attention ends where a document ends, not where a sentence does.
    """

    def __init__(
        self, corpus: Corpus, documents: np.ndarray | DocumentBlocks, seq_length: int, seed: int
    ):
        """Cut packs as CorpusPackedDataset does.

        Raises:
            InputError: The corpus was not split into sentences, or the documents hold no token.
        """
        check_has_sentences(
            getattr(corpus, "prefix", "the corpus"),
            getattr(corpus, "metadata", None),
            sequences=len(corpus.sequence_lengths),
            documents=len(corpus.first_sequences) - 1,
        )
        super().__init__(corpus, documents, seq_length, seed)
        # The packs of an epoch start where those of the previous one end, so epochs are computed in
        # order. Index e: the number of packs before epoch e, and the tokens of epoch e that an
        # earlier epoch's last pack reads.
        self._first_samples = [0]
        self._consumed = [0]
        self._pack_starts = lru_cache(maxsize=2)(self._compute_pack_starts)

    def epoch_of_sample(self, sample: int) -> int:
        """Return the 0-based epoch in which the pack of the 0-based `sample` starts.

        Raises:
            IndexError: `sample` is negative.
        """
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        while self._first_samples[-1] <= sample:
            self._append_epoch()
        return bisect_right(self._first_samples, sample) - 1

    def first_sample_of_epoch(self, epoch: int) -> int:
        """Return the index of the first sample whose pack starts in or after `epoch`."""
        while len(self._first_samples) <= epoch:
            self._append_epoch()
        return self._first_samples[epoch]

    def start_of_pack(self, pack: int) -> int:
        """Return the position, in tokens of the endless stream, at which a pack begins.

        `pack` is its 0-based index in the stream, over all epochs.
        """
        epoch = self.epoch_of_sample(pack)
        start = self._pack_starts(epoch)[pack - self._first_samples[epoch]]
        return epoch * self.tokens_per_epoch + int(start)

    def packs_of_epochs(self, epochs: int) -> int:
        """Return `epochs` times the packs of the first epoch.

        It is an estimate; for the exact number all epochs would be shuffled.
        """
        return epochs * self.first_sample_of_epoch(1)

    @property
    def dropped(self) -> float:
        """Return the fraction (0 to 1) of the first epoch's tokens that is in no pack.

        These are the rests of cut sentences.
        """
        packs = self.first_sample_of_epoch(1)
        return 1 - packs * self.seq_length / self.start_of_pack(packs)

    def _append_epoch(self) -> None:
        """Compute the packs of the last known epoch, and what they read of the next."""
        epoch = len(self._first_samples) - 1
        starts = self._pack_starts(epoch)
        # End of the last pack; less than an epoch if only the rest of a sentence follows.
        end = int(starts[-1]) + self.seq_length if len(starts) else self._consumed[epoch]
        self._first_samples.append(self._first_samples[epoch] + len(starts))
        self._consumed.append(max(0, end - self.tokens_per_epoch))

    def _compute_pack_starts(self, epoch: int) -> np.ndarray:
        """Compute int64[packs], the first tokens of the packs of `epoch`.

        They are counted from the start of the epoch.
        """
        sentences = self._compute_sentence_starts(epoch)
        # For each sentence, the first one after a pack that starts there.
        next_sentences = np.searchsorted(sentences, sentences + self.seq_length)
        # Indexing a memoryview is several times faster than indexing an array.
        next_pack = memoryview(next_sentences)
        sentence = int(np.searchsorted(sentences, self._consumed[epoch]))
        pack_sentences = array("q")
        while sentence < len(sentences):
            pack_sentences.append(sentence)
            sentence = next_pack[sentence]
        return (
            sentences[np.frombuffer(pack_sentences, np.int64)] if pack_sentences else sentences[:0]
        )

    def _compute_sentence_starts(self, epoch: int) -> np.ndarray:
        """Compute int64[sentences], the first tokens of the sentences of `epoch`.

        They are counted from the start of the epoch.
        """
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
