"""What a grid shows while it runs: a row for each running job and one for the whole, or plain lines where nobody watches."""

import time
from collections.abc import Mapping

from megaenc.console import ProgressLine, ProgressRow, format_duration, format_number
from megaenc.finetune.grid.jobs import FinetuneJob, RunProgress

# How much of a run has gone by at the begin of each stage, and how much it takes: a rule of thumb for the time left.
_STAGES = {"loading": (0.0, 0.05), "training": (0.05, 0.65), "validation": (0.7, 0.15), "test": (0.85, 0.15)}


def estimate_completion(progress: RunProgress) -> float:
    """About how much of its run is done, from 0 to 1."""
    begin, length = _STAGES[progress.stage]
    return begin + length * (min(progress.done / progress.total, 1) if progress.total else 0)


class GridProgress(ProgressLine):
    """How far a grid of `runs` is."""

    def __init__(self, runs: int) -> None:
        super().__init__("grid", total=runs, row_widths=(10, 16))
        self._stage_starts: dict[tuple[FinetuneJob, str], float] = {}  # the stages of the jobs under way

    def show(self, running: Mapping[FinetuneJob, RunProgress], finished: int, failed: int) -> None:
        """Say which runs are under way and how many of the grid have ended."""
        now = time.monotonic()
        stages = {(job, progress.stage) for job, progress in running.items()}
        self._stage_starts = {stage: self._stage_starts.get(stage, now) for stage in stages}
        done = finished + failed + sum(estimate_completion(progress) for progress in running.values())
        words = f"grid: {finished:,} of {self.total:,} finished" + (f", {failed:,} failed" if failed else "")
        rows = {None: ProgressRow(words, done, self.total, "".join(self.time_left(now)))}
        rows |= {
            job: _format_row(job, progress, now - self._stage_starts[job, progress.stage]) for job, progress in running.items()
        }
        first = next((f" ({job.name}: {progress.stage}{_format_percent(progress)})" for job, progress in running.items()), "")
        counts = {"finished": finished, **({"failed": failed} if failed else {}), "running": len(running)}
        self.update(done, description=f"grid{first}", rows=rows, **counts)


def _format_row(job: FinetuneJob, progress: RunProgress, seconds: float) -> ProgressRow:
    """The row of a run whose stage has taken `seconds` so far."""
    parts = []
    if progress.total and 0 < progress.done < progress.total and seconds:
        parts.append(f"{format_duration((progress.total - progress.done) * seconds / progress.done)} left")
    parts += [f"{name} {format_number(value)}" for name, value in progress.fields.items()]
    return ProgressRow(job.name, progress.done, progress.total or None, "  ".join(parts), progress.stage)


def _format_percent(progress: RunProgress) -> str:
    return f" {100 * progress.done / progress.total:.0f} %" if progress.total else ""
