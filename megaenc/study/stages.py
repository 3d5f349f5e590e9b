"""What is done for each stage of a study: its commands, and what its folder says of how far it is.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/results           the tree of fine-tuning results
    STUDY/logs/STAGE.log    what a stage has said

Nothing else is written down: a stage is done when what it makes is there, and whole.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from megaenc import flags
from megaenc.errors import InputError
from megaenc.finetune import results
from megaenc.finetune.examples import Family
from megaenc.finetune.options import Protocol
from megaenc.study.cost import amount
from megaenc.study.entries import schedule_of
from megaenc.study.graph import CorpusStage, Export, FineTuning, Graph, Pretraining, arguments
from megaenc.study.tasks import Training
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import FACTS, METRICS, difference

_SECONDS = 30.0  # of a conversion, or of making a corpus, until one is measured
_LAST_ROW = 8192  # bytes at the end of metrics.jsonl in which the last row is


class Node(Interface):
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


def kind_of(node: Node) -> str:
    """corpus, pretrain, export or finetune."""
    return node.id.partition("/")[0]


def name_of(node: Node) -> str:
    """What follows the kind."""
    return node.id.partition("/")[2] or node.id


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


def megaenc(*words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)) -> list[str]:
    """A command of this package as words to start; under torchrun where there are several processes or machines."""
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return [sys.executable, "-m", "megaenc", *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes)]
    return [*torchrun, "-m", "megaenc", *words]


@dataclass(frozen=True)
class CorpusNode:
    """The study's own tokenizer and tokenised text."""

    stage: CorpusStage
    study: Path
    needs: tuple[str, ...] = ()
    processes: int = 1
    unit: str = "parts"
    work: float = 1.0
    planned: float | None = _SECONDS

    @property
    def id(self) -> str:
        """That of the stage."""
        return self.stage.id

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
        found = _json(file)
        if not self.done() or not found:
            return
        wanted = self.stage.vocab_size
        if found.get("vocab_size") != wanted:
            raise _changed(file.parent, f"corpus: vocab_size is {found.get('vocab_size')} there, {wanted} here")
        there = [source.get("path") for source in found.get("sources", ())]
        here = [path.name for path in self.stage.text] or ["corpus.jsonl"]
        if there != here:
            raise _changed(file.parent, f"corpus: text is {' '.join(map(str, there))} there, {' '.join(here)} here")


@dataclass(frozen=True)
class PretrainNode:
    """One pretraining run."""

    stage: Pretraining
    study: Path
    processes: int
    work: float
    """FLOP"""
    planned: float | None
    launcher: tuple[str, ...] = ("--standalone",)
    """how torchrun finds the others"""
    unit: str = "steps"

    @property
    def id(self) -> str:
        """That of the stage."""
        return self.stage.id

    @property
    def needs(self) -> tuple[str, ...]:
        """Those of the stage."""
        return self.stage.needs

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.study / "runs" / self.stage.name

    def command(self) -> list[str]:
        """`megaenc pretrain`; the same goes on with a run that was stopped."""
        words = arguments(self.stage.flags_in(self.study))
        return megaenc("pretrain", *words, processes=self.processes, launcher=self.launcher)

    def done(self) -> bool:
        """Whether the last step is saved, whole."""
        return has_checkpoint(self.folder, self.stage.model.steps) and self._latest() == self.stage.model.steps

    def _latest(self) -> int | None:
        return CheckpointFolder(self.folder / "checkpoints").latest()

    def progress(self) -> tuple[float, float]:
        """Steps of its own, by the last row of metrics.jsonl."""
        if self.done():
            return self.stage.steps, self.stage.steps
        return max(0, _last_step(self.folder / METRICS) - self.stage.at), self.stage.steps

    def check(self) -> None:
        """Its flags against those in run.json; and the checkpoint that it begins with, where the parent is done."""
        identity = _json(self.folder / FACTS).get("identity")
        if isinstance(identity, dict):
            wanted = {name: value for name, value in self._identity().items() if name in identity}
            if other := difference({name: identity[name] for name in wanted}, wanted):
                raise _changed(self.folder, other)
        parent = self.study / "runs" / self.stage.parent
        if self.stage.start == "branch" and not self.done():
            _check_kept(parent, self.stage.at, f"{self.id} branches")

    def _identity(self) -> dict[str, Any]:
        """What makes it this run, of what the manifest decides, as run.json has it."""
        model = self.stage.model
        values = {name: _as_json(value) for name, value in flags.flatten(model.run).items() if name not in _FOUND_OUT}
        if "bf16" in model.flags:
            values["bf16"] = model.run.bf16
        return values | {
            "train_iters": model.steps,
            "seed": model.setting.seed,
            "lr_warmup_iters": model.warmup,
            "lr_wsd_decay_iters": model.decay,
            "objective_schedule": schedule_of(model).canonical,
        }


# Of bf16 and of the rows of the vocabulary a run has what fits machine and tokenizer, unless it was given; the tokenizer is known
# by its fingerprint.
_FOUND_OUT = {"bf16", "vocab_size", "tokenizer"}


