"""Stages that are a line of shell each, for the executor."""

from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError

WELL = "touch $MADE"


@dataclass(frozen=True)
class Fake:
    """It is done when its file is there. What it begins is written to `calls`, one line each."""

    id: str
    study: Path
    needs: tuple[str, ...] = ()
    script: str = WELL
    processes: int = 1
    work: float = 1.0
    planned_seconds: float | None = 10.0
    unit: str = "parts"
    wrong: str = ""
    """what `check` finds"""

    @property
    def made(self) -> Path:
        return self.study / f"{self.id.replace('/', '_')}.made"

    @property
    def folder(self) -> Path:
        return self.made

    def prepare(self) -> None:
        pass

    def next_command(self) -> list[str]:
        names = f"MADE={self.made} CALLS={self.study / 'calls'}"
        return ["sh", "-c", f"{names}; echo begin {self.id} >> $CALLS; {self.script}\necho end {self.id} >> $CALLS"]

    def is_done(self) -> bool:
        return self.made.exists()

    def progress(self) -> tuple[float, float]:
        return float(self.is_done()), 1

    def check(self) -> None:
        if self.wrong:
            raise InputError(self.wrong)


def calls(study: Path) -> list[str]:
    """What began and what came to its end, in order."""
    file = study / "calls"
    return file.read_text().splitlines() if file.exists() else []


def by_id(*nodes: Fake) -> dict[str, Fake]:
    return {node.id: node for node in nodes}
