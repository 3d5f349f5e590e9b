"""Chunks of tensors: their ranges, their files, and other readers of them."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint

from megaenc.errors import InputError

pytestmark = pytest.mark.usefixtures("one_process")
SHAPES = [
    ((7, 5), torch.float32),
    ((7, 5), torch.bfloat16),
    ((33,), torch.float32),
    ((9, 1), torch.float32),
]


def place(shape, whole=None, offset=None, **more):
    """Return the place of a matrix in a whole one."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        "w", None, torch.float32, shape, whole or shape, offset or (0,) * len(shape), None, **more
    )


def write(directory, whole, bounds):
    """Write a matrix as a few ranks would, with flat ranges that end at `bounds`."""
    from megaenc.training.checkpoint.chunk_files import publish_chunks, write_chunks
    from megaenc.training.checkpoint.state_tensors import MAX_CHUNK_BYTES, cut_range

    for rank, (start, stop) in enumerate(zip([0, *bounds], [*bounds, whole.numel()], strict=True)):
        chunks = list(cut_range(place(tuple(whole.shape)), whole.flatten()[start:stop], start))
        assert len(chunks) <= 3 or MAX_CHUNK_BYTES < 64
        assert all(chunk.data.nbytes <= MAX_CHUNK_BYTES for chunk in chunks)
        write_chunks(directory, rank, chunks)
    return publish_chunks(directory, len(bounds) + 1, 3)


def open_reader(directory, digests):
    from megaenc.training.checkpoint.chunk_files import ChunkReader, parse_index

    _, chunks = parse_index((directory / "index.json").read_bytes(), digests)
    return ChunkReader(directory, chunks)


@pytest.mark.parametrize("limit", [32 << 20, 12])
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_any_rectangle_is_read_from_any_ranges(shape, dtype, limit, tmp_path, monkeypatch):
    from megaenc.training.checkpoint import state_tensors

    monkeypatch.setattr(state_tensors, "MAX_CHUNK_BYTES", limit)
    generator = random.Random(limit)
    for turn in range(6):
        directory = tmp_path / str(turn)
        directory.mkdir()
        values = torch.randn(shape).to(dtype)
        bounds = sorted(generator.randint(0, values.numel()) for _ in range(turn))
        reader = open_reader(directory, write(directory, values, bounds))
        for _ in range(20):
            offset = [generator.randrange(size) for size in shape]
            size = [
                generator.randint(1, end - start) for start, end in zip(offset, shape, strict=True)
            ]
            part = replace(place(tuple(size), shape, tuple(offset)), data=torch.full(size, 9.0))
            reader.read([part])
            assert torch.equal(part.data, values[part.global_slice()].float())


def test_rows_that_pad_the_vocabulary_are_zero_or_left_out(tmp_path):
    values = torch.randn(8, 6)
    reader = open_reader(tmp_path, write(tmp_path, values, [5, 20]))
    for rows in (5, 8, 12):
        part = replace(place((rows, 6), allow_shape_mismatch=True), data=torch.full((rows, 6), 9.0))
        reader.read([part])
        assert torch.equal(part.data[:8], values[:rows])
        assert (part.data[8:] == 0).all()
    beyond = replace(
        place((4, 6), (12, 6), (8, 0), allow_shape_mismatch=True), data=torch.full((4, 6), 9.0)
    )
    reader.read([beyond])
    assert (beyond.data == 0).all()
    for shape, may_differ in (((12, 6), False), ((8, 7), True)):
        part = replace(place(shape, allow_shape_mismatch=may_differ), data=torch.zeros(shape))
        with pytest.raises(
            InputError, match=rf"w: found the shape \(8, 6\), expected \({shape[0]}, {shape[1]}\)"
        ):
            reader.read([part])
    with pytest.raises(InputError, match=r"found no tensor v"):
        reader.shape("v")


