"""Reports of the rank that holds up the others, in every layout."""

import json
from statistics import median, mode

import numpy as np
import pytest
import runs
import torch

from megaenc.training.callbacks.stragglers import RANK_FIELDS, ForwardTimer, compare_ranks


def reports(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "stragglers.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_slow_rank_is_named_in_its_place(short_run, tmp_path):
    directory = tmp_path / "run"
    flags = [*short_run, "--save", str(directory), "--eval-interval", "0"]
    flags += ["--log-straggler", "--straggler-interval", "4", "--pipeline-model-parallel-size", "2"]
    result = runs.script(runs.WORKERS / "slow_rank.py", ["1:0.1", *flags], processes=2)
    found = reports(directory)
    assert [(report["step"], report["steps"]) for report in found] == [
        (4, 3),
        (8, 4),
        (12, 4),
        (16, 4),
        (20, 4),
    ]
    # A busy machine may slow another rank, or this one's probe, for an interval or two; not for
    # most of them.
    assert mode(report["slowest_rank"] for report in found) == 1
    assert mode(report["ranks"][0]["slow_in"] for report in found) == "data"
    assert median(report["slowest_ratio"] for report in found) > 1.5
    [line] = [
        line for line in result.stdout.splitlines() if line.startswith("straggler: rank 1 on ")
    ]
    assert "(tensor 0, pipeline 1, data 0)" in line
    assert ", mostly in " in line


@pytest.mark.parametrize(
    ("ranks", "ratios", "slow_in"),
    [
        ([(1, 4, 0.1), (1, 4, 0.1)], [1, 1], None),
        ([(1, 8, 0.1), (1, 13.5, 0.1)], [1, 14.5 / 9], "compute"),
        # All of its group wait for the second, which only its probe shows.
        ([(1, 6, 0.1), (1, 6, 0.2), (1, 4, 0.1), (1, 4, 0.1)], [1.4, 2, 1, 1], "the probe"),
        # Twice as slow in a small part is not slow.
        ([(0.01, 4, 0.1), (0.02, 4, 0.1), (0.01, 4, 0.1)], [1, 4.02 / 4.01, 1], None),
        # A stage of two layers beside one of four; both wait for the data of one rank.
        (
            [(1, 4, 0.1, 0), (3, 4, 0.1, 0), (1, 8, 0.1, 1), (1, 8, 0.1, 1)],
            [1, 7 / 5, 1, 1],
            "data",
        ),
    ],
)
def test_a_rank_is_compared_with_the_median_of_its_stage(ranks, ratios, slow_in):
    rows = np.zeros(len(ranks), dtype=RANK_FIELDS)
    for row, (data, compute, probe, *stage) in zip(rows, ranks, strict=True):
        row["data_seconds"] = data
        row["compute_seconds"] = compute
        row["probe_seconds"] = probe
        row["pipeline"] = sum(stage)
    found_ratios, found_parts = compare_ranks(rows)
    assert found_ratios.tolist() == pytest.approx(ratios)
    assert slow_in in (None, found_parts[1])


def test_forward_passes_of_training_alone_are_timed(monkeypatch):
    """An accelerator times by events; here they stand at 0, 1, 2, ... milliseconds."""
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
