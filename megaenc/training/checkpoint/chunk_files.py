"""Files of a checkpoint: chunks of tensors by rank, and their index.

The format is that of torch's distributed checkpoints and of megatron-core: `__3_0.distcp` holds the
chunks of rank 3 as archives of torch.save, `.metadata` their places. `index.json` has the same
places as plain text, and the bytes at which elements begin. megaenc reads only these, so that
nothing is unpickled.
"""

import json
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import _create_file_view

from megaenc.errors import InputError
from megaenc.json_files import MAX_TEXT, parse_json, read_regular_file
from megaenc.training.checkpoint_dir import (
    INDEX_FILE,
    CheckpointReadError,
    file_digest,
    name_file,
    name_machine,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_READERS = 4  # threads, each with a buffer of at most one chunk
_INDEX_READERS = 16  # threads: on a shared disk a small file takes a while, but no processor

PUBLISHED_FILES = (INDEX_FILE, ".metadata", "common.pt", "metadata.json")
"""Files that the publishing rank writes besides its chunks and state.json."""
Digests = dict[str, dict[str, Any]]
"""Size and SHA-256 of files by name."""


@dataclass(frozen=True)
class StoredChunk:
    """Rectangle of a tensor, and its place in a file of a checkpoint.

    `key` names the tensor; `dtype` is "float32" or "bfloat16". `global_shape`, `global_offset` and
    `shape` (of the rectangle) have as many axes as the tensor; `shape` is 1 in all but the last
    two. In `file`, a name without a directory, elements begin at byte `data_start`, inside a
    torch.save archive of `archive_bytes` at `archive_start`.
    """

    key: str
    """Name of the tensor."""
    dtype: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    archive_start: int
    """Byte of the file at which the archive begins."""
    archive_bytes: int
    data_start: int
    """Byte of the file at which the elements begin."""

    @property
    def corner(self) -> tuple[int, ...]:
        """Return the exclusive end of the rectangle on each axis of the tensor."""
        return tuple(
            start + size for start, size in zip(self.global_offset, self.shape, strict=True)
        )

    @property
    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of the first and the last row in the tensor, inclusive.

        A row has an index on all axes but the last. In a vector each element is a row, with its
        place as the only index.
        """
        axes = max(1, len(self.shape) - 1)
        return self.global_offset[:axes], tuple(end - 1 for end in self.corner[:axes])

    @property
    def columns(self) -> range:
        """Return the indices on the tensor's last axis that each row of the chunk has.

        It is range(1) for a vector, whose elements are rows.
        """
        return range(self.global_offset[-1], self.corner[-1]) if len(self.shape) > 1 else range(1)


_CHUNK_FIELDS = {field.name for field in fields(StoredChunk)}


def write_chunks(directory: Path, rank: int, chunks: Sequence[ShardedTensor]) -> None:
    """Write and sync the chunks of rank `rank`, and an index of them.

    Each rank calls it; without chunks only the index is written. `publish_chunks` reads the index.
    Existing files of the rank are replaced. Nothing is communicated.

    Args:
        directory: Directory of the checkpoint, which exists.
        chunks: Rectangles of tensors, with their elements as `data`, float32 or bfloat16, on any
            device.

    Raises:
        OSError: A file cannot be written.
    """
    file = directory / f"__{rank}_0.distcp"
    places = []
    digests: Digests = {}
    if chunks:
        with open(file, "wb") as stream:
            for chunk in chunks:
                start = stream.tell()
                # Not copied if in host memory already. The storage holds nothing else, because
                # torch.save writes whole storages.
                values = chunk.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                elements = torch.from_numpy(values.numpy()).view(chunk.dtype)
                torch.save(elements.view(_box_shape(chunk)), stream)
                places.append((start, stream.tell() - start))
            stream.flush()
            os.fsync(stream.fileno())
        digests[file.name] = file_digest(file)
    index = {"files": digests, "chunks": []}
    for chunk, place in zip(chunks, places, strict=True):
        index["chunks"].append(asdict(_describe_chunk(chunk, file, *place)))
    with open(_rank_index(directory, rank), "w") as stream:
        json.dump(index, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _rank_index(directory: Path, rank: int) -> Path:
    """Return the path of the index of the chunks of `rank`.

    The file is there until the checkpoint is published.
    """
    return directory / f"__{rank}_0.json"


def _box_shape(chunk: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of `chunk` with an axis for each one of the whole tensor."""
    return (1,) * chunk.prepend_axis_num + tuple(chunk.local_shape)


def _describe_chunk(
    chunk: ShardedTensor, file: Path, archive_start: int, archive_bytes: int
) -> StoredChunk:
    """Return the place of a chunk that has been written."""
    with open(file, "rb") as stream:
        archive = torch._C.PyTorchFileReader(
            _create_file_view(stream, archive_start, archive_bytes)
        )
        data_start = archive_start + archive.get_record_offset("data/0")
    return StoredChunk(
        key=chunk.key,
        dtype=str(chunk.dtype).removeprefix("torch."),
        global_shape=tuple(chunk.global_shape),
        global_offset=tuple(chunk.global_offset),
        shape=_box_shape(chunk),
        file=file.name,
        archive_start=archive_start,
        archive_bytes=archive_bytes,
        data_start=data_start,
    )


def publish_chunks(directory: Path, ranks: int, optimizer_step: int) -> Digests:
    """Check the chunks of all ranks, write index.json and return the files' digests.

    One rank calls it, once ranks 0 to `ranks` - 1 have written. It writes PUBLISHED_FILES unsynced,
    deletes the ranks' indexes, and returns size and SHA-256 of only the files with chunks, by name.

    Args:
        optimizer_step: Number of optimizer updates made.

    Raises:
        RuntimeError: The chunks of a tensor overlap or leave elements out.
        InputError: The index is larger than a load would read.
        OSError: A file cannot be read or written.
    """
    with ThreadPoolExecutor(_INDEX_READERS) as pool:
        texts = pool.map(lambda rank: _rank_index(directory, rank).read_bytes(), range(ranks))
        indexes = [json.loads(text) for text in texts]
    digests = {name: digest for index in indexes for name, digest in index["files"].items()}
    entries = [entry for index in indexes for entry in index["chunks"]]
    chunks = [_parse_chunk(entry, digests) for entry in entries]
    for tensor in _group_by_key(chunks).values():
        check_coverage(tensor)
    content = json.dumps({"optimizer_step": optimizer_step, "chunks": entries}).encode()
    if len(content) > MAX_TEXT:  # no load would read it
        raise InputError(
            f"{directory / INDEX_FILE}: {len(content):,} bytes, expected at most {MAX_TEXT:,}; "
            "save on fewer ranks"
        )
    (directory / INDEX_FILE).write_bytes(content)
    _write_metadata(directory, chunks)
    with open(directory / "common.pt", "wb") as stream:
        torch.save({"optimizer": {"param_groups": [{"step": optimizer_step}]}}, stream)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    with ThreadPoolExecutor(_INDEX_READERS) as pool:
        list(
            pool.map(
                lambda rank: _rank_index(directory, rank).unlink(missing_ok=True), range(ranks)
            )
        )
    return digests


def _write_metadata(directory: Path, chunks: Sequence[StoredChunk]) -> None:
    """Write the index of `chunks` for torch's and megatron-core's readers."""
    tensors = {}
    storage = {}
    for key, stored in _group_by_key(chunks).items():
        boxes = [
            dcp.ChunkStorageMetadata(torch.Size(chunk.global_offset), torch.Size(chunk.shape))
            for chunk in stored
        ]
        properties = dcp.TensorProperties(dtype=_DTYPES[stored[0].dtype])
        tensors[key] = dcp.TensorStorageMetadata(
            properties, torch.Size(stored[0].global_shape), boxes
        )
        for chunk, box in zip(stored, boxes, strict=True):
            place = filesystem._StorageInfo(chunk.file, chunk.archive_start, chunk.archive_bytes)
            storage[dcp.MetadataIndex(key, box.offsets)] = place
    metadata = dcp.Metadata(tensors, storage_data=storage, version=filesystem.CURRENT_DCP_VERSION)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def check_coverage(chunks: Sequence[StoredChunk]) -> None:
    """Raise RuntimeError unless chunks hold each element of their tensor once.

    Args:
        chunks: Chunks of one tensor, 1 or more, in any order.
    """
    shape = chunks[0].global_shape
    elements = 0
    active: list[StoredChunk] = []  # those with rows in common with the current chunk
    for chunk in sorted(chunks, key=lambda stored_chunk: stored_chunk.global_offset):
        is_inside = chunk.global_shape == shape and all(
            end <= size for end, size in zip(chunk.corner, shape, strict=True)
        )
        first_row, _ = chunk.rows
        active = [active_chunk for active_chunk in active if active_chunk.rows[1] >= first_row]
        columns = chunk.columns
        overlaps = any(
            columns.start < active_chunk.columns.stop and active_chunk.columns.start < columns.stop
            for active_chunk in active
        )
        if not is_inside or overlaps:
            raise RuntimeError(
                f"{chunk.key}: {chunk} overlaps with another chunk or leaves the tensor"
            )
        elements += math.prod(chunk.shape)
        active.append(chunk)
    if elements != math.prod(shape):
        raise RuntimeError(
            f"{chunks[0].key}: found chunks of {elements:,} elements, expected {math.prod(shape):,}"
        )


def read_index(directory: Path, digests: Digests) -> bytes:
    """Return the checked bytes of a checkpoint's index.json, for `parse_index`.

    Its chunks lie in the files of `digests` and hold each element of each tensor once. Only
    index.json is read, and its own SHA-256 is not compared.

    Args:
        directory: Directory of the checkpoint.
        digests: Size and SHA-256 of the checkpoint's files by name (`files` of state.json).

    Raises:
        CheckpointReadError: index.json is missing or cannot be read.
        InputError: Its content is not that of a save.
    """
    file = directory / INDEX_FILE
    try:
        content = read_regular_file(file)
        _, chunks = parse_index(content, digests)
        for tensor in _group_by_key(chunks).values():
            check_coverage(tensor)
    except OSError as error:
        raise CheckpointReadError(f"{file}: {error.strerror}") from None
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: not written by a save ({error}); do not use this checkpoint"
        ) from None
    return content


