"""The rank that holds the others up is named, in whatever layout they wait for it."""

import json
from statistics import median, median_low, mode

import pytest
import runs
import torch

from megaenc.training.logging.stragglers import ForwardTimer, compare_rank, time_matmul


def reports(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "stragglers.jsonl").read_text().splitlines()]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("slow", "layout", "processes", "place"),
    [
        ("1:data:0.2", ["--pipeline-model-parallel-size", "2"], 2, "(tensor 0, pipeline 1, data 0)"),
        (
            "2:compute:0.08",  # far above what four ranks on two busy cores differ by
            ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
            4,
            "(tensor 0, pipeline 1, data 0)",
        ),
    ],
    ids=["data under pipeline parallelism", "compute under tensor and pipeline parallelism"],
)
@pytest.mark.slow
def test_the_slow_rank_is_named(slow, layout, processes, place, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run"), "--eval-interval", "0"]
    flags += ["--log-straggler", "--straggler-interval", "4", *layout]
    result = runs.script(runs.WORKERS / "slow_rank.py", [slow, *flags], processes=processes)
    rank, where, _ = slow.split(":")
    straggler_reports = reports(tmp_path / "run")
    assert [(report["step"], report["steps"]) for report in straggler_reports] == [(4, 3), (8, 4), (12, 4), (16, 4), (20, 4)]
    # A busy machine may slow another rank, or this one's probe, for an interval or two; not for most of them.
    assert mode(report["slowest_rank"] for report in straggler_reports) == int(rank)
    assert mode(report["ranks"][0]["slow_in"] for report in straggler_reports) == where
    assert median(report["slowest_ratio"] for report in straggler_reports) > 1.5
    lines = [line for line in result.stdout.splitlines() if line.startswith(f"straggler: rank {rank} on ")]
    assert len(lines) == 1 and place in lines[0] and ", mostly in " in lines[0], result.stdout


def test_reports_beyond_the_checkpoint_are_cut(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run")]
    flags += ["--log-straggler", "--straggler-interval", "2"]
    runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "8"])
    with open(tmp_path / "run" / "stragglers.jsonl", "a") as file:
        file.write('{"step": 10, "ranks": []}\n')
    result = runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "12"])
    assert [report["step"] for report in reports(tmp_path / "run")] == [2, 4, 6, 8, 10, 12]
    assert "straggler:" not in result.stdout, "one rank has nobody to be slower than"


MEASURES = ("data_seconds", "compute_seconds", "probe_seconds")


def compare(*ranks):
    """Ratio and slowest part of each of `ranks`, numbers of a stage's ranks: data, compute, probe."""
    medians = dict(zip(MEASURES, map(median_low, zip(*ranks, strict=True)), strict=True))
    return [tuple(compare_rank(dict(zip(MEASURES, each, strict=True)), medians).values()) for each in ranks]


def test_work_is_compared_with_the_median():
    assert [ratio for ratio, _ in compare((1, 4, 0.1), (1, 4, 0.1))] == [1.0, 1.0]
    assert compare((1, 8, 0.1), (1, 13.5, 0.1))[1] == (14.5 / 9, "compute")


def test_a_slow_device_is_found_by_the_probe_where_all_of_its_group_are_slow():
    comparison = compare((1, 6, 0.1), (1, 6, 0.2), (1, 4, 0.1), (1, 4, 0.1))
    assert comparison[1] == (2.0, "the probe")
    assert [ratio for ratio, _ in comparison] == [1.4, 2.0, 1.0, 1.0]


def test_twice_as_slow_in_a_small_part_is_not_slow():
    assert max(ratio for ratio, _ in compare((0.02, 4, 0.1), (0.01, 4, 0.1), (0.01, 4, 0.1))) < 1.01


def test_forward_passes_of_training_alone_are_timed(monkeypatch):
    """On an accelerator, by events; here they stand at 0, 1, 2, ... milliseconds."""
    clock = iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    chunk = torch.nn.Linear(2, 2)
    timed = ForwardTimer([chunk])
    for _ in range(3):
        chunk(torch.ones(1, 2))
    with torch.no_grad():
        chunk(torch.ones(1, 2))
    assert timed.pop_seconds() == pytest.approx(0.003)
    assert timed.pop_seconds() == 0


def test_the_probe_needs_nobody():
    assert 0 < time_matmul(torch.device("cpu")) < 60
