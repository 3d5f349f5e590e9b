"""The tree of results, written and read: MODEL/FAMILY/DATASET/lr2e-05_sd0/results.json, the study's own published layout.

Retrieval names the set that was trained on too: MODEL/IR/EVALSET/TRAINSET_lr2e-05_sd0. A run that cannot be finished, as its rate
makes the loss NaN, leaves `failed.json` there instead. Neither holds a time: the same run gives the same bytes.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaenc.errors import InputError
from megaenc.files import left_behind, remove, write_whole
from megaenc.finetune.examples import Family
from megaenc.finetune.jobs import Job, rate_name
from megaenc.finetune.options import Protocol
from megaenc.finetune.result_file import Split, read_fields, read_head, read_reason, read_split

if TYPE_CHECKING:
    from megaenc.finetune.tasks.base import Scores

RESULTS, FAILED, TIMING = "results.json", "failed.json", "timing.json"
State = Literal["finished", "failed", "missing"]

_FOLDER = re.compile(r"(?:(?P<train_on>.+)_)?lr(?P<rate>\d[\d.]*(?:e[+-]?\d+)?)_sd(?P<seed>\d+)")
# Choices that stand for "what fits the model and the machine": whatever a run found to fit is what was asked for.
_WHATEVER_FITS = {"max_length": 0, "precision": ""}


@dataclass(frozen=True)
class Result:
    """A run that was found in a tree: its scores on both splits, or why it failed."""

    model: str
    family: str
    dataset: str
    train_on: str
    learning_rate: float
    seed: int
    path: Path
    validation: Split | None
    test: Split | None
    failure: str | None = None


def folder(job: Job, dataset: str) -> Path:
    """Where the results of `job` on `dataset` are."""
    return run_folder(Path(job.output, job.model.name), job.family, dataset, job.train_on, job.learning_rate, job.seed)


def run_folder(tree: Path, family: str, dataset: str, train_on: str, rate: float, seed: int) -> Path:
    """Where the results of one run are in the `tree` of its model."""
    run = f"lr{rate_name(rate)}_sd{seed}"
    return tree / family / dataset / (f"{train_on}_{run}" if family == Family.IR else run)


def other_origin(file: Path, asked: Protocol, fingerprints: Mapping[str, str]) -> str | None:
    """What a run's file was made with otherwise, with both values: a choice of the protocol, or one of `fingerprints`.

    None where all are as asked, or the file does not say.
    """
    there = read_head(file)
    for section, wanted, length in (("protocol", dataclasses.asdict(asked), None), ("fingerprints", fingerprints, 12)):
        if isinstance(there.get(section), dict):
            for field, was, value in _different(there[section], wanted):
                if field in there[section]:
                    return f"{field} is {str(was)[:length]} there, {str(value)[:length]} here"
    return None


def write(
    job: Job,
    dataset: str,
    scores: Mapping[str, "Scores"],
    *,
    steps: int,
    protocol: Protocol,
    trained: str,
    seconds: Mapping[str, float],
) -> None:
    """Write the scores of `validation` and `test`; `protocol` is the job's with what was found to fit.

    `trained` is the digest of the weights that they are of. `seconds` says how long what took; it goes into a file beside.
    """
    splits = {name: dataclasses.asdict(split) for name, split in scores.items()}
    # The long lists come last: whoever looks into the file sees the scores first.
    long = ("scores_i", "metrics_i")
    ordered = {
        name: {field: split[field] for field in sorted(split, key=lambda field: (field in long, field != "score"))}
        for name, split in splits.items()
    }
    _write(folder(job, dataset) / TIMING, {name: round(value, 3) for name, value in seconds.items()})
    _write(folder(job, dataset) / RESULTS, _identity(job, dataset, protocol) | {"steps": steps, "trained": trained} | ordered)
    (folder(job, dataset) / FAILED).unlink(missing_ok=True)


def write_failure(job: Job, reason: str, *, step: int, protocol: Protocol) -> None:
    """Write that `job` cannot be finished, for each data set it was to be evaluated on."""
    for dataset in job.evaluate_on:
        failure = {"reason": reason, "step": step}
        _write(folder(job, dataset.name) / FAILED, _identity(job, dataset.name, protocol) | failure)


def state(job: Job, dataset: str) -> State:
    """Whether `job` has been done on `dataset`.

    Raises InputError, naming the field, for results of another protocol or of other data.
    """
    for name, found in ((RESULTS, "finished"), (FAILED, "failed")):
        path = folder(job, dataset) / name
        if (values := read_fields(path)) is not None:
            _check_same(path, values, _identity(job, dataset, job.protocol))
            return found
    return "missing"


def sweep(job: Job) -> None:
    """Remove what runs that were killed while they wrote have left. For whoever has the run to oneself."""
    for dataset in job.evaluate_on:
        path = folder(job, dataset.name)
        for left in left_behind(path / RESULTS, path / FAILED, path / TIMING):
            remove(left)


def scan(root: str | Path) -> list[Result]:
    """Every run below `root`, in the order of the names; what is no run's folder is passed by.

    Raises InputError for a file that no run wrote. Examples' own scores are skipped, not parsed: the tree of the study is
    several gigabytes of them.
    """
    found: dict[tuple, Result] = {}
    for path in _run_folders(Path(root)):
        if (result := read(path)) is not None:
            one = (result.model, result.family, result.dataset, result.train_on, result.learning_rate, result.seed)
            if one in found:
                raise InputError(f"{path}: the same run as {found[one].path.name}; expected one of them, remove the other")
            found[one] = result
    if not found:
        raise InputError(f"{root}: holds no results, expected MODEL/FAMILY/DATASET/lr2e-05_sd0/{RESULTS} below it")
    return list(found.values())


def _run_folders(root: Path) -> Iterator[Path]:
    def inside(path: Path) -> list[Path]:
        try:
            with os.scandir(path) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; expected a folder of results") from None
        if foreign := [name for name in names if not _is_utf8(name)]:
            raise InputError(f"{path}: holds the folder {os.fsencode(foreign[0])!r}; expected a name in UTF-8")
        return [path / name for name in names]

    for model in inside(root):
        for family in inside(model):
            if family.name in list(Family):
                for dataset in inside(family):
                    yield from inside(dataset)


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def read(path: Path) -> Result | None:
    """The run of one folder; None for a folder that is no run's. Raises InputError for a file that no run wrote."""
    name = _FOLDER.fullmatch(path.name)
    rate = _rate(name["rate"]) if name else None
    if name is None or rate is None:
        return None
    *_, model, family, dataset, _ = path.parts
    run = (model, family, dataset, name["train_on"] or dataset, rate, int(name["seed"]))
    if (values := read_fields(path / RESULTS)) is not None:
        splits = [read_split(path / RESULTS, dataset, values, split) for split in ("validation", "test")]
        return Result(*run, path, *splits)
    if (values := read_fields(path / FAILED)) is not None:
        return Result(*run, path, None, None, failure=read_reason(path / FAILED, values))
    return None


