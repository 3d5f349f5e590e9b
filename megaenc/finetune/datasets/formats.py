"""Files of labelled data as rows, and rows, checked, as examples. The place, file and line, begins every error.

Formats: JSONL, TSV with a header, columns of words and tags (CoNLL, IOB2) and SQuAD's JSON.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megaenc.data.sources.text_files import format_names, open_decompressed
from megaenc.errors import InputError
from megaenc.finetune.examples import Answer, LabelledText, Question, TaggedWords, TaskFamily
from megaenc.json_files import parse_json

IOB2 = re.compile(r"O|[BI]-\S+")
_POSITION = re.compile(r"-?\d{1,18}")
EXPECTED_FORMATS = (
    "rows with text and label (SC), tokens and tags (TC) or question, context and answers (QA) in JSONL or TSV, "
    "columns of words and tags (.conll, .iob2), or SQuAD's JSON"
)
_COLUMNS = (".conll", ".iob2", ".iob", ".bio", ".txt")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".tsv", *_COLUMNS)
_MAX_LINE_BYTES = 1 << 26
"""Bytes: texts of a few megabytes occur."""
_MAX_JSON_BYTES = 1 << 30
"""Bytes of a file that is read at once."""

Row = tuple[str, dict[str, Any]]
"""(the file and the line or question, for complaints; the row)."""


def strip_format_suffix(path: Path) -> str | None:
    """Return the name of a file without the endings of its format; None for a format that is not read."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_rows(path: Path) -> Iterator[Row]:
    """Return the rows of a file, in order. Raises InputError for one that cannot be read as its name and beginning say."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(_COLUMNS):
        return _read_conll(path)
    if name.endswith(".tsv"):
        word = next((line.split("\t") for _, line in read_lines(path) if line.strip() and not line.startswith("#")), [])
        return _read_conll(path) if any(IOB2.fullmatch(cell) for cell in word) else _read_tsv(path)
    return _read_squad(path) if name.endswith(".json") and not _starts_with_row(path) else read_jsonl(path)


def infer_family(path: Path, row: dict[str, Any]) -> TaskFamily:
    """Return the kind of task that a row is of. Raises InputError where it is of none."""
    if "tokens" in row and "tags" in row:
        return TaskFamily.TC
    if "question" in row and "context" in row:
        return TaskFamily.QA
    if "text" in row or "label" in row:
        return TaskFamily.SC
    raise InputError(
        f"{path}: found rows with {', '.join(row) or 'nothing'}, expected {EXPECTED_FORMATS}; --task says which it is"
    )


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text without its line end) of a file's lines. InputError if one is not UTF-8 or far too long."""
    with open_decompressed(str(path)) as (_, stream):
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > _MAX_LINE_BYTES:
                raise InputError(f"{path}:{number}: longer than {_MAX_LINE_BYTES:,} bytes, expected one example a line")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputError(f"{path}:{number}: not UTF-8 text") from None


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSONL file."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InputError(f"{place}: not JSON: {error}; expected one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: found a {type(row).__name__}, expected a JSON object")
        yield place, row


def _starts_with_row(path: Path) -> bool:
    """Return whether the first line is an object by itself that is not SQuAD's."""
    try:
        row = parse_json(next((line for _, line in read_lines(path) if line.strip()), ""))
    except ValueError:
        return False
    return isinstance(row, dict) and "data" not in row


def _read_tsv(path: Path) -> Iterator[Row]:
    """Yield the rows of a TSV file; quotes are text, as in GLUE's files. Lists of words are separated by spaces."""
    header: list[str] = []
    for number, line in read_lines(path):
        cells = line.split("\t")
        if header and line:
            if len(cells) != len(header):
                raise InputError(f"{path}:{number}: found {len(cells)} columns, expected {len(header)} as in the header")
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            yield f"{path}:{number}", row | {key: row[key].split() for key in ("tokens", "tags") if key in row}
        header = header or cells


