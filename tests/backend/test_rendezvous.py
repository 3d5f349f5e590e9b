"""Processes of one attempt find each other, whatever those of earlier attempts have left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megaenc.backend.initialize import _agree_on_attempt

SOON = timedelta(seconds=20)


def attempt(store, size):
    """The names that the ranks find, the last rank being the first to come."""
    with ThreadPoolExecutor(size) as pool:
        coming = [pool.submit(_agree_on_attempt, store, rank, size, SOON) for rank in reversed(range(size))]
        return {future.result(timeout=30) for future in coming}


def test_each_attempt_has_one_name_that_no_other_had():
    store = dist.HashStore()
    [first], [second], [third] = attempt(store, 3), attempt(store, 3), attempt(store, 2)
    assert len({first, second, third}) == 3


def test_names_that_dead_processes_left_keep_nobody_from_meeting():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="not all of 2 processes joined within 0 s"):
        _agree_on_attempt(store, 0, 2, timedelta(seconds=0.2))
    store.set("megaenc/process 1", "of a process that was killed before it was answered")
    assert len(attempt(store, 2)) == 1


def test_what_is_no_name_in_the_store_keeps_nobody_from_meeting():
    store = dist.HashStore()
    store.set("megaenc/process 1", b"\xff" * 1000)
    assert len(attempt(store, 2)) == 1
