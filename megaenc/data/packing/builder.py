"""Corpora of a run, split into training and held-out documents, and their packs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.block_stream import (
    MOST_SHUFFLED,
    BlockStream,
    DocumentBlocks,
    choose_block_size,
)
from megaenc.data.packing.data_path import (
    describe_blend,
    find_corpora,
    is_tempered_blend,
    list_prefixes,
    weigh_corpora,
)
from megaenc.data.packing.packed_dataset import (
    ConcatPackedDataset,
    CorpusPackedDataset,
    RandomLengthPackedDataset,
)
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.machine import allow_open_files

_DOCUMENTS_PER_CHECK = 1 << 20  # the first chunk is usually enough
_FILES_PER_CORPUS = 4  # mappings of the .bin and of three arrays in the .idx

PACKINGS: dict[str, type[CorpusPackedDataset]] = {
    "concat": ConcatPackedDataset,
    "random-length": RandomLengthPackedDataset,
    "sentences": SentencePackedDataset,
}


@dataclass(frozen=True)
class CorpusUsage:
    """Use of one corpus by a part of a run, by `RunData.corpus_usage`.

    It has the corpus's `prefix`, the fraction of the blend's packs that the weights give to it
    (`share`), the number of `packs` and passes (`epochs`, such as 1.25) in this part of the run,
    the fraction of its tokens that the packing leaves out (`dropped`), and the training `tokens` of
    one pass.
    """

    prefix: str
    share: float
    """Fraction of the blend's packs that the weights give to the corpus."""
    packs: int
    """Number of packs of the corpus in this part of the run."""
    epochs: float
    """Number of passes over the corpus in this part of the run."""
    dropped: float
    """Fraction of the corpus's tokens that the packing leaves out."""
    tokens: int
    """Training tokens of the whole corpus, the length of one pass."""


