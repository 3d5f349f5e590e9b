"""Conversion of checked rows of files and tables to examples. `place`, file and line, begins every error."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaenc.data.readers import listed
from megaenc.errors import InputError
from megaenc.finetune.examples import Answer, Family, LabelledText, Question, TaggedWords

IOB2 = re.compile(r"O|[BI]-\S+")
_POSITION = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class LabelSet:
    """The labels of a data set and how rows spell them."""

    labels: tuple[str, ...]
    counted: bool
    """Whether an integer is a label's position; otherwise it is a label's name."""

    def index(self, value: Any, place: str) -> int:
        """Return the position of the label that a row spells as `value`, an integer or text. Raises InputError for no label."""
        name = spelled(value, place)
        if self.counted and (isinstance(value, int) or (name not in self.labels and _POSITION.fullmatch(name))):
            if 0 <= int(value) < len(self.labels):
                return int(value)
            raise InputError(f"{place}: label {value!r}: outside the label set, expected 0 to {len(self.labels) - 1}")
        if name not in self.labels:
            raise InputError(f"{place}: label {value!r}: outside the label set, expected one of {shown(self.labels)}")
        return self.labels.index(name)


def spelled(value: Any, place: str) -> str:
    """Return the name of a label that rows spell as an integer or as text."""
    if isinstance(value, float):
        raise InputError(f"{place}: label {value}: found a number with a point, expected a class; there is no regression here")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise InputError(f"{place}: label {value!r}: expected text or an integer")
    return str(value)


def collected(family: Family, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> LabelSet:
    """Return the labels in (place, row) pairs: numbers by size, else alphabetically; of tags "O" comes first."""
    found: set[str] = set()
    for place, row in rows:
        if family is Family.SC:
            found.add(spelled(value_of(row, "label", place), place))
        else:
            tags = value_of(row, "tags", place, list)
            found.update(checked_tag(tag, f"{place}: tag {at}", counted=False) for at, tag in enumerate(tags, 1))
    if family is Family.TC:
        return LabelSet(("O", *sorted(found - {"O"})), counted=False)
    numbers = all(_POSITION.fullmatch(name) for name in found)
    return LabelSet(tuple(sorted(found, key=int if numbers else None)), counted=False)


def checked_tag(tag: Any, place: str, counted: bool) -> Any:
    """Return `tag` if it is one of IOB2 (O, B-TYPE, I-TYPE), or a position where those are `counted`. Raises InputError."""
    if not (isinstance(tag, str) and IOB2.fullmatch(tag)) and not (counted and f"{tag}".isdecimal()):
        hint = "" if counted else " (positions need a meta.json that lists the tags)"
        raise InputError(f"{place}: found {tag!r}, expected IOB2: O, B-TYPE or I-TYPE{hint if isinstance(tag, int) else ''}")
    return tag


def example(
    family: Family, row: Mapping[str, Any], place: str, name: str, labels: LabelSet, pair_template: str
) -> LabelledText | TaggedWords | Question:
    """Return the example of a row of SC, TC or QA; `name` is its id where it has none.

    SC: `text` (with `text_pair`, as the template says) and `label`. TC: `tokens` and `tags`. QA: `question`, `context` and
    `answers`, a mapping of two lists: `text` and `answer_start`.
    """
    if isinstance(found := row.get("id"), bool) or not isinstance(found, (str, int, type(None))):
        raise InputError(f"{place}: key `id`: found {_short(found)}, expected text or an integer")
    name = name if found is None else str(found)
    if family is Family.TC:
        return _tagged(row, place, name, labels)
    if family is Family.QA:
        return _question(row, place, name)
    text = value_of(row, "text", place, str)
    if row.get("text_pair") is not None:
        text = pair_template.format(text=text, text_pair=value_of(row, "text_pair", place, str))
    return LabelledText(name, text, labels.index(value_of(row, "label", place), place))


def _tagged(row: Mapping[str, Any], place: str, name: str, labels: LabelSet) -> TaggedWords:
    words, tags = (value_of(row, key, place, list) for key in ("tokens", "tags"))
    if len(words) != len(tags):
        raise InputError(f"{place}: found {len(words)} tokens and {len(tags)} tags, expected as many of one as of the other")
    for at, word in enumerate(words, 1):
        if not isinstance(word, str):
            raise InputError(f"{place}: token {at}: found {_short(word)}, expected text")
    checked = (checked_tag(tag, f"{place}: tag {at}", labels.counted) for at, tag in enumerate(tags, 1))
    return TaggedWords(name, tuple(words), tuple(labels.index(tag, place) for tag in checked))


def _question(row: Mapping[str, Any], place: str, name: str) -> Question:
    answers = value_of(row, "answers", place)
    if not isinstance(answers, Mapping):
        raise InputError(f"{place}: key `answers`: found {_short(answers)}, expected text and answer_start, a list each")
    texts, starts = (value_of(answers, key, f"{place}: answers") for key in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise InputError(f"{place}: answers: text and answer_start differ in length, expected two lists of one length")
    context = value_of(row, "context", place, str)
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text:
            raise InputError(f"{place}: answer: found {_short(text)}, expected text")
        if isinstance(start, bool) or not isinstance(start, int):
            raise InputError(f"{place}: answer_start: found {_short(start)}, expected an integer")
        found = context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            raise InputError(
                f"{place}: answer_start {start}: found {_short(found)} there in the context, expected the answer {_short(text)}"
            )
    return Question(name, value_of(row, "question", place, str), context, tuple(map(Answer, texts, starts)))


def check_new(seen: dict[str, str], key: str, place: str, kind: str = "id") -> None:
    """Add the id `key` to those `seen`, with its place. Raises InputError for one that is there already."""
    if key in seen:
        raise InputError(f"{place}: {kind} {key!r}: found at {seen[key]} too, expected ids that differ")
    seen[key] = place


def value_of(row: Mapping[str, Any], key: str, place: str, kind: type = object) -> Any:
    """Return the value of `key`: text, a list, or anything but null. Raises InputError for what is missing or otherwise."""
    if key not in row:
        raise InputError(f"{place}: no key `{key}`; found {listed(list(row))}")
    if row[key] is None or not isinstance(row[key], kind):
        expected = {str: "text", list: "a list"}.get(kind, "a value")
        raise InputError(f"{place}: key `{key}`: found {_short(row[key])}, expected {expected}")
    return row[key]


def shown(names: Sequence[str]) -> str:
    """Return the first names, for an error message."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _short(value: Any) -> str:
    try:
        found = json.dumps(value, ensure_ascii=False)
    except TypeError:
        found = repr(value)
    return found if len(found) <= 40 else found[:39] + "…"
