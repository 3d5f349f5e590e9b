"""What documents are read from, one class a kind.

A source has places, numbers from 0 to its `end`, where a part of it may begin: bytes of a plain file, row groups of a Parquet
file, rows of a saved data set, files of a group or of a data set on the Hub.
"""

import bisect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megaenc.data.sources import text_files
from megaenc.data.sources.text_files import TextBlock, is_compressed
from megaenc.errors import InputError


class TextSource(ABC):
    """Documents in a fixed order."""

    name: str
    """Path, or name on the Hub."""
    size: int
    """Bytes on disk."""
    is_size_known = True
    end: int
    """The last place, after all documents."""
    file_stats: Sequence[tuple[str, int, int]]
    """(path, bytes, time of the last change in ns) of each file before any of it was read; none for the Hub."""

    def file_stats_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        """Those of `file_stats` that the documents between two places come from."""
        return self.file_stats

    @abstractmethod
    def find_split_point(self, offset: int) -> int:
        """Return the first place at or after `offset` of the `size` bytes, where a part may begin. Grows with `offset`."""

    @abstractmethod
    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        """Yield the documents between two places; `before` (bytes) is added to the blocks' positions."""


def stat_files(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change in ns) of each file. Raises InputError for one that is not there."""
    found = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        found.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return found


class LineFile(TextSource):
    """A JSONL file, or a text file of which each line or paragraph is a document."""

    def __init__(self, path: str, sample_by: str | None) -> None:
        """`sample_by`: line or paragraph for a text file, None for JSONL."""
        self.name, self._sample_by = path, sample_by
        self.file_stats = stat_files([path])
        self.size = self.file_stats[0][1]
        self._whole = is_compressed(path) or sample_by == "paragraph"
        self.end = 1 if self._whole else self.size

    def find_split_point(self, offset: int) -> int:
        return min(offset, 1) if self._whole else text_files.find_line_start(self.name, offset)

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        between = (0, None) if self._whole else (start, stop)
        return text_files.read_line_blocks(self.name, *between, before, self._sample_by) if start < stop else iter(())


class TextGroup(TextSource):
    """Text files, each a document."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.name, self._paths, self.file_stats = paths[0], paths, stat_files(paths)
        self._ends = list(accumulate(size for _, size, _ in self.file_stats))
        self.size, self.end = self._ends[-1], len(paths)

    def file_stats_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        return self.file_stats[start:stop]

    def find_split_point(self, offset: int) -> int:
        return 0 if offset <= 0 else bisect.bisect_left(self._ends, offset) + 1

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TextBlock]:
        while start < stop:
            done = self._ends[start - 1] if start else 0
            there = max(start + 1, min(stop, bisect.bisect_right(self._ends, done + text_files.BLOCK_BYTES), start + 1000))
            yield text_files.FileBlock(tuple(self._paths[start:there]), before + self._ends[there - 1])
            start = there
