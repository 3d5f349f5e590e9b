"""torch's profiler over chosen steps and ranks: a trace for a viewer and a table for the eye."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megaenc.backend import Backend
from megaenc.console import say
from megaenc.training.options import MonitoringSettings

FOLDER, ROWS = "profile", 20
"""Where in the run folder traces are; operations in the table."""


class Profiler:
    """Profiles the steps and ranks that `monitoring` chooses, into `run_folder`, in a run that goes on after step `done`."""

    def __init__(self, monitoring: MonitoringSettings, backend: Backend, run_folder: str, done: int):
        self._first, self._last = max(monitoring.profile_step_start, done + 1), monitoring.profile_step_end
        self._mine = dist.get_rank() in monitoring.profile_ranks and done < self._last
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it says on the console when it starts and stops
        self._host, self._folder = backend.is_host, Path(run_folder) / FOLDER
        self._running: profile | None = None
        self._step = done
        if done >= self._last:
            say(f"--profile: steps {monitoring.profile_step_start} to {self._last} lie behind, so nothing is profiled")

    @contextlib.contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Around update number `step`."""
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
        try:
            self._write(finished, name)
        except OSError as error:
            say(f"--profile: {self._folder / name}: cannot be written: {error.strerror}; the run goes on without it")

    def _write(self, finished: profile, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        by = "self_cpu_time_total" if self._host else "self_device_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
        trace = self._folder / f".{name}.json.gz"
        finished.export_chrome_trace(str(trace))
        trace.rename(self._folder / f"{name}.json.gz")
        say(f"--profile: {self._folder / name}.json.gz is the trace (https://ui.perfetto.dev), the .txt beside it the table")
