"""Check all that can be wrong with a corpus on disk: lengths, pointers, token ids, ends of documents, hashes.

The .bin is read once, in pieces: memory grows with the number of documents and not with their length.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import ProgressLine, quiet, say
from megaenc.data.corpus import check_bin_size, check_index, check_sidecar, check_tokenizer
from megaenc.data.indexed import IndexArrays
from megaenc.data.sidecar import Sidecar, read_sidecar, sidecar_path
from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError, one_line_errors

_CHUNK = 1 << 23  # bytes of a file that are looked at together
_CHANGED = "the file has changed since it was written"


@dataclass(frozen=True)
class VerifyFlags:
    """What `megaenc data verify` takes."""

    prefix: Annotated[tuple[str, ...], Positional, arg(metavar="PREFIX")]
    """Corpora: the paths of their .bin, .idx and .json without the extension."""
    tokenizer: str = ""
    """Tokenizer that they must have been made with, a folder or a name. Needed for token ids where a corpus has no .json."""


@dataclass(frozen=True)
class Whole:
    """A corpus in which nothing is wrong."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    """Of .bin and .idx."""
    unchecked: tuple[str, ...]
    """What could not be checked, for want of a sidecar or a tokenizer."""


def verify(prefix: str | Path, vocabulary: Vocabulary | None = None, tick: Callable[[int], None] = lambda count: None) -> Whole:
    """Read all of a corpus. `vocabulary` is that of the tokenizer it must have been made with; `tick` is told the bytes read.

    Raises InputError for the first damage: file, place, what was found and what was expected.
    """
    try:
        return _verify(str(prefix), vocabulary, tick)
    except OSError as error:  # a bad disk answers in the middle of a file
        raise InputError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None


def _verify(prefix: str, vocabulary: Vocabulary | None, tick: Callable[[int], None]) -> Whole:
    dtype = np.dtype(check_index(prefix))
    index = IndexArrays.map(f"{prefix}.idx")
    sequence_ends = _check_sequences(prefix, index, dtype.itemsize)
    _check_documents(prefix, index)
    tokens = int(sequence_ends[-1])
    check_bin_size(prefix, tokens * dtype.itemsize)
    documents, sequences = len(index.documents) - 1, len(index.lengths)
    sidecar = read_sidecar(prefix) if sidecar_path(prefix).exists() else None
    if sidecar:
        counts = {"documents": documents, "sequences": sequences, "tokens": tokens}
        check_sidecar(prefix, sidecar, **counts, token_type=dtype.type)
        if sidecar.append_eod and sidecar.eod is None:
            raise InputError(f"{prefix}.json: field `eod`: found null, expected the id that ends each document (`append_eod`)")
        if vocabulary:
            check_tokenizer(prefix, sidecar, vocabulary)

    found = _hash(f"{prefix}.idx", tick)
    if sidecar and found != sidecar.sha256["idx"]:
        raise InputError(f"{prefix}.idx: {_other_hash(found, sidecar.sha256['idx'])}")
    _check_tokens(prefix, sequence_ends[index.documents[1:]], dtype, sidecar, vocabulary, tick)

    unchecked = [] if sidecar else ["sha256", "ends of documents"]
    unchecked += [] if sidecar or vocabulary else ["token ids (give --tokenizer)"]
    size = sum(Path(prefix + extension).stat().st_size for extension in (".bin", ".idx"))
    return Whole(documents, sequences, tokens, dtype.name, size, tuple(unchecked))


def _check_sequences(prefix: str, index: IndexArrays, size: int) -> np.ndarray:
    """Return int64[S + 1], where sequences start and end in tokens, after checking that each starts where the one before ends."""
    lengths = np.array(index.lengths)
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    wrong = (lengths < 0) | (index.pointers != edges[:-1] * size)
    if wrong.any():
        at = int(wrong.argmax())
        if lengths[at] < 0:
            raise InputError(f"{prefix}.idx: sequence {at}: found length {lengths[at]}, expected 0 or more")
        raise InputError(
            f"{prefix}.idx: sequence {at}: found pointer {index.pointers[at]}, "
            f"expected {edges[at] * size} (the bytes of the sequences before it, by their lengths)"
        )
    return edges


def _check_documents(prefix: str, index: IndexArrays) -> None:
    """Check that document indices begin with 0, never fall, and end with the number of sequences."""
    found = np.array(index.documents)
    if found[0] != 0:
        raise InputError(f"{prefix}.idx: document 0: found first sequence {found[0]}, expected 0")
    falls = (found[1:] < 0) | (found[1:] < found[:-1])
    if falls.any():
        at = int(falls.argmax())
        raise InputError(
            f"{prefix}.idx: document {at + 1}: found first sequence {found[at + 1]}, "
            f"expected {found[at]} or more (that of the document before it)"
        )
    if found[-1] != len(index.lengths):
        raise InputError(f"{prefix}.idx: the last document index is {found[-1]}, expected {len(index.lengths)}, the sequences")


def _check_tokens(
    prefix: str,
    ends: np.ndarray,
    dtype: np.dtype,
    sidecar: Sidecar | None,
    vocabulary: Vocabulary | None,
    tick: Callable[[int], None],
) -> None:
    """Read the .bin once, hashing it and looking at its tokens; `ends`: int64[D], where its documents end."""
    limit = sidecar.vocab_size if sidecar else vocabulary.size if vocabulary else None
    eod = sidecar.eod if sidecar and sidecar.append_eod else None
    complaint, start = "", 0

    def take(piece: np.ndarray) -> None:
        nonlocal complaint, start
        tokens = piece.view(dtype)
        if not complaint and limit is not None:
            complaint = _wrong_id(tokens, start, ends, limit)
        if not complaint and eod is not None:
            complaint = _wrong_end(tokens, start, ends, eod)
        start += len(tokens)

    found = _hash(f"{prefix}.bin", tick, take)
    if start != ends[-1]:
        raise InputError(f"{prefix}.bin: found {start} tokens, expected {ends[-1]}; it changed while it was read")
    # The token says where something is wrong and the hash that it was not always so: both tell a bad disk from bad preprocessing.
    complaints = [complaint] if complaint else []
    if sidecar and found != sidecar.sha256["bin"]:
        complaints.append(_other_hash(found, sidecar.sha256["bin"]))
    if complaints:
        raise InputError(f"{prefix}.bin: {'; '.join(complaints)}")


def _wrong_id(tokens: np.ndarray, start: int, ends: np.ndarray, limit: int) -> str:
    """Return what is wrong with the ids of `tokens`, which are `start` and the following of the corpus; empty if nothing is."""
    unsigned = tokens.view(f"u{tokens.itemsize}")  # negative ids are huge as unsigned numbers
    if int(unsigned.max()) < limit:
        return ""
    at = int((unsigned >= limit).argmax())
    token = start + at
    document = int(np.searchsorted(ends, token, side="right"))
    place = f"document {document}, token {token - (ends[document - 1] if document else 0)} (token {token:,} of the corpus)"
    return f"{place}: found id {tokens[at]}, expected 0 to {limit - 1} (the tokenizer's ids)"


def _wrong_end(tokens: np.ndarray, start: int, ends: np.ndarray, eod: int) -> str:
    """Return which document that ends in `tokens` does not end with the end-of-document token; empty if all do."""
    first, stop = (int(np.searchsorted(ends, place, side="right")) for place in (start if start else -1, start + len(tokens)))
    here = ends[first:stop]
    empty = np.diff(here, prepend=ends[first - 1] if first else 0) == 0
    last = tokens[np.maximum(here - 1 - start, 0)]
    wrong = empty | (last != eod)
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    seen = "no token" if empty[at] else f"id {last[at]} as its last token ({here[at] - 1:,} of the corpus)"
    return f"document {first + at}: found {seen}, expected it to end with {eod} (`eod` in the .json)"


def _hash(path: str, tick: Callable[[int], None], take: Callable[[np.ndarray], None] = lambda piece: None) -> str:
    """sha256 of a file in hex; `take` is given each piece of it, uint8[n]."""
    digest, buffer = hashlib.sha256(), np.empty(_CHUNK, np.uint8)
    with open(path, "rb") as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            take(buffer[:count])
            tick(count)
    return digest.hexdigest()


def _other_hash(found: str, expected: str) -> str:
    return f"found sha256 {found[:12]}, expected {expected[:12]} (by the .json); {_CHANGED}"


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc data verify`: a line for each whole corpus; damage is one line in the end."""
    quiet()
    settings = flags.parse(VerifyFlags, argv, prog="megaenc data verify", description=__doc__)
    if not settings.prefix:
        raise InputError("PREFIX: missing, expected one corpus or more (see megaenc data verify --help)")
    vocabulary = None
    if settings.tokenizer:
        from megaenc.data.tokenizer import load_tokenizer, vocabulary_of

        vocabulary = vocabulary_of(load_tokenizer(settings.tokenizer))
    damaged: dict[str, InputError] = {}
    for prefix in settings.prefix:
        try:
            _report(prefix, vocabulary)
        except InputError as error:  # the others are looked at all the same
            damaged[prefix] = error
    if damaged:
        first, *others = damaged
        more = f"; damaged too: {', '.join(others)}" if others else ""
        raise InputError(f"{damaged[first]}{more}")


def _report(prefix: str, vocabulary: Vocabulary | None) -> None:
    """Verify one corpus behind a progress bar and print that it is whole."""
    started, done = time.monotonic(), 0
    total = sum(os.path.getsize(path) for path in (f"{prefix}.bin", f"{prefix}.idx") if os.path.isfile(path))
    with ProgressLine("verifying", total, closing=False) as progress:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            progress.update(done, **{"MB/s": round(done / 1e6 / max(time.monotonic() - started, 1e-9))})

        found = verify(prefix, vocabulary, tick)
    rate = found.bytes / 1e6 / max(time.monotonic() - started, 1e-9)
    told = f"whole as far as can be told without {Path(prefix).name}.json" if found.unchecked else "whole"
    missing = f"; not checked: {', '.join(found.unchecked)}" if found.unchecked else ""
    say(
        f"{prefix}: {told}: {found.documents:,} documents, {found.tokens:,} tokens of {found.dtype}, "
        f"{found.bytes / 1e6:,.1f} MB at {rate:,.0f} MB/s{missing}"
    )
