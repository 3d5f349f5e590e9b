"""Packs that each start at a sentence, from a corpus whose documents were cut into sentences."""

from array import array
from bisect import bisect_right
from functools import lru_cache

import numpy as np

from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.metadata import CorpusMetadata
from megaenc.data.packing.packed_dataset import CorpusPackedDataset
from megaenc.errors import InputError


def check_has_sentences(prefix: str, sidecar: CorpusMetadata | None, *, sequences: int, documents: int) -> None:
    """InputError where every document of the corpus is one sequence.

    A corpus of one sentence a document looks like one of whole documents: its sidecar tells.
    """
    if not (sidecar and sidecar.sentences) and sequences == documents:
        raise InputError(
            f"--packing sentences: {prefix} holds whole documents, expected one that was preprocessed with --split-sentences"
        )


class SentencePackedDataset(CorpusPackedDataset):
    """Every pack starts at a sentence. What the pack's end leaves of a sentence is dropped, and the next pack starts after it.

    Within a pack attention ends where a document ends, not where a sentence does. A sentence longer than a pack fills one.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, seq_length: int, seed: int):
        """See CorpusPacks. Raises InputError when every document of the corpus is one sequence."""
        check_has_sentences(
            getattr(corpus, "prefix", "the corpus"),
            getattr(corpus, "sidecar", None),
            sequences=len(corpus.sequence_lengths),
            documents=len(corpus.document_lengths),
        )
        super().__init__(corpus, documents, seq_length, seed)
        # Where an epoch's packs begin follows from where those of the one before ended, so they are walked in order:
        # [e] is the number of packs before epoch e, and the tokens of it that a pack of an earlier epoch has read.
        self._first_samples, self._taken = [0], [0]
        self._starts = lru_cache(maxsize=2)(self._shared_starts)

    def epoch_of_sample(self, sample: int) -> int:
        if sample < 0:
            raise IndexError(f"samples are numbered from 0, found {sample}")
        while self._first_samples[-1] <= sample:
            self._walk(len(self._first_samples) - 1)
        return bisect_right(self._first_samples, sample) - 1

    def first_sample_of_epoch(self, epoch: int) -> int:
        while len(self._first_samples) <= epoch:
            self._walk(len(self._first_samples) - 1)
        return self._first_samples[epoch]

    def start_of_pack(self, pack: int) -> int:
        epoch = self.epoch_of_sample(pack)
        return epoch * self.tokens_per_epoch + int(self._starts(epoch)[pack - self._first_samples[epoch]])

    @property
    def dropped(self) -> float:
        """The share of the first epoch's tokens that is in no pack: the rest of the sentences in which packs end."""
        packs = self.first_sample_of_epoch(1)
        return 1 - packs * self.seq_length / self.start_of_pack(packs)

    def _walk(self, epoch: int) -> None:
        """Learn how many packs start in `epoch`, the last known one, and how much of the next they read."""
        starts = self._starts(epoch)
        # Where the packs so far end, from the start of the next epoch: negative where only the rest of a sentence is left.
        end = int(starts[-1]) + self.seq_length if len(starts) else self._taken[epoch]
        self._first_samples.append(self._first_samples[epoch] + len(starts))
        self._taken.append(max(0, end - self.tokens_per_epoch))

    def _shared_starts(self, epoch: int) -> np.ndarray:
        what = ("sentences", self.seq_length, self._taken[epoch], epoch)
        return self.stream.shared(what, lambda: (self._make_starts(epoch),))[0]

    def _make_starts(self, epoch: int) -> np.ndarray:
        """int64[packs]: where the packs that start in `epoch` do, in tokens from the epoch's start."""
        sentences = self._sentence_starts(epoch)
        following = np.searchsorted(sentences, sentences + self.seq_length)  # the first sentence a pack from here leaves whole
        step = memoryview(following)  # whose elements are Python's numbers, several times quicker than NumPy's
        place, places = int(np.searchsorted(sentences, self._taken[epoch])), array("q")
        while place < len(sentences):
            places.append(place)
            place = step[place]
        return sentences[np.frombuffer(places, np.int64)] if places else sentences[:0]

    def _sentence_starts(self, epoch: int) -> np.ndarray:
        """int64[sentences]: where the sentences lie in `epoch`, in tokens from its start."""
        order, _ = self.stream.epoch_order(epoch)
        documents = self.stream.documents[order]
        corpus = self.stream.corpus
        firsts, counts = corpus.first_sequences[documents], np.diff(corpus.first_sequences)[documents]
        del documents  # here and below: of a hundred million sentences each array is nearly a gigabyte
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
