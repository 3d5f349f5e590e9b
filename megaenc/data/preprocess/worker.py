"""Tokenization of one block of documents by a preprocessing worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaenc.data.preprocess.deduplicate import Deduplication
from megaenc.data.preprocess.sentence_splitter import PunktModel, build_sentence_splitter
from megaenc.data.sources.text_files import TextBlock
from megaenc.data.tokenizer.fast_encode import FastEncoder, replace_surrogates
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.errors import InputError


@dataclass(frozen=True)
class TokenizedBlock:
    """Tokens of the documents of a block, by JSON key, with counts and position.

    BlockTokenizer returns it. The lists `tokens` (of BlockTokenizer's `dtype`), `lengths` (int32,
    of sequences), `counts` (int32, of sequences in each document) and `band_keys` (uint64) have one
    array for each key, in the order of `BlockTokenizer.keys`; `band_keys` is empty without
    deduplication. Documents without tokens are left out of the arrays, separately for each key, but
    are included in the number `documents`. `skipped` is the number of bad documents, `size` the
    decompressed bytes parsed, and `position` that of the TextBlock.
    """

    tokens: list[np.ndarray]
    """dtype[tokens] per key, the documents concatenated, special tokens included."""
    lengths: list[np.ndarray]
    """int32[sequences] per key, length of each document or, with sentence splitting, of each
    sentence."""
    counts: list[np.ndarray]
    """int32[documents] per key, number of sequences with tokens of each document."""
    band_keys: list[np.ndarray]
    """uint64[bands, words, documents] per key, see `deduplicate`; no list entry without
    deduplication."""
    documents: int
    """Number of documents that could be parsed, those without tokens included."""
    skipped: int
    """Number of bad documents left out."""
    size: int
    """Number of decompressed bytes parsed."""
    position: int
    """Position of the block in the input; see `TextBlock.position`."""


@dataclass(frozen=True)
class TokenIds:
    """Encoder of documents that are token ids, below `vocab_size`, already.

    It takes the place of FastEncoder. `special_tokens` that a document has are removed, as
    BlockTokenizer adds them.
    """

    vocab_size: int
    special_tokens: SpecialTokens
    is_fast = False
    """Nothing is encoded by gigatoken, see `FastEncoder.is_fast`."""

    def convert(self, document: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | InputError:
        """Return a document as uint32 without special tokens, or the error of a wrong id.

        `document` has one array of integers, which must be from 0 to `vocab_size` - 1.
        """
        (tokens,) = document
        wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(wrong):
            return InputError(
                f"found token id {wrong[0]}, expected 0 to {self.vocab_size - 1} of --tokenizer"
            )
        return (self.special_tokens.strip(tokens).astype(np.uint32),)

    def encode_concatenated(self, documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all documents concatenated, and the token count of each one.

        Returns:
            uint32[tokens] and int64[documents].
        """
        lengths = np.array([len(document) for document in documents], np.int64)
        return np.concatenate([np.empty(0, np.uint32), *documents]), lengths


@dataclass(frozen=True)
class BlockTokenizer:
    """Callable that turns a TextBlock into a TokenizedBlock; picklable for workers.

    It parses the texts under `keys`, splits them into sentences by `punkt` (None: not), encodes
    them by `encoder`, a FastEncoder (TokenIds for ids instead of texts), and adds `special_tokens`
    to each document; token arrays have `dtype`. With `deduplication` (None: without) it also
    computes the band keys of each document. With `skip_bad` a bad document is counted, not an
    error.
    """

    encoder: FastEncoder | TokenIds
    keys: tuple[str, ...]
    special_tokens: SpecialTokens
    dtype: str
    skip_bad: bool
    punkt: PunktModel | None
    deduplication: Deduplication | None = None

    def __call__(self, block: TextBlock) -> TokenizedBlock:
        """Parse and tokenize a block.

        Raises:
            InputError: A document is bad, unless `skip_bad`, or a file cannot be read.
        """
        convert = self.encoder.convert if isinstance(self.encoder, TokenIds) else None
        documents = block.parse(self.keys, self.skip_bad, convert)
        columns = [
            self._tokenize_column([texts[column] for texts in documents.texts])
            for column in range(len(self.keys))
        ]
        tokens, lengths, counts, band_keys = map(list, zip(*columns, strict=True))
        band_keys = [] if self.deduplication is None else band_keys
        return TokenizedBlock(
            tokens,
            lengths,
            counts,
            band_keys,
            len(documents.texts),
            documents.skipped,
            block.size,
            block.position,
        )

    @cached_property
    def _split_sentences(self) -> Callable[[str], list[str]]:
        return build_sentence_splitter(self.punkt)

    def _tokenize_column(
        self, texts: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokenize the texts of one key.

        Returns:
            The tokens, the length of each sequence, the number of sequences of each document, and
            their band keys (None without deduplication). Documents without tokens are left out.
        """
        if self.punkt is None:
            tokens, lengths = self.encoder.encode_concatenated(texts)
            sequence_counts = np.ones(len(texts), np.int64)
        else:
            sentences = [self._split_sentences(replace_surrogates(text)) for text in texts]
            tokens, lengths = self.encoder.encode_concatenated(
                [sentence for document in sentences for sentence in document]
            )
            sequence_counts = np.array([*map(len, sentences)], np.int64)
        owners = np.repeat(np.arange(len(texts)), sequence_counts)[lengths > 0]
        lengths = lengths[lengths > 0].astype(np.int32)
        counts = np.bincount(owners, minlength=len(texts)).astype(np.int32)
        band_keys = None
        if self.deduplication is not None:
            band_keys = self.deduplication(
                [text for text, count in zip(texts, counts.tolist(), strict=True) if count]
            )
        counts = counts[counts > 0]
        tokens = tokens.astype(self.dtype)
        if self.special_tokens.count and len(counts):
            tokens = self._add_special_tokens(tokens, lengths, counts)
        return tokens, lengths, counts, band_keys

    def _add_special_tokens(
        self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Return `tokens` with the special ones around each document.

        They belong to its first and last sequence, whose `lengths` grow in place.

        Args:
            counts: Number of sequences of each document.
        """
        before = self.special_tokens.before
        after = self.special_tokens.after
        ends = np.cumsum(lengths, dtype=np.int64)
        last = np.cumsum(counts) - 1
        first = last - counts + 1
        starts = ends[first] - lengths[first]
        places = np.stack([*[starts] * len(before), *[ends[last]] * len(after)], axis=1)
        values = np.tile([*before, *after], len(counts))
        lengths[first] += len(before)
        lengths[last] += len(after)
        return np.insert(tokens, places.ravel(), values)
