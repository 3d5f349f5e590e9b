"""Whole runs with float8 products: near those without, the same in every layout, and refused where they cannot be."""

import numpy as np
import pytest
import runs
from runs import Job

from megaenc.training.command import main

RUN = [*runs.SHORT_RUN, "--no-bf16", "--eval-interval", "0", "--objective-schedule", "clm", "--train-iters", "10"]
RUN += ["--global-batch-size", "4"]
BEGINNING = ["--exit-interval", "3"]  # processors without 8-bit products take seconds for a step
HYBRID = ["--fp8-format", "hybrid"]
TP = "--tensor-model-parallel-size"
RUNS = {
    "float32": (1, []),
    "hybrid": (1, HYBRID),
    "e4m3": (1, ["--fp8-format", "e4m3"]),
    "recomputed": (1, [*HYBRID, *BEGINNING, "--recompute-granularity", "full"]),
    "micro-batches of 1": (1, [*HYBRID, *BEGINNING, "--micro-batch-size", "1"]),
    "TP2": (2, [*HYBRID, *BEGINNING, TP, "2"]),
    "TP2, SP": (2, [*HYBRID, *BEGINNING, TP, "2", "--sequence-parallel"]),
    "PP2, distributed optimizer": (
        2,
        [*HYBRID, *BEGINNING, "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"],
    ),
}


@pytest.fixture(scope="module")
def folders(small_corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("float8")
    jobs = {
        name: Job(root / str(number), [*small_corpus.flags, *RUN, *flags], processes)
        for number, (name, (processes, flags)) in enumerate(RUNS.items())
    }
    runs.in_turn(list(jobs.values()), root, timeout=1200)
    return {name: job.save for name, job in jobs.items()}


def losses(folder):
    return np.array([row["loss"] for row in runs.metrics(folder)])


def largest(folders, one, other):
    """The largest relative difference of the losses of the steps that both runs made."""
    actual, expected = losses(folders[one]), losses(folders[other])
    steps = min(len(actual), len(expected))
    return float(np.abs(actual[:steps] / expected[:steps] - 1).max())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_the_loss_falls_as_it_does_in_float32(fp8_format, folders):
    actual, reference = losses(folders[fp8_format]), losses(folders["float32"])
    assert actual[9] < 0.9 * actual[0]
    assert 0 < largest(folders, fp8_format, "float32") < 0.005
    assert actual[9] == pytest.approx(reference[9], rel=0.002)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_is_computed_again_is_the_same(folders):
    assert losses(folders["recomputed"]).tolist() == losses(folders["hybrid"])[:3].tolist()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["TP2", "PP2, distributed optimizer", "micro-batches of 1"])
def test_layouts_begin_alike_and_stay_as_near_as_float32_does(layout, folders):
    """The first step has the same weights: there float8 itself makes a hundred times the difference that the layout makes.

    Then numbers that lie between two of float8's go here to one and there to the other, and what follows from it grows.
    """
    actual, hybrid, exact = (runs.metrics(folders[name])[0] for name in (layout, "hybrid", "float32"))
    for name, share in (("loss", 0.05), ("grad_norm", 0.01)):
        assert abs(actual[name] / hybrid[name] - 1) < share * abs(exact[name] / hybrid[name] - 1), name
    assert largest(folders, layout, "hybrid") <= 2 * largest(folders, "float32", "hybrid")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sequence_that_is_shared_is_scaled_as_one(folders):
    """Its parts go to the ranks in float8 under one scale: so the products are those of ranks that all have it.

    What differs is the order in which the gradients of norms are added up.
    """
    (shared, *_), (unshared, *_) = runs.metrics(folders["TP2, SP"]), runs.metrics(folders["TP2"])
    assert (shared["loss"], shared["grad_norm"]) == pytest.approx((unshared["loss"], unshared["grad_norm"]), rel=1e-6)
    assert largest(folders, "TP2, SP", "TP2") < 1e-4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_goes_on_in_its_own_format_alone(folders, small_corpus, refusal):
    line = refusal(main, [*small_corpus.flags, *RUN, "--save", folders["hybrid"]])
    assert "holds a different run: fp8_format is hybrid there, not given here" in line


def test_a_matrix_that_does_not_fit_is_refused_by_name(small_corpus, refusal):
    line = refusal(main, [*small_corpus.flags, *RUN, *HYBRID, "--ffn-hidden-size", "168"])
    assert "--fp8-format hybrid: linear_fc2 is 64 x 168, expected multiples of 16" in line


def test_transformer_engine_that_is_not_there_is_refused(small_corpus, refusal):
    line = refusal(main, [*small_corpus.flags, *RUN, "--transformer-impl", "transformer_engine"])
    assert "--transformer-impl transformer_engine: transformer-engine is not installed; install it" in line