def _rate(text: str) -> float | None:
    """Return the learning rate that a folder's name holds; None for text that is none."""
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def _identity(job: Job, dataset: str, protocol: Protocol) -> dict[str, Any]:
    return {
        "model": job.model.name,
        "family": str(job.family),
        "dataset": dataset,
        "train_on": job.train_on,
        "learning_rate": job.learning_rate,
        "seed": job.seed,
        "protocol": dataclasses.asdict(protocol),
        "fingerprints": job.fingerprints.of(dataset),
    }


_MISSING = object()


def _different(there: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fields of `asked` that are otherwise `there`, or missing: name, value there, value asked for."""
    for field, value in asked.items():
        was = there.get(field, _MISSING)
        if was != value and _WHATEVER_FITS.get(field, _MISSING) != value:
            yield field, was, value


def _check_same(path: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    for section in ("protocol", "fingerprints"):
        there = found.get(section)
        if not isinstance(there, dict):
            raise InputError(f"{path}: field `{section}`: not there, so it cannot go on here; choose another --output")
        for field, was, value in _different(there, asked[section]):
            said = "none" if was is _MISSING else repr(was)
            raise InputError(
                f"{path}: field `{section}.{field}`: found {said[:24]}, expected {repr(value)[:24]}; "
                "give what it was made with, choose another --output or remove it"
            )


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {path.parent}: cannot be made: {error.strerror}") from None
    lines = [f"{json.dumps(key)}: {_text(value)}" for key, value in values.items()]
    write_whole(path, "{\n  " + ",\n  ".join(lines) + "\n}\n")


def _text(value: Any) -> str:
    """JSON with a line for each field of a split and no NaN."""
    if isinstance(value, dict) and "score" in value:
        lines = [f"{json.dumps(key)}: {json.dumps(part, allow_nan=False)}" for key, part in value.items()]
        return "{\n    " + ",\n    ".join(lines) + "\n  }"
    return json.dumps(value, allow_nan=False)
