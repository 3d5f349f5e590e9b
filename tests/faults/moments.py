"""When a run is killed: at a moment of its life that is found by looking at its processes and its folder from outside."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.processes import marked

# How often each is drawn. Saves are short: chance alone would seldom find them.
KINDS = {"start": 4, "launch": 1, "step": 4, "save": 7, "publish": 4}
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Pace:
    """How long things take here, in seconds: from the command to the first step, a step, and a save."""

    start: float
    step: float
    save: float


@dataclass(frozen=True)
class Moment:
    """`kind`; which of the steps to come (`ahead`) and how far into the moment (`into`, both 0 to 1); what is killed.

    start: between the command and its first step. launch: when a launcher's workers begin. step: after a step was logged. save:
    while a save is under way. publish: when a checkpoint has its name, and the tracker does not name it yet.

    `launcher`: it is killed, if there is one, else a worker: `which` (0 to 1) of them.
    """

    kind: str
    ahead: float = 0.5
    into: float = 0.5
    launcher: bool = False
    which: float = 0.0

    @classmethod
    def draw(cls, random: Random, has_launcher: bool) -> "Moment":
        """Any, in the shares of KINDS."""
        kinds = [kind for kind in KINDS if has_launcher or kind != "launch"]
        kind = random.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        launcher = kind == "launch" or random.random() < 0.35
        return cls(kind, random.random(), random.random(), launcher, random.random())


class FaultRun:
    """What a run folder shows, also while it is written to and after a kill."""

    def __init__(self, folder: Path):
        self.folder, self.checkpoints = folder, folder / "checkpoints"

    def tracked(self) -> int:
        """The step that the tracker names; 0 without one."""
        try:
            return int((self.checkpoints / TRACKER).read_text())
        except FileNotFoundError:
            return 0

    def steps(self) -> list[int]:
        """The steps of the checkpoints that can be seen."""
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("iter_*"))

    def attempts(self) -> set[Path]:
        """The folders of saves that are under way, or were killed."""
        return set(self.checkpoints.glob(".iter_*"))

    def leftovers(self) -> list[str]:
        """All that a kill has left half-written."""
        return sorted(
            str(path.relative_to(self.folder)) for path in self.folder.rglob(".*") if path.name not in (".lock", ".metadata")
        )

    def rows(self) -> tuple[int, int]:
        """Which file holds the metrics now (each start puts a new one in its place) and how many rows; zeros without one."""
        try:
            with open(self.folder / "metrics.jsonl", "rb") as stream:
                return os.fstat(stream.fileno()).st_ino, stream.read().count(b"\n")
        except FileNotFoundError:
            return 0, 0


class Watch:
    """Looks at a command that is about to start and saves to `run`: construct it before."""

    def __init__(self, run: FaultRun, total: int):
        self.run, self.total = run, total
        self.old_attempts, (self.old_rows, _) = run.attempts(), run.rows()

    def wait(self, moment: Moment, process: subprocess.Popen, mark: str, pace: Pace) -> bool:
        """Wait for `moment` of the `process` that has just been started; False where it ended before."""
        self.process, began = process, time.monotonic()
        if moment.kind == "start":
            return self._until(lambda: time.monotonic() - began >= moment.into * pace.start or self._has_logged(1), every=0.01)
        if moment.kind == "launch":  # mostly before the workers have seen to it that they die with their launcher
            born = self._until(lambda: any(one.rank is not None for one in marked(mark)), every=0.002)
            return born and self._sleep(0.3 * moment.into**2)
        first = max([self.run.tracked(), *self.run.steps()]) + 1
        # In the first half of what is to come, so that there is something left for the next kill.
        step = first + int(moment.ahead * max(1, (self.total - first + 1) // 2))
        if moment.kind == "step":
            return self._until(lambda: self._has_logged(step), every=0.001) and self._sleep(moment.into * pace.step)
        if not self._until(lambda: self._fresh_attempt(step), every=0.001):
            return False
        attempt = self._fresh_attempt(step)
        if moment.kind == "save":
            return self._sleep(moment.into * pace.save)
        target = attempt.with_name(attempt.name[1:].partition(".")[0]) if attempt else None
        return bool(target) and self._until(lambda: target.exists() and not attempt.exists(), every=0)

    def _has_logged(self, step: int) -> bool:
        file, rows = self.run.rows()
        return file != self.old_rows and rows >= step

    def _fresh_attempt(self, step: int) -> Path | None:
        """That of a save of `step` or a later one."""
        return next((path for path in self.run.attempts() - self.old_attempts if int(path.name[6:13]) >= step), None)

    def _until(self, come: Callable[[], object], every: float) -> bool:
        while not come():
            if self.process.poll() is not None:
                return False
            if every:
                time.sleep(every)
        return True

    def _sleep(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.process.poll() is None
