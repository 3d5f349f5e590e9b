"""What a grid shows while it runs: a row for each running job and one for the whole, or plain lines where nobody watches."""

import time
from collections.abc import Mapping

from megaenc.console import ProgressLine, Row, clock, number
from megaenc.finetune.grid.jobs import Job, Progress

# How much of a run has gone by at the begin of each stage, and how much it takes: a rule of thumb for the time left.
_STAGES = {"loading": (0.0, 0.05), "training": (0.05, 0.65), "validation": (0.7, 0.15), "test": (0.85, 0.15)}


def share(progress: Progress) -> float:
    """About how much of its run is done, from 0 to 1."""
    begin, length = _STAGES[progress.stage]
    return begin + length * (min(progress.done / progress.total, 1) if progress.total else 0)


class GridProgress(ProgressLine):
    """How far a grid of `runs` is."""

    def __init__(self, runs: int) -> None:
        super().__init__("grid", total=runs, rows=(10, 16))
        self._began: dict[tuple[Job, str], float] = {}  # the stages of the jobs under way

    def show(self, running: Mapping[Job, Progress], finished: int, failed: int) -> None:
        """Say which runs are under way and how many of the grid have ended."""
        now = time.monotonic()
        stages = {(job, progress.stage) for job, progress in running.items()}
        self._began = {stage: self._began.get(stage, now) for stage in stages}
        done = finished + failed + sum(share(progress) for progress in running.values())
        words = f"grid: {finished:,} of {self.total:,} finished" + (f", {failed:,} failed" if failed else "")
        rows = {None: Row(words, done, self.total, "".join(self.time_left(now)))}
        rows |= {job: _row(job, progress, now - self._began[job, progress.stage]) for job, progress in running.items()}
        first = next((f" ({job.name}: {progress.stage}{_percent(progress)})" for job, progress in running.items()), "")
        counts = {"finished": finished, **({"failed": failed} if failed else {}), "running": len(running)}
        self.update(done, description=f"grid{first}", rows=rows, **counts)


def _row(job: Job, progress: Progress, seconds: float) -> Row:
    """The row of a run whose stage has taken `seconds` so far."""
    parts = []
    if progress.total and 0 < progress.done < progress.total and seconds:
        parts.append(f"{clock((progress.total - progress.done) * seconds / progress.done)} left")
    parts += [f"{name} {number(value)}" for name, value in progress.fields.items()]
    return Row(job.name, progress.done, progress.total or None, "  ".join(parts), progress.stage)


def _percent(progress: Progress) -> str:
    return f" {100 * progress.done / progress.total:.0f} %" if progress.total else ""
