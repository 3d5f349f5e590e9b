"""Fine-tuning jobs: their construction, remaining work, locks and progress."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from megaenc.atomic_io import try_lock
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig, format_learning_rate
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import POOLED_FAMILIES, Dataset, TaskFamily
from megaenc.finetune.job import FinetuneJob, Fingerprints, NamedSource
from megaenc.finetune.model.fingerprint import (
    check_model_directory,
    compute_model_fingerprints,
    compute_model_stamp,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.results import files as result_files

DatasetFinder = Callable[..., Dataset]
"""Function like `megaenc.finetune.datasets.registry.find_dataset`."""


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
    """Return one FinetuneJob per model, training set, seed and learning rate.

    Retrieval sets with the same training pairs share jobs. Jobs are ordered by training set, model,
    seed and rate. Special tokens that `protocol` leaves open are those of each model's tokenizer.

    Args:
        models, datasets: Arguments of `parse_model` and of `find_dataset`, which gets `data` too.
        rates, seeds: Peak learning rates, and seeds, which are iterated several times.
        output: Root directory of the results, whose cache of fingerprints is read, not written.

    Raises:
        InputError: A model, a data set or `protocol` is unusable, or a name or a rate repeated.
    """
    sources = [parse_model(name_or_path) for name_or_path in models]
    loaded_datasets = [
        (name_or_path, find_dataset(name_or_path, **asdict(data))) for name_or_path in datasets
    ]
    rename_hint = "; name one of them otherwise, NAME=DIRECTORY"
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
    protocols = {model.name: _resolve_special_tokens(protocol, model) for model in sources}
    weight_fingerprints = compute_model_fingerprints([model.location for model in sources], output)
    jobs = []
    for (family, train_on), members in trainings.items():
        first_dataset = members[0][1]
        for _, dataset in members:
            if dataset.train_fingerprint != first_dataset.train_fingerprint:
                raise InputError(
                    f"--datasets {dataset.name}: found other pairs named {train_on} than "
                    f"{first_dataset.name} has"
                )
        evaluate_on = tuple(
            NamedSource(dataset.name, name_or_path) for name_or_path, dataset in members
        )
        dataset_fingerprints = {dataset.name: dataset.fingerprint for _, dataset in members}
        if protocol.head == "native" and family == TaskFamily.IR:
            raise InputError(
                f"--head native: found {first_dataset.name}, and retrieval has no head; "
                "expected --head linear"
            )
        if protocol.pooling != "mean" and family not in (*POOLED_FAMILIES, TaskFamily.IR):
            raise InputError(
                f"--pooling {protocol.pooling}: found {first_dataset.name}, "
                f"and {family} reads the states of all tokens; expected mean"
            )
        if protocol.threshold != "0.5" and family != TaskFamily.MULTI_LABEL:
            raise InputError(
                f"--threshold {protocol.threshold}: found {first_dataset.name} of the task "
                f"{family}, expected multi_label"
            )
        for model, weights in zip(sources, weight_fingerprints, strict=True):
            tokenizer = compute_tokenizer_fingerprint(model.location)
            stamp = compute_model_stamp(model.location)
            fingerprints = Fingerprints(
                weights, tokenizer, first_dataset.train_fingerprint, dataset_fingerprints, stamp
            )
            jobs += [
                FinetuneJob(
                    model,
                    family,
                    train_on,
                    evaluate_on,
                    rate,
                    seed,
                    output,
                    protocols[model.name],
                    data,
                    fingerprints,
                )
                for seed in seeds
                for rate in rates
            ]
    return jobs


def _resolve_special_tokens(protocol: FinetuneConfig, model: NamedSource) -> FinetuneConfig:
    """Return `protocol` with the tokenizer's default special tokens if it names none."""
    if protocol.special_tokens or protocol.adds_named_tokens:
        return protocol.normalize_special_tokens()
    from megaenc.data.tokenizer.tokenizer import load_tokenizer  # imports transformers
    from megaenc.finetune.tokenized import resolve_protocol

    return resolve_protocol(protocol, load_tokenizer(model.location, "--model"))


def parse_model(name_or_path: str) -> NamedSource:
    """Return the NamedSource of a model directory, given as `NAME=PATH` or `PATH`.

    Its location is the absolute path without symbolic links. The last part of that path is the name
    of a bare `PATH`: of a link, that of its target. A text with a slash before `=` is a bare path.

    Raises:
        InputError: The directory holds no model, or the name is empty, begins with a dot or has
            unprintable characters.
    """
    name, equals, directory = name_or_path.partition("=")
    if not equals or "/" in name:
        name = ""
        directory = name_or_path
    check_model_directory(directory)
    path = Path(directory).resolve()
    name = name or path.name
    if not name or name.startswith(".") or not name.isprintable():
        raise InputError(
            f"--model {name_or_path}: found the name {name!r}, expected one for a directory; "
            "say NAME=DIRECTORY"
        )
    return NamedSource(name, str(path))


def select_remaining_work(
    job: FinetuneJob, *, retry_failed: bool
) -> tuple[FinetuneJob | None, Path | None]:
    """Return `job` with only the data sets that lack results, or its failed.json.

    A failed training has failed for all its data sets and is selected only if `retry_failed`.

    Returns:
        (job, None), (None, path of failed.json) of a failed job, or (None, None) of a finished one.

    Raises:
        InputError: Results are of another protocol, model, tokenizer or data, or malformed.
    """
    states = [
        (dataset, result_files.read_job_state(job, dataset.name)) for dataset in job.evaluate_on
    ]
    failed = next((dataset for dataset, state in states if state == "failed"), None)
    if failed is not None and not retry_failed:
        return None, result_files.job_directory(job, failed.name) / result_files.FAILED
    missing = tuple(dataset for dataset, state in states if state != "finished")
    return replace(job, evaluate_on=missing) if missing else None, None


def is_run_locked(job: FinetuneJob) -> bool:
    """Return whether a process runs the job's training and so holds its lock.

    The lock is taken for a moment to find out, which creates missing directories of its file.

    Raises:
        InputError: The lock's file cannot be created.
    """
    with try_lock_run(job) as is_acquired:
        return not is_acquired


def try_lock_run(job: FinetuneJob) -> AbstractContextManager[bool]:
    """Return a context manager that tries to lock the job's training without waiting.

    It yields whether the lock was acquired, and releases the lock after the block. On a file system
    without locks it yields True, so that the work may be done twice, with equal results, written
    atomically. Missing directories of the lock's file are created, below `job.output`.

    Raises:
        InputError: The lock's file cannot be created; it is raised by entering the manager.
    """
    name = f"{job.family}_{job.train_on}_lr{format_learning_rate(job.learning_rate)}_sd{job.seed}"
    return try_lock(Path(job.output, job.model.name, ".locks", name))
