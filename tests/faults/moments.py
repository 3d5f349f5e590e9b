"""When a run is killed: at a moment of its life that is found by looking at its processes and its folder from outside."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.processes import marked

# How often each is drawn, and the longest delay in seconds. Saves are short: chance alone would seldom find them.
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
    """`kind`; which of the steps to come (`ahead`, 0 to 1); seconds after it (`delay`); what is killed.

    start: from the command on. launch: when a launcher's workers begin. step: after a step was logged. save: while a save is
    under way. publish: when a checkpoint has its name, and the tracker does not name it yet.

    `launcher`: it is killed, if there is one, else a worker: `which` (0 to 1) of them.
    """

    kind: str
    ahead: float = 0.5
    delay: float = 0.0
    launcher: bool = False
    which: float = 0.0

    @classmethod
    def draw(cls, random: Random, has_launcher: bool) -> "Moment":
        """Any, in the shares of KINDS."""
        kinds = [kind for kind in KINDS if has_launcher or kind != "launch"]
        kind = random.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        _, longest = KINDS[kind]
        launcher = kind == "launch" or random.random() < 0.35
        return cls(kind, random.random(), longest * random.random(), launcher, random.random())


class FaultRun:
    """What a run folder shows, also while it is written to and after a kill."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

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
        hidden = [
            path for path in self.folder.rglob(".*") if path.name not in (".lock", ".metadata")
        ]
        return sorted(str(path.relative_to(self.folder)) for path in hidden)

    def rows(self) -> tuple[int, int]:
        """Which file holds the metrics now (each start puts a new one in its place) and how many rows; zeros without one."""
        try:
            with open(self.folder / "metrics.jsonl", "rb") as stream:
                return os.fstat(stream.fileno()).st_ino, stream.read().count(b"\n")
        except FileNotFoundError:
            return 0, 0


class Watch:
    """Looks at a command that is about to start and makes `total` steps in `run`: construct it before."""

    def __init__(self, run: FaultRun, total: int):
        self.run = run
        self.old_attempts = run.attempts()
        self.old_file, _ = run.rows()
        self.first = max([run.tracked(), *run.steps()]) + 1
        self.total = total

    def wait(self, moment: Moment, process: subprocess.Popen, mark: str) -> bool:
        """Wait for `moment` of the `process` that has just been started; False where it ended before."""
        # In the first half of what is to come, so that there is something left for the next kill.
        step = self.first + int(moment.ahead * max(1, (self.total - self.first + 1) // 2))
        while not self._has_come(moment.kind, step, mark):
            if process.poll() is not None:
                return False
            time.sleep(0.001)
        time.sleep(moment.delay)
        return process.poll() is None

    def _has_come(self, kind: str, step: int, mark: str) -> bool:
        if (
            kind == "launch"
        ):  # mostly before the workers have seen to it that they die with their launcher
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
