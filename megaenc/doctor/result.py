"""Probes of the doctor, their context and their findings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaenc.dist_env import is_multi_node

Level = Literal["ok", "note", "problem"]
GIB, MIB = 2**30, 2**20
LEVELS: tuple[Level, ...] = ("ok", "note", "problem")
"""Severities in increasing order: a note stops nothing, a problem stops or spoils a run."""


@dataclass(frozen=True)
class Finding:
    """One result of a probe: name, text, level (ok, note or problem), advice, and level if other ranks differ."""

    name: str
    """Unique within its subject."""
    result: str
    level: Level = "ok"
    advice: str = ""
    """Next step for the user, if any."""
    mismatch_level: Level = "ok"
    """Severity of a different result on another rank."""
    subject: str = ""
    """Subject of the probe, one of `SUBJECTS`."""
    scope: str = ""
    """Scope of the probe: a finding of scope "node" is expected from one rank of each node."""


def ok(name: str, result: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "ok" without advice; `mismatch_level` is the level if another rank's result differs."""
    return Finding(name, result, mismatch_level=mismatch_level)


def note(name: str, result: str, advice: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "note" with its advice, or of level "ok" if `advice` is empty."""
    return Finding(name, result, "note" if advice else "ok", advice, mismatch_level)


def problem(name: str, result: str, advice: str, mismatch_level: Level = "ok") -> Finding:
    """Return a Finding of level "problem", which stops or spoils a run, with its advice."""
    return Finding(name, result, "problem", advice, mismatch_level)


def multi_node_problem(name: str, result: str, advice: str) -> Finding:
    """Return a Finding of level "problem" in a job on several nodes, of level "note" in a job on one node."""
    return (problem if is_multi_node() else note)(name, result, advice)


@dataclass(frozen=True)
class ProbeContext:
    """Arguments shared by all probes: run directory, timeout, environment variables, and root of /sys, /proc, /dev."""

    save: str = "."
    """Run directory, which may not exist yet."""
    timeout: float = 60.0
    """Seconds to wait for a program or another process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the command before megaenc changed it."""
    root: Path = Path("/")
    """Directory that contains /sys, /proc and /dev."""


@dataclass(frozen=True)
class Probe:
    """One check for a subprocess: "module:name" to call, ranks, multiple of --timeout, advice if it hangs or crashes.

    `function`, "module:name", is called with a `ProbeContext` and `arguments`; it returns findings and probes to run next.
    """

    subject: str
    name: str
    """Name in the progress line, and of the finding if the probe hangs or crashes."""
    function: str
    scope: Literal["rank", "node", "ranks"] = "rank"
    """Ranks that run it: each rank, one rank of each node, or all ranks together."""
    arguments: tuple[Any, ...] = ()
    timeout_factor: float = 1.0
    """Time limit in multiples of --timeout."""
    advice: str = "a run would hang or die there too"
    """Advice if the probe hangs or crashes."""


class ProbeAborted(Exception):
    """Error that ends a probe with one finding, after which probes of the same scope cannot continue."""

    def __init__(self, finding: Finding):
        super().__init__(finding.result)
        self.finding = finding


def read_kernel_file(file: Path) -> str:
    """Return the stripped text of a file under /proc or /sys, or an empty string if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def has_accelerators(context: ProbeContext) -> bool:
    """Return whether the machine has NVIDIA or AMD device files in /dev, without calling a driver."""
    return any((context.root / "dev").glob("nvidia[0-9]*")) or (context.root / "dev/kfd").exists()
