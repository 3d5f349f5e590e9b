"""What a run tells while it trains: a row a step and one a validation, the same numbers in the folder and on the console."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megaenc.backend import Backend
from megaenc.console import ProgressLine, print_rank_0
from megaenc.training.config_groups import MonitoringConfig
from megaenc.training.engine import Engine, TrainStepResult
from megaenc.training.logging.backends import open_loggers
from megaenc.training.logging.stragglers import StragglerDetector
from megaenc.training.plan import Plan
from megaenc.training.run_dir import METRICS_FILE, STRAGGLERS_FILE, VALIDATION_FILE, RunDir
from megaenc.training.timers import max_over_ranks, max_timer_seconds, memory_usage

_GROUPS = {METRICS_FILE: "train", VALIDATION_FILE: "validation", STRAGGLERS_FILE: "stragglers"}


class MetricsLogger:
    """Makes the rows, on all ranks alike, and shows them; as a context it holds the progress line and closes what they go to."""

    def __init__(self, plan: Plan, backend: Backend, engine: Engine, folder: RunDir | None, done: int):
        """`folder` is there only on rank 0 of a run with `--save`; the run goes on after step `done`."""
        self._plan, self._backend, self._engine = plan, backend, engine
        self._folder, self._boards = folder, open_loggers(plan, folder)
        monitoring, save = plan.settings.monitoring, plan.settings.output.save
        self._shows = bool(save or monitoring.tensorboard_dir or monitoring.wandb_project)  # the same on all ranks
        self._profiler = Profiler(monitoring, backend, save, done) if monitoring.profile else None
        self._stragglers = StragglerDetector(engine, backend, monitoring.straggler_interval) if monitoring.log_straggler else None
        self._between = {"evaluation": 0.0, "save": 0.0}
        self._peak = _total_peak_flops(backend, plan.dtype)
        self._line = ProgressLine(plan.schedule.text_at(done + 1), total=plan.settings.total_iters)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.__exit__(kind, error, trace)
        if self._profiler:
            self._profiler.close()
        for board in self._boards:
            board.close()

    @contextlib.contextmanager
    def measure_step(self, step: int) -> Iterator[None]:
        """Take the time of update number `log_step`, and a profile of it where that is asked for."""
        with self._profiler.measure_step(step) if self._profiler else contextlib.nullcontext():
            clock = perf_counter()
            yield
            self._seconds = perf_counter() - clock

    def log_step(self, step: int, update: TrainStepResult, progress: dict[str, Any], deviations: float | None) -> None:
        """Show update `log_step`, a spike or one not made whatever the interval; `deviations`: those of `RecentLosses.add`."""
        plan, result, seconds = self._plan, update.metrics, self._seconds
        row = {
            "step": step,
            "objective": plan.schedule.text_at(step),
            "phase": plan.schedule.phase_at(step).index,
            "loss": result.loss,
            "accuracy": result.accuracy,
            "learning_rate": plan.learning_rate(step),
            "grad_norm": update.grad_norm,
            **progress,  # of the run so far
            "tokens_per_second": plan.step_tokens(step) / seconds,
            "tflops_per_second": result.flops / seconds / dist.get_world_size() / 1e12,
            "model_flops_utilization": result.flops / seconds / self._peak if self._peak else None,
            "step_seconds": seconds,
            "loss_deviations": deviations,
        }
        notable = not update.is_applied or plan.settings.health.is_spike(deviations)
        due = notable or step % plan.log_interval == 0 or step == plan.settings.total_iters
        if due and self._shows:
            self._log(METRICS_FILE, row | self._reduce_over_ranks())
        if self._stragglers and (report := self._stragglers.log_step(step)):
            self._log(STRAGGLERS_FILE, report)
        self._line.update(step, description=row["objective"], **_progress_fields(row))

    def log_validation(self, step: int, progress: dict[str, Any], validate: Callable[[Engine], dict[str, Any]]) -> None:
        """Let `validate` look at the model after `log_step` and show what it finds (see `Validation`)."""
        with self.measure_pause("evaluation"):
            found = validate(self._engine)
        self._log(VALIDATION_FILE, {"step": step, **progress, **found})

    @contextlib.contextmanager
    def measure_pause(self, what: Literal["evaluation", "save"]) -> Iterator[None]:
        """Something between two steps; the next row tells how long it took."""
        clock = perf_counter()
        yield
        self._between[what] += perf_counter() - clock

    def _log(self, file: str, row: dict[str, Any]) -> None:
        """Give `row`, which has a `log_step`, to the run folder and the boards."""
        if self._folder:
            self._folder.append_row(file, row)
        for board in self._boards:
            board.submit("log", _GROUPS[file], row)

    def drop_rows_after(self, step: int) -> None:
        """Drop the rows of steps beyond `log_step`, which are about to be made, or made again."""
        if self._folder:
            self._folder.drop_rows_after(step)
        for board in self._boards:
            board.submit("drop_rows_after", step)

    def sync(self) -> None:
        """Put the rows on the disk, before a checkpoint says that they are there."""
        if self._folder:
            self._folder.sync()
        for board in self._boards:
            board.flush()

    def _reduce_over_ranks(self) -> dict[str, Any]:
        """Return what differs between ranks, the highest of any; all call this together."""
        seconds = self._engine.step_timers.seconds() | self._between
        self._between = dict.fromkeys(self._between, 0.0)
        mine = {f"{name}_seconds": value for name, value in seconds.items()} | memory_usage(self._backend)
        timers = {"timers": max_timer_seconds(self._engine.timers)} if self._engine.timers else {}
        return max_over_ranks(mine, self._backend.device) | timers


def _total_peak_flops(backend: Backend, dtype: torch.dtype) -> float:
    """Return the FLOP/s that all processes of the run reach together; 0 if that of one is unknown."""
    peaks = torch.empty(dist.get_world_size(), dtype=torch.float64, device=backend.device)
    dist.all_gather_into_tensor(peaks, peaks.new_tensor([backend.peak_flops(dtype)]))
    return float(peaks.sum()) if peaks.all() else 0.0


def _progress_fields(row: dict[str, Any]) -> dict[str, str]:
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    used = row["model_flops_utilization"]
    shown = {"loss": loss, "tokens/s": f"{row['tokens_per_second']:,.0f}"}
    return shown if used is None else shown | {"MFU": f"{100 * used:.1f} %"}


PROFILE_DIR, TABLE_ROWS = "profile", 20
"""Where in the run folder traces are; operations in the table."""


class Profiler:
    """torch's profiler over the steps and ranks that `monitoring` chooses: a trace for a viewer and a table for the eye.

    It writes into `run_folder`, in a run that goes on after step `done`.
    """

    def __init__(self, monitoring: MonitoringConfig, backend: Backend, run_folder: str, done: int):
        self._first, self._last = max(monitoring.profile_step_start, done + 1), monitoring.profile_step_end
        self._mine = dist.get_rank() in monitoring.profile_ranks and done < self._last
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it says on the console when it starts and stops
        self._host, self._folder = backend.is_cpu, Path(run_folder) / PROFILE_DIR
        self._running: profile | None = None
        self._step = done
        if done >= self._last:
            print_rank_0(f"--profile: steps {monitoring.profile_step_start} to {self._last} lie behind, so nothing is profiled")

    @contextlib.contextmanager
    def measure_step(self, step: int) -> Iterator[None]:
        """Hold the profiler around update number `log_step`."""
        if self._mine and step == self._first and not self._running:
            self._running = profile(activities=[ProfilerActivity.CPU] + ([] if self._host else [ProfilerActivity.CUDA]))
            self._running.start()
        self._step = step
        yield
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Write what there is; a run may end before the last of the chosen steps."""
        if not self._running:
            return
        finished, self._running = self._running, None
        if not self._host:
            torch.cuda.synchronize()
        finished.stop()
        name = f"rank_{dist.get_rank()}_steps_{self._first}-{self._step}"
        by = "self_cpu_time_total" if self._host else "self_device_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=60)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
            trace = self._folder / f".{name}.json.gz"
            finished.export_chrome_trace(str(trace))
            trace.rename(self._folder / f"{name}.json.gz")
            print_rank_0(
                f"--profile: {self._folder / name}.json.gz is the trace (https://ui.perfetto.dev), the .txt beside it the table"
            )
        except OSError as error:
            print_rank_0(f"--profile: {self._folder / name}: cannot be written: {error.strerror}; the run goes on without it")
