"""The processes of a command, found wherever they went: each carries a mark in its environment that its children inherit."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import runs

MARK = "MEGAENC_TEST_MARK"


@dataclass(frozen=True)
class Found:
    """A process that is alive. `rank`: that of a worker, and of what a worker has started; None for a launcher."""

    number: int
    parent: int
    rank: int | None


def start(command: list[str], mark: str, log: Path) -> subprocess.Popen:
    """Start `command` in a session of its own, marked, with one thread a process; what it says goes to `log`."""
    environment = runs.surroundings() | {MARK: mark}
    with open(log, "wb") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def marked(mark: str) -> list[Found]:
    """All processes with this mark, zombies left out: they only wait to be asked for their exit code."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted not in variables:
                continue
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
        ranks = [int(variable[5:]) for variable in variables if variable.startswith(b"RANK=")]
        if state != "Z":
            found.append(Found(int(folder.name), int(parent), ranks[0] if ranks else None))
    return found


def wait_until_gone(mark: str, seconds: float) -> list[Found]:
    """Those that are still alive after `seconds`; none as soon as there is none."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
