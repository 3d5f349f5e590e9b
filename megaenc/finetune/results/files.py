"""Reading and writing of the results tree, in the study's published layout.

A run is in MODEL/FAMILY/DATASET/lr2e-05_sd0/results.json. Retrieval adds the training set:
MODEL/IR/EVALSET/TRAINSET_lr2e-05_sd0. A run with a NaN loss leaves failed.json instead. Neither
file holds a time: equal runs give equal bytes.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from megaenc.atomic_io import atomic_write, find_stale_temp_files, remove_path
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig, format_learning_rate
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.job import FinetuneJob
from megaenc.json_checks import JSON_OBJECT, Count, Number, Text, check_json
from megaenc.json_files import parse_json, read_regular_file
from megaenc.output_paths import create_parent_dir

if TYPE_CHECKING:
    from megaenc.finetune.tasks.base import Scores

Evaluations = Sequence[tuple[int, float]]
"""(step, validation score) of each evaluation during a training."""

RESULTS = "results.json"
FAILED = "failed.json"
TIMING = "timing.json"
KEPT_MODEL = "model"
"""Name of the directory of a model that a grid keeps, in the run's directory."""
MODEL_DETAILS = "finetuning.json"
"""Name of the file with protocol and scores in the directory of a kept model."""

_RUN_DIRECTORY = re.compile(
    r"(?:(?P<train_on>.+)_)?lr(?P<rate>\d[\d.]*(?:e[+-]?\d+)?)_sd(?P<seed>\d+)"
)
# Values that a run replaces by one that fits the model and the machine.
_AUTOMATIC_VALUES = {"max_length": 0, "precision": ""}
# Values of fields that older files lack; fields with these values are not written.
_LATER_DEFAULTS = {
    "head": "linear",
    "eval_interval": 0,
    "best_checkpoint": False,
    "early_stopping": 0,
    "pooling": "mean",
    "threshold": "0.5",
}
_LATER_DEFAULTS |= {"special_tokens": "", "add_bos": None, "add_eos": None}
_MISSING = object()
_MAX_RESULT_BYTES = 2 << 30  # a results.json holds the scores of each example
# Much faster than parsing. Inside a string, the quotes of the keys would be escaped.
_SCORE_LISTS = re.compile(
    rb'("(?:score|metric)s_i":\s*)(?:\[([^\]]*+)\]|\{(?:[^][}]++|\[[^\]]*+\])*+\})'
)
# Test scores of constant predictions, to detect collapse in published results.
_CONSTANT_PREDICTION_SCORES = {
    "sst2": ("constant prediction", 428 / 872, 444 / 872),
    "qqp": ("constant prediction", 25545 / 40430, 14885 / 40430),
    "mnli_m": ("constant prediction", 3479 / 9815, 3123 / 9815, 3213 / 9815),
    "squad_v2": ("never answers", 5945 / 11873),
}
# The study drew the validation and test halves anew in each evaluation.
_UNSEEDED_TEST_SETS = ("nq",)


_ADVICE = "remove the file"
_ROUNDING = 1e-6
_Score = Annotated[float, Field(ge=-1 - _ROUNDING, le=1 + _ROUNDING, allow_inf_nan=False)]
METRIC_BOUNDS = dict.fromkeys(("matthews_correlation", "pearson", "spearman"), (-1.0, 1.0))
"""Smallest and largest value of metrics; 0 and 1 of those that are not named."""


class _Split(TypedDict):
    """Field `validation` or `test` of a result file."""

    __pydantic_config__ = JSON_OBJECT
    score: _Score
    metrics: NotRequired[dict[Text, Number] | None]
    baseline: NotRequired[dict[Text, Number] | None]
    collapsed: NotRequired[str | None]


class _Evaluation(TypedDict):
    """Entry of the field `evaluations` of a result file."""

    __pydantic_config__ = JSON_OBJECT
    step: Count
    score: Number


