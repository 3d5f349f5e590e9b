"""Collectives with wrong results, shared files, and reports to rank 0.

Worlds of two ranks are tested in test_doctor_command.py.
"""

import fcntl
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from findings import by_name

from megaenc.doctor import collectives, cross_rank
from megaenc.doctor.cross_rank import join_group
from megaenc.doctor.result import CheckContext


@pytest.fixture
def single_process():
    join_group.cache_clear()
    yield
    dist.destroy_process_group()
    join_group.cache_clear()


def test_one_process_has_its_collectives_too(single_process):
    findings = by_name(collectives.check_collectives(CheckContext()))
    assert list(findings) == ["all-reduce, gloo", "reduce-scatter, gloo", "all-gather, gloo"]
    assert {each.level for each in findings.values()} == {"ok"}


def test_wrong_numbers_are_counted_and_named(single_process, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[3:5].add_(1))
    findings = by_name(collectives.check_collectives(CheckContext()))
    assert findings["all-gather, gloo"].level == "ok"
    assert findings["all-reduce, gloo"].level == "problem"
    assert findings["all-reduce, gloo"].result.startswith("2 of ")


def test_ranks_and_places_have_numbers_of_their_own():
    """A collective that mixes up ranks or positions would show."""
    result = [collectives.build_rank_tensor(rank, 64, torch.device("cpu")) for rank in range(16)]
    assert len({tuple(each.tolist()) for each in result}) == 16
    assert all(len(set(each.tolist())) == 64 for each in result)


@pytest.mark.parametrize(
    ("observations", "level", "words"),
    [
        (["", "", ""], "ok", "one directory"),
        (["", "missing", "missing", "", "missing"], "problem", "rank 1-2, 4"),
        (["", "", "unlocked"], "note", "rank 2"),
    ],
)
def test_a_directory_that_is_not_shared_is_a_problem_and_locks_that_do_not_reach_a_note(
    observations, level, words
):
    finding = cross_rank.assess_sharing(observations)
    assert finding.level == level
    assert words in finding.result


def test_what_a_rank_sees_of_the_file_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(cross_rank, "_VISIBILITY_SECONDS", 0.1)
    assert cross_rank.observe_lock_file(tmp_path / "file") == "missing"
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert cross_rank.observe_lock_file(tmp_path / "file") == "unlocked"
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert cross_rank.observe_lock_file(tmp_path / "file") == ""
    os.close(descriptor)


def test_what_is_in_the_store_is_handed_on_as_bytes_and_never_unpickled(tmp_path, monkeypatch):
    class Attack:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    store = dist.HashStore()
    attack = pickle.dumps(Attack())
    dist.PrefixStore("megaenc/doctor", store).set("1", attack)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 3)]))
    assert cross_rank.gather_findings("mine", 0.2) == {1: attack}
    assert not (tmp_path / "ran").exists()
