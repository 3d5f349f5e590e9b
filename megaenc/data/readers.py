"""JSONL documents, streamed from plain, gzip or Zstandard files (told apart by their first bytes) in blocks of whole lines."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from megaenc.errors import InputError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Block:
    """Whole lines of one file."""

    path: str
    first_line: int
    """Number of the first line, counted from 1."""
    data: bytes
    position: int
    """Bytes read so far on disk (compressed), over all files: what progress is measured in."""


@dataclass(frozen=True)
class Documents:
    """The documents of one block."""

    texts: list[tuple[str, ...]]
    """One tuple a document, in the order of the keys asked for."""
    skipped: int
    """Bad lines left out."""


def input_bytes(paths: Sequence[str | Path]) -> int:
    """Total size on disk of the files. Raises InputError for one that is missing, empty or no file."""
    if not paths:
        raise InputError("--input: no file given, expected at least one JSONL file")
    total = 0
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(f"{path}: no such file; expected JSONL, plain or compressed with gzip or zstd")
        if not path.is_file():
            raise InputError(f"{path}: not a file; expected JSONL, plain or compressed with gzip or zstd")
        if path.stat().st_size == 0:
            raise InputError(f"{path}: is empty; expected one JSON object a line")
        total += path.stat().st_size
    return total


def read_blocks(paths: Sequence[str | Path], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the files one after the other in blocks of whole lines, each about `block_bytes` of text or one long line.

    Raises InputError for a file that cannot be read, or whose compression is broken or cut short.
    """
    before = 0
    for path in map(str, paths):
        first_line = 1
        try:
            with open(path, "rb") as raw, _decompressed(raw) as stream:
                while data := stream.read(block_bytes):
                    if not data.endswith(b"\n"):
                        data += stream.readline()
                    yield Block(path, first_line, data, before + raw.tell())
                    first_line += data.count(b"\n")
                before += raw.tell()
        except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: broken compressed data after line {first_line - 1}: {error}") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def parse_block(block: Block, keys: Sequence[str], *, skip_bad_lines: bool = False) -> Documents:
    """Read the texts under `keys` from every line that is not blank.

    Raises InputError `path:line: ...` for a line that is not a JSON object with text under each key, unless such lines are to
    be skipped.
    """
    texts, skipped = [], 0
    for offset, line in enumerate(block.data.split(b"\n")):
        if not line or line.isspace():
            continue
        try:
            texts.append(_texts(line, keys))
        except InputError as error:
            if not skip_bad_lines:
                raise InputError(f"{block.path}:{block.first_line + offset}: {error}") from None
            skipped += 1
    return Documents(texts, skipped)


def read_texts(paths: Sequence[str | Path], key: str) -> Iterator[str]:
    """Yield the text under `key` of every document. Raises InputError as `read_blocks` and `parse_block` do."""
    for block in read_blocks(paths):
        for (text,) in parse_block(block, [key]).texts:
            yield text


def _texts(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg} at column {error.colno}): {_excerpt(line)}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested thousands deep
        raise InputError(f"not JSON that can be read ({type(error).__name__}): {_excerpt(line)}") from None
    if not isinstance(record, dict):
        raise InputError(f"found a JSON {type(record).__name__}, expected an object with the key `{keys[0]}`")
    for key in keys:
        if key not in record:
            raise InputError(f"no key `{key}`; found {', '.join(f'`{name}`' for name in list(record)[:8]) or 'no key at all'}")
        if not isinstance(record[key], str):
            raise InputError(f"key `{key}`: found {json.dumps(record[key])[:40]}, expected text")
    return tuple(record[key] for key in keys)


def _excerpt(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace").strip())


def _decompressed(raw: BinaryIO) -> BinaryIO:
    start = raw.read(4)
    raw.seek(0)
    if start[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if start == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_ZstdFrames(raw), buffer_size=1 << 17)
    return io.BufferedReader(raw, buffer_size=1 << 17)


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
