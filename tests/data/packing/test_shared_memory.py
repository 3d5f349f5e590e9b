"""Processes of a machine make what they all need once, and have it in memory once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megaenc.data.packing import shared_memory as module
from megaenc.data.packing.shared_memory import share_arrays

WORKER = Path(__file__).parents[2] / "workers" / "share_arrays.py"


def environment(folder: Path, port: int = 1, processes: int = 4) -> dict[str, str]:
    """Of a process of a run of `processes` on this machine; `folder` holds its temporary files."""
    run = {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {**os.environ, **run, "TMPDIR": str(folder)}


def start_process(folder: Path, *words: str, port: int = 1) -> subprocess.Popen:
    """The worker below, which writes a line when it makes, and one with what it has; it waits for the end of its input."""
    command = [sys.executable, str(WORKER), *words]
    return subprocess.Popen(command, env=environment(folder, port), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def wait_for_all(processes: list[subprocess.Popen]) -> list[str]:
    """What each of them said; all have what they have until the last one has it."""
    outputs = []
    for process in processes:
        lines = []
        while not lines or not lines[-1].startswith("has"):
            lines.append(process.stdout.readline())
        outputs.append("".join(lines))
    for process in processes:
        process.communicate(timeout=60)
    return outputs


def notes(folder: Path) -> list[Path]:
    return list((folder / f"megaenc-{os.getuid()}").iterdir())


def test_one_process_makes_and_all_have_the_same_memory(tmp_path):
    outputs = wait_for_all([start_process(tmp_path, "slow") for _ in range(4)])
    assert sum("makes" in lines for lines in outputs) == 1
    [where] = {lines.splitlines()[-1] for lines in outputs}  # numbers, types, read-only, and the file that the memory is
    assert where.startswith("has [[0, 1, 2, 3, 4], [0.5]] int32 float64 read-only ")
    assert not notes(tmp_path)  # nothing stays behind


def test_a_killed_maker_is_replaced(tmp_path):
    first = start_process(tmp_path, "forever")
    assert "makes" in first.stdout.readline()
    others = [start_process(tmp_path) for _ in range(2)]
    time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    outputs = wait_for_all(others)
    assert sum("makes" in lines for lines in outputs) == 1
    assert not notes(tmp_path)


def test_what_a_killed_process_had_is_made_again_and_its_note_goes(tmp_path):
    first = start_process(tmp_path)
    while not first.stdout.readline().startswith("has"):
        pass
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert len(notes(tmp_path)) == 1
    assert "makes" in wait_for_all([start_process(tmp_path, port=2)])[0]
    assert not notes(tmp_path)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """This process is one of a run's, with temporary files of its own."""
    monkeypatch.setattr(os, "environ", environment(tmp_path))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))


def make_three():
    return (np.arange(3),)


def test_when_nobody_has_them_any_more_they_are_made_again(tmp_path, shared):
    (one,) = share_arrays(("a",), make_three)
    (two,) = share_arrays(("a",), lambda: pytest.fail("made again"))
    assert one.tolist() == two.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    (other,) = share_arrays(("b",), lambda: (np.arange(4),))
    assert other.tolist() == [0, 1, 2, 3]
    del one, two, other
    assert not notes(tmp_path)
    assert share_arrays(("a",), lambda: (np.arange(5),))[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["{", "[]", '{"process": 1, "descriptor": 0}', '{"process": 999999999, "descriptor": 3}'])
def test_a_note_that_leads_nowhere_is_written_anew(tmp_path, shared, text):
    arrays = share_arrays(("a",), make_three)
    [note] = notes(tmp_path)
    note.write_text(text)
    assert share_arrays(("a",), make_three)[0].tolist() == arrays[0].tolist()


@pytest.mark.parametrize("of_that_name", [True, False])
def test_a_descriptor_that_was_given_out_again_is_not_taken_for_the_arrays(tmp_path, shared, of_that_name):
    """A file of another name, or memory of this name that is not written yet: its numbers would be wrong, or too few."""
    arrays = share_arrays(("a",), make_three)
    [note] = notes(tmp_path)
    memory = os.memfd_create(note.name if of_that_name else "other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)  # zeros
    note.write_text(json.dumps(json.loads(note.read_text()) | {"descriptor": memory}))
    (actual,) = share_arrays(("a",), make_three)
    os.close(memory)
    assert actual.tolist() == arrays[0].tolist() == [0, 1, 2]


def test_empty_arrays_need_no_memory_of_all(shared):
    mixed = share_arrays(("b",), lambda: (np.zeros(0, np.int32), np.ones((2, 2), np.uint16), np.zeros((0, 2))))
    assert [(array.dtype, array.tolist()) for array in mixed] == [("int32", []), ("uint16", [[1, 1], [1, 1]]), ("float64", [])]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, shared):
    folder = tmp_path / f"megaenc-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    own = np.arange(3)
    assert share_arrays(("a",), lambda: (own,))[0] is own
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert share_arrays(("a",), lambda: (own,))[0] is own
