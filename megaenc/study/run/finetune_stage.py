"""The fine-tuning of one model as a stage of a study, and what it trains, known without opening a data set."""

import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megaenc.errors import InputError, closest_match
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets import beir, demo, hub
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset, parse_dataset_name
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.grid.command import GridConfig
from megaenc.finetune.model.fingerprint import compute_model_fingerprints, compute_tokenizer_fingerprint
from megaenc.finetune.results import files as result_files
from megaenc.study.run.stage import StageRunner, StaleArtifactError, format_flags, megaenc_command


@dataclass(frozen=True)
class TrainingSet:
    """A data set that models are trained on, and those that they are then evaluated on: several in retrieval."""

    train_on: str
    family: str
    """SC, TC, QA or IR; "" for local files that do not tell before they are read"""
    datasets: tuple[str, ...]


def plan_training_sets(settings: GridConfig, data: Path) -> tuple[TrainingSet, ...]:
    """Return the trainings of a grid for each model, rate and seed. Raises InputError for an unknown data set."""
    members: dict[tuple[str, str], list[str]] = {}
    for dataset in settings.datasets:
        name, family, train_on = _parse_dataset(dataset, settings, data)
        for part in (name, train_on):
            if part.startswith(".") or "/" in part or not part.isprintable() or not 0 < len(part.encode()) <= 180:
                found = f"finetune: field `datasets`: {dataset[:60]}: found the name {part[:60]!r}"
                raise InputError(f"{found}, expected one for a folder of at most 180 bytes; name the set with NAME=PATH")
        members.setdefault((train_on, family), []).append(name)
    return tuple(TrainingSet(*key, tuple(sets)) for key, sets in members.items())


def resolve_dataset_path(dataset: str, data: Path) -> str:
    """As `megaenc finetune grid` is to be told it: a path begins in the folder `data`."""
    if parse_dataset_name(dataset)[1] is None:
        return dataset
    name, equals, place = dataset.partition("=")
    return f"{name}={data / place}" if equals and "/" not in name else str(data / dataset)


def dataset_result_name(dataset: str) -> str:
    """What results call a data set that `megaenc finetune grid` is told as `resolve_dataset_path` says."""
    return parse_dataset_name(dataset)[0]


def _parse_dataset(dataset: str, settings: GridConfig, data: Path) -> tuple[str, str, str]:
    """Return the name of a data set, its kind, and what models are trained on before they read it."""
    name, path = parse_dataset_name(resolve_dataset_path(dataset, data))
    on_the_hub = path is None and name in hub.HUB_DATASETS
    if on_the_hub:
        family = str(hub.HUB_DATASETS[name].family)
    elif path is None:
        family = name.removeprefix("demo_").upper()
    else:
        if "=" not in dataset and "/" not in dataset:  # otherwise a path, which may come into being until the study is run
            names = [*hub.HUB_DATASETS, *demo.DEMO_DATASETS]
            near = closest_match(dataset.lower(), names)
            if near or not os.path.exists(path):  # unlike Path's, False for a name that is too long
                hint = f"did you mean {near}?" if near else f"expected one of {', '.join(names)}, a path or NAME=PATH"
                raise InputError(f"finetune: field `datasets`: found {dataset}; {hint}")
        family = settings.data.task or ("IR" if os.path.isdir(path) and beir.is_beir_folder(path) else "")
    if family != TaskFamily.IR:
        return name, family, name
    if settings.data.train_on:
        return name, family, dataset_result_name(resolve_dataset_path(settings.data.train_on, data))
    return name, family, hub.TRAINING_PAIRS if on_the_hub else name


@dataclass(frozen=True)
class LabelledData:
    """The data sets that every model is fine-tuned on, as `megaenc finetune grid` is told them."""

    datasets: tuple[str, ...]
    flags: DatasetConfig

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, str]]:
        """By name, as results have them; of those that are there to be looked at. Read once."""
        found = {}
        for text in self.datasets:
            asked = {text, self.flags.train_on}.intersection(demo.DEMO_DATASETS)
            if all(Path(self.flags.demo_folder, name).is_dir() for name in asked):  # a demo set is made when it is looked for
                with contextlib.suppress(InputError):
                    dataset = find_dataset(text, **asdict(self.flags))
                    found[dataset.name] = {"dataset": dataset.fingerprint, "train_on": dataset.train_fingerprint}
        return found