def _read_conll(path: Path) -> Iterator[Row]:
    """Yield sentences of one word a line, separated by blank lines.

    Tags are in the column where most lines have a tag of IOB2, the last of several; words in the first, or in the second where
    the first counts them. Lines that begin with # and have other columns are comments: `# sent_id = ...` is an id.
    """
    found = list(read_lines(path))
    separator = "\t" if any("\t" in line for _, line in found if not line.startswith("#")) else None
    cells = [(number, line, line.split(separator)) for number, line in found]
    words = [row for _, line, row in cells if line.strip() and not line.startswith("#") and row[0] != "-DOCSTART-"]
    width = max((len(row) for row in words), default=0)
    if width < 2:
        raise InputError(f"{path}: found no line of a word and its tag, expected a word and a tag of IOB2 a line")
    hits = [sum(len(row) > at and bool(IOB2.fullmatch(row[at])) for row in words) for at in range(width)]
    column = max(range(1, width), key=lambda at: (hits[at], at))
    word_column = 1 if column > 1 and all(re.fullmatch(r"\d+([-.]\d+)?", row[0]) for row in words) else 0
    for _, sentence in groupby(cells, key=lambda cell: bool(cell[1].strip())):
        row: dict[str, Any] = {"tokens": [], "tags": []}
        first = 0
        for number, line, parts in sentence:
            if line.startswith("#") and (len(parts) <= column or not IOB2.fullmatch(parts[column])):
                if comment := re.match(r"#\s*sent_id\s*=\s*(\S+)", line):
                    row["id"] = comment[1]
            elif line.strip() and parts[0] != "-DOCSTART-":
                if len(parts) <= column:
                    raise InputError(f"{path}:{number}: found {len(parts)} columns, expected the tag in column {column + 1}")
                if not IOB2.fullmatch(parts[column]):
                    raise InputError(f"{path}:{number}: tag {parts[column]!r}: expected IOB2: O, B-TYPE or I-TYPE")
                first = first or number
                row["tokens"].append(parts[word_column])
                row["tags"].append(parts[column])
        if row["tokens"]:
            yield f"{path}:{first}", row


def _read_squad(path: Path) -> Iterator[Row]:
    """Yield the questions of SQuAD's JSON, of either version; those that are impossible have no answers."""
    with open_decompressed(str(path)) as (_, stream):
        content = stream.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise InputError(f"{path}: larger than {_MAX_JSON_BYTES:,} bytes, expected SQuAD's layout or one example a line (.jsonl)")
    try:
        read = parse_json(content)
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}; expected SQuAD's layout") from None
    if not isinstance(read, dict) or not isinstance(read.get("data"), list):
        raise InputError(f"{path}: no list `data`, expected SQuAD's layout: data, paragraphs, qas")
    for at, article in enumerate(_get_objects(read, "data", f"{path}")):
        for inner, paragraph in enumerate(_get_objects(article, "paragraphs", f"{path}: data[{at}]")):
            where = f"{path}: data[{at}].paragraphs[{inner}]"
            for asked in _get_objects(paragraph, "qas", where):
                place = f"{path}: question {get_value(asked, 'id', where)}"
                given = [] if asked.get("is_impossible") else _get_objects(asked, "answers", place)
                answers = {key: [answer.get(key) for answer in given] for key in ("text", "answer_start")}
                row = {"id": asked["id"], "question": asked.get("question"), "context": paragraph.get("context")}
                yield place, row | {"answers": answers}


