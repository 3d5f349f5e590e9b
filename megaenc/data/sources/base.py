"""Base class and plain-file classes of text sources.

A source has split points, numbers from 0 to its `end`, at which a partition may begin: bytes of a
plain file, row groups of a Parquet file, rows of a saved data set, files of a group or of a data
set on the Hub.
"""

import bisect
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megaenc.data.sources import text_files
from megaenc.data.sources.text_files import UTF8, TextBlock, is_compressed
from megaenc.errors import InputError

TOKEN_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Names of the dtypes that token ids in a source may have."""


class TextSource(ABC):
    """Base class of a text source: documents in a fixed order.

    They are read between split points. Split points are numbers from 0 to `end` at which a
    partition of the input may begin, such as bytes of a file or row groups. Subclasses set `name`,
    `size` in bytes on disk (with `is_size_known` False for a guess), `end` and `file_stats`, which
    has (absolute path, bytes, modification time in ns) of each file and is empty for the Hub. They
    implement `find_split_point` and `read_blocks`; `file_stats_between` if they have several files.
    """

    name: str
    """Path, or name on the Hub."""
    size: int
    """Size on disk in bytes."""
    is_size_known = True
    end: int
    """Last split point, after all documents."""
    file_stats: Sequence[tuple[str, int, int]]
    """(path, bytes, modification time in ns) of each file before it was read; empty for the Hub."""

    def file_stats_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        """Return the `file_stats` of the files between two split points.

        Each is (absolute path, bytes, modification time in ns). By default, these are all files of
        the source; a data set on the Hub has none.
        """
        return self.file_stats

    @abstractmethod
    def find_split_point(self, offset: int) -> int:
        """Return the first split point at or after fraction `offset` / `size`.

        `offset` is from 0 to `size` bytes on disk. A higher `offset` never gives a lower point.
        """

    @abstractmethod
    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        """Yield the documents from split point `start` to `stop` (excluded) as blocks.

        `before`, the bytes on disk of earlier sources, is added to the positions of blocks.
        Documents are read as the iterator goes on.

        Raises:
            InputError: The source cannot be read.
        """


def stat_files(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (absolute path, bytes, modification time in ns) of each file, in order.

    Raises:
        InputError: A file is missing, cannot be accessed or is not regular.
    """
    stats = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: cannot be read: not a regular file")
        stats.append((os.path.abspath(path), status.st_size, status.st_mtime_ns))
    return stats


class LineFile(TextSource):
    """Text source of a JSONL file, or of lines or paragraphs of a text file.

    `LineFile(path, sample_by, encoding)` takes `line` or `paragraph` for a text file, None for
    JSONL, and the name of an encoding by `find_encoding`, UTF-8 by default. It raises InputError if
    the file is missing or cannot be read. Each line, or paragraph between blank lines, is a
    document; blank lines are none. Split points are bytes at which a line starts. Compressed files,
    paragraphs and encodings other than UTF-8 must be read whole: their split points are 0 and 1.
    """

    def __init__(self, path: str, sample_by: str | None, encoding: str = UTF8) -> None:
        """Read the size and the first bytes of `path`.

        Args:
            sample_by: `line` or `paragraph` for a text file, None for JSONL.
            encoding: Name of the encoding, see `find_encoding`.

        Raises:
            InputError: The file is missing or cannot be read.
        """
        self.name = path
        self._sample_by = sample_by
        self._encoding = encoding
        self.file_stats = stat_files([path])
        self.size = self.file_stats[0][1]
        self._is_indivisible = is_compressed(path) or sample_by == "paragraph" or encoding != UTF8
        self.end = 1 if self._is_indivisible else self.size

    def find_split_point(self, offset: int) -> int:
        """Return the first byte, at or after byte `offset`, at which a line starts.

        For compressed files, paragraphs and encodings other than UTF-8 it is 0 or 1, the end.
        """
        if self._is_indivisible:
            return min(offset, 1)
        return text_files.find_line_start(self.name, offset)

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        """Yield the lines from split point `start` to `stop` (excluded) as LineBlocks.

        Both are bytes at which a line starts, as of `find_split_point`, or `end`; of `start` this
        is not checked. Compressed files, paragraphs and encodings other than UTF-8 are read whole.
        `before`, the bytes on disk of earlier sources, is added to the positions of blocks.

        Raises:
            InputError: The file cannot be read, or no line ends at `stop`, as after a change.
        """
        if start == stop:
            return iter(())
        if self._is_indivisible:
            start = 0
            stop = None
        return text_files.read_line_blocks(
            self.name, start, stop, before, self._sample_by, self._encoding
        )


class TextGroup(TextSource):
    """Text source of several text files, each a document.

    `TextGroup(paths, encoding)` takes one or more, in the encoding of that name (`find_encoding`),
    and raises InputError if one is missing. Split points are 0-based indices of files.
    """

    def __init__(self, paths: Sequence[str], encoding: str = UTF8) -> None:
        """Read the sizes of the files.

        Args:
            paths: Paths of one or more files.
            encoding: Name of the encoding, see `find_encoding`.

        Raises:
            InputError: A file is missing or cannot be accessed.
        """
        self.name = paths[0]
        self._paths = paths
        self.file_stats = stat_files(paths)
        self._encoding = encoding
        self._ends = list(accumulate(size for _, size, _ in self.file_stats))
        self.size = self._ends[-1]
        self.end = len(paths)

    def file_stats_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        """Return the `file_stats` of files start..stop-1.

        Each is (absolute path, bytes, modification time in ns).
        """
        return self.file_stats[start:stop]

    def find_split_point(self, offset: int) -> int:
        """Return the index of the first file that starts at or after byte `offset`.

        The files count as laid end to end.
        """
        return 0 if offset <= 0 else bisect.bisect_left(self._ends, offset) + 1

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        """Yield files start..stop-1 as FileBlocks of whole files.

        A block has about 1 MiB, or one larger file. Its position is `before`, the bytes of earlier
        sources, plus the bytes of this group up to the block's end, files before `start` included.
        """
        while start < stop:
            done = self._ends[start - 1] if start else 0
            end = bisect.bisect_right(self._ends, done + text_files.BLOCK_BYTES)
            end = max(start + 1, min(stop, end, start + 1000))
            yield text_files.FileBlock(
                tuple(self._paths[start:end]), before + self._ends[end - 1], self._encoding
            )
            start = end
