"""What a run folder says in numbers, read back: steps, validations, facts."""

import json
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.training.run_folder import FACTS, METRICS, VALIDATION

Row = dict[str, Any]


def read_steps(run: str | Path, *more: str) -> list[Row]:
    """The rows of metrics.jsonl, one a logged step; at least one, each with the fields `more` too.

    Raises InputError for what no run wrote.
    """
    path = Path(run) / METRICS
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected the folder that a run got as --save, with a step made")
    rows = _rows(path, ("objective", "phase", "loss", "learning_rate", "tokens", "step_seconds", *more))
    if not rows:
        raise InputError(f"{path}: holds no step yet, expected at least one")
    return rows


def read_validations(run: str | Path, *more: str) -> list[Row]:
    """The rows of validation.jsonl, each with the fields `more` too, none where the run made none.

    Raises InputError for what no run wrote.
    """
    path = Path(run) / VALIDATION
    return _rows(path, ("objectives", *more)) if path.is_file() else []


def read_held_out(run: str | Path, *more: str) -> list[Row]:
    """The validations under at least one objective. Raises InputError where there is none."""
    validated = [row for row in read_validations(run, *more) if row["objectives"]]
    if not validated:
        raise InputError(f"{run}: holds no validation, expected a run with held-out text (--eval-interval, --split)")
    return validated


def read_facts(run: str | Path) -> dict[str, Any]:
    """`parameters` and `train_iters` out of run.json. Raises InputError where there is none that a run wrote."""
    path = Path(run) / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {"parameters": int(facts["parameters"]), "train_iters": int(facts["identity"]["train_iters"])}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected the folder that a run got as --save") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {error!r}; expected what a run wrote there") from None


def read_beginning(run: str | Path) -> Row:
    """How far the run had come before its first step: a branch counts on from its parent, every other run from 0."""
    begun: Row = {"step": 0, "tokens": 0, "predicted_tokens": 0, "flops": 0.0}
    try:
        start = json.loads((Path(run) / FACTS).read_text(encoding="utf-8"))["start"]
        return {"step": start["at"], **{name: start[name] for name in list(begun)[1:]}} if start["kind"] == "branch" else begun
    except (OSError, ValueError, KeyError, TypeError):  # rows without their run.json, as a picture may be made of
        return begun


def training_seconds(steps: list[Row], before: int = 0) -> float:
    """Time in updates after step `before`, validations and checkpoints not counted; a step without a row counts like the next."""
    seconds = 0.0
    for row in steps:
        seconds += row["step_seconds"] * (row["step"] - before)
        before = row["step"]
    return seconds


def _rows(path: Path, needed: tuple[str, ...]) -> list[Row]:
    """One object a line with a step and the fields `needed`; a last line without its end is left out, as it is being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected what a run wrote there") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8; expected what a run wrote there") from None
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON ({error}); expected what a run wrote there") from None
        missing = [name for name in ("step", *needed) if not isinstance(row, dict) or name not in row]
        if missing:
            raise InputError(f"{path}:{number}: no field `{missing[0]}`; expected what a run wrote there")
        rows.append(row)
    return rows
