"""Breakdown of the step time by torch's profiler, and count of host synchronizations."""

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
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from megaenc.bench.gpu import kernel_groups, synthetic
from megaenc.bench.gpu.kernel_groups import BACKWARD, FORWARD, IDLE, MATMUL, KernelEvent, TimeWindow
from megaenc.bench.train_worker import synchronize_device
from megaenc.objectives import Objective
from megaenc.training.engine import Engine

STEPS = 2
MAX_KERNELS = 12  # kernels listed in the results
MICRO_BATCHES = (1, 3)


class ProfiledEngine(Engine):
    """Engine that appends time windows of loss, gradient clearing and optimizer step to `windows`, if that is a list.

    It synchronizes the accelerator around each window, so that kernels can be assigned to windows by time.
    """

    windows: list[TimeWindow] | None = None

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        head = synthetic.unwrap_encoder(self).output_layer
        head.forward = self._window(kernel_groups.LOSS)(head.forward)
        self.zero_grad = self._window(kernel_groups.BUFFERS)(self.zero_grad)
        self._optimizer_step = self._window(kernel_groups.OPTIMIZER)(self._optimizer_step)

    def forward_and_backward(self, rows: Sequence[Sequence[int]], objective: Objective) -> None:
        """Run forward and backward of a micro-batch per row of pack numbers; keep the gradients."""
        self._run_micro_batches(self._list_specs(self.plan.packs, rows, objective, self.plan.settings.seed), (), train=True)

    def attention_flops(self, step: int) -> int:
        """Return the FLOPs of attention, forward and backward, over the documents of this rank's micro-batches of a step."""
        shape = self.plan.settings.shape
        batches = [spec.build(torch.device("cpu")) for spec in self._micro_batch_specs(step)]
        spans = [span for batch in batches for span in batch.spans()]
        return sum(shape.attention_flops(stop - begin, prefix=prefix - begin) for begin, prefix, stop in spans)

    @contextlib.contextmanager
    def _window(self, group: str) -> Iterator[None]:
        """Record the block as a time window of `group`."""
        if self.windows is None:
            yield
            return
        synchronize_device()
        began = time.time_ns()
        yield
        synchronize_device()
        self.windows.append(TimeWindow(group, began, time.time_ns()))


def profile_steps(engine: ProfiledEngine, steps: Iterator[int], timed: dict[str, Any]) -> dict[str, Any]:
    """Profile two steps; return one's seconds by kernel group, slowest kernels, advice; `timed`: its unprofiled row."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences start and stop messages
    host = engine.device.type == "cpu"
    engine.windows = windows = []
    with profile(activities=[ProfilerActivity.CPU if host else ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            engine.train_step(next(steps))
        synchronize_device()
    engine.windows = None
    return summarize_events(list(iter_kernel_events(host, profiled)), windows, timed)


def iter_kernel_events(host: bool, profiled: profile) -> Iterator[KernelEvent]:
    """Yield the accelerator's kernels or, if `host`, the CPU's operations, as KernelEvent with their own seconds."""
    first = profiled.profiler.kineto_results.trace_start_ns()
    for event in profiled.events():
        duration = event.self_cpu_time_total if host else event.time_range.elapsed_us()
        if (event.device_type == DeviceType.CPU) == host and duration > 0:
            name = ": ".join([*_iter_attention_parents(event), event.name])
            yield KernelEvent(name, first + int(1000 * event.time_range.start), duration / 1e6)


def _iter_attention_parents(event: FunctionEvent) -> Iterator[str]:
    """Yield the name of the attention that the host's operation is part of, if any: a product within it is not a layer's."""
    parent = event.cpu_parent
    while parent is not None:
        if kernel_groups.classify_kernel(parent.name) in (FORWARD, BACKWARD):
            yield parent.name
            return
        parent = parent.cpu_parent


def summarize_events(events: list[KernelEvent], windows: list[TimeWindow], timed: dict[str, Any]) -> dict[str, Any]:
    """Return a step's seconds and shares by kernel group, slowest kernels, FLOP/s, a suggestion; `timed`: unprofiled row.

    Idle time is the rest of the step time measured without the profiler, which slows the host.
    """
    seconds = {group: value / STEPS for group, value in kernel_groups.sum_by_group(events, windows).items()}
    seconds[IDLE] = max(0.0, timed["seconds_per_update"] - sum(seconds.values()))
    total, attention = sum(seconds.values()), seconds[FORWARD] + seconds[BACKWARD]
    products = timed["flops_per_update"] - timed["attention_flops_per_update"]
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.name] += event.seconds / STEPS
    kernels = [(name[:160], kernel_groups.classify_kernel(name), value) for name, value in totals.most_common()]
    return {
        "seconds": seconds,
        "shares": {group: value / total for group, value in seconds.items()},
        "matrix_flops_per_second": products / seconds[MATMUL] if seconds[MATMUL] else None,
        "attention_flops_per_second": timed["attention_flops_per_update"] / attention if attention else None,
        "kernels": kernels[:MAX_KERNELS],
        "attention_kernels": [name for name, group, _ in kernels if group in (FORWARD, BACKWARD)][:6],
        "by_time_too": any(window.start_ns <= event.start_ns <= window.end_ns for window in windows for event in events),
        "next": kernel_groups.suggest_optimization(seconds),
    }


def count_synchronizations(engine: ProfiledEngine, objective: Objective) -> dict[str, Any]:
    """Return host synchronizations per micro-batch, also by line, and of a step's rest; on a CPU why there are none.

    Uses torch.cuda.set_sync_debug_mode on steps of one and of three micro-batches.
    """
    if engine.device.type == "cpu":
        return {"left out": "there is no accelerator"}
    few, more = (_count_waits(engine, objective, number) for number in MICRO_BATCHES)
    between = MICRO_BATCHES[1] - MICRO_BATCHES[0]
    each = {place: count / between for place, count in (more - few).items()}
    return {"of_an_update": few.total() - sum(each.values()), "of_a_micro_batch": sum(each.values()), "places": each}


def _count_waits(engine: ProfiledEngine, objective: Objective, micro_batches: int) -> Counter[str]:
    """Return the number of host synchronizations in a step by source line, with the last three parts of its path."""
    packs = engine.sampler.micro_batch_size
    rows = [range(number * packs, (number + 1) * packs) for number in range(micro_batches)]
    engine.zero_grad()
    engine.forward_and_backward(rows, objective)  # warm-up
    engine.zero_grad()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns about itself too
        try:
            engine.forward_and_backward(rows, objective)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.zero_grad()
    waits = [one for one in caught if "called a synchronizing" in str(one.message)]
    return Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in waits)
