"""Runs with float8 products: near float32, the same in every layout, or refused."""

import pytest
import runs
from runs import Job

from megaenc.training.command import main

RUN = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--eval-interval",
    "0",
    "--objective-schedule",
    "clm",
    "--train-iters",
    "10",
]
RUN += ["--global-batch-size", "4"]
BEGINNING = ["--exit-interval", "3"]  # processors without 8-bit products take seconds for a step
HYBRID = ["--fp8-format", "hybrid"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
RUNS = {
    "float32": (1, []),
    "hybrid": (1, HYBRID),
    "e4m3": (1, ["--fp8-format", "e4m3"]),
    "recomputed": (1, [*HYBRID, *BEGINNING, "--recompute-granularity", "full"]),
    "micro-batches of 1": (1, [*HYBRID, *BEGINNING, "--micro-batch-size", "1"]),
    "TP2": (2, [*HYBRID, *BEGINNING, *TP2]),
    "TP2, SP": (2, [*HYBRID, *BEGINNING, *TP2, "--sequence-parallel"]),
    "PP2, distributed optimizer": (2, [*HYBRID, *BEGINNING, *PP2, "--use-distributed-optimizer"]),
}


@pytest.fixture
def directories(small_corpus, tmp_path):
    """Run directories by name."""
    jobs = []
    for name, (processes, flags) in RUNS.items():
        jobs.append(Job(tmp_path / name, [*small_corpus.flags, *RUN, *flags], processes))
    runs.in_turn(jobs, tmp_path, timeout=1200)
    return {name: tmp_path / name for name in RUNS}


def losses(directory):
    return [row["loss"] for row in runs.metrics(directory)]


def largest(directories, name, reference):
    """Return the largest relative difference of losses over steps that both runs made."""
    pairs = zip(losses(directories[name]), losses(directories[reference]), strict=False)
    return max(abs(a / b - 1) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_float8_is_near_float32_and_the_same_in_every_layout(directories):
    """In step 1, float8 makes a hundred times the difference that a layout makes.

    Later, numbers between two float8 values are rounded up in one run and down in the other, and
    the difference grows.
    """
    for name in ("hybrid", "e4m3"):
        actual = losses(directories[name])
        assert actual[9] < 0.9 * actual[0]
        assert 0 < largest(directories, name, "float32") < 0.005
        assert actual[9] == pytest.approx(losses(directories["float32"])[9], rel=0.002)
    assert losses(directories["recomputed"]) == losses(directories["hybrid"])[:3]
    first = {name: runs.metrics(directory)[0] for name, directory in directories.items()}
    for layout in ("TP2", "PP2, distributed optimizer", "micro-batches of 1"):
        for quantity, share in (("loss", 0.05), ("grad_norm", 0.01)):
            reference = first["hybrid"][quantity]
            error = abs(first["float32"][quantity] / reference - 1)
            assert abs(first[layout][quantity] / reference - 1) < share * error, (layout, quantity)
        assert largest(directories, layout, "hybrid") <= 2 * largest(
            directories, "float32", "hybrid"
        )
    # A shared sequence goes to the ranks in float8 under one scale: the products are those of ranks
    # that all have it, and only the order in which the gradients of norms are added up differs.
    for quantity in ("loss", "grad_norm"):
        assert first["TP2, SP"][quantity] == pytest.approx(first["TP2"][quantity], rel=1e-6)
    assert largest(directories, "TP2, SP", "TP2") < 1e-4


def test_a_matrix_that_does_not_fit_is_refused_by_name(small_corpus, refusal):
    line = refusal(main, [*small_corpus.flags, *RUN, *HYBRID, "--ffn-hidden-size", "168"])
    assert "--fp8-format hybrid: linear_fc2 is 64 x 168, expected multiples of 16" in line
