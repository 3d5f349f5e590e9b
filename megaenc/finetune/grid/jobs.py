"""Fine-tuning runs: what each is asked for, what is left to do of it, its lock, and how far it is."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from megaenc.atomic_io import try_lock
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig, format_learning_rate
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import Dataset, TaskFamily
from megaenc.finetune.model.fingerprint import (
    check_model_folder,
    compute_model_fingerprints,
    compute_model_stamp,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.results import files as result_files

TOKENIZED_CACHE = ".tokenised"
"""Folder of tokenised data next to the results."""
DatasetFinder = Callable[..., Dataset]
"""As `megaenc.finetune.datasets.registry.find_dataset`: takes what the command line calls a data set, and the fields of DataFlags."""


@dataclass(frozen=True)
class NamedSource:
    """A model or data set: its name in results, and where it is: a folder, or what `datasets.find` takes."""

    name: str
    location: str


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 in hex of what a run reads."""

    model: str
    tokenizer: str
    train_on: str
    datasets: Mapping[str, str] = field(hash=False)
    """By name, of each data set that is evaluated on."""
    compute_model_stamp: str
    """Changes when a file of the model does; not recorded."""

    def for_dataset(self, dataset: str) -> dict[str, str]:
        """What the results of one data set record."""
        of_training = {"model": self.model, "tokenizer": self.tokenizer, "train_on": self.train_on}
        return of_training | {"dataset": self.datasets[dataset]}


@dataclass(frozen=True)
class FinetuneJob:
    """One training, and the data sets that its model is evaluated on: several in retrieval, else the one it was trained on."""

    model: NamedSource
    family: TaskFamily
    train_on: str
    evaluate_on: tuple[NamedSource, ...]
    learning_rate: float
    seed: int
    output: str
    """Folder of all results."""
    protocol: FinetuneConfig
    data: DatasetConfig
    fingerprints: Fingerprints

    @property
    def name(self) -> str:
        """For the eye: `toy sst2 2e-05 sd0`."""
        return f"{self.model.name} {self.train_on} {format_learning_rate(self.learning_rate)} sd{self.seed}"


@dataclass(frozen=True)
class RunProgress:
    """How far a run is in a stage; `total` is 0 where that is not known."""

    stage: Literal["loading", "training", "validation", "test"]
    """In this order; retrieval goes through the last two once for each set that it is evaluated on."""
    done: float = 0
    total: float = 0
    fields: Mapping[str, float | str] = field(default_factory=dict)
    """Shown as they are: loss, data set."""


def build_jobs(
    models: Sequence[str],
    datasets: Sequence[str],
    rates: Sequence[float],
    seeds: Iterable[int],
    output: str,
    protocol: FinetuneConfig,
    data: DatasetConfig,
    find_dataset: DatasetFinder,
) -> list[FinetuneJob]:
    """Return every training of a grid, or the one of a single run; retrieval sets with the same training pairs share one.

    Data set after data set, on each model after model, seed after seed with all rates: the cells of a summary fill one by one.
    Models and data sets are looked at. Raises InputError for what no run could be made of.
    """
    sources = [parse_model(name_or_path) for name_or_path in models]
    loaded_datasets = [(name_or_path, find_dataset(name_or_path, **asdict(data))) for name_or_path in datasets]
    rename_hint = "; name one of them otherwise, NAME=FOLDER"
    for flag, values, advice in (
        ("--model", [model.name for model in sources], rename_hint),
        ("--datasets", [dataset.name for _, dataset in loaded_datasets], rename_hint),
        ("--learning-rates", rates, ""),
    ):
        if duplicates := [value for value in values if values.count(value) > 1]:
            raise InputError(f"{flag}: found {duplicates[0]} twice, expected each once{advice}")
    trainings: dict[tuple[TaskFamily, str], list[tuple[str, Dataset]]] = defaultdict(list)
    for name_or_path, dataset in loaded_datasets:
        trainings[dataset.family, dataset.train_on].append((name_or_path, dataset))
    weights_of = compute_model_fingerprints([model.location for model in sources], output)
    jobs = []
    for (family, train_on), members in trainings.items():
        first = members[0][1]
        for _, other in members:
            if other.train_fingerprint != first.train_fingerprint:
                raise InputError(f"--datasets {other.name}: found other pairs named {train_on} than {first.name} has")
        evaluate_on = tuple(NamedSource(dataset.name, name_or_path) for name_or_path, dataset in members)
        by_name = {dataset.name: dataset.fingerprint for _, dataset in members}
        for model, weights in zip(sources, weights_of, strict=True):
            tokenizer, stamp = compute_tokenizer_fingerprint(model.location), compute_model_stamp(model.location)
            fingerprints = Fingerprints(weights, tokenizer, first.train_fingerprint, by_name, stamp)
            jobs += [
                FinetuneJob(model, family, train_on, evaluate_on, rate, seed, output, protocol, data, fingerprints)
                for seed in seeds
                for rate in rates
            ]
    return jobs


def check_learning_rate(flag: str, rate: float) -> None:
    """Raise InputError for a learning rate that trains nothing."""
    if not 0 < rate < float("inf"):
        raise InputError(f"{flag}: found {rate}, expected more than 0")


def parse_model(text: str) -> NamedSource:
    """Return the model `FOLDER`, named by its last part, or `NAME=FOLDER`. Raises InputError if none can be loaded from there."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name:
        name, folder = "", text
    check_model_folder(folder)
    path = Path(folder).resolve()
    name = name or path.name
    if not name or name.startswith(".") or not name.isprintable():
        raise InputError(f"--model {text}: found the name {name!r}, expected one for a folder; say NAME=FOLDER")
    return NamedSource(name, str(path))


def select_remaining_work(job: FinetuneJob, *, retry_failed: bool) -> tuple[FinetuneJob | None, Path | None]:
    """Return `job` with the data sets that it has still to be evaluated on, or the file that says why it failed, or neither.

    A training that failed has failed for every set: it is to be done only if it is tried `again`. Raises InputError for results
    of another protocol.
    """
    states = [(dataset, result_files.read_job_state(job, dataset.name)) for dataset in job.evaluate_on]
    failed = next((dataset for dataset, state in states if state == "failed"), None)
    if failed is not None and not retry_failed:
        return None, result_files.job_folder(job, failed.name) / result_files.FAILED
    missing = tuple(dataset for dataset, state in states if state != "finished")
    return replace(job, evaluate_on=missing) if missing else None, None


def is_run_locked(job: FinetuneJob) -> bool:
    """Return whether some process is at this run."""
    with try_lock_run(job) as mine:
        return not mine


def try_lock_run(job: FinetuneJob) -> AbstractContextManager[bool]:
    """Try to have a training to oneself, whatever it is to be evaluated on (see `megaenc.atomic_io.try_lock`).

    On a file system without locks the work may be done twice, with the same results, each written whole.
    """
    name = f"{job.family}_{job.train_on}_lr{format_learning_rate(job.learning_rate)}_sd{job.seed}"
    return try_lock(Path(job.output, job.model.name, ".locks", name))
