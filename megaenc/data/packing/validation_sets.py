"""Named corpora to validate on, the same in all phases of a run.

They do not change if phases change data or pack length.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megaenc.data.indexed.corpus import Corpus, parse_split
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.block_stream import DocumentBlocks
from megaenc.data.packing.builder import has_tokens, index_path, open_corpora, split_corpus
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError

FLAG = "--valid-data-path"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_valid_data_path(words: Sequence[str]) -> dict[str, str]:
    """Return the prefix of each corpus in --valid-data-path `NAME=PREFIX`, by name.

    The order is that of `words`, the values of the flag, each split at its first `=`. No corpus is
    looked for.

    Raises:
        InputError: A word has no `=`, a name or prefix is empty, or a name is given twice, has
            other characters than ASCII letters, digits, `_`, `-` and `.`, or does not begin with a
            letter or digit.
    """
    prefixes: dict[str, str] = {}
    for word in words:
        name, _, prefix = word.partition("=")
        if not prefix or not _NAME.fullmatch(name):
            expected = "NAME=PREFIX with a name of letters, digits, `_`, `-` and `.`"
            raise InputError(
                f"{FLAG}: found {word!r}, expected {expected}, such as web=data/web_text_document"
            )
        if name in prefixes:
            raise InputError(
                f"{FLAG}: found the name {name} twice, expected another name for {prefix}"
            )
        prefixes[name] = prefix
    return prefixes


class UnshuffledPackedDataset(ConcatPackedDataset):
    """ConcatPackedDataset whose packs are in the order of its token stream.

    Documents are shuffled, packs are not: whatever their length, the first packs hold the beginning
    of the same stream.
    """

    def _compute_pack_order(self, epoch: int) -> range:
        """Return the packs of `epoch` as they are cut."""
        return range(self.first_sample_of_epoch(epoch + 1) - self.first_sample_of_epoch(epoch))


@dataclass(frozen=True)
class ValidationSet:
    """Corpus called `name` to validate on, as `ValidationSet.open` returns it.

    `documents`, int64[D] indices or DocumentBlocks (see `split_corpus`), are the documents of
    `corpus` that are read: only the held-out ones if the run trains on the corpus, else all. They
    are the validation part of `split`, "0,1,0" if `is_whole_corpus`. `special_tokens` are those
    around each document.
    """

    name: str
    corpus: Corpus
    special_tokens: SpecialTokens
    documents: np.ndarray | DocumentBlocks
    split: str
    """Split whose validation part `documents` are; `0,1,0` for all of the corpus."""
    is_whole_corpus: bool
    """True if `documents` are all of the corpus."""

    @classmethod
    def open(
        cls,
        name: str,
        prefix: str,
        vocabulary: Vocabulary,
        *,
        split: str,
        order: str,
        train_fingerprints: Collection[str],
        opened: dict[str, Corpus],
    ) -> "ValidationSet":
        """Open the corpus at `prefix` (path without extension) of --valid-data-path.

        Args:
            vocabulary: The run's, which the corpus must fit.
            split: --split, such as `99,1,0`, which decides on the held-out documents of a corpus
                in `train_fingerprints`.
            order: "documents" or "blocks", see `split_corpus`.
            train_fingerprints: `Corpus.fingerprint` of the corpora that the run trains on.
            opened: Corpora by `index_path`: one that is there is reused, another is added.

        Raises:
            InputError: The corpus cannot be used, or `split` holds none of its text out.
        """
        open_corpora([prefix], vocabulary, opened)
        corpus = opened[index_path(prefix)]
        is_whole_corpus = corpus.fingerprint not in train_fingerprints
        if is_whole_corpus:
            split = "0,1,0"
        _, documents, _ = split_corpus(corpus, parse_split(split), order)
        if not has_tokens(corpus, documents):
            raise InputError(
                f"{FLAG} {name}={prefix}: the run trains on it, and --split {split} leaves no text "
                "of it for validation; "
                "expected another --split, or a corpus that the run does not train on"
            )
        return cls(
            name,
            corpus,
            corpus.find_special_tokens(vocabulary.eos_id),
            documents,
            split,
            is_whole_corpus,
        )

    def describe(self) -> str:
        """Return the set's name and text for the console.

        An example is `web (held-out documents of data/web_text_document)`; a set of all documents
        has `all` instead of `held-out`.
        """
        part = "all" if self.is_whole_corpus else "held-out"
        return f"{self.name} ({part} documents of {self.corpus.prefix})"

    @property
    def identity(self) -> list[str]:
        """Return [`Corpus.fingerprint`, split], which together determine the text.

        The split is that of --split, or `0,1,0` if all documents are read.
        """
        return [self.corpus.fingerprint, self.split]

    def pack(self, seq_length: int) -> BlendedDataset:
        """Return the set's text in packs of `seq_length` tokens, always in the same order.

        Documents are shuffled, packs are not. The packs are endless; `samples_before_repeat` of
        them start in the first pass over the text.
        """
        packs = UnshuffledPackedDataset(self.corpus, self.documents, seq_length, 0)
        return BlendedDataset([packs], [Fraction(1)], sources=[self.corpus.prefix])