class _ResultFile(TypedDict):
    """Content of results.json."""

    __pydantic_config__ = JSON_OBJECT
    validation: _Split
    test: _Split
    evaluations: NotRequired[list[_Evaluation]]
    best_step: NotRequired[Count]
    threshold: NotRequired[Number]


class _FailureFile(TypedDict):
    """Content of failed.json."""

    __pydantic_config__ = JSON_OBJECT
    reason: NotRequired[str]


_RESULT_FILE = TypeAdapter(_ResultFile)
_FAILURE_FILE = TypeAdapter(_FailureFile)


@dataclass(frozen=True)
class SplitScores:
    """Scores of a run on one split, as fractions (see METRIC_BOUNDS), not percent.

    `score` is the study's, in regression the mean of two correlations, from -1 to 1; `metrics` are
    the standard ones by name, and `baseline` has both ("score" and the metrics) of a trivial
    predictor on the same examples. `metrics` and `baseline` are {} if the file lacks them.
    `collapsed` is the reason if the predictions are worthless, such as "constant prediction
    positive", else None.
    """

    score: float
    """The study's score."""
    metrics: dict[str, float]
    """Standard metrics by name."""
    collapsed: str | None
    """The reason if the predictions are worthless, such as "constant prediction positive", else
    None."""
    baseline: dict[str, float]
    """Score ("score") and metrics of the family's trivial baseline on the same examples."""


@dataclass(frozen=True)
class Result:
    """One run of a results tree, with its scores or the reason of its failure.

    `read_result` reads it from the directory `path`. `model`, `learning_rate` and `seed` identify
    it, with `family`, the name of a task family, and `train_on`, the training set, which differs
    from `dataset` only in retrieval. `validation` and `test` are None if the run failed, `failure`
    is None if it did not. `evaluations` has (step, score as a fraction) of the validations during
    training, of which `best_step` is the best, 0 without any. `threshold` is that of MULTI_LABEL,
    else None. With `scores_only` the file lacks everything but scores, like the study's own.
    """

    model: str
    family: str
    dataset: str
    train_on: str
    learning_rate: float
    seed: int
    path: Path
    validation: SplitScores | None
    test: SplitScores | None
    failure: str | None = None
    evaluations: Evaluations = ()
    best_step: int = 0
    """Step of the best of `evaluations`, 0 without any."""
    threshold: float | None = None
    """Smallest probability of a predicted label in MULTI_LABEL, else None."""
    scores_only: bool = False
    """True if its file has only scores, without protocol, fingerprints and standard metrics, like
    those of the study itself."""

    @property
    def has_common_examples(self) -> bool:
        """Return whether the test examples are those of every other run on the data set.

        Only the study's published results on NQ have other examples.
        """
        return not (self.scores_only and self.dataset in _UNSEEDED_TEST_SETS)


def job_directory(job: FinetuneJob, dataset: str) -> Path:
    """Return the directory of the results of `job` on the data set named `dataset`.

    It is OUTPUT/MODEL/FAMILY/DATASET/RUN, with RUN as in `run_directory`, and need not exist.
    """
    return run_directory(
        Path(job.output, job.model.name),
        job.family,
        dataset,
        job.train_on,
        job.learning_rate,
        job.seed,
    )


def run_directory(
    tree: Path, family: str, dataset: str, train_on: str, rate: float, seed: int
) -> Path:
    """Return a run's directory `tree`/FAMILY/DATASET/lr2e-05_sd0; it need not exist.

    The last part is TRAINSET_lr2e-05_sd0 for IR; other families do not use `train_on`.

    Args:
        tree: Directory of the model's results.
        family: Value of a TaskFamily.
        train_on: Name of the training set.
        rate: Peak learning rate.
    """
    run = f"lr{format_learning_rate(rate)}_sd{seed}"
    return tree / family / dataset / (f"{train_on}_{run}" if family == TaskFamily.IR else run)


