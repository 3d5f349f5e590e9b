"""Processes of one attempt, which meet whatever earlier ones left in the store."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import get_ident

import pytest
import torch.distributed as dist

from megaenc.backend.initialize import _agree_on_attempt

SOON = timedelta(seconds=20)


def attempt(store, size):
    """Return the names that the ranks find; the last rank comes first."""
    with ThreadPoolExecutor(size) as pool:
        coming = [
            pool.submit(_agree_on_attempt, store, rank, size, SOON)
            for rank in reversed(range(size))
        ]
        return {future.result(timeout=30) for future in coming}


def test_each_attempt_has_one_name_that_no_other_had():
    store = dist.HashStore()
    names = [attempt(store, size) for size in (3, 3, 2)]
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


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


def test_no_process_looks_at_more_than_some_others():
    """Among 300 as among 60 it looks at those below it in the tree."""

    class Store:
        """A store that records which keys each thread has used."""

        def __init__(self):
            self._store = dist.HashStore()
            self.keys = defaultdict(set)

        def __getattr__(self, name):
            def access(key, *values):
                self.keys[get_ident()].update(key if isinstance(key, list) else [key])
                return getattr(self._store, name)(key, *values)

            return access

    largest = {}
    for size in (60, 300):
        store = Store()
        assert len(attempt(store, size)) == 1
        assert len(store.keys) == size
        largest[size] = max(map(len, store.keys.values()))
    assert largest[300] == largest[60] < 40
