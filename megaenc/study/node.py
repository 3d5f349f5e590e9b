"""A stage of a study: the commands that do it, the folder that they make, and how far it is.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/demo              demo data sets, where there are some
    STUDY/results           the tree of fine-tuning results
    STUDY/logs/STAGE.log    what a stage has said

A stage is done when what it makes is there, and whole, and so is what it needs. What each was made of its folder says, which
is compared with the manifest and with the folders of what it needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.processes import python_command


@dataclass(frozen=True, kw_only=True)
class Node:
    """A stage that can be planned and done. Each kind of stage is a class of its own."""

    study: Path
    """the study's folder"""
    name: str
    """of the model, checkpoint or corpus, and of the folder"""

    kind = home = unit = ""
    """corpus, pretrain, export or finetune; the folder of the study that the stage's is in; what its progress counts"""
    needs = ()
    """ids of stages that come before"""
    processes = 1
    """that train together, each on a device of its own"""

    @property
    def id(self) -> str:
        """Unlike that of any other stage."""
        return f"{self.kind}/{self.name}"

    @property
    def folder(self) -> Path:
        """The folder of what it makes."""
        return self.study / self.home / self.name

    @property
    def work(self) -> float:
        """What its time grows with, among stages of its kind."""
        return 1.0

    @property
    def planned(self) -> float | None:
        """Seconds that it takes by the plan; None where the plan does not know. Here those of a conversion or a corpus."""
        return 30.0

    def prepare(self) -> None:
        """Write down what its folder has to remember; called before its first command."""

    def command(self) -> list[str]:
        """Return the words of the next command that is left to do."""
        raise NotImplementedError

    def commands_left(self) -> list[list[str]]:
        """Return the words of every command that is left to do."""
        return [self.command()]

    def done(self) -> bool:
        """Return whether what it makes is there; `finished` asks what it needs too."""
        done, total = self.progress()
        return done == total

    def progress(self) -> tuple[float, float]:
        """Return how much of how much is done."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Changed where its folder holds something else than the manifest says, or was made of something else."""


def finished(nodes: Iterable[Node]) -> set[str]:
    """Return the ids of those that are done with all that they need; `nodes` come after what they need, if that is among them.

    What is left when that is made again is still to be compared with it (`Node.check`).
    """
    known, found = set(), set()
    for node in nodes:
        known.add(node.id)
        if node.done() and all(need in found or need not in known for need in node.needs):
            found.add(node.id)
    return found


def kind_of(node: Node) -> str:
    """Return corpus, pretrain, export or finetune."""
    return node.id.partition("/")[0]


def name_of(node: Node) -> str:
    """Return what follows the kind in the id."""
    return node.id.partition("/")[2] or node.id


def megaenc(*words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)) -> list[str]:
    """Return a command of this package as words to start; under torchrun where there are several processes or machines."""
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return python_command("-m", "megaenc", *words)
    torchrun = python_command("-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes))
    return [*torchrun, "-m", "megaenc", *words]


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags as the words of a command line: `{"lr": 5e-4, "bf16": False}` is `--lr 0.0005 --no-bf16`; None and () say nothing."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)] if value else []
        elif value is not None:
            words += [flag, str(value)]
    return words


class Changed(InputError):
    """A folder that does not fit the manifest, or what it was made of."""

    def __init__(self, folder: Path, what: str, remove: str = "that folder and what was made of it") -> None:
        super().__init__(f"{folder}: {what}; take the change back, remove {remove}, or choose another --output")
        self.folder, self.what = folder, what


def changed(folder: Path, what: str) -> Changed:
    """Return the error for a folder of which `what` differs from what the manifest says."""
    return Changed(folder, f"made from another manifest: {what}")


def check(nodes: Iterable[Node], every: Mapping[str, Node], study: Path) -> None:
    """Raise Changed for the first of `nodes` that does not fit, with each folder that was made of it by others of `every`."""
    for node in nodes:
        try:
            node.check()
        except Changed as error:
            made = {node.id}
            for other in every.values():  # each after what it needs
                made.update([other.id] if made.intersection(other.needs) else [])
            folders = [str(every[id].folder.relative_to(study)) for id in every if id in made and every[id].folder.exists()]
            raise Changed(error.folder, error.what, f"what was made so ({' '.join(folders)})") from None