@dataclass(frozen=True)
class ExportNode:
    """One conversion, with its certificate."""

    stage: Export
    study: Path
    processes: int = 1
    unit: str = "models"
    work: float = 1.0
    planned: float | None = _SECONDS

    @property
    def id(self) -> str:
        """That of the stage."""
        return self.stage.id

    @property
    def needs(self) -> tuple[str, ...]:
        """Those of the stage."""
        return self.stage.needs

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
            _check_kept(self.study / "runs" / self.stage.run, self.stage.step, f"{self.id} is")
        elif (found := _json(self._certificate).get("step", self.stage.step)) != self.stage.step:
            raise _changed(self._certificate.parent, f"step is {found} there, {self.stage.step} here")


@dataclass(frozen=True)
class GridNode:
    """One model's fine-tuning."""

    stage: FineTuning
    study: Path
    protocol: Protocol
    jobs: int
    """runs at a time; 0: as many as the machine has room for"""
    planned: float | None
    part: str = ""
    """the set that it trains on, where it is a part of the grid"""
    processes: int = 1
    unit: str = "results"

    @property
    def id(self) -> str:
        """That of the stage, or of its part."""
        return f"{self.stage.id}@{self.part}" if self.part else self.stage.id

    @property
    def needs(self) -> tuple[str, ...]:
        """Those of the stage."""
        return self.stage.needs

    @property
    def work(self) -> float:
        """Runs."""
        return float(self.stage.runs)

    def parts(self) -> list["GridNode"]:
        """The same in parts: one for each set that is trained on."""
        return [self._part(training) for training in self.stage.trainings]

    def _part(self, training: Training) -> "GridNode":
        datasets = tuple(text for text in self.stage.flags["datasets"] if _named(text) in training.datasets)
        stage = replace(self.stage, trainings=(training,), flags={**self.stage.flags, "datasets": datasets})
        seconds = self.planned and self.planned / len(self.stage.trainings)
        return replace(self, stage=stage, planned=seconds, part=training.train_on)

    def command(self) -> list[str]:
        """`megaenc finetune grid`, which does what is missing."""
        model, output = self.study / "hf" / self.stage.name, self.study / "results"
        where = ("--model", str(model), "--output", str(output), "--jobs", str(self.jobs))
        return megaenc("finetune", "grid", *where, *arguments(self.stage.flags))

    def done(self) -> bool:
        """Whether every run has a result, or is written down as failed."""
        done, total = self.progress()
        return done == total

    def progress(self) -> tuple[float, float]:
        """Results."""
        return len(self._files()), self.stage.results

    def failed(self) -> int:
        """Runs that are written down as failed: their rate made the loss no number."""
        return sum(file.name == results.FAILED for file in self._files())

    def _files(self) -> list[Path]:
        """The result, or what says that there is none, of each run that has one."""
        found = []
        for training in self.stage.trainings:
            families = [training.family] if training.family else list(Family)
            for dataset in training.datasets:
                for rate in self.stage.flags["learning_rates"]:
                    for seed in range(self.stage.flags["seeds"]):
                        run = (dataset, training.train_on, float(rate), seed)
                        found += self._first([results.run_folder(self._tree, family, *run) for family in families])
        return found

    @property
    def _tree(self) -> Path:
        return self.study / "results" / self.stage.name

    def _first(self, folders: Sequence[Path]) -> list[Path]:
        files = (folder / name for folder in folders for name in (results.RESULTS, results.FAILED))
        return [file for file in files if file.is_file()][:1]

    def check(self) -> None:
        """The protocol that the first result was made with."""
        for file in self._files()[:1]:
            if other := results.other_protocol(file, self.protocol):
                raise _changed(self._tree, f"finetune: {other}")


def has_checkpoint(run: Path, step: int) -> bool:
    """Whether a run has kept the checkpoint of a step, whole."""
    return CheckpointFolder(run / "checkpoints").is_whole(step)


def _check_kept(run: Path, step: int, what: str) -> None:
    """InputError where a run is beyond `step` and has no checkpoint of it."""
    latest = CheckpointFolder(run / "checkpoints").latest()
    if latest is not None and latest >= step and not has_checkpoint(run, step):
        raise InputError(
            f"{run}: trained to step {latest} without keeping step {step}, where {what}: the manifest did not ask for it then; "
            "remove that folder to train it again, or choose another --output"
        )


def _changed(folder: Path, what: str) -> InputError:
    return InputError(
        f"{folder}: made from another manifest: {what}; take the change back, remove that folder and what was made of it, "
        "or choose another --output"
    )


def _last_step(metrics: Path) -> int:
    """Of the last whole row; 0 where there is none."""
    try:
        with open(metrics, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LAST_ROW))
            rows = stream.read().split(b"\n")[:-1]
        return int(json.loads(rows[-1])["step"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return 0


def _json(path: Path) -> Mapping[str, Any]:
    """What is in a file; nothing where there is none, or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _named(dataset: str) -> str:
    """The name of a data set as `megaenc finetune grid` is told it."""
    name, equals, _ = dataset.partition("=")
    return name if equals and "/" not in name else Path(dataset).name
