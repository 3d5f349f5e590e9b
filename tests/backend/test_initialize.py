"""What a process takes of the machine that it is on."""

import pytest
import torch

from megaenc.backend import initialize


@pytest.mark.parametrize(("on_this_node", "in_all", "threads"), [(1, 1, 8), (4, 4, 2), (1, 2, 8), (4, 8, 2), (3, 3, 2)])
def test_the_cores_of_a_node_are_shared_by_the_processes_on_it(on_this_node, in_all, threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    monkeypatch.setenv("WORLD_SIZE", str(in_all))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(initialize, "usable_core_count", lambda: 8)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    initialize.divide_cores_among_ranks()
    assert taken == [threads]
