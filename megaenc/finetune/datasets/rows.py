"""One row of a file or table, checked, as the example that it stands for. `place` begins every complaint: file and line."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaenc.data.readers import listed, texts_of
from megaenc.errors import InputError
from megaenc.finetune.examples import Answer, LabelledText, Question, TaggedWords

IOB2 = re.compile(r"O|[BI]-\S+")
_POSITION = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class LabelSet:
    """The labels of a data set and how rows spell them."""

    labels: tuple[str, ...]
    counted: bool
    """Whether an integer is a label's position; otherwise it is a label's name."""

    def index(self, value: Any, place: str) -> int:
        """The position of the label that a row spells as `value`, an integer or text. Raises InputError for none of them."""
        name = spelled(value, place)
        if self.counted and (isinstance(value, int) or (name not in self.labels and _POSITION.fullmatch(name))):
            if 0 <= int(value) < len(self.labels):
                return int(value)
            raise InputError(f"{place}: label {value!r}: outside the label set, expected 0 to {len(self.labels) - 1}")
        try:
            return self.labels.index(name)
        except ValueError:
            raise InputError(f"{place}: label {value!r}: outside the label set, expected one of {shown(self.labels)}") from None


def spelled(value: Any, place: str) -> str:
    """The name of a label that rows spell as an integer or as text."""
    if isinstance(value, float):
        raise InputError(f"{place}: label {value}: found a number with a point, expected a class; there is no regression here")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise InputError(f"{place}: label {value!r}: expected text or an integer")
    return str(value)


def collected(values: Iterable[tuple[Any, str]], *, tags: bool) -> LabelSet:
    """The labels that (value, place) pairs spell: numbers by size, else in the order of the alphabet; of tags "O" comes first."""
    found = set()
    for value, place in values:
        found.add(spelled(value, place))
    if tags:
        return LabelSet(("O", *sorted(found - {"O"})), counted=False)
    numbers = all(_POSITION.fullmatch(name) for name in found)
    return LabelSet(tuple(sorted(found, key=int if numbers else None)), counted=False)


def labelled(row: Mapping[str, Any], place: str, name: str, labels: LabelSet, pair_template: str) -> LabelledText:
    """The row's `text` (with `text_pair`, as the template says) and `label`; `name` is its id where it has none."""
    text = text_of(row, "text", place)
    if row.get("text_pair") is not None:
        text = pair_template.format(text=text, text_pair=text_of(row, "text_pair", place))
    return LabelledText(id_of(row, place, name), text, labels.index(value_of(row, "label", place), place))


def tagged(row: Mapping[str, Any], place: str, name: str, labels: LabelSet) -> TaggedWords:
    """The row's `tokens` and `tags`."""
    words, tags = (list_of(row, key, place) for key in ("tokens", "tags"))
    if len(words) != len(tags):
        raise InputError(f"{place}: found {len(words)} tokens and {len(tags)} tags, expected as many of one as of the other")
    for at, word in enumerate(words):
        if not isinstance(word, str):
            raise InputError(f"{place}: token {at + 1}: found {_short(word)}, expected text")
    return TaggedWords(
        id_of(row, place, name),
        tuple(words),
        tuple(labels.index(checked_tag(tag, f"{place}: tag {at + 1}", labels.counted), place) for at, tag in enumerate(tags)),
    )


def checked_tag(tag: Any, place: str, counted: bool) -> Any:
    """`tag` again: one of IOB2 (B- begins a span, I- goes on with it, O is outside), or a position where those are `counted`."""
    if not (isinstance(tag, str) and IOB2.fullmatch(tag)) and not (counted and f"{tag}".isdecimal()):
        hint = "" if counted else " (positions need a meta.json that lists the tags)"
        raise InputError(f"{place}: found {tag!r}, expected IOB2: O, B-TYPE or I-TYPE{hint if isinstance(tag, int) else ''}")
    return tag


def question(row: Mapping[str, Any], place: str, name: str) -> Question:
    """The row's `question`, `context` and `answers`, a mapping of two lists: `text` and `answer_start`."""
    answers = value_of(row, "answers", place)
    if not isinstance(answers, Mapping):
        raise InputError(f"{place}: key `answers`: found {_short(answers)}, expected text and answer_start, a list each")
    texts, starts = (value_of(answers, key, f"{place}: answers") for key in ("text", "answer_start"))
    if not isinstance(texts, Sequence) or not isinstance(starts, Sequence) or isinstance(texts, str) or len(texts) != len(starts):
        raise InputError(f"{place}: answers: text and answer_start differ in length, expected two lists of one length")
    context = text_of(row, "context", place)
    checked = tuple(answer(text, start, context, place) for text, start in zip(texts, starts, strict=True))
    return Question(id_of(row, place, name), text_of(row, "question", place), context, checked)


def answer(text: Any, start: Any, context: str, place: str) -> Answer:
    """An answer that stands in the context where it is said to."""
    if not isinstance(text, str) or not text:
        raise InputError(f"{place}: answer: found {_short(text)}, expected text")
    if isinstance(start, bool) or not isinstance(start, int):
        raise InputError(f"{place}: answer_start: found {_short(start)}, expected an integer")
    found = context[start : start + len(text)] if start >= 0 else ""
    if found != text:
        raise InputError(
            f"{place}: answer_start {start}: found {_short(found)} there in the context, expected the answer {_short(text)}"
        )
    return Answer(text, start)


def unique(examples: Iterable[tuple[str, Any]]) -> list[Any]:
    """The examples of (place, example) pairs. Raises InputError when two of them have one id."""
    seen: dict[str, str] = {}
    kept = []
    for place, example in examples:
        if example.id in seen:
            raise InputError(f"{place}: id {example.id!r}: found at {seen[example.id]} too, expected ids that differ")
        seen[example.id] = place
        kept.append(example)
    return kept


def text_of(row: Mapping[str, Any], key: str, place: str) -> str:
    """The text under `key`."""
    try:
        return texts_of(row, [key])[0]
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def value_of(row: Mapping[str, Any], key: str, place: str) -> Any:
    """What is under `key`."""
    if key not in row:
        raise InputError(f"{place}: no key `{key}`; found {listed(list(row))}")
    if row[key] is None:
        raise InputError(f"{place}: key `{key}`: found null, expected a value")
    return row[key]


def list_of(row: Mapping[str, Any], key: str, place: str) -> Sequence[Any]:
    """The list under `key`."""
    values = value_of(row, key, place)
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InputError(f"{place}: key `{key}`: found {_short(values)}, expected a list")
    return values


def id_of(row: Mapping[str, Any], place: str, name: str) -> str:
    """The row's `id` as text, or `name` where it has none."""
    value = row.get("id")
    if value is None:
        return name
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InputError(f"{place}: key `id`: found {_short(value)}, expected text or an integer")
    return str(value)


def shown(names: Sequence[str]) -> str:
    """The first names, for an error message."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _short(value: Any) -> str:
    try:
        found = json.dumps(value, ensure_ascii=False)
    except TypeError:
        found = repr(value)
    return found if len(found) <= 40 else found[:39] + "…"
