"""In bfloat16 a layout differs from one process no more than rounding alone makes runs of one process differ.

What rounding alone does is measured: runs of one process on the same batches, read in micro-batches of 1, 2, 4 and 8 packs, which
add the same gradients up in another order, and runs whose gradients are clipped to a length that is another by the last bit of a
float32, as the length itself is when each rank adds up its share of it. The differences grow from update to update. A layout must
lie within twice the largest difference between two of them.

Curves of the loss are compared as wholes: by the largest relative difference of all steps, and by the root of the mean of its
square. Not step by step: in the first step all have the same weights, so that micro-batches differ in the order of one sum, while
tensor parallelism rounds each half of every row's sums to bfloat16 before they are added; and later any two curves cross.
"""

from itertools import combinations

import numpy as np
import pytest
import runs
from runs import Job

pytestmark = pytest.mark.multiprocess

REFERENCE = "2 packs"  # as the layouts
ALONE = {f"{packs} packs": ["--micro-batch-size", str(packs)] for packs in (1, 2, 4, 8)} | {
    f"clipped at {length}": ["--micro-batch-size", "2", "--clip-grad", length] for length in ("0.49999997", "0.50000006")
}
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {
    "TP2, PP2": (4, [TP, "2", PP, "2"]),
    "TP2, SP": (2, [TP, "2", "--sequence-parallel"]),
    "DP2, distributed optimizer": (2, ["--use-distributed-optimizer"]),
}
NORMS = {
    "largest of all steps": lambda differences: np.abs(differences).max(),
    "root mean square": lambda differences: np.sqrt(np.square(differences).mean()),
}


@pytest.fixture(scope="module")
def losses(small_corpus, tmp_path_factory):
    """Of each of the 20 steps, by what a process alone was told, and by layout."""
    root, flags = tmp_path_factory.mktemp("bf16"), [*small_corpus.flags, *runs.SHORT_RUN, "--bf16", "--eval-interval", "0"]
    ways = {name: (1, more) for name, more in ALONE.items()}
    ways |= {layout: (processes, [*ALONE[REFERENCE], *more]) for layout, (processes, more) in LAYOUTS.items()}
    jobs = {
        name: Job(root / str(number), [*flags, *more], processes) for number, (name, (processes, more)) in enumerate(ways.items())
    }
    runs.in_turn(list(jobs.values()), root)
    return {name: np.array([row["loss"] for row in runs.metrics(job.save)]) for name, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_layouts_lie_within_twice_the_spread_of_one_process(norm, losses):
    size = NORMS[norm]
    spread = max(size(losses[one] / losses[other] - 1) for one, other in combinations(ALONE, 2))
    assert 0 < spread < 1e-3, "the bound would say nothing"
    distances = {layout: size(losses[layout] / losses[REFERENCE] - 1) for layout in LAYOUTS}
    print(f"\n{norm}: spread of one process {spread:.1e}; " + "; ".join(f"{name} {far:.1e}" for name, far in distances.items()))
    assert all(far <= 2 * spread for far in distances.values()), distances
