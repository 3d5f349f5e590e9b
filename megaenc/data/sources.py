"""What documents are read from, one class a kind.

A source has places, numbers from 0 to its `end`, where a part of it may begin: bytes of a plain file, row groups of a Parquet
file, rows of a saved data set, files of a group or of a data set on the Hub.
"""

import bisect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megaenc.data import readers
from megaenc.data.compression import is_compressed
from megaenc.data.readers import Block
from megaenc.errors import InputError

_HUB_FILE_BYTES = 1 << 28  # what a file of the Hub counts where parts are to be alike: its size is not asked for


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """Path, or name on the Hub."""
    size: int
    """Bytes on disk."""
    end: int
    """The last place, after all documents."""
    files: Sequence[str]
    """The files read; none for the Hub."""
    seen: Sequence[tuple[str, int, int]]
    """(path, bytes, time of the last change in ns) of each of `files` before any of it was read."""

    def seen_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        """Those of `seen` that the documents between two places come from."""
        return self.seen

    @abstractmethod
    def place(self, offset: int) -> int:
        """The first place at or after `offset` of the `size` bytes, where a part may begin. Grows with `offset`."""

    @abstractmethod
    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        """The documents between two places; `before` (bytes) is added to the blocks' positions."""


def look(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change in ns) of each file. Raises InputError for one that is not there."""
    found = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        found.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return found


class LineFile(Source):
    """A JSONL file, or a text file of which each line or paragraph is a document."""

    def __init__(self, path: str, sample_by: str | None) -> None:
        """`sample_by`: line or paragraph for a text file, None for JSONL."""
        self.name, self.files, self._sample_by = path, [path], sample_by
        self.seen = look(self.files)
        self.size = self.seen[0][1]
        self._whole = is_compressed(path) or sample_by == "paragraph"
        self.end = 1 if self._whole else self.size

    def place(self, offset: int) -> int:
        return min(offset, 1) if self._whole else readers.line_start(self.name, offset)

    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        if start >= stop:
            return iter(())
        between = (0, None) if self._whole else (start, stop)
        if self._sample_by is None:
            return readers.read_lines(self.name, *between, before)
        return readers.read_text_lines(self.name, *between, before, paragraphs=self._sample_by == "paragraph")


class TextGroup(Source):
    """Text files, each a document."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.name, self.files, self.seen = paths[0], paths, look(paths)
        self._ends = list(accumulate(size for _, size, _ in self.seen))
        self.size, self.end = self._ends[-1], len(paths)

    def seen_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        return self.seen[start:stop]

    def place(self, offset: int) -> int:
        return 0 if offset <= 0 else bisect.bisect_left(self._ends, offset) + 1

    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        while start < stop:
            done = self._ends[start - 1] if start else 0
            there = max(start + 1, min(stop, bisect.bisect_right(self._ends, done + readers.BLOCK_BYTES), start + 1000))
            yield readers.TextFiles(tuple(self.files[start:there]), before + self._ends[there - 1])
            start = there


class ParquetFile(Source):
    """A Parquet file; a document a row."""

    def __init__(self, path: str, keys: Sequence[str]) -> None:
        from megaenc.data import tables  # pyarrow is not needed for JSONL, and takes its time

        self.name, self.files, self._keys = path, [path], keys
        self.seen = look(self.files)
        self._footer = tables.parquet_metadata(path, keys)
        self.size, self.end = self.seen[0][1], self._footer.num_row_groups

    def place(self, offset: int) -> int:
        return _proportional(offset, self.size, [self._footer.row_group(group).num_rows for group in range(self.end)])

    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        from megaenc.data import tables

        return tables.parquet_blocks(self.name, self._footer, self._keys, start, stop, before)


class SavedFile(Source):
    """One Arrow file of a data set that `save_to_disk` wrote; a document a row."""

    def __init__(self, path: str, keys: Sequence[str]) -> None:
        from megaenc.data import tables

        self.name, self.files, self._keys = path, [path], keys
        self.seen = look(self.files)
        self.size, self.end = self.seen[0][1], tables.arrow_table(path).num_rows

    def place(self, offset: int) -> int:
        return -(-offset * self.end // self.size)

    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        from megaenc.data import tables

        return tables.arrow_blocks(self.name, self._keys, start, stop, before)


class HubStream(Source):
    """A data set of the Hub, streamed; a document a row. Its places are the files it is made of."""

    def __init__(self, name: str, config: str | None, split: str, keys: Sequence[str]) -> None:
        from megaenc.data import tables

        self.name, self.files, self.seen, self._keys = name, [], [], keys
        self._data = tables.load_stream(name, config, split, keys)
        self.end = self._data.num_shards
        self.size = self.end * _HUB_FILE_BYTES

    def place(self, offset: int) -> int:
        return -(-offset // _HUB_FILE_BYTES)

    def blocks(self, start: int, stop: int, before: int) -> Iterator[Block]:
        from megaenc.data import tables

        return tables.stream_blocks(self.name, self._data, self._keys, start, stop, before)


def _proportional(offset: int, size: int, rows: Sequence[int]) -> int:
    """The first of several runs of rows that begins at or after `offset` of `size` bytes, rows taken for equally long."""
    starts = [0, *accumulate(rows)]
    return bisect.bisect_left(starts, offset * starts[-1] / max(size, 1))
