"""Kernels on the host, in the interpreter of Triton.

The interpreter must be chosen before the first import of triton, so the tests of interpreted/ run
in another process.
"""

import sys
from pathlib import Path

import pytest
import runs

pytest.importorskip("triton", reason="no triton here: kernels cannot be interpreted")

FILES = sorted(map(str, (Path(__file__).parent / "interpreted").glob("*.py")))
INTERPRETER = {"TRITON_INTERPRET": "1"}


@pytest.mark.slow
def test_by_the_interpreter():
    assert len(FILES) == 4
    runs.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        environment=INTERPRETER,
        timeout=480,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_that_share_layers_sequence_and_vocabulary():
    """Loss and gradients of the whole model are those of torch's operations."""
    runs.script(
        runs.WORKERS / "fused_over_ranks.py", [], processes=2, fresh=True, environment=INTERPRETER
    )
