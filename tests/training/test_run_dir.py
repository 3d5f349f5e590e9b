"""Rows of a run directory on a full disk."""

import contextlib
import errno
import json
import math
import os
import threading

import pytest

from megaenc.errors import InputError, LocalInputError
from megaenc.training.run_dir import METRICS_FILE, RunDir
from megaenc.training.run_lock import RunLock


def opened(path) -> RunDir:
    """A run directory with nothing but rows, which can be read and written."""
    directory = object.__new__(RunDir)
    directory.path = path
    directory.lock = RunLock(path)
    return directory


def test_a_full_disk_is_told_to_the_other_ranks(tmp_path, monkeypatch):
    """Only rank 0 fails in `sync`, so a LocalInputError must end the other ranks too."""
    directory = opened(tmp_path)
    (tmp_path / METRICS_FILE).write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3))
    )

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megaenc.atomic_io.os.fsync", full)
    with pytest.raises(LocalInputError, match="cannot be written to: No space left on device"):
        directory.sync()
    with pytest.raises(InputError, match="cannot be written to: No space left on device"):
        directory.drop_rows_after(2)
    monkeypatch.undo()
    directory.drop_rows_after(2)
    assert [
        json.loads(row)["step"] for row in (tmp_path / METRICS_FILE).read_text().splitlines()
    ] == [1, 2]


@pytest.mark.parametrize(
    "odd", [b"\xff\xfe", b"[1]", b'{"step": true}', b"{}", b"[" * 100_000, b'{"step": 2', b"\0" * 9]
)
def test_an_odd_row_is_refused_but_at_the_end_where_a_kill_may_have_left_it(odd, tmp_path):
    directory = opened(tmp_path)
    file = tmp_path / METRICS_FILE
    within = b'{"step": 1}\n' + odd + b'\n{"step": 3}\n'
    file.write_bytes(within)
    with pytest.raises(
        InputError, match=r"metrics\.jsonl: line 2: found b'.*expected a JSON object with a `step`"
    ) as error:
        directory.drop_rows_after(3)
    assert len(str(error.value)) < 500
    assert file.read_bytes() == within
    for content in (within, b'{"step": 1}\n' + odd):
        file.write_bytes(content)
        directory.drop_rows_after(2)
        assert file.read_bytes() == b'{"step": 1}\n'


def test_rows_are_no_pipe(tmp_path):
    os.mkfifo(tmp_path / METRICS_FILE)
    with pytest.raises(InputError, match=r"metrics\.jsonl: not a regular file"):
        opened(tmp_path).drop_rows_after(3)


def test_numbers_that_json_lacks_are_null(tmp_path):
    nested = {"step": 1, "loss": math.nan, "objectives": {"mlm": {"loss": math.inf, "by": [1.5]}}}
    opened(tmp_path).append_row(METRICS_FILE, nested)
    row = json.loads((tmp_path / METRICS_FILE).read_text())
    assert row == {"step": 1, "loss": None, "objectives": {"mlm": {"loss": None, "by": [1.5]}}}


def test_nothing_is_written_once_the_lock_is_another_file(tmp_path):
    directory = opened(tmp_path)
    directory.append_row(METRICS_FILE, {"step": 1})
    (tmp_path / ".lock").unlink()
    for write in (lambda: directory.append_row(METRICS_FILE, {"step": 2}), directory.sync):
        with pytest.raises(LocalInputError, match=r"\.lock: found it removed or replaced"):
            write()
    for write in (lambda: directory.drop_rows_after(0), lambda: directory.write_plan(None, {})):
        with pytest.raises(InputError, match=r"\.lock: found it removed or replaced"):
            write()
    opened(tmp_path)
    with pytest.raises(LocalInputError, match=r"\.lock: found it removed or replaced"):
        directory.append_row(METRICS_FILE, {"step": 2})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1}\n'


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path):
    """A refused command removes it: the file that was locked is no longer the lock."""
    first = RunLock(tmp_path / "a" / "b")

    def give_up() -> None:
        first.remove()
        first.release()
        with contextlib.suppress(OSError):  # the second has its file there already
            (tmp_path / "a" / "b").rmdir()
            (tmp_path / "a").rmdir()

    threading.Timer(0.3, give_up).start()
    second = RunLock(tmp_path / "a" / "b", patience=20)
    second.check()
    with pytest.raises(InputError, match="another process is training in this directory"):
        RunLock(tmp_path / "a" / "b")


def test_a_file_system_whose_inode_numbers_change_is_one_line_and_leaves_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(RunLock, "is_held", lambda *_: False)
    with pytest.raises(InputError, match=r"cannot be locked \(its inode number keeps changing"):
        RunDir(tmp_path / "new" / "run", None)
    assert list(tmp_path.iterdir()) == []


def test_stacks_of_a_start_that_hung_do_not_keep_out_the_next(tmp_path):
    (tmp_path / "run" / "stacks").mkdir(parents=True)
    with RunDir(tmp_path / "run", None):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["stacks"]
