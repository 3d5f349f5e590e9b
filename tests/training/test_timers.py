"""Time and memory on each row: the highest of all ranks."""

import re
import time
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest
import runs
import torch

from megaenc.backend import Backend
from megaenc.training.callbacks.metrics_logger import progress_fields
from megaenc.training.timers import StepTimers, memory_usage


@pytest.fixture(scope="module")
def timed_run(short_run, tmp_path_factory):
    """Two stages, the second of which makes its data slowly; resumed after step 4."""
    directory = tmp_path_factory.mktemp("timed") / "run"
    flags = [*short_run, "--save", str(directory), "--save-interval", "3"]
    flags += ["--pipeline-model-parallel-size", "2", "--eval-interval", "3", "--exit-interval", "4"]
    for _ in range(2):
        runs.script(runs.WORKERS / "slow_rank.py", ["1:0.02", *flags], processes=2)
    return runs.metrics(directory)


@pytest.mark.multiprocess
def test_every_row_says_where_the_time_went(timed_run):
    """Data seconds are those of the slowest rank, for four micro-batches a step."""
    assert [row["step"] for row in timed_run] == list(range(1, 9))
    for row in timed_run:
        assert row["data_seconds"] >= 4 * 0.02
        assert row["forward_backward_seconds"] > 0 and row["optimizer_seconds"] > 0
        assert 0.01 < row["memory_gib"] < 100
    assert [row["step"] for row in timed_run if row["save_seconds"]] == [4, 7], (
        "the first step after a save in the same process"
    )
    assert [row["step"] for row in timed_run if row["evaluation_seconds"]] == [1, 4, 7]


@pytest.mark.multiprocess
def test_every_key_is_documented(timed_run):
    documented = set(re.findall(r"`(\w+)`", (runs.ROOT / "docs" / "monitoring.md").read_text()))
    assert {key for row in timed_run for key in row} <= documented


@pytest.mark.multiprocess
def test_rates_are_flops_over_seconds(timed_run):
    """The rate is that of one device of two; the utilization divides it by the peak."""
    for before, row in pairwise(timed_run):
        rate = (row["flops"] - before["flops"]) / row["step_seconds"] / 2 / 1e12
        assert row["tflops_per_second"] == pytest.approx(rate)
    peaks = [row["tflops_per_second"] / row["model_flops_utilization"] for row in timed_run[:4]]
    assert peaks == pytest.approx([peaks[0]] * 4)


@pytest.mark.parametrize(("is_cpu", "shown"), [(True, {}), (False, {"MFU": "51.2 %"})])
def test_the_progress_line_shows_the_share_of_a_peak_from_a_data_sheet(is_cpu, shown):
    row = {"loss": 2.5, "tokens_per_second": 1200.4, "model_flops_utilization": 0.512}
    fields = progress_fields(row, SimpleNamespace(is_cpu=is_cpu))
    assert fields == {"loss": "2.500", "tokens/s": "1,200"} | shown


def sleepy():
    for index in range(3):
        time.sleep(0.05)
        yield index


def test_the_stopwatch_knows_sleeping_from_computing():
    watch = StepTimers()
    with watch.measure("forward_backward"):
        for _ in watch.measure_items("data", sleepy()):
            sum(range(10_000))
    assert watch.wall["data"] >= 0.15 > 0.1 > watch.processor["data"]
    assert (
        watch.seconds()["forward_backward"] == watch.wall["forward_backward"] - watch.wall["data"]
    )
    assert set(StepTimers().seconds().values()) == {0}


def test_memory_of_a_host_and_of_an_accelerator(monkeypatch):
    resident = psutil.Process().memory_info().rss / 2**30
    host = Backend("cpu", torch.device("cpu"), "gloo", False)
    assert memory_usage(host)["memory_gib"] == pytest.approx(resident, rel=0.2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    usage = memory_usage(Backend("rocm", torch.device("cuda", 0), "nccl", True))
    assert usage == {
        "memory_gib": 3,
        "memory_reserved_gib": 4,
        "host_memory_gib": pytest.approx(resident, rel=0.2),
    }
