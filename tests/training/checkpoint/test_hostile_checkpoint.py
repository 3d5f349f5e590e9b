"""Nothing in a checkpoint is unpickled to load it, and an index that no save wrote is refused."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import runs
import torch
from checkpoint_helpers import forge

from megaenc.convert.command import main as convert
from megaenc.errors import InputError
from megaenc.training.checkpoint.chunk_files import read_index
from megaenc.training.command import main


class Hostile:
    """Creates the folder `path` when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def traces(tmp_path):
    """The folder that hostile pickles would create; that they can is tried out first."""
    path = tmp_path / "traces"
    pickle.loads(pickle.dumps(Hostile(path)))
    assert path.exists(), "such a pickle would do no harm: the tests here would say nothing"
    path.rmdir()
    yield path
    assert not path.exists()


@pytest.fixture
def copy(saved_run, tmp_path):
    """The run, its checkpoint to be changed."""
    return shutil.copytree(saved_run, tmp_path / "run")


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "iter_0000012"


def test_no_pickle_of_a_checkpoint_is_opened(small_corpus, saved_run, copy, tmp_path, traces, monkeypatch):
    """Hostile files for torch and megatron-core, and archives, with the right checksums: resume and export are the same."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch would then unpickle anything
    folder, stream = checkpoint_of(copy), io.BytesIO()
    torch.save({"optimizer_step": Hostile(traces)}, stream)
    forge(folder / "common.pt", stream.getvalue())
    forge(folder / ".metadata", pickle.dumps(Hostile(traces)))
    shard = folder / "__0_0.distcp"
    first = json.loads((folder / "index.json").read_text())["chunks"][0]["data_start"]
    content = bytearray(shard.read_bytes())
    hostile = pickle.dumps(Hostile(traces))
    content[:first] = hostile + bytes(first - len(hostile))
    forge(shard, bytes(content))
    convert(["to-hf", "--load", str(copy), "--ckpt-step", "12", "--output", str(tmp_path / "hf")])
    unchanged = shutil.copytree(saved_run, tmp_path / "unchanged")
    for run in (copy, unchanged):
        main([*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(run)])
    runs.assert_same_curve(copy, unchanged)


def change(**fields):
    """A change of the first chunk in the index."""
    return lambda index: index["chunks"][0].update(fields)


VECTOR = {"global_shape": [1], "global_offset": [0], "shape": [1]}
CHANGES = {
    "another file": (change(file="../../../tokenizer/tokenizer.json"), "not written by a save"),
    "a file of its own": (change(file="state.json"), "not written by a save"),
    "beyond the end": (change(data_start=1 << 40), "is not in its file"),
    "before the start": (change(data_start=-8), "sizes or offsets are no numbers"),
    "a huge tensor": (change(shape=[1 << 31, 1 << 31]), "is not in its file"),
    "a number as text": (change(shape=["8", 64]), "sizes or offsets are no numbers"),
    "truth as a number": (change(global_offset=[True, 0]), "sizes or offsets are no numbers"),
    "another kind of elements": (change(dtype="object"), "not written by a save"),
    "fewer axes": (change(shape=[8]), "is no rectangle"),
    "no axes": (change(shape=[], global_shape=[], global_offset=[]), "is no rectangle"),
    "a field more": (change(more=1), "other fields"),
    "no name": (change(key={}), "other fields"),
    "a chunk twice": (lambda index: index["chunks"].append(index["chunks"][0]), "overlaps with another chunk"),
    "a row less": (lambda index: drop_rows(index), "found chunks of"),
    "other axes": (lambda index: index["chunks"].append(index["chunks"][0] | VECTOR), "leaves the tensor"),
    "no steps": (lambda index: index.update(optimizer_step=None), "optimizer_step: found None"),
    "no chunks": (lambda index: index.update(chunks=None), "not written by a save"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_of_no_save_is_refused(name, copy):
    folder, (edit, message) = checkpoint_of(copy), CHANGES[name]
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    forge(folder / "index.json", json.dumps(index).encode())
    with pytest.raises(InputError, match=rf"index\.json: .*{message}"):
        read_index(folder, json.loads((folder / "state.json").read_text())["files"])


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", b'"index"'])
def test_what_is_no_index_is_refused(content, copy):
    folder = checkpoint_of(copy)
    forge(folder / "index.json", content)
    with pytest.raises(InputError, match=r"index\.json: not written by a save"):
        read_index(folder, json.loads((folder / "state.json").read_text())["files"])


def drop_rows(index: dict) -> None:
    chunk = index["chunks"][0]
    chunk["shape"][-2] -= 1


def rename(index: dict) -> None:
    index["chunks"][0]["key"] += "_other"


@pytest.mark.parametrize("edit", [drop_rows, rename])
def test_a_tensor_that_is_not_whole_is_refused(edit, small_corpus, copy, refusal):
    folder = checkpoint_of(copy)
    index = json.loads((folder / "index.json").read_text())
    key = index["chunks"][0]["key"]
    edit(index)
    forge(folder / "index.json", json.dumps(index).encode())
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", copy])
    assert f"{folder / 'index.json'}: " in line and key in line
