"""The data of a run: corpora split into documents to train on and documents held out, and the packs of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.packing.blended_dataset import BlendedDataset, parse_data_path
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, CorpusPackedDataset, RandomLengthPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.data.packing.shared_memory import share_arrays
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError

_DOCUMENTS_PER_CHECK = 1 << 20  # documents that are looked at together; the first of them answer, as a rule

PACKINGS: dict[str, type[CorpusPackedDataset]] = {
    "concat": ConcatPackedDataset,
    "random-length": RandomLengthPackedDataset,
    "sentences": SentencePackedDataset,
}


@dataclass(frozen=True)
class CorpusUsage:
    """What some stretch of a run reads of one corpus."""

    prefix: str
    share: float
    """Of the packs, as the weights say."""
    packs: int
    epochs: float
    """How often the corpus is gone through."""
    dropped: float
    """Share of the tokens that the way of packing leaves out."""


@dataclass(frozen=True)
class RunData:
    """`train` and `held_out` blend the corpora, one or more, by the same weights.

    `held_out` is None where the split leaves nothing for it. corpora, train_parts and shares (which add up to 1) go together.
    """

    corpora: tuple[Corpus, ...]
    train_datasets: tuple[CorpusPackedDataset, ...]
    shares: tuple[Fraction, ...]
    train: BlendedDataset
    held_out: BlendedDataset | None

    @classmethod
    def open(
        cls, data_path: Sequence[str], vocabulary: Vocabulary, *, split: str, packing: str, seq_length: int, seed: int
    ) -> "RunData":
        """Open `A`, `0.3 A 0.7 B` or `A B` (weighted by their tokens) and cut them into packs of `seq_length` tokens.

        Held-out packs are always `concat` in one order: runs that differ in packing or seed are measured on the same text.
        Raises InputError for a corpus that cannot be used.
        """
        pairs = parse_data_path(data_path)
        fractions, packs_of = parse_split(split), PACKINGS[packing]
        corpora, trains, tests = [], [], {}
        for _, prefix in pairs:
            corpus = Corpus.open(prefix)
            corpus.check_vocabulary(vocabulary)
            train, held_out, _ = split_corpus(corpus, fractions)
            if not _has_tokens(corpus, train):
                raise InputError(f"--split {split}: leaves no text to train on, of {len(corpus)} documents in {prefix}")
            corpora.append(corpus)
            trains.append(packs_of(corpus, train, seq_length, seed))
            if _has_tokens(corpus, held_out):
                tests[len(corpora) - 1] = ConcatPackedDataset(corpus, held_out, seq_length, 0)
        given = [weight for weight, _ in pairs]
        weights = [Fraction(part.tokens_per_epoch) for part in trains] if None in given else given
        return cls(
            tuple(corpora),
            tuple(trains),
            tuple(weight / sum(weights) for weight in weights),
            BlendedDataset(trains, weights),
            BlendedDataset(list(tests.values()), [weights[number] for number in tests]) if tests else None,
        )

    @property
    def fingerprint(self) -> str:
        """Equal for the same corpora in the same proportions, wherever they are."""
        if len(self.corpora) == 1:
            return self.corpora[0].fingerprint
        return ", ".join(f"{share} {corpus.fingerprint}" for share, corpus in zip(self.shares, self.corpora, strict=True))

    def corpus_usage(self, end: int, first: int = 0, without: Sequence[tuple[int, int]] = ()) -> list[CorpusUsage]:
        """What samples `first` to `end` - 1 read of each corpus, but for the ranges `without`, each its first and last sample."""
        spans = [(first, end, 1), *((start, last + 1, -1) for start, last in without)]
        rows = []
        for number, (corpus, part, share) in enumerate(zip(self.corpora, self.train_datasets, self.shares, strict=True)):
            packs, epochs = 0, 0.0
            for start, stop, sign in spans:
                before, after = (self.train.count_samples(number, samples) for samples in (start, stop))
                packs += sign * (after - before)
                epochs += sign * (part.epochs_after(after) - part.epochs_after(before))
            rows.append(CorpusUsage(corpus.prefix, float(share), packs, epochs, part.dropped))
        return rows


def split_corpus(corpus: Corpus, fractions: tuple[Fraction, Fraction, Fraction]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`split_documents` of a corpus, shared by the processes of a machine."""
    key = (*corpus.key, "split", [str(fraction) for fraction in fractions])
    train, held_out, test = share_arrays(key, partial(split_documents, len(corpus), fractions))
    return train, held_out, test


def _has_tokens(corpus: Corpus, documents: np.ndarray) -> bool:
    some = (documents[start : start + _DOCUMENTS_PER_CHECK] for start in range(0, len(documents), _DOCUMENTS_PER_CHECK))
    return any(corpus.document_lengths[numbers].any() for numbers in some)
