"""Detection of ranks that slow down the others, by comparing each rank's own work without waiting times.

A step takes equally long on all ranks, because they wait for each other. The work of a rank is measured by:

- data: wall-clock time of building its micro-batches;
- compute: on a CPU the processor time of its thread in forward, backward and optimizer step; on an accelerator the device time of
  the forward passes of its stage, which only wait for its tensor-parallel group;
- probe: a small matrix product that needs no other rank, which detects a slow device within such a group.
"""

import socket
import time
from collections import Counter
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaenc.backend import Backend
from megaenc.console import print_rank_0
from megaenc.training.engine import Engine
from megaenc.training.timers import DATA, FORWARD_BACKWARD, OPTIMIZER

SLOW_RATIO, CONSECUTIVE_REPORTS, REPORTED_RANKS = 1.2, 3, 4
"""Ratio to the median from which a rank is slow, consecutive reports that make a straggler, and ranks in a report."""

_MEASURES = ("data_seconds", "compute_seconds", "probe_seconds")


class StragglerDetector:
    """Detector of slow ranks: sums each rank's own work times and compares the ranks every `interval` steps.

    All ranks construct and call it together.
    """

    def __init__(self, engine: Engine, backend: Backend, interval: int):
        self._engine, self._backend, self._interval = engine, backend, interval
        self._forward = None if backend.is_cpu else ForwardTimer(engine.chunks)
        rank_info = {
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(),
        }
        self._rank_infos: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(self._rank_infos, rank_info)
        self._sums: Counter[str] = Counter()
        self._steps = -1  # the first step, with its setup, is not measured
        self._slow_reports: Counter[int] = Counter()  # consecutive ones by rank

    def record_step(self, step: int) -> dict[str, Any] | None:
        """Add this rank's times of `step`; every `interval` steps return a report of the 4 slowest ranks, else None.

        It also prints a line for each rank that was slow in CONSECUTIVE_REPORTS reports. The first step is not measured.
        """
        timers = self._engine.step_timers
        thread_seconds = timers.processor[FORWARD_BACKWARD] - timers.processor[DATA] + timers.processor[OPTIMIZER]
        compute = self._forward.pop_seconds() if self._forward else thread_seconds
        self._steps += 1
        if self._steps:
            self._sums.update(data_seconds=timers.wall[DATA], compute_seconds=compute)
        if step % self._interval or not self._steps:
            return None
        means = [self._sums["data_seconds"] / self._steps, self._sums["compute_seconds"] / self._steps]
        local_values = torch.tensor([*means, time_matmul(self._backend.device)], dtype=torch.float64, device=self._backend.device)
        all_values = local_values.new_empty(len(self._rank_infos), len(local_values))
        dist.all_gather_into_tensor(all_values.flatten(), local_values)
        ranks = [
            info | dict(zip(_MEASURES, values, strict=True))
            for info, values in zip(self._rank_infos, all_values.tolist(), strict=True)
        ]
        report = {"step": step, "steps": self._steps, **compare_ranks(ranks)}
        self._steps, self._sums = 0, Counter()
        self._print_stragglers(report["ranks"])
        report["ranks"] = report["ranks"][:REPORTED_RANKS]
        return report

    def _print_stragglers(self, ranks: list[dict[str, Any]]) -> None:
        """Print a line for each rank that has just become a straggler, again only after it has recovered."""
        for each in ranks:
            slow_reports = self._slow_reports[each["rank"]] + 1 if each["ratio"] > SLOW_RATIO else 0
            self._slow_reports[each["rank"]] = slow_reports
            if slow_reports == CONSECUTIVE_REPORTS:
                print_rank_0(
                    f"straggler: rank {each['rank']} on {each['host']} (tensor {each['tensor']}, pipeline {each['pipeline']}, "
                    f"data {each['data']}) took {each['ratio']:.2f} times the median of comparable ranks in "
                    f"{CONSECUTIVE_REPORTS} consecutive reports, mostly in {each['slow_in']}"
                )


def compare_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `slowest_rank`, `slowest_ratio` and `ranks`, slowest first, each with `ratio` to the median and part `slow_in`.

    Data and probe are the same work for all ranks; compute is compared among the ranks of a pipeline stage. The median of two
    is the faster one.
    """
    data, _, probed = (median_low(each[measure] for each in ranks) for measure in _MEASURES)
    compared = []
    for each in ranks:
        stage_compute = median_low(other["compute_seconds"] for other in ranks if other["pipeline"] == each["pipeline"])
        extra = {"data": each["data_seconds"] - data, "compute": each["compute_seconds"] - stage_compute}
        own = (each["data_seconds"] + each["compute_seconds"]) / max(data + stage_compute, 1e-9)
        device = each["probe_seconds"] / max(probed, 1e-9)
        slow_in = "the probe" if device > own else max(extra, key=extra.__getitem__)
        compared.append(each | {"ratio": max(own, device), "slow_in": slow_in})
    compared.sort(key=lambda each: -each["ratio"])
    return {"slowest_rank": compared[0]["rank"], "slowest_ratio": compared[0]["ratio"], "ranks": compared}


class ForwardTimer:
    """Timer of the accelerator's seconds in forward passes during training, by events that hooks on model chunks record."""

    def __init__(self, chunks: list[torch.nn.Module]):
        self._events: list[torch.cuda.Event] = []  # begin, end, begin, end, ...
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._record)
            chunk.register_forward_hook(self._record)

    def _record(self, *_: Any) -> None:
        """Record an event at the begin or end of a forward pass."""
        if torch.is_grad_enabled():  # not in a validation
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def pop_seconds(self) -> float:
        """Return the accelerator's seconds in forward passes since the last call; the device must be synchronized."""
        events, self._events = self._events, []
        return sum(begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2], strict=True)) / 1000


def time_matmul(device: torch.device, repeats: int = 5) -> float:
    """Return the seconds of a fixed number of matrix products on `device`, the minimum of `repeats` measurements."""
    host = device.type == "cpu"
    size, products = (384, 1) if host else (2048, 50)
    matrix = torch.ones(size, size, device=device, dtype=torch.float32 if host else torch.bfloat16)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        if not host:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