@dataclass(frozen=True)
class DatasetResult:
    """Result of a run on one `dataset`, as `write_result` writes it.

    `FinetuneRun.evaluate` builds it. `scores` are by split (validation, test), `seconds` by stage,
    `steps` the number of training steps to the end or to the data set's early stop. `trained` is
    the SHA-256 (hex) of the weights that were evaluated, `protocol` the job's with automatic values
    resolved. `evaluations` has (step, score as a fraction) of validations during training, of which
    `best_step` is the best, 0 without any. `threshold` is that of MULTI_LABEL, else None.
    """

    dataset: str
    scores: Mapping[str, "Scores"]
    """Scores by split."""
    steps: int
    protocol: FinetuneConfig
    """The job's, with automatic values resolved."""
    trained: str
    """SHA-256 (hex) of the weights that were evaluated."""
    seconds: Mapping[str, float]
    """Seconds by stage."""
    evaluations: Evaluations = ()
    best_step: int = 0
    """Step of the best of `evaluations`, 0 without any."""
    threshold: float | None = None
    """Smallest probability of a predicted label in MULTI_LABEL, else None."""


def write_result(job: FinetuneJob, result: DatasetResult) -> None:
    """Write results.json and timing.json of `job` on a data set; drop failed.json.

    Directories are created, and each file is written atomically, results.json last.

    Raises:
        InputError: The directory cannot be created or written to.
    """
    place = job_directory(job, result.dataset)
    _write_json(place / TIMING, {name: round(value, 3) for name, value in result.seconds.items()})
    values = _build_identity(job, result.dataset, result.protocol) | {
        "steps": result.steps,
        "trained": result.trained,
    }
    values |= {name: dataclasses.asdict(split) for name, split in result.scores.items()}
    if result.evaluations:
        values["evaluations"] = [
            {"step": step, "score": score} for step, score in result.evaluations
        ]
        values["best_step"] = result.best_step
    if result.threshold is not None:
        values["threshold"] = result.threshold
    _write_json(place / RESULTS, values)
    (place / FAILED).unlink(missing_ok=True)


def write_failure(job: FinetuneJob, reason: str, *, step: int, protocol: FinetuneConfig) -> None:
    """Write failed.json for each evaluation data set of `job`, atomically.

    Args:
        reason: Text on the failure, in one line.
        step: Training step, from 1, in or after which the run failed.
        protocol: The job's, with automatic values resolved.

    Raises:
        InputError: A directory cannot be created or written to.
    """
    for dataset in job.evaluate_on:
        values = _build_identity(job, dataset.name, protocol) | {"reason": reason, "step": step}
        _write_json(job_directory(job, dataset.name) / FAILED, values)


def _build_identity(job: FinetuneJob, dataset: str, protocol: FinetuneConfig) -> dict[str, Any]:
    """Return the fields of a result file that identify its run."""
    return describe_job(job, dataset) | {
        "protocol": {
            name: value
            for name, value in dataclasses.asdict(protocol).items()
            if _LATER_DEFAULTS.get(name, _MISSING) != value
        },
        "fingerprints": job.fingerprints.for_dataset(dataset),
    }


def describe_job(job: FinetuneJob, dataset: str) -> dict[str, Any]:
    """Return model, task, data, rate and seed of a run, as its files record them.

    The keys are model, family, dataset, train_on, learning_rate and seed, and validation_fraction
    if it has split the data.
    """
    values = {
        "model": job.model.name,
        "family": str(job.family),
        "dataset": dataset,
        "train_on": job.train_on,
        "learning_rate": job.learning_rate,
        "seed": job.seed,
    }
    if job.data.validation_fraction:
        values["validation_fraction"] = job.data.validation_fraction
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    """Write fields as JSON without NaN, one line per field, and per field of a split."""
    fields = {}
    for key, value in values.items():
        if key in ("validation", "test"):
            parts = {name: json.dumps(part, allow_nan=False) for name, part in value.items()}
            fields[key] = _format_object(parts, "  ")
        else:
            fields[key] = json.dumps(value, allow_nan=False)
    create_parent_dir(path, "--output")
    atomic_write(path, _format_object(fields, "") + "\n")


