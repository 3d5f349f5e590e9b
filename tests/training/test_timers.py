"""Where the time goes and how much memory there is: the highest of all ranks, on each row."""

import re
import time
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest
import runs
import torch

from megaenc.backend import Backend
from megaenc.training.logging import metrics_logger
from megaenc.training.timers import StepTimers, memory_usage

PARTS = ["data_seconds", "forward_backward_seconds", "optimizer_seconds"]


@pytest.fixture(scope="module")
def timed_run(small_corpus, tmp_path_factory):
    """Two stages, the second of which makes its data slowly; megatron-core's timers are on up to step 12 and off after it."""
    folder = tmp_path_factory.mktemp("timed") / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--save-interval", "6"]
    flags += ["--pipeline-model-parallel-size", "2"]
    for more in (["--timing-log-level", "2", "--exit-interval", "12"], []):
        runs.script(runs.WORKERS / "slow_rank.py", ["1:data:0.02", *flags, *more], processes=2)
    return runs.metrics(folder)


@pytest.mark.multiprocess
def test_data_seconds_are_those_of_the_slowest_rank(timed_run):
    assert all(row["data_seconds"] >= 4 * 0.02 for row in timed_run), "four micro-batches a step"


@pytest.mark.multiprocess
def test_every_row_says_where_the_time_went(timed_run):
    assert [row["step"] for row in timed_run] == list(range(1, 21))
    assert all(row[part] > 0 for row in timed_run for part in PARTS)
    assert [row["step"] for row in timed_run if row["save_seconds"]] == [7, 19], "the first step after a save in the same process"
    assert [row["step"] for row in timed_run if row["evaluation_seconds"]] == [1, 11]
    assert all(0.01 < row["memory_gib"] < 100 for row in timed_run)


@pytest.mark.multiprocess
def test_every_key_is_documented(timed_run):
    documented = set(re.findall(r"`(\w+)`", (runs.ROOT / "docs" / "monitoring.md").read_text()))
    assert {key for row in timed_run for key in row} <= documented


@pytest.mark.multiprocess
def test_timers_of_megatron_core_are_there_where_asked_for(timed_run):
    assert [row["step"] for row in timed_run if "timers" in row] == list(range(1, 13))
    timers = timed_run[11]["timers"]
    assert {"forward-backward", "forward-compute", "backward-compute", "all-grads-sync", "optimizer-inner-step"} <= timers.keys()
    assert {"forward-recv", "forward-send"} <= timers.keys(), "of the second stage and of the first"
    assert 0 < timers["backward-compute"] < timers["forward-backward"]
    assert timers["forward-backward"] < 2 * timed_run[11]["step_seconds"], "of this step alone"


@pytest.mark.multiprocess
def test_rates_are_flops_over_seconds(timed_run):
    """A device's share of what two processes executed; the utilization is that over one and the same peak."""
    for before, row in pairwise(timed_run):
        rate = (row["flops"] - before["flops"]) / row["step_seconds"] / 2 / 1e12
        assert row["tflops_per_second"] == pytest.approx(rate)
    peaks = [row["tflops_per_second"] / row["model_flops_utilization"] for row in timed_run[:12]]
    assert peaks == pytest.approx([peaks[0]] * 12)


@pytest.mark.parametrize(("is_cpu", "shown"), [(True, {}), (False, {"MFU": "51.2 %"})])
def test_the_progress_line_shows_the_share_of_a_peak_from_a_data_sheet(is_cpu, shown):
    row = {"loss": 2.5, "tokens_per_second": 1200.4, "model_flops_utilization": 0.512}
    fields = metrics_logger._progress_fields(row, SimpleNamespace(is_cpu=is_cpu))
    assert fields == {"loss": "2.500", "tokens/s": "1,200"} | shown


def test_the_parts_of_one_process_are_its_step(small_corpus, tmp_path):
    """Level 1: what belongs to single micro-batches is not timed."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--timing-log-level", "1", "--save", str(tmp_path / "run")]
    runs.script(runs.PRETRAIN, flags)
    for row in runs.metrics(tmp_path / "run"):
        assert sum(row[part] for part in PARTS) <= row["step_seconds"]
        assert "forward-backward" in row["timers"] and "forward-compute" not in row["timers"]
        assert row["tflops_per_second"] > 0


def sleepy():
    for number in range(3):
        time.sleep(0.05)
        yield number


def test_the_stopwatch_knows_sleeping_from_computing():
    watch = StepTimers()
    with watch.measure("forward_backward"):
        for _ in watch.measure_items("data", sleepy()):
            sum(range(10_000))
    assert watch.wall["data"] >= 0.15 > 0.1 > watch.processor["data"]
    assert watch.seconds()["forward_backward"] == watch.wall["forward_backward"] - watch.wall["data"]
    assert set(StepTimers().seconds().values()) == {0}


def test_memory_of_a_host_and_of_an_accelerator(monkeypatch):
    resident = psutil.Process().memory_info().rss / 2**30
    host = Backend("cpu", torch.device("cpu"), "gloo", False)
    assert memory_usage(host)["memory_gib"] == pytest.approx(resident, rel=0.2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    usage = memory_usage(Backend("rocm", torch.device("cuda", 0), "nccl", True))
    assert (usage["memory_gib"], usage["memory_reserved_gib"]) == (3, 4)
    assert usage["host_memory_gib"] == pytest.approx(resident, rel=0.2)
