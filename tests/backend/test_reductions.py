"""Reductions over all ranks: the same answer on each."""

import pytest
import runs


@pytest.mark.multiprocess
def test_all_ranks_find_the_same():
    runs.script(runs.WORKERS / "reductions.py", [], processes=4)
