"""Documents out of bytes: JSONL and plain text, read in blocks of whole lines, paragraphs or files.

Files are as they are or compressed with gzip or Zstandard, told apart by their first bytes. Reading is cheap and done by one
process; a block is then parsed wherever there is a processor to spare.
"""

import contextlib
import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

from backports import zstd
from pydantic_core import from_json

from megaenc.errors import InputError

BLOCK_BYTES = 1 << 20
LINES_BYTES = 1 << 22  # of lines at a time: gigatoken is a third slower with a megabyte

# What is often taken for text, by its first bytes.
_FOREIGN_FORMATS = {
    b"\xfd7zXZ\x00": "xz-compressed data",
    b"BZh": "bzip2-compressed data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x04\x22\x4d\x18": "lz4-compressed data",
}
_COMPRESSION_ERRORS = (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile)  # of compressed data, damaged or cut short


class ParsedDocuments(NamedTuple):
    """The documents of one block."""

    texts: list[tuple[str, ...]]
    """One tuple a document, in the order of the keys asked for."""
    skipped: int
    """Bad documents left out."""


class TextBlock(ABC):
    """A run of documents that has been found but not parsed; small enough for memory, and it pickles."""

    position: int
    """Bytes on disk (compressed) read so far, over the whole input: what progress is measured in."""
    data: bytes

    @property
    def size(self) -> int:
        """Bytes to parse, decompressed."""
        return len(self.data)

    def documents(self, keys: Sequence[str], skip_bad: bool) -> ParsedDocuments:
        """Parse the block. Raises InputError `file:line: ...` for a bad document, unless such are to be skipped."""
        texts, skipped = [], 0
        for number, found in self._parsed(keys):
            if not isinstance(found, InputError):
                texts.append(found)
            elif skip_bad:
                skipped += 1
            else:
                raise InputError(f"{self._place(number)}: {found}")
        return ParsedDocuments(texts, skipped)

    @abstractmethod
    def _parsed(self, keys: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        """Yield the number of each document and its texts under `keys`, or what is wrong with it."""

    @abstractmethod
    def _place(self, number: int) -> str:
        """The file and line of a document, for an error."""


@dataclass(frozen=True)
class LineBlock(TextBlock):
    """Whole lines of one JSONL file; or lines or paragraphs of a text file, whose text is the same under every key."""

    path: str
    range_start: int
    """Byte where reading began: the lines before it are counted only if an error has to name one."""
    first_line: int
    """Number of the first line, counted from 1 at `range_start`."""
    data: bytes
    position: int
    sample_by: str | None = None
    """line or paragraph for text, None for JSONL."""

    def _parsed(self, keys: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        for number, line in self._pieces():
            if self.sample_by is None and (found := _parse_json_fast(line, keys)) is not None:
                yield number, found
            elif line and not line.isspace():
                try:
                    yield number, _parse_json(line, keys) if self.sample_by is None else (self._text(number, line),) * len(keys)
                except InputError as error:
                    yield number, error

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """The number and bytes of each line, or of each paragraph by its first line."""
        # A line feed ends a line and nothing else does: the others of Unicode are characters of the text.
        lines = enumerate(self.data.split(b"\n"), self.first_line)
        if self.sample_by != "paragraph":
            return lines
        paragraphs = (list(group) for is_blank, group in groupby(lines, lambda line: not line[1].strip()) if not is_blank)
        return ((group[0][0], b"\n".join(line for _, line in group)) for group in paragraphs)

    def _text(self, number: int, line: bytes) -> str:
        first = number == 1 and not self.range_start
        return _decode(line.removesuffix(b"\r"), "utf-8-sig" if first else "utf-8")

    def _place(self, number: int) -> str:
        return f"{self.path}:{number + _count_lines_before(self.path, self.range_start)}"


@dataclass(frozen=True)
class FileBlock(TextBlock):
    """Some text files, each a document with the same text under every key; opened where they are parsed."""

    paths: tuple[str, ...]
    position: int

    @cached_property
    def _contents(self) -> list[bytes]:
        contents = []
        for path in self.paths:
            with open_decompressed(path) as (_, stream):
                contents.append(stream.read())
        return contents

    @property
    def size(self) -> int:
        return sum(map(len, self._contents))

    def _parsed(self, keys: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        for number, content in enumerate(self._contents):
            try:
                yield number, (_decode(content),) * len(keys)  # exactly as it is, but for a byte order mark at its start
            except InputError as error:
                yield number, error

    def _place(self, number: int) -> str:
        return self.paths[number]


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the file at `path`: (the file itself, whose `tell` is bytes on disk; its decompressed bytes).

    Raises InputError from inside the block for a file that cannot be read, or whose compression is broken or cut short.
    """
    try:
        with open(path, "rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            if start[:2] == b"\x1f\x8b":
                yield raw, gzip.GzipFile(fileobj=raw, mode="rb")
            elif start == b"\x28\xb5\x2f\xfd":
                yield raw, zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31})
            else:
                yield raw, raw
    except _COMPRESSION_ERRORS as error:
        raise InputError(f"{path}: broken compressed data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def is_compressed(path: str) -> bool:
    """Return whether the file begins as gzip or Zstandard do. Raises InputError for one that cannot be read."""
    with open_decompressed(path) as (raw, content):
        return content is not raw


def read_line_blocks(
    path: str, start: int = 0, stop: int | None = None, before: int = 0, sample_by: str | None = None
) -> Iterator[LineBlock]:
    """Yield the lines of a file that begin in bytes start..stop-1, in blocks of about LINES_BYTES or one long line.

    `start` is the beginning of a line; only a file that is not compressed can be read in part. `before` is added to positions.
    `sample_by`: as of Lines; blocks are of whole paragraphs (which blank lines part) if these are documents.
    """
    first_line = 1
    with open_decompressed(path) as (raw, stream):
        if start:
            stream.seek(start)
        left = None if stop is None else stop - start
        try:
            while left is None or left > 0:
                data = stream.read(LINES_BYTES if left is None else min(LINES_BYTES, left))
                if not data and left is None:
                    break
                if not data.endswith(b"\n"):
                    data += stream.readline()
                if sample_by == "paragraph":
                    data += _read_rest_of_paragraph(stream)
                if left is not None:
                    left -= len(data)
                    if left < 0 or not data:  # `stop` was the file's end or the start of a line
                        found = "the end of the file before" if left > 0 else "a line that goes on after"
                        raise InputError(
                            f"{path}: changed while it was read: found {found} byte {stop}; start again when nothing writes to it"
                        )
                yield LineBlock(path, start, first_line, data, before + (raw.tell() if left is None else stop - left), sample_by)
                first_line += data.count(b"\n")
        except _COMPRESSION_ERRORS as error:
            where = f" after line {first_line - 1}" if first_line > 1 else ""
            raise InputError(f"{path}: broken compressed data{where}: {error}; expected a whole file") from None


def find_line_start(path: str, offset: int) -> int:
    """The first byte at or after `offset` of a file, uncompressed, where a line begins (or the file's end)."""
    if offset <= 0:
        return 0
    with open_decompressed(path) as (raw, _):
        raw.seek(offset - 1)
        while (piece := raw.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
            pass  # a line may be longer than memory should hold
        return raw.tell()


def extract_texts(record: Any, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts under `keys` in one record (a mapping). Raises InputError for a missing key or another type."""
    for key in keys:
        if key not in record:
            raise InputError(f"no key `{key}`; found {format_names(record)}")
        if not isinstance(record[key], str):
            value = record[key]
            shown = json.dumps(value) if isinstance(value, (int, float, list, dict, bool, type(None))) else repr(value)
            raise InputError(f"key `{key}`: found {shown[:40]}, expected text")
    return tuple(record[key] for key in keys)


def format_names(names: Sequence[str]) -> str:
    """The first names of a record's keys or a table's columns, for an error message."""
    return ", ".join(f"`{name}`" for name in list(names)[:8]) or "no key at all"


def _read_rest_of_paragraph(stream: BinaryIO) -> bytes:
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line.isspace():
            break
    return b"".join(lines)


def _count_lines_before(path: str, start: int) -> int:
    if not start:
        return 0
    count = 0
    with open(path, "rb") as stream:
        while start > 0 and (data := stream.read(min(BLOCK_BYTES, start))):
            count += data.count(b"\n")
            start -= len(data)
    return count


def _parse_json_fast(line: bytes, keys: Sequence[str]) -> tuple[str, ...] | None:
    """What `_parse_json` finds, in a third of the time; None where it has to be asked, as for everything that is wrong.

    What this parser takes Python's own takes too, and to the same effect; besides, that one takes a byte order mark and half a
    surrogate pair.
    """
    try:
        record = from_json(line, cache_strings="keys")
        texts = tuple([record[key] for key in keys])
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return texts if all([type(text) is str for text in texts]) and type(record) is dict else None


def _parse_json(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        record = json.loads(_decode(line))
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg} at column {error.colno}): {_format_excerpt(line)}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested thousands deep
        raise InputError(f"not JSON that can be read ({type(error).__name__}): {_format_excerpt(line)}") from None
    if not isinstance(record, dict):
        raise InputError(f"found a JSON {type(record).__name__}, expected an object with the key `{keys[0]}`")
    return extract_texts(record, keys)


def _decode(data: bytes, encoding: str = "utf-8-sig") -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        kind = next((kind for start, kind in _FOREIGN_FORMATS.items() if data.startswith(start)), None)
        found = f"looks like {kind}; expected UTF-8, as it is or compressed with gzip or Zstandard: " if kind else ""
        raise InputError(f"{found}not UTF-8 (byte 0x{data[error.start]:02x} at position {error.start + 1})") from None


def _format_excerpt(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace").strip())
