"""Collectives that give wrong numbers, in a world of one; worlds of two are in test_doctor_command.py."""

import pytest
import torch
import torch.distributed as dist

from megaenc.doctor import collectives
from megaenc.doctor.cross_rank import join_group
from megaenc.doctor.result import ProbeContext


@pytest.fixture
def single_process():
    join_group.cache_clear()
    yield
    dist.destroy_process_group()
    join_group.cache_clear()


def test_one_process_has_its_collectives_too(single_process):
    findings = {each.name: each for each in collectives.check_collectives(ProbeContext())}
    assert list(findings) == ["all-reduce, gloo", "reduce-scatter, gloo", "all-gather, gloo"]
    assert {each.level for each in findings.values()} == {"ok"}


def test_wrong_numbers_are_counted_and_named(single_process, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[3:5].add_(1))
    findings = {each.name: each for each in collectives.check_collectives(ProbeContext())}
    assert findings["all-gather, gloo"].level == "ok"
    assert findings["all-reduce, gloo"].level == "problem"
    assert findings["all-reduce, gloo"].result.startswith("2 of ")


def test_ranks_and_places_have_numbers_of_their_own():
    """A collective that mixed up ranks or places would show."""
    result = [collectives.build_rank_tensor(rank, 64, torch.device("cpu")) for rank in range(16)]
    assert len({tuple(each.tolist()) for each in result}) == 16
    assert all(len(set(each.tolist())) == 64 for each in result)
