"""Command `megaenc data verify`: full check of corpora on disk.

It checks lengths, pointers, token ids, document ends and hashes. Files are read once, in chunks, so
that memory does not grow with the corpus.
"""

import hashlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.indexed.corpus import check_bin_size, check_index, check_metadata, check_tokenizer
from megaenc.data.indexed.indexed_dataset import IndexArrays
from megaenc.data.indexed.metadata import CorpusMetadata, metadata_path, read_corpus_metadata
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, handle_command_errors

_CHUNK = 1 << 23  # bytes
_ENTRIES = 1 << 20  # of the .idx, checked together


@dataclass(frozen=True)
class VerifyConfig:
    """Arguments of `megaenc data verify`, each a field.

    `prefix`, the positional ones, is a tuple of paths of corpora without extension. `tokenizer`,
    a flag, is the directory or Hub name of the tokenizer that must have made them; "" to skip this
    check. Token ids are then checked by the .json, and not at all without one.
    """

    prefix: Annotated[tuple[str, ...], Positional, arg(metavar="PREFIX")]
    """Corpora: paths of their .bin, .idx and .json without the extension."""
    tokenizer: str = ""
    """Tokenizer that made the corpora, a directory or Hub name. Without a .json, token ids are
    checked only with this flag."""


@dataclass(frozen=True)
class VerifiedCorpus:
    """Counts and size of a corpus that passed `verify_corpus`, and the checks skipped.

    `documents`, `sequences` and `tokens` are numbers, `dtype` is the token dtype of the .bin, such
    as uint16, and `bytes` the size of .bin and .idx together. `unchecked` names, for the console,
    the checks for which metadata or a tokenizer is missing, such as `sha256`.
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    """Token dtype of the .bin."""
    bytes: int
    """Size of .bin and .idx."""
    unchecked: tuple[str, ...]
    """Names for the console, such as `sha256`, of the checks that were skipped because the metadata
    or a tokenizer is missing."""


def verify_corpus(
    prefix: str | Path,
    vocabulary: Vocabulary | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> VerifiedCorpus:
    """Check all files of a corpus and return its counts and the checks skipped.

    Args:
        prefix: Path of the files without extension.
        vocabulary: Vocabulary of the tokenizer that must have made the corpus; None: any. If there
            is no PREFIX.json, only the token ids are compared with it.
        tick: Called with the number of bytes of each read, of the .idx and then of the .bin.

    Raises:
        InputError: A file is missing, unreadable or damaged. The message has the first damage with
            file, position, found and expected value.
    """
    try:
        return _verify_files(str(prefix), vocabulary, tick)
    except OSError as error:  # a bad disk may fail in the middle of a file
        raise InputError(
            f"{error.filename or prefix}: cannot be read: {error.strerror or error}"
        ) from None


def _verify_files(
    prefix: str, vocabulary: Vocabulary | None, tick: Callable[[int], None]
) -> VerifiedCorpus:
    """Check the .idx, .json and .bin of a corpus, in this order."""
    dtype = np.dtype(check_index(prefix))
    index = IndexArrays.map(f"{prefix}.idx")
    tokens = _check_sequences(prefix, index, dtype.itemsize)
    _check_documents(prefix, index)
    check_bin_size(prefix, tokens * dtype.itemsize)
    documents = len(index.documents) - 1
    sequences = len(index.lengths)
    metadata = read_corpus_metadata(prefix) if metadata_path(prefix).exists() else None
    if metadata:
        check_metadata(
            prefix,
            metadata,
            documents=documents,
            sequences=sequences,
            tokens=tokens,
            token_type=dtype.type,
        )
        if metadata.append_eod and metadata.eod is None:
            raise InputError(
                f"{prefix}.json: field `eod`: found null, expected the id that ends each document "
                "(`append_eod`)"
            )
        if vocabulary:
            check_tokenizer(prefix, metadata, vocabulary)

    digest = hashlib.sha256()
    for _ in _read_chunks(f"{prefix}.idx", digest, tick):
        pass
    if complaint := _compare_hash(digest, metadata, "idx"):
        raise InputError(f"{prefix}.idx: {complaint}")

    checker = _TokenChecker(index, dtype, tokens, metadata, vocabulary)
    digest = hashlib.sha256()
    complaint = ""
    start = 0
    for chunk in _read_chunks(f"{prefix}.bin", digest, tick):
        complaint = complaint or checker(chunk.view(dtype), start)
        start += len(chunk) // dtype.itemsize
    if start != tokens:
        raise InputError(
            f"{prefix}.bin: found {start} tokens, expected {tokens}; it changed while it was read"
        )
    # Both are reported: a wrong token under a right hash is bad preprocessing, under a wrong one a
    # bad disk.
    complaints = [complaint, _compare_hash(digest, metadata, "bin")]
    if any(complaints):
        raise InputError(f"{prefix}.bin: {'; '.join(filter(None, complaints))}")

    unchecked = []
    if not metadata:
        unchecked = ["sha256", "ends of documents"]
        if not vocabulary:
            unchecked.append("token ids (give --tokenizer)")
    size = sum(Path(prefix + extension).stat().st_size for extension in (".bin", ".idx"))
    return VerifiedCorpus(documents, sequences, tokens, dtype.name, size, tuple(unchecked))


def _check_sequences(prefix: str, index: IndexArrays, size: int) -> int:
    """Check that the sequences lie end to end, and return their number of tokens."""
    total = 0
    for first in range(0, len(index.lengths), _ENTRIES):
        lengths = index.lengths[first : first + _ENTRIES].astype(np.int64)
        pointers = np.array(index.pointers[first : first + _ENTRIES])
        expected = (total + np.cumsum(lengths) - lengths) * size
        is_wrong = (lengths < 0) | (pointers != expected)
        if is_wrong.any():
            offset = int(is_wrong.argmax())
            if lengths[offset] < 0:
                raise InputError(
                    f"{prefix}.idx: sequence {first + offset}: "
                    f"found length {lengths[offset]}, expected 0 or more"
                )
            raise InputError(
                f"{prefix}.idx: sequence {first + offset}: found pointer {pointers[offset]}, "
                f"expected {expected[offset]} (from the lengths of the previous sequences)"
            )
        total += int(lengths.sum())
    return total


def _check_documents(prefix: str, index: IndexArrays) -> None:
    """Raise InputError if the document indices of an .idx are damaged.

    They start at 0, never decrease and end with the number of sequences.
    """
    previous = 0
    for first in range(0, len(index.documents), _ENTRIES):
        indices = np.array(index.documents[first : first + _ENTRIES])
        if first == 0 and indices[0] != 0:
            raise InputError(
                f"{prefix}.idx: document 0: found first sequence {indices[0]}, expected 0"
            )
        # Differences of non-negative numbers cannot overflow.
        decreases = (indices < 0) | (np.diff(indices, prepend=previous) < 0)
        if decreases.any():
            offset = int(decreases.argmax())
            raise InputError(
                f"{prefix}.idx: document {first + offset}: found first sequence {indices[offset]}, "
                f"expected {indices[offset - 1] if offset else previous} or more (that of the "
                "previous document)"
            )
        previous = int(indices[-1])
    if previous != len(index.lengths):
        raise InputError(
            f"{prefix}.idx: the last document index is {previous}, expected {len(index.lengths)}, "
            "the number of sequences"
        )


class _TokenChecker:
    """Checker of the tokens of a .bin, called with its chunks in order."""

    def __init__(
        self,
        index: IndexArrays,
        dtype: np.dtype,
        tokens: int,
        metadata: CorpusMetadata | None,
        vocabulary: Vocabulary | None,
    ):
        self.dtype = dtype
        self.tokens = tokens
        self._index = index
        self._limit = vocabulary.size if vocabulary else None
        special = SpecialTokens()
        if metadata:
            self._limit = metadata.vocab_size
            special = metadata.surrounding_tokens
        # Place of each special token in its document, from the end if it is negative.
        self._special = [*enumerate(special.before), *enumerate(special.after, -len(special.after))]
        self._documents = range(len(index.documents) - 1)
        self._first_document = 0  # that ends after the chunks so far

    def __call__(self, chunk: np.ndarray, start: int) -> str:
        """Return a description of the first error in `chunk`, or an empty string.

        `chunk` holds tokens start..start+n-1 of the corpus.
        """
        return self._check_ids(chunk, start) or self._check_special_tokens(chunk, start)

    def _check_ids(self, chunk: np.ndarray, start: int) -> str:
        """Describe the first token id outside the vocabulary; empty if there is none."""
        # Negative ids are huge as unsigned numbers.
        unsigned = chunk.view(f"u{self.dtype.itemsize}")
        if self._limit is None or int(unsigned.max()) < self._limit:
            return ""
        offset = int((unsigned >= self._limit).argmax())
        token = start + offset
        document = bisect_right(self._documents, token, key=self._find_end)
        place = (
            f"document {document}, token {token - self._find_end(document - 1)} (token {token:,} "
            "of the corpus)"
        )
        return (
            f"{place}: found id {chunk[offset]}, expected 0 to {self._limit - 1} "
            "(the tokenizer's ids)"
        )

    def _find_end(self, document: int) -> int:
        """Return the end of a document in tokens from the start of the corpus.

        0 for document -1.
        """
        next_sequence = int(self._index.documents[document + 1])  # its first sequence
        is_last = next_sequence == len(self._index.pointers)
        return (
            self.tokens
            if is_last
            else int(self._index.pointers[next_sequence]) // self.dtype.itemsize
        )

    def _check_special_tokens(self, chunk: np.ndarray, start: int) -> str:
        """Describe the first document that lacks one of its special tokens in `chunk`.

        The text is empty if there is none.
        """
        stop = start + len(chunk)
        first = self._first_document
        if not self._special or first == len(self._documents):
            return ""
        # Documents that begin and end in the chunk, at its borders, or beyond them.
        last = bisect_right(self._documents, stop, lo=first, key=self._find_end) + 1
        next_sequences = np.array(self._index.documents[first + 1 : last + 1])
        inside = next_sequences < len(self._index.pointers)
        ends = np.full(len(next_sequences), self.tokens, dtype=np.int64)
        ends[inside] = self._index.pointers[next_sequences[inside]] // self.dtype.itemsize
        starts = np.append(self._find_end(first - 1), ends[:-1])
        self._first_document = first + int(np.searchsorted(ends, stop, side="right"))
        for place, token in self._special:
            positions = (starts if place >= 0 else ends) + place
            is_missing = ends - starts < (place + 1 if place >= 0 else -place)
            tokens = chunk[np.clip(positions - start, 0, len(chunk) - 1)]
            is_wrong = is_missing | ((tokens != token) & (positions >= start) & (positions < stop))
            if is_wrong.any():
                offset = int(is_wrong.argmax())
                name = {-1: "last token", 0: "first token"}.get(place, f"token {place}")
                actual = f"id {tokens[offset]} as its {name} ({positions[offset]:,} of the corpus)"
                if is_missing[offset]:
                    actual = "no token"
                expected = f"{token} (`special_tokens`"
                if place == -1:
                    expected = f"it to end with {token} (`eod`"
                return (
                    f"document {first + offset}: found {actual}, expected {expected} in the .json)"
                )
        return ""


def _read_chunks(path: str, digest: Any, tick: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yield a file as uint8[n] views of one buffer that the next chunk overwrites.

    The hash `digest` is updated with each chunk.
    """
    buffer = np.empty(_CHUNK, np.uint8)
    with open(path, "rb") as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            yield buffer[:count]
            tick(count)


