"""A tokenized corpus on disk: PREFIX.bin, PREFIX.idx and metadata, PREFIX.json."""

import contextlib
import glob
import hashlib
import mmap
import os
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megaenc import counter_rng
from megaenc.data.indexed.indexed_dataset import (
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    VERSION,
    IndexArrays,
    read_entries,
)
from megaenc.data.indexed.metadata import CorpusMetadata, metadata_path, read_corpus_metadata
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, LocalInputError

# Tokens read by `check_vocabulary`: milliseconds, and enough to detect a wrong tokenizer.
_CHECKED_TOKENS = 1 << 22
# An .idx with more sequences or documents is checked only where it is read.
_CHECKED_SEQUENCES = 1 << 24
_DOCUMENTS_PER_SEARCH = 1 << 16
_MAX_SLICED_DOCUMENTS = 16  # up to here slices are faster than one index per token


class Corpus:
    """Memory-mapped tokenized corpus on disk, of D documents in S sequences.

    Build it only by `Corpus.open`; `len` is D. Documents and sequences have 0-based indices.
    `tokens` and `read_spans` read parts of documents; call `check_vocabulary` before.
    `prefix` is the path without extension, a str, and `metadata` the content of PREFIX.json, None
    for a corpus written by Megatron's own tool. `document_lengths`, int64[D], and
    `sequence_lengths`, int32[S], are in tokens, zeros allowed. `first_sequences` is int64[D + 1]:
    document d holds the sequences first_sequences[d] to first_sequences[d + 1] - 1.
    """

    def __init__(
        self,
        prefix: str,
        index: IndexArrays,
        token_type: type[np.number],
        metadata: CorpusMetadata | None,
    ):
        """Build a corpus from its metadata and its index, whose ends must be checked."""
        self.prefix = prefix
        self.metadata = metadata
        self._index = index
        self.first_sequences = np.asarray(index.documents)  # memory-mapped, as are the lengths
        self.sequence_lengths = np.asarray(index.lengths)
        self._pointers = np.asarray(index.pointers)
        # Memory-mapped, so that all ranks of a machine share one copy.
        self._token_map = np.memmap(f"{prefix}.bin", dtype=token_type, mode="r")
        self._tokens = np.asarray(self._token_map)
        self._id_limit: int | None = None

    @cached_property
    def _document_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets and lengths of all documents in the .bin, in tokens.

        Returns:
            int64[D + 1] offsets and int64[D] lengths.

        Raises:
            InputError: An index that was too large to check is damaged.
        """
        if not _is_checked_at_once(self._index):
            check_index_arrays(self.prefix, self._index, self._tokens.dtype.type)
        ends = np.zeros(len(self.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, out=ends[1:])
        starts = ends[self.first_sequences]
        return starts, np.diff(starts)

    @property
    def document_lengths(self) -> np.ndarray:
        """Return int64[D], the tokens of each document, special tokens included.

        The first call reads the whole index, and keeps 16 bytes a document in memory.

        Raises:
            InputError: An index that was too large for `open` to check is damaged.
        """
        return self._document_bounds[1]

    def document_offsets(self, documents: np.ndarray) -> np.ndarray:
        """Return the offsets of documents in the .bin, in tokens, as int64 of their shape.

        Only these entries of the index are read.

        Args:
            documents: One or more indices from 0 to D (the end), of any shape, which must not fall
                along the last axis.

        Raises:
            LocalInputError: The offsets decrease along the last axis or leave the .bin.
        """
        sequences = self.first_sequences[documents]
        return self._check_offsets(
            sequences, lambda inside: self._pointers[inside], LocalInputError
        )

    def block_offsets(self, size: int) -> np.ndarray:
        """Return the offset in the .bin of each block of `size` documents, then the end.

        Only the index entries of the blocks' first documents are read.

        Returns:
            int64[blocks + 1], in tokens. The last block may have fewer documents.

        Raises:
            InputError: The offsets decrease or leave the .bin.
        """
        path = f"{self.prefix}.idx"
        index = self._index
        sequences = np.append(
            read_entries(path, index.documents, np.arange(0, len(self), size)), self.sequences
        )
        return self._check_offsets(
            sequences, lambda inside: read_entries(path, index.pointers, inside), InputError
        )

    def _check_offsets(
        self,
        sequences: np.ndarray,
        read_pointers: Callable[[np.ndarray], np.ndarray],
        error: type[InputError],
    ) -> np.ndarray:
        """Return the offsets of `sequences` in the .bin, in tokens, as int64.

        Args:
            sequences: Numbers from 0 to S (the end).
            read_pointers: Function that reads the byte pointers of sequences.
            error: Type of the error to raise if offsets decrease in the last axis.
        """
        count = self.sequences
        offsets = read_pointers(np.clip(sequences, 0, count - 1)) // self._tokens.itemsize
        offsets[sequences == count] = len(self._tokens)
        is_within = (
            sequences.min() >= 0
            and sequences.max() <= count
            and offsets.min() >= 0
            and offsets.max() <= len(self._tokens)
        )
        if not is_within or np.diff(offsets).min(initial=0) < 0:
            raise error(
                f"{self.prefix}.idx: found documents that do not lie end to end in .bin; "
                "the file is damaged, "
                "check it with `megaenc data verify`"
            )
        return offsets

    @classmethod
    def open(cls, prefix: str | Path) -> "Corpus":
        """Open PREFIX.bin, .idx and, if present, .json without reading the tokens.

        An index of more than 16,777,216 documents or sequences is checked at its ends, and
        elsewhere where it is read. Call `check_vocabulary` before tokens are read, else their ids
        are not checked.

        Args:
            prefix: Path of the files without extension.

        Raises:
            InputError: A file is missing, foreign or truncated, or PREFIX.json does not match the
                two.
        """
        prefix = str(prefix)
        token_type = check_index(prefix)
        index = IndexArrays.map(f"{prefix}.idx")
        check_ends = check_index_arrays if _is_checked_at_once(index) else check_index_ends
        check_ends(prefix, index, token_type)
        metadata = read_corpus_metadata(prefix) if metadata_path(prefix).exists() else None
        if metadata is not None:
            check_metadata(
                prefix,
                metadata,
                documents=len(index.documents) - 1,
                sequences=len(index.lengths),
                tokens=os.stat(f"{prefix}.bin").st_size // np.dtype(token_type).itemsize,
                token_type=token_type,
            )
        return cls(prefix, index, token_type, metadata)

    def expect_random_reads(self) -> None:
        """Tell the kernel to read no pages ahead, as reads are few and scattered.

        It concerns the .bin, and the pointers and documents of the .idx, until they are unmapped.
        """
        for array in (self._token_map, self._index.documents, self._index.pointers):
            array._mmap.madvise(mmap.MADV_RANDOM)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the corpus in hex: the sha256 of the .bin from the metadata.

        Without metadata it is a hash of the .idx and of the first and last megabyte of the .bin.
        """
        if self.metadata is not None:
            return self.metadata.sha256["bin"]
        with open(f"{self.prefix}.idx", "rb") as index:
            digest = hashlib.file_digest(index, "sha256")
        with open(f"{self.prefix}.bin", "rb") as tokens:
            digest.update(tokens.read(1 << 20))
            tokens.seek(max(0, tokens.seek(0, 2) - (1 << 20)))
            digest.update(tokens.read())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.first_sequences) - 1

    @property
    def sequences(self) -> int:
        """Return the number of sequences.

        These are sentences if the documents were split into sentences, else documents.
        """
        return len(self.sequence_lengths)

    @property
    def dtype(self) -> str:
        """Return the name of the token dtype of the .bin, such as `uint16`."""
        return self._tokens.dtype.name

    def find_special_tokens(self, eos_id: int | None) -> SpecialTokens:
        """Return the special tokens around each document, from the metadata.

        Args:
            eos_id: Id of the token that may end documents, None for none. It is used only without
                metadata: if the first document that has tokens ends with it, it is assumed to end
                all of them, else there are no special tokens.
        """
        if self.metadata is not None:
            return self.metadata.surrounding_tokens
        if eos_id is not None and self._read_first_end() == eos_id:
            return SpecialTokens("eod", after=(eos_id,))
        return SpecialTokens()

    def _read_first_end(self) -> int:
        """Return the last token of the first document that has any."""
        for first in range(0, len(self), _DOCUMENTS_PER_SEARCH):
            ends = self.document_offsets(
                np.arange(first, min(first + _DOCUMENTS_PER_SEARCH, len(self))) + 1
            )
            if ends[-1]:
                return int(self._tokens[ends[np.argmax(ends > 0)] - 1])
        raise AssertionError("a corpus has tokens")

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return a copy of tokens start..stop-1 of a document, as int64[stop - start].

        `document` is its index, and positions are 0-based within it. Bounds are not checked: a
        `stop` after the document's end reads on in the .bin. The first call reads the whole index,
        with the errors of `document_lengths`.

        Raises:
            LocalInputError: A token id is outside the vocabulary given to `check_vocabulary`.
        """
        if start == stop:
            return np.empty(0, dtype=np.int64)
        return self.read_spans(np.array([document]), np.array([start]), np.array([stop]))

    def read_spans(
        self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Return tokens starts[i]..stops[i]-1 of each documents[i], joined, as int64.

        All three are int64[n]; positions are 0-based within each document. Some spans may be empty,
        but not all. Bounds are not checked, as in `tokens`. The first call reads the whole index,
        with the errors of `document_lengths`.

        Raises:
            LocalInputError: A token id is outside the vocabulary given to `check_vocabulary`.
        """
        # The sequences of a document are contiguous in the .bin: one read may cross them.
        return self.read_ranges(
            documents, self._document_bounds[0][documents] + starts, stops - starts
        )

    def read_ranges(
        self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Return counts[i] tokens from offset begins[i] of the .bin, joined, as int64.

        Some counts may be 0, but not all. The index is not read, and bounds are not checked.

        Args:
            documents: int64[n], indices of the documents of the ranges, for errors.
            begins: int64[n], offsets in tokens from the start of the .bin.
            counts: int64[n], numbers of tokens.

        Raises:
            LocalInputError: A token id is outside the vocabulary given to `check_vocabulary`.
        """
        if len(documents) <= _MAX_SLICED_DOCUMENTS:
            slices = zip(begins.tolist(), (begins + counts).tolist(), strict=True)
            tokens = np.concatenate(
                [self._tokens[begin:end] for begin, end in slices], dtype=np.int64
            )
        else:
            places = np.repeat(begins - np.cumsum(counts) + counts, counts)
            places += np.arange(len(places))
            tokens = self._tokens[places].astype(np.int64)
        if self._id_limit is not None and int(tokens.view(np.uint64).max()) >= self._id_limit:
            for document, piece in zip(
                documents, np.split(tokens, np.cumsum(counts)[:-1]), strict=True
            ):
                self._check_ids(piece, f"document {document}", LocalInputError)
        return tokens

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Check the corpus's tokenizer and its first token ids against `vocabulary`.

        These are the first 4,194,304 ids. Later reads check theirs; before this call, reads check
        none. The tokenizer of a corpus without metadata, as of Megatron's own tool, is not checked.

        Raises:
            InputError: The tokenizer in the metadata is another one (see `check_tokenizer`), or an
                id is not in the vocabulary.
        """
        if self.metadata is not None:
            check_tokenizer(self.prefix, self.metadata, vocabulary)
        self._id_limit = vocabulary.size
        count = min(_CHECKED_TOKENS, len(self._tokens))
        self._check_ids(self._tokens[:count].astype(np.int64), "the start")

    def _check_ids(
        self, tokens: np.ndarray, where: str, error: type[InputError] = InputError
    ) -> None:
        """Raise `error` if `tokens` holds an id outside the vocabulary.

        `where` names their place in the corpus.
        """
        # Negative ids are huge as unsigned numbers: one comparison detects both kinds.
        if int(tokens.view(np.uint64).max()) >= self._id_limit:
            invalid = tokens[(tokens < 0) | (tokens >= self._id_limit)]
            raise error(
                f"{self.prefix}.bin: {where} holds token id {invalid[0]}, "
                f"expected 0 to {self._id_limit - 1} (the model's vocabulary)"
            )


def check_index(prefix: str) -> type[np.number]:
    """Return the NumPy type of a corpus's tokens, after a check of the .idx header.

    Of the .idx only header and size are read, of the .bin only its size.

    Args:
        prefix: Path of the files without extension.

    Raises:
        InputError: A file is missing, the .idx has a bad header or size, or there are no tokens.
    """
    refuse_raw_text(prefix)
    for extension in (".idx", ".bin"):
        # Unlike Path's, `isfile` is False for a name that is too long.
        if not os.path.isfile(prefix + extension):
            raise InputError(
                f"{prefix}{extension}: no such file; "
                f"expected the prefix of a .bin and an .idx file{_suggest_prefix(prefix)}"
            )
    try:
        index_bytes = os.stat(f"{prefix}.idx").st_size
        bin_bytes = os.stat(f"{prefix}.bin").st_size
        with open(f"{prefix}.idx", "rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise InputError(
            f"{error.filename or prefix}: cannot be read: {error.strerror or error}"
        ) from None
    if index_bytes < HEADER.size:
        raise InputError(
            f"{prefix}.idx: truncated: found {index_bytes} bytes, expected a header of "
            f"{HEADER.size}"
        )
    magic, version, code, sequences, indices = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise InputError(
            f"{prefix}.idx: found header {magic!r}, version {version}; "
            f"expected {MAGIC!r}, version {VERSION}"
        )
    if code not in TOKEN_TYPES:
        raise InputError(
            f"{prefix}.idx: found dtype code {code}, expected one of an integer type "
            f"({sorted(TOKEN_TYPES)})"
        )
    # int32 lengths, int64 pointers, int64 document indices.
    expected_bytes = HEADER.size + 12 * sequences + 8 * indices
    if index_bytes != expected_bytes:
        problem = "truncated" if index_bytes < expected_bytes else "too long for a text corpus"
        raise InputError(
            f"{prefix}.idx: {problem}: found {index_bytes} bytes, expected {expected_bytes} for "
            f"{sequences} sequences"
        )
    if bin_bytes == 0 or indices < 2 or sequences < 1:
        raise InputError(f"{prefix}.bin: found no tokens, expected at least one document with text")
    return TOKEN_TYPES[code]


def refuse_raw_text(prefix: str) -> None:
    """Raise InputError if `prefix` is itself a file, such as text not tokenized yet.

    A corpus's prefix is the path of its files without extension. Files of a corpus pass: for these,
    other checks suggest the prefix.
    """
    is_corpus_file = os.path.splitext(prefix)[1] in (".bin", ".idx") or os.path.isfile(
        f"{prefix}.idx"
    )
    if os.path.isfile(prefix) and not is_corpus_file and not _suggest_prefix(prefix):
        expected = "the prefix of a .bin and an .idx file"
        raise InputError(
            f"{prefix}: found a file, expected {expected}; run `megaenc preprocess` first"
        )


def check_index_arrays(prefix: str, index: IndexArrays, token_type: type[np.number]) -> None:
    """Raise InputError if the arrays of the .idx of corpus `prefix` are inconsistent.

    Its sequences must fill the documents and the .bin. All entries are read, except pointers
    between the ends. `check_index`, which returns `token_type`, must have passed.
    """
    lengths = index.lengths
    indices = index.documents
    # Differences of non-negative numbers cannot overflow.
    if lengths.min() < 0 or indices[0] != 0 or indices.min() < 0 or np.diff(indices).min() < 0:
        raise InputError(
            f"{prefix}.idx: found sequences or documents of negative length; the file is damaged"
        )
    check_index_ends(
        prefix, index, token_type, int(lengths.sum(dtype=np.int64)) * np.dtype(token_type).itemsize
    )


def check_index_ends(
    prefix: str, index: IndexArrays, token_type: type[np.number], expected_bytes: int | None = None
) -> None:
    """Raise InputError if first and last documents and sequences do not fit the .bin.

    Args:
        prefix: Path of the corpus's files without extension.
        index: Arrays of the .idx, of which only the ends are read.
        token_type: Type of the tokens, as returned by `check_index`, which must have passed.
        expected_bytes: Size that the .bin must have; None: the end of the last sequence.
    """
    lengths = index.lengths
    pointers = index.pointers
    if index.documents[0] != 0 or index.documents[-1] != len(lengths):
        raise InputError(
            f"{prefix}.idx: its document indices do not end at its last sequence; "
            "the file is damaged"
        )
    end = int(pointers[-1]) + int(lengths[-1]) * np.dtype(token_type).itemsize
    check_bin_size(prefix, end if expected_bytes is None else expected_bytes)
    if pointers[0] != 0 or expected_bytes not in (None, end):
        raise InputError(
            f"{prefix}.idx: its sequences do not lie end to end in .bin; the file is damaged"
        )


def _is_checked_at_once(index: IndexArrays) -> bool:
    """Return whether an index is small enough to be checked whole when it is opened."""
    return max(len(index.lengths), len(index.documents)) <= _CHECKED_SEQUENCES


def check_bin_size(prefix: str, expected_bytes: int) -> None:
    """Raise InputError unless PREFIX.bin has `expected_bytes`.

    They are computed from the sequence lengths in the .idx. A missing .bin is a
    FileNotFoundError.
    """
    actual_bytes = Path(f"{prefix}.bin").stat().st_size
    if actual_bytes != expected_bytes:
        problem = "truncated" if actual_bytes < expected_bytes else "too long"
        raise InputError(
            f"{prefix}.bin: {problem}: found {actual_bytes} bytes, expected {expected_bytes} (by "
            "the lengths in .idx)"
        )


def check_metadata(
    prefix: str,
    metadata: CorpusMetadata,
    *,
    documents: int,
    sequences: int,
    tokens: int,
    token_type: type[np.number],
) -> None:
    """Raise InputError unless `metadata` matches the .bin and .idx of the corpus.

    The counts and the token type of `metadata` must be those given, the sizes in bytes those of the
    files on disk, which must exist (else FileNotFoundError). `prefix` is their path without
    extension.
    """
    actual = {
        "documents": documents,
        "sequences": sequences,
        "tokens": tokens,
        "dtype": np.dtype(token_type).name,
        "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
    }
    for field, value in actual.items():
        if getattr(metadata, field) != value:
            raise InputError(
                f"{prefix}.json: field `{field}`: "
                f"found {getattr(metadata, field)}, expected {value} "
                "(from the .bin and .idx next to it); "
                "the three files do not belong together, run `megaenc preprocess` again"
            )


def check_tokenizer(prefix: str, metadata: CorpusMetadata, vocabulary: Vocabulary) -> None:
    """Raise InputError unless the tokenizer in `metadata` fits `vocabulary`.

    It must be the same one, of which only the template of special tokens may differ (see
    `Vocabulary.is_of_tokenizer`), and have no more ids. `prefix` names the corpus in errors.
    """
    identity = metadata.tokenizer
    if not vocabulary.is_of_tokenizer(identity.fingerprint, identity.text_fingerprint):
        raise InputError(
            f"{prefix}.json: corpus was made with another tokenizer: found `{identity.name}` "
            f"({identity.fingerprint[:12]}), expected the one given with --tokenizer "
            f"({vocabulary.fingerprint[:12]})"
        )
    if metadata.vocab_size > vocabulary.size:
        raise InputError(
            f"{prefix}.json: field `vocab_size`: found {metadata.vocab_size}, "
            f"expected at most the model's vocabulary of {vocabulary.size}"
        )


def _suggest_prefix(prefix: str) -> str:
    """Return a `did you mean` hint for a mistaken prefix, else an empty string.

    The prefix may have an extension, or lack the suffix `_KEY_document`.
    """
    path = Path(prefix)
    # os.path's functions, unlike Path's, return False for a name that is too long.
    if path.suffix in (".bin", ".idx", ".json") and os.path.isfile(path.with_suffix(".idx")):
        return f"; did you mean `{path.with_suffix('')}`?"
    if path.name and os.path.isdir(path.parent):
        candidates = sorted(path.parent.glob(glob.escape(path.name) + "*.idx"))
        if candidates:
            return f"; did you mean `{candidates[0].with_suffix('')}`?"
    return ""


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """Return the training, validation and test weights in text such as `99,1,0`.

    They are exact Fractions in the unit in which they are written. Text such as `1/3` is allowed.

    Raises:
        InputError: The text is no three weights, one is negative, or all are zero.
    """
    weights = ()
    # A number with an exponent of many digits would fill the memory.
    if not re.search(r"[eE][+-]?\d{4}", text):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            weights = tuple(Fraction(part.strip()) for part in text.split(","))
    if len(weights) != 3 or min(weights) < 0 or sum(weights) == 0:
        raise InputError(
            f"--split: found `{text}`, expected three weights, training, validation and test, such "
            "as 99,1,0"
        )
    return weights


def split_documents(
    count: int, fractions: tuple[Any, Any, Any] = (99, 1, 0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents 0..count-1 into training, validation and test by weight.

    The choice is random but fixed: it depends only on `count` and the weights, not on the run's
    seed. Each part with a nonzero weight gets at least one document if there are enough.

    Args:
        fractions: Weights of the three parts, in any unit; not checked.

    Returns:
        Three sorted int64 arrays of document indices.
    """
    weights = [Fraction(str(fraction)) for fraction in fractions]
    half = Fraction(1, 2)
    ends = [int(sum(weights[: part + 1]) / sum(weights) * count + half) for part in range(3)]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for part in range(3):
        donor = counts.index(max(counts))
        if weights[part] > 0 and counts[part] == 0 and counts[donor] > 1:
            counts[donor] -= 1
            counts[part] += 1
    order = counter_rng.permutation(0, "split", count)
    training, validation, test = np.split(order, np.cumsum(counts)[:2])
    return np.sort(training), np.sort(validation), np.sort(test)
