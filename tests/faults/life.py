"""A run directory whose command is killed and restarted until it finishes."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from faults.ends import damaged_checkpoints, differences
from faults.moments import FaultRun, Moment, Watch
from faults.processes import marked, start, wait_until_gone

# Seconds until no process of a killed launcher is alive; and until a run, or one that has lost a
# worker, has come to its end.
GONE_WITHIN = 10.0
OVER_WITHIN = 180.0


class Life:
    """A run of `command` in `directory` with all its kills and failures.

    `steps`: the number of its last step. `kills`: moment and target of each kill.
    """

    def __init__(self, command: list[str], directory: Path, steps: int):
        self.command = command
        self.run = FaultRun(directory)
        self.mark = str(directory)
        self.steps = steps
        self.kills: list[str] = []
        self.failures: list[str] = []
        self._starts = 0

    def kill_at(self, moment: Moment) -> bool:
        """Start the command and kill it; return False if it ended before the moment."""
        watch = Watch(self.run, self.steps)
        process = self._start()
        has_come = watch.wait(moment, process, self.mark)
        if has_come:
            name, number = self._choose_victim(moment, process)
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            self.kills.append(f"{moment.kind}: {name}")
        self._end_of(process)
        self._check_that_none_is_left()
        self.failures += damaged_checkpoints(self.run)
        return has_come

    def finish(self, reference: FaultRun) -> None:
        """Let the command finish, and compare the run with `reference`."""
        code = self._end_of(self._start())
        if code != 0:
            self.failures.append(f"the last start ended with exit code {code}")
        self._check_that_none_is_left()
        if not self.failures:
            self.failures += differences(self.run, reference, self.steps)

    def _start(self) -> subprocess.Popen:
        self._starts += 1
        directory = self.run.directory
        return start(
            self.command,
            self.mark,
            directory.with_name(f"{directory.name}_start_{self._starts:02d}.log"),
        )

    def _choose_victim(self, moment: Moment, process: subprocess.Popen) -> tuple[str, int]:
        """Return name and process id of the process to be killed."""
        workers = [
            one for one in marked(self.mark) if one.parent == process.pid and one.rank is not None
        ]
        if moment.launcher or not workers:
            return "command", process.pid
        workers.sort(key=lambda one: one.rank)
        chosen = workers[int(moment.which * len(workers))]
        return f"worker {chosen.rank}", chosen.number

    def _end_of(self, process: subprocess.Popen) -> int:
        """Return the exit code; if there is none in time, note a failure and kill all."""
        try:
            return process.wait(OVER_WITHIN)
        except subprocess.TimeoutExpired:
            self.failures.append(f"start {self._starts} was not over after {OVER_WITHIN:g} s")
            self._kill_all()
            return process.wait()

    def _check_that_none_is_left(self) -> None:
        if left := wait_until_gone(self.mark, GONE_WITHIN):
            self.failures.append(
                f"start {self._starts}: alive {GONE_WITHIN:g} s after the end: {left}"
            )
            self._kill_all()

    def _kill_all(self) -> None:
        for one in marked(self.mark):
            os.kill(one.number, signal.SIGKILL)
