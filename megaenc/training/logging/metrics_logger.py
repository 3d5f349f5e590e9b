"""Logging of metrics, validations and straggler reports."""

import contextlib
from collections.abc import Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megaenc.backend import Backend
from megaenc.backend.reductions import reduce_over_ranks
from megaenc.console import ProgressLine
from megaenc.training.engine import Engine, TrainStepResult
from megaenc.training.logging.backends import open_loggers
from megaenc.training.logging.profiler import Profiler
from megaenc.training.logging.stragglers import StragglerDetector
from megaenc.training.plan import Plan
from megaenc.training.run_dir import METRICS_FILE, STRAGGLERS_FILE, VALIDATION_FILE, RunDir
from megaenc.training.timers import memory_usage

_GROUPS = {METRICS_FILE: "train", VALIDATION_FILE: "validation", STRAGGLERS_FILE: "stragglers"}


class MetricsLogger:
    """Context that logs steps, validations and stragglers.

    They go to the run directory, logging backends and a progress line.

    All ranks call its methods together.
    """

    def __init__(self, plan: Plan, backend: Backend, engine: Engine, run_dir: RunDir | None, start_step: int):
        """Open the loggers for steps after `start_step`.

        `run_dir` is set on rank 0 of a run with `--save`.
        """
        self._plan = plan
        self._backend = backend
        self._engine = engine
        self._run_dir = run_dir
        self._loggers = open_loggers(plan, run_dir)
        monitoring = plan.settings.monitoring
        save = plan.settings.output.save
        self._has_outputs = bool(save or monitoring.tensorboard_dir or monitoring.wandb_project)  # the same on all ranks
        self._profiler = Profiler(monitoring, backend, save, start_step) if monitoring.profile else None
        self._stragglers = StragglerDetector(engine, backend, monitoring.straggler_interval) if monitoring.log_straggler else None
        self._pause_seconds = {"evaluation": 0.0, "save": 0.0}
        peak = backend.peak_flops(plan.dtype)
        total_peak, unknown_count = reduce_over_ranks([peak, not peak], ReduceOp.SUM, torch.float64)
        self._peak = 0.0 if unknown_count else total_peak  # FLOP/s of the devices of all ranks; 0 if one is unknown
        self._line = ProgressLine(plan.schedule.text_at(start_step + 1), total=plan.settings.total_iters)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.__exit__(kind, error, trace)
        if self._profiler:
            self._profiler.close()
        for logger in self._loggers:
            logger.close()

    @contextlib.contextmanager
    def measure_step(self, step: int) -> Iterator[None]:
        """Measure the seconds of `step` inside the context, for `log_step`.

        It is profiled if --profile selects it.
        """
        with self._profiler.profile_step(step) if self._profiler else contextlib.nullcontext():
            start = perf_counter()
            yield
            self._step_seconds = perf_counter() - start

    def log_step(self, step: int, result: TrainStepResult, progress: dict[str, Any], deviations: float | None) -> None:
        """Log `step` and a due straggler report; update the progress line.

        There is a row if one is due, or if the step is the last, a spike or skipped.

        `progress`: PROGRESS_FIELDS of the run so far; `deviations`: result of `RecentLosses.add`.
        """
        plan = self._plan
        metrics = result.metrics
        seconds = self._step_seconds
        row = {
            "step": step,
            "objective": plan.schedule.text_at(step),
            "phase": plan.schedule.phase_at(step).index,
            "loss": metrics.loss,
            "accuracy": metrics.accuracy,
            "learning_rate": plan.learning_rate(step),
            "grad_norm": result.grad_norm,
            **progress,
            "tokens_per_second": plan.step_tokens(step) / seconds,
            "tflops_per_second": metrics.flops / seconds / dist.get_world_size() / 1e12,
            "model_flops_utilization": metrics.flops / seconds / self._peak if self._peak else None,
            "step_seconds": seconds,
            "loss_deviations": deviations,
        }
        is_notable = not result.is_applied or plan.settings.health.is_spike(deviations)
        is_due = is_notable or step % plan.log_interval == 0 or step == plan.settings.total_iters
        if is_due and self._has_outputs:
            self._log(METRICS_FILE, row | self._reduce_over_ranks())
        if self._stragglers and (report := self._stragglers.record_step(step)):
            self._log(STRAGGLERS_FILE, report)
        self._line.update(step, description=row["objective"], **progress_fields(row, self._backend))

    def log_validation(self, step: int, progress: dict[str, Any], scores: dict[str, Any]) -> None:
        """Log the `scores` of a Validator after `step`, with `progress`."""
        self._log(VALIDATION_FILE, {"step": step, **progress, **scores})

    @contextlib.contextmanager
    def measure_pause(self, kind: Literal["evaluation", "save"]) -> Iterator[None]:
        """Add the seconds inside the context to those of the next row.

        They are its `evaluation_seconds` or `save_seconds`.
        """
        start = perf_counter()
        yield
        self._pause_seconds[kind] += perf_counter() - start

    def _log(self, file: str, row: dict[str, Any]) -> None:
        """Write `row` to the metrics file `file` of the run directory and to the loggers."""
        if self._run_dir:
            self._run_dir.append_row(file, row)
        for logger in self._loggers:
            logger.submit("log", _GROUPS[file], row)

    def drop_rows_after(self, step: int) -> None:
        """Delete rows of steps after `step` from logging backends, before those steps are repeated."""
        for logger in self._loggers:
            logger.submit("drop_rows_after", step)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint is saved."""
        if self._run_dir:
            self._run_dir.sync()
        for logger in self._loggers:
            logger.flush()

    def _reduce_over_ranks(self) -> dict[str, Any]:
        """Return timings and memory usage, as maxima over all ranks."""
        seconds = self._engine.step_timers.seconds() | self._pause_seconds
        self._pause_seconds = dict.fromkeys(self._pause_seconds, 0.0)
        local_values = {f"{name}_seconds": value for name, value in seconds.items()} | memory_usage(self._backend)
        maxima = reduce_over_ranks([*local_values.values()], ReduceOp.MAX, torch.float64)
        return dict(zip(local_values, maxima, strict=True))


def progress_fields(row: dict[str, Any], backend: Backend) -> dict[str, str]:
    """Return the values of the progress line: loss, tokens/s and, if known, MFU."""
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    utilization = row["model_flops_utilization"]
    fields = {"loss": loss, "tokens/s": f"{row['tokens_per_second']:,.0f}"}
    # A CPU's peak is measured as the run begins, beside whatever else runs then.
    if utilization is not None and not backend.is_cpu:
        fields["MFU"] = f"{100 * utilization:.1f} %"
    return fields
