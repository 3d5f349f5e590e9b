"""Where the time of a step goes: torch's profiler over two updates, kernels grouped by what they are for."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaenc.bench.gpu import made
from megaenc.bench.gpu.groups import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    IDLE,
    LOSS,
    MATMUL,
    OPTIMIZER,
    Ran,
    Window,
    group_of,
    grouped,
    next_thing,
)
from megaenc.objectives import Objective
from megaenc.training.batches import Wanted
from megaenc.training.engine import Engine

UPDATES = 2
SHOWN = 12
"""Kernels that are named."""


class Watched(Engine):
    """An engine that, while it is watched, notes when it computes the loss, clears gradients and updates the weights.

    Then the accelerator is waited for before and after, so that what ran in between can be told by its time.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        self.windows: list[Window] | None = None
        super().__init__(*args, **others)
        head = made.encoder_of(self).output_layer
        begun: list[int] = []
        head.register_forward_pre_hook(lambda *_: begun.append(self._now()))
        head.register_forward_hook(lambda *_: self._note(LOSS, begun.pop()))

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Window]]:
        """The windows noted inside."""
        self.windows = found = []
        try:
            yield found
        finally:
            self.windows = None

    def clear_gradient(self) -> None:
        """See Engine."""
        began = self._now()
        super().clear_gradient()
        self._note(BUFFERS, began)

    def forward_and_backward(self, rows: Sequence[Sequence[int]], objective: Objective) -> None:
        """One micro-batch of the packs of each of `rows`, nothing else; the gradients stay."""
        seed = self.plan.settings.seed
        self._sums([Wanted(self.plan.packs, tuple(row), objective, seed) for row in rows], (), train=True)

    def _step(self, loss_sum: float) -> tuple[float, bool]:
        began = self._now()
        found = super()._step(loss_sum)
        self._note(OPTIMIZER, began)
        return found

    def _now(self) -> int:
        if self.windows is None:
            return 0
        made.wait()
        return time.time_ns()

    def _note(self, group: str, began: int) -> None:
        if self.windows is not None:
            self.windows.append(Window(group, began, self._now()))


def breakdown(engine: Watched, steps: Iterator[int], timed: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each group in an update of what `timed` (a row of speed) says, and what to try next.

    Idle is what remains of the update's time without the profiler, which itself makes the host slower.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it says on the console when it starts and stops
    host = engine.device.type == "cpu"
    with (
        engine.watched() as windows,
        profile(activities=[ProfilerActivity.CPU if host else ProfilerActivity.CUDA]) as profiled,
    ):
        for _ in range(UPDATES):
            engine.update(next(steps))
        made.wait()
    ran = list(_operations(profiled) if host else _kernels(profiled))
    return summed(ran, windows, timed)


def summed(ran: list[Ran], windows: list[Window], timed: dict[str, Any]) -> dict[str, Any]:
    """See `breakdown`."""
    seconds = {group: value / UPDATES for group, value in grouped(ran, windows).items()}
    aligned = any(window.first <= one.began <= window.last for window in windows for one in ran)
    step = timed["seconds_per_update"]
    busy = sum(seconds.values())
    seconds[IDLE] = max(0.0, step - busy)
    whole = busy + seconds[IDLE]
    attention = seconds[FORWARD] + seconds[BACKWARD]
    products = timed["flops_per_update"] - timed["attention_flops_per_update"]
    totals: Counter[str] = Counter()
    for one in ran:
        totals[one.name] += one.seconds / UPDATES
    return {
        "seconds": seconds,
        "shares": {group: value / whole for group, value in seconds.items()},
        "matrix_flops_per_second": products / seconds[MATMUL] if seconds[MATMUL] else None,
        "attention_flops_per_second": timed["attention_flops_per_update"] / attention if attention else None,
        "kernels": [[name[:160], group_of(name), value] for name, value in totals.most_common(SHOWN)],
        "attention_kernels": [name[:160] for name, _ in totals.most_common() if group_of(name) in (FORWARD, BACKWARD)][:6],
        "by_time_too": aligned,
        "next": next_thing(seconds),
    }


def _kernels(profiled: profile) -> Iterator[Ran]:
    """What ran on the accelerator."""
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CPU and event.duration_ns():
            yield Ran(event.name(), event.start_ns(), event.duration_ns() / 1e9)


def _operations(profiled: profile) -> Iterator[Ran]:
    """What ran on the host, each without what it called."""
    began = profiled.profiler.kineto_results.trace_start_ns()
    for event in profiled.events():
        if event.self_cpu_time_total > 0:
            yield Ran(event.name, began + int(1000 * event.time_range.start), event.self_cpu_time_total / 1e6)
