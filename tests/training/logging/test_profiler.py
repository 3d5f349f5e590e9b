"""--profile: a trace of the chosen steps and ranks, and nothing else."""

import gzip
import json
from collections import Counter

import pytest
import runs

from megaenc.training.command import main


@pytest.fixture(scope="module")
def profiled_run(small_corpus, tmp_path_factory):
    """Steps 3 to 6 are chosen. The run ends after step 4, on rank 0, and goes on at TP2, where rank 1 is profiled."""
    folder = tmp_path_factory.mktemp("profiled") / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--eval-interval", "0", "--profile"]
    flags += ["--profile-step-start", "3", "--profile-step-end", "6", "--exit-interval", "4"]
    first = runs.script(runs.PRETRAIN, flags)
    assert first.stderr == "", "the profiler is quiet"
    flags += ["--profile-ranks", "1", "--tensor-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, flags, processes=2)
    third = runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "12"], processes=2)
    return folder, first.stdout, third.stdout


def operations(trace) -> Counter:
    with gzip.open(trace) as stream:
        return Counter(event["name"] for event in json.load(stream)["traceEvents"] if event.get("cat") == "cpu_op")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_traces_hold_the_chosen_steps_of_the_chosen_ranks(profiled_run):
    folder, output, _ = profiled_run
    assert sorted(path.name for path in (folder / "profile").iterdir()) == [
        "rank_0_steps_3-4.json.gz", "rank_0_steps_3-4.txt", "rank_1_steps_5-6.json.gz", "rank_1_steps_5-6.txt",
    ]  # fmt: skip
    assert "rank_0_steps_3-4.json.gz is the trace" in output
    for name in ("rank_0_steps_3-4", "rank_1_steps_5-6"):
        counted = operations(folder / "profile" / f"{name}.json.gz")
        assert counted["aten::_fused_adamw_"] == 2, "two updates"
        table = (folder / "profile" / f"{name}.txt").read_text()
        assert "aten::mm" in table and "Self CPU time total" in table


@pytest.mark.slow
@pytest.mark.multiprocess
def test_behind_the_chosen_steps_it_says_so_and_goes_on(profiled_run):
    folder, _, output = profiled_run
    assert "--profile: steps 3 to 6 are over, nothing is profiled" in output
    assert runs.metrics(folder)[-1]["step"] == 12


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--profile: found no --save"),
        (["--save", "run", "--profile-step-start", "0"], "--profile-step-start 0 --profile-step-end 12: expected first and last"),
        (["--save", "run", "--profile-step-start", "13"], "--profile-step-start 13 --profile-step-end 12"),
        (["--save", "run", "--profile-step-end", "21"], "within the run's 1 to 20"),
        (["--save", "run", "--profile-ranks", "0", "1"], "--profile-ranks 0 1: expected ranks of this run, from 0 to 0"),
    ],
)
def test_ranges_that_cannot_be_are_refused(flags, complaint, small_corpus, refusal):
    assert complaint in refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--profile", *flags])
