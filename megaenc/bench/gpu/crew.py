"""Processes that do the jobs, one at a time: killed when a job takes too long, and replaced when one has failed."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaenc.processes import below, python_command, python_environment


class Failed(Exception):
    """A job did not come to its end; the message says why."""


class Crew:
    """Use as a context manager.

    `fresh`: each job has a process of its own, since what one does to an accelerator's memory the next would suffer from; the
    process after it loads its libraries meanwhile. `log`: what they and their libraries say.
    """

    def __init__(self, environment: dict[str, str], fresh: bool, log: Path) -> None:
        self._environment, self._fresh, self._log = environment, fresh, log
        self._ready: _Worker | None = None
        self._working: _Worker | None = None

    def __enter__(self) -> "Crew":
        self._ready = self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in filter(None, (self._working, self._ready)):
            worker.end()

    def _begin(self) -> "_Worker":
        return _Worker(self._environment, self._log)

    def run(self, job: dict[str, Any], seconds: float, left: float) -> Iterator[tuple[list[str], Any]]:
        """What the job finds, as it finds it. Raises Failed.

        It is told to end after 0.9 `seconds` and killed after `seconds`, counted from when its process is ready; and killed in
        any case `left` seconds from now.
        """
        latest = time.monotonic() + left
        self._working, self._ready = self._ready or self._begin(), None
        worker = self._working
        try:
            if not worker.ready:
                worker.answer(latest)
                worker.ready = True
            if self._fresh:
                self._ready = self._begin()
            ends = min(latest, time.monotonic() + seconds)
            # By the clock that all processes of a machine have.
            worker.send(job | {"deadline": ends - 0.1 * seconds})
            while "end" not in (answer := worker.answer(ends)):
                yield answer["path"], answer["value"]
            if not self._fresh:
                self._ready, self._working = worker, None
            if answer["end"] is not None:
                raise Failed(answer["end"])
        finally:
            if self._working:
                self._working.end()
            self._working = None


class _Worker:
    """A process that waits for jobs."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.ready, self._rest = False, b""
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(
                below(python_command("-m", "megaenc.bench.gpu.worker")),
                env=python_environment() | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,  # Ctrl-C comes to this process alone, and `end` to whatever the worker has begun
            )

    def send(self, job: dict[str, Any]) -> None:
        """Raises Failed where there is nobody to take it."""
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"its process had ended, with {self._ended()}") from None

    def answer(self, ends: float) -> dict[str, Any]:
        """Its next line. Raises Failed at `ends`, or when it is gone."""
        while b"\n" not in self._rest:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise Failed("its time was over")
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            if not some:
                raise Failed(f"its process ended by itself, with {self._ended()}")
            self._rest += some
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _ended(self) -> int:
        """With which code it ended by itself."""
        # Not yet reaped: its number, which is its session's too, stays its own.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.end()
        return self.process.returncode

    def end(self) -> None:
        """Whatever it does, and with all that it has begun: compilers, for one."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was not yet written
                pipe.close()
