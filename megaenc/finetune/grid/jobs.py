"""Fine-tuning jobs: their construction, remaining work, locks and progress."""

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
"""Name of the cache folder of tokenized data in the results folder."""
DatasetFinder = Callable[..., Dataset]
"""Function like `megaenc.finetune.datasets.registry.find_dataset`."""


@dataclass(frozen=True)
class NamedSource:
    """Name of a model or data set in results, with its location: a folder, or an argument of `find_dataset`."""

    name: str
    location: str


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 in hex of everything a run reads."""

    model: str
    tokenizer: str
    train_on: str
    datasets: Mapping[str, str] = field(hash=False)
    """Fingerprint of each evaluation data set, by name."""
    model_stamp: str
    """Digest of the model files' sizes and times, to detect changes during a grid; not recorded."""

    def for_dataset(self, dataset: str) -> dict[str, str]:
        """Return the fingerprints recorded in the results of `dataset`, by role."""
        of_training = {"model": self.model, "tokenizer": self.tokenizer, "train_on": self.train_on}
        return of_training | {"dataset": self.datasets[dataset]}


@dataclass(frozen=True)
class FinetuneJob:
    """One training, and the data sets to evaluate it on: several in retrieval, else the training set's own splits."""

    model: NamedSource
    family: TaskFamily
    train_on: str
    evaluate_on: tuple[NamedSource, ...]
    learning_rate: float
    seed: int
    output: str
    """Root folder of the results."""
    protocol: FinetuneConfig
    data: DatasetConfig
    fingerprints: Fingerprints

    @property
    def name(self) -> str:
        """Return a display name: `toy sst2 2e-05 sd0`."""
        return f"{self.model.name} {self.train_on} {format_learning_rate(self.learning_rate)} sd{self.seed}"


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run within a stage; `total` is 0 if unknown."""

    stage: Literal["loading", "training", "validation", "test"]
    """Stages in order; retrieval repeats the last two for each evaluation set."""
    done: float = 0
    total: float = 0
    fields: Mapping[str, float | str] = field(default_factory=dict)
    """Further values to display: loss, data set."""


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
    """Build the jobs of a grid: one training per model, training set, learning rate and seed.

    Retrieval sets with the same training pairs share a training. Jobs are ordered by data set, model, seed and learning rate, so
    that the cells of a summary fill one by one. Raises InputError for an unusable model or data set.
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
    weight_fingerprints = compute_model_fingerprints([model.location for model in sources], output)
    jobs = []
    for (family, train_on), members in trainings.items():
        first_dataset = members[0][1]
        for _, other in members:
            if other.train_fingerprint != first_dataset.train_fingerprint:
                raise InputError(f"--datasets {other.name}: found other pairs named {train_on} than {first_dataset.name} has")
        evaluate_on = tuple(NamedSource(dataset.name, name_or_path) for name_or_path, dataset in members)
        dataset_fingerprints = {dataset.name: dataset.fingerprint for _, dataset in members}
        for model, weights in zip(sources, weight_fingerprints, strict=True):
            tokenizer, stamp = compute_tokenizer_fingerprint(model.location), compute_model_stamp(model.location)
            fingerprints = Fingerprints(weights, tokenizer, first_dataset.train_fingerprint, dataset_fingerprints, stamp)
            jobs += [
                FinetuneJob(model, family, train_on, evaluate_on, rate, seed, output, protocol, data, fingerprints)
                for seed in seeds
                for rate in rates
            ]
    return jobs


def check_learning_rate(flag: str, rate: float) -> None:
    """Raise InputError for a learning rate that is not positive and finite."""
    if not 0 < rate < float("inf"):
        raise InputError(f"{flag}: found {rate}, expected more than 0")


def parse_model(name_or_path: str) -> NamedSource:
    """Parse `FOLDER`, named by its last part, or `NAME=FOLDER`. Raises InputError if the folder holds no model."""
    name, equals, folder = name_or_path.partition("=")
    if not equals or "/" in name:
        name, folder = "", name_or_path
    check_model_folder(folder)
    path = Path(folder).resolve()
    name = name or path.name
    if not name or name.startswith(".") or not name.isprintable():
        raise InputError(f"--model {name_or_path}: found the name {name!r}, expected one for a folder; say NAME=FOLDER")
    return NamedSource(name, str(path))


def select_remaining_work(job: FinetuneJob, *, retry_failed: bool) -> tuple[FinetuneJob | None, Path | None]:
    """Return `job` with the data sets that lack results, or the failed.json of a failed one; (None, None) if it is finished.

    A failed training has failed for all its data sets; it is selected only if `retry_failed`. Raises InputError for results of
    another protocol.
    """
    states = [(dataset, result_files.read_job_state(job, dataset.name)) for dataset in job.evaluate_on]
    failed = next((dataset for dataset, state in states if state == "failed"), None)
    if failed is not None and not retry_failed:
        return None, result_files.job_folder(job, failed.name) / result_files.FAILED
    missing = tuple(dataset for dataset, state in states if state != "finished")
    return replace(job, evaluate_on=missing) if missing else None, None


def is_run_locked(job: FinetuneJob) -> bool:
    """Return whether another process holds the lock of this run."""
    with try_lock_run(job) as is_own:
        return not is_own


def try_lock_run(job: FinetuneJob) -> AbstractContextManager[bool]:
    """Try to lock a training, whatever its evaluation sets (see `megaenc.atomic_io.try_lock`).

    On a file system without locks the work may be done twice, with equal results, written atomically.
    """
    name = f"{job.family}_{job.train_on}_lr{format_learning_rate(job.learning_rate)}_sd{job.seed}"
    return try_lock(Path(job.output, job.model.name, ".locks", name))
