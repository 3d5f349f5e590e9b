"""Documents out of columns: Parquet files, data sets that `save_to_disk` wrote, and data sets of the Hugging Face Hub."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
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

_BATCH_BYTES = 1 << 20  # of text that is decoded at a time
_ROW_BYTES = 8  # what a row takes besides its text
# Encodings in which a page of a few bytes may stand for any amount of text: how much is known when it is decoded.
_REPEATING = {"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"}
_REPEATING_ROWS = 16  # to decode at a time of such; fewer gain nothing, for one document has to fit in any case


@dataclass(frozen=True)
class Rows(Block):
    """Rows of a table, a document each."""

    name: str
    first_row: int
    """Counted from 1, in the order of reading."""
    data: bytes
    """The columns of text as an Arrow stream."""
    position: int

    def documents(self, keys: Sequence[str], skip_bad: bool) -> Documents:
        """Return the texts of the columns `keys`, one document a row."""
        texts, skipped, numbers = [], 0, count(self.first_row)
        for batch in pa.ipc.open_stream(self.data):
            columns = [_values(batch.column(key)) for key in keys]
            for values, number in zip(zip(*columns, strict=True), numbers, strict=False):
                if all([type(value) is str for value in values]):
                    texts.append(values)
                    continue
                try:
                    texts_of(dict(zip(keys, values, strict=True)), keys)
                except InputError as error:
                    if not skip_bad:
                        raise InputError(f"{self.name}: row {number}: {error}") from None
                    skipped += 1
        return Documents(texts, skipped, len(self.data))


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
    """Return the footer of a Parquet file. Raises InputError when it is none, or lacks a column of text for one of `keys`."""
    try:
        footer = pq.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from None
    check_columns(path, schema, keys)
    return footer


def parquet_blocks(path: str, footer: pq.FileMetaData, keys: Sequence[str], start: int, stop: int, before: int) -> Iterator[Rows]:
    """Yield the rows of row groups start..stop-1, which are never in memory whole; `before` is added to positions."""
    size = Path(path).stat().st_size
    first_row = 1 + sum(footer.row_group(group).num_rows for group in range(start))

    def batches() -> Iterator[pa.RecordBatch]:
        row = first_row
        try:
            # Buffered reads and no read-ahead: a row group may be larger than memory.
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            for group in range(start, stop):
                rows = _batch_rows(footer.row_group(group), keys)
                for batch in file.iter_batches(rows, row_groups=[group], columns=list(keys), use_threads=False):
                    yield batch
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: row {row}: cannot be read as Parquet ({_first_line(error)})") from None

    yield from _blocks(path, batches(), first_row, lambda row: before + size * row // max(footer.num_rows, 1))


def _batch_rows(group: pq.RowGroupMetaData, keys: Sequence[str]) -> int:
    """Return how many rows of a row group are decoded at a time."""
    columns = [group.column(column) for column in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema in keys]
    text_bytes = sum(column.total_uncompressed_size for column in columns)
    rows = min(10_000, max(1, group.num_rows * _BATCH_BYTES // max(text_bytes, 1)))
    repeating = any(_REPEATING.intersection(column.encodings) for column in columns)
    return min(rows, _REPEATING_ROWS) if repeating else rows


def arrow_table(path: str) -> pa.Table:
    """Return the table in an Arrow stream file, mapped into memory rather than read. Raises InputError when it is none."""
    try:
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as a saved data set ({_first_line(error)})") from None


def arrow_blocks(path: str, keys: Sequence[str], start: int, stop: int, before: int) -> Iterator[Rows]:
    """Yield rows start..stop-1 of an Arrow stream file."""
    table, size = arrow_table(path), Path(path).stat().st_size
    batches = table.select(list(keys)).slice(start, stop - start).to_batches(max_chunksize=1 << 16)
    yield from _blocks(path, batches, start + 1, lambda row: before + size * row // table.num_rows)


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


def stream_blocks(name: str, data: Any, keys: Sequence[str], start: int, stop: int, before: int) -> Iterator[Rows]:
    """Yield the rows of shards start..stop-1. The position does not move: no size is known."""

    def batches() -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            for shard in range(start, stop):
                part = data.shard(data.num_shards, shard, contiguous=True).with_format("arrow")
                for table in part.iter(batch_size=100):
                    check_columns(name, table.schema, keys)
                    yield from table.select(list(keys)).to_batches()
                    rows += table.num_rows
        except InputError:
            raise
        except Exception as error:  # the network, or a damaged file at the other end
            raise InputError(f"{name}: no more rows after {rows}: {_first_line(error)}") from None

    yield from _blocks(name, batches(), 1, lambda row: before)


def _blocks(name: str, batches: Iterable[pa.RecordBatch], first_row: int, position: Callable[[int], int]) -> Iterator[Rows]:
    """Cut the rows of `batches` into blocks of about BLOCK_BYTES or one long row; `position` is told the rows read so far."""
    parts, size = [], 0
    for batch in batches:
        ends, here = np.cumsum(_row_bytes(batch)), 0
        while here < batch.num_rows:
            done = ends[here - 1] if here else 0
            there = int(np.searchsorted(ends, done + readers.BLOCK_BYTES - size, side="right"))
            there = max(there, here + (not parts))
            if there > here:
                parts.append(batch.slice(here, there - here))
                size, here = size + ends[there - 1] - done, there
            if here < batch.num_rows:
                yield _block(name, first_row, parts, position)
                first_row, parts, size = first_row + sum(part.num_rows for part in parts), [], 0
    if parts:
        yield _block(name, first_row, parts, position)


def _block(name: str, first_row: int, parts: list[pa.RecordBatch], position: Callable[[int], int]) -> Rows:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, parts[0].schema) as writer:
        for part in parts:
            writer.write_batch(part)
    rows = sum(part.num_rows for part in parts)
    return Rows(name, first_row, stream.getvalue().to_pybytes(), position(first_row + rows - 1))


def _row_bytes(batch: pa.RecordBatch) -> np.ndarray:
    """Return int64[rows]: the bytes that each row takes when it is decoded."""
    sizes = np.full(batch.num_rows, _ROW_BYTES, np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            lengths = pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)
        else:
            lengths = pc.binary_length(column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column)
        sizes += pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _values(column: pa.Array) -> list[str | bytes | None]:
    """Return the texts of a column; the bytes of those that are not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        return [_text(value) for value in column.cast(pa.large_binary()).to_pylist()]


def _text(value: bytes | None) -> str | bytes | None:
    try:
        return value and value.decode()
    except UnicodeDecodeError:
        return value


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
