"""Documents out of columns: Parquet files, data sets that `save_to_disk` wrote, and data sets of the Hugging Face Hub."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megaenc.console import say
from megaenc.data import readers
from megaenc.data.readers import Block, Documents, listed, texts_of
from megaenc.errors import InputError

PIECE_BYTES = 1 << 24  # of a Parquet row group that one block holds at most, its longest document aside; before decoding
_BATCH_BYTES = 1 << 20  # of text that is decoded at a time
# Encodings in which a page of a few bytes may stand for any amount of text: how much is known when it is decoded.
_REPEATING = {"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"}
_REPEATING_ROWS = 16  # to decode at a time of such; fewer gain nothing, for one document has to fit in any case


@dataclass(frozen=True)
class ParquetRows(Block):
    """Rows start..stop-1 of one row group; decoded where they are parsed."""

    path: str
    row_group: int
    start: int
    stop: int
    first_row: int
    """Number in the file of row `start`, counted from 1."""
    batch_rows: int
    """Rows to decode at a time."""
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """One document a row: the texts of the columns `keys`."""
        return _joined(list(self.pieces(keys, skip_bad)))

    def pieces(self, keys: Sequence[str], skip_bad: bool) -> Iterator[Documents]:
        """The same, about a megabyte of text at a time: rows that repeat one another take no room in the file."""
        parts, size, row = [], 0, self.first_row
        try:
            for batch in _cursor.rows(self, keys):
                parts.append(_documents(batch, self.path, row, keys, skip_bad))
                size, row = size + parts[-1].size, row + batch.num_rows
                if size >= readers.BLOCK_BYTES:
                    yield _joined(parts)
                    parts, size = [], 0
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.path}: row {row}: cannot be read as Parquet ({_first_line(error)})") from None
        if parts:
            yield _joined(parts)


@dataclass(frozen=True)
class ArrowRows(Block):
    """Rows start..stop-1 of one Arrow file of a saved data set; mapped where they are parsed."""

    path: str
    start: int
    stop: int
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """One document a row: the texts of the columns `keys`."""
        table = arrow_table(self.path).select(list(keys)).slice(self.start, self.stop - self.start)
        parts, row = [], self.start + 1
        for batch in table.to_batches():
            parts.append(_documents(batch, self.path, row, keys, skip_bad))
            row += batch.num_rows
        return _joined(parts)


@dataclass(frozen=True)
class StreamedRows(Block):
    """Rows that came over the network."""

    name: str
    first_row: int
    """Counted from 1, in the order of reading."""
    rows: list[dict[str, Any]]
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """One document a row: the texts of the columns `keys`."""
        texts, skipped = _checked(self.rows, self.name, self.first_row, keys, skip_bad)
        return Documents(texts, skipped, sum(len(text) for row in texts for text in row))


def check_columns(name: str, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raise InputError unless each of `keys` is a column of text."""
    for key in keys:
        if key not in schema.names:
            raise InputError(f"{name}: no column `{key}`; found {listed(schema.names)}")
        if schema.names.count(key) > 1:
            raise InputError(f"{name}: found {schema.names.count(key)} columns `{key}`, expected one")
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise InputError(f"{name}: column `{key}`: found {kind}, expected text")


def parquet_metadata(path: str, keys: Sequence[str]) -> pq.FileMetaData:
    """The footer of a Parquet file. Raises InputError when it is none, or lacks a column of text named as each of `keys`."""
    try:
        footer = pq.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from None
    check_columns(path, schema, keys)
    return footer


