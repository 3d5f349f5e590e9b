"""JSONL and plain text files, read as blocks of whole lines, paragraphs or files.

gzip and Zstandard are detected by a file's first bytes. One process reads blocks, which is cheap;
workers parse them.
"""

import codecs
import contextlib
import gzip
import io
import json
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json

from megaenc.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 1 << 20
LINES_BYTES = 1 << 22  # gigatoken is a third slower with 1 MiB

# Formats that are often mistaken for text, by their first bytes.
_FOREIGN_FORMATS = {
    b"\xfd7zXZ\x00": "xz-compressed data",
    b"BZh": "bzip2-compressed data",
    b"PK\x03\x04": "a zip archive",
    b"\x04\x22\x4d\x18": "lz4-compressed data",
}
_SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""First bytes of a Zstandard file that begins with other data, as pzstd writes them."""
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF8 = "utf-8"
# From damaged or truncated data.
_COMPRESSION_ERRORS = (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile)


class ParsedDocuments(NamedTuple):
    """NamedTuple of the documents of one parsed block: `texts` and `skipped`.

    `texts` has a tuple for each document, with one text for each requested key in order; `skipped`
    is the number of bad documents left out.
    """

    texts: list[tuple[str, ...]]
    """One tuple per document, with a text per requested key."""
    skipped: int
    """Number of bad documents left out."""


class TextBlock(ABC):
    """Base class of a block of unparsed documents: lines, table rows or whole files.

    It fits into memory and is picklable; `parse` returns its texts. `data` are its bytes, if it
    holds any. `position` is the number of bytes on disk (compressed) of the whole input up to the
    block's end, for progress. Subclasses implement `_parse_documents` and `_describe_location`.
    """

    position: int
    """Bytes on disk (compressed) of the whole input up to the block's end, for progress."""
    data: bytes

    @property
    def size(self) -> int:
        """Return the number of decompressed bytes of the block, which `parse` reads."""
        return len(self.data)

    def parse(
        self,
        keys: Sequence[str],
        skip_bad: bool,
        convert: Callable[[tuple[Any, ...]], tuple[Any, ...] | InputError] | None = None,
    ) -> ParsedDocuments:
        """Return the texts of each document under `keys`, and the number of bad documents.

        Blank lines are no documents; a text of a table or of JSON may be empty.

        Args:
            keys: JSON keys or columns, whose texts each document has in this order.
            skip_bad: Leave out and count bad documents instead of raising an error.
            convert: Function of the texts of a document that returns what takes their place, or
                the error of a bad document; None: they stay.

        Raises:
            InputError: A document is bad without `skip_bad` or a file unreadable; names the place.
        """
        texts = []
        skipped = 0
        for index, document in self._parse_documents(keys):
            if convert is not None and not isinstance(document, InputError):
                document = convert(document)
            if not isinstance(document, InputError):
                texts.append(document)
            elif skip_bad:
                skipped += 1
            else:
                raise InputError(f"{self._describe_location(index)}: {document}")
        return ParsedDocuments(texts, skipped)

    @abstractmethod
    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        """Yield the number of each document with its texts under `keys` or its error."""

    @abstractmethod
    def _describe_location(self, index: int) -> str:
        """Return the file and line of a document, for an error message."""


@dataclass(frozen=True)
class LineBlock(TextBlock):
    """Block of whole lines of a JSONL file, or of lines or paragraphs of a text file.

    `data` are the lines of the file `path`. `first_line` is the number of the first one, counted
    from 1 at byte `range_start`; the lines before that byte are counted only for an error message.
    `position` is that of TextBlock. `sample_by` is `line` or `paragraph` for text, which is the
    same under every key; None for JSONL.
    """

    path: str
    range_start: int
    """Byte at which reading began; the lines before it are counted only for an error message."""
    first_line: int
    """Number of the first line, counted from 1 at `range_start`."""
    data: bytes
    position: int
    sample_by: str | None = None
    """`line` or `paragraph` for text, which is the same under every key; None for JSONL."""

    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        for line_number, line in self._split():
            if self.sample_by is None and (texts := _parse_json_fast(line, keys)) is not None:
                yield line_number, texts
            elif line and not line.isspace():
                try:
                    if self.sample_by is None:
                        yield line_number, _parse_json(line, keys)
                    else:
                        encoding = (
                            "utf-8-sig" if line_number == 1 and not self.range_start else UTF8
                        )
                        yield (
                            line_number,
                            (decode_utf8(line.removesuffix(b"\r"), encoding),) * len(keys),
                        )
                except InputError as error:
                    yield line_number, error

    def _split(self) -> Iterator[tuple[int, bytes]]:
        """Return the number and bytes of each line or paragraph.

        The number of a paragraph is that of its first line.
        """
        is_start = self.first_line == 1 and not self.range_start
        data = self.data.removeprefix(codecs.BOM_UTF8) if is_start else self.data
        # Only line feeds end lines; Unicode's other line separators are text.
        lines = enumerate(data.split(b"\n"), self.first_line)
        if self.sample_by != "paragraph":
            return lines
        paragraphs = (
            list(group)
            for is_blank, group in groupby(lines, lambda line: not line[1].strip())
            if not is_blank
        )
        return ((group[0][0], b"\n".join(line for _, line in group)) for group in paragraphs)

    def _describe_location(self, index: int) -> str:
        return f"{self.path}:{index + _count_lines_before(self.path, self.range_start)}"


