"""The directory of a run, and file systems that break their promises."""

import errno
import fcntl
from types import SimpleNamespace

import pytest
from findings import by_name

from megaenc.doctor import disk
from megaenc.doctor.result import CheckContext


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Shorten the measurement of speed, and accept any disk."""
    monkeypatch.setattr(disk, "_SECONDS", 0.05)
    monkeypatch.setattr(disk, "_MIN_WRITE_RATE", 0)


def found(directory) -> dict:
    return by_name(disk.check_file_system(CheckContext(save=str(directory))))


def test_a_good_directory_keeps_all_promises_and_is_left_as_it_was(tmp_path):
    findings = found(tmp_path / "runs" / "not yet there")
    assert {each.level for each in findings.values()} == {"ok"}
    assert findings["locks"].result == "kept"
    assert "MB/s" in findings["writing"].result
    assert not list(tmp_path.iterdir())


def raising(code):
    def fail(*_, **__):
        raise OSError(code, "no such luck")

    return fail


@pytest.mark.parametrize(
    ("flock", "result", "advice"),
    [
        (raising(errno.ENOSYS), "no such luck", "mount it with locks"),
        (raising(errno.ENOSPC), "no such luck", "free space there"),
        (lambda descriptor, how: None, "given to two at a time", "mount it with locks"),
    ],
)
def test_a_file_system_without_locks_is_a_problem(flock, result, advice, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", flock)
    finding = found(tmp_path)["locks"]
    assert (finding.level, finding.result) == ("problem", result)
    assert advice in finding.advice


def test_a_directory_that_cannot_be_written_to_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    finding = found(tmp_path / "file")["writing"]
    assert (finding.level, finding.result) == ("problem", f"{tmp_path / 'file'}: Not a directory")
    monkeypatch.setattr(disk, "TemporaryDirectory", raising(errno.EACCES))
    finding = found(tmp_path)["writing"]
    assert (finding.level, finding.result) == ("problem", f"{tmp_path}: no such luck")


def test_a_slow_disk_is_a_note(tmp_path, monkeypatch):
    assert disk.measure_write_speed(tmp_path).level == "ok"
    monkeypatch.setattr(disk, "_MIN_WRITE_RATE", 2**70)
    assert disk.measure_write_speed(tmp_path).level == "note"


def test_little_space_and_few_files_are_notes(tmp_path, monkeypatch):
    """A missing directory is judged by its parent."""
    full = SimpleNamespace(
        f_frsize=4096, f_blocks=2**28, f_bavail=2**18, f_files=2**20, f_favail=12
    )
    monkeypatch.setattr("os.statvfs", lambda path: full)
    findings = by_name(disk.check_disk_space(CheckContext(save=str(tmp_path / "a" / "b"))))
    assert findings["directory"].result.startswith(f"{tmp_path}, on ")
    assert (findings["space"].level, findings["space"].result) == (
        "note",
        "1.0 GiB free of 1,024.0",
    )
    assert (findings["files"].level, findings["files"].result) == ("note", "12 more can be created")


def test_no_room_for_temporary_files_is_named(monkeypatch):
    for least, level in ((0, "ok"), (2**70, "note")):
        monkeypatch.setattr(disk, "_MIN_TEMP_BYTES", least)
        assert disk.check_temp_space(CheckContext())[0].level == level
    monkeypatch.setattr(disk, "gettempdir", raising(errno.ENOENT))
    [finding] = disk.check_temp_space(CheckContext())
    assert finding.level == "problem"
    assert "TMPDIR" in finding.advice


@pytest.mark.parametrize(
    ("kind", "level"), [("lustre", "ok"), ("tmpfs", "note"), ("overlay", "note")]
)
def test_file_systems_that_end_with_the_machine_or_the_container_are_notes(kind, level, tmp_path):
    """The longest mount counts, not one with a similar name."""
    directory = tmp_path / "data"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text(
        f"root / ext4 rw 0 0\na {tmp_path}/dat nfs4 rw 0 0\nb {tmp_path} {kind} rw 0 0\n"
    )
    finding = disk.check_disk_space(CheckContext(save=str(directory), root=tmp_path))[0]
    assert (finding.level, finding.result) == (level, f"{tmp_path}, on {kind}")
    assert disk.file_system_type(directory, tmp_path) == kind
