"""CSV and TSV files whose first line names their columns.

The reading process splits rows into cells: a CSV file cannot be cut at line ends, because quoted
cells may contain them.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megaenc.data.sources import text_files
from megaenc.data.sources.base import TextSource, stat_files
from megaenc.data.sources.text_files import (
    UTF8,
    TextBlock,
    check_columns,
    decode_utf8,
    open_decompressed,
)
from megaenc.errors import InputError

MAX_CELL_LENGTH = 1 << 26
"""Maximum characters of a CSV cell; bounds the memory that a quote without an end takes."""


@dataclass(frozen=True)
class RowBlock(TextBlock):
    """Block of rows of a CSV or TSV file, each a document; `DelimitedFile` yields it.

    `path` is the file, and `rows` has (line number, texts under the file's keys or the InputError
    in the row), whose lines take `line_bytes` decompressed bytes. `position` is that of TextBlock.
    `parse` must get the keys that the file was opened with, in their order, which it does not
    check.
    """

    path: str
    rows: list[tuple[int, tuple[str, ...] | InputError]]
    """Line number of each row, and its texts under the file's keys or the error in it."""
    line_bytes: int
    """Number of decompressed bytes of the rows' lines."""
    position: int

    @property
    def size(self) -> int:
        """Return the number of decompressed bytes of the rows' lines."""
        return self.line_bytes

    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        """Return the rows; `keys` must be those that the file was opened with."""
        return iter(self.rows)

    def _describe_location(self, index: int) -> str:
        return f"{self.path}:{index}"


class DelimitedFile(TextSource):
    """Text source of a CSV or TSV file, whose rows are documents.

    The constructor takes `path` (the file may be compressed), `keys`, the columns of the texts,
    `is_csv` (cells may be quoted), `encoding`, and `delimiter` (None: a comma in CSV, a tab in
    TSV). It reads the header, and raises InputError if the header cannot be read, or lacks a key or
    has it twice. Its only split points are 0 and 1.
    """

    end = 1

    def __init__(
        self,
        path: str,
        keys: Sequence[str],
        is_csv: bool,
        encoding: str = UTF8,
        delimiter: str | None = None,
    ) -> None:
        """Read the header. A file without any row has no documents.

        Args:
            path: File, plain or compressed with gzip or Zstandard.
            keys: Columns of the texts.
            is_csv: Whether cells may be quoted.
            encoding: Name of the encoding, see `find_encoding`.
            delimiter: Character between cells; None for a comma in CSV, a tab in TSV.

        Raises:
            InputError: The header cannot be read, or lacks one of `keys` or has it twice.
        """
        self.name = path
        self._is_csv = is_csv
        self._encoding = encoding
        self._delimiter = delimiter or get_delimiter(is_csv)
        self.file_stats = stat_files([path])
        self.size = self.file_stats[0][1]
        with open_decompressed(path, encoding) as (_, stream):
            first_line = next(iter(_DecodedLines(stream)), "")
        other_delimiter = find_other_delimiter(first_line, self._delimiter)
        if other_delimiter and set(keys) <= {
            cell.strip('" \r\n') for cell in first_line.split(other_delimiter)
        }:
            raise InputError(
                f"{path}:1: found {other_delimiter!r} between columns, "
                f"expected {self._delimiter!r}; set --delimiter"
            )
        with open_decompressed(path, encoding) as (_, stream):
            line_number, header = next(self._read_records(_DecodedLines(stream)), (1, list(keys)))
        if isinstance(header, InputError):
            raise InputError(f"{path}:{line_number}: {header}")
        check_columns(path, header, keys)
        self._header = header
        self._columns = [header.index(key) for key in keys]

    def find_split_point(self, offset: int) -> int:
        """Return 0 for `offset` 0, else 1, the end."""
        return min(offset, 1)

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[RowBlock]:
        """Yield all rows as RowBlocks of about 4 MiB; none if `start` is `stop`.

        `start` and `stop` are 0 and 1 for the whole file. The header is no row. `before`, the bytes
        on disk of earlier sources, is added to the positions of blocks. A row with another number
        of cells than the header is an error only of the block's `parse`.

        Raises:
            InputError: The end of a row cannot be found because of a wrong quote.
        """
        if start == stop:
            return
        with open_decompressed(self.name, self._encoding) as (raw, stream):
            lines = _DecodedLines(stream)
            records = self._read_records(lines)
            next(records, None)  # the header
            rows = []
            for line_number, cells in records:
                if isinstance(cells, InputError):
                    texts = cells
                elif len(cells) != len(self._header):
                    texts = InputError(format_cell_count(cells, self._header))
                else:
                    texts = tuple([cells[column] for column in self._columns])
                rows.append((line_number, texts))
                if lines.size >= text_files.LINES_BYTES:
                    yield RowBlock(self.name, rows, lines.size, before + raw.tell())
                    rows = []
                    lines.size = 0
            if rows:
                yield RowBlock(self.name, rows, lines.size, before + self.size)

    def _read_records(self, lines: "_DecodedLines") -> Iterator[tuple[int, list[str] | InputError]]:
        """Yield (line number, cells) of the header and each row.

        An error takes the place of cells that are not UTF-8.
        """
        records = (
            split_csv(self.name, lines, self._delimiter)
            if self._is_csv
            else split_tsv(lines, self._delimiter)
        )
        for line_number, cells in records:
            if lines.error is None:
                yield line_number, cells
            else:
                yield lines.error
                lines.error = None


