"""The kernels themselves, on the host: by triton's interpreter, which must be chosen before triton is first imported.

So the tests of interpreted/ run in processes of their own, in which that is so.
"""

import sys
from pathlib import Path

import pytest
import runs

pytest.importorskip("triton", reason="no triton here: kernels cannot be interpreted")

FOLDER = Path(__file__).parent / "interpreted"
INTERPRETER = {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_by_the_interpreter(file):
    runs.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], environment=INTERPRETER)


def test_two_ranks_that_share_layers_sequence_and_vocabulary():
    """Loss and gradients of the whole model, in bfloat16's place float32, are those of torch's own operations."""
    runs.script(runs.WORKERS / "fused_over_ranks.py", [], processes=2, fresh=True, environment=INTERPRETER)
