"""Training speed of a model: steps of the training engine with micro-batches that fill the device memory."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaenc.backend import Backend
from megaenc.bench import report
from megaenc.bench.gpu import synthetic
from megaenc.bench.gpu.breakdown import ProfiledEngine, count_synchronizations, profile_steps
from megaenc.bench.gpu.worker import JobResult
from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.bench.train_worker import measure_usage, peak_memory
from megaenc.training.distributed.largest_batch import discard_batch, find_largest_batch, largest_indexable, measure_room
from megaenc.training.engine import StepMetrics, TrainStepResult


@dataclass
class SpeedMeasurement:
    """Speed measurement of an engine with its batch sizes and time limits; shrinks micro-batches when out of memory."""

    engine: ProfiledEngine
    setup: BenchSetup
    backend: Backend
    packs: int  # per micro-batch
    micro_batches: int  # per step
    seconds: float  # per objective
    deadline: float  # of time.monotonic
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def measure(self, objective: str) -> dict[str, Any]:
        """Return an objective's speed row (tokens/s, FLOP/s, memory, loss); reduce `packs` if out of memory."""
        while True:
            try:
                synthetic.configure_batches(self.engine, self.setup, objective, self.packs, self.micro_batches)
                return self._measure_once()
            except torch.OutOfMemoryError:
                if self.packs == 1 or time.monotonic() > self.deadline:
                    raise
            discard_batch(self.engine)
            self.packs = min(self.packs - 1, int(0.9 * self.packs))

    def _time_step(self) -> tuple[TrainStepResult, float]:
        """Train one step; return its result and seconds."""
        with measure_usage(usage := {}):
            result = self.engine.train_step(next(self.steps))
        return result, usage["seconds"]

    def _measure_once(self) -> dict[str, Any]:
        """Return the speed row of the configured objective and micro-batch."""
        _, first = self._time_step()
        synthetic.reset_peak_memory()
        timed, retries, elapsed = [], _allocation_retries(), 0.0
        while len(timed) < 3 or (elapsed < self.seconds and len(timed) < 50):
            if timed and time.monotonic() + timed[-1][1] > self.deadline:
                break
            timed.append(self._time_step())
            elapsed += timed[-1][1]
        results, durations = zip(*timed, strict=True)
        total = sum((update.metrics for update in results), StepMetrics())
        tokens = len(durations) * self.micro_batches * self.packs * self.setup.seq_length
        peak = self.backend.peak_flops(torch.bfloat16 if self.setup.bf16 else torch.float32)
        return {
            "tokens_per_second": tokens / elapsed,
            "tokens_per_second_of_updates": report.summarize([tokens / len(durations) / each for each in durations]),
            "flops_per_second": total.flops / elapsed,
            "flops_per_update": total.flops / len(durations),
            "attention_flops_per_update": self.engine.attention_flops(next(self.steps)),
            "peak_flops": peak,
            "mfu": total.flops / elapsed / peak if peak else None,
            "peak_memory": peak_memory(),
            "reserved_memory": None if self.backend.is_cpu else torch.cuda.max_memory_reserved(),
            "num_alloc_retries": None if self.backend.is_cpu else _allocation_retries() - retries,
            "packs": self.packs,
            "micro_batches": self.micro_batches,
            "updates": len(durations),
            "seconds_per_update": elapsed / len(durations),
            "first_seconds": first,
            "predicted_share": total.predicted / tokens,
            "loss": total.loss,
            "finite": all(update.is_applied for update in results),
            "kernels": dataclasses.asdict(self.engine.kernels),
            "fused": self.engine.fused_kernels,
        }


def measure_speed(
    setup: BenchSetup,
    name: str,
    objectives: Sequence[str],
    packs: int,
    micro_batches: int,
    seconds: float,
    deadline: float,
) -> Iterator[JobResult]:
    """Yield a speed row and the time by kernel group for each objective, then the host synchronizations.

    `packs` per micro-batch; 0 fills the device memory. Nothing starts after `deadline`.
    """
    measurement = _start_measurement(setup, objectives, packs, micro_batches, seconds, deadline)
    engine = measurement.engine
    measurement.packs = packs or fill_memory(engine, setup, objectives, measurement.steps)
    for objective in objectives:
        if time.monotonic() > deadline:
            yield ["speed", name, "left out", objective], "no time left"
            continue
        row = measurement.measure(objective)
        yield ["speed", name, objective], row
        if time.monotonic() < deadline:
            yield ["breakdown", name, objective], profile_steps(engine, measurement.steps, row)
    if time.monotonic() < deadline:
        yield ["synchronisations", name], count_synchronizations(engine, setup.parse_objective(objectives[0]))
    del engine, measurement
    synthetic.destroy_process()


def find_common_packs(setup: BenchSetup, objective: str, deadline: float) -> Iterator[JobResult]:
    """Yield the most packs of a micro-batch that fit with the kernels of `setup`, for all kernels that need no more memory."""
    measurement = _start_measurement(setup, [objective], 1, 1, 0.0, deadline)
    yield ["compare", "packs"], fill_memory(measurement.engine, setup, [objective], measurement.steps)
    del measurement
    synthetic.destroy_process()


def measure_variant(
    setup: BenchSetup, name: str, objective: str, packs: int, micro_batches: int, seconds: float, deadline: float
) -> Iterator[JobResult]:
    """Yield the speed row of one variant of the compare phase; its `packs` are fewer if the given ones do not fit."""
    measurement = _start_measurement(setup, [objective], packs, micro_batches, seconds, deadline)
    yield ["compare", "rows", name], measurement.measure(objective)
    del measurement
    synthetic.destroy_process()


def _start_measurement(
    setup: BenchSetup, objectives: Sequence[str], packs: int, micro_batches: int, seconds: float, deadline: float
) -> SpeedMeasurement:
    """Return the SpeedMeasurement of a new engine with random weights; initialize this process."""
    backend = synthetic.init_process()
    engine = synthetic.build_random_engine(synthetic.build_plan(setup, *objectives), backend, ProfiledEngine)
    return SpeedMeasurement(engine, setup, backend, packs, micro_batches, seconds, deadline)


def _allocation_retries() -> int:
    """Return the number of allocator retries of this process, each of which synchronizes the device."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def fill_memory(engine: ProfiledEngine, setup: BenchSetup, objectives: Sequence[str], steps: Iterator[int]) -> int:
    """Return the most packs of a micro-batch that fit the device; 1 on a CPU.

    They fit under all objectives.
    """
    synthetic.configure_batches(engine, setup, objectives[0], 1, 1)
    engine.train_step(next(steps))  # allocates the optimizer state
    if engine.device.type == "cpu":
        return 1
    candidates = range(1, max(1, largest_indexable(setup.shape, setup.seq_length)) + 1)
    return find_largest_batch(engine, list(map(setup.parse_objective, objectives)), candidates, measure_room())
