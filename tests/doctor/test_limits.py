"""Shared memory, open files, locked memory."""

import resource
from types import SimpleNamespace

import pytest

from megaenc.doctor.machine import check_dev_shm, check_resource_limits
from megaenc.doctor.result import ProbeContext

GIB, MIB = 2**30, 2**20


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """Judge a /dev/shm of so many bytes, of a machine with or without accelerators."""
    (tmp_path / "dev/shm").mkdir(parents=True)

    def judged(size, free, *, writable=True, accelerators=True):
        monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=free))
        monkeypatch.setattr("os.access", lambda path, how: writable)
        (tmp_path / "dev/nvidia0").unlink(missing_ok=True)
        if accelerators:
            (tmp_path / "dev/nvidia0").touch()
        [finding] = check_dev_shm(ProbeContext(root=tmp_path))
        return finding

    return judged


def test_docker_s_64_megabytes_are_a_problem_where_accelerators_speak_through_them(shm):
    finding = shm(64 * MIB, 64 * MIB)
    assert (finding.level, finding.result) == ("problem", "64 MiB, 64 MiB free")
    assert "--ipc host" in finding.advice and "--shm-size 1g" in finding.advice
    assert shm(64 * MIB, 64 * MIB, accelerators=False).level == "note"


def test_a_large_one_that_is_full_is_named_as_full(shm):
    finding = shm(64 * GIB, 10 * MIB)
    assert finding.level == "problem" and "nearly full" in finding.advice
    assert shm(64 * GIB, 60 * GIB).level == "ok"


def test_one_that_cannot_be_written_to_is_a_problem(shm):
    finding = shm(64 * GIB, 64 * GIB, writable=False, accelerators=False)
    assert finding.level == "problem" and "chmod" in finding.advice


def test_one_that_is_not_there_is_a_problem(tmp_path):
    [finding] = check_dev_shm(ProbeContext(root=tmp_path))
    assert finding.level == "problem" and "mount a tmpfs" in finding.advice


@pytest.fixture
def allowed(tmp_path, monkeypatch):
    """Judge limits of so many open files and bytes of locked memory, for so many ranks of eight a node."""

    def judged(files=(2**20, 2**20), locked=resource.RLIM_INFINITY, ranks=1, cards=False):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
        flags = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (locked, locked)}
        monkeypatch.setattr("resource.getrlimit", flags.get)
        if cards:
            (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True, exist_ok=True)
        return check_resource_limits(ProbeContext(root=tmp_path))

    return judged


def test_open_files_go_by_the_ranks(allowed):
    assert allowed((1024, 4096), ranks=8)[0].level == "ok"
    finding = allowed((1024, 4096), ranks=192)[0]
    assert finding.level == "problem" and finding.advice.startswith("ulimit -n 4096")
    assert allowed((resource.RLIM_INFINITY, resource.RLIM_INFINITY), ranks=4096)[0].level == "ok"
    assert "ulimit -n 33280" in allowed((1024, resource.RLIM_INFINITY), ranks=4096)[0].advice


def test_locked_memory_matters_to_infiniband_alone_and_between_nodes_alone(allowed):
    assert allowed(locked=8 * MIB)[1].level == "ok"
    assert allowed(locked=8 * MIB, ranks=16)[1].level == "ok"
    finding = allowed(locked=8 * MIB, cards=True)[1]
    assert (finding.level, finding.result) == ("note", "8 MiB") and "ulimit -l unlimited" in finding.advice
    assert allowed(cards=True)[1].level == "ok"
    assert allowed(locked=8 * MIB, ranks=16, cards=True)[1].level == "problem"
