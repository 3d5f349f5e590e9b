"""How fast a model trains: updates of the run's own engine on packs of varying documents, micro-batches that fill the card."""

import dataclasses
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaenc.backend import Backend
from megaenc.bench import report
from megaenc.bench.gpu import synthetic
from megaenc.bench.gpu.breakdown import Watched, breakdown, synchronisations
from megaenc.bench.gpu.worker import Finding
from megaenc.bench.synthetic_docs import Setup
from megaenc.bench.train_worker import clock, peak_memory
from megaenc.objectives import Objective
from megaenc.training.engine import StepMetrics, TrainStepResult

FILLED = 0.92  # of the memory that is free, how much tensors may take; the rest is lost between them
LARGEST = 2**31 - 1  # numbers of one tensor: kernels that count in 32 bits go no further


@dataclass
class Timing:
    """Updates of an engine whose micro-batches may have to shrink."""

    engine: Watched
    setup: Setup
    backend: Backend
    packs: int  # of a micro-batch
    micro_batches: int  # of an update
    seconds: float  # of each objective
    deadline: float  # of time.monotonic
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def row(self, objective: str) -> dict[str, Any]:
        """Return a row for the table; `packs` are fewer from then on where the memory did not suffice."""
        while True:
            try:
                synthetic.configure_batches(self.engine, self.setup, objective, self.packs, self.micro_batches)
                return self._row()
            except torch.OutOfMemoryError:
                if self.packs == 1 or time.monotonic() > self.deadline:
                    raise
            _forget(self.engine)
            self.packs = min(self.packs - 1, int(0.9 * self.packs))

    def _update(self) -> tuple[TrainStepResult, float]:
        """Make one more; return it and its seconds."""
        with clock(found := {}):
            update = self.engine.train_step(next(self.steps))
        return update, found["seconds"]

    def _row(self) -> dict[str, Any]:
        _, first = self._update()
        synthetic.forget_peak()
        timed, retries, spent = [], _retries(), 0.0
        while len(timed) < 3 or (spent < self.seconds and len(timed) < 50):
            if timed and time.monotonic() + timed[-1][1] > self.deadline:
                break
            timed.append(self._update())
            spent += timed[-1][1]
        updates, taken = zip(*timed, strict=True)
        total = sum((update.metrics for update in updates), StepMetrics())
        tokens = len(taken) * self.micro_batches * self.packs * self.setup.seq_length
        peak = self.backend.peak_flops(torch.bfloat16 if self.setup.bf16 else torch.float32)
        return {
            "tokens_per_second": tokens / spent,
            "tokens_per_second_of_updates": report.spread([tokens / len(taken) / each for each in taken]),
            "flops_per_second": total.flops / spent,
            "flops_per_update": total.flops / len(taken),
            "attention_flops_per_update": self.engine.attention_flops(next(self.steps)),
            "peak_flops": peak,
            "mfu": total.flops / spent / peak if peak else None,
            "peak_memory": peak_memory(),
            "reserved_memory": None if self.backend.is_cpu else torch.cuda.max_memory_reserved(),
            "num_alloc_retries": None if self.backend.is_cpu else _retries() - retries,
            "packs": self.packs,
            "micro_batches": self.micro_batches,
            "updates": len(taken),
            "seconds_per_update": spent / len(taken),
            "first_seconds": first,
            "predicted_share": total.predicted / tokens,
            "loss": total.loss,
            "finite": all(update.is_applied for update in updates),
            "kernels": dataclasses.asdict(self.engine.kernels),
            "fused": self.engine.fused_kernels,
        }


def measured(
    setup: Setup,
    name: str,
    objectives: Sequence[str],
    packs: int,
    micro_batches: int,
    seconds: float,
    deadline: float,
    looks: bool = True,
) -> Iterator[Finding]:
    """Yield rows for the table, one after the other; nothing is begun after `deadline`.

    `packs` of a micro-batch, 0: as many as fill the card. `looks`: also where a step's time goes, and where the host waits.
    """
    backend = synthetic.begin()
    engine = synthetic.filled(synthetic.plan_of(setup, *objectives), backend, Watched)
    timing = Timing(engine, setup, backend, packs, micro_batches, seconds, deadline)
    timing.packs = packs or fitting(engine, setup, objectives, timing.steps)
    for objective in objectives:
        if time.monotonic() > deadline:
            yield ["speed", name, "left out", objective], "no time left"
            continue
        row = timing.row(objective)
        yield ["speed", name, objective], row
        if looks and time.monotonic() < deadline:
            yield ["breakdown", name, objective], breakdown(engine, timing.steps, row)
    if looks and time.monotonic() < deadline:
        yield ["synchronisations", name], synchronisations(engine, setup.objective_of(objectives[0]))
    del engine, timing
    synthetic.end()


def _retries() -> int:
    """Return how often so far this process gave unused memory back to find room, which costs a wait each time."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def fitting(engine: Watched, setup: Setup, objectives: Sequence[str], steps: Iterator[int]) -> int:
    """Return the packs of the largest micro-batch that the accelerator's memory holds; one without an accelerator."""
    synthetic.configure_batches(engine, setup, objectives[0], 1, 1)
    engine.train_step(next(steps))  # the optimizer's state is made here
    if engine.device.type == "cpu":
        return 1
    free, _ = torch.cuda.mem_get_info()
    room = FILLED * (free + torch.cuda.memory_reserved())

    def too_large(packs: int) -> bool:
        try:
            found = any(_peak(engine, setup.objective_of(text), packs) > room for text in objectives)
        except torch.OutOfMemoryError:
            found = True
        _forget(engine)
        return found

    most = LARGEST // (setup.seq_length * max(2 * setup.shape.ffn_hidden_size, setup.shape.query_size))
    return max(1, bisect_left(range(1, most + 1), True, key=too_large))


def _peak(engine: Watched, objective: Objective, packs: int) -> float:
    """Return the bytes of tensors at the worst moment of one micro-batch of `packs` packs."""
    synthetic.forget_peak()
    with engine.no_grad_reduction():
        engine.local_grad_norm(range(packs), objective)
    return float(torch.cuda.max_memory_allocated())


def _forget(engine: Watched) -> None:
    """Give back what a micro-batch that did not fit has left."""
    engine.zero_grad()
    synthetic.clean()
