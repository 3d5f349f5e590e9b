"""The kernels themselves, on the host: by triton's interpreter, which must be chosen before triton is first imported.

So the tests of interpreted/ run in a process of their own, in which that is so.
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
    """Loss and gradients of the whole model are those of torch's own operations."""
    runs.script(
        runs.WORKERS / "fused_over_ranks.py", [], processes=2, fresh=True, environment=INTERPRETER
    )
