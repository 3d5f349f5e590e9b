import contextlib
import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaenc.atomic_io import (
    atomic_dir,
    atomic_files,
    atomic_write,
    exit_on_sigterm,
    find_stale_temp_files,
    longest_file_name,
    try_lock,
)
from megaenc.errors import InputError
from megaenc.json_files import read_json_object
from megaenc.output_paths import (
    check_output_file,
    check_parent_writable,
    create_parent_dir,
    create_parent_with_rollback,
    refuse_existing,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_appear_together_or_not_at_all(tmp_path):
    wanted = [tmp_path / "a.bin", tmp_path / "a.json"]
    with atomic_files(*wanted) as temporary:
        for path in temporary:
            path.write_text("whole")
        assert all(name.startswith(".a.") and name.endswith(".tmp") for name in names(tmp_path))
    assert names(tmp_path) == ["a.bin", "a.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path, error):
    with pytest.raises(error), atomic_files(tmp_path / "a", tmp_path / "b") as temporary:
        temporary[0].write_text("half")
        raise error
    with pytest.raises(error), atomic_dir(tmp_path / "folder") as folder:
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
    with pytest.raises(KeyboardInterrupt), atomic_files(tmp_path / "a", tmp_path / "b") as temporary:
        for path in temporary:
            path.write_text("whole")
    assert names(tmp_path) == []


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_leaves_the_old_files_or_the_new(tmp_path, number, count):
    """1,500 signals into a loop of writes that replace files; none may be missing and no set may mix old and new."""
    code = """
import random, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from megaenc.atomic_io import atomic_files, exit_on_sigterm

folder, number, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
paths = [folder / f"file{index}" for index in range(count)]
for path in paths:
    path.write_text("0")
main, delays = threading.main_thread().ident, random.Random(0)
missing = mixed = interrupted = 0

def shoot(delay):
    time.sleep(delay)
    signal.pthread_kill(main, number)

for trial in range(1500):
    shot = threading.Thread(target=shoot, args=[delays.uniform(0, 0.003)])
    try:
        with exit_on_sigterm():
            shot.start()
            while True:
                with atomic_files(*paths) as temporary:
                    for path in temporary:
                        path.write_text(f"{time.monotonic_ns() // 1000}" if count == 1 else f"{trial}")
    except (KeyboardInterrupt, SystemExit):
        interrupted += 1
    shot.join()
    missing += any(not path.exists() for path in paths)
    mixed += len({path.read_text() for path in paths if path.exists()}) != 1
print(interrupted, missing, mixed, sorted(path.name for path in folder.iterdir() if path not in paths))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(int(number)), str(count)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split(maxsplit=3)[:3] == ["1500", "0", "0"], done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EXDEV])
def test_a_rename_that_fails_keeps_every_old_file(tmp_path, monkeypatch, fails_at, number):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths[1:]:
        path.write_text("old")
    rename, calls = os.replace, []

    def refuse(source, target):
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError(number, os.strerror(number))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=os.strerror(number)), atomic_files(*paths) as temporary:
        for path in temporary:
            path.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "old", "c": "old"}

    calls[:] = [None] * (fails_at - 1)
    with pytest.raises(OSError, match=os.strerror(number)):
        atomic_write(tmp_path / "b", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "old", "c": "old"}


def test_a_set_is_replaced_without_hard_links_too(tmp_path, monkeypatch):
    def no_links(*given):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "a").write_text("old")
    with atomic_files(tmp_path / "a", tmp_path / "b") as temporary:
        for path in temporary:
            path.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}


def test_json_that_cannot_be_read_is_one_line(tmp_path):
    path = tmp_path / "facts.json"
    bad = {
        b"\xff{}": "not JSON .not UTF-8 .byte 0..; expected",
        b"[" * 100_000: "not JSON .nested too deeply.; expected",
        b"[1]": "found list; expected",
        b'{"a": ' + b" " * 100 + b"1}": "larger than 64 bytes",
        b"{": "not JSON",
    }
    for content, message in bad.items():
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"facts.json: {message}"):
            read_json_object(path, "facts", limit=64 if b"   " in content else 1 << 20)
    path.unlink()
    with pytest.raises(InputError, match=r"facts.json: No such file or directory; expected facts"):
        read_json_object(path, "facts")
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"facts.json: not a regular file; expected facts"):
        read_json_object(path, "facts")
    with pytest.raises(InputError, match=": Is a directory; expected facts"):
        read_json_object(tmp_path, "facts")
    path.unlink()
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}


def test_a_full_disk_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be written to: No space left"), atomic_files(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_becomes_read_only_is_one_line_too(tmp_path, monkeypatch):
    def read_only(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match="cannot be written to: Read-only file system"),
        atomic_files(tmp_path / "a", tmp_path / "b") as temporary,
    ):
        temporary[0].write_text("half")
        patch.setattr(os, "unlink", read_only)
        read_only()
    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(InputError, match="cannot be written to: Read-only file system"), atomic_dir(tmp_path / "c"):
        pass


def test_the_last_look_comes_when_all_is_on_the_disk_and_before_any_name(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(os, "fsync", lambda stream: steps.append("on the disk"))

    def look():
        assert all(name.endswith(".tmp") for name in names(tmp_path))
        steps.append("looked")
        raise InputError("not now")

    with (
        pytest.raises(InputError, match="not now"),
        atomic_files(tmp_path / "a", tmp_path / "b", before_rename=look) as temporary,
    ):
        for path in temporary:
            path.write_text("whole")
    assert steps == ["on the disk", "on the disk", "looked"] and names(tmp_path) == []


def test_what_an_attempt_left_behind_is_found_by_its_name(tmp_path):
    with atomic_files(tmp_path / "a.bin") as (path,), atomic_dir(tmp_path / "a_parts") as folder:
        path.write_text("half")
        for name in (".a.bin.tmp", ".b.bin.12-0123abcd.tmp", "a.bin"):
            (tmp_path / name).touch()
        assert find_stale_temp_files(tmp_path / "a.bin", tmp_path / "a_parts") == sorted([path, folder])
        assert longest_file_name(tmp_path / "a", tmp_path / "a.bin").startswith(".a.bin.")
        assert len(longest_file_name(tmp_path / "a.bin")) == len(path.name)
    assert find_stale_temp_files(tmp_path / "none" / "a.bin") == []


def test_a_folder_appears_whole_in_place_of_an_empty_one(tmp_path):
    (tmp_path / "folder").mkdir()
    refuse_existing(tmp_path / "folder", "--output")
    with atomic_dir(tmp_path / "folder") as folder:
        (folder / "a").write_text("whole")
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["a"]
    with pytest.raises(InputError, match=r"--output .*folder: exists already"):
        refuse_existing(tmp_path / "folder", "--output")


def test_a_place_that_is_taken_meanwhile_keeps_what_is_there(tmp_path):
    for name, take in {"folder": lambda path: (path / "a").mkdir(parents=True), "file": lambda path: path.touch()}.items():
        with pytest.raises(InputError, match=rf"{name}: .* meanwhile .*; choose another name"), atomic_dir(tmp_path / name):
            take(tmp_path / name)
    assert names(tmp_path) == ["file", "folder"] and names(tmp_path / "folder") == ["a"]


def test_a_name_that_no_file_system_takes_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be written to: File name too long"), atomic_dir(tmp_path / ("x" * 250)):
        raise AssertionError("the block is not begun")


def test_a_place_where_nothing_can_be_made_is_one_line():
    with pytest.raises(InputError, match="cannot be written to: No such file"), atomic_dir(Path("/proc/nowhere")):
        raise AssertionError("the block is not begun")


@pytest.mark.parametrize("name", ["a\0b", "\udcff"])
def test_a_name_that_is_no_text_is_one_line(name):
    with pytest.raises(InputError, match=r"--output '.*': not UTF-8, or holds a null character"):
        refuse_existing(Path(name), "--output")


def test_an_error_of_the_block_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_dir(tmp_path / "folder"):
        (tmp_path / "missing").read_text()
    with pytest.raises(RuntimeError, match="a bug"), atomic_dir(tmp_path / "folder"):
        raise RuntimeError("a bug")


def test_a_full_disk_is_one_line_from_libraries_that_hide_the_number(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot be written to: No space left"), atomic_dir(tmp_path / "a"):
        raise Exception("No space left on device (os error 28)")
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_blocks=8, f_bavail=0))
    with pytest.raises(InputError, match="cannot be written to: No space left"), atomic_dir(tmp_path / "a"):
        raise RuntimeError("basic_ios::clear: iostream error")
    assert not names(tmp_path)


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refuse_existing(tmp_path / "link", "--output")
    with atomic_dir(tmp_path / "link") as folder:
        (folder / "a").touch()
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == ["a"]


def test_a_name_that_goes_up_is_that_of_the_folder_it_leads_to(tmp_path):
    path = tmp_path / "new" / "folder" / ".."
    refuse_existing(path, "--output")
    create_parent_dir(path, "--output")
    with atomic_dir(path) as folder:
        (folder / "a").touch()
    assert names(tmp_path) == ["new"] and names(tmp_path / "new") == ["a"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="exists already"):
        refuse_existing(tmp_path / "none" / "..", "--output")


def test_the_folder_that_a_command_runs_in_is_not_replaced_under_its_feet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path(), tmp_path, Path("none/..")):
        with pytest.raises(InputError, match=r"--output .*: the folder that this command runs in, expected another name"):
            refuse_existing(path, "--output")


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, rename = [], os.rename
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
    )

    def renamed(here, there):
        assert sorted(synced) == sorted(["a", "b", "inner", here.name])
        rename(here, there)

    monkeypatch.setattr(os, "rename", renamed)
    with atomic_dir(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "a").write_text("whole")
        (folder / "inner" / "b").write_text("whole")
    assert names(tmp_path) == ["folder"] and len(synced) == 4


def test_sigterm_runs_the_finally_clauses(tmp_path):
    with pytest.raises(SystemExit) as stop, exit_on_sigterm(), atomic_files(tmp_path / "a") as (path,):
        path.write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_lock_is_one_s_own_until_it_is_let_go(tmp_path):
    path = tmp_path / "folder" / "lock"
    with try_lock(path) as first, try_lock(path) as second:
        assert first and not second and path.exists()
    assert not path.exists()
    with try_lock(path) as again:
        assert again


def test_a_lock_ends_with_the_process_that_is_killed(tmp_path):
    path = tmp_path / "lock"
    code = "import sys, time; from pathlib import Path; from megaenc.atomic_io import try_lock\n"
    code += "with try_lock(Path(sys.argv[1])) as mine: print(mine, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        with try_lock(path) as mine:
            assert not mine
    finally:
        holder.kill()
        holder.communicate()
    with try_lock(path) as mine:
        assert mine


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_stops_what_is_not_told_to_ignore_it(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # as nohup does
    try:
        with contextlib.ExitStack() as stack:
            if not ignored:
                stop = stack.enter_context(pytest.raises(SystemExit))
            with exit_on_sigterm():
                os.kill(os.getpid(), signal.SIGHUP)
        assert ignored or stop.value.code == 129
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_name_of_an_output_file_is_checked_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("old")
    os.mkfifo(tmp_path / "fifo")
    for path in ("new", "file", "a/b/new", "none/../new"):
        check_output_file(tmp_path / path, "--output")
    for path, message in (
        (".", "found a folder, expected the name of a file"),
        ("fifo", "found no regular file, expected the name of a file"),
        ("file/new", "cannot write to the folder .*: Not a directory"),
        ("a/file" * 2000, "cannot be accessed: File name too long"),
        ("n" * 240, "cannot write to the folder .*: File name too long"),
    ):
        with pytest.raises(InputError, match=rf"--output \S+: {message}"):
            check_output_file(tmp_path / path, "--output")
    with pytest.raises(InputError, match="--output /proc/none/new: "):
        check_parent_writable(Path("/proc/none/new"), "--output")
    assert names(tmp_path) == ["fifo", "file"] and (tmp_path / "file").read_text() == "old"


def test_commands_that_write_into_one_new_folder_do_not_disturb_each_other(tmp_path):
    def write(folder: Path, number: int) -> None:
        path = folder / "deep" / f"file{number}"
        check_output_file(path, "--output")
        with create_parent_with_rollback(path, "--output"):
            atomic_write(path, "text")

    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            list(pool.map(write, 8 * [tmp_path / f"new{turn}"], range(8)))
            assert len(names(tmp_path / f"new{turn}" / "deep")) == 8


def test_folders_that_were_created_for_what_failed_are_removed_unless_a_file_is_in_them(tmp_path):
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "a" / "b" / "file", tmp_path / "old" / "c" / "file"):
        with pytest.raises(KeyError), create_parent_with_rollback(path, "--output"):
            raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    with pytest.raises(KeyError), create_parent_with_rollback(tmp_path / "a" / "b" / "file", "--output"):
        (tmp_path / "a" / "kept").touch()
        raise KeyError
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["kept"]
    with create_parent_with_rollback(tmp_path / "new" / "file", "--output"):
        pass
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("name", [300 * "x", "file/x", "none/x"])
@pytest.mark.parametrize("write", [atomic_files, atomic_dir])
def test_a_name_that_cannot_be_is_one_line_with_that_name(tmp_path, name, write):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"{tmp_path / name}: cannot be written to: "), write(tmp_path / name) as made:
        (made[0] if write is atomic_files else made / "x").write_text("whole")
    assert names(tmp_path) == ["file"]


def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: cannot be written to: Is a directory"):
        atomic_write(tmp_path / "folder", "text")
    assert names(tmp_path) == ["folder"]


def test_an_error_about_another_file_stays_one(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_files(tmp_path / "a"):
        (tmp_path / "b").read_text()


def test_a_full_disk_that_a_library_in_rust_ran_into_is_one_line(tmp_path):
    for text, error in (("No space left on device (os error 28)", InputError), ("bad merges (os error 2)", ValueError)):
        with pytest.raises(error, match=r"No space left on device$|bad merges"), atomic_dir(tmp_path / "folder"):
            raise ValueError(text)
    with pytest.raises(InputError, match=r"^wrong"), atomic_dir(tmp_path / "folder"):
        raise InputError("wrong (os error 28)")
    assert not names(tmp_path)
