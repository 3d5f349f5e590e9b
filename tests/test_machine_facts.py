import os

import pytest

from megaenc.errors import InputError
from megaenc.machine import check_process_count


@pytest.mark.parametrize(("cores", "most"), [(1, 64), (100, 800)])
def test_far_more_processes_than_cores_are_refused(monkeypatch, cores, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    check_process_count("--workers", most)
    with pytest.raises(
        InputError,
        match=f"--workers: found {most + 1}, expected at most {most} with {cores} usable cores",
    ):
        check_process_count("--workers", most + 1)
