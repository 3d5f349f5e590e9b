"""Validated reading of a run directory.

Its files are metrics.jsonl, validation.jsonl and run.json.
"""

import math
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from megaenc.errors import InputError
from megaenc.json_checks import JSON_OBJECT, Amount, Count, Number, Text, check_json
from megaenc.json_files import parse_json, read_json_object, read_regular_file
from megaenc.objectives import PseudoPerplexity
from megaenc.training.run_dir import METRICS_FILE, RUN_FILE, VALIDATION_FILE

Row = dict[str, Any]

_MOST_BYTES = 4 << 30  # about ten million steps
_LONGEST_ROW = 1 << 20
_EXPECTED = "a file written by a run"
_ADVICE = f"not {_EXPECTED}"


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number of at most 1e100 in absolute value.

    Booleans, NaN and infinity are not.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100


def _drop_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_Loss = Annotated[Number | None, BeforeValidator(_drop_nan)]
"""Loss, or None if it was NaN or infinite."""
_Fraction = Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(_drop_nan)]


class _StepRow(TypedDict):
    """Row of metrics.jsonl."""

    __pydantic_config__ = JSON_OBJECT
    step: Count
    objective: Text
    phase: int
    loss: _Loss
    learning_rate: Amount
    tokens: Count
    step_seconds: Amount
    predicted_tokens: NotRequired[Count]
    flops: NotRequired[Amount]


class _HeldOutScores(TypedDict):
    """Scores of an objective on held-out text."""

    __pydantic_config__ = JSON_OBJECT
    loss: _Loss
    accuracy: _Fraction
    most_frequent: _Fraction
    by_position: NotRequired[dict[Text, _Loss]]
    by_corpus: NotRequired[dict[Text, _Loss]]


class _ValidationRow(TypedDict):
    """Row of validation.jsonl."""

    __pydantic_config__ = JSON_OBJECT
    step: Count
    objectives: dict[Text, _HeldOutScores]
    held_out: NotRequired[Text]
    tokens: NotRequired[Count]
    predicted_tokens: NotRequired[Count]
    flops: NotRequired[Amount]


class _Start(TypedDict, total=False):
    """Field `start` of run.json; a branch has all of its fields."""

    __pydantic_config__ = JSON_OBJECT
    run: str
    at: Count
    tokens: Count
    predicted_tokens: Count
    flops: Amount


class _Identity(TypedDict, total=False):
    """Field `identity` of run.json."""

    __pydantic_config__ = JSON_OBJECT
    train_iters: Count


class _RunFile(TypedDict, total=False):
    """Content of run.json."""

    __pydantic_config__ = JSON_OBJECT
    parameters: Count
    start: _Start
    identity: _Identity


_STEP_ROW = TypeAdapter(_StepRow)
_VALIDATION_ROW = TypeAdapter(_ValidationRow)
_RUN_FILE = TypeAdapter(_RunFile)
_PROGRESS = ("tokens", "predicted_tokens", "flops")


def read_steps(run: str | Path, *more: str, required: bool = True) -> list[Row]:
    """Return the checked rows of metrics.jsonl of a run directory, by ascending step.

    They have step, objective, phase (its index), loss (None if it was not finite), learning_rate,
    tokens (read so far), step_seconds and any further ones. An unfinished last line is left out.

    Args:
        more: Further fields that each row must have, such as flops.
        required: Whether the file must exist and have a row; else the result may be empty.

    Raises:
        InputError: The file is invalid (also if steps descend), lacks a field, or has no row
            although it is required.
    """
    path = Path(run) / METRICS_FILE
    rows = _read_rows(path, _STEP_ROW, more)
    if rows or not required:
        return rows or []
    if rows is None:
        raise InputError(
            f"{path}: no such file; expected the --save directory of a run with at least one step"
        )
    raise InputError(f"{path}: contains no step yet, expected at least one")


def read_validations(run: str | Path, *more: str) -> list[Row]:
    """Return the checked rows of validation.jsonl of a run; empty without the file.

    They are by ascending step, with `step` and `objectives`: loss (nats per predicted token),
    accuracy and other scores by objective. A score that was NaN or infinite is None; other fields
    are kept. An unfinished last line is left out.

    Args:
        more: Further fields that each row must have, such as tokens.

    Raises:
        InputError: The file is invalid (also if steps descend) or lacks a field.
    """
    return _read_rows(Path(run) / VALIDATION_FILE, _VALIDATION_ROW, more) or []


def read_held_out_validations(run: str | Path, *more: str) -> list[Row]:
    """Return the rows of `read_validations` with any objective, at least one row.

    Scores in these rows may be None.

    Args:
        more: Further fields that each row must have, such as tokens.

    Raises:
        InputError: The file is invalid, lacks a field, is missing, or has no such row.
    """
    validations = [row for row in read_validations(run, *more) if row["objectives"]]
    if not validations:
        raise InputError(
            f"{run}: contains no validation, expected a run with held-out text (--eval-interval, "
            "--split)"
        )
    return validations


