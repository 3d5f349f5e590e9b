"""What is done for each stage of a study: its commands, and what its folder says of how far it is.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/demo              demo data sets, where there are some
    STUDY/results           the tree of fine-tuning results
    STUDY/logs/STAGE.log    what a stage has said

Nothing else is written down: a stage is done when what it makes is there, and whole.
"""

from dataclasses import dataclass
from pathlib import Path

from megaenc.study.cost import amount
from megaenc.study.graph import CorpusStage, Export, FineTuning, Graph, Pretraining
from megaenc.study.grid_stage import GridNode
from megaenc.study.node import Node, OfStage, changed, megaenc, read_json
from megaenc.study.pretrain_stage import PretrainNode, check_kept

_SECONDS = 30.0  # of a conversion, or of making a corpus, until one is measured


def nodes_of(graph: Graph, study: Path, *, processes: int = 0, grid_jobs: int = 1) -> dict[str, Node]:
    """Every stage by its id, each after what it needs, for a study that is made in `study`.

    `processes` of one pretraining run; 0: the manifest's devices. `grid_jobs`: fine-tuning runs at a time in one grid.
    """
    hardware = graph.manifest.hardware
    found: dict[str, Node] = {}
    for stage in graph.stages():
        if isinstance(stage, Pretraining):
            cost = amount(graph, stage.model, stage.at, stage.model.steps)
            hours = cost.device_hours
            seconds = None if hours is None else 3600 * hours / hardware.devices
            node: Node = PretrainNode(stage, study, processes or hardware.devices, cost.flops, seconds)
        elif isinstance(stage, Export):
            node = ExportNode(stage, study)
        elif isinstance(stage, FineTuning):
            seconds = stage.runs * hardware.finetune_seconds or None
            node = GridNode(stage, study, graph.manifest.finetune.protocol, grid_jobs, seconds)
        else:
            node = CorpusNode(stage, study)
        found[node.id] = node
    return found


@dataclass(frozen=True)
class CorpusNode(OfStage):
    """The study's own tokenizer and tokenised text."""

    stage: CorpusStage
    processes: int = 1
    unit: str = "parts"
    work: float = 1.0
    planned: float | None = _SECONDS

    def command(self) -> list[str]:
        """The first whose file or folder is not there; the last where all are."""
        commands = self.stage.commands(self.study)
        left = (command for command in commands if not command.makes.exists())
        return megaenc(*next(left, commands[-1]).arguments)

    def done(self) -> bool:
        """Whether all of it is there: each appears by a rename."""
        return all(command.makes.exists() for command in self.stage.commands(self.study))

    def progress(self) -> tuple[float, float]:
        """Commands."""
        commands = self.stage.commands(self.study)
        return sum(command.makes.exists() for command in commands), len(commands)

    def check(self) -> None:
        """The inputs, by the names that the corpus itself remembers, and the size of the vocabulary."""
        file = self.study / "corpus" / "corpus_text_document.json"
        found = read_json(file)
        if not self.done() or not found:
            return
        wanted = self.stage.vocab_size
        if found.get("vocab_size") != wanted:
            raise changed(file.parent, f"corpus: vocab_size is {found.get('vocab_size')} there, {wanted} here")
        there = [source.get("path") for source in found.get("sources", ())]
        here = [path.name for path in self.stage.text] or ["corpus.jsonl"]
        if there != here:
            raise changed(file.parent, f"corpus: text is {' '.join(map(str, there))} there, {' '.join(here)} here")


@dataclass(frozen=True)
class ExportNode(OfStage):
    """One conversion, with its certificate."""

    stage: Export
    processes: int = 1
    unit: str = "models"
    work: float = 1.0
    planned: float | None = _SECONDS

    def command(self) -> list[str]:
        """`megaenc convert to-hf`."""
        return megaenc(*self.stage.arguments(self.study))

    def done(self) -> bool:
        """Whether the folder is there: it appears by a rename."""
        return self._certificate.is_file()

    @property
    def _certificate(self) -> Path:
        return self.study / "hf" / self.stage.name / "conversion.json"

    def progress(self) -> tuple[float, float]:
        """0 or 1."""
        return float(self.done()), 1

    def check(self) -> None:
        """The step that it is of, or that the run's checkpoint is there."""
        if not self.done():
            check_kept(self.study / "runs" / self.stage.run, self.stage.step, f"{self.id} is")
        elif (found := read_json(self._certificate).get("step", self.stage.step)) != self.stage.step:
            raise changed(self._certificate.parent, f"step is {found} there, {self.stage.step} here")