def test_torch_and_megatron_read_the_same(saved_run):
    """Compared are all tensors of a run, with layers stacked in one tensor."""
    from megatron.core import dist_checkpointing

    directory = saved_run / "checkpoints" / "iter_0000012"
    reader = open_reader(directory, json.loads((directory / "state.json").read_text())["files"])
    metadata = torch_checkpoint.FileSystemReader(str(directory)).read_metadata()
    tensors = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
    }
    torch_checkpoint.load(tensors, checkpoint_id=str(directory), no_dist=True)
    assert any(key.startswith("optimizer.state.exp_avg_sq.model.decoder") for key in tensors)
    size = sum(values.nbytes for values in tensors.values())
    assert (directory / "__0_0.distcp").stat().st_size < 1.2 * size, (
        "each chunk without the elements of others"
    )
    others = dist_checkpointing.load_plain_tensors(str(directory))
    for key, values in tensors.items():
        part = replace(
            place(tuple(values.shape)),
            key=key,
            data=torch.full_like(values, 9.0),
            dtype=values.dtype,
        )
        reader.read([part])
        assert torch.equal(part.data, values), key
        assert torch.equal(others[key], values), key
    common = dist_checkpointing.load_common_state_dict(str(directory))
    assert common == {"optimizer": {"param_groups": [{"step": 12}]}}


def entries(*boxes, shape):
    from megaenc.training.checkpoint.chunk_files import StoredChunk

    return [
        StoredChunk("w", "float32", shape, offset, size, "__0_0.distcp", 0, 0, 0)
        for offset, size in boxes
    ]


WHOLE = [
    (
        [
            ((0, 0, 0), (1, 2, 3)),
            ((1, 0, 0), (1, 1, 2)),
            ((1, 0, 2), (1, 1, 1)),
            ((1, 1, 0), (1, 1, 3)),
        ],
        (2, 2, 3),
    ),
    ([((0, 0), (3, 2)), ((0, 2), (1, 2)), ((1, 2), (2, 2))], (3, 4)),
]


@pytest.mark.parametrize(("boxes", "shape"), WHOLE)
def test_chunks_must_hold_each_element_once(boxes, shape):
    """A missing chunk, a repeated one and one that is too long are refused."""
    from megaenc.training.checkpoint.chunk_files import check_coverage

    check_coverage(entries(*boxes, shape=shape))
    check_coverage(entries(*boxes[::-1], shape=shape))
    for index, (offset, size) in enumerate(boxes):
        others = boxes[:index] + boxes[index + 1 :]
        longer = (*size[:-1], size[-1] + 1)
        for wrong in (others, [*boxes, (offset, size)], [*others, (offset, longer)]):
            with pytest.raises(RuntimeError, match=r"w: "):
                check_coverage(entries(*wrong, shape=shape))


def test_an_overlap_is_found_where_as_much_is_missing():
    from megaenc.training.checkpoint.chunk_files import check_coverage

    chunks = entries(((0, 0), (1, 3)), ((0, 2), (1, 2)), ((1, 0), (1, 3)), shape=(2, 4))
    with pytest.raises(RuntimeError, match="overlaps"):
        check_coverage(chunks)


def test_shares_without_the_distributed_optimizer_are_equal(monkeypatch):
    from megaenc.training.checkpoint import state_tensors

    sizes = (7, 1, 100, 30)
    weights = [torch.empty(size) for size in sizes]
    engine = SimpleNamespace(chunks=[SimpleNamespace(parameters=lambda: weights)])
    monkeypatch.setattr(state_tensors.parallel_state, "get_data_parallel_world_size", lambda: 5)
    shares = [state_tensors.equal_shares(engine, rank) for rank in range(5)]
    lengths = [sum(map(len, share)) for share in shares]
    assert sum(lengths) == sum(sizes)
    assert max(lengths) - min(lengths) <= 1
    for index, size in enumerate(sizes):
        assert np.concatenate([list(share[index]) for share in shares]).tolist() == list(
            range(size)
        )


def test_a_file_that_cannot_be_read_is_named_with_the_machine(tmp_path):
    """The system's error names no file; the checkpoint is not called damaged."""
    from megaenc.training.checkpoint_dir import CheckpointReadError, file_digest, name_machine

    reader = open_reader(tmp_path, write(tmp_path, torch.randn(8, 6), []))
    shard = tmp_path / "__0_0.distcp"
    shard.unlink()
    shard.symlink_to("/proc/self/mem")  # opens, and fails to read
    with pytest.raises(CheckpointReadError, match=r"__0_0.distcp: Input/output error on "):
        reader.read([replace(place((8, 6)), data=torch.zeros(8, 6))])
    with (
        pytest.raises(CheckpointReadError, match=r"__0_0\.distcp: Input/output error"),
        name_machine(),
    ):
        file_digest(shard)
