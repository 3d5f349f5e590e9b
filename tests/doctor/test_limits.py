"""Shared memory, open files, locked memory."""

import resource

from megaenc.doctor.findings import Asked, accelerated
from megaenc.doctor.machine import limits, locked_memory, open_files, shared_memory, shared_memory_of

GIB, MIB = 2**30, 2**20


def test_docker_s_64_megabytes_are_a_problem_where_accelerators_speak_through_them():
    found = shared_memory_of(64 * MIB, 64 * MIB, writable=True, needed=True)
    assert (found.level, found.found) == ("problem", "64 MiB, 64 MiB free")
    assert "--ipc host" in found.advice and "--shm-size 1g" in found.advice
    found = shared_memory_of(64 * MIB, 64 * MIB, writable=True, needed=False)
    assert found.level == "note"


def test_a_large_one_that_is_full_is_named_as_full():
    found = shared_memory_of(64 * GIB, 10 * MIB, writable=True, needed=True)
    assert found.level == "problem" and "nearly full" in found.advice
    found = shared_memory_of(64 * GIB, 60 * GIB, writable=True, needed=True)
    assert found.level == "ok"


def test_one_that_cannot_be_written_to_or_is_not_there_is_a_problem(tmp_path):
    found = shared_memory_of(64 * GIB, 64 * GIB, writable=False, needed=False)
    assert found.level == "problem" and "chmod" in found.advice
    [found] = shared_memory(Asked(root=tmp_path))
    assert found.level == "problem" and "mount a tmpfs" in found.advice


def test_the_size_is_that_of_the_file_system(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)

    class Small:
        f_frsize, f_blocks, f_bavail = 4096, 16384, 16384

    monkeypatch.setattr("os.statvfs", lambda path: Small)
    [found] = shared_memory(Asked(root=tmp_path))
    assert (found.level, found.found) == ("note", "64 MiB, 64 MiB free")
    (tmp_path / "dev/nvidia0").touch()
    assert accelerated(Asked(root=tmp_path))
    assert shared_memory(Asked(root=tmp_path))[0].level == "problem"


def test_open_files_go_by_the_ranks():
    assert open_files(1024, 4096, ranks=8).level == "ok"
    found = open_files(1024, 4096, ranks=192)
    assert found.level == "problem" and found.advice.startswith("ulimit -n 4096")
    assert open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, ranks=4096).level == "ok"
    assert "ulimit -n 33280" in open_files(1024, resource.RLIM_INFINITY, ranks=4096).advice


def test_locked_memory_matters_to_infiniband_alone_and_between_nodes_alone(tmp_path, monkeypatch):
    assert locked_memory(8 * MIB, cards=False).level == "ok"
    found = locked_memory(8 * MIB, cards=True)
    assert (found.level, found.found) == ("note", "8 MiB") and "ulimit -l unlimited" in found.advice
    assert locked_memory(resource.RLIM_INFINITY, cards=True).level == "ok"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 * MIB, 8 * MIB))
    assert limits(Asked(root=tmp_path))[1].level == "ok"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert limits(Asked(root=tmp_path))[1].level == "problem"
