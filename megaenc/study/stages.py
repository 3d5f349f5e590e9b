"""What is done for each stage of a study: its commands, and what its folder says of how far it is.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/demo              demo data sets, where there are some
    STUDY/results           the tree of fine-tuning results
    STUDY/logs/STAGE.log    what a stage has said

A stage is done when what it makes is there, and whole, and so is what it needs. What each was made of its folder says, which
is compared with the manifest and with the folders of what it needs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.files import write_whole
from megaenc.json_files import read_json_object
from megaenc.study.cost import amount
from megaenc.study.graph import CorpusStage, Export, FineTuning, Graph, Pretraining
from megaenc.study.grid_stage import GridNode, LabelledData
from megaenc.study.node import Changed, Node, OfStage, changed, megaenc
from megaenc.study.pretrain_stage import PretrainNode, check_kept, identity_of
from megaenc.training.run_folder import difference
from megaenc.training.start import digest

ASKED = "asked.json"
"""In the folder of the corpus: what it was to be made of."""
_SECONDS = 30.0  # of a conversion, or of making a corpus, until one is measured


def nodes_of(
    graph: Graph, study: Path, *, processes: int = 0, grid_jobs: int = 1, text: Mapping[str, Any] | None = None
) -> dict[str, Node]:
    """Every stage by its id, each after what it needs, for a study that is made in `study`.

    `processes` of one pretraining run; 0: the manifest's devices. `grid_jobs`: fine-tuning runs at a time in one grid. `text`:
    data_path and tokenizer of pretraining in place of the manifest's.
    """
    hardware = graph.manifest.hardware
    processes = processes or hardware.devices
    labelled = LabelledData.of(graph.manifest.finetune_flags, study) if graph.manifest.finetune else None
    found: dict[str, Node] = {}
    for stage in graph.stages():
        if isinstance(stage, Pretraining):
            cost = amount(graph, stage.model, stage.at, stage.model.steps)
            hours = cost.device_hours
            seconds = None if hours is None else 3600 * hours / processes
            node: Node = PretrainNode(stage, study, processes, cost.flops, seconds, text or {})
        elif isinstance(stage, Export):
            node = ExportNode(stage, study)
        elif isinstance(stage, FineTuning):
            seconds = stage.runs * hardware.finetune_seconds or None
            node = GridNode(stage, study, graph.manifest.finetune.protocol, labelled, grid_jobs, seconds)
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

    @property
    def folder(self) -> Path:
        """Of tokenizer and text."""
        return self.study / "corpus"

    def prepare(self) -> None:
        """Write down what it is made of: of the tokenizer and the text alone this could not be told."""
        if not any(command.makes.exists() for command in self.stage.commands(self.study)):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ASKED, json.dumps(self._asked(), indent=1) + "\n")

    def commands_left(self) -> list[list[str]]:
        """Of those that it is made by, the ones whose file or folder is not there."""
        return [megaenc(*command.arguments) for command in self.stage.commands(self.study) if not command.makes.exists()]

    def command(self) -> list[str]:
        """The first that is left; the last where none is."""
        left = self.commands_left()
        return left[0] if left else megaenc(*self.stage.commands(self.study)[-1].arguments)

    def done(self) -> bool:
        """Whether all of it is there: each appears by a rename."""
        return not self.commands_left()

    def progress(self) -> tuple[float, float]:
        """Commands."""
        commands = self.stage.commands(self.study)
        return sum(command.makes.exists() for command in commands), len(commands)

    def _asked(self) -> dict[str, Any]:
        """Size of the vocabulary, and names and sizes of the text; null for what is not there."""
        text = {"text": [[path.name, _bytes(path)] for path in self.stage.text]}
        return {"vocab_size": self.stage.vocab_size, "demo": self.stage.demo, **text}

    def check(self) -> None:
        """What it was made of, as the folder remembers it."""
        file = self.folder / ASKED
        here, there = self._asked(), read_json_object(file, "what the corpus was to be made of") if file.exists() else {}
        if not there:
            self._check_made()
        elif not _is_text(there.get("text")):
            raise InputError(f"{file}: field `text`: missing or of another kind; expected a list of [name, bytes]")
        elif other := difference({**there, "text": _names(there["text"])}, {**here, "text": _names(here["text"])}):
            raise changed(self.folder, f"corpus: {other}")
        else:
            for (name, before), (_, now) in zip(there["text"], here["text"], strict=True):
                if None not in (before, now) and before != now:
                    raise changed(self.folder, f"corpus: {name} had {before:,} bytes then, {now:,} now")

    def _check_made(self) -> None:
        """What the text itself remembers, of a study from before there was more: the names, and how many ids there are."""
        file = self.folder / "corpus_text_document.json"
        if not self.done() or not file.exists():
            return
        found = read_json_object(file, "what `megaenc preprocess` wrote")
        sources = found.get("sources", [])
        if type(found.get("vocab_size", 0)) is not int or not isinstance(sources, list):
            raise InputError(
                f"{file}: field `vocab_size` or `sources`: of another kind; expected what `megaenc preprocess` wrote"
            )
        if found.get("vocab_size", 0) > self.stage.vocab_size:
            raise changed(self.folder, f"corpus: vocab_size is {found['vocab_size']} there, {self.stage.vocab_size} here")
        there = [source.get("path") if isinstance(source, dict) else source for source in sources]
        here = [path.name for path in self.stage.text] or ["corpus.jsonl"]
        if other := difference({"text": _names(there)}, {"text": _names(here)}):
            raise changed(self.folder, f"corpus: {other}")


def _names(text: Any) -> str:
    return " ".join(str(each[0] if isinstance(each, list) else each) for each in text)


def _is_text(value: Any) -> bool:
    """Return whether a value of JSON is a list of names with their sizes, null for an unknown one."""
    pairs = value if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value) else None
    return pairs is not None and all(isinstance(name, str) and type(size) in (int, type(None)) for name, size in pairs)


def _bytes(path: Path) -> int | None:
    """Of a file, or of all in a folder."""
    try:
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return None


@dataclass(frozen=True)
class ExportNode(OfStage):
    """One conversion, with its certificate."""

    stage: Export
    processes: int = 1
    unit: str = "models"
    work: float = 1.0
    planned: float | None = _SECONDS

    @property
    def folder(self) -> Path:
        """Of the model."""
        return self.study / "hf" / self.stage.name

    def command(self) -> list[str]:
        """`megaenc convert to-hf`."""
        return megaenc(*self.stage.arguments(self.study))

    def done(self) -> bool:
        """Whether the folder is there: it appears by a rename."""
        return self._certificate.is_file()

    @property
    def _certificate(self) -> Path:
        return self.folder / "conversion.json"

    def progress(self) -> tuple[float, float]:
        """0 or 1."""
        return float(self.done()), 1

    def check(self) -> None:
        """The step that it is of, and the run; or that the run's checkpoint is there."""
        run = self.study / "runs" / self.stage.run
        if not self.done():
            check_kept(run, self.stage.step, f"{self.id} is")
            return
        made_of, identity = read_json_object(self._certificate, "the certificate of an export"), identity_of(run)
        if (found := made_of.get("step", self.stage.step)) != self.stage.step:
            raise changed(self.folder, f"step is {found} there, {self.stage.step} here")
        if identity is None and "identity" not in made_of:
            raise Changed(
                self.folder, f"does not say of which {self.stage.run} it was made, and that is not there to be compared"
            )
        if identity is not None and made_of.get("identity", digest(identity)) != digest(identity):
            raise Changed(self.folder, f"made of another {self.stage.run} than {run} is now")