def parquet_blocks(
    path: str, footer: pq.FileMetaData, keys: Sequence[str], start: int, stop: int, before: int
) -> Iterator[ParquetRows]:
    """Cut row groups start..stop-1 into blocks of about PIECE_BYTES of the columns `keys`; `before` is added to positions."""
    size = Path(path).stat().st_size
    first_row = 1 + sum(footer.row_group(group).num_rows for group in range(start))
    for group in range(start, stop):
        metadata = footer.row_group(group)
        rows = metadata.num_rows
        columns = [metadata.column(column) for column in range(metadata.num_columns)]
        columns = [column for column in columns if column.path_in_schema in keys]
        text_bytes = sum(column.total_uncompressed_size for column in columns)
        pieces = min(rows, -(-text_bytes // PIECE_BYTES) or 1)
        batch_rows = min(10_000, max(1, rows * _BATCH_BYTES // max(text_bytes, 1)))
        if any(_REPEATING.intersection(column.encodings) for column in columns):
            batch_rows = min(batch_rows, _REPEATING_ROWS)
        for piece in range(pieces):
            here, there = rows * piece // pieces, rows * (piece + 1) // pieces
            position = before + size * (first_row - 1 + there) // max(footer.num_rows, 1)
            yield ParquetRows(path, group, here, there, first_row + here, batch_rows, position)
        first_row += rows


def arrow_table(path: str) -> pa.Table:
    """The table in an Arrow stream file, mapped into memory rather than read. Raises InputError when it is none."""
    if path not in _mapped:
        _mapped.clear()  # blocks come in order: the file before is done with
        try:
            _mapped[path] = pa.ipc.open_stream(pa.memory_map(path)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read as a saved data set ({_first_line(error)})") from None
    return _mapped[path]


_mapped: dict[str, pa.Table] = {}


def arrow_blocks(path: str, keys: Sequence[str], start: int, stop: int, before: int) -> Iterator[ArrowRows]:
    """Cut rows start..stop-1 into blocks of about a megabyte of text in the columns `keys`, or one long row."""
    table, size = arrow_table(path), Path(path).stat().st_size
    for low in range(start, stop, 1 << 16):  # the lengths of so many rows at a time are looked at
        high = min(stop, low + (1 << 16))
        ends = sum(np.cumsum(_byte_lengths(table.column(key).slice(low, high - low))) for key in keys)
        here = low
        while here < high:
            done = ends[here - low - 1] if here > low else 0
            there = low + max(int(np.searchsorted(ends, done + readers.BLOCK_BYTES, side="right")), here - low + 1)
            yield ArrowRows(path, here, there, before + size * there // table.num_rows)
            here = there


def saved_files(folder: str, split: str, keys: Sequence[str]) -> list[str]:
    """The Arrow files of a data set that `save_to_disk` wrote, in order; `split` chooses among those of a DatasetDict."""
    import datasets

    try:
        data = datasets.load_from_disk(folder)
    except Exception as error:  # whatever is wrong inside the folder
        raise InputError(f"{folder}: cannot be read as a saved data set ({_first_line(error)})") from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise InputError(f"{folder}: no split `{split}` (--dataset-split); found {listed(list(data))}")
        data = data[split]
    elif split != "train":
        raise InputError(f"{folder}: has no splits, expected one named `{split}` (--dataset-split)")
    check_columns(folder, data.features.arrow_schema, keys)
    return [file["filename"] for file in data.cache_files]


def load_stream(name: str, config: str | None, split: str, keys: Sequence[str]) -> Any:
    """The data set `name` of the Hub as a datasets.IterableDataset. Raises InputError when there is none, or no answer."""
    import datasets

    say(f"{name}: no file or folder here; asking the Hugging Face Hub for it")  # which may take half a minute not to answer
    try:
        data = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # no network, no such name, no such config or split: as many types as reasons
        where = f"config {config}, split {split}" if config else f"split {split}"
        raise InputError(
            f"{name}: neither a file or folder here nor a data set that the Hugging Face Hub answers to ({where}): "
            f"{_first_line(error)}"
        ) from None
    if data.column_names is not None:
        for key in keys:
            if key not in data.column_names:
                raise InputError(f"{name}: no column `{key}`; found {listed(data.column_names)}")
        data = data.select_columns(list(keys))
    return data


def stream_blocks(name: str, data: Any, keys: Sequence[str], start: int, stop: int, before: int) -> Iterator[StreamedRows]:
    """The rows of shards start..stop-1, in blocks of about a megabyte of text. The position does not move: no size is known."""
    first_row, rows, size = 1, [], 0
    try:
        for shard in range(start, stop):
            for row in data.shard(data.num_shards, shard, contiguous=True):
                rows.append(row)
                size += sum(len(value) for key in keys if isinstance(value := row.get(key), str))
                if size >= readers.BLOCK_BYTES or len(rows) == 10_000:
                    yield StreamedRows(name, first_row, rows, before)
                    first_row, rows, size = first_row + len(rows), [], 0
    except InputError:
        raise
    except Exception as error:  # the network, or a damaged file at the other end
        raise InputError(f"{name}: no more rows after {first_row + len(rows) - 1}: {_first_line(error)}") from None
    if rows:
        yield StreamedRows(name, first_row, rows, before)


class _Cursor:
    """A place in a row group that goes on from block to block: what lies before it need not be decoded again."""

    def __init__(self) -> None:
        self._place: tuple[str, int] | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._row = 0
        self._rest: pa.RecordBatch | None = None

    def rows(self, block: ParquetRows, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of `block` in batches. Raises pyarrow's errors."""
        if self._place != (block.path, block.row_group) or self._row > block.start:
            # Buffered reads and no read-ahead: a row group may be larger than memory.
            file = pq.ParquetFile(block.path, pre_buffer=False, buffer_size=1 << 20)
            groups, columns = [block.row_group], list(keys)
            self._batches = file.iter_batches(block.batch_rows, row_groups=groups, columns=columns, use_threads=False)
            self._place, self._row, self._rest = (block.path, block.row_group), 0, None
        while self._row < block.stop:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid("the row group ends before the rows that the footer tells of")
            skip = max(0, block.start - self._row)
            take = max(0, min(batch.num_rows, block.stop - self._row) - skip)
            used = min(batch.num_rows, skip + take)
            self._row += used
            self._rest = batch.slice(used) if used < batch.num_rows else None
            if take:
                yield batch.slice(skip, take)


_cursor = _Cursor()


def _documents(batch: pa.RecordBatch, name: str, first_row: int, keys: Sequence[str], skip_bad: bool) -> Documents:
    try:
        columns = [batch.column(key).to_pylist() for key in keys]
    except UnicodeDecodeError:
        columns = [[_value(value) for value in batch.column(key)] for key in keys]
    if all(isinstance(value, str) for column in columns for value in column):
        return Documents(list(zip(*columns, strict=True)), 0, _size(batch, keys))
    rows = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
    texts, skipped = _checked(rows, name, first_row, keys, skip_bad)
    return Documents(texts, skipped, _size(batch, keys))


def _checked(
    rows: Sequence[dict[str, Any]], name: str, first_row: int, keys: Sequence[str], skip_bad: bool
) -> tuple[list[tuple[str, ...]], int]:
    texts, skipped = [], 0
    for number, row in enumerate(rows, first_row):
        try:
            texts.append(texts_of(row, keys))
        except InputError as error:
            if not skip_bad:
                raise InputError(f"{name}: row {number}: {error}") from None
            skipped += 1
    return texts, skipped


def _value(value: pa.Scalar) -> str | bytes | None:
    """The text of one cell, or its bytes where they are not UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()


def _joined(parts: list[Documents]) -> Documents:
    return Documents(
        [text for part in parts for text in part.texts],
        sum(part.skipped for part in parts),
        sum(part.size for part in parts),
    )


def _size(batch: pa.RecordBatch, keys: Sequence[str]) -> int:
    return int(sum(_byte_lengths(pa.chunked_array([batch.column(key)])).sum() for key in keys))


def _byte_lengths(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_dictionary(column.type):  # decoded it may be larger than memory
        column = pa.chunked_array([_dictionary_lengths(part) for part in column.chunks], pa.int64())
        return pc.fill_null(column, 0).to_numpy()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)


def _dictionary_lengths(column: pa.DictionaryArray) -> pa.Array:
    return pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
