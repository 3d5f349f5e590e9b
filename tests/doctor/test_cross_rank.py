"""Clocks, shared folders and collectives, of one process and of two."""

import fcntl
import os
import pickle

import pytest

from megaenc.doctor import cross_rank
from megaenc.doctor.result import ProbeContext

HOSTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("offsets", "level", "advice"),
    [
        ([(0, 0), (1e-4, 2e-5), (-2e-3, 3e-4)], "ok", "at most 2.1 ms apart, to 320 µs"),
        ([(0, 0), (5.0, 1e-4), (0.1, 1e-4)], "note", "at most 5 s apart, to 100 µs: rank 1 (b) is ahead"),
        ([(0, 0), (0.1, 1e-4), (-90.0, 1e-4)], "problem", "at most 90.1 s apart, to 200 µs: rank 2 (c) is behind"),
        ([(0, 0), (1.5, 2.0), (0, 0)], "ok", "at most 1.5 s apart, to 2 s"),
    ],
)
def test_clocks_that_are_apart_by_more_than_the_way_there(offsets, level, advice):
    finding = cross_rank.assess_clock_skew(offsets, HOSTS)
    assert (finding.level, finding.result) == (level, advice)


def test_ranks_are_named_in_runs():
    assert cross_rank.format_ranks([7, 0, 1, 2, 3, 9, 10]) == "0-3, 7, 9-10"


def test_a_folder_that_is_not_shared_is_a_problem_and_locks_that_do_not_reach_a_note():
    finding = cross_rank.assess_sharing(["", "missing", "missing", ""])
    assert finding.level == "problem" and "rank 1-2" in finding.result
    finding = cross_rank.assess_sharing(["", "", "unlocked"])
    assert finding.level == "note" and "rank 2" in finding.result
    assert cross_rank.assess_sharing(["", "", ""]).level == "ok"


def test_what_a_rank_sees_of_the_file_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(cross_rank, "_VISIBILITY_SECONDS", 0.1)
    assert cross_rank._observe_lock_file(tmp_path / "file") == "missing"
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert cross_rank._observe_lock_file(tmp_path / "file") == "unlocked"
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert cross_rank._observe_lock_file(tmp_path / "file") == ""
    os.close(descriptor)


def test_arrays_that_processes_of_a_node_do_not_share_are_a_note():
    shared = [("a", True), ("a", False), ("b", True), ("b", False)]
    [finding] = cross_rank.assess_array_copies(shared, [False] * 4)
    assert finding.level == "ok"
    [finding] = cross_rank.assess_array_copies([("a", True), ("a", False), ("b", True), ("b", True)], [False] * 4)
    assert (finding.level, finding.result) == ("note", "a copy each for 2 of 2 processes on b")
    [finding] = cross_rank.assess_array_copies(shared, [False, False, True, False])
    assert finding.level == "problem" and "on rank 2" in finding.result
    assert cross_rank.assess_array_copies([("a", True), ("b", True)], [False] * 2) == [], (
        "with one process on each node there is nobody to share with"
    )


def test_what_is_in_the_store_is_handed_on_as_bytes_and_never_unpickled(tmp_path, monkeypatch):
    import torch.distributed as dist

    class Attack:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    store, attack = dist.HashStore(), pickle.dumps(Attack())
    dist.PrefixStore("megaenc/doctor", store).set("1", attack)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 3)]))
    assert cross_rank.gather_findings(ProbeContext(), "mine", 0.2) == {0: b"mine", 1: attack}
    assert not (tmp_path / "ran").exists()