def parse_index(content: bytes, digests: Digests) -> tuple[int, list[StoredChunk]]:
    """Return the number of optimizer updates and the chunks in an index.json.

    Overlaps and missing elements are not found; see `check_coverage`.

    Args:
        content: Bytes of the file.
        digests: Size and SHA-256 of the checkpoint's files by name.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: `content` is no index of files in
            `digests`.
    """
    index = parse_json(content)
    if type(index["optimizer_step"]) is not int or index["optimizer_step"] < 0:
        raise ValueError(f"optimizer_step: found {index['optimizer_step']}")
    return index["optimizer_step"], [_parse_chunk(entry, digests) for entry in index["chunks"]]


def _parse_chunk(entry: dict[str, Any], digests: Digests) -> StoredChunk:
    """Return the chunk of a JSON object.

    Raises:
        ValueError: The object is no chunk in files of `digests`.
    """
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    if values.keys() != _CHUNK_FIELDS or type(values["key"]) is not str:
        raise ValueError("a chunk has other fields")
    chunk = StoredChunk(**values)
    boxes = (chunk.global_shape, chunk.global_offset, chunk.shape)
    numbers = [number for box in boxes for number in box]
    numbers += [chunk.archive_start, chunk.archive_bytes, chunk.data_start]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{chunk.key}: sizes or offsets are no numbers")
    if (
        not chunk.shape
        or len({len(box) for box in boxes}) > 1
        or any(size != 1 for size in chunk.shape[:-2])
    ):
        raise ValueError(f"{chunk.key}: a chunk is no rectangle")
    data_bytes = math.prod(chunk.shape) * _DTYPES[chunk.dtype].itemsize
    if chunk.data_start + data_bytes > digests[chunk.file]["bytes"]:
        raise ValueError(f"{chunk.key}: a chunk is not in its file")
    return chunk