def _format_object(fields: Mapping[str, str], indent: str) -> str:
    """Format fields of JSON text as an object with one line per field."""
    lines = [f"{indent}  {json.dumps(key)}: {value}" for key, value in fields.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def remove_partial_files(job: FinetuneJob) -> None:
    """Delete temporary files of killed runs from the job's result directories.

    The caller must hold the run's lock.
    """
    for path in (job_directory(job, dataset.name) for dataset in job.evaluate_on):
        for file in find_stale_temp_files(
            path / RESULTS, path / FAILED, path / TIMING, path / KEPT_MODEL
        ):
            remove_path(file)


def read_job_state(job: FinetuneJob, dataset: str) -> Literal["finished", "failed", "missing"]:
    """Return whether results of `job` on a data set are finished, failed or missing.

    A finished run has a results.json, also next to a failed.json; a failed one has only
    failed.json.

    Raises:
        InputError: A file is malformed, or its protocol or fingerprints differ from the job's; an
            empty `precision` and 0 as `max_length` of the job fit any value.
    """
    for name, state in ((RESULTS, "finished"), (FAILED, "failed")):
        path = job_directory(job, dataset) / name
        if (values := read_fields(path)) is None:
            continue
        for field, recorded_value, value in _compare_with_file(
            values, job.protocol, job.fingerprints.for_dataset(dataset)
        ):
            if "." not in field:
                raise InputError(
                    f"{path}: field `{field}`: missing, so the run cannot be resumed; "
                    "choose another --output"
                )
            recorded = "none" if recorded_value is _MISSING else repr(recorded_value)
            advice = "use the recorded value"
            if field == "protocol.special_tokens":
                advice = f"use {_format_special_tokens(values['protocol'])}"
            raise InputError(
                f"{path}: field `{field}`: found {recorded[:24]}, expected {repr(value)[:24]}; "
                f"{advice}, choose another --output or remove the file"
            )
        return state
    return "missing"


def _format_special_tokens(protocol: Mapping[str, Any]) -> str:
    """Return the flags that give the special tokens of a recorded protocol."""
    if protocol.get("special_tokens"):
        return f"--special-tokens {protocol['special_tokens']}"
    begin = "--add-bos" if protocol.get("add_bos") else "--no-add-bos"
    end = "--add-eos" if protocol.get("add_eos") else "--no-add-eos"
    return f"{begin} {end}"


def find_protocol_difference(
    file: Path, protocol: FinetuneConfig, fingerprints: Mapping[str, str]
) -> str | None:
    """Return the first protocol or fingerprint value that differs in a result file.

    It is a clause such as "batch_size is 16 there, 32 here"; None if nothing differs, or if the
    file is unreadable or lacks the values. An empty `precision` and 0 as `max_length` of `protocol`
    fit any value. Only the start of the file is read.

    Args:
        file: results.json or failed.json.
        fingerprints: Fingerprints by role, as `Fingerprints.for_dataset` returns them.
    """
    try:
        with open(file, "rb") as stream:
            # The scores start after some 1,200 bytes.
            head, scores, _ = stream.read(8192).partition(b',\n  "validation"')
        values = parse_json(head + b"}" if scores else head)
    except (OSError, ValueError):
        return None
    for field, recorded, value in (
        _compare_with_file(values, protocol, fingerprints) if isinstance(values, dict) else ()
    ):
        section, _, name = field.partition(".")
        if name and recorded is not _MISSING:
            length = 12 if section == "fingerprints" else None
            return f"{name} is {str(recorded)[:length]} there, {str(value)[:length]} here"
    return None


def _compare_with_file(
    values: dict[str, Any], protocol: FinetuneConfig, fingerprints: Mapping[str, str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between a result file and a protocol and fingerprints.

    Yields:
        (field, recorded value or _MISSING, expected value); field is like `protocol.batch_size`.
    """
    for section, expected in (
        ("protocol", dataclasses.asdict(protocol)),
        ("fingerprints", fingerprints),
    ):
        recorded = values.get(section)
        if not isinstance(recorded, dict):
            yield section, _MISSING, expected
            continue
        for field, value in expected.items():
            recorded_value = recorded.get(field, _LATER_DEFAULTS.get(field, _MISSING))
            if recorded_value != value and _AUTOMATIC_VALUES.get(field, _MISSING) != value:
                yield f"{section}.{field}", recorded_value, value


def read_result_tree(root: str | Path) -> list[Result]:
    """Return the Result of each finished or failed run below `root`, sorted by path.

    Runs are directories `root`/MODEL/FAMILY/DATASET/RUN; others, and unfinished runs, are left out.
    Scores of single examples, gigabytes in the study's tree, are not parsed.

    Raises:
        InputError: `root` is unreadable or has no finished or failed run, a result file is
            malformed, or two names of directories, such as lr2e-05_sd0 and lr2e-5_sd0, are one run.
    """
    results: dict[tuple, Result] = {}
    for path in _iterate_run_directories(Path(root)):
        if (result := read_result(path)) is not None:
            first = results.setdefault(
                (path.parent, result.train_on, result.learning_rate, result.seed), result
            )
            if first is not result:
                raise InputError(
                    f"{path}: the same run as {first.path.name}; "
                    "expected one of them, remove the other"
                )
    if not results:
        raise InputError(
            f"{root}: holds no results, expected MODEL/FAMILY/DATASET/lr2e-05_sd0/{RESULTS} "
            "below it"
        )
    return list(results.values())


def _iterate_run_directories(path: Path, levels: int = 4) -> Iterator[Path]:
    """Yield the directories `levels` below `path`, in the order of their names.

    The default is the level of runs: MODEL/FAMILY/DATASET/RUN.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a directory of results") from None
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{path}: holds the directory {os.fsencode(name)!r}; expected a name in UTF-8"
            ) from None
        if levels == 1:
            yield path / name
        elif levels != 3 or name in list(TaskFamily):
            yield from _iterate_run_directories(path / name, levels - 1)


def read_result(path: Path) -> Result | None:
    """Return the Result in the run directory `path`, MODEL/FAMILY/DATASET/RUN.

    These four names give those in the result, which is None if RUN is no run's name, or if there is
    neither results.json nor failed.json.

    Raises:
        InputError: A result file is malformed.
    """
    name = _RUN_DIRECTORY.fullmatch(path.name)
    try:
        rate = float(name["rate"]) if name else 0
    except ValueError:
        return None
    if not 0 < rate < math.inf:
        return None
    *_, model, family, dataset, _ = path.parts
    run = (model, family, dataset, name["train_on"] or dataset, rate, int(name["seed"]))
    file = path / RESULTS
    values = read_fields(file)
    if values is not None:
        checked = check_json(_RESULT_FILE, values, file, _ADVICE)
        evaluations = [
            (evaluation["step"], evaluation["score"])
            for evaluation in checked.get("evaluations", ())
        ]
        return Result(
            *run,
            path,
            validation=_build_split(file, family, dataset, "validation", checked["validation"]),
            test=_build_split(file, family, dataset, "test", checked["test"]),
            evaluations=evaluations,
            best_step=checked.get("best_step", 0),
            threshold=checked.get("threshold"),
            scores_only=all(
                isinstance(part, dict) and part.keys() <= {"score", "scores_i"}
                for part in values.values()
            ),
        )
    file = path / FAILED
    values = read_fields(file)
    if values is not None:
        reason = check_json(_FAILURE_FILE, values, file, _ADVICE).get("reason", "no reason given")
        return Result(*run, path, None, None, _join_lines(reason))
    return None


def read_fields(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a result file, without scores of single examples.

    Lists of these scores are replaced as by `drop_score_lists`. The result is None without a file.

    Raises:
        InputError: The file is malformed.
    """
    try:
        values = parse_json(drop_score_lists(_read_bytes(path)), unique_keys=True)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(
            f"{path}: not JSON ({error}), expected what a run wrote there; remove it"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a {type(values).__name__}, expected an object; remove it")
    return values


def _read_bytes(path: Path) -> bytes:
    """Read a result file.

    Raises:
        InputError: The file cannot be read.
        FileNotFoundError: The file does not exist.
    """
    try:
        return read_regular_file(path, _MAX_RESULT_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected what a run wrote there") from None


def drop_score_lists(content: bytes) -> bytes:
    """Return the JSON text of a result file without scores of single examples.

    It is faster to parse. The list scores_i and the object metrics_i each become null as a whole;
    a list of at least two equal numbers, which may be a collapse, becomes "equal". Nothing else is
    changed or checked.
    """

    def short(match: re.Match[bytes]) -> bytes:
        return match[1] + (b'"equal"' if match[2] is not None and _all_equal(match[2]) else b"null")

    return _SCORE_LISTS.sub(short, content)


def _all_equal(numbers: bytes) -> bool:
    """Return whether `numbers`, comma-separated, are at least two and all equal."""
    few = numbers[:400].split(b",")[:-1]  # the last may be cut
    if len({float(number) for number in few}) > 1:
        return False
    return bool(few) and len({float(number) for number in numbers.split(b",")}) == 1


def read_example_scores(path: Path, metric: str | None) -> list[float]:
    """Return the test score of each example by `metric`, in the order of the split.

    Scores are fractions. The list is empty if the file has only the split's value, or if that is
    not the mean of the examples', as for span F1.

    Args:
        path: results.json of a run.
        metric: Name of a metric; None: the study's score.

    Raises:
        InputError: The file is missing, unreadable or malformed, or lacks the split's value.
    """
    try:
        test = parse_json(_read_bytes(path))["test"]
        mean = test["score"] if metric is None else test["metrics"][metric]
        listed = (
            test.get("scores_i") if metric is None else (test.get("metrics_i") or {}).get(metric)
        )
        numbers = [float(number) for number in listed or ()]
        if not all(-1e100 <= number <= 1e100 for number in numbers):  # with more cannot be computed
            raise ValueError("found a score of an example that is no number")
        return numbers if numbers and abs(math.fsum(numbers) / len(numbers) - mean) <= 1e-6 else []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected what a run wrote there") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path}: field `test`: {error!r}; expected what a run wrote there; remove it"
        ) from None


def _build_split(file: Path, family: str, dataset: str, name: str, split: _Split) -> SplitScores:
    """Build the scores of `validation` or `test` from checked fields of a result file.

    Raises:
        InputError: The score or a metric is out of its bounds.
    """
    score = split["score"]
    if score < -_ROUNDING and family != TaskFamily.REGRESSION:
        raise InputError(
            f"{file}: field `{name}.score`: found {score}, expected a number from 0 to 1; {_ADVICE}"
        )
    for field in ("metrics", "baseline"):
        for metric, value in (split.get(field) or {}).items():
            low, high = METRIC_BOUNDS.get(metric, (0.0, 1.0))
            if not low - _ROUNDING <= value <= high + _ROUNDING:
                raise InputError(
                    f"{file}: field `{name}.{field}.{metric}`: found {value}, "
                    f"expected a number from {low:g} to {high:g}; {_ADVICE}"
                )
    collapsed = None
    if "collapsed" in split:
        collapsed = split["collapsed"]
    # Published results lack the field.
    elif split.get("scores_i") == "equal" and score < 1:
        collapsed = "every example scores the same"
    elif name == "test":
        reason, *constants = _CONSTANT_PREDICTION_SCORES.get(dataset, (None,))
        if any(abs(score - constant) < 1e-6 for constant in constants):
            collapsed = reason
    return SplitScores(
        score=score,
        metrics=split.get("metrics") or {},
        collapsed=None if collapsed is None else _join_lines(collapsed),
        baseline=split.get("baseline") or {},
    )


def _join_lines(text: str) -> str:
    """Return a text as one line of UTF-8."""
    return " ".join(text.encode("utf-8", "replace").decode().split())
