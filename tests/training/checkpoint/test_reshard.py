"""Saved in one layout, continued in another, with the optimizer's state: all 25 ways among five layouts."""

from itertools import product

import pytest
import runs
from runs import Job

from megaenc.training.checkpoint.loader import CheckpointLoader

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {
    "one process": (1, []),
    "TP2, SP": (2, [TP, "2", "--sequence-parallel"]),
    "PP2, interleaved": (2, [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]),
    "DP2, distributed optimizer": (2, ["--use-distributed-optimizer"]),
    "TP2, PP2 unevenly": (4, [TP, "2", PP, "2", "--pipeline-model-parallel-layout", "Ettt|tL"]),
}
WAYS = list(product(LAYOUTS, LAYOUTS))
STOP = 6  # of 12 steps; after it still two of clm, then mlm, and the rate falls
RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--train-iters", "12", "--objective-schedule", "clm:8,mlm:4"]
RUN += ["--no-bf16", "--eval-interval", "0"]


@pytest.fixture(scope="module")
def folders(small_corpus, tmp_path_factory):
    """By how it was saved and how continued; under `None`, the run of one process that was never stopped."""
    root, flags = tmp_path_factory.mktemp("reshard"), [*small_corpus.flags, *RUN]
    names = {layout: f"layout{number}" for number, layout in enumerate(LAYOUTS)}
    saved = {layout: root / name for layout, name in names.items()}
    run_dirs = {way: root / f"{names[way[0]]}_{names[way[1]]}" for way in WAYS} | {None: root / "whole"}
    jobs = [Job(run_dirs[None], flags)]
    for layout, (processes, more) in LAYOUTS.items():
        jobs.append(Job(saved[layout], [*flags, *more, "--exit-interval", str(STOP)], processes))
    for before, after in WAYS:
        processes, more = LAYOUTS[after]
        jobs.append(Job(run_dirs[before, after], [*flags, *more], processes, copy_of=saved[before]))
    output = runs.in_turn(jobs, root).stdout
    assert output.count(f"resuming after step {STOP}") == len(WAYS)
    return run_dirs


def test_all_25_ways_follow_the_run_that_never_stopped(folders):
    """Every step after the stop, its loss and the norm of its gradient."""
    differences = {
        way: [runs.largest_difference(name, folders[way], folders[None], after=STOP) for name in ("loss", "grad_norm")]
        for way in WAYS
    }
    print(f"\n{'saved in':28}{'continued in':28}{'loss':>10}{'grad. norm':>12}")
    for (before, after), (loss, norm) in differences.items():
        print(f"{before:28}{after:28}{loss:10.1e}{norm:12.1e}")
    assert len(differences) == 25
    far = {way: distances for way, distances in differences.items() if max(distances) > 1e-4}
    assert not far


def test_nothing_but_the_layout_differs(folders):
    """Each has made every step once, and has saved the stop and the end."""
    for way in WAYS:
        actual, expected = (
            [(row["step"], row["objective"], row["learning_rate"], row["tokens"], row["predicted_tokens"]) for row in rows]
            for rows in (runs.metrics(folders[way]), runs.metrics(folders[None]))
        )
        assert actual == expected, way
        assert CheckpointLoader(folders[way] / "checkpoints").steps() == [STOP, 12], way