def get_delimiter(is_csv: bool) -> str:
    """Return the character between cells: a comma in CSV, a tab in TSV."""
    return "," if is_csv else "\t"


def find_other_delimiter(header: str, delimiter: str) -> str | None:
    """Return a usual delimiter that `header` has instead of `delimiter`, or None.

    `header` is the first line of a file. The result is the first of `;`, tab, comma and `|`, in
    this order, that is in it; None if `header` has `delimiter`, or none of these.
    """
    if delimiter in header:
        return None
    return next((candidate for candidate in ";\t,|" if candidate in header), None)


def split_csv(
    path: str, lines: Iterable[str], delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, cells) of each record of a CSV file.

    Lines count from 1. The header is a record too; empty records are left out. The limit of cells
    in Python's `csv` is set, for the whole process, to MAX_CELL_LENGTH (64 Mi characters).

    Args:
        path: Name of the file, for errors.
        lines: All lines, with their line ends.

    Raises:
        InputError: Quotes are wrong, or a cell is too long.
    """
    csv.field_size_limit(MAX_CELL_LENGTH)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    first_line = 1
    try:
        for cells in reader:
            if cells:
                yield first_line, cells
            first_line = reader.line_num + 1
    except csv.Error as error:
        quoting = 'cells with commas, quotes or line breaks in "quotes", and quotes in them doubled'
        reason = str(error).partition(" - ")[0]  # without advice for programmers
        raise InputError(f"{path}:{first_line}: not CSV: {reason}; expected {quoting}") from None


def split_tsv(lines: Iterable[str], delimiter: str = "\t") -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each line of a TSV file.

    Lines count from 1. There is no quoting, as in GLUE's files; line ends are dropped, and empty
    lines are left out.
    """
    for line_number, line in enumerate(lines, 1):
        content = line.removesuffix("\n").removesuffix("\r")
        if content:
            yield line_number, content.split(delimiter)


def format_cell_count(cells: Sequence[str], header: Sequence[str]) -> str:
    """Return the error of a row with another number of cells than the header.

    It names no place, as in `found 2 columns, expected 3 as in the header`.
    """
    return f"found {len(cells)} columns, expected {len(header)} as in the header"


class _DecodedLines:
    """Iterable of the lines of a stream, decoded as UTF-8 without byte order mark."""

    size = 0
    """Bytes of the lines so far; may be reset."""
    error: tuple[int, InputError] | None = None
    """(line number, error) of the first line that is not UTF-8; may be reset."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        encoding = "utf-8-sig"
        for line_number, line in enumerate(self._stream, 1):
            self.size += len(line)
            try:
                text = decode_utf8(line, encoding)
            except InputError as error:
                self.error = self.error or (line_number, error)
                text = line.decode(encoding, "replace")
            yield text
            encoding = "utf-8"
