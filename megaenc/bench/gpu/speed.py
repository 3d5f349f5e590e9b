"""How fast a model trains: updates of the run's own engine on packs of varying documents, micro-batches that fill the card."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megaenc.backend import Backend
from megaenc.bench import report
from megaenc.bench.gpu import made
from megaenc.bench.gpu.breakdown import Watched, breakdown
from megaenc.bench.gpu.made import Setup
from megaenc.bench.gpu.syncs import synchronisations
from megaenc.objectives import Objective
from megaenc.processes import highest_resident

FILLED = 0.92
"""Of the memory that is free, how much tensors may take; the rest is lost between them."""
TRIALS = ((6, 8), (2, 4))
"""Packs of the two micro-batches that tell how memory grows; the second where the first do not fit. With few packs the loss has
not yet all the logits that it keeps at a time, and memory grows faster than later on."""
LARGEST = 2**31 - 1
"""Numbers of one tensor: kernels that count in 32 bits go no further."""


@dataclass(frozen=True)
class Timing:
    """What is timed and for how long."""

    name: str
    objectives: tuple[str, ...]
    micro_batches: int
    """of an update"""
    packs: int = 0
    """of a micro-batch; 0: as many as fill the card"""
    seconds: float = 10.0
    """of each objective"""
    looks: bool = True
    """also where a step's time goes, and where the host waits"""


def measured(setup: Setup, timing: Timing, deadline: float) -> Iterator[tuple[list[str], Any]]:
    """Rows for the table, one after the other; nothing is begun after `deadline` (of time.monotonic)."""
    backend = made.begin()
    engine = made.filled(Watched(setup.plan(*timing.objectives), backend, drawn=False))
    steps = made.numbers()
    packs = timing.packs or fitting(engine, setup, timing.objectives, steps)
    for objective in timing.objectives:
        if time.monotonic() > deadline:
            yield ["speed", timing.name, "left out", objective], "no time left"
            continue
        row, packs = _timed(engine, setup, backend, timing, objective, packs, steps, deadline)
        yield ["speed", timing.name, objective], row
        if timing.looks and time.monotonic() < deadline:
            yield ["breakdown", timing.name, objective], breakdown(engine, steps, row)
    if timing.looks and time.monotonic() < deadline:
        yield ["synchronisations", timing.name], synchronisations(engine, setup.objective(timing.objectives[0]))
    del engine
    made.end()


def _timed(
    engine: Watched,
    setup: Setup,
    backend: Backend,
    timing: Timing,
    objective: str,
    packs: int,
    steps: Iterator[int],
    deadline: float,
) -> tuple[dict[str, Any], int]:
    """One row, and of how many packs its micro-batches were: fewer than `packs` where the memory did not suffice."""
    while True:
        try:
            made.lay(engine, setup, objective, packs, timing.micro_batches)
            return _row(engine, setup, backend, timing, packs, steps, deadline), packs
        except torch.OutOfMemoryError:
            if packs == 1 or time.monotonic() > deadline:
                raise
        _forget(engine)
        packs = min(packs - 1, int(0.9 * packs))


