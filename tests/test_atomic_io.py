import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaenc.atomic_io import (
    atomic_dir,
    atomic_files,
    atomic_write,
    convert_write_errors,
    find_stale_temp_files,
    longest_file_name,
)
from megaenc.errors import InputError
from megaenc.json_files import read_json_object
from megaenc.processes import exit_on_sigterm


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_files_appear_together_or_not_at_all(tmp_path):
    wanted = [tmp_path / "a.bin", tmp_path / "a.json"]
    with atomic_files(*wanted) as temporary:
        for path in temporary:
            path.write_text("whole")
        assert all(name.startswith(".a.") and name.endswith(".tmp") for name in names(tmp_path))
    assert names(tmp_path) == ["a.bin", "a.json"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        KeyboardInterrupt(),
        FileNotFoundError(errno.ENOENT, "missing"),
        RuntimeError("a bug"),
    ],
    ids=repr,
)
def test_a_block_that_fails_leaves_nothing_and_its_error_stays_what_it_is(tmp_path, error):
    with (
        pytest.raises(type(error)) as raised,
        atomic_files(tmp_path / "a", tmp_path / "b") as temporary,
    ):
        temporary[0].write_text("half")
        raise error
    assert raised.value is error
    with pytest.raises(type(error)) as raised, atomic_dir(tmp_path / "directory") as directory:
        (directory / "a").write_text("half")
        raise error
    assert raised.value is error
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "left"),
    [
        ([], {}),
        (["a", "b", "c"], {"a": "new", "b": "old", "c": "old"}),
        (["c"], {"c": "old"}),
        (["a"], {"a": "new"}),
    ],
    ids=["all new", "all old", "the last old", "the first old"],
)
@pytest.mark.parametrize("stop", [signal.SIGTERM, errno.ESTALE], ids=["signal", "error"])
def test_what_is_new_goes_when_the_renames_are_interrupted(tmp_path, monkeypatch, old, left, stop):
    rename = os.replace
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for name in old:
        (tmp_path / name).write_text("old")

    def rename_and_stop(source, target):
        if target == paths[1] and stop == errno.ESTALE:
            raise OSError(stop, os.strerror(stop))
        rename(source, target)
        if target == paths[0] and stop == signal.SIGTERM:
            os.kill(os.getpid(), stop)

    monkeypatch.setattr(os, "replace", rename_and_stop)
    with pytest.raises((SystemExit, OSError)), exit_on_sigterm(), atomic_files(*paths) as temporary:
        for path in temporary:
            path.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == left


SIGNALS = """
import random, shutil, signal, sys, threading, time
from collections import Counter
from pathlib import Path
from megaenc.atomic_io import atomic_files
from megaenc.processes import exit_on_sigterm

directory, trials = Path(sys.argv[1]), int(sys.argv[2])
replaced = directory / "replaced"
replaced.write_text("0" * 1000)
main, delays = threading.main_thread().ident, random.Random(0)
interrupted = torn = incomplete = 0

def shoot(delay):
    time.sleep(delay)
    signal.pthread_kill(main, signal.SIGTERM)

for trial in range(trials):
    new = directory / "new"
    new.mkdir()
    shot = threading.Thread(target=shoot, args=[delays.uniform(0, 0.003)])
    number = 0
    try:
        with exit_on_sigterm():
            shot.start()
            while True:
                number += 1
                with atomic_files(*(new / f"{number}.{part}" for part in "abc")) as temporary:
                    for path in temporary:
                        path.write_text("whole")
                with atomic_files(replaced) as [path]:
                    path.write_text(str(trial % 10) * 1000)
    except SystemExit:
        interrupted += 1
    shot.join()
    torn += replaced.read_text() not in [str(digit) * 1000 for digit in range(10)]
    parts = Counter(path.stem for path in new.iterdir() if not path.name.endswith(".tmp"))
    incomplete += any(count != 3 for count in parts.values())
    shutil.rmtree(new)
print(interrupted, torn, incomplete)
"""


