"""A checkpoint whose pickles would run code is refused, naming file and class, before anything unpickles it."""

import io
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path

import pytest
import runs
import torch
from checkpoint_helpers import forge
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megaenc.convert.command import main as convert
from megaenc.errors import InputError
from megaenc.training.command import main
from megaenc.training.pickles import check_pickles


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


def saved(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_what_a_save_writes_is_fine(saved_run):
    check_pickles(checkpoint_of(saved_run))


def test_hostile_metadata_is_refused_by_training_and_export(small_corpus, copy, tmp_path, traces, refusal):
    forge(checkpoint_of(copy) / ".metadata", pickle.dumps(Hostile(traces)))
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", copy])
    assert f"{checkpoint_of(copy) / '.metadata'}: unpickling it would call posix.mkdir" in line
    assert ".metadata: unpickling it would call" in refusal(convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])


def test_hostile_common_state_is_refused(copy, traces, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch would then unpickle anything
    forge(checkpoint_of(copy) / "common.pt", saved({"optimizer": Hostile(traces)}))
    with pytest.raises(InputError, match=r"common\.pt: unpickling it would call posix.mkdir"):
        check_pickles(checkpoint_of(copy))


def test_hostile_object_in_the_place_of_a_tensor_is_refused(copy, traces):
    """torch unpickles without any list what `.metadata` calls an object."""
    file = checkpoint_of(copy) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    name = "model.embedding.word_embeddings.weight"
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    shard = file.with_name(place.relative_path)
    place.offset, content = shard.stat().st_size, saved(Hostile(traces))
    place.length = len(content)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    forge(shard, shard.read_bytes() + content)
    forge(file, pickle.dumps(metadata))
    with pytest.raises(InputError, match=rf"{shard.name}: unpickling it would call posix.mkdir"):
        check_pickles(checkpoint_of(copy))


class _OfAnEarlyPython(pickle.Pickler):
    """Writes members of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_what_an_early_python_writes_is_fine(copy):
    file, stream = checkpoint_of(copy) / ".metadata", io.BytesIO()
    _OfAnEarlyPython(stream, protocol=4).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in stream.getvalue() and b"getattr" not in file.read_bytes()
    forge(file, stream.getvalue())
    check_pickles(checkpoint_of(copy))


class Attribute:
    """Is that attribute when it is unpickled."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


@pytest.mark.parametrize("of", [(WriteItemType, "__class__"), (Metadata, "__init__"), (WriteItemType, "none", 1)])
def test_no_other_attribute_is_looked_up(of, copy):
    forge(checkpoint_of(copy) / ".metadata", pickle.dumps(Attribute(*of)))
    with pytest.raises(InputError, match=r"\.metadata: (unpickling it would call builtins.getattr|not what a save wrote)"):
        check_pickles(checkpoint_of(copy))


CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}(S'version'\nS'mine'\nu\x86b."  # sets an attribute of it


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (".metadata", b"cos\nsystem\n(S'true'\ntR.", "would call os.system"),
        (".metadata", pickle.dumps({"a": 1}), "not what a save wrote"),
        (".metadata", b"", "not what a save wrote"),
        (".metadata", CHANGES_A_CLASS, "would call a change of Metadata"),
        ("metadata.json", b'{"sharded_backend": "zarr"}', "not what a save wrote"),
        ("more.pt", b"", "no file that a save writes"),
    ],
)
def test_what_else_is_no_checkpoint_is_refused(name, content, said, copy):
    forge(checkpoint_of(copy) / name, content)
    with pytest.raises(InputError, match=said):
        check_pickles(checkpoint_of(copy))
