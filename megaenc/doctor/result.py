"""Findings of the doctor's checks, and the arguments that all checks share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megaenc.dist_env import is_multi_node

Level = Literal["ok", "note", "problem"]
GIB = 2**30
MIB = 2**20
LEVELS: tuple[Level, ...] = ("ok", "note", "problem")
"""Severities in increasing order: a note stops nothing, a problem stops or spoils a run."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, with its level: ok, note or problem.

    Checks build it by `ok`, `note` or `problem`. `name` is unique within a subject; `result` and
    `advice`, the user's next step, are text. `mismatch_level` is the level to report if another
    rank's result differs. `run_checks` sets `subject` and `scope`.
    """

    name: str
    """Unique within its subject."""
    result: str
    level: Level = "ok"
    advice: str = ""
    """Next step for the user, if any."""
    mismatch_level: Level = "ok"
    """Severity of a different result on another rank."""
    subject: str = ""
    """Subject of the check, one of `SUBJECTS`."""
    scope: str = ""
    """Scope of the check: a finding of scope "node" is expected from one rank of each node."""


def ok(name: str, result: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "ok", without advice.

    Args:
        mismatch_level: Level to report if another rank's ok result differs; "ok": not reported.
    """
    return Finding(name, result, mismatch_level=mismatch_level)


def note(name: str, result: str, advice: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "note", or of level "ok" if `advice` is empty.

    Args:
        mismatch_level: Level at which another rank's different result is reported, unless its own
            is worse.
    """
    return Finding(name, result, "note" if advice else "ok", advice, mismatch_level)


def problem(name: str, result: str, advice: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "problem", which stops or spoils a run.

    Args:
        mismatch_level: Level at which another rank's different result is reported, unless its own
            is worse.
    """
    return Finding(name, result, "problem", advice, mismatch_level)


def multi_node_problem(name: str, result: str, advice: str) -> Finding:
    """Return a `problem` in a job on several nodes, else a `note`, by `is_multi_node`."""
    return (problem if is_multi_node() else note)(name, result, advice)


@dataclass(frozen=True)
class CheckContext:
    """Arguments shared by all checks.

    `save` is the path of the run directory, a str, which may not exist yet; `timeout` the seconds
    to wait for a program or another process; `environment` that of the command before megaenc
    changed it; `root` the directory that contains /sys, /proc and /dev. The defaults are ".", 60,
    {} and /.
    """

    save: str = "."
    """Run directory, which may not exist yet."""
    timeout: float = 60.0
    """Seconds to wait for a program or another process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the command before megaenc changed it."""
    root: Path = Path("/")
    """Directory that contains /sys, /proc and /dev."""


def read_kernel_file(file: Path) -> str:
    """Return the stripped text of a file under /proc or /sys, "" if it is unreadable."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def has_accelerators(context: CheckContext) -> bool:
    """Return whether `context.root`/dev has devices: NVIDIA's nvidiaN or AMD's kfd.

    No driver is called. torch may be unable to use these devices.
    """
    return any((context.root / "dev").glob("nvidia[0-9]*")) or (context.root / "dev/kfd").exists()