def _compare_hash(digest: Any, metadata: CorpusMetadata | None, extension: str) -> str:
    """Describe how `digest` differs from the sha256 in the metadata.

    The text is empty if it does not differ, or without metadata.
    """
    if not metadata:
        return ""
    actual = digest.hexdigest()
    expected = metadata.sha256[extension]
    if actual == expected:
        return ""
    return (
        f"found sha256 {actual[:12]}, expected {expected[:12]} (by the .json); "
        "the file has changed since it was written"
    )


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc data verify`: check corpora and report all damaged ones.

    It prints a line for each intact corpus, then exits with 2 and one error if others are damaged.
    `argv` are the flags; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(VerifyConfig, argv, prog="megaenc data verify", description=__doc__)
    if not settings.prefix:
        raise InputError(
            "PREFIX: missing, expected one corpus or more (see megaenc data verify --help)"
        )
    vocabulary = None
    if settings.tokenizer:
        from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary

        vocabulary = read_vocabulary(load_tokenizer(settings.tokenizer))
    damaged: dict[str, InputError] = {}
    for prefix in settings.prefix:
        try:
            _verify_and_report(prefix, vocabulary)
        except InputError as error:  # the other corpora are still checked
            damaged[prefix] = error
    if damaged:
        (_, first_error), *rest = damaged.items()
        more = f"; damaged too: {', '.join(prefix for prefix, _ in rest)}" if rest else ""
        raise InputError(f"{first_error}{more}")


def _verify_and_report(prefix: str, vocabulary: Vocabulary | None) -> None:
    started = time.monotonic()
    done = 0
    total = sum(
        os.path.getsize(path) for path in (f"{prefix}.bin", f"{prefix}.idx") if os.path.isfile(path)
    )
    with ProgressLine("verifying", total, closing=False) as progress:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            progress.update(
                done, **{"MB/s": round(done / 1e6 / max(time.monotonic() - started, 1e-9))}
            )

        corpus = verify_corpus(prefix, vocabulary, tick)
    rate = corpus.bytes / 1e6 / max(time.monotonic() - started, 1e-9)
    status = "whole"
    missing = ""
    if corpus.unchecked:
        status = f"whole as far as can be checked without {Path(prefix).name}.json"
        missing = f"; not checked: {', '.join(corpus.unchecked)}"
    print_rank_0(
        f"{prefix}: {status}: {corpus.documents:,} documents, {corpus.tokens:,} tokens of "
        f"{corpus.dtype}, "
        f"{corpus.bytes / 1e6:,.1f} MB at {rate:,.0f} MB/s{missing}"
    )
