"""Stopped runs: equal to whole ones bit by bit, also across layouts."""

import pytest
import runs
from runs import Job

pytestmark = pytest.mark.multiprocess

RUN = [
    *runs.SHORT_RUN,
    "--train-iters",
    "6",
    "--lr-warmup-iters",
    "2",
    "--lr-wsd-decay-iters",
    "2",
    "--eval-interval",
    "2",
]
RUN += ["--no-bf16"]
SPLIT = [*RUN, "--bf16", "--use-distributed-optimizer"]
STABLE = ["--optimizer", "stable_adamw", "--clip-grad", "0", "--adam-beta2", "0.99"]
INTERLEAVED = [
    "--pipeline-model-parallel-size",
    "2",
    "--num-layers-per-virtual-pipeline-stage",
    "1",
    "--num-layers",
    "4",
]
SCHEDULE = "mlm(mask=0.4->0.15):3,mix(clm:0.3,mlm:0.7):3,2x(clm:1,mlm:1)"
# By name: (flags, steps until each stop, times that it is started, processes).
RUNS = {
    "ramp, mixture, alternation": (
        [*RUN, "--train-iters", "10", "--objective-schedule", SCHEDULE],
        2,
        5,
        1,
    ),
    "dropout": ([*RUN, "--attention-output-dropout", "0.1"], 4, 2, 1),
    "growing batches": (
        [*RUN, "--micro-batch-size", "1", "--rampup-batch-size", "2", "2", "12"],
        4,
        2,
        1,
    ),
    "adamw": (SPLIT, 4, 2, 2),
    "stable_adamw": ([*SPLIT, *STABLE], 4, 2, 2),
    "muon": ([*SPLIT, "--optimizer", "muon"], 4, 2, 2),
    "tensor parallelism": ([*RUN, "--bf16", "--tensor-model-parallel-size", "2"], 4, 2, 2),
}


def check(flags, interval, legs, processes, directory) -> None:
    """Start a run `legs` times until it is complete; compare it with an unstopped one."""
    stopping = [*flags, "--exit-interval", str(interval)]
    legs = [Job(directory / "run", stopping, processes)] * legs
    other = [*flags, "--no-use-distributed-optimizer", "--tensor-model-parallel-size", "1"]
    goes_on = Job(directory / "other", other, 3 - processes, copy_of=directory / "run")
    runs.in_turn(
        [Job(directory / "whole", flags, processes), legs[0], goes_on, *legs[1:]], directory
    )
    assert runs.curve(directory / "run") == runs.curve(directory / "whole")
    assert runs.validations(directory / "run") == runs.validations(directory / "whole")
    runs.assert_same_weights(
        directory / "run", directory / "whole", runs.metrics(directory / "whole")[-1]["step"]
    )
    runs.assert_same_curve(
        directory / "other", directory / "whole", 5e-3 if "--bf16" in flags else 1e-5
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, small_corpus, tmp_path):
    flags, interval, legs, processes = RUNS[name]
    check([*small_corpus.flags, *flags], interval, legs, processes, tmp_path)


def test_a_teacher(distilled, tmp_path):
    check(distilled, 3, 2, 1, tmp_path)


@pytest.mark.slow
def test_interleaved_stages_of_torchruns_processes(small_corpus, tmp_path):
    """Each process orders sets in its own way, which forks do not."""
    flags = [*small_corpus.flags, *SPLIT, *INTERLEAVED, "--save"]
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "whole")], processes=2)
    runs.script(
        runs.PRETRAIN,
        [*flags, str(tmp_path / "run"), "--exit-interval", "4"],
        processes=2,
        fresh=True,
    )
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "run")], processes=2)
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
