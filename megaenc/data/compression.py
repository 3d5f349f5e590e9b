"""Files as they are or compressed with gzip or Zstandard, told apart by their first bytes."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from megaenc.errors import InputError

BROKEN = (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile)
"""What reading raises where compressed data is damaged or cut short."""


def is_compressed(path: str) -> bool:
    """Whether the file begins as gzip or Zstandard do. Raises InputError for one that cannot be read."""
    with opened(path) as (raw, _):
        return _kind(raw) is not None


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the file at `path`: (the file itself, whose `tell` is bytes on disk; its decompressed bytes).

    Raises InputError from inside the block for a file that cannot be read, or whose compression is broken or cut short.
    """
    try:
        with open(path, "rb") as raw:
            yield raw, _decompressed(raw)
    except BROKEN as error:
        raise InputError(f"{path}: broken compressed data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _kind(raw: BinaryIO) -> str | None:
    raw.seek(0)
    start = raw.read(4)
    raw.seek(0)
    return "gzip" if start[:2] == b"\x1f\x8b" else "zstd" if start == b"\x28\xb5\x2f\xfd" else None


def _decompressed(raw: BinaryIO) -> BinaryIO:
    kind = _kind(raw)
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    return io.BufferedReader(_ZstdFrames(raw), buffer_size=1 << 17) if kind == "zstd" else raw


class _ZstdFrames(io.RawIOBase):
    """The text of one or more Zstandard frames. zstandard's own reader takes a file cut short for a whole one; this does not."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._ready = memoryview(b"")
        self._frame = None
        self._unused = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            compressed = self._unused or self._raw.read(1 << 17)
            self._unused = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a Zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._ready = memoryview(self._frame.decompress(compressed))
            if self._frame.eof:
                self._unused, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
