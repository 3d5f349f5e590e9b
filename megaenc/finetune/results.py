"""The tree of results, written and read: MODEL/FAMILY/DATASET/lr2e-05_sd0/results.json, the study's own published layout.

Retrieval names the set that was trained on too: MODEL/IR/EVALSET/TRAINSET_lr2e-05_sd0. A run that cannot be finished, as its rate
makes the loss NaN, leaves `failed.json` there instead. Neither holds a time: the same run gives the same bytes.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaenc.errors import InputError
from megaenc.files import left_behind, parse_json, read_regular, remove, write_whole
from megaenc.finetune.examples import Family
from megaenc.finetune.jobs import Job, rate_name
from megaenc.finetune.options import Protocol

if TYPE_CHECKING:
    from megaenc.finetune.tasks.base import Scores

_MOST = 1 << 32
"""The most bytes that are read of a run's results; some have a score for each of millions of examples."""
RESULTS, FAILED, TIMING = "results.json", "failed.json", "timing.json"
State = Literal["finished", "failed", "missing"]

_FOLDER = re.compile(r"(?:(?P<train_on>.+)_)?lr(?P<rate>\d[\d.]*(?:e[+-]?\d+)?)_sd(?P<seed>\d+)")
# Choices that stand for "what fits the model and the machine": whatever a run found to fit is what was asked for.
_WHATEVER_FITS = {"max_length": 0, "precision": ""}


@dataclass(frozen=True)
class Split:
    """The scores of a run on one split, without those of single examples. All are fractions."""

    score: float
    metrics: Mapping[str, float]
    baseline: Mapping[str, float]
    collapsed: str | None


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
    there = _head(file)
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
        if (values := _read(path)) is not None:
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
    found = [result for path in _run_folders(Path(root)) if (result := read(path)) is not None]
    if not found:
        raise InputError(f"{root}: holds no results, expected MODEL/FAMILY/DATASET/lr2e-05_sd0/{RESULTS} below it")
    return found


def _run_folders(root: Path) -> Iterator[Path]:
    def inside(path: Path) -> list[Path]:
        try:
            with os.scandir(path) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; expected a folder of results") from None
        return [path / name for name in names]

    for model in inside(root):
        for family in inside(model):
            if family.name in list(Family):
                for dataset in inside(family):
                    yield from inside(dataset)


def read(path: Path) -> Result | None:
    """The run of one folder; None for a folder that is no run's. Raises InputError for a file that no run wrote."""
    name = _FOLDER.fullmatch(path.name)
    if name is None:
        return None
    *_, model, family, dataset, _ = path.parts
    train_on = name["train_on"] or dataset
    run = (model, family, dataset, train_on, float(name["rate"]), int(name["seed"]))
    if (values := _read(path / RESULTS)) is not None:
        return Result(*run, path, _split(path, dataset, values, "validation"), _split(path, dataset, values, "test"))
    if (values := _read(path / FAILED)) is not None:
        return Result(*run, path, None, None, failure=f"{values.get('reason', 'no reason given')}")
    return None


def _split(path: Path, dataset: str, values: dict[str, Any], name: str) -> Split:
    try:
        split = values[name]
        score = float(split["score"])
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path / RESULTS}: field `{name}.score`: found none, expected a number") from None
    metrics, baseline = split.get("metrics") or {}, split.get("baseline") or {}
    for field, numbers in (("metrics", metrics), ("baseline", baseline)):
        if not isinstance(numbers, dict) or not all(type(value) in (int, float) for value in numbers.values()):
            raise InputError(f"{path / RESULTS}: field `{name}.{field}`: expected an object of numbers")
    collapsed = split["collapsed"] if "collapsed" in split else _looks_collapsed(dataset, score, name, split)
    return Split(score, metrics, baseline, None if collapsed is None else str(collapsed))


# What a model that says the same of every example scores on test, from the labels of these sets: for published results, which
# do not tell.
_CONSTANT = {
    "sst2": {"constant prediction": (428 / 872, 444 / 872)},
    "qqp": {"constant prediction": (25545 / 40430, 14885 / 40430)},
    "mnli_m": {"constant prediction": (3479 / 9815, 3123 / 9815, 3213 / 9815)},
    "squad_v2": {"never answers": (5945 / 11873,)},
}


def _looks_collapsed(dataset: str, score: float, name: str, split: dict[str, Any]) -> str | None:
    if split.get("scores_i") == "equal" and score < 1:
        return "every example scores the same"
    for why, scores in _CONSTANT.get(dataset, {}).items():
        if name == "test" and any(abs(score - constant) < 1e-6 for constant in scores):
            return why
    return None


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


def _read(path: Path) -> dict[str, Any] | None:
    """The fields of a file without the examples' own scores; None where there is no file."""
    try:
        content = read_regular(path, _MOST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected what a run wrote there") from None
    try:
        values = parse_json(_without_lists(content))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}), expected what a run wrote there; remove it") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a {type(values).__name__}, expected an object; remove it")
    return values


def _head(path: Path) -> dict[str, Any]:
    """Of a run's file the fields before the scores, which are a line each, without reading those; nothing of another file."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        for line in stream.read(_HEAD).split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                found |= json.loads(b"{" + line.strip().removesuffix(b",") + b"}")
    return found


_HEAD = 8192  # bytes; they are some 1,200
_LONG = re.compile(rb'"(scores_i|metrics_i)":\s*')  # inside of a string the quotes would be escaped


def _without_lists(content: bytes) -> bytes:
    """`content` with "equal" or null in the place of each list of scores, and null in that of each object of them.

    Searching for a bracket is a hundred times faster than parsing the numbers before it.
    """
    pieces, at = [], 0
    while (key := _LONG.search(content, at)) is not None:
        pieces.append(content[at : key.end()])
        if key[1] == b"scores_i":
            at = content.index(b"]", key.end()) + 1
            pieces.append(b'"equal"' if _all_equal(content[key.end() : at]) else b"null")
        else:
            at = key.end()
            while -1 < (opens := content.find(b"[", at)) < content.index(b"}", at):
                at = content.index(b"]", opens) + 1
            at = content.index(b"}", at) + 1
            pieces.append(b"null")
    return b"".join((*pieces, content[at:]))


def _all_equal(text: bytes) -> bool:
    """Whether the numbers of a list of at least two are one and the same."""
    first, *few = text[:400].strip(b"[] \n").split(b",")
    if any(float(number) != float(first) for number in few[:-1]):  # the last may be cut
        return False
    return bool(few) and len({float(number) for number in text.strip(b"[] \n").split(b",")}) == 1
