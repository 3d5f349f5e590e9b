"""MDS shards, the format of MosaicML streaming, as texts or token ids.

An index.json lists shards of up to 4 GiB, raw or compressed with Zstandard. A shard begins with
uint32, little-endian: the number n of samples, and n + 1 offsets of samples. A JSON header and the
samples follow. A sample has the sizes of its columns of variable size as uint32, then the bytes of
all columns.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from megaenc.data.sources import text_files
from megaenc.data.sources.base import TOKEN_DTYPES, TextGroup, stat_files
from megaenc.data.sources.text_files import (
    TextBlock,
    extract_texts,
    format_names,
    open_decompressed,
)
from megaenc.errors import InputError
from megaenc.json_checks import JSON_OBJECT, Count, Text, check_json
from megaenc.json_files import read_json_object

_INDEX_BYTES = 1 << 30  # that of mmBERT's midtraining data has 30 MB
_ADVICE = "expected what MosaicML streaming writes; copy the data set again"
# Codes of dtypes in arrays that hold their own.
_DTYPES = dict(zip((8, 9, 16, 17, 32, 33, 64, 65), TOKEN_DTYPES, strict=True))


class _File(TypedDict):
    __pydantic_config__ = JSON_OBJECT
    basename: Text
    bytes: Count
    hashes: dict[str, str]


class _ShardEntry(TypedDict):
    __pydantic_config__ = JSON_OBJECT
    version: Literal[2]
    format: Literal["mds"]
    compression: str | None
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    raw_data: _File
    zip_data: _File | None
    samples: Count


class _Index(TypedDict):
    __pydantic_config__ = JSON_OBJECT
    version: Literal[2]
    shards: list[_ShardEntry]


_INDEX_TYPE = TypeAdapter(_Index)


@dataclass(frozen=True)
class MdsShard:
    """Shard of an MDS data set, as its index describes it; `read_index` returns it.

    `path` is the absolute path of the file to read: the raw file, or if that is missing, the
    compressed one (`is_compressed`); `files` are the paths of both. The file has `file_bytes`
    bytes, and `raw_bytes` without compression. `samples` is the number of samples. `columns`,
    `encodings` and `sizes` (in bytes, None if it varies) describe the columns in their order.
    `hashes` has the hash of the raw file, in hex, by algorithm.
    """

    path: str
    """Absolute path of the file to read: the raw one, or if there is none, the compressed one."""
    files: list[str]
    """Absolute paths of the raw file and of the compressed one, of which one may be missing."""
    is_compressed: bool
    file_bytes: int
    raw_bytes: int
    """Bytes of the shard without compression."""
    samples: int
    columns: list[str]
    """Names of the columns, in the order of their bytes."""
    encodings: list[str]
    sizes: list[int | None]
    """Bytes of each column; None if they vary."""
    hashes: dict[str, str]
    """Hash of the raw file, in hex, by the name of the algorithm."""


@dataclass(frozen=True)
class MdsBlock(TextBlock):
    """Block of samples of an MDS shard, each a document; `MdsDataset` yields it.

    `parse` returns a document as a tuple of the values of its columns: texts if `dtype` is None,
    else integer arrays of token ids. `first_sample` is the 0-based index in `shard` of the first
    sample, and `lengths` are the bytes of each sample in `data`.
    """

    shard: MdsShard
    first_sample: int
    """0-based index, in the shard, of the first sample."""
    lengths: list[int]
    """Bytes of each sample."""
    dtype: str | None
    """dtype of token ids; empty if the encoding has it. None: the documents are texts."""
    data: bytes
    position: int

    def _parse_documents(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[int, tuple[Any, ...] | InputError]]:
        places = [self.shard.columns.index(key) for key in keys]
        decoders = [_build_decoder(self.shard.encodings[place], self.dtype) for place in places]
        start = 0
        for index, length in enumerate(self.lengths, self.first_sample):
            sample = self.data[start : start + length]
            start += length
            try:
                values = self._split_columns(sample)
                document = tuple(
                    [decode(values[place]) for place, decode in zip(places, decoders, strict=True)]
                )
                if self.dtype is None:
                    document = extract_texts(dict(zip(keys, document, strict=True)), keys)
                yield index, document
            except InputError as error:
                yield index, error

    def _split_columns(self, sample: bytes) -> list[bytes]:
        """Return the bytes of each column of a sample."""
        head = struct.Struct(f"<{self.shard.sizes.count(None)}I")
        sizes = iter(head.unpack_from(sample) if len(sample) >= head.size else ())
        start = head.size
        values = []
        for size in self.shard.sizes:
            end = start + (next(sizes, 0) if size is None else size)
            values.append(sample[start:end])
            start = end
        if start != len(sample):
            raise InputError(f"found {len(sample):,} bytes, expected {start:,} by its columns")
        return values

    def _describe_location(self, index: int) -> str:
        return f"{self.shard.path}: sample {index}"


class MdsDataset(TextGroup):
    """Text source of the shards of an MDS data set.

    It is made from the path of the index.json, shards of `read_index`, the columns to read, and the
    dtype of token ids: empty for arrays, which have one, and None for texts. The constructor raises
    InputError if a shard is missing, or has another size or no such column. Samples are documents,
    in the order of the shards; split points are 0-based indices of shards.
    """

    def __init__(
        self, path: str, shards: Sequence[MdsShard], keys: Sequence[str], dtype: str | None = None
    ) -> None:
        """Check the columns and the sizes of the files.

        Args:
            path: Path of the index.json, for errors.
            shards: One or more of its shards.
            keys: Columns of the documents.
            dtype: None: the columns are texts. Else they are token ids: of this dtype in columns
                of bytes; empty for those of arrays, which have a dtype.

        Raises:
            InputError: A shard has no such column, is missing or has another size than in the
                index.
        """
        for shard in shards:
            _check_columns(path, shard, keys, dtype)
        super().__init__([shard.path for shard in shards])
        self.name = path
        self._shards = shards
        self._dtype = dtype
        for shard, (_, size, _) in zip(shards, self.file_stats, strict=True):
            self._check_equal(shard, size, shard.file_bytes)
        self._index_stats = stat_files([path])
        self.file_stats = [*self.file_stats, *self._index_stats]

    def file_stats_between(self, start: int, stop: int) -> Sequence[tuple[str, int, int]]:
        """Return the `file_stats` of shards start..stop-1, then those of the index.

        Each is (absolute path, bytes, modification time in ns).
        """
        return [*super().file_stats_between(start, stop), *self._index_stats]

    def read_blocks(self, start: int, stop: int, before: int) -> Iterator[MdsBlock]:
        """Yield the samples of shards start..stop-1 as MdsBlocks of about 1 MiB.

        The size is that without compression; a block is from one shard. Its position is `before`,
        the bytes on disk of earlier sources, plus those of this data set up to the block's end,
        shards before `start` included.

        Raises:
            InputError: A shard is damaged, or has another hash than in the index, which is known
                only after the shard's last block.
        """
        before += sum(shard.file_bytes for shard in self._shards[:start])
        for shard in self._shards[start:stop]:
            with open_decompressed(shard.path, is_zstandard=shard.is_compressed) as (_, stream):
                yield from self._read_shard(shard, _HashedStream(shard, stream), before)
            before += shard.file_bytes

    def _read_shard(
        self, shard: MdsShard, stream: "_HashedStream", before: int
    ) -> Iterator[MdsBlock]:
        samples = int.from_bytes(stream.read(4), "little")
        self._check_equal(shard, samples, shard.samples, "samples")
        offsets = np.frombuffer(stream.read(4 * samples + 4), "<u4").astype(np.int64)
        if offsets[0] < stream.position or (np.diff(offsets) < 0).any():
            raise InputError(f"{shard.path}: damaged offsets of samples; {_ADVICE}")
        self._check_equal(shard, int(offsets[-1]), shard.raw_bytes)
        stream.read(int(offsets[0]) - stream.position)  # a header that repeats the index
        first = 0
        while first < samples:
            limit = offsets[first] + text_files.BLOCK_BYTES
            stop = int(np.searchsorted(offsets, limit, side="right")) - 1
            stop = max(stop, first + 1)
            yield MdsBlock(
                shard,
                first,
                np.diff(offsets[first : stop + 1]).tolist(),
                self._dtype,
                stream.read(int(offsets[stop] - offsets[first])),
                before + shard.file_bytes * int(offsets[stop]) // shard.raw_bytes,
            )
            first = stop
        stream.check_end()

    def _check_equal(
        self, shard: MdsShard, actual: int, expected: int, unit: str = "bytes"
    ) -> None:
        """Raise InputError if a shard differs from the index."""
        if actual != expected:
            raise InputError(
                f"{shard.path}: found {actual:,} {unit}, expected {expected:,} as in {self.name}; "
                "copy the data set again"
            )


class _HashedStream:
    """Stream of a shard, hashed as it is read."""

    def __init__(self, shard: MdsShard, stream: BinaryIO) -> None:
        self.position = 0
        self._shard = shard
        self._stream = stream
        # Those of xxhash need another package, and those of shake a length.
        known = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")}
        names = sorted(known.intersection(shard.hashes))
        self._hashes = {name: hashlib.new(name) for name in names}

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes of the shard, without compression, and hash them.

        Raises:
            InputError: There are fewer.
        """
        data = self._stream.read(size)
        self.position += len(data)
        if len(data) < size:
            raise InputError(f"{self._shard.path}: ends after {self.position:,} bytes; {_ADVICE}")
        for hashed in self._hashes.values():
            hashed.update(data)
        return data

    def check_end(self) -> None:
        """Raise InputError if more bytes follow, or a hash differs from the index.

        It is called after the last `read`. Hashes of algorithms that hashlib lacks are not checked.
        """
        path = self._shard.path
        if self._stream.read(1):
            raise InputError(f"{path}: continues after {self.position:,} bytes; {_ADVICE}")
        for name, hashed in self._hashes.items():
            expected = self._shard.hashes[name]
            if hashed.hexdigest() != expected:
                raise InputError(
                    f"{path}: found {name} {hashed.hexdigest()}, expected {expected}; {_ADVICE}"
                )


