"""Corpora of a run, split into training and held-out documents, and the packs of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np

from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.packing.blended_dataset import BlendedDataset, parse_data_path
from megaenc.data.packing.block_stream import MOST_SHUFFLED, BlockStream, DocumentBlocks, choose_block_size
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, CorpusPackedDataset, RandomLengthPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.data.packing.shared_memory import share_arrays
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError

_DOCUMENTS_PER_CHECK = 1 << 20  # the first chunk is usually enough

PACKINGS: dict[str, type[CorpusPackedDataset]] = {
    "concat": ConcatPackedDataset,
    "random-length": RandomLengthPackedDataset,
    "sentences": SentencePackedDataset,
}


@dataclass(frozen=True)
class CorpusUsage:
    """Use of a corpus by part of a run: prefix, share of packs by weight, packs and epochs read, share of tokens dropped."""

    prefix: str
    share: float
    """Share of the packs, from the weights."""
    packs: int
    epochs: float
    """Number of passes over the corpus."""
    dropped: float
    """Share of the tokens that the packing leaves out."""


@dataclass(frozen=True)
class RunData:
    """Packs of a run, `train` and `held_out` (None if no document is), blended by `shares` from one or more `corpora`.

    corpora, train_datasets and shares (which add up to 1) correspond.
    """

    corpora: tuple[Corpus, ...]
    train_datasets: tuple[CorpusPackedDataset, ...]
    shares: tuple[Fraction, ...]
    train: BlendedDataset
    held_out: BlendedDataset | None
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    """Special tokens around each document of all corpora."""

    @classmethod
    def open(
        cls,
        data_path: Sequence[str],
        vocabulary: Vocabulary,
        *,
        split: str,
        packing: str,
        seq_length: int,
        seed: int,
        order: str = "documents",
    ) -> "RunData":
        """Open --data-path's corpora, weighted by tokens by default; cut training packs by `packing`, held-out by concat.

        Held-out packs are always `concat` and in one order, so that runs of different packing or seed are measured on the same
        text. `order`: see `split_corpus`. Raises InputError for a corpus that cannot be used.
        """
        pairs = parse_data_path(data_path)
        fractions, dataset_class = parse_split(split), PACKINGS[packing]
        corpora, special_tokens, train_datasets, held_out_datasets = [], [], [], {}
        for _, prefix in pairs:
            corpus = Corpus.open(prefix)
            corpus.check_vocabulary(vocabulary)
            for other in corpora:
                if other.fingerprint == corpus.fingerprint:
                    raise InputError(
                        f"--data-path: {prefix} has the same text as {other.prefix}, expected each corpus once; "
                        "give it a greater weight to read it more often"
                    )
            corpora.append(corpus)
            special_tokens.append(corpus.find_special_tokens(vocabulary.eos_id))
            check_same_special_tokens(corpora[0].prefix, special_tokens[0], prefix, special_tokens[-1])
            train, held_out, _ = split_corpus(corpus, fractions, order)
            if not has_tokens(corpus, train):
                raise InputError(f"--split {split}: leaves no text to train on, of {len(corpus)} documents in {prefix}")
            train_datasets.append(dataset_class(corpus, train, seq_length, seed))
            if has_tokens(corpus, held_out):
                held_out_datasets[len(corpora) - 1] = ConcatPackedDataset(corpus, held_out, seq_length, 0)
        explicit_weights = [weight for weight, _ in pairs]
        weights = [Fraction(part.tokens_per_epoch) for part in train_datasets] if None in explicit_weights else explicit_weights
        return cls(
            tuple(corpora),
            tuple(train_datasets),
            tuple(weight / sum(weights) for weight in weights),
            BlendedDataset(train_datasets, weights),
            BlendedDataset(list(held_out_datasets.values()), [weights[number] for number in held_out_datasets])
            if held_out_datasets
            else None,
            special_tokens[0],
        )

    @property
    def fingerprint(self) -> str:
        """Return the corpora's content hashes, with their shares if several, as a string; the same wherever stored."""
        if len(self.corpora) == 1:
            return self.corpora[0].fingerprint
        return ", ".join(f"{share} {corpus.fingerprint}" for share, corpus in zip(self.shares, self.corpora, strict=True))

    @property
    def has_blocks(self) -> bool:
        """Return whether a corpus is so large that it is shuffled by blocks of documents."""
        return any(isinstance(part.stream, BlockStream) for part in self.train_datasets)

    def corpus_usage(self, end: int, first: int = 0, without: Sequence[tuple[int, int]] = ()) -> list[CorpusUsage]:
        """Return each corpus's CorpusUsage by samples first..end-1 without the (first, last) sample ranges `without`."""
        spans = [(first, end, 1), *((start, last + 1, -1) for start, last in without)]
        rows = []
        for number, (corpus, part, share) in enumerate(zip(self.corpora, self.train_datasets, self.shares, strict=True)):
            packs, epochs = 0, 0.0
            for start, stop, sign in spans:
                before, after = (self.train.next_pack(number, sample) for sample in (start, stop))
                packs += sign * (after - before)
                epochs += sign * (part.epochs_after(after) - part.epochs_after(before))
            rows.append(CorpusUsage(corpus.prefix, float(share), packs, epochs, part.dropped))
        return rows


