"""What a grid shows while it runs: a row for each running job and one for the whole, or plain lines where nobody watches."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from megaenc.console import ProgressLine, clock, number, rich_console, say
from megaenc.finetune.jobs import Job, Progress

# How much of a run has gone by at the begin of each stage, and how much it takes: a rule of thumb for the time left.
_STAGES = {"loading": (0.0, 0.05), "training": (0.05, 0.65), "validation": (0.7, 0.15), "test": (0.85, 0.15)}


def share(progress: Progress) -> float:
    """About how much of its run is done, from 0 to 1."""
    begin, length = _STAGES[progress.stage]
    return begin + length * (min(progress.done / progress.total, 1) if progress.total else 0)


class Screen:
    """How far a grid of `runs` is. On a terminal it is live; elsewhere it is a line at most each `every` seconds."""

    def __init__(self, runs: int, every: float = 10.0) -> None:
        self.runs, self.every = runs, every
        self._rows: dict[Job, tuple[int, float, str]] = {}  # rich's task, when its stage began, the stage
        self._live = self._line = None

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars
            from rich.table import Column

            self._live = Bars(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
                TextColumn("{task.fields[stage]}", markup=False, table_column=Column(no_wrap=True, min_width=10)),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[tail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
                console=rich_console(),
                expand=True,
            )
            self._whole = self._live.add_task("grid", total=self.runs, stage="", tail="")
            self._live.start()
        else:
            self._line = ProgressLine("grid", total=self.runs, every=self.every)
            self._line.__enter__()
        self._first: tuple[float, float] | None = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._line.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def show(self, running: Mapping[Job, Progress], finished: int, failed: int) -> None:
        """Say which runs are under way and how many of the grid have ended."""
        now = time.monotonic()
        done = finished + failed + sum(share(progress) for progress in running.values())
        counts = {"finished": finished, **({"failed": failed} if failed else {}), "running": len(running)}
        if self._live is None:
            first = next((f" ({job.name}: {progress.stage}{_percent(progress)})" for job, progress in running.items()), "")
            self._line.update(done, description=f"grid{first}", **counts)
            return
        if self._first is None and running:
            self._first = (now, done)
        left = ""
        if self._first is not None and self._first[1] < done < self.runs:
            left = f"{clock((self.runs - done) * (now - self._first[0]) / (done - self._first[1]))} left"
        words = f"grid: {finished:,} of {self.runs:,} finished" + (f", {failed:,} failed" if failed else "")
        self._live.update(self._whole, description=words, completed=done, tail=left)
        for job in [job for job in self._rows if job not in running]:
            self._live.remove_task(self._rows.pop(job)[0])
        for job, progress in running.items():
            self._row(job, progress, now)

    def _row(self, job: Job, progress: Progress, now: float) -> None:
        if job not in self._rows:
            task = self._live.add_task(job.name, total=None, stage=progress.stage, tail="")
            self._rows[job] = (task, now, progress.stage)
        task, since, stage = self._rows[job]
        if stage != progress.stage:
            since = now
            self._rows[job] = (task, since, progress.stage)
        parts = []
        if progress.total and 0 < progress.done < progress.total and now > since:
            parts.append(f"{clock((progress.total - progress.done) * (now - since) / progress.done)} left")
        parts += [f"{name} {number(value)}" for name, value in progress.fields.items()]
        self._live.update(
            task, total=progress.total or None, completed=progress.done, stage=progress.stage, tail="  ".join(parts)
        )


def _percent(progress: Progress) -> str:
    return f" {100 * progress.done / progress.total:.0f} %" if progress.total else ""