def _row(
    engine: Watched, setup: Setup, backend: Backend, timing: Timing, packs: int, steps: Iterator[int], deadline: float
) -> dict[str, Any]:
    """Of updates as they are laid; torch.OutOfMemoryError where one of them does not fit."""
    first, _ = _clocked(lambda: engine.update(next(steps)))
    if not backend.is_host:
        torch.cuda.reset_peak_memory_stats()
    taken, updates, retries = [], [], _retries()
    while len(taken) < 3 or (sum(taken) < timing.seconds and len(taken) < 50):
        if taken and time.monotonic() + taken[-1] > deadline:
            break
        seconds, update = _clocked(lambda: engine.update(next(steps)))
        taken.append(seconds)
        updates.append(update)
    total = sum((update.result for update in updates[1:]), updates[0].result)
    tokens, flops = len(taken) * timing.micro_batches * packs * setup.seq_length, total.flops
    peak = backend.peak_flops(torch.bfloat16 if setup.bf16 else torch.float32)
    return {
        "tokens_per_second": tokens / sum(taken),
        "tokens_per_second_of_updates": report.spread([tokens / len(taken) / each for each in taken]),
        "flops_per_second": flops / sum(taken),
        "flops_per_update": flops / len(taken),
        "attention_flops_per_update": attention_flops(engine, next(steps)),
        "peak_flops": peak,
        "mfu": flops / sum(taken) / peak if peak else None,
        "peak_memory": highest_resident() if backend.is_host else torch.cuda.max_memory_allocated(),
        "reserved_memory": None if backend.is_host else torch.cuda.max_memory_reserved(),
        "num_alloc_retries": None if backend.is_host else _retries() - retries,
        "packs": packs,
        "micro_batches": timing.micro_batches,
        "updates": len(taken),
        "seconds_per_update": sum(taken) / len(taken),
        "first_seconds": first,
        "predicted_share": total.predicted / tokens,
        "loss": total.loss,
        "finite": all(update.made for update in updates),
        "kernels": made.chosen(engine),
        "fused": made.fused(engine),
    }


def _retries() -> int:
    """How often so far this process gave unused memory back to find room, which costs a wait each time."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def _clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of `call`, the accelerator's work included, and what it gives."""
    made.wait()
    began = time.perf_counter()
    found = call()
    made.wait()
    return time.perf_counter() - began, found


def attention_flops(engine: Watched, step: int) -> int:
    """Those of attention in update number `step`, as training counts them."""
    from megaenc.objectives import Attention

    whole = engine.plan.schedule.objective(step).attention == Attention.BIDIRECTIONAL
    edges = [engine.plan.packs[sample].edges for row in engine.rows(step) for sample in row]
    lengths = [int(length) for pack in edges for length in pack[1:] - pack[:-1]]
    return sum(engine.plan.settings.shape.attention_flops(length, prefix=length if whole else 0) for length in lengths)


def fitting(engine: Watched, setup: Setup, objectives: tuple[str, ...], steps: Iterator[int]) -> int:
    """The packs of the largest micro-batch that the accelerator's memory holds; one without an accelerator.

    Memory grows evenly with packs: two sizes tell where it ends, and the size found is tried.
    """
    made.lay(engine, setup, objectives[0], 1, 1)
    engine.update(next(steps))  # the optimizer's state is made here
    if engine.device.type == "cpu":
        return 1
    most = max(1, LARGEST // (setup.seq_length * max(2 * setup.shape.ffn_hidden_size, setup.shape.query_size)))
    found = max(1, min(_largest(engine, setup.objective(text), most) for text in objectives))
    _forget(engine)
    return found


def _largest(engine: Watched, objective: Objective, most: int) -> int:
    """At least 1, at most `most`; 1 where none of TRIALS fits."""
    for few, more in TRIALS:
        try:
            peaks = [_peak(engine, objective, packs) for packs in (few, more)]
            break
        except torch.OutOfMemoryError:
            pass
        _forget(engine)
    else:
        return 1
    free, _ = torch.cuda.mem_get_info()
    room = FILLED * (free + torch.cuda.memory_reserved())
    found = min(most, packs_for(room, peaks[0], peaks[1], few, more))
    while found > more:
        try:
            _peak(engine, objective, found)
            break
        except torch.OutOfMemoryError:
            pass
        _forget(engine)
        found = int(0.92 * found)
    return found


def packs_for(room: float, at_few: float, at_more: float, few: int, more: int) -> int:
    """How many packs take no more than `room` bytes, where `few` take `at_few` and `more` take `at_more`."""
    each = max((at_more - at_few) / (more - few), 1.0)
    return max(1, few + int((room - at_few) // each))


def _peak(engine: Watched, objective: Objective, packs: int) -> float:
    """Bytes of tensors at the worst moment of one micro-batch of `packs` packs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with engine.unreduced():
        engine.gradient_alone(range(packs), objective)
    return float(torch.cuda.max_memory_allocated())


def _forget(engine: Watched) -> None:
    """Give back what a micro-batch that did not fit has left."""
    engine.clear_gradient()
    gc.collect()
    torch.cuda.empty_cache()
