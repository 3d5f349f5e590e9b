"""Processors and memory, and what a container leaves of them."""

from types import SimpleNamespace

import psutil
import pytest

from megaenc.doctor import machine
from megaenc.doctor.result import ProbeContext

GIB = 2**30


@pytest.fixture
def job(tmp_path):
    """A machine on which this process is in a job of two and a half cores' time and 12 GiB, inside one of more."""
    group = tmp_path / "sys/fs/cgroup"
    for folder, cpu, memory in (
        ("", "max 100000", "max"),
        ("slurm", "800000 100000", "max"),
        ("slurm/job", "250000 100000", f"{12 * GIB}"),
    ):
        (group / folder).mkdir(parents=True, exist_ok=True)
        (group / folder / "cpu.max").write_text(cpu)
        (group / folder / "memory.max").write_text(memory)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job\n")
    return tmp_path


def test_the_narrowest_limit_of_the_groups_counts(job):
    assert machine.cpu_quota(job) == 2.5
    assert machine.memory_limit(job) == 12 * GIB


def test_limits_of_the_first_version_of_groups(tmp_path):
    for path, text in (
        ("cpu/cpu.cfs_quota_us", "150000"),
        ("cpu/cpu.cfs_period_us", "100000"),
        ("memory/memory.limit_in_bytes", "4096"),
    ):
        (tmp_path / "sys/fs/cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / path).write_text(text)
    assert machine.cpu_quota(tmp_path) == 1.5
    assert machine.memory_limit(tmp_path) == 4096


def test_no_limit_is_none(tmp_path):
    assert machine.cpu_quota(tmp_path) is None and machine.memory_limit(tmp_path) is None


def test_less_time_than_cores_is_a_note(job, monkeypatch):
    monkeypatch.setattr(machine, "usable_core_count", lambda: 8)
    findings = {each.name: each for each in machine.check_processors(ProbeContext(root=job))}
    assert (findings["CPU quota"].level, findings["CPU quota"].result) == ("note", "limited to the time of 2.5 cores")
    monkeypatch.setattr(machine, "usable_core_count", lambda: 2)
    assert "CPU quota" not in {each.name for each in machine.check_processors(ProbeContext(root=job))}


def test_a_job_s_memory_is_named(job, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=0))
    [finding] = machine.check_memory(ProbeContext(root=job))
    assert (finding.level, finding.result) == ("ok", "64.0 GiB, 60.0 free; this container or job may use 12.0")


def test_swap_and_huge_pages_are_noted_only_where_they_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=GIB))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("HugePages_Total:      10\nHugepagesize:       2048 kB\n")
    assert [each.name for each in machine.check_memory(ProbeContext(root=tmp_path))] == ["memory"]
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=10 * GIB))
    (tmp_path / "proc/meminfo").write_text("HugePages_Total:      10\nHugepagesize:    1048576 kB\n")
    findings = {each.name: each for each in machine.check_memory(ProbeContext(root=tmp_path))}
    assert (findings["swap"].level, findings["swap"].result) == ("note", "10.0 GiB are swapped out")
    assert (findings["huge pages"].level, findings["huge pages"].result) == ("note", "10.0 GiB reserved")


@pytest.mark.parametrize(
    ("threads", "processes", "level"),
    [("", 1, "ok"), ("8", 1, "ok"), ("1", 1, "note"), ("64", 1, "note"), ("1", 4, "ok"), ("1", 9, "note")],
)
def test_threads_against_cores(threads, processes, level, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    environment = ({"OMP_NUM_THREADS": threads} if threads else {}) | ({"RANK": "0"} if processes > 1 else {})
    finding = machine.check_threads(ProbeContext(environment=environment), cores=8)
    assert finding.level == level
