"""Check all that can be wrong with a corpus on disk: lengths, pointers, token ids, ends of documents, hashes.

The files are read once, in pieces, so that memory does not grow with the corpus.
"""

import hashlib
import os
import time
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
from megaenc.data.indexed.metadata import CorpusMetadata, read_corpus_metadata, metadata_path
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, handle_command_errors

_CHUNK = 1 << 23  # bytes of a file that are looked at together
_ENTRIES = 1 << 20  # entries of the index that are looked at together


@dataclass(frozen=True)
class VerifyConfig:
    """What `megaenc data verify` takes."""

    prefix: Annotated[tuple[str, ...], Positional, arg(metavar="PREFIX")]
    """Corpora: the paths of their .bin, .idx and .json without the extension."""
    tokenizer: str = ""
    """Tokenizer that they must have been made with, a folder or a name. Needed for token ids where a corpus has no .json."""


@dataclass(frozen=True)
class VerifiedCorpus:
    """A corpus in which nothing is wrong."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    """Of .bin and .idx."""
    unchecked: tuple[str, ...]
    """What could not be checked, for want of a sidecar or a tokenizer."""


def verify_corpus(
    prefix: str | Path, vocabulary: Vocabulary | None = None, tick: Callable[[int], None] = lambda count: None
) -> VerifiedCorpus:
    """Read all of a corpus. `vocabulary` is that of the tokenizer it must have been made with; `tick` is told the bytes read.

    Raises InputError for the first damage: file, place, what was found and what was expected.
    """
    try:
        return _verify_files(str(prefix), vocabulary, tick)
    except OSError as error:  # a bad disk answers in the middle of a file
        raise InputError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None


def _verify_files(prefix: str, vocabulary: Vocabulary | None, tick: Callable[[int], None]) -> VerifiedCorpus:
    dtype = np.dtype(check_index(prefix))
    index = IndexArrays.map(f"{prefix}.idx")
    tokens = _check_sequences(prefix, index, dtype.itemsize)
    _check_documents(prefix, index)
    check_bin_size(prefix, tokens * dtype.itemsize)
    documents, sequences = len(index.documents) - 1, len(index.lengths)
    sidecar = read_corpus_metadata(prefix) if metadata_path(prefix).exists() else None
    if sidecar:
        counts = {"documents": documents, "sequences": sequences, "tokens": tokens}
        check_metadata(prefix, sidecar, **counts, token_type=dtype.type)
        if sidecar.append_eod and sidecar.eod is None:
            raise InputError(f"{prefix}.json: field `eod`: found null, expected the id that ends each document (`append_eod`)")
        if vocabulary:
            check_tokenizer(prefix, sidecar, vocabulary)

    digest = hashlib.sha256()
    for _ in _read_chunks(f"{prefix}.idx", digest, tick):
        pass
    if wrong := _compare_hash(digest, sidecar, "idx"):
        raise InputError(f"{prefix}.idx: {wrong}")

    look, digest = _TokenChecker(index, dtype, tokens, sidecar, vocabulary), hashlib.sha256()
    complaint, start = "", 0
    for piece in _read_chunks(f"{prefix}.bin", digest, tick):
        complaint = complaint or look(piece.view(dtype), start)
        start += len(piece) // dtype.itemsize
    if start != tokens:
        raise InputError(f"{prefix}.bin: found {start} tokens, expected {tokens}; it changed while it was read")
    # The token says where something is wrong and the hash that it was not always so: both tell a bad disk from bad preprocessing.
    if complaints := [*filter(None, (complaint, _compare_hash(digest, sidecar, "bin")))]:
        raise InputError(f"{prefix}.bin: {'; '.join(complaints)}")

    unchecked = [] if sidecar else ["sha256", "ends of documents"]
    unchecked += [] if sidecar or vocabulary else ["token ids (give --tokenizer)"]
    size = sum(Path(prefix + extension).stat().st_size for extension in (".bin", ".idx"))
    return VerifiedCorpus(documents, sequences, tokens, dtype.name, size, tuple(unchecked))


def _check_sequences(prefix: str, index: IndexArrays, size: int) -> int:
    """The tokens of all sequences, after checking that each starts where those before it end."""
    total = 0
    for first in range(0, len(index.lengths), _ENTRIES):
        lengths = index.lengths[first : first + _ENTRIES].astype(np.int64)
        found = np.array(index.pointers[first : first + _ENTRIES])
        expected = (total + np.cumsum(lengths) - lengths) * size
        wrong = (lengths < 0) | (found != expected)
        if wrong.any():
            at = int(wrong.argmax())
            if lengths[at] < 0:
                raise InputError(f"{prefix}.idx: sequence {first + at}: found length {lengths[at]}, expected 0 or more")
            raise InputError(
                f"{prefix}.idx: sequence {first + at}: found pointer {found[at]}, "
                f"expected {expected[at]} (the bytes of the sequences before it, by their lengths)"
            )
        total += int(lengths.sum())
    return total


def _check_documents(prefix: str, index: IndexArrays) -> None:
    """Document indices begin with 0, never fall, and end with the number of sequences."""
    before = 0
    for first in range(0, len(index.documents), _ENTRIES):
        found = np.array(index.documents[first : first + _ENTRIES])
        if first == 0 and found[0] != 0:
            raise InputError(f"{prefix}.idx: document 0: found first sequence {found[0]}, expected 0")
        falls = (found < 0) | (np.diff(found, prepend=before) < 0)  # from 0 on differences cannot overflow
        if falls.any():
            at = int(falls.argmax())
            raise InputError(
                f"{prefix}.idx: document {first + at}: found first sequence {found[at]}, "
                f"expected {found[at - 1] if at else before} or more (that of the document before it)"
            )
        before = int(found[-1])
    if before != len(index.lengths):
        raise InputError(f"{prefix}.idx: the last document index is {before}, expected {len(index.lengths)}, the sequences")


class _TokenChecker:
    """Looks at pieces of the .bin in their order; each call returns what is wrong in its piece, empty where nothing is."""

    def __init__(
        self, index: IndexArrays, dtype: np.dtype, tokens: int, sidecar: CorpusMetadata | None, vocabulary: Vocabulary | None
    ):
        self.dtype, self.tokens, self._index = dtype, tokens, index
        self._limit = sidecar.vocab_size if sidecar else vocabulary.size if vocabulary else None
        self._eod = sidecar.eod if sidecar and sidecar.append_eod else None
        self._more = self._ends()
        self._ahead = np.empty(0, np.int64)  # ends of the documents that follow `_documents`
        self._documents = 0  # looked at so far

    def __call__(self, piece: np.ndarray, start: int) -> str:
        """`piece`: dtype[n], tokens start..start+n-1 of the corpus."""
        return self._ids(piece, start) or self._last_tokens(piece, start)

    def _ids(self, piece: np.ndarray, start: int) -> str:
        unsigned = piece.view(f"u{self.dtype.itemsize}")  # negative ids are huge as unsigned numbers
        if self._limit is None or int(unsigned.max()) < self._limit:
            return ""
        at = int((unsigned >= self._limit).argmax())
        return f"{self._place(start + at)}: found id {piece[at]}, expected 0 to {self._limit - 1} (the tokenizer's ids)"

    def _last_tokens(self, piece: np.ndarray, start: int) -> str:
        """Whether each document that ends in this piece ends with the end-of-document token."""
        if self._eod is None:
            return ""
        stop = start + len(piece)
        while (not len(self._ahead) or self._ahead[-1] <= stop) and (more := next(self._more, None)) is not None:
            self._ahead = np.concatenate([self._ahead, more])
        ends, self._ahead = np.split(self._ahead, [np.searchsorted(self._ahead, stop, side="right")])
        last = piece[np.maximum(ends - 1 - start, 0)]
        empty = np.diff(ends, prepend=start) == 0
        wrong = empty | (last != self._eod)
        if not wrong.any():
            self._documents += len(ends)
            return ""
        at = int(wrong.argmax())
        seen = "no token" if empty[at] else f"id {last[at]} as its last token ({ends[at] - 1:,} of the corpus)"
        return f"document {self._documents + at}: found {seen}, expected it to end with {self._eod} (`eod` in the .json)"

    def _ends(self) -> Iterator[np.ndarray]:
        """int64: where the documents end, in tokens from the start of the corpus; some at a time."""
        pointers = self._index.pointers
        for first in range(1, len(self._index.documents), _ENTRIES):
            following = np.array(self._index.documents[first : first + _ENTRIES])  # the sequence after each document
            ends = np.full(len(following), self.tokens, dtype=np.int64)
            inside = following < len(pointers)
            ends[inside] = pointers[following[inside]] // self.dtype.itemsize
            yield ends

    def _place(self, token: int) -> str:
        """Token number `token` of the corpus, for people."""
        documents = begin = 0
        for ends in self._ends():
            at = int(np.searchsorted(ends, token, side="right"))
            begin = int(ends[at - 1]) if at else begin
            documents += at
            if at < len(ends):
                break
        return f"document {documents}, token {token - begin} (token {token:,} of the corpus)"


def _read_chunks(path: str, digest: Any, tick: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yield a file in pieces, uint8[n], each of which the next one overwrites; `digest` is given them all."""
    buffer = np.empty(_CHUNK, np.uint8)
    with open(path, "rb") as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            yield buffer[:count]
            tick(count)


