"""Validated reading of a run directory: metrics.jsonl, validation.jsonl and run.json."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_json_object, read_regular_file
from megaenc.objectives import PseudoPerplexity
from megaenc.training.run_dir import METRICS_FILE, RUN_FILE, VALIDATION_FILE

Row = dict[str, Any]

_MOST_BYTES = 4 << 30  # about ten million steps
_LONGEST_ROW = 1 << 20
_LARGEST = 1e100  # keeps sums and squares finite
_EXPECTED = "a file written by a run"
_PROGRESS = ("tokens", "predicted_tokens", "flops")


def read_steps(run: str | Path, *more: str, required: bool = True) -> list[Row]:
    """Return checked rows of `run`/metrics.jsonl, also with fields `more`; InputError if invalid, or `required` and none.

    `required`: whether the file must exist and have a row; otherwise the result may be empty.
    """
    path = Path(run) / METRICS_FILE
    rows = _read_rows(path, ("objective", "phase", "loss", "learning_rate", "tokens", "step_seconds", *more))
    if rows or not required:
        return rows or []
    if rows is None:
        raise InputError(f"{path}: no such file; expected the --save directory of a run with at least one step")
    raise InputError(f"{path}: contains no step yet, expected at least one")


def read_validations(run: str | Path, *more: str) -> list[Row]:
    """Return the checked rows of `run`/validation.jsonl, also with fields `more`; [] without it. InputError if invalid."""
    return _read_rows(Path(run) / VALIDATION_FILE, ("objectives", *more)) or []


def read_held_out_validations(run: str | Path, *more: str) -> list[Row]:
    """Return the rows of `run`/validation.jsonl that have a result; `more` fields are required. InputError if none."""
    validations = [row for row in read_validations(run, *more) if row["objectives"]]
    if not validations:
        raise InputError(f"{run}: contains no validation, expected a run with held-out text (--eval-interval, --split)")
    return validations


def read_run_json(run: str | Path) -> dict[str, Any]:
    """Return `run`/run.json as a dict, `start` and `identity` {} by default. InputError for a missing or invalid file."""
    path = Path(run) / RUN_FILE
    facts = read_json_object(path, _EXPECTED)
    for name in ("start", "identity"):
        if not isinstance(facts.setdefault(name, {}), dict):
            raise InputError(f"{path}: field `{name}`: found a {type(facts[name]).__name__}; expected {_EXPECTED}")
    if not isinstance(facts["start"].get("run", ""), str):
        raise InputError(
            f"{path}: field `start.run`: found {truncate_text(repr(facts['start']['run']), 40)}; expected a directory's path"
        )
    return facts


def read_model_size_and_steps(run: str | Path) -> dict[str, Any]:
    """Return {"parameters", "train_iters"}: model size and planned steps, from `run`/run.json. InputError if invalid."""
    path, facts = Path(run) / RUN_FILE, read_run_json(run)
    return {name: _check_field(path, of, name) for name, of in (("parameters", facts), ("train_iters", facts["identity"]))}


def read_start_progress(run: str | Path) -> Row:
    """Return step, tokens, predicted_tokens and flops before a run's first step: the parent's for a branch, else 0."""
    path = Path(run) / RUN_FILE
    start = read_run_json(run)["start"] if path.exists() else {}
    if start.get("kind") != "branch":
        return {"step": 0, **dict.fromkeys(_PROGRESS, 0)}
    return {"step": _check_field(path, start, "at"), **{name: _check_field(path, start, name) for name in _PROGRESS}}


HeldOutCurves = dict[str, tuple[list[float], list[float]]]
"""Progress and held-out loss at each validation, by objective."""


def held_out_curves(validations: list[Row], against: str = "step") -> HeldOutCurves:
    """Return by objective the lists (field `against`, held-out loss) of the rows of validation.jsonl with a loss."""
    curves: HeldOutCurves = {}
    for row in validations:
        for objective, result in row["objectives"].items():
            if result["loss"] is not None:
                x, losses = curves.setdefault(objective, ([], []))
                x.append(row[against])
                losses.append(result["loss"])
    return curves


def is_pseudo_perplexity(objective: str) -> bool:
    """Return whether a name in validation.jsonl is a pseudo-perplexity, maybe on a named set (NAME/OBJECTIVE)."""
    return f"{PseudoPerplexity.name}(" in objective


def training_seconds(steps: list[Row], before: int = 0) -> float:
    """Return the seconds in training steps after step `before`; a step that was not logged counts as the next logged one."""
    seconds = 0.0
    for row in steps:
        seconds += row["step_seconds"] * (row["step"] - before)
        before = row["step"]
    return seconds


def _read_rows(path: Path, needed: tuple[str, ...]) -> list[Row] | None:
    """Read the rows of a JSON Lines file except an unfinished last line, checking for `needed` fields; None without a file."""
    try:
        content = read_regular_file(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected {_EXPECTED}") from None
    rows: list[Row] = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        place = f"{path}:{number}"
        rows.append(_parse_row(place, line, ("step", *needed)))
        if len(rows) > 1 and rows[-1]["step"] < rows[-2]["step"]:
            steps = f"found {rows[-1]['step']} after {rows[-2]['step']}"
            raise InputError(f"{place}: field `step`: {steps}; expected steps that do not fall")
    return rows


def _parse_row(place: str, line: bytes, needed: tuple[str, ...]) -> Row:
    """Parse a line as a JSON object and check its known fields. Raises InputError, prefixed with `place`."""
    if len(line) > _LONGEST_ROW:
        raise InputError(f"{place}: a line of {len(line):,} bytes; expected at most {_LONGEST_ROW:,}")
    try:
        row = parse_json(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON ({error}); expected {_EXPECTED}") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: no field `{needed[0]}`; expected {_EXPECTED}")
    known = [*needed, *(name for name in row if name in _FIELD_CHECKS and name not in needed)]
    return row | {name: _check_field(place, row, name) for name in known}


def _check_field(place: str | Path, values: dict[str, Any], name: str) -> Any:
    """Return the checked value of a field. Raises InputError if it is missing or invalid."""
    if name not in values:
        raise InputError(f"{place}: no field `{name}`; expected {_EXPECTED}")
    try:
        return _check_objectives(values[name]) if name == "objectives" else _check_value(values[name], _FIELD_CHECKS[name])
    except ValueError as error:
        raise InputError(f"{place}: field `{name}`: found {truncate_text(repr(values[name]), 40)}; expected {error}") from None


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number (no boolean, NaN or infinity) of at most 1e100 in absolute value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


_COUNT = ("a whole number of 0 or more", lambda value: type(value) is int and 0 <= value < 1 << 63)
_WHOLE = ("a whole number", lambda value: type(value) is int and abs(value) < 1 << 63)
_AMOUNT = ("a number of 0 or more", lambda value: is_number(value) and value >= 0)
_LOSS = ("a number or null", lambda value: value is None or is_number(value))
_SHARE = ("a share from 0 to 1, or null", lambda value: value is None or (is_number(value) and 0 <= value <= 1))
_TEXT = ("text in one line", lambda value: isinstance(value, str) and value.isprintable())
_OBJECTIVE_CHECKS = {"loss": _LOSS, "accuracy": _SHARE, "most_frequent": _SHARE}
_GROUPS = ("by_position", "by_corpus")
"""Fields of an objective that hold losses by name, each of which may be missing."""
_FIELD_CHECKS = {
    **dict.fromkeys(("step", "tokens", "predicted_tokens", "parameters", "train_iters", "at"), _COUNT),
    **dict.fromkeys(("learning_rate", "flops", "step_seconds"), _AMOUNT),
    **dict.fromkeys(("objective", "held_out"), _TEXT),
    "phase": _WHOLE,
    "loss": _LOSS,
    "objectives": None,
}
"""Expected value and check of each known field of rows and of run.json."""


def _check_value(value: Any, kind: tuple[str, Callable[[Any], bool]]) -> Any:
    """Return a field's value if it passes its check, with None for a NaN or infinite loss. Raises ValueError."""
    expected, holds = kind
    if kind in (_LOSS, _SHARE) and isinstance(value, float) and not math.isfinite(value):
        return None
    if not holds(value):
        raise ValueError(expected)
    return value


def _check_objectives(value: Any) -> dict[str, dict[str, Any]]:
    """Return the checked scores of each objective, and its losses by group.

    Raises ValueError.
    """
    if not isinstance(value, dict) or not all(isinstance(result, dict) for result in value.values()):
        raise ValueError("an object of objects")
    if missing := [key for key in _OBJECTIVE_CHECKS for result in value.values() if key not in result]:
        raise ValueError(f"`{missing[0]}` for each objective")
    for group in _GROUPS:
        if not all(isinstance(result.get(group, {}), dict) for result in value.values()):
            raise ValueError(f"an object in each `{group}`")
    try:
        return {
            _check_value(name, _TEXT): {key: _check_value(result[key], kind) for key, kind in _OBJECTIVE_CHECKS.items()}
            | {key: _check_losses(result[key]) for key in _GROUPS if key in result}
            for name, result in value.items()
        }
    except ValueError as error:
        raise ValueError(f"of each objective's name and numbers {error}") from None


def _check_losses(losses: dict[str, Any]) -> dict[str, float | None]:
    """Return the checked losses by name. Raises ValueError."""
    return {_check_value(name, _TEXT): _check_value(loss, _LOSS) for name, loss in losses.items()}
