"""What a full disk makes of the rows of a run folder."""

import errno
import json
import os
import threading

import pytest

from megaenc.errors import InputError, LocalInputError
from megaenc.training.run_dir import METRICS_FILE, RunDir
from megaenc.training.run_lock import RunLock


def opened(path) -> RunDir:
    """A run folder whose rows can be read and written; nothing else of it is there."""
    folder = object.__new__(RunDir)
    folder.path, folder.lock = path, RunLock(path)
    return folder


def test_a_disk_that_is_full_when_rows_are_cut_is_told_to_the_other_ranks(tmp_path, monkeypatch):
    """Rank 0 alone notices: an error that all ranks are taken to have would leave them waiting for it."""
    folder = opened(tmp_path)
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megaenc.atomic_io.os.fsync", full)
    with pytest.raises(LocalInputError, match="cannot be written to: No space left on device"):
        folder.drop_rows_after(2)
    monkeypatch.undo()
    folder.drop_rows_after(2)
    assert [json.loads(row)["step"] for row in (tmp_path / METRICS_FILE).read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("odd", [b"\xff\xfe", b"[1]", b'{"step": true}', b"{}", b"[" * 100_000, b'{"step": 2', b"\0" * 9])
def test_an_odd_row_is_refused_but_at_the_end_where_a_kill_may_have_left_it(odd, tmp_path):
    folder = opened(tmp_path)
    file = tmp_path / METRICS_FILE
    within = b'{"step": 1}\n' + odd + b'\n{"step": 3}\n'
    file.write_bytes(within)
    with pytest.raises(LocalInputError, match=r"metrics\.jsonl: line 2: found b'.*expected a JSON object with a `step`") as error:
        folder.drop_rows_after(3)
    assert len(str(error.value)) < 500
    assert file.read_bytes() == within
    for content in (within, b'{"step": 1}\n' + odd):
        file.write_bytes(content)
        folder.drop_rows_after(2)
        assert file.read_bytes() == b'{"step": 1}\n'


def test_rows_are_no_pipe(tmp_path):
    os.mkfifo(tmp_path / METRICS_FILE)
    with pytest.raises(LocalInputError, match=r"metrics\.jsonl: not a regular file"):
        opened(tmp_path).drop_rows_after(3)


def test_nothing_is_written_once_the_lock_is_another_file(tmp_path):
    folder = opened(tmp_path)
    folder.append_row(METRICS_FILE, {"step": 1})
    (tmp_path / ".lock").unlink()
    for write in (lambda: folder.append_row(METRICS_FILE, {"step": 2}), lambda: folder.drop_rows_after(0), folder.sync):
        with pytest.raises(LocalInputError, match=r"\.lock: found it removed or replaced"):
            write()
    opened(tmp_path)
    with pytest.raises(LocalInputError, match=r"\.lock: found it removed or replaced"):
        folder.append_row(METRICS_FILE, {"step": 2})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1}\n'


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path):
    """As by a command that was refused: the file that it has locked is no longer the lock."""
    first = RunLock(tmp_path / "a" / "b")
    threading.Timer(0.3, lambda: (first.remove_created(), first.release())).start()
    second = RunLock(tmp_path / "a" / "b", patience=20)
    second.check()
    with pytest.raises(InputError, match="another process is training in this directory"):
        RunLock(tmp_path / "a" / "b")
    second.remove_created()
    # Empty folders stay if the second has its file in them before the first has removed them.
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_each_save_renews_the_lock_file_which_purges_of_old_files_would_remove(tmp_path):
    folder = opened(tmp_path)
    os.utime(tmp_path / ".lock", (1, 1))
    folder.lock.refresh()
    assert (tmp_path / ".lock").stat().st_mtime > 1


def test_a_file_system_whose_inode_numbers_change_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLock, "is_held", lambda *_: False)
    with pytest.raises(InputError, match=r"cannot be locked \(its inode number keeps changing"):
        RunLock(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []
