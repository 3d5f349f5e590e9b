"""Layouts in bfloat16 differ from one process by no more than rounding.

The effect of rounding is measured: runs of one process on the same batches read micro-batches of 1,
2, 4 and 8 packs, which add the same gradients in another order, and runs clip their gradients to a
norm that differs by the last bit of a float32, as the norm itself does if each rank sums a part of
it. The differences grow from step to step. A layout must lie within twice the largest difference
between two of these runs.

Whole loss curves are compared: by the largest relative difference of all steps, and by the root of
its mean square. They are not compared step by step: in the first step all runs have the same
weights, so that micro-batches differ in the order of one sum, while tensor parallelism rounds both
halves of every row's sums to bfloat16 before it adds them; and later any two curves cross.
"""

from itertools import combinations

import numpy as np
import pytest
import runs
from runs import Job

REFERENCE = "2 packs"  # as the layouts
TP2 = ["--tensor-model-parallel-size", "2"]
ALONE = {
    "1 packs": ["--micro-batch-size", "1"],
    REFERENCE: [],
    "4 packs": ["--micro-batch-size", "4"],
    "8 packs": ["--micro-batch-size", "8"],
    "clipped shorter": ["--clip-grad", "0.49999997"],
    "clipped longer": ["--clip-grad", "0.50000006"],
}
LAYOUTS = {
    "TP2, PP2": (4, [*TP2, "--pipeline-model-parallel-size", "2"]),
    "TP2, SP": (2, [*TP2, "--sequence-parallel"]),
    "DP2, distributed optimizer": (2, ["--use-distributed-optimizer"]),
}


def largest(differences):
    return np.abs(differences).max()


def root_mean_square(differences):
    return np.sqrt(np.square(differences).mean())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_layouts_lie_within_twice_the_spread_of_one_process(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16", "--eval-interval", "0"]
    jobs = [Job(tmp_path / "float32", [*flags, "--no-bf16"])]
    for name, more in ALONE.items():
        jobs.append(Job(tmp_path / name, [*flags, *more]))
    for name, (processes, more) in LAYOUTS.items():
        jobs.append(Job(tmp_path / name, [*flags, *more], processes))
    runs.in_turn(jobs, tmp_path)
    losses = {
        job.save.name: np.array([row["loss"] for row in runs.metrics(job.save)]) for job in jobs
    }
    for size in (largest, root_mean_square):
        spread = max(
            size(losses[layout] / losses[reference] - 1)
            for layout, reference in combinations(ALONE, 2)
        )
        assert 0 < spread < 1e-3, "the bound would say nothing"
        distances = {layout: size(losses[layout] / losses[REFERENCE] - 1) for layout in LAYOUTS}
        assert max(distances.values()) <= 2 * spread, (size.__name__, distances)
    assert 1e-5 < largest(losses[REFERENCE] / losses["float32"] - 1) < 2e-2
