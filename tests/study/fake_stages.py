"""Stages that run a line of shell, for tests of the executor."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError

SUCCEED = "touch $MADE"
SAVE_WHEN_TOLD = "trap 'touch $MADE.saved; exit 75' TERM; echo $$ > $MADE.pid; "
SAVE_WHEN_TOLD += "n=0; while [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done; "


@dataclass(frozen=True)
class FakeStage:
    """Stage that is done when its file exists.

    The start and the end of its command are appended to `calls`.
    """

    id: str
    study: Path
    needs: tuple[str, ...] = ()
    script: str = SUCCEED
    processes: int = 1
    work: float = 1.0
    planned_seconds: float | None = 10.0
    unit: str = "parts"
    wrong: str = ""
    """message that `check` raises"""

    @property
    def made(self) -> Path:
        """Return the output file."""
        return self.study / f"{self.id.replace('/', '_')}.made"

    @property
    def directory(self) -> Path:
        """Return the output file."""
        return self.made

    def prepare(self) -> None:
        """Do nothing."""

    def remaining_commands(self) -> list[list[str]]:
        """Return the shell command unless it is done."""
        names = f"MADE={self.made} CALLS={self.study / 'calls'}"
        script = (
            f"{names}; echo begin {self.id} >> $CALLS; {self.script}\necho end {self.id} >> $CALLS"
        )
        return [] if self.is_done() else [["sh", "-c", script]]

    def is_done(self) -> bool:
        """Return whether the output file exists."""
        return self.made.exists()

    def progress(self) -> tuple[float, float]:
        """Return 1 of 1 if it is done, otherwise 0 of 1."""
        return float(self.is_done()), 1

    def check(self) -> None:
        """Raise InputError if `wrong` is set."""
        if self.wrong:
            raise InputError(self.wrong)


def calls(study: Path) -> list[str]:
    """Return the starts and ends of commands, in order."""
    file = study / "calls"
    return file.read_text().splitlines() if file.exists() else []


def start_python(code: str, started: Path) -> subprocess.Popen:
    """Start a process of `code`; return when `started` has its stage's process id."""
    import runs  # not found by the processes that import this module

    head = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom pathlib import "
        "Path\n"
    )
    head += "from fake_stages import SAVE_WHEN_TOLD, SUCCEED, FakeStage\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + code],
        env=runs.surroundings(),
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: started.exists() and started.read_text().strip(), process)
    return process


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 90
) -> None:
    """Wait for a condition while the process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)
