"""The work that preprocessing gives to its workers: from a block of documents to token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaenc.data.preprocess.sentence_splitter import PunktModel, build_sentence_splitter
from megaenc.data.sources.text_files import TextBlock
from megaenc.data.tokenizer.fast_encode import FastEncoder, replace_surrogates


@dataclass(frozen=True)
class TokenizedBlock:
    """The tokens of a block: for each key the documents laid end to end; those without a token are left out."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    """int32[sequences] for each key: a sequence is a document or one of its sentences."""
    counts: list[np.ndarray]
    """int32[documents] for each key: the sequences of each document."""
    documents: int
    skipped: int
    size: int
    """Bytes that were parsed."""
    position: int
    """Of the block."""


@dataclass(frozen=True)
class BlockTokenizer:
    """Parse a block, cut its documents into sentences where a `punkt` is given, encode them, append the end of document."""

    encoder: FastEncoder
    keys: tuple[str, ...]
    eod: int | None
    dtype: str
    skip_bad: bool
    punkt: PunktModel | None

    def __call__(self, block: TextBlock) -> TokenizedBlock:
        documents = block.documents(self.keys, self.skip_bad)
        columns = [self._column([texts[at] for texts in documents.texts]) for at in range(len(self.keys))]
        tokens, lengths, counts = map(list, zip(*columns, strict=True))
        return TokenizedBlock(tokens, lengths, counts, len(documents.texts), documents.skipped, block.size, block.position)

    @cached_property
    def _sentences(self) -> Callable[[str], list[str]]:
        return build_sentence_splitter(self.punkt)

    def _column(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, length of each sequence, sequences of each document)."""
        if self.punkt is None:
            tokens, lengths = self.encoder.encode_concatenated(texts)
            pieces = np.ones(len(texts), np.int64)
        else:
            cut = [self._sentences(replace_surrogates(text)) for text in texts]
            tokens, lengths = self.encoder.encode_concatenated([piece for document in cut for piece in document])
            pieces = np.array([*map(len, cut)], np.int64)
        owners = np.repeat(np.arange(len(texts)), pieces)[lengths > 0]
        lengths = lengths[lengths > 0].astype(np.int32)
        counts = np.bincount(owners, minlength=len(texts)).astype(np.int32)
        counts = counts[counts > 0]
        tokens = tokens.astype(self.dtype)
        if self.eod is not None and len(counts):
            last = np.cumsum(counts) - 1  # the end of a document belongs to its last sequence
            tokens = np.insert(tokens, np.cumsum(lengths, dtype=np.int64)[last], self.eod)
            lengths[last] += 1
        return tokens, lengths, counts
