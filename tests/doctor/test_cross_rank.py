"""What ranks see of each other's files, and what they hand to rank 0."""

import fcntl
import os
import pickle

import pytest

from megaenc.doctor import cross_rank
from megaenc.doctor.result import ProbeContext


@pytest.mark.parametrize(
    ("observations", "level", "words"),
    [
        (["", "", ""], "ok", "one folder"),
        (["", "missing", "missing", "", "missing"], "problem", "rank 1-2, 4"),
        (["", "", "unlocked"], "note", "rank 2"),
    ],
)
def test_a_folder_that_is_not_shared_is_a_problem_and_locks_that_do_not_reach_a_note(observations, level, words):
    finding = cross_rank.assess_sharing(observations)
    assert finding.level == level
    assert words in finding.result


def test_what_a_rank_sees_of_the_file_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(cross_rank, "_VISIBILITY_SECONDS", 0.1)
    assert cross_rank._observe_lock_file(tmp_path / "file") == "missing"
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert cross_rank._observe_lock_file(tmp_path / "file") == "unlocked"
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert cross_rank._observe_lock_file(tmp_path / "file") == ""
    os.close(descriptor)


def test_what_is_in_the_store_is_handed_on_as_bytes_and_never_unpickled(tmp_path, monkeypatch):
    import torch.distributed as dist

    class Attack:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    store = dist.HashStore()
    attack = pickle.dumps(Attack())
    dist.PrefixStore("megaenc/doctor", store).set("1", attack)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 3)]))
    assert cross_rank.gather_findings(ProbeContext(), "mine", 0.2) == {0: b"mine", 1: attack}
    assert not (tmp_path / "ran").exists()
