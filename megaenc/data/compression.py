"""Files as they are or compressed with gzip or Zstandard, told apart by their first bytes."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from backports import zstd

from megaenc.errors import InputError

BROKEN = (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile)
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
    return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31}) if kind == "zstd" else raw