def check_same_special_tokens(
    first: str, special: SpecialTokens, second: str, other: SpecialTokens, flag: str = "--data-path"
) -> None:
    """Raise InputError unless two corpora have the same special tokens.

    `first` and `second` are their prefixes, and `flag` is that of the second.
    """
    if special.is_same(other):
        return
    texts = [
        f"{prefix} has --special-tokens {tokens.mode} (before {list(tokens.before)}, after {list(tokens.after)})"
        for prefix, tokens in ((first, special), (second, other))
    ]
    raise InputError(f"{flag}: {texts[0]}, {texts[1]}; expected one mode for all corpora of a run")


def chain_data(parts: Sequence[tuple[int, RunData]]) -> list[RunData]:
    """Return the data of `parts`, (first sample, data) in order, with training packs numbered from each first sample on.

    A corpus continues with the pack after the last one that earlier parts have of it, if these cut it in the same way.
    """
    numbers: dict[tuple[str, int, type], int] = {}  # the next pack of each corpus
    chained = []
    for (first, data), (end, _) in pairwise([*parts, (None, None)]):
        keys = [
            (corpus.fingerprint, part.seq_length, type(part))
            for corpus, part in zip(data.corpora, data.train_datasets, strict=True)
        ]
        train = data.train.starting_at(first, [numbers.get(key, 0) for key in keys])
        chained.append(replace(data, train=train))
        if end is not None:
            numbers |= {key: train.next_pack(number, end) for number, key in enumerate(keys)}
    return chained


def split_corpus(
    corpus: Corpus, fractions: tuple[Fraction, Fraction, Fraction], order: str = "documents"
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | tuple[DocumentBlocks, DocumentBlocks, DocumentBlocks]:
    """Return a corpus's (training, validation, test) documents by weight, computed once per machine and shared.

    They are document numbers or, with `order` "blocks" for a corpus of more than 1,048,576 documents, blocks of documents.
    """
    if order == "blocks" and len(corpus) > MOST_SHUFFLED:
        corpus.expect_random_reads()
        size = choose_block_size(len(corpus))
        train, held_out, test = (DocumentBlocks(size, numbers) for numbers in split_documents(-(-len(corpus) // size), fractions))
        return train, held_out, test
    key = (*corpus.key, "split", [str(fraction) for fraction in fractions])
    train, held_out, test = share_arrays(key, partial(split_documents, len(corpus), fractions))
    return train, held_out, test


def has_tokens(corpus: Corpus, documents: np.ndarray | DocumentBlocks) -> bool:
    """Return whether any of `documents` holds a token."""
    if isinstance(documents, DocumentBlocks):
        return bool(np.diff(corpus.block_offsets(documents.size))[documents.numbers].any())
    chunks = (documents[start : start + _DOCUMENTS_PER_CHECK] for start in range(0, len(documents), _DOCUMENTS_PER_CHECK))
    return any(corpus.document_lengths[numbers].any() for numbers in chunks)
