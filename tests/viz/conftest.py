"""A run that was never made, for pictures and summaries."""

import pytest
from run_folders import write_run


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps."""
    return write_run(tmp_path / "run")