def read_index(path: str) -> list[MdsShard]:
    """Return the shards that an index.json of MDS lists, in order.

    It is not checked that their files exist.

    Args:
        path: Path of the index.json.

    Raises:
        InputError: The index is missing, damaged or of another version, names a file outside its
            directory, or a shard has no raw file and is compressed by something other than
            Zstandard.
    """
    index = read_json_object(Path(path), "the index of MDS shards", _INDEX_BYTES)
    index = check_json(_INDEX_TYPE, index, path, _ADVICE)
    shards = []
    for entry in index["shards"]:
        columns = entry["column_names"]
        if not len(columns) == len(entry["column_encodings"]) == len(entry["column_sizes"]):
            raise InputError(f"{path}: found columns without encoding or size; {_ADVICE}")
        raw = entry["raw_data"]
        file = raw
        files = [_join(path, raw)]
        if not 4 * entry["samples"] + 8 <= raw["bytes"] < 1 << 32:
            raise InputError(
                f"{path}: {raw['basename']}: found {raw['bytes']:,} bytes and "
                f"{entry['samples']:,} samples, whose offsets do not fit; {_ADVICE}"
            )
        if entry["zip_data"] is not None:
            files.append(_join(path, entry["zip_data"]))
        if entry["zip_data"] is not None and not os.path.exists(files[0]):
            file = entry["zip_data"]
            compression = entry["compression"] or ""
            if compression.partition(":")[0] != "zstd":
                raise InputError(
                    f"{path}: {file['basename']}: found compression `{compression}`, expected zstd "
                    "or none"
                )
        shards.append(
            MdsShard(
                path=files[0] if file is raw else files[1],
                files=files,
                is_compressed=file is not raw,
                file_bytes=file["bytes"],
                raw_bytes=raw["bytes"],
                samples=entry["samples"],
                columns=columns,
                encodings=entry["column_encodings"],
                sizes=entry["column_sizes"],
                hashes=raw["hashes"],
            )
        )
    return shards


