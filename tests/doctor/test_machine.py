"""Processors, memory and limits of a machine, and of a container on it."""

import resource
from types import SimpleNamespace

import psutil
import pytest

from megaenc.doctor import machine
from megaenc.doctor.result import CheckContext

GIB = 2**30
MIB = 2**20
FIRST_VERSION = {
    "cpu/cpu.cfs_quota_us": "150000",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "4096",
}
NESTED = {
    "cpu.max": "max 100000",
    "memory.max": "max",
    "slurm/cpu.max": "250000 100000",
    "slurm/memory.max": "max",
    "slurm/job/cpu.max": "800000 100000",
    "slurm/job/memory.max": f"{12 * GIB}",
}


def in_groups(root, files):
    """Write control groups for a process in /slurm/job; return the context."""
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/slurm/job\n")
    return CheckContext(root=root)


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [(NESTED, 2.5, 12 * GIB), (FIRST_VERSION, 1.5, 4096), ({}, None, None)],
)
def test_the_narrowest_limit_of_the_groups_counts(files, quota, limit, tmp_path):
    in_groups(tmp_path, files)
    assert machine.cpu_quota(tmp_path) == quota
    assert machine.memory_limit(tmp_path) == limit


@pytest.mark.parametrize(("cores", "is_noted"), [(8, True), (2, False)])
def test_less_time_than_cores_is_a_note(cores, is_noted, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "usable_core_count", lambda: cores)
    notes = [
        each.result
        for each in machine.check_processors(in_groups(tmp_path, NESTED))
        if each.name == "CPU quota"
    ]
    assert notes == ["limited to the time of 2.5 cores"] * is_noted


def test_a_job_s_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB)
    )
    finding = machine.check_memory(in_groups(tmp_path, NESTED))[0]
    assert (finding.level, finding.result) == (
        "ok",
        "64.0 GiB, 60.0 free; this container or job may use 12.0",
    )


@pytest.mark.parametrize(
    ("threads", "processes", "level"),
    [
        ("", 1, "ok"),
        ("8", 1, "ok"),
        ("1", 1, "note"),
        ("64", 1, "note"),
        ("1", 4, "ok"),
        ("1", 9, "note"),
    ],
)
def test_threads_against_cores(threads, processes, level, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    environment = ({"OMP_NUM_THREADS": threads} if threads else {}) | (
        {"RANK": "0"} if processes > 1 else {}
    )
    assert machine.check_threads(CheckContext(environment=environment), cores=8).level == level


@pytest.mark.parametrize(
    ("size", "free", "writable", "accelerators", "level", "advice"),
    [
        (
            64 * MIB,
            64 * MIB,
            True,
            True,
            "problem",
            "--ipc host",
        ),  # Docker's, through which accelerators speak
        (64 * MIB, 64 * MIB, True, False, "note", "--shm-size 1g"),
        (64 * GIB, 10 * MIB, True, True, "problem", "nearly full"),
        (64 * GIB, 60 * GIB, True, True, "ok", ""),
        (64 * GIB, 64 * GIB, False, False, "problem", "chmod"),
    ],
)
def test_shared_memory(size, free, writable, accelerators, level, advice, tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    if accelerators:
        (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=size, free=free))
    monkeypatch.setattr("os.access", lambda path, how: writable)
    [finding] = machine.check_dev_shm(CheckContext(root=tmp_path))
    assert finding.level == level
    assert advice in finding.advice


def test_shared_memory_that_is_not_there_is_a_problem(tmp_path):
    [finding] = machine.check_dev_shm(CheckContext(root=tmp_path))
    assert finding.level == "problem"
    assert "mount a tmpfs" in finding.advice


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Return a function that judges limits for so many ranks of eight a node.

    The limits are those of open files and of bytes of locked memory.
    """

    def judged(files=(2**20, 2**20), locked=resource.RLIM_INFINITY, ranks=1, cards=False):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
        allowed = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (locked, locked)}
        monkeypatch.setattr("resource.getrlimit", allowed.get)
        if cards:
            (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True, exist_ok=True)
        return machine.check_resource_limits(CheckContext(root=tmp_path))

    return judged


@pytest.mark.parametrize(
    ("files", "ranks", "level", "advice"),
    [
        ((1024, 4096), 8, "ok", ""),
        ((1024, 4096), 192, "problem", "ulimit -n 4096"),
        ((1024, resource.RLIM_INFINITY), 4096, "problem", "ulimit -n 33280"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, "ok", ""),
    ],
)
def test_open_files_go_by_the_ranks(limits, files, ranks, level, advice):
    finding = limits(files, ranks=ranks)[0]
    assert finding.level == level
    assert finding.advice.startswith(advice)


@pytest.mark.parametrize(
    ("locked", "ranks", "cards", "level"),
    [
        (8 * MIB, 1, False, "ok"),
        (8 * MIB, 16, False, "ok"),
        (8 * MIB, 1, True, "note"),
        (8 * MIB, 16, True, "problem"),
        (resource.RLIM_INFINITY, 16, True, "ok"),
    ],
)
def test_locked_memory_matters_to_infiniband_alone_and_between_nodes_alone(
    limits, locked, ranks, cards, level
):
    finding = limits(locked=locked, ranks=ranks, cards=cards)[1]
    assert finding.level == level
    assert ("ulimit -l unlimited" in finding.advice) == (level != "ok")
