"""The folder of a run, and file systems that break their promises."""

import errno
import fcntl
import os

import pytest

from megaenc.doctor import disk
from megaenc.doctor.result import ProbeContext


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What is written to measure speed takes a moment."""
    monkeypatch.setattr(disk, "_SECONDS", 0.05)


def test_a_good_folder_keeps_all_promises_and_is_left_as_it_was(tmp_path):
    findings = {each.name: each for each in disk.check_file_system(ProbeContext(save=str(tmp_path / "runs" / "not yet there")))}
    assert {name: findings[name].result for name in ("locks", "renaming", "syncing")} == dict.fromkeys(
        ("locks", "renaming", "syncing"), "kept"
    )
    assert "MB/s" in findings["writing"].result
    assert not list(tmp_path.iterdir())


def test_space_is_that_of_the_folder_above_one_that_is_not_there(tmp_path):
    findings = {each.name: each for each in disk.check_disk_space(ProbeContext(save=str(tmp_path / "a" / "b")))}
    assert findings["folder"].result.startswith(f"{tmp_path}, on ")


def test_little_space_and_few_files_are_notes(tmp_path, monkeypatch):
    class Full:
        f_frsize, f_blocks, f_bavail, f_files, f_favail = 4096, 2**28, 2**18, 2**20, 12

    monkeypatch.setattr("os.statvfs", lambda path: Full)
    findings = {each.name: each for each in disk.check_disk_space(ProbeContext(save=str(tmp_path)))}
    assert (findings["space"].level, findings["space"].result) == ("note", "1.0 GiB free of 1,024.0")
    assert (findings["files"].level, findings["files"].result) == ("note", "12 more can be created")


def test_no_room_for_temporary_files_is_named(monkeypatch):
    assert disk.check_temp_space(ProbeContext())[0].result.endswith("GiB free")
    monkeypatch.setattr(disk, "_MIN_TEMP_BYTES", 2**70)
    assert disk.check_temp_space(ProbeContext())[0].level == "note"

    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(disk, "gettempdir", nowhere)
    [finding] = disk.check_temp_space(ProbeContext())
    assert finding.level == "problem" and "TMPDIR" in finding.advice


@pytest.mark.parametrize(("kind", "level"), [("ext4", "ok"), ("lustre", "ok"), ("tmpfs", "note"), ("overlay", "note")])
def test_file_systems_that_end_with_the_machine_or_the_container_are_notes(kind, level, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text(f"root / ext4 rw 0 0\nproc /proc proc rw 0 0\ndata {tmp_path} {kind} rw 0 0\n")
    finding = disk.check_disk_space(ProbeContext(save=str(tmp_path), root=tmp_path))[0]
    assert (finding.level, finding.result) == (level, f"{tmp_path}, on {kind}")


def test_the_longest_mount_counts_and_not_one_of_a_like_name(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text(f"root / ext4 rw 0 0\na {tmp_path}/dat tmpfs rw 0 0\nb {tmp_path} nfs4 rw 0 0\n")
    assert disk.file_system_type(tmp_path / "data", tmp_path) == "nfs4"


def test_a_file_system_without_locks_is_a_problem(tmp_path, monkeypatch):
    def refuses(descriptor, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    findings = {each.name: each for each in disk.check_file_system(ProbeContext(save=str(tmp_path)))}
    assert (findings["locks"].level, findings["locks"].result) == ("problem", "Function not implemented")
    assert findings["renaming"].level == "ok"


def test_a_full_disk_is_no_broken_promise(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "_FILE_SYSTEM_CHECKS", (("renaming", full, "choose another file system"),))
    finding = disk.check_file_system(ProbeContext(save=str(tmp_path)))[0]
    assert finding.level == "problem" and finding.advice.startswith("free space there")


def test_locks_that_two_may_have_are_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
    findings = {each.name: each for each in disk.check_file_system(ProbeContext(save=str(tmp_path)))}
    assert (findings["locks"].level, findings["locks"].result) == ("problem", "given to two at a time")


def test_renaming_that_does_not_replace_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda here, there: None)
    findings = {each.name: each for each in disk.check_file_system(ProbeContext(save=str(tmp_path)))}
    assert findings["renaming"].level == "problem"


def test_a_folder_that_cannot_be_written_to_is_a_problem(tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk, "TemporaryDirectory", refuses)
    [finding] = disk.check_file_system(ProbeContext(save=str(tmp_path)))
    assert (finding.level, finding.name) == ("problem", "writing") and "Permission denied" in finding.result


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    [finding] = disk.check_file_system(ProbeContext(save=str(tmp_path / "file")))
    assert (finding.level, finding.name, finding.result) == ("problem", "writing", f"{tmp_path / 'file'}: Not a directory")


@pytest.mark.parametrize(("slow", "level"), [(0, "ok"), (2**70, "note")])
def test_a_slow_disk_is_a_note(slow, level, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MIN_WRITE_RATE", slow)
    assert disk.measure_write_speed(tmp_path).level == level
