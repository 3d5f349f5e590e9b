"""What probes are, what they are told and what they find."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaenc.dist_env import several_nodes

Level = Literal["ok", "note", "problem"]
GIB, MIB = 2**30, 2**20
LEVELS: tuple[Level, ...] = ("ok", "note", "problem")
"""From harmless to what will stop or spoil a run; a note is worth knowing and stops nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    """Unique within its subject."""
    found: str
    level: Level = "ok"
    advice: str = ""
    """What to do next, if anything."""
    alike: Level = "ok"
    """How bad it is if another rank has found something else."""
    subject: str = ""
    """That of its probe, as is the next."""
    where: str = ""
    """What is looked at once on a node is not missed on the node's other ranks."""


def ok(what: str, found: str, alike: Level = "ok") -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(what, found, alike=alike)


def note(what: str, found: str, advice: str, alike: Level = "ok") -> Finding:
    """Return a finding that is worth knowing, if there is `advice`; else one that asks for nothing."""
    return Finding(what, found, "note" if advice else "ok", advice, alike)


def problem(what: str, found: str, advice: str, alike: Level = "ok") -> Finding:
    """Return a finding that stops or spoils a run."""
    return Finding(what, found, "problem", advice, alike)


def problem_between_nodes(what: str, found: str, advice: str) -> Finding:
    """Return a problem of a run on several nodes, a note on one, which does without what is wrong."""
    return (problem if several_nodes() else note)(what, found, advice)


@dataclass(frozen=True)
class ProbeContext:
    """What each probe is told."""

    save: str = "."
    """The folder of the run, which may not be there yet."""
    seconds: float = 60.0
    """How long it may wait for a program or another process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of the command, as it was given."""
    root: Path = Path("/")
    """Where /sys, /proc and /dev are looked for."""


@dataclass(frozen=True)
class Probe:
    """Something to look at, which may hang or die without the others.

    `function`, "module:name", called with an Asked and `arguments`, returns findings, and probes to be carried out next.
    """

    subject: str
    name: str
    """What is being looked at, for the line of progress and where nothing comes of it."""
    function: str
    where: Literal["rank", "node", "ranks"] = "rank"
    """On each rank, on one rank of each node, or on all ranks together."""
    arguments: tuple[Any, ...] = ()
    patience: float = 1.0
    """How many times --timeout it has."""
    advice: str = "a run would hang or die there too"
    """What to do where it hangs or dies."""


class ProbeAborted(Exception):
    """A probe ended with a finding that leaves nothing for the like of it to go on from."""

    def __init__(self, finding: Finding):
        super().__init__(finding.found)
        self.finding = finding


def text_of(file: Path) -> str:
    """Return what stands in a file of the kernel, without space around it; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def accelerated(asked: ProbeContext) -> bool:
    """Return whether the machine has accelerators, without asking a driver."""
    return any((asked.root / "dev").glob("nvidia[0-9]*")) or (asked.root / "dev/kfd").exists()
