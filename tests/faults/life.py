"""One run folder whose command is killed, started again, killed again, and at last left to finish."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.ends import damaged_checkpoints, differences
from faults.moments import FaultRun, Moment, Pace, Watch
from faults.processes import marked, start, wait_until_gone

# Seconds until no process of a killed launcher is alive; and until a run, or one that has lost a worker, has come to its end.
GONE_WITHIN, OVER_WITHIN = 10.0, 180.0


@dataclass
class Kill:
    """One SIGKILL: at which moment, of what, and what the folder showed then.

    `next_start`: how the start after it began: `scratch`, `checkpoint`, `complete`, or `killed again` before it could say.
    """

    life: int
    moment: str
    target: str
    left: str
    gone_after: float
    next_start: str = "killed again"
    finished_equal: bool = False


def has_launcher(command: list[str]) -> bool:
    """Whether it starts torchrun."""
    return command[1] == "-m"


class Life:
    """Life `number`: a run of so many `steps` by `command` in `folder`, at the `pace` of this machine."""

    def __init__(self, number: int, command: list[str], folder: Path, steps: int, pace: Pace):
        self.number, self.command, self.folder, self.steps, self.pace = number, command, folder, steps, pace
        self.run, self.mark = FaultRun(folder), str(folder)
        self.failures: list[str] = []
        self.kills: list[Kill] = []
        self._starts = 0

    def live(self, moments: Iterable[Moment], reference: FaultRun) -> Iterator[Kill]:
        """Kill it at each of the `moments`, yielding each kill; then let it finish and compare it with `reference`."""
        for moment in moments:
            kill = self._start_and_kill(moment)
            if kill is None:  # it was over before the moment came
                break
            self.kills.append(kill)
            yield kill
        process = self._start()
        if (code := self._end_of(process)) != 0:
            self.failures.append(f"the last start ended with exit code {code}")
        self._tell_beginning()
        self._none_left("after the end")
        if not self.failures:
            self.failures += differences(self.run, reference, self.steps)
        for kill in self.kills:
            kill.finished_equal = not self.failures
        if not self.failures:
            shutil.rmtree(self.folder)

    def _start(self) -> subprocess.Popen:
        self._starts += 1
        return start(self.command, self.mark, self._log())

    def _log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}_start_{self._starts:02d}.log")

    def _start_and_kill(self, moment: Moment) -> Kill | None:
        watch, process = Watch(self.run, self.steps), self._start()
        victim = self._victim(moment, process) if watch.wait(moment, process, self.mark, self.pace) else None
        if victim is None:
            self._end_of(process)
            return None
        name, number = victim
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            self._end_of(process)
            return None
        killed = time.monotonic()
        self._end_of(process)
        over = time.monotonic()
        self._none_left(f"after {name} was killed")
        self._tell_beginning()
        self.failures += damaged_checkpoints(self.run)
        since = killed if name == "launcher" else over
        return Kill(self.number, moment.kind, name, self._shown(), time.monotonic() - since)

    def _victim(self, moment: Moment, process: subprocess.Popen) -> tuple[str, int] | None:
        """Name and process id of what is to be killed; None where nothing is there any more."""
        if process.poll() is not None:
            return None
        workers = [one for one in marked(self.mark) if one.parent == process.pid and one.rank is not None]
        if has_launcher(self.command):
            if moment.launcher or not workers:
                return "launcher", process.pid
            one = sorted(workers, key=lambda one: one.rank)[int(moment.which * len(workers))]
            return f"worker {one.rank}", one.number
        return "worker 0", process.pid

    def _end_of(self, process: subprocess.Popen) -> int | None:
        """Its exit code; a failure, and the end of all, where it does not come."""
        try:
            return process.wait(OVER_WITHIN)
        except subprocess.TimeoutExpired:
            self.failures.append(f"start {self._starts} was not over after {OVER_WITHIN:g} s ({self._log()})")
            self._kill_all()
            return process.wait()

    def _none_left(self, when: str) -> None:
        if left := wait_until_gone(self.mark, GONE_WITHIN):
            self.failures.append(f"start {self._starts}: alive {GONE_WITHIN:g} s {when}: {left}")
            self._kill_all()

    def _kill_all(self) -> None:
        for one in marked(self.mark):
            os.kill(one.number, signal.SIGKILL)

    def _tell_beginning(self) -> None:
        """To the kill before this start."""
        if not self.kills:
            return
        said = self._log().read_text(encoding="utf-8", errors="replace")
        for words, what in (("resuming after step", "checkpoint"), ("from new weights", "scratch"), ("is complete", "complete")):
            if words in said:
                self.kills[-1].next_start = what

    def _shown(self) -> str:
        """What the kill left in the folder beside whole checkpoints."""
        left = ["attempt"] if self.run.attempts() else []
        if any(step > self.run.tracked() for step in self.run.steps()):
            left.append("no tracker yet")
        return ", ".join(left)