def _group_by_key(chunks: Iterable[StoredChunk]) -> dict[str, list[StoredChunk]]:
    tensors = defaultdict(list)
    for chunk in chunks:
        tensors[chunk.key].append(chunk)
    return dict(tensors)


class ChunkReader:
    """Reader of rectangles of tensors, which may lie across any stored chunks.

    Files are open only during `read`.

    Args:
        directory: Directory of the checkpoint.
        chunks: All chunks of its index.json (`parse_index`).
    """

    def __init__(self, directory: Path, chunks: Iterable[StoredChunk]):
        self._directory = directory
        self._tensors = _group_by_key(chunks)

    def has(self, prefix: str) -> bool:
        """Return whether the name of any tensor begins with `prefix`."""
        return any(key.startswith(prefix) for key in self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor `key`.

        Raises:
            InputError: The checkpoint has no tensor of that name.
        """
        if key not in self._tensors:
            raise InputError(
                f"{self._directory / INDEX_FILE}: found no tensor {key}, expected that of the "
                "run's model"
            )
        return self._tensors[key][0].global_shape

    def read(self, chunks: Iterable[ShardedTensor]) -> None:
        """Fill the `data` of `chunks` in place, converted to its data type, with threads.

        The `key`, `global_offset` and shape of a chunk choose the tensor and the rectangle. The
        number of rows may differ from the checkpoint's if `allow_shape_mismatch` of the chunk is
        set, as for the vocabulary: rows that are not saved become zero. Digests are not compared.
        Nothing is communicated. After an error, some chunks may be filled.

        Raises:
            CheckpointReadError: A file cannot be read.
            InputError: A tensor or some of its elements are missing, or it has another shape.
        """
        with name_machine(), ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(self._read_chunk, chunks):
                pass

    def _read_chunk(self, chunk: ShardedTensor) -> None:
        stored_shape = self.shape(chunk.key)
        expected_shape = tuple(chunk.global_shape)
        size = np.array(_box_shape(chunk))
        if chunk.allow_shape_mismatch:  # in the number of rows
            expected_shape = (
                *stored_shape[: chunk.prepend_axis_num + 1],
                *expected_shape[chunk.prepend_axis_num + 1 :],
            )
        if stored_shape != expected_shape:
            raise InputError(
                f"{self._directory / INDEX_FILE}: {chunk.key}: found the shape {stored_shape}, "
                f"expected {expected_shape}"
            )
        target = chunk.data.view(tuple(size))
        offset = np.array(chunk.global_offset)
        missing = math.prod(np.clip(np.array(stored_shape) - offset, 0, size).tolist())
        if missing < target.numel():
            target.zero_()
        stored = self._tensors[chunk.key]
        starts = np.maximum([stored_chunk.global_offset for stored_chunk in stored], offset)
        stops = np.minimum([stored_chunk.corner for stored_chunk in stored], offset + size)
        for index in np.flatnonzero((starts < stops).all(1)):
            start = starts[index]
            stop = stops[index]
            values = self._read_box(
                stored[index], start - stored[index].global_offset, stop - start
            )
            target[tuple(map(slice, start - offset, stop - offset))].copy_(values)
            missing -= values.numel()
        if missing > 0:
            raise InputError(
                f"{self._directory / INDEX_FILE}: {chunk.key}: found no chunk for {missing:,} "
                "elements"
            )

    def _read_box(self, chunk: StoredChunk, start: np.ndarray, size: np.ndarray) -> torch.Tensor:
        """Return the rectangle of `size` at `start` of a stored chunk."""
        dtype = _DTYPES[chunk.dtype]
        width = chunk.shape[-1]
        columns = int(size[-1])
        first_row = int(start[-2]) if len(start) > 1 else 0
        rows = math.prod(size.tolist()) // columns
        pieces = [(first_row + row, columns) for row in range(rows)]
        if columns == width:
            pieces = [(first_row, rows * columns)]
        buffer = torch.empty(rows * columns, dtype=dtype)
        view = memoryview(buffer.view(torch.uint8).numpy())
        done = 0
        file = self._directory / chunk.file
        with name_file(file), open(file, "rb", buffering=0) as stream:
            for row, count in pieces:
                stream.seek(chunk.data_start + (row * width + int(start[-1])) * dtype.itemsize)
                _read_into(stream, view[done : done + count * dtype.itemsize])
                done += count * dtype.itemsize
        return buffer.view(tuple(size))


def _read_into(stream: BinaryIO, view: memoryview) -> None:
    """Fill `view` from `stream`.

    Raises:
        OSError: The file ends before.
    """
    while view:
        count = stream.readinto(view)
        if not count:
            raise OSError(0, "ends early", stream.name)
        view = view[count:]
