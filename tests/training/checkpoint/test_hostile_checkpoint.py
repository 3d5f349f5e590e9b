"""A checkpoint whose pickles would run code is refused, naming file and class, before anything unpickles it."""

import io
import os
import pickle
import shutil
import sys
import zipfile
from enum import Enum
from pathlib import Path

import pytest
import runs
import torch
from checkpoint_helpers import forge
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megaenc import backend
from megaenc.convert.command import main as convert
from megaenc.errors import InputError
from megaenc.training.checkpoint import manager
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint.safe_pickle import rewrite_pickles
from megaenc.training.checkpoint_dir import DamagedCheckpointError
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


def saved(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_what_a_save_writes_is_fine(saved_run):
    rewrite_pickles(checkpoint_of(saved_run))


def test_hostile_metadata_is_refused_by_training_and_export(small_corpus, copy, tmp_path, traces, refusal):
    forge(checkpoint_of(copy) / ".metadata", pickle.dumps(Hostile(traces)))
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", copy])
    assert f"{checkpoint_of(copy) / '.metadata'}: unpickling it would call posix.mkdir" in line
    assert ".metadata: unpickling it would call" in refusal(convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])


def test_hostile_common_state_is_refused(copy, traces, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch would then unpickle anything
    forge(checkpoint_of(copy) / "common.pt", saved({"optimizer": Hostile(traces)}))
    with pytest.raises(InputError, match=r"common\.pt: unpickling it would call posix.mkdir"):
        rewrite_pickles(checkpoint_of(copy))


def forge_object(run: Path, name: str, content: bytes) -> None:
    """Let the checkpoint's entry `name` be an object that is pickled as `content`."""
    file = checkpoint_of(run) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    shard = file.with_name(place.relative_path)
    place.offset, place.length = shard.stat().st_size, len(content)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    forge(shard, shard.read_bytes() + content)
    forge(file, pickle.dumps(metadata))


def test_an_object_in_the_place_of_a_tensor_is_refused(copy, traces):
    """torch unpickles without any list what `.metadata` calls an object."""
    forge_object(copy, "model.embedding.word_embeddings.weight", saved(Hostile(traces)))
    with pytest.raises(InputError, match=r"an object in the place of the tensor model\.embedding\.word_embeddings\.weight"):
        rewrite_pickles(checkpoint_of(copy))


PYTHON_2_NAME = b"\x80\x04cUserDict\nOrderedDict\n)R."
"""Of protocol 4: torch's allow-list takes it for collections.OrderedDict, and pickle imports UserDict."""


@pytest.mark.parametrize("content", ["a class", "a Python 2 name"])
def test_no_extra_state_of_a_layer_is_unpickled(content, small_corpus, copy, tmp_path, traces, monkeypatch):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "UserDict.py").write_text(f"import os; os.mkdir({str(traces)!r})\nclass OrderedDict: pass\n")
    monkeypatch.syspath_prepend(tmp_path / "planted")
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(1))) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, PYTHON_2_NAME if entry.filename.endswith("data.pkl") else old.read(entry))
    pickled = saved(Hostile(traces)) if content == "a class" else stream.getvalue()
    forge_object(copy, "model.output_layer._extra_state/shard_0_1", pickled)
    main([*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(copy)])
    assert runs.metrics(copy)[-1]["step"] == 20


def test_what_is_loaded_is_what_was_checked(small_corpus, saved_run, copy, traces, monkeypatch):
    """Files that are swapped between check and load change nothing, and none of them is unpickled."""
    verify = CheckpointLoader.verify

    def swap_after(self, step, identity=None):
        state = verify(self, step, identity)
        for name in (".metadata", "common.pt"):
            hostile = saved({"optimizer": Hostile(traces)}) if name == "common.pt" else pickle.dumps(Hostile(traces))
            (self.path(step) / name).write_bytes(hostile)
        return state

    monkeypatch.setattr(CheckpointLoader, "verify", swap_after)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    main([*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(copy)])
    assert [row["step"] for row in runs.metrics(copy)] == list(range(1, 21))


def test_other_bytes_than_those_of_the_checksum_are_damage(copy):
    """Of a file that was swapped between its checksum and its check."""
    state = CheckpointLoader(copy / "checkpoints").read_state(12)
    (checkpoint_of(copy) / "common.pt").write_bytes(saved({"optimizer": 1}))
    with pytest.raises(DamagedCheckpointError, match=r"common\.pt: its content changed while it was read"):
        rewrite_pickles(checkpoint_of(copy), state["files"])


