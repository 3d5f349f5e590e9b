"""Reader of the files of a result: results.json and failed.json, every field checked, lists of examples' scores skipped."""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular

_MOST_BYTES = 2 << 30  # of a results.json, which holds the scores of each example
_MOST = 1e100  # of numbers with which can be computed
_EXPECTED = "expected what a run wrote there; remove it"


@dataclass(frozen=True)
class Split:
    """The scores of a run on one split, without those of single examples. All are fractions."""

    score: float
    metrics: Mapping[str, float]
    baseline: Mapping[str, float]
    collapsed: str | None


def read_fields(path: Path) -> dict[str, Any] | None:
    """Return the fields of a file without the examples' own scores; None for no file.

    Raises InputError for a file that holds no JSON object, or a key twice.
    """
    try:
        content = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected what a run wrote there") from None
    try:
        values = parse_json(without_lists(content), unique_keys=True)
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}), {_EXPECTED}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a {type(values).__name__}, expected an object; remove it")
    return values


def read_split(path: Path, dataset: str, values: Mapping[str, Any], name: str) -> Split:
    """Return the scores of `validation` or `test` in the fields of a results.json, each a fraction. Raises InputError."""
    split = values.get(name)
    if not isinstance(split, dict) or "score" not in split:
        raise InputError(f"{path}: field `{name}.score`: found none, expected a number; remove the file")
    score = _fraction(path, f"{name}.score", split["score"])
    metrics, baseline = (_fractions(path, f"{name}.{part}", split.get(part)) for part in ("metrics", "baseline"))
    collapsed = split["collapsed"] if "collapsed" in split else _looks_collapsed(dataset, score, name, split)
    if collapsed is not None:
        collapsed = _text(path, f"{name}.collapsed", collapsed)
    return Split(score, metrics, baseline, collapsed)


def read_reason(path: Path, values: Mapping[str, Any]) -> str:
    """Return why a run failed, from the fields of its failed.json. Raises InputError."""
    return _text(path, "reason", values.get("reason", "no reason given"))


def read_examples(path: Path, metric: str | None) -> list[float]:
    """Return the score of each example of `test`, by a metric or by the study's own; none if their mean is not the result's.

    A standard metric is one only if it is the mean of the examples' numbers: span F1, say, is not. Raises InputError.
    """
    try:
        test = parse_json(read_regular(path, _MOST_BYTES))["test"]
        mean = test["score"] if metric is None else test["metrics"][metric]
        listed = test.get("scores_i") if metric is None else (test.get("metrics_i") or {}).get(metric)
        numbers = [float(number) for number in listed or ()]
        if not all(-_MOST <= number <= _MOST for number in numbers):
            raise ValueError("found a score of an example that is no number")
        return numbers if numbers and abs(math.fsum(numbers) / len(numbers) - mean) <= 1e-6 else []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected what a run wrote there") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: field `test`: {error!r}; {_EXPECTED}") from None


def _fraction(path: Path, field: str, value: Any) -> float:
    """Return a score. Raises InputError for NaN and anything else that is no number from 0 to 1, roundings aside."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e-6 <= value <= 1 + 1e-6:
        raise InputError(f"{path}: field `{field}`: found {repr(value)[:40]}, expected a number from 0 to 1; remove the file")
    return float(value)


def _fractions(path: Path, field: str, values: Any) -> dict[str, float]:
    if values is not None and not isinstance(values, dict):
        raise InputError(f"{path}: field `{field}`: found a {type(values).__name__}, expected an object; remove the file")
    if unfit := [name for name in values or () if not name.isprintable()]:
        raise InputError(f"{path}: field `{field}`: found the name {unfit[0]!r}, expected one in one line; remove the file")
    return {name: _fraction(path, f"{field}.{name}", value) for name, value in (values or {}).items()}


def _text(path: Path, field: str, value: Any) -> str:
    """Return a text in one line. Raises InputError for another kind."""
    if not isinstance(value, str):
        raise InputError(f"{path}: field `{field}`: found a {type(value).__name__}, expected a text; remove the file")
    return " ".join(value.encode("utf-8", "replace").decode().split())


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


def read_head(path: Path) -> dict[str, Any]:
    """Return the fields of a run's file before the scores, which are a line each, without reading those."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        for line in stream.read(_HEAD).split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                found |= parse_json(b"{" + line.strip().removesuffix(b",") + b"}")
    return found


_HEAD = 8192  # bytes; they are some 1,200
_LONG = re.compile(rb'"(scores_i|metrics_i)":\s*')  # inside of a string the quotes would be escaped


def without_lists(content: bytes) -> bytes:
    """Replace each list of scores in `content` by "equal" or null, and each object of them by null.

    Searching for a bracket is a hundred times faster than parsing the numbers before it.
    """
    pieces, at = [], 0
    while (key := _LONG.search(content, at)) is not None:
        pieces.append(content[at : key.end()])
        if content[key.end() : key.end() + 1] != (b"[" if key[1] == b"scores_i" else b"{"):
            at = key.end()  # null, or damage that the parser names
        elif key[1] == b"scores_i":
            at = content.index(b"]", key.end()) + 1
            pieces.append(b'"equal"' if _all_equal(content[key.end() : at]) else b"null")
        else:
            at, closes = key.end(), content.index(b"}", key.end())
            while (opens := content.find(b"[", at, closes)) != -1:
                at = content.index(b"]", opens) + 1
                if at > closes:
                    closes = content.index(b"}", at)
            at = closes + 1
            pieces.append(b"null")
    return b"".join((*pieces, content[at:]))


def _all_equal(text: bytes) -> bool:
    """Whether the numbers of a list of at least two are one and the same."""
    first, *few = text[:400].strip(b"[] \n").split(b",")
    if any(float(number) != float(first) for number in few[:-1]):  # the last may be cut
        return False
    return bool(few) and len({float(number) for number in text.strip(b"[] \n").split(b",")}) == 1
