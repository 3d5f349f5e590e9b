"""Moments to kill a run at, found by watching its processes and its directory."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.processes import marked

# How often each is drawn, and the longest delay in seconds. Saves are short: chance alone would
# seldom find them.
KINDS = {
    "start": (4, 10.0),
    "launch": (1, 0.3),
    "step": (4, 0.2),
    "save": (7, 0.05),
    "publish": (4, 0.0),
}
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Moment:
    """A moment in the life of a run, and the process to be killed then.

    `kind` is one of these. start: from the command on. launch: when a launcher's workers begin.
    step: after a step was logged. save: while a save is under way. publish: when a checkpoint has
    its name, and the tracker does not name it yet.

    `ahead`: which of the steps to come (0 to 1). `delay`: seconds after it. `launcher`: it is
    killed, if there is one, else a worker: `which` (0 to 1) of them.
    """

    kind: str
    ahead: float = 0.5
    delay: float = 0.0
    launcher: bool = False
    which: float = 0.0

    @classmethod
    def draw(cls, random: Random, has_launcher: bool) -> "Moment":
        """Draw a moment by the frequencies of KINDS."""
        kinds = [kind for kind in KINDS if has_launcher or kind != "launch"]
        kind = random.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        _, longest = KINDS[kind]
        launcher = kind == "launch" or random.random() < 0.35
        return cls(kind, random.random(), longest * random.random(), launcher, random.random())


class FaultRun:
    """The visible state of a run directory, also during writes and after a kill."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"

    def tracked(self) -> int:
        """Return the step that the tracker names; 0 without one."""
        try:
            return int((self.checkpoints / TRACKER).read_text())
        except FileNotFoundError:
            return 0

    def steps(self) -> list[int]:
        """Return the steps of the visible checkpoints."""
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("iter_*"))

    def attempts(self) -> set[Path]:
        """Return the directories of saves that are under way, or were killed."""
        return set(self.checkpoints.glob(".iter_*"))

    def leftovers(self) -> list[str]:
        """Return all that a kill has left half-written."""
        hidden = [
            path for path in self.directory.rglob(".*") if path.name not in (".lock", ".metadata")
        ]
        return sorted(str(path.relative_to(self.directory)) for path in hidden)

    def rows(self) -> tuple[int, int]:
        """Return inode and number of rows of the metrics; zeros without them.

        Each start puts a new file in the place of the old one.
        """
        try:
            with open(self.directory / "metrics.jsonl", "rb") as stream:
                return os.fstat(stream.fileno()).st_ino, stream.read().count(b"\n")
        except FileNotFoundError:
            return 0, 0


class Watch:
    """An observer of a command that makes `total` steps; construct it before start."""

    def __init__(self, run: FaultRun, total: int):
        self.run = run
        self.old_attempts = run.attempts()
        self.old_file, _ = run.rows()
        self.first = max([run.tracked(), *run.steps()]) + 1
        self.total = total

    def wait(self, moment: Moment, process: subprocess.Popen, mark: str) -> bool:
        """Wait for `moment` of a new `process`; return False if it ended before."""
        # In the first half of what is to come, so that there is something left for the next kill.
        step = self.first + int(moment.ahead * max(1, (self.total - self.first + 1) // 2))
        while not self._has_come(moment.kind, step, mark):
            if process.poll() is not None:
                return False
            time.sleep(0.001)
        time.sleep(moment.delay)
        return process.poll() is None

    def _has_come(self, kind: str, step: int, mark: str) -> bool:
        # Mostly, workers have not yet arranged to die with their launcher.
        if kind == "launch":
            return any(one.rank is not None for one in marked(mark))
        if kind == "step":
            file, rows = self.run.rows()
            return file != self.old_file and rows >= step
        if kind == "save":
            return any(
                int(path.name[6:13]) >= step for path in self.run.attempts() - self.old_attempts
            )
        if kind == "publish":
            tracked = self.run.tracked()
            return any(other > tracked for other in self.run.steps() if other >= step)
        return True
