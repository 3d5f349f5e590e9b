"""Text columns of Parquet files and of saved or Hub data sets.

Saved data sets are written by the `save_to_disk` method of datasets.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megaenc.console import print_rank_0
from megaenc.data.sources import text_files
from megaenc.data.sources.base import TextSource, stat_files
from megaenc.data.sources.text_files import TextBlock, check_columns, extract_texts, format_names
from megaenc.errors import InputError, first_error_line

_BATCH_BYTES = 1 << 20  # text decoded at a time
_ROW_BYTES = 8  # of a row besides its text
# Encodings in which a page of a few bytes may decode to any amount of text.
_REPEATING = {"RLE_DICTIONARY", "PLAIN_DICTIONARY", "DELTA_BYTE_ARRAY"}
_REPEATING_ROWS = 16  # decoded at a time with these encodings
_HUB_FILE_BYTES = 1 << 28  # assumed size of a Hub file, for partitions of similar size


@dataclass(frozen=True)
class TableBlock(TextBlock):
    """Block of table rows, each a document, as an Arrow stream of its text columns.

    The text sources of this module yield it. `name` is the source's, `first_row` the number of the
    first row, counted from 1 in reading order, and `data` the stream. `position` is that of
    TextBlock.
    """

    name: str
    first_row: int
    """Number of the first row, counted from 1 in reading order."""
    data: bytes
    """Text columns as an Arrow stream."""
    position: int

    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[str, ...] | InputError]]:
        rows = count(self.first_row)
        for batch in pa.ipc.open_stream(self.data):
            columns = [_read_column(batch.column(key)) for key in keys]
            for values, row in zip(zip(*columns, strict=True), rows, strict=False):
                try:
                    if not all([type(value) is str for value in values]):
                        values = extract_texts(dict(zip(keys, values, strict=True)), keys)
                    yield row, values
                except InputError as error:
                    yield row, error

    def _describe_location(self, index: int) -> str:
        return f"{self.name}: row {index}"


class ParquetFile(TextSource):
    """Text source of a Parquet file, whose rows are documents.

    `ParquetFile(path, keys)` reads the footer; `keys` are the columns of the texts. It raises
    InputError if the file is not Parquet or lacks a text column for a key. Split points are 0-based
    indices of row groups.
    """

    def __init__(self, path: str, keys: Sequence[str]) -> None:
        """Read the footer of the file.

        Args:
            keys: Columns of the texts.

        Raises:
            InputError: It is not Parquet or lacks a text column for one of `keys`.
        """
        self.name = path
        self._keys = keys
        self.file_stats = stat_files([path])
        try:
            self._footer = pq.read_metadata(path)
            schema = self._footer.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{path}: cannot be read as Parquet ({first_error_line(error)})"
            ) from None
        check_text_columns(path, schema, keys)
        self.size = self.file_stats[0][1]
        self.end = self._footer.num_row_groups
        rows = (self._footer.row_group(group).num_rows for group in range(self.end))
        self._starts = [0, *accumulate(rows)]

    def find_split_point(self, offset: int) -> int:
        """Return the index of the first row group at or after a fraction of the rows.

        The fraction is `offset` / `size`.
        """
        return bisect.bisect_left(self._starts, offset * self._starts[-1] / max(self.size, 1))

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TableBlock]:
        """Yield the rows of row groups start..stop-1 as TableBlocks of about 1 MiB.

        `before`, the bytes on disk of earlier sources, is added to the positions of blocks. No
        whole row group is ever held in memory.

        Raises:
            InputError: From the iterator; a row cannot be read.
        """
        rows = max(self._starts[-1], 1)
        return _group_into_blocks(
            self.name,
            self._read_batches(start, stop),
            1 + self._starts[start],
            lambda row: before + self.size * row // rows,
        )

    def _read_batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of row groups start..stop-1.

        Raises:
            InputError: A row cannot be read; names the row.
        """
        row = 1 + self._starts[start]
        try:
            # Buffered reads and no read-ahead: a row group may be larger than memory.
            file = pq.ParquetFile(self.name, pre_buffer=False, buffer_size=1 << 20)
            for group in range(start, stop):
                rows = self._rows_per_batch(self._footer.row_group(group))
                for batch in file.iter_batches(
                    rows, row_groups=[group], columns=list(self._keys), use_threads=False
                ):
                    # Dictionaries are dropped: every slice of a few rows would carry one.
                    columns = []
                    for column in batch.columns:
                        if pa.types.is_dictionary(column.type):
                            column = column.dictionary.take(column.indices)
                        columns.append(column)
                    yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{self.name}: row {row}: cannot be read as Parquet ({first_error_line(error)})"
            ) from None

    def _rows_per_batch(self, group: pq.RowGroupMetaData) -> int:
        """Return the number of rows of a row group to decode at a time."""
        columns = [group.column(column) for column in range(group.num_columns)]
        columns = [column for column in columns if column.path_in_schema in self._keys]
        text_bytes = sum(column.total_uncompressed_size for column in columns)
        rows = min(10_000, max(1, group.num_rows * _BATCH_BYTES // max(text_bytes, 1)))
        repeating = any(_REPEATING.intersection(column.encodings) for column in columns)
        return min(rows, _REPEATING_ROWS) if repeating else rows


class SavedDatasetFile(TextSource):
    """Text source of one Arrow file written by `save_to_disk` of datasets.

    `SavedDatasetFile(path, keys)` reads the number of rows; `keys` are the columns of the texts,
    which only `find_saved_dataset_files` checks. It raises InputError if the file is missing or not
    Arrow data. Rows are documents, and split points are 0-based row indices.
    """

    def __init__(self, path: str, keys: Sequence[str]) -> None:
        """Read the number of rows.

        Args:
            keys: Columns of the texts, which `find_saved_dataset_files` checks.

        Raises:
            InputError: The file is missing or not Arrow data.
        """
        self.name = path
        self._keys = keys
        self.file_stats = stat_files([path])
        self.size = self.file_stats[0][1]
        self.end = self._map_table().num_rows

    def _map_table(self) -> pa.Table:
        """Memory-map the table.

        Raises:
            InputError: The file is not Arrow data.
        """
        try:
            return pa.ipc.open_stream(pa.memory_map(self.name)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{self.name}: cannot be read as a saved data set ({first_error_line(error)})"
            ) from None

    def find_split_point(self, offset: int) -> int:
        """Return the index of the first row at or after a fraction of the rows.

        The fraction is `offset` / `size`.
        """
        return -(-offset * self.end // self.size)

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TableBlock]:
        """Yield rows start..stop-1 as TableBlocks of about 1 MiB.

        `before`, the bytes on disk of earlier sources, is added to the positions of blocks.
        """
        batches = (
            self._map_table()
            .select(list(self._keys))
            .slice(start, stop - start)
            .to_batches(max_chunksize=1 << 16)
        )
        return _group_into_blocks(
            self.name, batches, start + 1, lambda row: before + self.size * row // self.end
        )


def find_saved_dataset_files(
    directory: str, split: str, keys: Sequence[str]
) -> list[SavedDatasetFile]:
    """Return a source per Arrow file of a data set that `save_to_disk` wrote.

    Args:
        directory: Directory of the data set.
        split: Name of the split; must be `train` for a data set without splits.
        keys: Columns of the texts.

    Raises:
        InputError: The data set, its `split` or its columns are unusable.
    """
    import datasets

    try:
        data = datasets.load_from_disk(directory)
    except Exception as error:  # of any kind
        raise InputError(
            f"{directory}: cannot be read as a saved data set ({first_error_line(error)})"
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise InputError(
                f"{directory}: no split `{split}` (--dataset-split); found "
                f"{format_names(list(data))}"
            )
        data = data[split]
    elif split != "train":
        raise InputError(
            f"{directory}: has no splits, expected one named `{split}` (--dataset-split)"
        )
    check_text_columns(directory, data.features.arrow_schema, keys)
    return [SavedDatasetFile(file["filename"], keys) for file in data.cache_files]


class HubDataset(TextSource):
    """Text source streamed from a data set on the Hugging Face Hub.

    The constructor takes its `name` there, `config` (None: the default one), `split` and `keys`,
    the columns of the texts. It looks the data set up, prints that, and raises InputError if the
    set or a column is missing or the Hub does not answer. Rows are documents, split points are
    0-based indices of files. The size in bytes is a guess.
    """

    is_size_known = False

    def __init__(self, name: str, config: str | None, split: str, keys: Sequence[str]) -> None:
        """Open the data set, and print that it is looked for.

        Args:
            name: Name on the Hub.
            config: Configuration; None: the default one.
            split: Name of the split.
            keys: Columns of the texts.

        Raises:
            InputError: It does not exist, it lacks a column, or the Hub does not answer.
        """
        import datasets

        self.name = name
        self._keys = keys
        self.file_stats = []
        # Printed first: without a network this may take half a minute.
        print_rank_0(f"{name}: no such file or directory; looking on the Hugging Face Hub")
        try:
            data = datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:  # of many types: no network, no such name, config or split
            selection = f"config {config}, split {split}" if config else f"split {split}"
            raise InputError(
                f"{name}: neither an existing file or directory nor a data set on the Hugging Face "
                f"Hub ({selection}): "
                f"{first_error_line(error)}"
            ) from None
        if data.column_names is not None:
            check_columns(name, data.column_names, keys)
            data = data.select_columns(list(keys))
        self._data = data
        self.end = data.num_shards
        self.size = self.end * _HUB_FILE_BYTES

    def find_split_point(self, offset: int) -> int:
        """Return the index of the first file at or after byte `offset`.

        Each file counts as 256 MiB.
        """
        return -(-offset // _HUB_FILE_BYTES)

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[TableBlock]:
        """Yield the rows of files start..stop-1 as TableBlocks of about 1 MiB.

        All are at position `before`, because the true one is unknown.

        Raises:
            InputError: From the iterator; a column is no text, or the Hub gives no more rows.
        """
        return _group_into_blocks(self.name, self._read_batches(start, stop), 1, lambda row: before)

    def _read_batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of files start..stop-1."""
        rows = 0
        try:
            for shard in range(start, stop):
                part = self._data.shard(self._data.num_shards, shard, contiguous=True).with_format(
                    "arrow"
                )
                for table in part.iter(batch_size=100):
                    check_text_columns(self.name, table.schema, self._keys)
                    yield from table.select(list(self._keys)).to_batches()
                    rows += table.num_rows
        except InputError:
            raise
        except Exception as error:  # the network, or a damaged file on the Hub
            raise InputError(
                f"{self.name}: no more rows after {rows}: {first_error_line(error)}"
            ) from None


def check_text_columns(name: str, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raise InputError unless a table has exactly one text column for each of `keys`.

    Its type is string, large_string, string_view or a dictionary of one of these.

    Args:
        name: Name of the table in errors.
    """
    check_columns(name, schema.names, keys)
    for key in keys:
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in (pa.string(), pa.large_string(), pa.string_view()):
            raise InputError(f"{name}: column `{key}`: found {kind}, expected text")


def _group_into_blocks(
    name: str, batches: Iterable[pa.RecordBatch], first_row: int, position: Callable[[int], int]
) -> Iterator[TableBlock]:
    """Group rows into blocks of about BLOCK_BYTES or one long row.

    Args:
        position: Function from the rows read so far to the position of a block.
    """
    parts = []
    size = 0
    for batch in batches:
        ends = np.cumsum(_compute_row_sizes(batch))
        start = 0
        while start < batch.num_rows:
            done = ends[start - 1] if start else 0
            end = int(np.searchsorted(ends, done + text_files.BLOCK_BYTES - size, side="right"))
            end = max(end, start + (not parts))
            if end > start:
                parts.append(batch.slice(start, end - start))
                size += ends[end - 1] - done
                start = end
            if start < batch.num_rows:
                yield _build_block(name, first_row, parts, position)
                first_row += sum(part.num_rows for part in parts)
                parts = []
                size = 0
    if parts:
        yield _build_block(name, first_row, parts, position)


def _build_block(
    name: str, first_row: int, parts: list[pa.RecordBatch], position: Callable[[int], int]
) -> TableBlock:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, parts[0].schema) as writer:
        for part in parts:
            writer.write_batch(part)
    rows = sum(part.num_rows for part in parts)
    return TableBlock(
        name, first_row, stream.getvalue().to_pybytes(), position(first_row + rows - 1)
    )


def _compute_row_sizes(batch: pa.RecordBatch) -> np.ndarray:
    """Compute int64[rows], the decoded size of each row in bytes."""
    sizes = np.full(batch.num_rows, _ROW_BYTES, np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            lengths = pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)
        else:
            lengths = pc.binary_length(
                column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column
            )
        sizes += pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _read_column(column: pa.Array) -> list[str | bytes | None]:
    """Return the values of a text column; those that are not UTF-8 stay bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values = column.cast(pa.large_binary()).to_pylist()
        for row, value in enumerate(values):
            with contextlib.suppress(UnicodeDecodeError):
                values[row] = value and value.decode()
        return values