@dataclass(frozen=True)
class FileBlock(TextBlock):
    """Block of text files that are one document each, read only when parsed.

    `paths` are the files, in `encoding`, and `position` is that of TextBlock. The text is the same
    under every key.
    """

    paths: tuple[str, ...]
    position: int
    encoding: str = UTF8

    @cached_property
    def _contents(self) -> list[bytes]:
        contents = []
        for path in self.paths:
            with open_decompressed(path, self.encoding) as (_, stream):
                contents.append(stream.read())
        return contents

    @property
    def size(self) -> int:
        """Return the number of bytes of all files, decompressed and in UTF-8.

        The first use reads the files, whose contents are kept in memory.

        Raises:
            InputError: A file cannot be read, is broken, or is not in `encoding`.
        """
        return sum(map(len, self._contents))

    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        for index, content in enumerate(self._contents):
            try:
                # Unchanged except for a byte order mark.
                yield index, (decode_utf8(content),) * len(keys)
            except InputError as error:
                yield index, error

    def _describe_location(self, index: int) -> str:
        return self.paths[index]


@contextlib.contextmanager
def open_decompressed(
    path: str, encoding: str = UTF8, is_zstandard: bool | None = None
) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a plain, gzip or Zstandard file for the `with` block as a stream of UTF-8.

    Its first bytes tell the compression, not its name. `is_zstandard` tells it for a binary file,
    which may begin with any bytes: Zstandard or none.

    Yields:
        The raw file, whose `tell` counts bytes on disk, and the stream. They are the same object
        for a plain file in UTF-8. Only text in another `encoding` is checked and converted.

    Raises:
        InputError: From inside the block, if the file cannot be read, its compressed data are
            broken, or it is not in `encoding`.
    """
    try:
        with open(path, "rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            stream = raw
            if is_zstandard is None and start[:2] == b"\x1f\x8b":
                stream = gzip.GzipFile(fileobj=raw, mode="rb")
            elif is_zstandard is None:
                is_zstandard = start == b"\x28\xb5\x2f\xfd" or _SKIPPABLE_FRAME.match(start)
            if is_zstandard:
                stream = zstd.ZstdFile(
                    raw, options={zstd.DecompressionParameter.window_log_max: 31}
                )
            if encoding != UTF8:
                stream = io.BufferedReader(_Utf8Stream(path, stream, encoding))
            yield raw, stream
    except _COMPRESSION_ERRORS as error:
        raise InputError(f"{path}: broken compressed data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Utf8Stream(io.RawIOBase):
    """Stream of a text in another encoding as UTF-8."""

    def __init__(self, path: str, stream: Any, encoding: str) -> None:
        self._path = path
        self._stream = stream
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            data = self._stream.read(BLOCK_BYTES)
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeError as error:
                reason = f"not {self._encoding} ({getattr(error, 'reason', error)})"
                raise InputError(
                    f"{self._path}: {reason}; give the text's own --encoding"
                ) from None
            self._pending = memoryview(text.encode(UTF8, "surrogatepass"))
            if not data:
                break
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size


def find_encoding(name: str) -> str:
    """Return Python's own name of an encoding of text, such as `iso8859-1` for latin1.

    It is `utf-8` for `utf-8-sig`: byte order marks are dropped in any case.

    Raises:
        InputError: There is no such encoding of text; names --encoding.
    """
    try:
        # One blank is not a whole character in some encodings.
        with contextlib.suppress(UnicodeError):
            b" ".decode(name)
        encoding = codecs.lookup(name).name
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError):
        expected = "the name of an encoding, such as utf-8, latin1, cp1252 or utf-16"
        raise InputError(f"--encoding {name}: unknown, expected {expected}") from None
    return UTF8 if encoding == "utf-8-sig" else encoding


def strip_compression_suffix(name: str) -> str:
    """Return a file name without its last suffix if that is .gz or .zst, in any case."""
    return re.sub(r"\.(gz|zst)$", "", name, flags=re.IGNORECASE)


def is_compressed(path: str) -> bool:
    """Return whether a file starts with the first bytes of gzip or Zstandard.

    Raises:
        InputError: It cannot be read.
    """
    with open_decompressed(path) as (raw, content):
        return content is not raw


def read_line_blocks(
    path: str,
    start: int = 0,
    stop: int | None = None,
    before: int = 0,
    sample_by: str | None = None,
    encoding: str = UTF8,
) -> Iterator[LineBlock]:
    """Yield the lines that begin in bytes start..stop-1 as LineBlocks of about 4 MiB.

    Args:
        start: Beginning of a line; 0, without `stop`, for compressed files and those in another
            `encoding`, which are read as a whole.
        stop: End in bytes: the file's length (None: that) or, unless `paragraph`, a line start.
        before: Bytes on disk of earlier sources, which are added to positions.
        sample_by: `line` or `paragraph` for text, None for JSONL; with `paragraph`, blocks hold
            whole paragraphs.

    Raises:
        InputError: The file is unreadable or damaged, or `stop` does not fit, as after a change.
    """
    first_line = 1
    with open_decompressed(path, encoding) as (raw, stream):
        if start:
            stream.seek(start)
        remaining = None if stop is None else stop - start
        try:
            while remaining is None or remaining > 0:
                data = stream.read(
                    LINES_BYTES if remaining is None else min(LINES_BYTES, remaining)
                )
                if not data and remaining is None:
                    break
                if not data.endswith(b"\n"):
                    data += stream.readline()
                if sample_by == "paragraph":
                    data += _read_rest_of_paragraph(stream)
                if remaining is not None:
                    remaining -= len(data)
                    # `stop` was a line start or the file's end when the input was resolved.
                    if remaining < 0 or not data:
                        reason = (
                            "the end of the file before"
                            if remaining > 0
                            else "a line that continues after"
                        )
                        raise InputError(
                            f"{path}: changed while it was read: found {reason} byte {stop}; "
                            "start again when nothing writes to it"
                        )
                yield LineBlock(
                    path,
                    start,
                    first_line,
                    data,
                    before + (raw.tell() if remaining is None else stop - remaining),
                    sample_by,
                )
                first_line += data.count(b"\n")
        except _COMPRESSION_ERRORS as error:
            location = f" after line {first_line - 1}" if first_line > 1 else ""
            raise InputError(
                f"{path}: broken compressed data{location}: {error}; expected a complete file"
            ) from None


def find_line_start(path: str, offset: int) -> int:
    """Return the position of the first byte, from `offset` on, at which a line begins.

    It is the file's length if there is none, and 0 for an `offset` up to 0. The file must not be
    compressed.

    Raises:
        InputError: The file cannot be read.
    """
    if offset <= 0:
        return 0
    with open_decompressed(path) as (raw, _):
        raw.seek(offset - 1)
        while (piece := raw.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
            pass  # a line may be longer than memory
        return raw.tell()


def extract_texts(record: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the strings under `keys` of a mapping as a tuple in the order of `keys`.

    Raises:
        InputError: A key is missing, or its value is no string; names the key, but no place.
    """
    for key in keys:
        if key not in record:
            raise InputError(format_missing_key("key", key, record))
        if not isinstance(record[key], str):
            value = record[key]
            is_json = isinstance(value, (int, float, list, dict, type(None)))
            excerpt = json.dumps(value) if is_json else repr(value)
            raise InputError(f"key `{key}`: found {excerpt[:40]}, expected text")
    return tuple(record[key] for key in keys)


