"""Processes of a command, found by a mark in the environment that they inherit."""

import contextlib
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import runs

MARK = "MEGAENC_TEST_MARK"


@dataclass(frozen=True)
class Found:
    """A process that is alive.

    `rank`: that of a worker, and of what a worker has started; None for a launcher.
    """

    number: int
    parent: int
    rank: int | None


def start(command: list[str], mark: str, log: Path) -> subprocess.Popen:
    """Start `command` in its own session, marked, with its output in `log`.

    Each process has one thread.
    """
    environment = runs.surroundings() | {MARK: mark}
    with open(log, "wb") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def marked(mark: str) -> list[Found]:
    """Return all processes with this mark, except for zombies.

    These only wait to be asked for their exit code.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is somebody else's
            variables = process.environ()
            if variables.get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                rank = int(variables["RANK"]) if "RANK" in variables else None
                found.append(Found(process.pid, process.ppid(), rank))
    return found


def wait_until_gone(mark: str, seconds: float) -> list[Found]:
    """Return those still alive after `seconds`; none as soon as there is none."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
