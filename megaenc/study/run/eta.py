"""Estimate of the time that the stages of a study still take."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megaenc.study.run.stage import StageRunner
from megaenc.study.run.stage_log import log_path, read_attempts, total_seconds


class EtaEstimator:
    """Estimator of the seconds that the stages of a study still take.

    `EtaEstimator(stages, study)` reads the logs of the stages that are done; `record_progress` and
    `record_duration` add what happens later. The estimates are `remaining_seconds` and
    `longest_chains`. The duration of a stage is that of logged stages of the same kind by amount of
    work, or else its `planned_seconds`, less the completed fraction.
    """

    def __init__(self, stages: Iterable[StageRunner], study: Path) -> None:
        """Read the durations of the stages that are done from their logs.

        Args:
            stages: In an order in which each stage is after those that it needs.
        """
        self._stages = {stage.id: stage for stage in stages}
        self._fractions: dict[str, float] = {}
        # By kind: seconds, work.
        self._durations: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for stage in self._stages.values():
            self._fractions[stage.id] = float(stage.is_done())
            attempts = read_attempts(log_path(study, stage.id)) if self._fractions[stage.id] else []
            seconds = total_seconds(attempts)
            was_killed = any(attempt.end_time is None for attempt in attempts)
            if seconds and not was_killed:
                self.record_duration(stage, seconds)

    def record_duration(self, stage: StageRunner, seconds: float, fraction: float = 1.0) -> None:
        """Mark a stage as done; `fraction` of its work, from 0 to 1, took `seconds`.

        Other stages of its kind are then estimated from it too.
        """
        self._fractions[stage.id] = 1.0
        sums = self._durations[_stage_kind(stage)]
        sums[0] += seconds
        sums[1] += fraction * stage.work

    def record_progress(self, stage: StageRunner, fraction: float) -> None:
        """Set the completed fraction of a stage, from 0 to 1, in place of an earlier one."""
        self._fractions[stage.id] = fraction

    def _remaining(self, stage: StageRunner) -> float | None:
        """Return the remaining seconds of a stage; None if they are unknown."""
        seconds, work = self._durations[_stage_kind(stage)]
        total = seconds * stage.work / work if work else stage.planned_seconds
        return None if total is None else total * (1 - self._fractions[stage.id])

    def remaining_seconds(self, slots: int) -> float | None:
        """Return the seconds until all stages are done; None if they are unknown.

        They are at least those of the longest chain, None if the seconds of an unfinished stage are
        unknown, and 0 if all stages are done.

        Args:
            slots: Number of processes at a time, at least 1.
        """
        remaining = [
            (stage.processes, self._remaining(stage))
            for id, stage in self._stages.items()
            if self._fractions[id] < 1
        ]
        if any(seconds is None for _, seconds in remaining):
            return None
        return max(
            [
                sum(processes * seconds for processes, seconds in remaining) / slots,
                *self.longest_chains().values(),
            ]
        )

    def longest_chains(self) -> dict[str, float]:
        """Return the seconds left of each stage's longest chain of stages, by id.

        A chain begins with the stage and continues with stages that need it, directly or not.
        Unknown seconds count 0.
        """
        chains: dict[str, float] = {}
        later: dict[str, float] = defaultdict(float)
        for id, stage in reversed(self._stages.items()):
            chains[id] = later[id] + (self._remaining(stage) or 0.0)
            for need in stage.needs:
                later[need] = max(later[need], chains[id])
        return chains


def _stage_kind(stage: StageRunner) -> str:
    """Return the kind of a stage, from its id."""
    return stage.id.partition("/")[0]
