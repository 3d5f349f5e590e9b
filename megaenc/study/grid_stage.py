"""The fine-tuning of one model as a stage of a study."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megaenc.errors import InputError
from megaenc.finetune import results
from megaenc.finetune.datasets import demo
from megaenc.finetune.datasets.local import DataFlags
from megaenc.finetune.examples import Family
from megaenc.finetune.model_folder import model_fingerprints, tokenizer_fingerprint
from megaenc.finetune.options import Protocol
from megaenc.study.graph import FineTuning, arguments
from megaenc.study.node import Changed, OfStage, megaenc
from megaenc.study.tasks import Training, name_in_results


@dataclass(frozen=True)
class LabelledData:
    """The data sets that every model is fine-tuned on, as `megaenc finetune grid` is told them."""

    datasets: tuple[str, ...]
    flags: DataFlags

    @classmethod
    def of(cls, given: Mapping[str, Any], study: Path) -> Self:
        """Out of the flags of a grid, for a study that is made in `study`."""
        known = {field.name: given[field.name] for field in fields(DataFlags) if field.name in given}
        return cls(tuple(given["datasets"]), DataFlags(**{"demo_folder": str(study / "demo"), **known}))

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, str]]:
        """By name, as results have them; of those that are there to be looked at. Read once."""
        from megaenc.finetune.datasets.registry import find

        found = {}
        for text in self.datasets:
            asked = {text, self.flags.train_on}.intersection(demo.NAMES)
            if all(Path(self.flags.demo_folder, name).is_dir() for name in asked):  # a demo set is made when it is looked for
                with contextlib.suppress(InputError):
                    dataset = find(text, **asdict(self.flags))
                    found[dataset.name] = {"dataset": dataset.fingerprint, "train_on": dataset.train_fingerprint}
        return found


@dataclass(frozen=True)
class GridNode(OfStage):
    """One model's fine-tuning."""

    stage: FineTuning
    protocol: Protocol
    data: LabelledData
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
    def work(self) -> float:
        """Runs."""
        return float(self.stage.runs)

    def parts(self) -> list["GridNode"]:
        """The same in parts: one for each set that is trained on."""
        return [self._part(training) for training in self.stage.trainings]

    def _part(self, training: Training) -> "GridNode":
        datasets = tuple(text for text in self.stage.flags["datasets"] if name_in_results(text) in training.datasets)
        stage = replace(self.stage, trainings=(training,), flags={**self.stage.flags, "datasets": datasets})
        seconds = self.planned and self.planned / len(self.stage.trainings)
        return replace(self, stage=stage, planned=seconds, part=training.train_on)

    @property
    def folder(self) -> Path:
        """Of the model's results."""
        return self.study / "results" / self.stage.name

    @property
    def _export(self) -> Path:
        return self.study / "hf" / self.stage.name

    def command(self) -> list[str]:
        """`megaenc finetune grid`, which does what is missing."""
        where = ["--model", str(self._export), "--output", str(self.folder.parent), "--jobs", str(self.jobs)]
        if "demo_folder" not in self.stage.flags:
            where += ["--demo-folder", self.data.flags.demo_folder]
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
        for training in self.stage.trainings if self.folder.is_dir() else ():
            families = [training.family] if training.family else list(Family)
            for dataset in training.datasets:
                for rate in self.stage.flags["learning_rates"]:
                    for seed in range(self.stage.flags["seeds"]):
                        run = (dataset, training.train_on, float(rate), seed)
                        found += self._first([results.run_folder(self.folder, family, *run) for family in families])
        return found

    def _first(self, folders: Sequence[Path]) -> list[Path]:
        files = (folder / name for folder in folders for name in (results.RESULTS, results.FAILED))
        return [file for file in files if file.is_file()][:1]

    def check(self) -> None:
        """What each result was made with: the protocol, the model, the data."""
        files = self._files()
        of_model = self._of_model() if files and (self._export / "config.json").is_file() else {}
        for file in files:
            fingerprints = {**of_model, **self.data.fingerprints.get(file.parent.parent.name, {})}
            if other := results.other_origin(file, self.protocol, fingerprints):
                raise Changed(self.folder, f"made otherwise than now: finetune: {other} ({file.relative_to(self.folder)})")

    def _of_model(self) -> dict[str, str]:
        weights = model_fingerprints([str(self._export)], str(self.folder.parent), keep=False)
        return {"model": weights[0], "tokenizer": tokenizer_fingerprint(str(self._export))}
