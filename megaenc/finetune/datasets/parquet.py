"""Labelled data in Parquet files: their rows, and class names of their schema.

`datasets` writes class names into the schema.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaenc.data.sources.text_files import check_columns
from megaenc.errors import InputError, first_error_line
from megaenc.json_files import parse_json

_ROWS_PER_BATCH = 1000
"""Rows that are decoded at a time."""


def read_parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`path:row N`, fields by column) of each row of a Parquet file, N from 1.

    Raises:
        InputError: The file cannot be read, or has a column twice. It is raised during iteration.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 1
    try:
        # Buffered reads and no read-ahead: a row group may be larger than memory.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            check_columns(str(path), names, names)
            for batch in file.iter_batches(_ROWS_PER_BATCH, use_threads=False):
                for fields in batch.to_pylist():
                    yield f"{path}:row {row}", fields
                    row += 1
    # Text and dates that Python does not know are errors of the last two types.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}:row {row}: cannot be read as Parquet ({first_error_line(error)})"
        ) from None


def read_parquet_label_names(path: Path, columns: Sequence[str]) -> list[str] | None:
    """Return the class names, in the order of their indices, of a Parquet column.

    `datasets` writes those of labels or tags into the file's schema. The result is None if there
    are none, or if the schema is unreadable.

    Args:
        columns: Names that the column may have; the first that is there is read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
        features = parse_json(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        feature = next((features[column] for column in columns if column in features), None)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None
    feature = feature[0] if isinstance(feature, list) and feature else feature
    while isinstance(feature, dict) and "names" not in feature:
        feature = feature.get("feature")
    names = feature["names"] if isinstance(feature, dict) else None
    return (
        names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    )