def format_missing_key(kind: str, key: str, names: Iterable[str]) -> str:
    """Return an error message for a missing key or column, without place.

    It is such as "no key `text`; found `id`, `body`; set --json-key" with the first eight of
    `names`. `kind` is `key` or `column`; the flag is the same for both.
    """
    return f"no {kind} `{key}`; found {format_names(names)}; set --json-key"


def check_columns(name: str, columns: Sequence[str], keys: Sequence[str]) -> None:
    """Raise InputError unless table `name` has each of `keys` exactly once."""
    counts = Counter(columns)
    for key in keys:
        if key not in counts:
            raise InputError(f"{name}: {format_missing_key('column', key, columns)}")
        if counts[key] > 1:
            raise InputError(f"{name}: found {counts[key]} columns `{key}`, expected one")


def format_names(names: Iterable[str]) -> str:
    """Return the first eight names in backquotes, joined by commas, for errors.

    Nothing marks that there are more. It is `no key at all` if there are none.
    """
    return ", ".join(f"`{name}`" for name in list(names)[:8]) or "no key at all"


def decode_utf8(data: bytes, encoding: str = "utf-8-sig") -> str:
    """Return `data` decoded as UTF-8.

    Args:
        encoding: `utf-8-sig`, for the start of a file, drops a byte order mark, and refuses data
            that look like UTF-16; `utf-8` does neither.

    Raises:
        InputError: The data are not UTF-8; names the format, or an encoding to give, if they look
            like a known one.
    """
    if encoding == "utf-8-sig" and (guess := guess_encoding(data)) != UTF8:
        raise InputError(
            f"looks like UTF-16 text, not UTF-8; expected UTF-8, or --encoding {guess}"
        )
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte 0x{data[error.start]:02x} at position {error.start + 1})"
        if kind := next(
            (kind for start, kind in _FOREIGN_FORMATS.items() if data.startswith(start)), None
        ):
            expected = "expected UTF-8, as it is or compressed with gzip or Zstandard"
            raise InputError(f"looks like {kind}; {expected}: {reason}") from None
        raise InputError(
            f"{reason}; expected UTF-8, or its --encoding, such as {guess_8_bit_encoding(error)}"
        ) from None


