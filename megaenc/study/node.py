"""A stage of a study that can be done: what the executor knows of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megaenc.errors import InputError
from megaenc.processes import python_command
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
    folder: Path
    """Where what it makes is."""

    def prepare(self) -> None:
        """Write down what its folder has to remember; called before its first command."""

    def command(self) -> list[str]:
        """The words of the next command that is left to do."""

    def done(self) -> bool:
        """Whether what it makes is there; `finished` asks what it needs too."""

    def progress(self) -> tuple[float, float]:
        """How much of how much is done."""

    def check(self) -> None:
        """Changed where its folder holds something else than the manifest says, or was made of something else than is there."""


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

    def prepare(self) -> None:
        """Nothing."""


def finished(nodes: Iterable[Node]) -> set[str]:
    """The ids of those that are done with all that they need; `nodes` come after what they need, if that is among them.

    What is left when that is made again is still to be compared with it (`Node.check`).
    """
    known, found = set(), set()
    for node in nodes:
        known.add(node.id)
        if node.done() and all(need in found or need not in known for need in node.needs):
            found.add(node.id)
    return found


def kind_of(node: Node) -> str:
    """corpus, pretrain, export or finetune."""
    return node.id.partition("/")[0]


def name_of(node: Node) -> str:
    """What follows the kind."""
    return node.id.partition("/")[2] or node.id


def megaenc(*words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)) -> list[str]:
    """A command of this package as words to start; under torchrun where there are several processes or machines."""
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return python_command("-m", "megaenc", *words)
    torchrun = python_command("-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes))
    return [*torchrun, "-m", "megaenc", *words]


class Changed(InputError):
    """A folder that does not fit the manifest, or what it was made of."""

    def __init__(self, folder: Path, what: str, remove: str = "that folder and what was made of it") -> None:
        super().__init__(f"{folder}: {what}; take the change back, remove {remove}, or choose another --output")
        self.folder, self.what = folder, what


def changed(folder: Path, what: str) -> Changed:
    """`what` differs from what the manifest says."""
    return Changed(folder, f"made from another manifest: {what}")


def check(nodes: Iterable[Node], every: Mapping[str, Node], study: Path) -> None:
    """Changed for the first of `nodes` that does not fit, with each folder that was made of it by others of `every`."""
    for node in nodes:
        try:
            node.check()
        except Changed as error:
            made = {node.id}
            for other in every.values():  # each after what it needs
                made.update([other.id] if made.intersection(other.needs) else [])
            folders = [str(every[id].folder.relative_to(study)) for id in every if id in made and every[id].folder.exists()]
            raise Changed(error.folder, error.what, f"what was made so ({' '.join(folders)})") from None
