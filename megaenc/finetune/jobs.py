"""A fine-tuning run as it is asked for, and how far it says to be."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from megaenc.errors import InputError
from megaenc.finetune.datasets.base import Dataset
from megaenc.finetune.datasets.local import DataFlags
from megaenc.finetune.examples import Family
from megaenc.finetune.model_folder import check_model_folder, model_fingerprints, model_stamp, tokenizer_fingerprint
from megaenc.finetune.options import Protocol


@dataclass(frozen=True)
class Named:
    """Something by the name that results know it under, and where it is: a folder, or what `datasets.find` takes."""

    name: str
    where: str


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 in hex of what a run reads."""

    model: str
    tokenizer: str
    train_on: str
    datasets: Mapping[str, str] = field(hash=False)
    """By name, of each data set that is evaluated on."""
    model_stamp: str
    """Changes when a file of the model does; not recorded."""

    def of(self, dataset: str) -> dict[str, str]:
        """What the results of one data set record."""
        of_training = {"model": self.model, "tokenizer": self.tokenizer, "train_on": self.train_on}
        return of_training | {"dataset": self.datasets[dataset]}


@dataclass(frozen=True)
class Job:
    """One training, and the data sets that its model is evaluated on: several in retrieval, else the one it was trained on."""

    model: Named
    family: Family
    train_on: str
    evaluate_on: tuple[Named, ...]
    learning_rate: float
    seed: int
    output: str
    """Folder of all results."""
    protocol: Protocol
    data: DataFlags
    fingerprints: Fingerprints

    @property
    def name(self) -> str:
        """For the eye: `toy sst2 2e-05 sd0`."""
        return f"{self.model.name} {self.train_on} {rate_name(self.learning_rate)} sd{self.seed}"


@dataclass(frozen=True)
class Progress:
    """How far a run is in a stage; `total` is 0 where that is not known."""

    stage: Literal["loading", "training", "validation", "test"]
    """In this order; retrieval goes through the last two once for each set that it is evaluated on."""
    done: float = 0
    total: float = 0
    fields: Mapping[str, float | str] = field(default_factory=dict)
    """Shown as they are: loss, data set."""


def rate_name(rate: float) -> str:
    """A learning rate as result folders have it: 2e-05, 5e-04, 1.5e-05; no two rates share a name."""
    return next(name for digits in range(17) if float(name := f"{rate:.{digits}e}") == rate)


CACHE = ".tokenised"
"""Folder of tokenised data next to the results."""
Find = Callable[..., Dataset]
"""As `megaenc.finetune.datasets.registry.find`: takes what the command line calls a data set, and the fields of DataFlags."""


def make_jobs(
    models: Sequence[str],
    datasets: Sequence[str],
    rates: Sequence[float],
    seeds: Iterable[int],
    output: str,
    protocol: Protocol,
    data: DataFlags,
    find: Find,
) -> list[Job]:
    """Return every training of a grid, or the one of a single run; retrieval sets with the same training pairs are one.

    Data set after data set, on each model after model, seed after seed with all rates: the cells of a summary fill one by one.
    Models and data sets are looked at. Raises InputError for what no run could be made of.
    """
    named = [named_model(text) for text in models]
    found = [(text, find(text, **asdict(data))) for text in datasets]
    _all_different("--model", [model.name for model in named])
    _all_different("--datasets", [dataset.name for _, dataset in found])
    _all_different("--learning-rates", rates)
    trainings: dict[tuple[Family, str], list[tuple[str, Dataset]]] = defaultdict(list)
    for text, dataset in found:
        trainings[dataset.family, dataset.train_on].append((text, dataset))
    weights_of = model_fingerprints([model.where for model in named], output)
    jobs = []
    for (family, train_on), members in trainings.items():
        first = members[0][1]
        for _, other in members:
            if other.train_fingerprint != first.train_fingerprint:
                raise InputError(f"--datasets {other.name}: found other pairs named {train_on} than {first.name} has")
        evaluate_on = tuple(Named(dataset.name, text) for text, dataset in members)
        by_name = {dataset.name: dataset.fingerprint for _, dataset in members}
        for model, weights in zip(named, weights_of, strict=True):
            tokenizer, stamp = tokenizer_fingerprint(model.where), model_stamp(model.where)
            fingerprints = Fingerprints(weights, tokenizer, first.train_fingerprint, by_name, stamp)
            jobs += [
                Job(model, family, train_on, evaluate_on, rate, seed, output, protocol, data, fingerprints)
                for seed in seeds
                for rate in rates
            ]
    return jobs


def check_rate(flag: str, rate: float) -> None:
    """InputError for a learning rate that trains nothing."""
    if not 0 < rate < float("inf"):
        raise InputError(f"{flag}: found {rate}, expected more than 0")


def _all_different(flag: str, values: Sequence) -> None:
    for value in values:
        if values.count(value) > 1:
            hint = "; name one of them otherwise, NAME=FOLDER" if flag != "--learning-rates" else ""
            raise InputError(f"{flag}: found {value} twice, expected each once{hint}")


def named_model(text: str) -> Named:
    """`FOLDER`, named by its last part, or `NAME=FOLDER`. Raises InputError for a folder that no model can be loaded from."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name:
        name, folder = "", text
    check_model_folder(folder)
    path = Path(folder).resolve()
    name = name or path.name
    if not name or name.startswith(".") or not name.isprintable():
        raise InputError(f"--model {text}: found the name {name!r}, expected one for a folder; say NAME=FOLDER")
    return Named(name, str(path))
