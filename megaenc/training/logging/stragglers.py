"""Which rank holds the others up: each rank's own time, without its waiting for others, compared over all ranks.

In a step all ranks take equally long, for they wait for each other. What tells them apart is what a rank does by itself:

- data: the clock while it makes its micro-batches;
- compute: on a host the processor time of its thread in forward, backward and update; on an accelerator the device's time between
  begin and end of each forward pass of its stage, in which it waits for its tensor-parallel group alone;
- probe: a small matrix product that needs no other rank, which finds a slow device within such a group.
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
"""How many times the median is slow; how many reports make a straggler; how many of the slowest ranks a report shows."""

_MEASURES = ("data_seconds", "compute_seconds", "probe_seconds")


class StragglerDetector:
    """Compares the ranks each `interval` steps; all ranks construct and call it together."""

    def __init__(self, engine: Engine, backend: Backend, interval: int):
        self._engine, self._backend, self._interval = engine, backend, interval
        self._forward = None if backend.is_cpu else ForwardTimer(engine.chunks)
        place = {
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(),
        }
        self._places: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(self._places, place)
        self._sums: Counter[str] = Counter()
        self._steps = -1  # the first step pays for what is set up then
        self._slow: Counter[int] = Counter()  # by rank: reports in a row

    def step(self, step: int) -> dict[str, Any] | None:
        """Count update number `step`; return a report where one is due, with a line on the console if a rank was slow often."""
        watch = self._engine.step_timers
        of_thread = watch.processor[FORWARD_BACKWARD] - watch.processor[DATA] + watch.processor[OPTIMIZER]
        compute = self._forward.pop_seconds() if self._forward else of_thread
        self._steps += 1
        if self._steps:
            self._sums.update(data_seconds=watch.wall[DATA], compute_seconds=compute)
        if step % self._interval or not self._steps:
            return None
        means = [self._sums["data_seconds"] / self._steps, self._sums["compute_seconds"] / self._steps]
        mine = torch.tensor([*means, time_matmul(self._backend.device)], dtype=torch.float64, device=self._backend.device)
        of_all = mine.new_empty(len(self._places), len(mine))
        dist.all_gather_into_tensor(of_all.flatten(), mine)
        ranks = [
            place | dict(zip(_MEASURES, each, strict=True)) for place, each in zip(self._places, of_all.tolist(), strict=True)
        ]
        found = {"step": step, "steps": self._steps, **compare_ranks(ranks)}
        self._steps, self._sums = 0, Counter()
        self._print_stragglers(found["ranks"])
        found["ranks"] = found["ranks"][:REPORTED_RANKS]
        return found

    def _print_stragglers(self, ranks: list[dict[str, Any]]) -> None:
        """Print a line when a rank has become a straggler; the next after it has recovered."""
        for each in ranks:
            self._slow[each["rank"]] = self._slow[each["rank"]] + 1 if each["ratio"] > SLOW_RATIO else 0
            if self._slow[each["rank"]] == CONSECUTIVE_REPORTS:
                print_rank_0(
                    f"straggler: rank {each['rank']} on {each['host']} (tensor {each['tensor']}, pipeline {each['pipeline']}, "
                    f"data {each['data']}) took {each['ratio']:.2f} times the median of its like in {CONSECUTIVE_REPORTS} reports in a row, "
                    f"most of it in {each['slow_in']}"
                )


def compare_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `ranks`, the slowest first, each with its `ratio` to the median and what it is `slow_in`, and the first one's again.

    Data and probe are the same work for all; compute is compared among ranks of one stage. The median of two is the faster one.
    """
    data, _, probed = (median_low(each[measure] for each in ranks) for measure in _MEASURES)
    judged = []
    for each in ranks:
        like = median_low(other["compute_seconds"] for other in ranks if other["pipeline"] == each["pipeline"])
        extra = {"data": each["data_seconds"] - data, "compute": each["compute_seconds"] - like}
        own = (each["data_seconds"] + each["compute_seconds"]) / max(data + like, 1e-9)
        device = each["probe_seconds"] / max(probed, 1e-9)
        slow_in = "the probe" if device > own else max(extra, key=extra.__getitem__)
        judged.append(each | {"ratio": max(own, device), "slow_in": slow_in})
    judged.sort(key=lambda each: -each["ratio"])
    return {"slowest_rank": judged[0]["rank"], "slowest_ratio": judged[0]["ratio"], "ranks": judged}


class ForwardTimer:
    """Seconds that an accelerator spends in the forward passes of `chunks` while they are trained."""

    def __init__(self, chunks: list[torch.nn.Module]):
        self._events: list[torch.cuda.Event] = []  # begin, end, begin, end, ...
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._record)
            chunk.register_forward_hook(self._record)

    def _record(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # a validation is no part of a step
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def pop_seconds(self) -> float:
        """Return those since the last call; after a step, which has waited for the device."""
        events, self._events = self._events, []
        return sum(begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2], strict=True)) / 1000


def time_matmul(device: torch.device, times: int = 5) -> float:
    """Return the seconds of some matrix products on `device`: the best of `times`, the first of which warms up."""
    host = device.type == "cpu"
    size, products = (384, 1) if host else (2048, 50)
    matrix = torch.ones(size, size, device=device, dtype=torch.float32 if host else torch.bfloat16)
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        if not host:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