def test_a_signal_at_any_moment_leaves_whole_files_and_whole_sets(tmp_path):
    """Send 300 signals to a loop that replaces a file and adds a set of three."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, str(tmp_path), "300"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "300 0 0\n", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM]
)
@pytest.mark.parametrize("write", [atomic_files, atomic_dir])
def test_a_disk_that_takes_nothing_more_is_one_line(tmp_path, write, number):
    with (
        pytest.raises(InputError, match=f"cannot be written to: {os.strerror(number)}"),
        write(tmp_path / "a"),
    ):
        raise OSError(number, os.strerror(number))
    assert not names(tmp_path)


def test_a_disk_that_becomes_read_only_is_one_line_too(tmp_path, monkeypatch):
    """Neither can unfinished files be removed nor directories be made."""

    def read_only(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match="cannot be written to: Read-only file system"),
        atomic_files(tmp_path / "a") as temporary,
    ):
        temporary[0].write_text("half")
        patch.setattr(os, "unlink", read_only)
        read_only()
    monkeypatch.setattr(os, "mkdir", read_only)
    with (
        pytest.raises(InputError, match="cannot be written to: Read-only file system"),
        atomic_dir(tmp_path / "c"),
    ):
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
    with atomic_files(tmp_path / "a.bin") as (path,), atomic_dir(tmp_path / "a_parts") as directory:
        path.write_text("half")
        for name in (".a.bin.tmp", ".b.bin.12-0123abcd.tmp", "a.bin"):
            (tmp_path / name).touch()
        assert find_stale_temp_files(tmp_path / "a.bin", tmp_path / "a_parts") == sorted(
            [path, directory]
        )
        assert longest_file_name(tmp_path / "a", tmp_path / "a.bin").startswith(".a.bin.")
        assert len(longest_file_name(tmp_path / "a.bin")) == len(path.name)
    assert find_stale_temp_files(tmp_path / "none" / "a.bin") == []


def test_a_directory_appears_whole_in_place_of_an_empty_one_and_a_link_to_it_stays_a_link(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    with atomic_dir(tmp_path / "link") as directory:
        (directory / "a").write_text("whole")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "directory") == ["a"]


def test_a_place_that_is_taken_meanwhile_keeps_what_is_there(tmp_path):
    for name, take in {
        "directory": lambda path: (path / "a").mkdir(parents=True),
        "file": lambda path: path.touch(),
    }.items():
        with (
            pytest.raises(InputError, match=rf"{name}: .* meanwhile .*; choose another name"),
            atomic_dir(tmp_path / name),
        ):
            take(tmp_path / name)
    assert names(tmp_path) == ["directory", "file"] and names(tmp_path / "directory") == ["a"]


@pytest.mark.parametrize("write", [atomic_files, atomic_dir])
def test_a_name_that_cannot_be_is_one_line_with_that_name(tmp_path, write):
    (tmp_path / "file").touch()
    for path in (
        tmp_path / (300 * "x"),
        tmp_path / "file/x",
        tmp_path / "none/x",
        Path("/proc/nowhere"),
    ):
        with (
            pytest.raises(InputError, match=f"{path}: cannot be written to: "),
            write(path) as made,
        ):
            (made[0] if write is atomic_files else made / "x").write_text("whole")
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_one_line_from_libraries_that_hide_the_number(tmp_path, monkeypatch):
    full = "cannot be written to: No space left on device"
    for text, error, message in (
        ("No space left on device (os error 28)", ValueError, full),
        ("wrong (os error 28)", InputError, "^wrong"),
        ("bad merges (os error 2)", ValueError, "bad merges"),
    ):
        with (
            pytest.raises(InputError if message == full else error, match=message),
            atomic_dir(tmp_path / "a"),
        ):
            raise error(text)
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_blocks=8, f_bavail=0))
    with pytest.raises(InputError, match=full), atomic_dir(tmp_path / "a"):
        raise RuntimeError("basic_ios::clear: iostream error")
    assert not names(tmp_path)


def test_an_error_of_torchs_writer_has_the_reason_of_its_cause(tmp_path):
    line = f"{tmp_path} on .*: cannot be written to: Input/output error"
    with pytest.raises(InputError, match=line), convert_write_errors(tmp_path, name_host=True):
        try:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904


@pytest.mark.parametrize("errnos", [(), (errno.EACCES,), (errno.ENOENT,)])
def test_an_error_about_a_temporary_file_names_the_final_path(tmp_path, errnos):
    temporary = tmp_path / "a.tmp"
    final_paths = {str(temporary): tmp_path / "a"}
    line = f"^{tmp_path}/a: cannot be written to: Permission denied$"
    with (
        pytest.raises(InputError, match=line),
        convert_write_errors(tmp_path, *errnos, final_paths=final_paths),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(temporary))


def test_on_a_full_disk_only_an_os_error_that_is_not_asked_for_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_blocks=8, f_bavail=0))
    with pytest.raises(FileNotFoundError), convert_write_errors(tmp_path, errno.ENOSPC):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "other")
    with (
        pytest.raises(InputError, match="No space left"),
        convert_write_errors(tmp_path, errno.ENOSPC),
    ):
        raise ValueError("bad merges")


def test_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    rename = os.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: synced.append(
            os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        ),
    )

    def renamed(here, there):
        assert sorted(synced) == sorted(["a", "b", "inner", here.name])
        rename(here, there)

    monkeypatch.setattr(os, "rename", renamed)
    with atomic_dir(tmp_path / "directory") as directory:
        (directory / "inner").mkdir()
        (directory / "a").write_text("whole")
        (directory / "inner" / "b").write_text("whole")
    assert names(tmp_path) == ["directory"] and len(synced) == 4


def test_sigterm_runs_the_finally_clauses(tmp_path):
    with (
        pytest.raises(SystemExit) as stop,
        exit_on_sigterm(),
        atomic_files(tmp_path / "a") as (path,),
    ):
        path.write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_directory_in_the_place_of_a_file_is_one_line(tmp_path):
    (tmp_path / "directory").mkdir()
    with pytest.raises(InputError, match="directory: cannot be written to: Is a directory"):
        atomic_write(tmp_path / "directory", "text")
    assert names(tmp_path) == ["directory"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff{}", "not JSON .not UTF-8 .byte 0..; expected facts"),
        (b"[" * 100_000, "not JSON .nested too deeply.; expected facts"),
        (b"[1]", "found list; expected facts"),
        (b'{"a": ' + (1 << 20) * b" " + b"1}", "larger than 1,048,576 bytes"),
        (b"{", "not JSON"),
    ],
    ids=["not UTF-8", "deep", "a list", "large", "cut"],
)
def test_json_that_cannot_be_read_is_one_line(tmp_path, content, message):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"facts.json: {message}"):
        read_json_object(path, "facts", limit=1 << 20)
    path.unlink()
    with pytest.raises(InputError, match=r"facts.json: No such file or directory; expected facts"):
        read_json_object(path, "facts")
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"facts.json: not a regular file; expected facts"):
        read_json_object(path, "facts")
