"""What a fine-tuning grid trains, known without opening a data set: kinds of tasks, and which sets share a training."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError
from megaenc.finetune.datasets import beir, demo, hub
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
    """The trainings of a grid for each model, rate and seed. InputError for a data set that there is not."""
    members: dict[tuple[str, str], list[str]] = {}
    for dataset in settings.datasets:
        name, family, train_on = _look_at(dataset, settings, data)
        members.setdefault((train_on, family), []).append(name)
    return tuple(Training(train_on, family, tuple(sets)) for (train_on, family), sets in members.items())


def located(dataset: str, data: Path) -> str:
    """As `megaenc finetune grid` is to be told it: a path begins in the folder `data`."""
    if dataset in demo.NAMES or dataset.partition("@")[0] in hub.HUB_SETS:
        return dataset
    name, equals, place = dataset.partition("=")
    return f"{name}={data / place}" if equals and "/" not in name else str(data / dataset)


def _look_at(dataset: str, settings: GridSettings, data: Path) -> tuple[str, str, str]:
    """The name of a data set, its kind, and what models are trained on before they read it."""
    if dataset in demo.NAMES:
        family = dataset.removeprefix("demo_").upper()
        return dataset, family, settings.data.train_on if family == Family.IR and settings.data.train_on else dataset
    known = hub.HUB_SETS.get(dataset.partition("@")[0])
    if known is not None:
        pairs = settings.data.train_on or hub.TRAINING_PAIRS
        return dataset, str(known.family), pairs if known.family is Family.IR else dataset
    name, equals, place = dataset.partition("=")
    if not equals and "/" not in dataset:
        names = [*hub.HUB_SETS, *demo.NAMES]
        near = difflib.get_close_matches(dataset.lower(), names, n=1)
        if near or not (data / dataset).exists():
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}, a path or NAME=PATH"
            raise InputError(f"finetune: field `datasets`: found {dataset}; {hint}")
    name, place = (name, place) if equals and "/" not in name else (Path(dataset).name, dataset)
    path = data / place
    family = settings.data.task or ("IR" if path.is_dir() and beir.is_beir(path) else "")
    return name, family, settings.data.train_on if family == Family.IR and settings.data.train_on else name
