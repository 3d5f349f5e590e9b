"""Documents out of bytes: JSONL and plain text, read in blocks of whole lines, paragraphs or files.

Reading is cheap and done by one process; a block is then parsed wherever there is a processor to spare.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic_core import from_json

from megaenc.data.compression import BROKEN, opened
from megaenc.errors import InputError

BLOCK_BYTES = 1 << 20
LINES_BYTES = 1 << 22  # of lines at a time: gigatoken is a third slower with a megabyte

# What is often taken for text, by its first bytes.
_FOREIGN = {
    b"\xfd7zXZ\x00": "xz-compressed data",
    b"BZh": "bzip2-compressed data",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x04\x22\x4d\x18": "lz4-compressed data",
}


@dataclass(frozen=True)
class Documents:
    """The documents of one block."""

    texts: list[tuple[str, ...]]
    """One tuple a document, in the order of the keys asked for."""
    skipped: int
    """Bad documents left out."""
    size: int
    """Bytes that were parsed, decompressed."""


class Block(ABC):
    """A run of documents that has been found but not parsed; small enough for memory, and it pickles."""

    position: int
    """Bytes on disk (compressed) read so far, over the whole input: what progress is measured in."""

    @abstractmethod
    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """Parse the block. Raises InputError `file:line: ...` for a bad document, unless such are to be skipped."""


@dataclass(frozen=True)
class Lines(Block):
    """Whole lines of one JSONL file."""

    path: str
    range_start: int
    """Byte where reading began: the lines before it are counted only if an error has to name one."""
    first_line: int
    """Number of the first line, counted from 1 at `range_start`."""
    data: bytes
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """One document a line, blank ones aside: the texts under `keys`."""
        texts, skipped = [], 0
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if (found := _quick_texts(line, keys)) is not None:
                texts.append(found)
                continue
            if not line or line.isspace():
                continue
            try:
                texts.append(_json_texts(line, keys))
            except InputError as error:
                if not skip_bad:
                    number += _lines_before(self.path, self.range_start)
                    raise InputError(f"{self.path}:{number}: {error}") from None
                skipped += 1
        return Documents(texts, skipped, len(self.data))


@dataclass(frozen=True)
class TextLines(Block):
    """Whole lines or paragraphs of one text file, each a document."""

    path: str
    range_start: int
    first_line: int
    data: bytes
    position: int
    paragraphs: bool

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """A document a line or paragraph that is not blank, without its line end; the text is the same under every key."""
        texts, skipped, together = [], 0, []
        # A line feed ends a line and nothing else does: the others of Unicode are characters of the text.
        for number, line in enumerate([*self.data.split(b"\n"), b""], self.first_line):
            if self.paragraphs and line and not line.isspace():
                together.append(line)
                continue
            found = b"\n".join(together) if self.paragraphs else line
            first, together = number - len(together), []
            found = found.removesuffix(b"\r")
            if not found or found.isspace():
                continue
            try:
                texts.append((_decoded(found, "utf-8-sig" if first == 1 and not self.range_start else "utf-8"),) * len(keys))
            except InputError as error:
                if not skip_bad:
                    first += _lines_before(self.path, self.range_start)
                    raise InputError(f"{self.path}:{first}: {error}") from None
                skipped += 1
        return Documents(texts, skipped, len(self.data))


@dataclass(frozen=True)
class TextFiles(Block):
    """Some text files, each a document; opened where they are parsed."""

    paths: tuple[str, ...]
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """The text of each file exactly as it is, the same under every key; a byte order mark at its start is left out."""
        texts, skipped, size = [], 0, 0
        for path in self.paths:
            with opened(path) as (_, stream):
                data = stream.read()
            size += len(data)
            try:
                texts.append((_decoded(data),) * len(keys))
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{path}: {error}") from None
                skipped += 1
        return Documents(texts, skipped, size)


def read_lines(path: str, start: int = 0, stop: int | None = None, before: int = 0) -> Iterator[Lines]:
    """Yield the lines of a JSONL file that begin in bytes start..stop-1, in blocks of about LINES_BYTES or one long line.

    `start` is the beginning of a line; only a file that is not compressed can be read in part. `before` is added to positions.
    """
    for first_line, data, position in _read(path, start, stop, paragraphs=False):
        yield Lines(path, start, first_line, data, before + position)


def read_text_lines(
    path: str, start: int = 0, stop: int | None = None, before: int = 0, *, paragraphs: bool
) -> Iterator[TextLines]:
    """As `read_lines`, but of a text file, in blocks of whole lines or of whole paragraphs (which blank lines part)."""
    for first_line, data, position in _read(path, start, stop, paragraphs):
        yield TextLines(path, start, first_line, data, before + position, paragraphs)


def line_start(path: str, offset: int) -> int:
    """The first byte at or after `offset` of a file, uncompressed, where a line begins (or the file's end)."""
    if offset <= 0:
        return 0
    with opened(path) as (raw, _):
        raw.seek(offset - 1)
        while (piece := raw.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
            pass  # a line may be longer than memory should hold
        return raw.tell()


def texts_of(record: Any, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts under `keys` in one record (a mapping). Raises InputError for a missing key or another type."""
    for key in keys:
        if key not in record:
            raise InputError(f"no key `{key}`; found {listed(record)}")
        if not isinstance(record[key], str):
            value = record[key]
            shown = json.dumps(value) if isinstance(value, (int, float, list, dict, bool, type(None))) else repr(value)
            raise InputError(f"key `{key}`: found {shown[:40]}, expected text")
    return tuple(record[key] for key in keys)


def listed(names: Sequence[str]) -> str:
    """The first names of a record's keys or a table's columns, for an error message."""
    return ", ".join(f"`{name}`" for name in list(names)[:8]) or "no key at all"


def _read(path: str, start: int, stop: int | None, paragraphs: bool) -> Iterator[tuple[int, bytes, int]]:
    """(number of the first line, the bytes of whole lines or paragraphs, bytes on disk read so far)."""
    first_line = 1
    with opened(path) as (raw, stream):
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
                if paragraphs:
                    data += _rest_of_paragraph(stream)
                if left is not None:
                    left -= len(data)
                    if left < 0 or not data:  # `stop` was the file's end or the start of a line
                        found = "the end of the file before" if left > 0 else "a line that goes on after"
                        raise InputError(
                            f"{path}: changed while it was read: found {found} byte {stop}; start again when nothing writes to it"
                        )
                yield first_line, data, raw.tell() if left is None else stop - left
                first_line += data.count(b"\n")
        except BROKEN as error:
            where = f" after line {first_line - 1}" if first_line > 1 else ""
            raise InputError(f"{path}: broken compressed data{where}: {error}; expected a whole file") from None


def _rest_of_paragraph(stream: BinaryIO) -> bytes:
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line.isspace():
            break
    return b"".join(lines)


def _lines_before(path: str, start: int) -> int:
    if not start:
        return 0
    count = 0
    with open(path, "rb") as stream:
        while start > 0 and (data := stream.read(min(BLOCK_BYTES, start))):
            count += data.count(b"\n")
            start -= len(data)
    return count


def _quick_texts(line: bytes, keys: Sequence[str]) -> tuple[str, ...] | None:
    """What `_json_texts` finds, in a third of the time; None where it has to be asked, as for everything that is wrong.

    What this parser takes Python's own takes too, and to the same effect; besides, that one takes a byte order mark and half a
    surrogate pair.
    """
    try:
        record = from_json(line, cache_strings="keys")
        texts = tuple([record[key] for key in keys])
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return texts if all([type(text) is str for text in texts]) and type(record) is dict else None


def _json_texts(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        record = json.loads(_decoded(line))
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg} at column {error.colno}): {_excerpt(line)}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested thousands deep
        raise InputError(f"not JSON that can be read ({type(error).__name__}): {_excerpt(line)}") from None
    if not isinstance(record, dict):
        raise InputError(f"found a JSON {type(record).__name__}, expected an object with the key `{keys[0]}`")
    return texts_of(record, keys)


def _decoded(data: bytes, encoding: str = "utf-8-sig") -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        kind = next((kind for start, kind in _FOREIGN.items() if data.startswith(start)), None)
        found = f"looks like {kind}; expected UTF-8, as it is or compressed with gzip or Zstandard: " if kind else ""
        raise InputError(f"{found}not UTF-8 (byte 0x{data[error.start]:02x} at position {error.start + 1})") from None


def _excerpt(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace").strip())