@dataclass(frozen=True)
class RunData:
    """Corpora of a run, with their training and held-out packs; see `RunData.open`.

    `corpora`, `train_datasets` and `fractions` (of the packs of the run; they add up to 1)
    correspond. `train` blends all `train_datasets`, even a single one, and `held_out` the packs of
    the validation documents; it is None if no document is held out. `special_tokens` are those
    around each document of all corpora. A corpus leaves the blend after `max_epochs` passes, None
    for never. Each rank opens all of it.
    """

    corpora: tuple[Corpus, ...]
    train_datasets: tuple[CorpusPackedDataset, ...]
    fractions: tuple[Fraction, ...]
    train: BlendedDataset
    held_out: BlendedDataset | None
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    """Special tokens around each document of all corpora."""
    max_epochs: int | None = None
    """Passes over a corpus after which it leaves the blend."""

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
        temperature: float = 1.0,
        max_epochs: int | None = None,
        opened: dict[str, Corpus] | None = None,
    ) -> "RunData":
        """Open the corpora of --data-path and blend their packs; InputError if unusable.

        Held-out packs are always `concat` and in one order, whatever `packing` and `seed` are.

        Args:
            data_path: Prefixes or patterns, each after a weight; without weights all share one.
            split: Weights of training, validation and test documents, as in `parse_split`.
            packing: How training packs are cut: concat, random-length or sentences.
            order: "documents" or "blocks", see `split_corpus`.
            temperature: Exponent of the sizes of corpora that share a weight.
            max_epochs: Passes over a corpus after which it leaves the blend; None: it never does.
            opened: Corpora by `index_path`, reused and extended, so that phases share them.
        """
        sources = find_corpora(data_path)
        prefixes = list_prefixes(sources)
        fractions = parse_split(split)
        dataset_class = PACKINGS[packing]
        opened = {} if opened is None else opened
        open_corpora(prefixes, vocabulary, opened)
        corpora: dict[str, Corpus] = {}
        train_datasets = []
        held_out_datasets = {}
        for prefix in prefixes:
            corpus = opened[index_path(prefix)]
            if corpus.fingerprint in corpora:
                raise InputError(
                    f"--data-path: {prefix} has the same text as "
                    f"{corpora[corpus.fingerprint].prefix}, expected each corpus "
                    "once; give it a greater weight to read it more often"
                )
            corpora[corpus.fingerprint] = corpus
            special_tokens = corpus.find_special_tokens(vocabulary.eos_id)
            if len(corpora) == 1:
                first_special_tokens = special_tokens
            check_same_special_tokens(prefixes[0], first_special_tokens, prefix, special_tokens)
            train, held_out, _ = split_corpus(corpus, fractions, order)
            if not has_tokens(corpus, train):
                raise InputError(
                    f"--split {split}: leaves no text to train on, of {len(corpus)} documents in "
                    f"{prefix}"
                )
            train_datasets.append(dataset_class(corpus, train, seq_length, seed))
            if has_tokens(corpus, held_out):
                held_out_datasets[len(corpora) - 1] = ConcatPackedDataset(
                    corpus, held_out, seq_length, 0
                )
        weights = weigh_corpora(
            sources, [part.tokens_per_epoch for part in train_datasets], temperature
        )
        total = sum(weights)
        words = [source.word for source in sources for _ in source.prefixes]
        is_tempered = is_tempered_blend(sources, temperature)
        limits = None
        if max_epochs is not None:
            limits = [part.packs_of_epochs(max_epochs) for part in train_datasets]
        held_out_blend = None
        if held_out_datasets:
            held_out_parts = list(held_out_datasets.values())
            held_out_limits = None
            if is_tempered:
                # A small corpus with a large share leaves; the others end at about one time.
                held_out_limits = [part.samples_before_repeat for part in held_out_parts]
            held_out_blend = BlendedDataset(
                held_out_parts,
                [weights[index] for index in held_out_datasets],
                limits=held_out_limits,
                is_tempered=is_tempered,
                sources=[words[index] for index in held_out_datasets],
            )
        return cls(
            tuple(corpora.values()),
            tuple(train_datasets),
            tuple(weight / total for weight in weights),
            BlendedDataset(
                train_datasets, weights, limits=limits, is_tempered=is_tempered, sources=words
            ),
            held_out_blend,
            first_special_tokens,
            max_epochs,
        )

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for the same corpora, fractions and their order.

        See `describe_blend`. Split, seed, packing and pack length are not part of it.
        """
        return self._describe(self.train.is_periodic, self.max_epochs)

    @property
    def held_out_fingerprint(self) -> str:
        """Return a text that is equal for the same blend of corpora with held-out packs.

        Split and pack length, which decide on these packs too, are not part of it;
        --blend-max-epochs does not matter to it. Without held-out packs it is the text of a
        periodic blend.
        """
        return self._describe(self.held_out is None or self.held_out.is_periodic, None)

    def _describe(self, is_periodic: bool, max_epochs: int | None) -> str:
        fingerprints = [corpus.fingerprint for corpus in self.corpora]
        return describe_blend(
            self.fractions, fingerprints, is_periodic=is_periodic, max_epochs=max_epochs
        )

    @property
    def has_blocks(self) -> bool:
        """Return whether a corpus is so large that it is shuffled by blocks of documents."""
        return any(isinstance(part.stream, BlockStream) for part in self.train_datasets)

    def corpus_usage(
        self, end: int, first: int = 0, without: Sequence[tuple[int, int]] = ()
    ) -> list[CorpusUsage]:
        """Return the use of each corpus, in order, by training samples first..end-1.

        Args:
            end: 0-based sample of the run after the last one.
            first: 0-based first sample of the run.
            without: Ranges of samples to leave out, (first, last) each, both included; they must
                lie in first..end-1 and not overlap.
        """
        spans = [(first, end, 1), *((start, last + 1, -1) for start, last in without)]
        packs = [0] * len(self.corpora)
        epochs = [0.0] * len(self.corpora)
        for start, stop, sign in spans:
            counts = zip(self.train.next_packs(start), self.train.next_packs(stop), strict=True)
            for index, (before, after) in enumerate(counts):
                part = self.train_datasets[index]
                packs[index] += sign * (after - before)
                epochs[index] += sign * (part.epochs_after(after) - part.epochs_after(before))
        return [
            CorpusUsage(
                corpus.prefix,
                float(share),
                corpus_packs,
                corpus_epochs,
                part.dropped,
                part.tokens_per_epoch,
            )
            for corpus, part, share, corpus_packs, corpus_epochs in zip(
                self.corpora, self.train_datasets, self.fractions, packs, epochs, strict=True
            )
        ]


def open_corpora(
    prefixes: Sequence[str], vocabulary: Vocabulary, opened: dict[str, Corpus]
) -> None:
    """Open those of `prefixes` that are not in `opened` yet, and add them to it.

    Args:
        prefixes: Paths of corpora without extension.
        vocabulary: Vocabulary that the new ones are checked with; those in `opened` are not.
        opened: Corpora by their `index_path`; changed in place.

    Raises:
        InputError: A corpus cannot be opened or does not fit `vocabulary`, or there are more
            corpora than the process may open files of.
    """
    paths = {index_path(prefix): prefix for prefix in prefixes}
    new = {path: prefix for path, prefix in paths.items() if path not in opened}
    allow_open_files(_FILES_PER_CORPUS * len(new), f"{len(prefixes):,} corpora")
    for path, prefix in new.items():
        opened[path] = Corpus.open(prefix)
        opened[path].check_vocabulary(vocabulary)


def index_path(prefix: str) -> str:
    """Return the path of the .idx of `prefix`, absolute and without symbolic links."""
    return os.path.realpath(f"{prefix}.idx")


def check_same_special_tokens(
    first_prefix: str,
    first_tokens: SpecialTokens,
    second_prefix: str,
    second_tokens: SpecialTokens,
    flag: str = "--data-path",
) -> None:
    """Raise InputError unless two corpora have the same special tokens.

    Only the tokens are compared, not the modes that chose them.

    Args:
        first_prefix: Prefix of the corpus with `first_tokens`, for the error.
        second_prefix: Prefix of the corpus with `second_tokens`.
        flag: Flag that names the second corpus.
    """
    if first_tokens.is_same(second_tokens):
        return
    texts = [
        f"{prefix} has --special-tokens {tokens.mode} (before {list(tokens.before)}, after "
        f"{list(tokens.after)})"
        for prefix, tokens in ((first_prefix, first_tokens), (second_prefix, second_tokens))
    ]
    raise InputError(f"{flag}: {texts[0]}, {texts[1]}; expected one mode for all corpora of a run")


def chain_data(parts: Sequence[tuple[int, RunData]]) -> list[RunData]:
    """Return the data of consecutive parts of a run, each continued by the next.

    A corpus continues with the pack after the last one that earlier parts read of it, if these cut
    it in the same way.

    Args:
        parts: (0-based first sample, data) of each part (phase) in order; it ends where the next
            begins. Their data are as RunData.open returns them, and not changed.

    Returns:
        Copies of the data, whose `train` has the samples of the run from the part's first one on.
    """
    next_packs: dict[tuple[str, int, type], int] = {}  # the next pack of each corpus
    chained = []
    for (first, data), (end, _) in pairwise([*parts, (None, None)]):
        keys = [
            (corpus.fingerprint, part.seq_length, type(part))
            for corpus, part in zip(data.corpora, data.train_datasets, strict=True)
        ]
        train = data.train.continue_from(first, [next_packs.get(key, 0) for key in keys])
        chained.append(replace(data, train=train))
        if end is not None:
            next_packs |= dict(zip(keys, train.next_packs(end), strict=True))
    return chained


def split_corpus(
    corpus: Corpus, fractions: tuple[Fraction, Fraction, Fraction], order: str = "documents"
) -> (
    tuple[np.ndarray, np.ndarray, np.ndarray]
    | tuple[DocumentBlocks, DocumentBlocks, DocumentBlocks]
):
    """Return a corpus's training, validation and test documents by weight.

    They are ascending int64 document indices or, with `order` "blocks" for a corpus of more than
    1,048,576 documents, blocks of documents; `corpus.expect_random_reads` is then called. A part
    may be empty (weight 0, or too few documents). The choice is random but always the same, see
    `split_documents`.

    Args:
        fractions: Weights of the three parts, in any unit.
        order: "documents" or "blocks".
    """
    if order == "blocks" and len(corpus) > MOST_SHUFFLED:
        corpus.expect_random_reads()
        size = choose_block_size(len(corpus))
        parts = split_documents(-(-len(corpus) // size), fractions)
        return tuple(DocumentBlocks(size, blocks) for blocks in parts)
    return split_documents(len(corpus), fractions)


def has_tokens(corpus: Corpus, documents: np.ndarray | DocumentBlocks) -> bool:
    """Return whether any of `documents`, int64[D] indices or blocks, holds a token."""
    if isinstance(documents, DocumentBlocks):
        return bool(np.diff(corpus.block_offsets(documents.size))[documents.indices].any())
    chunks = (
        documents[start : start + _DOCUMENTS_PER_CHECK]
        for start in range(0, len(documents), _DOCUMENTS_PER_CHECK)
    )
    return any(corpus.document_lengths[chunk].any() for chunk in chunks)
