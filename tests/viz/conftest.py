"""A made-up run for pictures and summaries."""

import pytest
from run_directories import write_run


@pytest.fixture
def run(tmp_path):
    """Return a run of 40 steps."""
    return write_run(tmp_path / "run")
