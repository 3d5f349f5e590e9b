"""Writer and memory-mapped reader of megatron-core's .bin and .idx format.

megatron-core's own builder keeps lengths and pointers as Python lists (100 bytes and a microsecond
per document) and imports torch. This one uses arrays; the tests open its files with megatron-core.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megaenc.errors import InputError

# The .idx: this header, int32 lengths and int64 byte pointers of sequences, int64 document indices.
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Magic, version, dtype code, sequences, document indices (documents + 1).
HEADER = struct.Struct("<9sQBQQ")
_PIECE_BYTES = 1 << 24  # of a .bin, copied at a time
_READERS = 32  # threads of `read_entries`, which hide the latency of a network file system
# By megatron-core's code.
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def token_dtype(vocab_size: int) -> str:
    """Return the name of the dtype of stored token ids, as megatron-core chooses it.

    `uint16` for a `vocab_size` below 65,500, else `int32`.
    """
    return "uint16" if vocab_size < 65_500 else "int32"


@dataclass(frozen=True)
class IndexArrays:
    """Memory-mapped arrays of an .idx, of S sequences in D documents.

    `lengths`, int32[S], and `pointers`, int64[S], are the length of each sequence in tokens and its
    byte offset in the .bin; `documents`, int64[D + 1], is the first sequence of each document, then
    S. `map` opens a file. The arrays are unaligned, and many NumPy functions copy unaligned arrays:
    pass slices.
    """

    lengths: np.ndarray
    """int32[S], length of each sequence in tokens."""
    pointers: np.ndarray
    """int64[S], byte offset of each sequence in the .bin."""
    documents: np.ndarray
    """int64[D + 1], first sequence of each document, then S."""

    @classmethod
    def map(cls, path: str | Path, mode: Literal["r", "r+"] = "r") -> "IndexArrays":
        """Return the memory-mapped arrays of the .idx at `path`.

        Its header and size must have been checked. With `mode` "r+", assignments to the arrays
        change the file.
        """
        with open(path, "rb") as stream:
            *_, sequences, indices = HEADER.unpack(stream.read(HEADER.size))
        arrays = []
        offset = HEADER.size
        for kind, count in ((np.int32, sequences), (np.int64, sequences), (np.int64, indices)):
            arrays.append(np.memmap(path, dtype=kind, mode=mode, offset=offset, shape=(count,)))
            offset += arrays[-1].nbytes
        return cls(*arrays)


def read_entries(path: str | Path, array: np.memmap, indices: np.ndarray) -> np.ndarray:
    """Return entries of a memory-mapped int64 array without mapping their pages.

    It is for few entries far apart: a mapping would read the pages in between, too.

    Args:
        path: File that `array` maps.
        array: Array as it was mapped, int64, not a slice.
        indices: int64[n], indices of the entries, in any order; bounds are not checked.

    Returns:
        int64[n], the entries in the order of `indices`, read-only.
    """
    starts = np.array_split(array.offset + 8 * indices, _READERS)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(part: np.ndarray) -> bytes:
        return b"".join([os.pread(descriptor, 8, start) for start in part.tolist()])

    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        with ThreadPoolExecutor(_READERS) as pool:
            return np.frombuffer(b"".join(pool.map(read, starts)), np.int64)
    finally:
        os.close(descriptor)


class IndexedWriter:
    """Writer of one corpus: the .bin as documents are added, the .idx at the end.

    `IndexedWriter(bin_path, idx_path, dtype)` takes the name of one of TOKEN_TYPES, as from
    `token_dtype`; `open_writers` builds several and closes them. `documents`, `sequences` and
    `tokens` count what `add_documents` and `append_corpus` have added. The files are written in
    place, not atomically: the constructor empties an existing .bin, and only `finish` writes the
    .idx.
    """

    def __init__(self, bin_path: Path, idx_path: Path, dtype: str) -> None:
        """Open the .bin, which is emptied if it exists.

        `dtype` is the name of one of TOKEN_TYPES, as from `token_dtype`.
        """
        self._bin_path = bin_path
        self._idx_path = idx_path
        self._dtype = np.dtype(dtype)
        self._stream = open(bin_path, "wb")  # noqa: SIM115 - closed by `close`, used across calls
        self._hash = hashlib.sha256()
        self._lengths: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self.documents = 0
        self.sequences = 0
        self.tokens = 0

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Append documents to the .bin and record their lengths for the .idx.

        Nothing is checked, and token ids beyond the writer's dtype wrap around.

        Args:
            tokens: Integers [sum(lengths)], the documents concatenated.
            lengths: int32[sequences], length of each sequence, at least 1.
            counts: int32[documents], number of sequences of each document, at least 1.
        """
        self._write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._record_lengths(lengths, counts)

    def append_corpus(
        self, bin_path: Path, idx_path: Path, sha256: dict[str, str], keep: np.ndarray | None = None
    ) -> None:
        """Append the documents of a finished .bin and .idx of the same dtype, not checked.

        Args:
            bin_path: The .bin to read.
            idx_path: The .idx to read.
            sha256: Hashes of both files in hex under `bin` and `idx`, as `finish` of their writer
                returned them.
            keep: bool[documents], True for those to append; None: all.

        Raises:
            InputError: A file does not have the hash in `sha256`. The .bin is hashed while it is
                copied, so this writer must then not be finished.
        """
        index = idx_path.read_bytes()
        _check_sha256(idx_path, hashlib.sha256(index), sha256["idx"])
        _, _, _, sequences, indices = HEADER.unpack_from(index)
        # A view would keep all of `index` alive.
        lengths = np.frombuffer(index, np.int32, sequences, HEADER.size).copy()
        first_sequences = np.frombuffer(index, np.int64, indices, HEADER.size + 12 * sequences)
        keep = np.ones(len(first_sequences) - 1, bool) if keep is None else keep
        counts = np.diff(first_sequences)
        keep_sequences = np.repeat(keep, counts)
        # int64[runs, 2], first byte and end of each run of sequences to append.
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        changes = np.flatnonzero(np.diff(np.concatenate([[False], keep_sequences, [False]])))
        runs = ends[changes].reshape(-1, 2) * self._dtype.itemsize
        hashed = hashlib.sha256()
        start = 0
        # Hashing is most of the work.
        with open(bin_path, "rb") as stream, ThreadPoolExecutor(1) as pool:
            while data := stream.read(_PIECE_BYTES):
                check = pool.submit(hashed.update, data)
                view = memoryview(data)
                stop = start + len(data)
                first = np.searchsorted(runs[:, 1], start, "right")
                last = np.searchsorted(runs[:, 0], stop)
                for low, high in runs[first:last].tolist():
                    self._write(view[max(low - start, 0) : high - start])
                start = stop
                check.result()
        _check_sha256(bin_path, hashed, sha256["bin"])
        self._record_lengths(lengths[keep_sequences], counts[keep])

    def _write(self, data: memoryview | bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)

    def _record_lengths(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Record sequence lengths and sequences per document for the .idx."""
        if not len(counts):
            return
        self._lengths.append(np.ascontiguousarray(lengths, dtype=np.int32))
        self._counts.append(np.ascontiguousarray(counts, dtype=np.int32))
        self.documents += len(counts)
        self.sequences += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))

    def finish(self) -> dict[str, str]:
        """Close the .bin and write the .idx.

        Returns:
            The sha256 of both files in hex under `bin` and `idx`.
        """
        self.close()
        hashed = hashlib.sha256()
        with open(self._idx_path, "wb") as stream:
            for part in self._index_parts():
                stream.write(part)
                hashed.update(part)
        return {"bin": self._hash.hexdigest(), "idx": hashed.hexdigest()}

    def _index_parts(self) -> Iterator[bytes | memoryview]:
        """Yield the parts of the .idx in order.

        These are the header, lengths and first bytes of the sequences, and first sequences of the
        documents.
        """
        code = next(code for code, kind in TOKEN_TYPES.items() if self._dtype == kind)
        yield HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1)
        for lengths in self._lengths:
            yield lengths.data
        start = np.int64(0)
        for lengths in self._lengths:
            ends = start + np.cumsum(lengths, dtype=np.int64)
            yield ((ends - lengths) * self._dtype.itemsize).data
            start = ends[-1]
        sequence_end = np.int64(0)
        yield sequence_end.tobytes()
        for counts in self._counts:
            sequence_ends = sequence_end + np.cumsum(counts, dtype=np.int64)
            yield sequence_ends.data
            sequence_end = sequence_ends[-1]

    def close(self) -> None:
        """Close the .bin without writing the .idx; may be called again."""
        self._stream.close()


@contextlib.contextmanager
def open_writers(files: Sequence[Path], dtype: str) -> Iterator[list[IndexedWriter]]:
    """Yield one IndexedWriter per corpus, and close them after the `with` block.

    Each .bin is emptied at once. The block must finish the writers (`IndexedWriter.finish`); else
    no .idx is written, and an old one stays: write to temporary paths to replace a corpus.

    Args:
        files: Every .bin to write, then every .idx in the same order.
        dtype: Name of the token dtype, as from `token_dtype`.
    """
    with contextlib.ExitStack() as stack:
        writers = []
        half = len(files) // 2
        for bin_path, idx_path in zip(files[:half], files[half:], strict=True):
            writer = IndexedWriter(bin_path, idx_path, dtype)
            stack.callback(writer.close)
            writers.append(writer)
        yield writers


def _check_sha256(path: Path, actual: Any, expected: str) -> None:
    """Raise InputError unless the file at `path` has the digest `expected`.

    `actual` is the hash object of its contents.
    """
    if actual.hexdigest() != expected:
        raise InputError(
            f"{path}: sha256 is {actual.hexdigest()[:12]}, expected {expected[:12]}; "
            "the file has changed since it was written"
        )
