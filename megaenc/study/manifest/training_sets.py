"""Training sets of a study's fine-tuning grid.

They follow from the names of the data sets. Of local data the first row is read only with
`threshold`, to refuse other tasks than multi-label classification.
"""

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megaenc.console import truncate_text
from megaenc.errors import InputError, closest_match
from megaenc.finetune.datasets import beir, demo, hub, local
from megaenc.finetune.datasets.registry import parse_dataset_name
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.grid.command import GridConfig
from megaenc.study.manifest.pretrain_args import prefix_errors


@dataclass(frozen=True)
class TrainingSet:
    """Data set to fine-tune on, with those to evaluate on (several in retrieval).

    `train_on` and `datasets` are names in results. `family` is the value of a TaskFamily, such as
    SC, or "" for local files, which determine it when they are read.
    """

    train_on: str
    """name in results"""
    family: str
    """value of a TaskFamily; "" for local files, which determine it when they are read"""
    datasets: tuple[str, ...]
    """names in results of the sets to evaluate on"""


def plan_training_sets(grid: GridConfig, data_dir: Path) -> tuple[TrainingSet, ...]:
    """Return a TrainingSet for each set that `grid` trains on, in order of appearance.

    Args:
        data_dir: Directory of relative paths, where BEIR directories are recognized. A path with
            NAME= or a slash need not exist; one without must, or it is an unknown data set.

    Raises:
        InputError: A data set is unknown, its name cannot be that of a directory, or two data sets,
            or training sets of two task families, have the same name.
    """
    members: dict[tuple[str, str], list[str]] = {}
    for dataset in grid.datasets:
        name, family, train_on = _parse_dataset(dataset, grid, data_dir)
        for part in (name, train_on):
            if (
                part.startswith(".")
                or "/" in part
                or not part.isprintable()
                or not 0 < len(part.encode()) <= 180
            ):
                message = (
                    f"finetune: field `datasets`: {dataset[:60]}: found the name {part[:60]!r}"
                )
                raise InputError(
                    f"{message}, expected a directory name of at most 180 bytes; name the set "
                    "with NAME=PATH"
                )
        members.setdefault((train_on, family), []).append(name)
    for train_on, times in Counter(train_on for train_on, _ in members).items():
        if times > 1:
            problem = (
                f"found {truncate_text(train_on, 60)} as a training set of {times} task families"
            )
            raise InputError(
                f"finetune: field `datasets`: {problem}, expected one; name a path with NAME=PATH"
            )
    for name, times in Counter(name for sets in members.values() for name in sets).items():
        if times > 1:
            raise InputError(
                f"finetune: field `datasets`: found {truncate_text(name, 60)} as the name of "
                f"{times} data sets, expected one; name a path with NAME=PATH"
            )
    return tuple(TrainingSet(*key, tuple(sets)) for key, sets in members.items())


def resolve_dataset_path(dataset: str, data_dir: Path) -> str:
    """Return `dataset`, PATH or NAME=PATH, with `data_dir` before PATH.

    The name of a known data set (also NAME@REVISION) is unchanged, and so is an absolute PATH; any
    other text is a path.
    """
    if parse_dataset_name(dataset)[1] is None:
        return dataset
    name, equals, path = dataset.partition("=")
    return f"{name}={data_dir / path}" if equals and "/" not in name else str(data_dir / dataset)


def dataset_result_name(dataset: str) -> str:
    """Return a data set's name in results: its own, or NAME of NAME=PATH.

    A @REVISION is left out. A PATH without NAME has the name of its directory or file; that of a
    file that exists, seen from the working directory, loses the ending of its format.
    """
    return parse_dataset_name(dataset)[0]


def _parse_dataset(dataset: str, grid: GridConfig, data_dir: Path) -> tuple[str, str, str]:
    """Return the result name, task family and training set of a data set."""
    name, path = parse_dataset_name(resolve_dataset_path(dataset, data_dir))
    if fraction := grid.data.validation_fraction:
        with prefix_errors("finetune"):
            if path is None:
                raise InputError(local.format_split_error(fraction, name, "a named data set"))
            if os.path.exists(path):
                local.check_split_fraction(fraction, path)
    is_on_hub = path is None and name in hub.HUB_DATASETS
    if is_on_hub:
        family = str(hub.HUB_DATASETS[name].family)
    elif path is None:
        family = name.removeprefix("demo_").upper()
    else:
        if "=" not in dataset and "/" not in dataset:  # a path need not exist before the study runs
            names = [*hub.HUB_DATASETS, *demo.DEMO_DATASETS]
            near = closest_match(dataset.lower(), names)
            if near or not os.path.exists(path):  # unlike Path's, False for a name that is too long
                hint = (
                    f"did you mean {near}?"
                    if near
                    else f"expected one of {', '.join(names)}, a path or NAME=PATH"
                )
                raise InputError(
                    f"finetune: field `datasets`: found {truncate_text(dataset)}; {hint}"
                )
        family = grid.data.task or (
            "IR" if os.path.isdir(path) and beir.is_beir_directory(path) else ""
        )
    if grid.protocol.threshold != "0.5":
        task = family
        if not task and os.path.exists(path):
            with contextlib.suppress(InputError):  # invalid data is for the grid to refuse
                task = local.infer_local_family(path)
        if task and task != TaskFamily.MULTI_LABEL:
            raise InputError(
                f"finetune: field `threshold`: found {grid.protocol.threshold}, expected 0.5: "
                f"{truncate_text(dataset)} is of the task {task}, not multi_label"
            )
    if family != TaskFamily.IR:
        return name, family, name
    if grid.data.train_on:
        return name, family, dataset_result_name(resolve_dataset_path(grid.data.train_on, data_dir))
    return name, family, hub.TRAINING_PAIRS if is_on_hub else name