def _get_objects(holder: dict[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    found = get_value(holder, key, place, list)
    for entry in found:
        if not isinstance(entry, dict):
            raise InputError(f"{place}: found a {type(entry).__name__}, expected an object of SQuAD's layout")
    return found


@dataclass(frozen=True)
class LabelSet:
    """The labels of a data set and how rows spell them."""

    labels: tuple[str, ...]
    is_indexed: bool
    """Whether an integer is a label's position; otherwise it is a label's name."""

    def index(self, value: Any, place: str) -> int:
        """Return the position of the label that a row spells as `value`, an integer or text. Raises InputError for no label."""
        name = parse_label(value, place)
        if self.is_indexed and (isinstance(value, int) or (name not in self.labels and _POSITION.fullmatch(name))):
            if 0 <= int(value) < len(self.labels):
                return int(value)
            raise InputError(f"{place}: label {value!r}: outside the label set, expected 0 to {len(self.labels) - 1}")
        if name not in self.labels:
            raise InputError(f"{place}: label {value!r}: outside the label set, expected one of {format_name_list(self.labels)}")
        return self.labels.index(name)


def parse_label(value: Any, place: str) -> str:
    """Return the name of a label that rows spell as an integer or as text."""
    if isinstance(value, float):
        raise InputError(f"{place}: label {value}: found a number with a point, expected a class; there is no regression here")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise InputError(f"{place}: label {value!r}: expected text or an integer")
    return str(value)


def collect_labels(family: TaskFamily, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> LabelSet:
    """Return the labels in (place, row) pairs: numbers by size, else alphabetically; of tags "O" comes first."""
    found: set[str] = set()
    for place, row in rows:
        if family is TaskFamily.SC:
            found.add(parse_label(get_value(row, "label", place), place))
        else:
            tags = get_value(row, "tags", place, list)
            found.update(check_tag(tag, f"{place}: tag {at}", is_indexed=False) for at, tag in enumerate(tags, 1))
    if family is TaskFamily.TC:
        return LabelSet(("O", *sorted(found - {"O"})), is_indexed=False)
    numbers = all(_POSITION.fullmatch(name) for name in found)
    return LabelSet(tuple(sorted(found, key=int if numbers else None)), is_indexed=False)


def check_tag(tag: Any, place: str, is_indexed: bool) -> Any:
    """Return `tag` if it is one of IOB2 (O, B-TYPE, I-TYPE), or a position where those are `is_indexed`. Raises InputError."""
    if not (isinstance(tag, str) and IOB2.fullmatch(tag)) and not (is_indexed and f"{tag}".isdecimal()):
        hint = "" if is_indexed else " (positions need a meta.json that lists the tags)"
        raise InputError(f"{place}: found {tag!r}, expected IOB2: O, B-TYPE or I-TYPE{hint if isinstance(tag, int) else ''}")
    return tag


def build_example(
    family: TaskFamily, row: Mapping[str, Any], place: str, name: str, labels: LabelSet, pair_template: str
) -> LabelledText | TaggedWords | Question:
    """Return the example of a row of SC, TC or QA; `name` is its id where it has none.

    SC: `text` (with `text_pair`, as the template says) and `label`. TC: `tokens` and `tags`. QA: `question`, `context` and
    `answers`, a mapping of two lists: `text` and `answer_start`.
    """
    if isinstance(found := row.get("id"), bool) or not isinstance(found, (str, int, type(None))):
        raise InputError(f"{place}: key `id`: found {_format_value(found)}, expected text or an integer")
    name = name if found is None else str(found)
    if family is TaskFamily.TC:
        return _build_tagged_words(row, place, name, labels)
    if family is TaskFamily.QA:
        return _build_question(row, place, name)
    text = get_value(row, "text", place, str)
    if row.get("text_pair") is not None:
        text = pair_template.format(text=text, text_pair=get_value(row, "text_pair", place, str))
    return LabelledText(name, text, labels.index(get_value(row, "label", place), place))


def _build_tagged_words(row: Mapping[str, Any], place: str, name: str, labels: LabelSet) -> TaggedWords:
    words, tags = (get_value(row, key, place, list) for key in ("tokens", "tags"))
    if len(words) != len(tags):
        raise InputError(f"{place}: found {len(words)} tokens and {len(tags)} tags, expected as many of one as of the other")
    for at, word in enumerate(words, 1):
        if not isinstance(word, str):
            raise InputError(f"{place}: token {at}: found {_format_value(word)}, expected text")
    checked = (check_tag(tag, f"{place}: tag {at}", labels.is_indexed) for at, tag in enumerate(tags, 1))
    return TaggedWords(name, tuple(words), tuple(labels.index(tag, place) for tag in checked))


def _build_question(row: Mapping[str, Any], place: str, name: str) -> Question:
    answers = get_value(row, "answers", place)
    if not isinstance(answers, Mapping):
        raise InputError(f"{place}: key `answers`: found {_format_value(answers)}, expected text and answer_start, a list each")
    texts, starts = (get_value(answers, key, f"{place}: answers") for key in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise InputError(f"{place}: answers: text and answer_start differ in length, expected two lists of one length")
    context = get_value(row, "context", place, str)
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text:
            raise InputError(f"{place}: answer: found {_format_value(text)}, expected text")
        if isinstance(start, bool) or not isinstance(start, int):
            raise InputError(f"{place}: answer_start: found {_format_value(start)}, expected an integer")
        found = context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            raise InputError(
                f"{place}: answer_start {start}: found {_format_value(found)} there in the context, expected the answer {_format_value(text)}"
            )
    return Question(name, get_value(row, "question", place, str), context, tuple(map(Answer, texts, starts)))


def register_id(seen: dict[str, str], key: str, place: str, kind: str = "id") -> None:
    """Add the id `key` to those `seen`, with its place. Raises InputError for one that is there already."""
    if key in seen:
        raise InputError(f"{place}: {kind} {key!r}: found at {seen[key]} too, expected ids that differ")
    seen[key] = place


def get_value(row: Mapping[str, Any], key: str, place: str, kind: type = object) -> Any:
    """Return the value of `key`: text, a list, or anything but null. Raises InputError for what is missing or otherwise."""
    if key not in row:
        raise InputError(f"{place}: no key `{key}`; found {format_names(list(row))}")
    if row[key] is None or not isinstance(row[key], kind):
        expected = {str: "text", list: "a list"}.get(kind, "a value")
        raise InputError(f"{place}: key `{key}`: found {_format_value(row[key])}, expected {expected}")
    return row[key]


def format_name_list(names: Sequence[str]) -> str:
    """Return the first names, for an error message."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _format_value(value: Any) -> str:
    try:
        found = json.dumps(value, ensure_ascii=False)
    except TypeError:
        found = repr(value)
    return found if len(found) <= 40 else found[:39] + "…"
