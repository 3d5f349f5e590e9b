"""What a fine-tuning grid trains, known without opening a data set: kinds of tasks, and which sets share a training."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError
from megaenc.finetune.datasets import beir, demo, hub
from megaenc.finetune.datasets.registry import name_and_path
from megaenc.finetune.examples import Family
from megaenc.finetune.grid import GridSettings


@dataclass(frozen=True)
class Training:
    """A data set that models are trained on, and those that they are then evaluated on: several in retrieval."""

    train_on: str
    family: str
    """SC, TC, QA or IR; "" for local files that do not tell before they are read"""
    datasets: tuple[str, ...]


def trainings(settings: GridSettings, data: Path) -> tuple[Training, ...]:
    """Return the trainings of a grid for each model, rate and seed. Raises InputError for an unknown data set."""
    members: dict[tuple[str, str], list[str]] = {}
    for dataset in settings.datasets:
        name, family, train_on = _look_at(dataset, settings, data)
        for part in (name, train_on):
            if part.startswith(".") or "/" in part or not part.isprintable() or not 0 < len(part.encode()) <= 180:
                found = f"finetune: field `datasets`: {dataset[:60]}: found the name {part[:60]!r}"
                raise InputError(f"{found}, expected one for a folder of at most 180 bytes; name the set with NAME=PATH")
        members.setdefault((train_on, family), []).append(name)
    return tuple(Training(*key, tuple(sets)) for key, sets in members.items())


def located(dataset: str, data: Path) -> str:
    """As `megaenc finetune grid` is to be told it: a path begins in the folder `data`."""
    if name_and_path(dataset)[1] is None:
        return dataset
    name, equals, place = dataset.partition("=")
    return f"{name}={data / place}" if equals and "/" not in name else str(data / dataset)


def name_in_results(dataset: str) -> str:
    """What results call a data set that `megaenc finetune grid` is told as `located` says."""
    return name_and_path(dataset)[0]


def _look_at(dataset: str, settings: GridSettings, data: Path) -> tuple[str, str, str]:
    """The name of a data set, its kind, and what models are trained on before they read it."""
    name, path = name_and_path(located(dataset, data))
    if name in hub.HUB_SETS and path is None:
        family = str(hub.HUB_SETS[name].family)
    elif path is None:
        family = name.removeprefix("demo_").upper()
    else:
        _check_place(dataset, path)
        family = settings.data.task or ("IR" if os.path.isdir(path) and beir.is_beir(path) else "")
    if family != Family.IR:
        return name, family, name
    if settings.data.train_on:
        return name, family, name_in_results(located(settings.data.train_on, data))
    return name, family, hub.TRAINING_PAIRS if path is None and name in hub.HUB_SETS else name


def _check_place(dataset: str, path: Path) -> None:
    """InputError for a word that is no name and no file; a path may come into being until the study is run."""
    if "=" in dataset or "/" in dataset:
        return
    names = [*hub.HUB_SETS, *demo.NAMES]
    near = difflib.get_close_matches(dataset.lower(), names, n=1)
    if near or not os.path.exists(path):  # unlike Path's, False for a name that is too long
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}, a path or NAME=PATH"
        raise InputError(f"finetune: field `datasets`: found {dataset}; {hint}")
