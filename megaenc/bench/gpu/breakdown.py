"""Where the time of a step goes, by torch's profiler over two updates; and where the host waits for the accelerator meanwhile."""

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megaenc.bench.gpu import kernel_groups, synthetic
from megaenc.bench.gpu.kernel_groups import BACKWARD, FORWARD, IDLE, MATMUL, Ran, Window
from megaenc.bench.train_worker import wait
from megaenc.objectives import Objective
from megaenc.training.engine import Engine
from megaenc.training.micro_batches import MicroBatchSpec

UPDATES = 2
SHOWN = 12  # kernels that are named
MICRO_BATCHES = (1, 3)


class Watched(Engine):
    """An engine that, while `windows` is a list, notes there when it computes the loss, clears gradients and updates weights.

    Then the accelerator is waited for before and after, so that what ran in between can be told by its time.
    """

    windows: list[Window] | None = None

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        head = synthetic.encoder_of(self).output_layer
        head.forward = self._window(kernel_groups.LOSS)(head.forward)
        self.zero_grad = self._window(kernel_groups.BUFFERS)(self.zero_grad)
        self._optimizer_step = self._window(kernel_groups.OPTIMIZER)(self._optimizer_step)

    def forward_and_backward(self, rows: Sequence[Sequence[int]], objective: Objective) -> None:
        """Run one micro-batch of the packs of each of `rows`, nothing else; the gradients stay."""
        seed = self.plan.settings.seed
        self._run_micro_batches([MicroBatchSpec(self.plan.packs, tuple(row), objective, seed) for row in rows], (), train=True)

    def attention_flops(self, step: int) -> int:
        """Return those of attention in update number `step`, as training counts them."""
        shape = self.plan.settings.shape
        packings = [wanted.build(torch.device("cpu")).packing for wanted in self._micro_batch_specs(step)]
        spans = [span for packing in packings for span in packing.spans()]
        return sum(shape.attention_flops(stop - begin, prefix=prefix - begin) for begin, prefix, stop in spans)

    @contextlib.contextmanager
    def _window(self, group: str) -> Iterator[None]:
        if self.windows is None:
            yield
            return
        wait()
        began = time.time_ns()
        yield
        wait()
        self.windows.append(Window(group, began, time.time_ns()))


def breakdown(engine: Watched, steps: Iterator[int], timed: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each group in an update of what `timed` (a row of speed) says, and what to try next."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it says on the console when it starts and stops
    host = engine.device.type == "cpu"
    engine.windows = windows = []
    with profile(activities=[ProfilerActivity.CPU if host else ProfilerActivity.CUDA]) as profiled:
        for _ in range(UPDATES):
            engine.train_step(next(steps))
        wait()
    engine.windows = None
    return summed(list(ran_on(host, profiled)), windows, timed)


def ran_on(host: bool, profiled: profile) -> Iterator[Ran]:
    """Yield the kernels of the accelerator, or the host's operations, each without what it called."""
    first = profiled.profiler.kineto_results.trace_start_ns()
    for event in profiled.events():
        taken = event.self_cpu_time_total if host else event.time_range.elapsed_us()
        if (event.device_type == DeviceType.CPU) == host and taken > 0:
            yield Ran(event.name, first + int(1000 * event.time_range.start), taken / 1e6)


def summed(ran: list[Ran], windows: list[Window], timed: dict[str, Any]) -> dict[str, Any]:
    """Return what `breakdown` does.

    Idle is what remains of the update's time without the profiler, which itself makes the host slower.
    """
    seconds = {group: value / UPDATES for group, value in kernel_groups.grouped(ran, windows).items()}
    seconds[IDLE] = max(0.0, timed["seconds_per_update"] - sum(seconds.values()))
    whole, attention = sum(seconds.values()), seconds[FORWARD] + seconds[BACKWARD]
    products = timed["flops_per_update"] - timed["attention_flops_per_update"]
    totals: Counter[str] = Counter()
    for one in ran:
        totals[one.name] += one.seconds / UPDATES
    kernels = [(name[:160], kernel_groups.group_of(name), value) for name, value in totals.most_common()]
    return {
        "seconds": seconds,
        "shares": {group: value / whole for group, value in seconds.items()},
        "matrix_flops_per_second": products / seconds[MATMUL] if seconds[MATMUL] else None,
        "attention_flops_per_second": timed["attention_flops_per_update"] / attention if attention else None,
        "kernels": kernels[:SHOWN],
        "attention_kernels": [name for name, group, _ in kernels if group in (FORWARD, BACKWARD)][:6],
        "by_time_too": any(window.first <= one.began <= window.last for window in windows for one in ran),
        "next": kernel_groups.next_thing(seconds),
    }


def synchronisations(engine: Watched, objective: Objective) -> dict[str, Any]:
    """Return how often an update's forward and backward wait once, and how often each micro-batch does; `places`: the latter's.

    Told by torch.cuda.set_sync_debug_mode, from the difference between updates of one and of three micro-batches.
    """
    if engine.device.type == "cpu":
        return {"left out": "there is no accelerator"}
    few, more = (_waits(engine, objective, number) for number in MICRO_BATCHES)
    between = MICRO_BATCHES[1] - MICRO_BATCHES[0]
    each = {place: count / between for place, count in (more - few).items()}
    return {"of_an_update": few.total() - sum(each.values()), "of_a_micro_batch": sum(each.values()), "places": each}


def _waits(engine: Watched, objective: Objective, micro_batches: int) -> Counter[str]:
    """Return how often it waits by place in the source, of which the last three parts of the path are shown."""
    packs = engine.sampler.micro_batch_size
    rows = [range(number * packs, (number + 1) * packs) for number in range(micro_batches)]
    engine.zero_grad()
    engine.forward_and_backward(rows, objective)  # what is made once is made here
    engine.zero_grad()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which warns of itself too
        try:
            engine.forward_and_backward(rows, objective)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.zero_grad()
    waits = [one for one in told if "called a synchronizing" in str(one.message)]
    return Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in waits)
