"""Profiles of chosen steps and ranks by torch's profiler."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megaenc.console import print_rank_0
from megaenc.training.callbacks.base import Callback, StepReport

if TYPE_CHECKING:
    from megaenc.training.trainer import Trainer

PROFILE_DIR = "profile"
"""Directory of the traces in the run directory."""
TABLE_ROWS = 20
"""Operations in the table."""


class Profiler(Callback):
    """Callback of --profile: torch's profiler for chosen steps and ranks.

    These are all steps from --profile-step-start to --profile-step-end, on --profile-ranks. Each
    such rank writes a trace (.json.gz) and a table (.txt) to SAVE/profile. A run that starts or
    ends in between profiles the steps that it makes. Errors of writing are printed and do not end
    the run.
    """

    def __init__(self, trainer: "Trainer"):
        """Choose the steps to profile, and print a line if they are over."""
        super().__init__(trainer)
        monitoring = trainer.plan.settings.monitoring
        start_step = trainer.start_step
        self._first = max(monitoring.profile_step_start, start_step + 1)
        self._last = monitoring.profile_step_end
        self._is_profiled = dist.get_rank() in monitoring.profile_ranks and start_step < self._last
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages at start and stop
        self._host = trainer.backend.is_cpu
        self._directory = Path(trainer.plan.settings.output.save) / PROFILE_DIR
        self._running: profile | None = None
        self._step = start_step
        if start_step >= self._last:
            print_rank_0(
                f"--profile: steps {monitoring.profile_step_start} to {self._last} are over, "
                "nothing is profiled"
            )

    def before_step(self, step: int) -> None:
        """Start the profiler before the first chosen step that this run makes.

        On ranks that are not chosen nothing is done.
        """
        if self._is_profiled and step == self._first and not self._running:
            self._running = profile(
                activities=[ProfilerActivity.CPU] + ([] if self._host else [ProfilerActivity.CUDA])
            )
            self._running.start()
        self._step = step

    def after_step(self, report: StepReport) -> None:
        """Stop the profiler, and write trace and table, after the last chosen step.

        If the run ends before it, the end of the context does so.
        """
        if report.step == self._last:
            self._finish()

    def __exit__(self, *error: Any) -> None:
        """Write trace and table of a run that ends before the last chosen step."""
        self._finish()

    def _finish(self) -> None:
        """Stop a running profiler and write trace and table of its steps."""
        if not self._running:
            return
        finished = self._running
        self._running = None
        if not self._host:
            torch.cuda.synchronize()
        finished.stop()
        name = f"rank_{dist.get_rank()}_steps_{self._first}-{self._step}"
        by = "self_cpu_time_total" if self._host else "self_device_time_total"
        table = finished.key_averages().table(
            sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=60
        )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / f"{name}.txt").write_text(table, encoding="utf-8")
            trace = self._directory / f".{name}.json.gz"
            finished.export_chrome_trace(str(trace))
            trace.rename(self._directory / f"{name}.json.gz")
            print_rank_0(
                f"--profile: {self._directory / name}.json.gz is the trace "
                "(https://ui.perfetto.dev), the .txt next to it the table"
            )
        except OSError as error:
            print_rank_0(
                f"--profile: {self._directory / name}: cannot be written: {error.strerror}; the "
                "run continues without it"
            )
