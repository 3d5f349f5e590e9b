"""A stage of a study that can be done: what the executor knows of it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megaenc.errors import InputError
from megaenc.study.graph import Stage


class Node(Protocol):
    """A stage that can be done: what the executor knows of it."""

    id: str
    needs: tuple[str, ...]
    processes: int
    """That train together, each on a device of its own."""
    unit: str
    """What its progress counts."""
    work: float
    """What its time grows with, among stages of its kind."""
    planned: float | None
    """Seconds that it takes by the plan; None where the plan does not know."""

    def command(self) -> list[str]:
        """The words of the next command that is left to do."""

    def done(self) -> bool:
        """Whether what it makes is there."""

    def progress(self) -> tuple[float, float]:
        """How much of how much is done."""

    def check(self) -> None:
        """InputError where its folder holds something else than the manifest says now."""


@dataclass(frozen=True)
class OfStage:
    """What the nodes of all kinds have in common."""

    stage: Stage
    study: Path

    @property
    def id(self) -> str:
        """That of the stage."""
        return self.stage.id

    @property
    def needs(self) -> tuple[str, ...]:
        """Those of the stage."""
        return self.stage.needs


def kind_of(node: Node) -> str:
    """corpus, pretrain, export or finetune."""
    return node.id.partition("/")[0]


def name_of(node: Node) -> str:
    """What follows the kind."""
    return node.id.partition("/")[2] or node.id


def megaenc(*words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)) -> list[str]:
    """A command of this package as words to start; under torchrun where there are several processes or machines."""
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return [sys.executable, "-m", "megaenc", *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes)]
    return [*torchrun, "-m", "megaenc", *words]


def changed(folder: Path, what: str) -> InputError:
    return InputError(
        f"{folder}: made from another manifest: {what}; take the change back, remove that folder and what was made of it, "
        "or choose another --output"
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """What is in a file; nothing where there is none, or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