class _OfAnEarlyPython(pickle.Pickler):
    """Writes members of an enumeration by their names, as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_what_an_early_python_writes_is_fine(copy):
    file, stream = checkpoint_of(copy) / ".metadata", io.BytesIO()
    _OfAnEarlyPython(stream, protocol=4).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in stream.getvalue()
    if sys.version_info >= (3, 11, 4):
        assert b"getattr" not in file.read_bytes()
    forge(file, stream.getvalue())
    rewrite_pickles(checkpoint_of(copy))


class Attribute:
    """Is that attribute when it is unpickled."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


@pytest.mark.parametrize("of", [(WriteItemType, "__class__"), (Metadata, "__init__"), (WriteItemType, "none", 1)])
def test_no_other_attribute_is_looked_up(of, copy):
    forge(checkpoint_of(copy) / ".metadata", pickle.dumps(Attribute(*of)))
    with pytest.raises(InputError, match=r"\.metadata: (unpickling it would call builtins.getattr|not written by a save)"):
        rewrite_pickles(checkpoint_of(copy))


DCP = b"\x8c\x25torch.distributed.checkpoint.metadata"
CHANGES_A_CLASS = b"\x80\x04" + DCP + b"\x8c\x08Metadata\x93}\x8c\x07version\x8c\x04minesb."  # sets an attribute of it
CHANGES_A_METHOD = b"\x80\x04" + DCP + b"\x8c\x08Metadata\x93)\x81}\x8c\x0d__reduce_ex__Nsb."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (".metadata", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "would call os.system"),
        (".metadata", b"cos\nsystem\n(S'true'\ntR.", "not written by a save .*expected a pickle of protocol 4"),
        (".metadata", b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.", "not written by a save"),
        (".metadata", b"\x80\x04\x80\x02N.", "not written by a save"),
        (".metadata", pickle.dumps({"a": 1}, protocol=5), "not written by a save .*expected a pickle of protocol 4"),
        (".metadata", pickle.dumps({"a": 1}), "not written by a save"),
        (".metadata", b"", "not written by a save"),
        (".metadata", CHANGES_A_CLASS, "would call a change of Metadata"),
        (".metadata", CHANGES_A_METHOD, "would call a change of a method of Metadata"),
        (".metadata", pickle.dumps({((1,),): 1}), "would call the hash of a tuple"),
        ("common.pt", saved(torch.zeros(2)), "would call torch._utils._rebuild_tensor_v2"),
        ("metadata.json", b'{"sharded_backend": "zarr"}', "not written by a save"),
    ],
)
def test_what_else_is_no_checkpoint_is_refused(name, content, message, copy):
    forge(checkpoint_of(copy) / name, content)
    with pytest.raises(InputError, match=message):
        rewrite_pickles(checkpoint_of(copy))


def test_no_small_file_takes_much_memory_to_check(saved_run, tmp_path):
    """Nor a large one: each is refused with 500 MB to spare."""
    command = [sys.executable, str(runs.WORKERS / "pickle_bombs.py"), str(checkpoint_of(saved_run)), str(tmp_path / "copy")]
    lines = runs.run(command, timeout=120).stdout.splitlines()
    assert len(lines) == 12
    assert [line for line in lines if "refused:" not in line or "MemoryError" in line] == []


def test_a_save_that_no_load_would_accept_stops_the_run_at_once(small_corpus, tmp_path, monkeypatch):
    """An optimizer of another library may keep a tensor where its own keeps a number."""
    sharded = manager.sharded_state_dict

    def with_a_tensor(engine, is_loading):
        state = sharded(engine, is_loading)
        state["optimizer"]["common_step"] = torch.tensor(3.0)
        return state

    monkeypatch.setattr(manager, "sharded_state_dict", with_a_tensor)
    try:
        with pytest.raises(RuntimeError, match=r"the saved checkpoint cannot be loaded: _RefusedPickleError: torch._utils"):
            main([*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "12", "--save", str(tmp_path / "run")])
    finally:
        backend.destroy_distributed()  # which an error that is a bug leaves to the end of the process
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*"))
