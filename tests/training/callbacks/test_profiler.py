"""--profile: a trace of the chosen steps and ranks, and nothing else."""

import gzip
import json

import pytest
import runs

from megaenc.training.command import main


@pytest.mark.slow
@pytest.mark.multiprocess
def test_traces_hold_the_chosen_steps_of_the_chosen_ranks(short_run, tmp_path):
    """Steps 3 to 6 span a resume, after which the second of two ranks is profiled."""
    directory = tmp_path / "run"
    flags = [*short_run, "--save", str(directory), "--eval-interval", "0", "--profile"]
    flags += ["--profile-step-start", "3", "--profile-step-end", "6", "--exit-interval", "4"]
    first = runs.script(runs.PRETRAIN, flags)
    assert first.stderr == "", "the profiler is quiet"
    assert "rank_0_steps_3-4.json.gz is the trace" in first.stdout
    flags += ["--profile-ranks", "1", "--tensor-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, flags, processes=2)
    for name in ("rank_0_steps_3-4", "rank_1_steps_5-6"):
        with gzip.open(directory / "profile" / f"{name}.json.gz") as stream:
            events = json.load(stream)["traceEvents"]
        updates = [
            event
            for event in events
            if event.get("cat") == "cpu_op" and event["name"] == "aten::_fused_adamw_"
        ]
        assert len(updates) == 2
        table = (directory / "profile" / f"{name}.txt").read_text()
        assert "aten::mm" in table
        assert "Self CPU time total" in table
    assert len(list((directory / "profile").iterdir())) == 4
    third = runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "9"], processes=2)
    assert "--profile: steps 3 to 6 are over, nothing is profiled" in third.stdout
    assert runs.metrics(directory)[-1]["step"] == 9


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--profile-step-start", "0"],
            "--profile-step-start: found 0, expected 1 or more",
        ),
        (["--profile-step-end", "21"], "within the run's 1 to 20"),
        (
            ["--profile-ranks", "0", "1"],
            "--profile-ranks 0 1: expected ranks of this run, from 0 to 0",
        ),
    ],
)
def test_ranges_that_cannot_be_are_refused(flags, complaint, small_corpus, refusal):
    assert complaint in refusal(
        main, [*small_corpus.flags, *runs.SHORT_RUN, "--save", "run", "--profile", *flags]
    )