def _compare_hash(digest: Any, sidecar: CorpusMetadata | None, extension: str) -> str:
    """Describe how the hash differs from the one in the .json; empty where it does not."""
    if not sidecar or (found := digest.hexdigest()) == (expected := sidecar.sha256[extension]):
        return ""
    return f"found sha256 {found[:12]}, expected {expected[:12]} (by the .json); the file has changed since it was written"


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc data verify`: a line for each whole corpus; damage is one line in the end."""
    silence_libraries()
    settings = flags.parse(VerifyConfig, argv, prog="megaenc data verify", description=__doc__)
    if not settings.prefix:
        raise InputError("PREFIX: missing, expected one corpus or more (see megaenc data verify --help)")
    vocabulary = None
    if settings.tokenizer:
        from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary

        vocabulary = read_vocabulary(load_tokenizer(settings.tokenizer))
    damaged: dict[str, InputError] = {}
    for prefix in settings.prefix:
        try:
            _verify_and_report(prefix, vocabulary)
        except InputError as error:  # the others are looked at all the same
            damaged[prefix] = error
    if damaged:
        (_, first), *others = damaged.items()
        more = f"; damaged too: {', '.join(prefix for prefix, _ in others)}" if others else ""
        raise InputError(f"{first}{more}")


def _verify_and_report(prefix: str, vocabulary: Vocabulary | None) -> None:
    """Verify one corpus behind a progress bar and print that it is whole."""
    started, done = time.monotonic(), 0
    total = sum(os.path.getsize(path) for path in (f"{prefix}.bin", f"{prefix}.idx") if os.path.isfile(path))
    with ProgressLine("verifying", total, closing=False) as progress:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            progress.update(done, **{"MB/s": round(done / 1e6 / max(time.monotonic() - started, 1e-9))})

        found = verify_corpus(prefix, vocabulary, tick)
    rate = found.bytes / 1e6 / max(time.monotonic() - started, 1e-9)
    told = f"whole as far as can be told without {Path(prefix).name}.json" if found.unchecked else "whole"
    missing = f"; not checked: {', '.join(found.unchecked)}" if found.unchecked else ""
    print_rank_0(
        f"{prefix}: {told}: {found.documents:,} documents, {found.tokens:,} tokens of {found.dtype}, "
        f"{found.bytes / 1e6:,.1f} MB at {rate:,.0f} MB/s{missing}"
    )
