"""Progress display of a grid: a row per running job and one for the grid.

Plain lines are printed if stdout is not a terminal.
"""

import time
from collections.abc import Mapping

from megaenc.console import ProgressLine, ProgressRow, format_duration, format_number
from megaenc.finetune.job import FinetuneJob, RunProgress

# Start and length of each stage as fractions of a run: a rule of thumb for the time left.
_STAGES = {
    "loading": (0.0, 0.05),
    "training": (0.05, 0.65),
    "validation": (0.7, 0.15),
    "test": (0.85, 0.15),
}


def estimate_completion(progress: RunProgress) -> float:
    """Return the estimated fraction of a run that is done, 0 to 1.

    The estimate uses the run's stage and the progress in the stage, so it falls when retrieval
    begins with another data set.
    """
    begin, length = _STAGES[progress.stage]
    return begin + length * (min(progress.done / progress.total, 1) if progress.total else 0)


class GridProgress(ProgressLine):
    """Progress display of a grid of `runs` runs, with rows for it and running jobs.

    It is a context manager. Plain lines are printed if stdout is not a terminal.
    """

    def __init__(self, runs: int) -> None:
        super().__init__("grid", total=runs, row_widths=(10, 16))
        self._stage_starts: dict[tuple[FinetuneJob, str], float] = {}

    def show(self, running: Mapping[FinetuneJob, RunProgress], finished: int, failed: int) -> None:
        """Display the counts of jobs, the time left, and the progress of running jobs.

        Args:
            running: Latest progress of each running job.
            finished: Number of jobs with results.
            failed: Number of other jobs that have ended.
        """
        now = time.monotonic()
        stages = {(job, progress.stage) for job, progress in running.items()}
        self._stage_starts = {stage: self._stage_starts.get(stage, now) for stage in stages}
        done = (
            finished + failed + sum(estimate_completion(progress) for progress in running.values())
        )
        words = f"grid: {finished:,} of {self.total:,} finished" + (
            f", {failed:,} failed" if failed else ""
        )
        rows = {None: ProgressRow(words, done, self.total, "".join(self.time_left(now)))}
        for job, progress in running.items():
            seconds = now - self._stage_starts[job, progress.stage]
            parts = []
            if 0 < progress.done < progress.total and seconds:
                left = (progress.total - progress.done) * seconds / progress.done
                parts.append(f"{format_duration(left)} left")
            parts += [f"{name} {format_number(value)}" for name, value in progress.fields.items()]
            rows[job] = ProgressRow(
                job.name, progress.done, progress.total or None, "  ".join(parts), progress.stage
            )
        first = ""
        if running:
            job, progress = next(iter(running.items()))
            percent = f" {100 * progress.done / progress.total:.0f} %" if progress.total else ""
            first = f" ({job.name}: {progress.stage}{percent})"
        counts = {
            "finished": finished,
            **({"failed": failed} if failed else {}),
            "running": len(running),
        }
        self.update(done, description=f"grid{first}", rows=rows, **counts)
