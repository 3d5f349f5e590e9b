import errno
import os
import signal

import pytest

from megaenc.errors import InputError
from megaenc.files import left_behind, longest_name, refuse_existing, stopped_by_sigterm, whole_files, whole_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_appear_together_or_not_at_all(tmp_path):
    wanted = [tmp_path / "a.bin", tmp_path / "a.json"]
    with whole_files(*wanted) as temporary:
        for path in temporary:
            path.write_text("whole")
        assert all(name.startswith(".a.") and name.endswith(".tmp") for name in names(tmp_path))
    assert names(tmp_path) == ["a.bin", "a.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path, error):
    with pytest.raises(error), whole_files(tmp_path / "a", tmp_path / "b") as temporary:
        temporary[0].write_text("half")
        raise error
    with pytest.raises(error), whole_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("half")
        raise error
    assert names(tmp_path) == []


def test_a_stop_between_the_renames_leaves_nothing(tmp_path, monkeypatch):
    rename = os.replace

    def stop_at_the_second(here, there):
        if there.name == "b":
            raise KeyboardInterrupt
        rename(here, there)

    monkeypatch.setattr(os, "replace", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt), whole_files(tmp_path / "a", tmp_path / "b") as temporary:
        for path in temporary:
            path.write_text("whole")
    assert names(tmp_path) == []


def test_a_full_disk_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be written to: No space left"), whole_files(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_becomes_read_only_is_one_line_too(tmp_path, monkeypatch):
    def read_only(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match="cannot be written to: Read-only file system"),
        whole_files(tmp_path / "a", tmp_path / "b") as temporary,
    ):
        temporary[0].write_text("half")
        patch.setattr(os, "unlink", read_only)
        read_only()
    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(InputError, match="cannot be written to: Read-only file system"), whole_folder(tmp_path / "c"):
        pass


def test_the_last_look_comes_when_all_is_on_the_disk_and_before_any_name(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(os, "fsync", lambda stream: steps.append("on the disk"))

    def look():
        assert all(name.endswith(".tmp") for name in names(tmp_path))
        steps.append("looked")
        raise InputError("not now")

    with pytest.raises(InputError, match="not now"), whole_files(tmp_path / "a", tmp_path / "b", last_look=look) as temporary:
        for path in temporary:
            path.write_text("whole")
    assert steps == ["on the disk", "on the disk", "looked"] and names(tmp_path) == []


def test_what_an_attempt_left_behind_is_found_by_its_name(tmp_path):
    with whole_files(tmp_path / "a.bin") as (path,), whole_folder(tmp_path / "a_parts") as folder:
        path.write_text("half")
        for name in (".a.bin.tmp", ".b.bin.12-0123abcd.tmp", "a.bin"):
            (tmp_path / name).touch()
        assert left_behind(tmp_path / "a.bin", tmp_path / "a_parts") == sorted([path, folder])
        assert longest_name(tmp_path / "a", tmp_path / "a.bin").startswith(".a.bin.")
        assert len(longest_name(tmp_path / "a.bin")) == len(path.name)
    assert left_behind(tmp_path / "none" / "a.bin") == []


def test_a_folder_appears_whole_in_place_of_an_empty_one(tmp_path):
    (tmp_path / "folder").mkdir()
    refuse_existing(tmp_path / "folder", "--output")
    with whole_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("whole")
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["a"]
    with pytest.raises(InputError, match=r"--output .*folder: exists already"):
        refuse_existing(tmp_path / "folder", "--output")


def test_sigterm_runs_the_finally_clauses(tmp_path):
    with pytest.raises(SystemExit) as stop, stopped_by_sigterm(), whole_files(tmp_path / "a") as (path,):
        path.write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