def _join(index: str, file: _File) -> str:
    """Return the absolute path of a file that an index lists.

    Raises:
        InputError: The file is outside the directory of the index.
    """
    name = file["basename"]
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise InputError(
            f"{index}: field `basename`: found {name!r}, expected a file in the directory of the "
            f"index; {_ADVICE}"
        )
    return os.path.abspath(os.path.join(os.path.dirname(index), name))


def _check_columns(index: str, shard: MdsShard, keys: Sequence[str], dtype: str | None) -> None:
    """Raise InputError unless a shard has the columns `keys`, of fitting encodings."""
    for key in keys:
        if key not in shard.columns:
            raise InputError(
                f"{index}: no column `{key}`; found {format_names(shard.columns)}; set --json-key, "
                "or --input-tokens for token ids"
            )
        encoding = shard.encodings[shard.columns.index(key)]
        name, array_dtype, shape = f"{encoding}::".split(":")[:3]
        if dtype is None:
            is_known = encoding in ("str", "bytes", "json")
            expected = f"text (str, bytes, json), or token ids and --input-tokens {key}"
        elif dtype:
            is_known = encoding == "bytes"
            expected = f"bytes; for an array, --input-tokens {key} without a dtype"
        else:
            is_known = name == "ndarray" and array_dtype in ("", *TOKEN_DTYPES) and "," not in shape
            expected = (
                "ndarray of integers and one dimension; for bytes, add their dtype as in "
                f"--input-tokens {key}:int64"
            )
        if not is_known:
            raise InputError(f"{index}: column `{key}`: found {encoding}, expected {expected}")


