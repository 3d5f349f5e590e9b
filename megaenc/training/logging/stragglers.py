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
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ReduceOp

from megaenc.backend import Backend
from megaenc.backend.reductions import gather_lowest, median_low, reduce_over_ranks
from megaenc.console import print_rank_0
from megaenc.training.engine import Engine
from megaenc.training.timers import DATA, FORWARD_BACKWARD, OPTIMIZER

SLOW_RATIO, CONSECUTIVE_REPORTS, REPORTED_RANKS = 1.2, 3, 4
"""Ratio to the median from which a rank is slow, consecutive reports that make a straggler, and ranks in a report."""


class StragglerDetector:
    """Detector of slow ranks: sums each rank's own work times and compares the ranks every `interval` steps.

    All ranks construct and call it together.
    """

    def __init__(self, engine: Engine, backend: Backend, interval: int):
        self._engine, self._backend, self._interval = engine, backend, interval
        self._forward = None if backend.is_cpu else ForwardTimer(engine.chunks)
        self._rank_info = {
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(),
        }
        self._sums: Counter[str] = Counter()
        self._steps = -1  # the first step, with its setup, is not measured
        self._slow_reports = 0  # consecutive ones of this rank

    def record_step(self, step: int) -> dict[str, Any] | None:
        """Add this rank's times of `step`; every `interval` steps return a report of the 4 slowest ranks, else None.

        It also prints a line for each rank that was slow in CONSECUTIVE_REPORTS reports. The first step is not measured.
        """
        timers = self._engine.step_timers
        thread_seconds = timers.processor[FORWARD_BACKWARD] - timers.processor[DATA] + timers.processor[OPTIMIZER]
        compute = self._forward.pop_seconds() if self._forward else thread_seconds
        self._steps += 1
        if self._steps:
            share = self._engine.work_share(step)  # ranks may have a pack more than others
            self._sums.update(data_seconds=timers.wall[DATA] / share, compute_seconds=compute / share)
        if step % self._interval or not self._steps:
            return None
        measures = {name: self._sums[name] / self._steps for name in ("data_seconds", "compute_seconds")}
        measures["probe_seconds"] = time_matmul(self._backend.device)
        own = self._rank_info | measures | compare_rank(measures, self._median_measures(measures))
        ranks = _gather_slowest(own)
        report = {"step": step, "steps": self._steps, "slowest_rank": ranks[0]["rank"], "slowest_ratio": ranks[0]["ratio"]}
        self._steps, self._sums = 0, Counter()
        self._print_stragglers(own)
        return report | {"ranks": ranks}

    def _median_measures(self, measures: dict[str, float]) -> dict[str, float]:
        """Return the lower median of each of `measures` over all ranks, of the seconds of computing over those of this stage."""
        stage, stages = self._rank_info["pipeline"], parallel_state.get_pipeline_model_parallel_world_size()
        compute = [measures["compute_seconds"] if number == stage else None for number in range(stages)]
        data, probe, *compute_by_stage = median_low([measures["data_seconds"], measures["probe_seconds"], *compute])
        return {"data_seconds": data, "compute_seconds": compute_by_stage[stage], "probe_seconds": probe}

    def _print_stragglers(self, own: dict[str, Any]) -> None:
        """Print a line for each rank that has just become a straggler, again only after it has recovered; at most four."""
        self._slow_reports = self._slow_reports + 1 if own["ratio"] > SLOW_RATIO else 0
        rows, count = gather_lowest(own if self._slow_reports == CONSECUTIVE_REPORTS else None, REPORTED_RANKS)
        for each in rows.values():
            print_rank_0(
                f"straggler: rank {each['rank']} on {each['host']} (tensor {each['tensor']}, pipeline {each['pipeline']}, "
                f"data {each['data']}) took {each['ratio']:.2f} times the median of comparable ranks in "
                f"{CONSECUTIVE_REPORTS} consecutive reports, mostly in {each['slow_in']}"
            )
        if count > len(rows):
            print_rank_0(f"straggler: {count - len(rows)} more ranks")


def compare_rank(measures: dict[str, float], medians: dict[str, float]) -> dict[str, Any]:
    """Return `ratio`, of a rank's seconds to the median of comparable ranks, and `slow_in`, the part that takes it longest.

    Data and probe are the same work for all ranks; compute is compared among the ranks of a pipeline stage. The median of two
    is the faster one.
    """
    extra = {part: measures[f"{part}_seconds"] - medians[f"{part}_seconds"] for part in ("data", "compute")}
    own, median = (each["data_seconds"] + each["compute_seconds"] for each in (measures, medians))
    ratio, device = own / max(median, 1e-9), measures["probe_seconds"] / max(medians["probe_seconds"], 1e-9)
    return {"ratio": max(ratio, device), "slow_in": "the probe" if device > ratio else max(extra, key=extra.__getitem__)}


def _gather_slowest(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the REPORTED_RANKS ranks with the highest `ratio`, the slowest first; all ranks call it together."""
    slowest: list[dict[str, Any]] = []
    while len(slowest) < min(REPORTED_RANKS, dist.get_world_size()):
        ratio = -1.0 if own in slowest else own["ratio"]
        [highest] = reduce_over_ranks([ratio], ReduceOp.MAX, torch.float64)
        row, _ = gather_lowest(own if ratio == highest else None)
        slowest += row.values()
    return slowest


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
