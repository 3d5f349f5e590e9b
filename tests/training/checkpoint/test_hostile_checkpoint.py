"""Hostile checkpoints: no pickle is loaded, and forged indexes are refused."""

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
    """An object that creates the directory `path` when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def directory(saved_run, tmp_path):
    """The newest checkpoint of a copy of the run, to be changed."""
    return shutil.copytree(saved_run, tmp_path / "run") / "checkpoints" / "iter_0000012"


def test_no_pickle_of_a_checkpoint_is_opened(
    short_run, saved_run, directory, tmp_path, monkeypatch
):
    """With hostile pickles and right checksums, resume and export are unchanged."""
    # torch would unpickle anything with it.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    traces = tmp_path / "traces"
    hostile = pickle.dumps(Hostile(traces))
    pickle.loads(hostile)
    traces.rmdir()  # such a pickle does harm
    stream = io.BytesIO()
    torch.save({"optimizer_step": Hostile(traces)}, stream)
    forge(directory / "common.pt", stream.getvalue())
    forge(directory / ".metadata", hostile)
    shard = directory / "__0_0.distcp"
    first = json.loads((directory / "index.json").read_text())["chunks"][0]["data_start"]
    content = bytearray(shard.read_bytes())
    content[:first] = hostile + bytes(first - len(hostile))
    forge(shard, bytes(content))
    run = directory.parents[1]
    convert(["to-hf", "--load", str(run), "--ckpt-step", "12", "--output", str(tmp_path / "hf")])
    unchanged = shutil.copytree(saved_run, tmp_path / "unchanged")
    for run_path in (run, unchanged):
        main([*short_run, "--save", str(run_path)])
    runs.assert_same_curve(run, unchanged)
    assert not traces.exists()


VECTOR = {"global_shape": [1], "global_offset": [0], "shape": [1]}
CHANGES = {
    "another file": ({"file": "../../../tokenizer/tokenizer.json"}, "not written by a save"),
    "a huge tensor": ({"shape": [1 << 31, 1 << 31]}, "is not in its file"),
    "before the start": ({"data_start": -8}, "sizes or offsets are no numbers"),
    "truth as a number": ({"global_offset": [True, 0]}, "sizes or offsets are no numbers"),
    "another kind of elements": ({"dtype": "object"}, "not written by a save"),
    "fewer axes": ({"shape": [8]}, "is no rectangle"),
    "no axes": ({"shape": [], "global_shape": [], "global_offset": []}, "is no rectangle"),
    "a field more": ({"more": 1}, "other fields"),
    "no name": ({"key": {}}, "other fields"),
}
MORE_CHUNKS = {
    "a chunk twice": ({}, "overlaps with another chunk"),
    "other axes": (VECTOR, "leaves the tensor"),
}


def change_chunk(index: dict, name: str) -> str:
    """Change the first chunk or append a changed copy; return the words of the error."""
    first = index["chunks"][0]
    if name in MORE_CHUNKS:
        fields, words = MORE_CHUNKS[name]
        index["chunks"].append(first | fields)
    else:
        fields, words = CHANGES[name]
        first.update(fields)
    return words


def assert_index_is_refused(directory: Path, content: bytes, words: str) -> None:
    forge(directory / "index.json", content)
    digests = json.loads((directory / "state.json").read_text())["files"]
    with pytest.raises(InputError, match=rf"index\.json: .*{words}"):
        read_index(directory, digests)


def test_an_index_with_a_chunk_of_no_save_is_refused(directory):
    content = (directory / "index.json").read_bytes()
    for name in (*CHANGES, *MORE_CHUNKS):
        index = json.loads(content)
        words = change_chunk(index, name)
        assert_index_is_refused(directory, json.dumps(index).encode(), words)
    index = json.loads(content)
    index["chunks"][0]["shape"][-2] -= 1
    assert_index_is_refused(directory, json.dumps(index).encode(), "found chunks of")


def test_what_is_no_index_is_refused(directory, short_run, tmp_path, refusal):
    for content in (b"", b"[]", b"[" * 100_000, b"\xff", b'{"optimizer_step": 12, "chunks": null}'):
        assert_index_is_refused(directory, content, "not written by a save")
    assert_index_is_refused(
        directory, b'{"optimizer_step": null, "chunks": []}', "optimizer_step: found None"
    )
    run = directory.parents[1]
    resume = [*short_run, "--save", run]
    for command, words in (
        (main, resume),
        (convert, ["to-hf", "--load", run, "--output", tmp_path / "hf"]),
    ):
        assert (
            f"{directory / 'index.json'}: not written by a save (optimizer_step: found None)"
            in refusal(command, words)
        )