def _build_decoder(encoding: str, dtype: str | None) -> Callable[[bytes], Any]:
    """Return the decoder of a column's bytes, which `_check_columns` has accepted."""
    if dtype:
        return partial(_decode_array, dtype=dtype, has_shape=False)
    if dtype is not None:
        _, array_dtype, shape = f"{encoding}::".split(":")[:3]
        return partial(_decode_array, dtype=array_dtype, has_shape=not shape)
    return partial(_decode_text, decode=json.loads if encoding == "json" else bytes.decode)


def _decode_text(value: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Return a decoded text; the bytes themselves if they cannot be decoded."""
    try:
        return decode(value)
    except (ValueError, RecursionError):
        return value


def _decode_array(value: bytes, dtype: str, has_shape: bool) -> np.ndarray:
    """Return an array of one dimension.

    Args:
        dtype: Name of its dtype; if empty, a code before the values tells it.
        has_shape: Whether the number of values is before them.

    Raises:
        InputError: The array has more dimensions, is not of integers, or is damaged.
    """
    try:
        start = 0
        if not dtype:
            dtype = _DTYPES.get(value[0], "")
            start = 1
        if not dtype:
            raise InputError(f"found an array of dtype {value[0]}, expected integers")
        if has_shape:
            dimensions, width = divmod(value[start], 4)
            if dimensions != 1:
                raise InputError(f"found an array of {dimensions} dimensions, expected one")
            shape = value[start + 1 : start + 1 + (1 << width)]
            start += 1 + len(shape)
        values = np.frombuffer(value, np.dtype(dtype).newbyteorder("<"), offset=start)
        if has_shape and len(values) != int.from_bytes(shape, "little"):
            raise ValueError
    except (IndexError, ValueError):
        raise InputError(f"damaged array of {len(value):,} bytes") from None
    return values