def read_run_json(run: str | Path) -> dict[str, Any]:
    """Return the checked content of run.json of a run directory.

    `start` and `identity` (starting point and settings) are {} if the file lacks them; other
    fields, such as `parameters`, may be missing. The format's version is not checked.

    Raises:
        InputError: The file is missing or invalid.
    """
    path = Path(run) / RUN_FILE
    facts = read_json_object(path, _EXPECTED)
    return {"start": {}, "identity": {}} | check_json(_RUN_FILE, facts, path, _ADVICE)


def read_model_size_and_steps(run: str | Path) -> dict[str, Any]:
    """Return {"parameters", "train_iters"} of a run: model size and planned steps.

    They are read from run.json. Planned steps of a branch include those before it.

    Raises:
        InputError: The file is missing or invalid, or lacks a field.
    """
    path = Path(run) / RUN_FILE
    facts = read_run_json(run)
    _require_fields(path, facts, "parameters")
    _require_fields(path, facts["identity"], "train_iters")
    return {"parameters": facts["parameters"], "train_iters": facts["identity"]["train_iters"]}


def read_start_progress(run: str | Path) -> Row:
    """Return step, tokens, predicted_tokens and flops before a run's first step.

    They are those of the parent at that step for a branch, read from the run's own run.json, else
    0, also without that file.

    Raises:
        InputError: run.json is invalid, or lacks a field of the branch.
    """
    path = Path(run) / RUN_FILE
    start = read_run_json(run)["start"] if path.exists() else {}
    if start.get("kind") != "branch":
        return {"step": 0, **dict.fromkeys(_PROGRESS, 0)}
    _require_fields(path, start, "at", *_PROGRESS)
    return {"step": start["at"], **{name: start[name] for name in _PROGRESS}}


def _require_fields(place: str | Path, values: Row, *names: str) -> None:
    """Raise InputError unless `values` has the fields `names`."""
    for name in names:
        if name not in values:
            raise InputError(f"{place}: no field `{name}`; {_ADVICE}")


HeldOutCurves = dict[str, tuple[list[float], list[float]]]
"""Progress and held-out loss at each validation, by objective."""


def held_out_curves(validations: list[Row], against: str = "step") -> HeldOutCurves:
    """Return two lists, x values and held-out losses of validations, by objective.

    Validations in which an objective has no loss are left out of its curve, and objectives that
    never have one altogether. Order is that of first appearance.

    Args:
        validations: Rows of validation.jsonl, all with the field `against`.
        against: Field for the x values: step, tokens, predicted_tokens or flops. Only step is
            certain, unless `read_validations` was called with it.
    """
    curves: HeldOutCurves = {}
    for row in validations:
        for objective, result in row["objectives"].items():
            if result["loss"] is not None:
                x, losses = curves.setdefault(objective, ([], []))
                x.append(row[against])
                losses.append(result["loss"])
    return curves


def is_pseudo_perplexity(objective: str) -> bool:
    """Return whether an objective's name in validation.jsonl is a pseudo-perplexity.

    It is such as `pseudo_perplexity(...)`, or NAME/pseudo_perplexity(...) on a named validation
    set.
    """
    return f"{PseudoPerplexity.name}(" in objective


def training_seconds(steps: list[Row], start_step: int = 0) -> float:
    """Return the seconds that the steps after `start_step` took, without other work.

    A step that was not logged counts as long as the next logged one; steps after the last row do
    not count. Without rows the result is 0.

    Args:
        steps: Rows of metrics.jsonl by ascending step, all after `start_step`.
        start_step: Step of the parent at which a branch began; else 0.
    """
    seconds = 0.0
    for row in steps:
        seconds += row["step_seconds"] * (row["step"] - start_step)
        start_step = row["step"]
    return seconds


def _read_rows(path: Path, kind: TypeAdapter[Any], needed: tuple[str, ...]) -> list[Row] | None:
    """Return the checked rows of a JSON Lines file; None without a file.

    An unfinished last line is left out. Each row must have the `needed` fields.

    Raises:
        InputError: The file is invalid.
    """
    try:
        content = read_regular_file(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected {_EXPECTED}") from None
    rows: list[Row] = []
    for line_number, line in enumerate(content.split(b"\n")[:-1], 1):
        place = f"{path}:{line_number}"
        if len(line) > _LONGEST_ROW:
            raise InputError(
                f"{place}: a line of {len(line):,} bytes; expected at most {_LONGEST_ROW:,}"
            )
        try:
            values = parse_json(line)
        except ValueError as error:
            raise InputError(f"{place}: not JSON ({error}); expected {_EXPECTED}") from None
        row = check_json(kind, values, place, _ADVICE)
        _require_fields(place, row, *needed)
        if rows and row["step"] < rows[-1]["step"]:
            steps = f"found {row['step']} after {rows[-1]['step']}"
            raise InputError(f"{place}: field `step`: {steps}; expected steps that do not fall")
        rows.append(row)
    return rows