@dataclass(frozen=True, kw_only=True)
class FinetuneStage(StageRunner):
    """One `megaenc finetune grid`: a model on every data set with every rate and seed."""

    plan_training_sets: tuple[TrainingSet, ...] = field(repr=False)
    flags: Mapping[str, Any] = field(repr=False)
    """Flags of the grid that the manifest gives; datasets, learning_rates and seeds among them."""
    protocol: FinetuneConfig
    data: LabelledData
    jobs: int
    """runs at a time; 0: as many as the machine has room for"""
    run_seconds: float
    """of one run by the plan; 0 where the plan does not know"""
    part: str = ""
    """the set that it trains on, where it is a part of the grid"""
    kind, home, unit = "finetune", "results", "results"

    @property
    def id(self) -> str:
        return f"{super().id}@{self.part}" if self.part else super().id

    @property
    def needs(self) -> tuple[str, ...]:
        return (f"export/{self.name}",)

    @property
    def run_count(self) -> int:
        """Trainings: retrieval trains once for all the sets that share its pairs."""
        return len(self.training_sets) * self._runs_per_dataset

    @property
    def result_count(self) -> int:
        """Results: one for each data set, rate and seed."""
        return sum(len(training.datasets) for training in self.training_sets) * self._runs_per_dataset

    @property
    def _runs_per_dataset(self) -> int:
        return len(self.flags["learning_rates"]) * self.flags["seeds"]

    @property
    def work(self) -> float:
        return float(self.run_count)

    @property
    def planned_seconds(self) -> float | None:
        return self.run_count * self.run_seconds or None

    def split_by_training_set(self) -> list["FinetuneStage"]:
        """Return the same in parts: one for each set that is trained on."""
        found = []
        for training in self.training_sets:
            datasets = tuple(text for text in self.flags["datasets"] if dataset_result_name(text) in training.datasets)
            flags = {**self.flags, "datasets": datasets}
            found.append(replace(self, training_sets=(training,), flags=flags, part=training.train_on))
        return found

    @property
    def _export(self) -> Path:
        return self.study / "hf" / self.name

    def next_command(self) -> list[str]:
        """Return the words of `megaenc finetune grid`, which does what is missing."""
        where = {"model": self._export, "output": self.folder.parent, "jobs": self.jobs}
        demo_folder = {"demo_folder": self.data.flags.demo_folder}
        return megaenc_command("finetune", "grid", *format_flags({**where, **demo_folder, **self.flags}))

    def progress(self) -> tuple[float, float]:
        return len(self._result_files()), self.result_count

    def count_failed_runs(self) -> int:
        """Runs that are written down as failed: their rate made the loss no number."""
        return sum(file.name == result_files.FAILED for file in self._result_files())

    def _result_files(self) -> list[Path]:
        """Return the result, or what says that there is none, of each run that has one."""
        if not self.folder.is_dir():
            return []
        found = []
        sets = [(training, dataset) for training in self.training_sets for dataset in training.datasets]
        rates, seeds = map(float, self.flags["learning_rates"]), range(self.flags["seeds"])
        for (training, dataset), rate, seed in itertools.product(sets, rates, seeds):
            run = (dataset, training.train_on, rate, seed)
            folders = [
                result_files.run_folder(self.folder, kind, *run)
                for kind in ([training.family] if training.family else TaskFamily)
            ]
            files = (folder / name for folder in folders for name in (result_files.RESULTS, result_files.FAILED))
            found += [file for file in files if file.is_file()][:1]
        return found

    def check(self) -> None:
        """Compare what each result was made with: the protocol, the model, the data."""
        files = self._result_files()
        of_model = self._model_fingerprints() if files and (self._export / "config.json").is_file() else {}
        for file in files:
            fingerprints = {**of_model, **self.data.fingerprints.get(file.parent.parent.name, {})}
            if other := result_files.find_protocol_difference(file, self.protocol, fingerprints):
                raise StaleArtifactError(
                    self.folder, f"made otherwise than now: finetune: {other} ({file.relative_to(self.folder)})"
                )

    def _model_fingerprints(self) -> dict[str, str]:
        weights = compute_model_fingerprints([str(self._export)], str(self.folder.parent), keep=False)
        return {"model": weights[0], "tokenizer": compute_tokenizer_fingerprint(str(self._export))}