def guess_encoding(start: bytes) -> str:
    """Return the encoding that the first bytes of a text look like.

    It is utf-16 for one of its byte order marks; utf-16le or utf-16be if only the second or only
    the first of two bytes is zero; else utf-8, also for fewer than two bytes.
    """
    if start.startswith(_UTF16_MARKS):
        return "utf-16"
    if len(start) < 2 or (start[0] == 0) == (start[1] == 0):
        return UTF8
    return "utf-16be" if start[0] == 0 else "utf-16le"


def guess_8_bit_encoding(error: UnicodeDecodeError) -> str:
    """Return the probable encoding, cp1252 or latin1, of text that is not UTF-8.

    `error` is that of decoding it as UTF-8. Only the byte at which decoding failed decides: below
    0xA0 it is cp1252. Whether the text can be decoded so is not checked.
    """
    # Bytes below 0xA0 are control characters in Latin-1.
    return "cp1252" if error.object[error.start] < 0xA0 else "latin1"


def _read_rest_of_paragraph(stream: BinaryIO) -> bytes:
    """Read up to and including the next blank line."""
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


@cache
def _compile_key(key: str) -> re.Pattern[bytes]:
    """Return the pattern of `key` and its colon in JSON."""
    return re.compile(
        re.escape(json.dumps(key, ensure_ascii=False).encode(UTF8, "surrogatepass")) + rb"\s*:"
    )


def _parse_json_fast(line: bytes, keys: Sequence[str]) -> tuple[str, ...] | None:
    """Parse a line as `_parse_json` in a third of the time, or return None.

    None means that it must be parsed by `_parse_json`, as in every error. A line accepted here has
    the same result there. Only `_parse_json` accepts byte order marks and unpaired surrogates.
    """
    try:
        record = from_json(line, cache_strings="keys")
        texts = tuple([record[key] for key in keys])
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    if any([len(_compile_key(key).findall(line)) > 1 for key in keys]):
        return None  # the key may be there twice, of which `from_json` keeps the last
    return texts if all([type(text) is str for text in texts]) and type(record) is dict else None


def _parse_json(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    """Parse a line of JSON and return its texts under `keys`.

    Raises:
        InputError: It is not an object with one text under each key.
    """
    counts: Counter[str] = Counter()

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts.clear()  # the outermost object comes last
        counts.update(name for name, _ in pairs)
        return dict(pairs)

    try:
        record = json.loads(decode_utf8(line), object_pairs_hook=build)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not JSON ({error.msg} at column {error.colno}): {_format_excerpt(line)}"
        ) from None
    except (ValueError, RecursionError) as error:  # thousands of digits or nested brackets
        raise InputError(
            f"not JSON that can be read ({type(error).__name__}): {_format_excerpt(line)}"
        ) from None
    if not isinstance(record, dict):
        raise InputError(
            f"found a JSON {type(record).__name__}, expected an object with the key `{keys[0]}`"
        )
    for key in keys:
        if counts[key] > 1:
            raise InputError(f"found {counts[key]} keys `{key}`, expected one")
    return extract_texts(record, keys)


def _format_excerpt(line: bytes) -> str:
    """Format the first 40 bytes of a line for an error message."""
    return repr(line[:40].decode("utf-8", "replace").strip())
