"""A tokenised corpus on disk, PREFIX.bin and PREFIX.idx in Megatron's format, with the JSON that says how it was made."""

import glob
import hashlib
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megaenc import counter_rng
from megaenc.data.indexed.indexed_dataset import HEADER, MAGIC, TOKEN_TYPES, VERSION, IndexArrays
from megaenc.data.indexed.metadata import CorpusMetadata, read_sidecar, sidecar_path
from megaenc.data.packing.shared_memory import shared
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, LocalInputError

_FIRST_LOOK = 1 << 22  # tokens that `check_vocabulary` reads: some milliseconds, and enough to notice a wrong tokenizer
_FEW = 16  # documents of a pack that are read faster one by one than by a place for each token


class Corpus:
    """The documents of one corpus. A document is a span of the index's document indices, however many sequences it has.

    prefix: path without extension; sidecar: the JSON beside it, None for a corpus that Megatron's own tool wrote;
    document_lengths: int64[D] in tokens, zeros allowed; sequence_lengths: int32[S] in tokens; first_sequences: int64[D + 1],
    document d being the sequences first_sequences[d] up to first_sequences[d + 1].
    """

    def __init__(self, prefix: str, index: IndexArrays, token_type: type[np.number], sidecar: CorpusMetadata | None):
        self.prefix = prefix
        self.sidecar = sidecar
        self.first_sequences = np.asarray(index.documents)  # memory-mapped, as are the lengths
        self.sequence_lengths = np.asarray(index.lengths)
        status = os.stat(f"{prefix}.idx")
        self.key = (os.path.realpath(prefix), status.st_size, status.st_mtime_ns)
        """What is made of this corpus is `shared` under it."""
        self._starts: np.ndarray  # int64[D + 1]: of the documents in .bin, in tokens
        self.document_lengths: np.ndarray
        self._starts, self.document_lengths = shared((*self.key, "documents"), self._measured)
        # Pages of the file itself: whatever ranks of a machine read, it is in memory once.
        self._tokens = np.asarray(np.memmap(f"{prefix}.bin", dtype=token_type, mode="r"))
        self._id_limit: int | None = None

    def _measured(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.zeros(len(self.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, out=ends[1:])
        starts = ends[self.first_sequences]
        return starts, np.diff(starts)

    @classmethod
    def open(cls, prefix: str | Path) -> "Corpus":
        """Open PREFIX.bin and PREFIX.idx without reading the tokens.

        Raises InputError for a missing, foreign or truncated file, and for a PREFIX.json that does not describe the two.
        """
        prefix = str(prefix)
        token_type = check_index(prefix)
        index = IndexArrays.map(f"{prefix}.idx")
        check_contents(prefix, index, token_type)
        sidecar = read_sidecar(prefix) if sidecar_path(prefix).exists() else None
        if sidecar is not None:
            counts = {"documents": len(index.documents) - 1, "sequences": len(index.lengths)}
            tokens = int(index.lengths.sum(dtype=np.int64))
            check_sidecar(prefix, sidecar, **counts, tokens=tokens, token_type=token_type)
        return cls(prefix, index, token_type, sidecar)

    @property
    def fingerprint(self) -> str:
        """Equal for equal corpora, wherever they are: the sidecar's sha256 of the tokens.

        Without a sidecar it is a hash of the index and of the first and last megabyte of tokens.
        """
        if self.sidecar is not None:
            return self.sidecar.sha256["bin"]
        digest = hashlib.sha256(Path(f"{self.prefix}.idx").read_bytes())
        with open(f"{self.prefix}.bin", "rb") as tokens:
            digest.update(tokens.read(1 << 20))
            tokens.seek(max(0, tokens.seek(0, 2) - (1 << 20)))
            digest.update(tokens.read())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_lengths)

    @property
    def sequences(self) -> int:
        """Number of sequences; as many as documents unless these are cut, say into sentences."""
        return len(self.sequence_lengths)

    @property
    def dtype(self) -> str:
        """How the .bin stores a token id, say `uint16`."""
        return self._tokens.dtype.name

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int64[stop - start]: tokens start..stop-1 of `document`, a copy.

        Raises InputError for a token id outside the vocabulary given to `check_vocabulary`.
        """
        if start == stop:
            return np.empty(0, dtype=np.int64)
        return self.joined(np.array([document]), np.array([start]), np.array([stop]))

    def joined(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """int64[sum(stops - starts)]: of each of `documents` its tokens starts..stops-1, at least one, end to end, a copy.

        Raises InputError for a token id outside the vocabulary given to `check_vocabulary`.
        """
        # The sequences of a document lie one after the other in .bin, so that one read may run across them.
        begins, counts = self._starts[documents] + starts, stops - starts
        if len(documents) <= _FEW:
            slices = zip(begins.tolist(), (begins + counts).tolist(), strict=True)
            found = np.concatenate([self._tokens[begin:end] for begin, end in slices], dtype=np.int64)
        else:
            places = np.repeat(begins - np.cumsum(counts) + counts, counts)
            places += np.arange(len(places))
            found = self._tokens[places].astype(np.int64)
        if self._id_limit is not None and int(found.view(np.uint64).max()) >= self._id_limit:
            for document, piece in zip(documents, np.split(found, np.cumsum(counts)[:-1]), strict=True):
                self._check_ids(piece, f"document {document}", LocalInputError)
        return found

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Raise InputError unless the corpus was made with the tokenizer behind `vocabulary` and its ids are within it.

        The start of the corpus is looked through here; every id handed out later is checked as it is read.
        """
        if self.sidecar is not None:
            check_tokenizer(self.prefix, self.sidecar, vocabulary)
        self._id_limit = vocabulary.size
        count = min(_FIRST_LOOK, int(self.document_lengths.sum()))
        self._check_ids(self._tokens[:count].astype(np.int64), "the start")

    def _check_ids(self, found: np.ndarray, where: str, error: type[InputError] = InputError) -> None:
        # As unsigned numbers negative ids are huge: one comparison finds both kinds.
        if int(found.view(np.uint64).max()) >= self._id_limit:
            wrong = found[(found < 0) | (found >= self._id_limit)]
            raise error(
                f"{self.prefix}.bin: {where} holds token id {wrong[0]}, "
                f"expected 0 to {self._id_limit - 1} (the model's vocabulary)"
            )


def check_index(prefix: str) -> type[np.number]:
    """The token type of a corpus whose .idx has a sound header and the size that follows from it, and whose .bin is not empty.

    Raises InputError. Cheap: it reads the header and asks for sizes.
    """
    for extension in (".idx", ".bin"):
        if not os.path.isfile(prefix + extension):  # unlike Path's, False for a name that is too long
            raise InputError(
                f"{prefix}{extension}: no such file; expected the prefix of a .bin and an .idx file{_nearby(prefix)}"
            )
    try:
        found_bytes, bin_bytes = (os.stat(prefix + extension).st_size for extension in (".idx", ".bin"))
        with open(f"{prefix}.idx", "rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise InputError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None
    if found_bytes < HEADER.size:
        raise InputError(f"{prefix}.idx: truncated: found {found_bytes} bytes, expected a header of {HEADER.size}")
    magic, version, code, sequences, indices = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise InputError(f"{prefix}.idx: found header {magic!r}, version {version}; expected {MAGIC!r}, version {VERSION}")
    if code not in TOKEN_TYPES:
        raise InputError(f"{prefix}.idx: found dtype code {code}, expected one of an integer type ({sorted(TOKEN_TYPES)})")
    expected_bytes = HEADER.size + 12 * sequences + 8 * indices  # int32 lengths, int64 pointers, int64 document indices
    if found_bytes != expected_bytes:
        wrong = "truncated" if found_bytes < expected_bytes else "too long for a text corpus"
        raise InputError(f"{prefix}.idx: {wrong}: found {found_bytes} bytes, expected {expected_bytes} for {sequences} sequences")
    if bin_bytes == 0 or indices < 2 or sequences < 1:
        raise InputError(f"{prefix}.bin: found no tokens, expected at least one document with text")
    return TOKEN_TYPES[code]


def check_contents(prefix: str, index: IndexArrays, token_type: type[np.number]) -> None:
    """Raise InputError unless the sequences in `index`, which `check_index` passed, lie end to end and fill the .bin."""
    size = np.dtype(token_type).itemsize
    lengths, indices, pointers = index.lengths, index.documents, index.pointers
    # Differences of numbers from 0 on cannot overflow.
    if lengths.min() < 0 or indices[0] != 0 or indices.min() < 0 or np.diff(indices).min() < 0:
        raise InputError(f"{prefix}.idx: found sequences or documents of negative length; the file is damaged")
    if indices[-1] != len(lengths):
        raise InputError(f"{prefix}.idx: its document indices do not end at its last sequence; the file is damaged")
    expected_bytes = int(lengths.sum(dtype=np.int64)) * size
    check_bin_size(prefix, expected_bytes)
    if pointers[0] != 0 or int(pointers[-1]) + int(lengths[-1]) * size != expected_bytes:
        raise InputError(f"{prefix}.idx: its sequences do not lie end to end in .bin; the file is damaged")


def check_bin_size(prefix: str, expected_bytes: int) -> None:
    """Raise InputError unless the .bin has the size that follows from the lengths in the .idx."""
    found_bytes = Path(f"{prefix}.bin").stat().st_size
    if found_bytes != expected_bytes:
        wrong = "truncated" if found_bytes < expected_bytes else "too long"
        raise InputError(f"{prefix}.bin: {wrong}: found {found_bytes} bytes, expected {expected_bytes} (by the lengths in .idx)")


def check_sidecar(
    prefix: str, sidecar: CorpusMetadata, *, documents: int, sequences: int, tokens: int, token_type: type[np.number]
) -> None:
    """Raise InputError unless the sidecar's counts and sizes are those of the .bin and .idx beside it."""
    found = {
        "documents": documents,
        "sequences": sequences,
        "tokens": tokens,
        "dtype": np.dtype(token_type).name,
        "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
    }
    for field, value in found.items():
        if getattr(sidecar, field) != value:
            raise InputError(
                f"{prefix}.json: field `{field}`: found {getattr(sidecar, field)}, expected {value} "
                "(what the .bin and .idx beside it hold); the three files do not belong together"
            )


def check_tokenizer(prefix: str, sidecar: CorpusMetadata, vocabulary: Vocabulary) -> None:
    """Raise InputError unless the tokenizer behind `vocabulary` is the one that the sidecar names and has ids for all."""
    made_with = sidecar.tokenizer
    if made_with.fingerprint != vocabulary.fingerprint:
        raise InputError(
            f"{prefix}.json: corpus was made with another tokenizer: found `{made_with.name}` "
            f"({made_with.fingerprint[:12]}), expected the one given with --tokenizer ({vocabulary.fingerprint[:12]})"
        )
    if sidecar.vocab_size > vocabulary.size:
        raise InputError(
            f"{prefix}.json: field `vocab_size`: found {sidecar.vocab_size}, "
            f"expected at most the model's vocabulary of {vocabulary.size}"
        )


def _nearby(prefix: str) -> str:
    """A hint for a prefix that misses: an extension too much, or without the `_KEY_document` that preprocessing appends."""
    path = Path(prefix)
    if path.suffix in (".bin", ".idx", ".json") and path.with_suffix(".idx").is_file():
        return f"; did you mean `{path.with_suffix('')}`?"
    others = sorted(path.parent.glob(glob.escape(path.name) + "*.idx")) if path.name and path.parent.is_dir() else []
    return f"; did you mean `{others[0].with_suffix('')}`?" if others else ""


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """`99,1,0` as the weights of training, validation and test documents. Raises InputError."""
    try:
        # An exponent of many digits would make a number that fills the memory.
        weights = () if re.search(r"[eE][+-]?\d{4}", text) else tuple(Fraction(part.strip()) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        weights = ()
    if len(weights) != 3 or min(weights) < 0 or sum(weights) == 0:
        raise InputError(f"--split: found `{text}`, expected three weights, training, validation and test, such as 99,1,0")
    return weights


def split_documents(count: int, fractions: tuple[Any, Any, Any] = (99, 1, 0)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents 0..count-1 as (training, validation, test): int64 arrays, each sorted, together every document once.

    `fractions` are weights in any unit. The split belongs to the corpus, not to the run: no seed changes it. A part whose
    weight is not zero gets at least one document as long as there are enough.
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
