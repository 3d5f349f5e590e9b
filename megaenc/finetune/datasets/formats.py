"""Readers of labelled files, and conversion of their rows to examples.

Files are JSONL, TSV and CSV with a header, Parquet, CoNLL and SQuAD's JSON. Every error begins with
a location, such as file and line.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.console import truncate_text
from megaenc.data.sources.delimited_files import (
    find_other_delimiter,
    format_cell_count,
    get_delimiter,
    split_csv,
    split_tsv,
)
from megaenc.data.sources.text_files import (
    UTF8,
    check_columns,
    format_names,
    guess_8_bit_encoding,
    guess_encoding,
    open_decompressed,
    strip_compression_suffix,
)
from megaenc.errors import InputError
from megaenc.finetune.datasets.parquet import read_parquet_rows
from megaenc.finetune.examples import (
    TOKENIZER_PAIRS,
    Answer,
    LabelledText,
    Question,
    TaggedWords,
    TaskFamily,
    print_once,
)
from megaenc.json_files import DuplicateKeyError, parse_json

IOB2 = re.compile(r"O|[BI]-\S+")
_WORD = re.compile(r"[^ \t\r\n]+")
_POSITION = re.compile(r"-?\d{1,18}")
_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)
_MAX_LENGTH = 60
"""Maximum number of characters of a value in an error message."""
_MAX_NUMBER = float(np.finfo(np.float32).max)
_HIDDEN = {"-1", "-1.0"}
"""Spellings of the label of every row of a test split without published labels, as in GLUE."""
EXPECTED_FORMATS = (
    "rows with text and label (SC, regression) or labels (multi_label), tokens and tags (TC), "
    "question, context and answers (QA) or query, document and negatives (reranking) in JSONL, "
    "TSV, CSV or Parquet, columns of words and tags (.conll, .iob2), or SQuAD's JSON"
)
_COLUMNS = (".conll", ".iob2", ".iob", ".bio", ".txt")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".tsv", ".csv", ".parquet", *_COLUMNS)
_MAX_LINE_BYTES = 1 << 26
"""Maximum size of a line in bytes; texts of a few megabytes occur."""
_MAX_JSON_BYTES = 1 << 30
"""Maximum size in bytes of a JSON file, which is read at once."""

Row = tuple[str, dict[str, Any]]
"""(location for error messages, fields of the row)."""


def strip_format_suffix(path: Path) -> str | None:
    """Return a file's name without suffixes of format and compression.

    Only the last part of `path` is read, and the file need not exist. The result is None if the
    format is unknown.
    """
    name = strip_compression_suffix(path.name)
    return next(
        (name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), None
    )


def read_rows(path: Path) -> Iterator[Row]:
    """Return an iterator over (location, fields by name) of a labelled file's rows.

    The location, such as `path:line`, begins error messages. The suffix gives the format; .tsv and
    .json are told apart by content, and an unknown suffix means JSONL. Cells of CSV and TSV are
    text, except `tokens` and `tags`, which are split at white space into lists.

    Raises:
        InputError: The file is unreadable or malformed. It is raised during iteration; for .tsv and
            .json perhaps already by the call.
    """
    name = strip_compression_suffix(path.name).lower()
    if name.endswith(_COLUMNS):
        return _read_conll(path)
    if name.endswith(".tsv"):
        word = next(
            (
                line.split("\t")
                for _, line in read_lines(path)
                if line.strip() and not line.startswith("#")
            ),
            [],
        )
        return (
            _read_conll(path)
            if any(IOB2.fullmatch(cell) for cell in word)
            else _read_table(path, is_csv=False)
        )
    if name.endswith(".csv"):
        return _read_table(path, is_csv=True)
    if name.endswith(".parquet"):
        return read_parquet_rows(path)
    return (
        _read_squad(path)
        if name.endswith(".json") and not _starts_with_row(path)
        else read_jsonl(path)
    )


def infer_family(path: Path, row: dict[str, Any]) -> TaskFamily:
    """Return the task family of a row by its keys and the type of its label.

    It is TC with tokens and tags, else QA with question and context, else reranking with query or
    anchor and no text, else regression with a label that is a float, else multi-label with a label
    that is a list or with labels instead of a label, else SC with text or label.

    Args:
        path: File of the row, for the error.

    Raises:
        InputError: No family fits.
    """
    if "tokens" in row and "tags" in row:
        return TaskFamily.TC
    if "question" in row and "context" in row:
        return TaskFamily.QA
    if "text" not in row and ("query" in row or "anchor" in row):
        return TaskFamily.RERANKING
    label = row.get("label")
    if isinstance(label, float):
        return TaskFamily.REGRESSION
    if isinstance(label, list) or ("labels" in row and "label" not in row):
        return TaskFamily.MULTI_LABEL
    if "text" in row or "label" in row:
        return TaskFamily.SC
    raise InputError(
        f"{path}: found rows with {', '.join(row) or 'nothing'}, expected {EXPECTED_FORMATS}; "
        "or give --task"
    )


def read_lines(path: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line of a file, numbered from 1.

    gzip and Zstandard are recognized by content. A byte order mark is dropped.

    Args:
        keep_ends: Keep the line's end, a line feed with or without a carriage return.

    Raises:
        InputError: The file is unreadable or not UTF-8, or a line has over 64 MiB. It is raised
            during iteration.
    """
    with open_decompressed(str(path)) as (_, stream):
        for line_number, line in enumerate(
            iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""), 1
        ):
            if len(line) > _MAX_LINE_BYTES:
                raise InputError(
                    f"{path}:{line_number}: longer than {_MAX_LINE_BYTES:,} bytes, "
                    "expected one example a line"
                )
            if line_number == 1 and (encoding := guess_encoding(line)) != UTF8:
                raise InputError(
                    f"{path}:1: looks like UTF-16 text, not UTF-8; {_format_conversion(encoding)}"
                )
            try:
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                conversion = _format_conversion(guess_8_bit_encoding(error))
                raise InputError(f"{path}:{line_number}: not UTF-8 text; {conversion}") from None
            yield line_number, text if keep_ends else text.removesuffix("\n").removesuffix("\r")


def _format_conversion(encoding: str) -> str:
    """Return the advice to convert a file to UTF-8 from the likely `encoding`."""
    return f"expected UTF-8, as after `iconv -f {encoding} -t utf-8` with the file's encoding"


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield (`path:line`, object) of each line of a JSONL file that is not blank.

    Raises:
        InputError: The file is unreadable or not UTF-8, a line is no JSON object, or an object has
            a key twice. It is raised during iteration.
    """
    for line_number, line in read_lines(path):
        if not line.strip():
            continue
        location = f"{path}:{line_number}"
        try:
            row = parse_json(line, unique_keys=True)
        except DuplicateKeyError as error:
            raise InputError(f"{location}: {error}, expected once") from None
        except ValueError as error:
            raise InputError(f"{location}: not JSON: {error}; expected one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{location}: found a {type(row).__name__}, expected a JSON object")
        yield location, row


def _starts_with_row(path: Path) -> bool:
    """Return whether the first line is a complete JSON object that is not SQuAD's."""
    with open_decompressed(str(path)) as (_, stream):
        for line in iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""):
            if len(line) > _MAX_LINE_BYTES:
                return False
            if line.strip():
                break
    try:
        row = parse_json(next((line for _, line in read_lines(path) if line.strip()), ""))
    except ValueError:
        return False
    return isinstance(row, dict) and "data" not in row


def _read_table(path: Path, is_csv: bool) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file with a header.

    `tokens` and `tags` are split at spaces.
    """
    first_line = next((line for _, line in read_lines(path) if line), "")
    delimiter = get_delimiter(is_csv)
    if other_delimiter := find_other_delimiter(first_line, delimiter):
        raise InputError(
            f"{path}:1: found {other_delimiter!r} between columns, expected {delimiter!r}; "
            "replace it, or write JSONL"
        )
    # Line ends in a quoted cell are part of its text.
    lines = (line for _, line in read_lines(path, keep_ends=True))
    header: list[str] = []
    for line_number, cells in split_csv(str(path), lines) if is_csv else split_tsv(lines):
        if header:
            if len(cells) != len(header):
                raise InputError(f"{path}:{line_number}: {format_cell_count(cells, header)}")
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            yield (
                f"{path}:{line_number}",
                row | {key: _split_words(row[key]) for key in ("tokens", "tags") if key in row},
            )
        else:
            header = cells
            check_columns(str(path), header, [name for name in header if name])


def _split_words(line: str, separator: str | None = None) -> list[str]:
    """Split at `separator`, or without one at tabs, spaces and line ends.

    Other white space may be part of a word.
    """
    return _WORD.findall(line) if separator is None else line.split(separator)


def _read_conll(path: Path) -> Iterator[Row]:
    """Yield the sentences of a file with one word per line and blank lines between.

    Tags are in the column with the most IOB2 tags, the last of equals; words are in the first, or
    in the second if the first numbers them. Lines that begin with # and have fewer columns are
    comments; `# sent_id = ...` gives an id.
    """
    numbered_lines = list(read_lines(path))
    separator = (
        "\t"
        if any("\t" in line for _, line in numbered_lines if not line.startswith("#"))
        else None
    )
    cells = [
        (line_number, line, _split_words(line, separator)) for line_number, line in numbered_lines
    ]
    words = [
        row
        for _, line, row in cells
        if line.strip() and not line.startswith("#") and row[0] != "-DOCSTART-"
    ]
    width = max((len(row) for row in words), default=0)
    if width < 2:
        raise InputError(
            f"{path}: found no line of a word and its tag, expected a word and a tag of IOB2 a line"
        )
    hits = Counter(index for row in words for index, cell in enumerate(row) if IOB2.fullmatch(cell))
    column = max(range(1, width), key=lambda index: (hits[index], index))
    word_column = (
        1 if column > 1 and all(re.fullmatch(r"\d+([-.]\d+)?", row[0]) for row in words) else 0
    )
    for _, sentence in groupby(cells, key=lambda cell: bool(cell[1].strip())):
        row: dict[str, Any] = {"tokens": [], "tags": []}
        first = 0
        for line_number, line, parts in sentence:
            if line.startswith("#") and (len(parts) <= column or not IOB2.fullmatch(parts[column])):
                if comment := re.match(r"#\s*sent_id\s*=\s*(\S+)", line):
                    row["id"] = comment[1]
            elif line.strip() and parts[0] != "-DOCSTART-":
                if len(parts) <= column:
                    raise InputError(
                        f"{path}:{line_number}: found {len(parts)} columns, "
                        f"expected the tag in column {column + 1}"
                    )
                if not IOB2.fullmatch(parts[column]):
                    raise InputError(
                        f"{path}:{line_number}: tag {_shorten(parts[column])}: "
                        "expected IOB2: O, B-TYPE or I-TYPE"
                    )
                first = first or line_number
                row["tokens"].append(parts[word_column])
                row["tags"].append(parts[column])
        if row["tokens"]:
            yield f"{path}:{first}", row


def _read_squad(path: Path) -> Iterator[Row]:
    """Yield the questions of SQuAD's JSON, version 1 or 2, as rows.

    Impossible ones have no answers.
    """
    with open_decompressed(str(path)) as (_, stream):
        content = stream.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise InputError(
            f"{path}: larger than {_MAX_JSON_BYTES:,} bytes, "
            "expected SQuAD's layout or one example a line (.jsonl)"
        )
    try:
        squad = parse_json(content.decode("utf-8-sig"), unique_keys=True)
    except UnicodeDecodeError as error:
        conversion = _format_conversion(guess_8_bit_encoding(error))
        raise InputError(f"{path}: not UTF-8 text (byte {error.start + 1}); {conversion}") from None
    except DuplicateKeyError as error:
        raise InputError(f"{path}: {error}, expected once") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}; expected SQuAD's layout") from None
    if not isinstance(squad, dict) or not isinstance(squad.get("data"), list):
        raise InputError(f"{path}: no list `data`, expected SQuAD's layout: data, paragraphs, qas")
    for article_index, article in enumerate(_get_objects(squad, "data", f"{path}")):
        for paragraph_index, paragraph in enumerate(
            _get_objects(article, "paragraphs", f"{path}: data[{article_index}]")
        ):
            paragraph_location = f"{path}: data[{article_index}].paragraphs[{paragraph_index}]"
            for question in _get_objects(paragraph, "qas", paragraph_location):
                location = f"{path}: question {get_value(question, 'id', paragraph_location)}"
                row = question | {"context": paragraph.get("context")}
                if "answers" in row:  # predictions need none
                    answer_list = (
                        []
                        if question.get("is_impossible")
                        else _get_objects(question, "answers", location)
                    )
                    row["answers"] = {
                        key: [answer.get(key) for answer in answer_list]
                        for key in ("text", "answer_start")
                    }
                yield location, row


def _get_objects(holder: dict[str, Any], key: str, location: str) -> list[dict[str, Any]]:
    """Return the list of objects under `key` of an object in SQuAD's layout.

    Raises:
        InputError: The value is anything else.
    """
    objects = get_value(holder, key, location, list)
    for entry in objects:
        if not isinstance(entry, dict):
            raise InputError(
                f"{location}: found a {type(entry).__name__}, expected an object of SQuAD's layout"
            )
    return objects


@dataclass(frozen=True)
class LabelSet:
    """Labels of a data set in the order of their indices.

    `collect_labels` and `check_label_names` build it. If `is_indexed`, an integer in a row, or its
    digits as text if no label is a number, is the index, from 0, of one of `labels`, not its name.
    `index` converts a label of a row, and raises InputError if it is unknown.
    """

    labels: tuple[str, ...]
    is_indexed: bool
    """True if an integer in a row is a label's position instead of its name."""

    @cached_property
    def has_numbers(self) -> bool:
        """Return whether a label is spelled like an integer, such as `7` or `-1`.

        Digits as text in a row are then a name and never an index.
        """
        return any(_POSITION.fullmatch(label) for label in self.labels)

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {label: index for index, label in enumerate(self.labels)}

    def index(self, value: Any, location: str) -> int:
        """Return the index of the label `value`, a name or, if `is_indexed`, an index.

        An index is an integer from 0, or its digits as text unless `has_numbers`. If not
        `is_indexed`, an integer is the name that is spelled like it.

        Args:
            location: Start of the error, such as file:line.

        Raises:
            InputError: The label is unknown, or neither text nor an integer.
        """
        name = parse_label(value, location)
        is_position = isinstance(value, int) or (_POSITION.fullmatch(name) and not self.has_numbers)
        if self.is_indexed and is_position:
            if 0 <= int(value) < len(self.labels):
                return int(value)
            raise InputError(
                f"{location}: label {_shorten(value)}: outside the label set, "
                f"expected 0 to {len(self.labels) - 1}"
            )
        if name not in self._indices:
            raise InputError(
                f"{location}: label {_shorten(value)}: outside the label set, "
                f"expected one of {format_name_list(self.labels)}"
            )
        return self._indices[name]


FIXED_LABELS = {
    TaskFamily.QA: LabelSet((), is_indexed=False),
    TaskFamily.REGRESSION: LabelSet(("score",), is_indexed=False),
    TaskFamily.RERANKING: LabelSet(("score",), is_indexed=False),
}
"""Labels of families whose rows name none, by family: the name of the output if there is one."""
_EXPECTED_NAMES = "expected the names of the text's labels"
_NO_CLASS = "found a number with a point, expected a class; numbers need --task regression"


def is_hidden_test(rows: Iterable[tuple[str, Mapping[str, Any]]], labels: LabelSet) -> bool:
    """Return whether all rows have the label -1 or -1.0, as spelled none of `labels`.

    Test splits whose labels are not published have it, as in GLUE, as a number or as text, or as
    -1.0. Without rows the result is False.

    Args:
        rows: (location, fields) pairs, of which only the field `label` is read.
    """
    hidden = _HIDDEN - set(labels.labels)
    has_rows = False
    for _, row in rows:
        if str(row.get("label")) not in hidden:
            return False
        has_rows = True
    return has_rows


def parse_label(value: Any, location: str) -> str:
    """Return the label `value`, an integer or text that is not empty, as text.

    Args:
        location: Start of the error, such as file:line.

    Raises:
        InputError: The value is anything else, such as a float or a bool.
    """
    if isinstance(value, float):
        raise InputError(f"{location}: label {value}: {_NO_CLASS}")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise InputError(f"{location}: label {_shorten(value)}: expected text or an integer")
    return str(value)


def read_label_list(row: Mapping[str, Any], location: str) -> list[Any]:
    """Return the labels of a row of MULTI_LABEL, unchecked.

    They are in `labels`, or without it in `label`: a list, or text split at `|`, without white
    space around the labels; "" has none.

    Args:
        location: Start of the error, such as file:line.

    Raises:
        InputError: The value is missing, neither a list nor text, or a list that repeats a value or
            has a float, as most vectors of 0 and 1 do.
    """
    value = get_value(row, "labels" if "labels" in row else "label", location)
    if isinstance(value, str):
        return [label.strip() for label in value.split("|")] if value else []
    if not isinstance(value, list):
        raise InputError(
            f"{location}: labels {_format_value(value)}: expected a list, or text with | between "
            "labels"
        )
    known = set()
    for label in value:
        problem = ""
        if isinstance(label, float):
            problem = _format_value(label)
        elif repr(label) in known:  # a nested list cannot be hashed
            problem = f"{_format_value(label)} twice"
        known.add(repr(label))
        if problem:
            raise InputError(
                f"{location}: labels {_format_value(value)}: found {problem}, {_EXPECTED_NAMES}"
            )
    return value


def parse_number(value: Any, location: str) -> float:
    """Return the label `value` of regression, a number of float32 or text with one.

    Args:
        location: Start of the error, such as file:line.

    Raises:
        InputError: The value is anything else, such as NaN or a bool.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and _NUMBER.fullmatch(value)):
        raise InputError(f"{location}: label {_shorten(value)}: expected a number")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{location}: label {_shorten(value)}: expected a finite number")
    if abs(number) > _MAX_NUMBER:
        raise InputError(
            f"{location}: label {_shorten(value)}: expected at most {_MAX_NUMBER:.2g} in "
            "size, as losses are in float32"
        )
    return number


def print_whole_numbers(name: str, labels: Iterable[Any]) -> None:
    """Print, once, that the task is regression if all labels are whole numbers.

    Such numbers with a point may be meant as classes.

    Args:
        name: Name of the data set.
        labels: Labels of rows.
    """
    if all(isinstance(label, int) or f"{label}".endswith(".0") for label in labels):
        print_once(
            f"{name}: the task is regression, as labels are numbers with a point, such as 1.0; "
            "write classes as 1"
        )


def collect_labels(family: TaskFamily, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> LabelSet:
    """Return the LabelSet of all labels in rows, which are names (not `is_indexed`).

    Labels of SC and MULTI_LABEL are sorted, as numbers if all are integers. Tags of TC are "O",
    even if it does not occur, then the others, sorted.

    Args:
        family: SC, TC or MULTI_LABEL.
        rows: (location, fields) pairs, with the fields of labels as in `build_example`.

    Raises:
        InputError: A label is invalid, or there is none in MULTI_LABEL, or all its rows are vectors
            of 0 and 1, or all labels are numbers and one has a point or an exponent.
    """
    names: dict[str, str] = {}  # by name, the first location
    lengths = set()  # of the lists of MULTI_LABEL
    location = ""
    for location, row in rows:
        if family is TaskFamily.SC:
            names.setdefault(parse_label(get_value(row, "label", location), location), location)
        elif family is TaskFamily.MULTI_LABEL:
            labels = read_label_list(row, location)
            lengths.add(len(labels))
            for label in labels:
                names.setdefault(parse_label(label, location), location)
        else:
            tags = get_value(row, "tags", location, list)
            names |= {
                check_tag(tag, f"{location}: tag {tag_number}", is_indexed=False): ""
                for tag_number, tag in enumerate(tags, 1)
            }
    if family is TaskFamily.TC:
        return LabelSet(("O", *sorted(names.keys() - {"O"})), is_indexed=False)
    if family is TaskFamily.MULTI_LABEL and not names:
        raise InputError(f"{location}: found no label up to here, expected a text with one")
    # Longer vectors repeat a value, which `read_label_list` refuses.
    if lengths == {2} and names.keys() == {"0", "1"}:
        raise InputError(f"{location}: found lists of 0 and 1 up to here, {_EXPECTED_NAMES}")
    scores = [name for name in names if "." in name or "e" in name.lower()]
    if scores and all(_NUMBER.fullmatch(name) for name in names):
        advice = "names of classes that look like numbers need a meta.json that lists them"
        raise InputError(f"{names[scores[0]]}: label {_shorten(scores[0])}: {_NO_CLASS}; {advice}")
    is_numeric = all(_POSITION.fullmatch(name) for name in names)
    # Sorted twice, because 1 and 01 are equal as numbers.
    return LabelSet(tuple(sorted(sorted(names), key=int if is_numeric else None)), is_indexed=False)


def check_label_names(
    family: TaskFamily, names: Any, place: str, *, is_encoded: bool = False
) -> LabelSet:
    """Return the LabelSet of `names`, a list from a file, in their order.

    It `is_indexed` unless a name is spelled like an integer and `is_encoded` is False.

    Args:
        names: Value to check: a list of different texts, in TC of IOB2 tags with "O".
        place: Start of the error, such as a file.
        is_encoded: The rows hold indices, whatever the names are.

    Raises:
        InputError: `names` is anything else, or empty.
    """
    is_name_list = (
        isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    )
    if not is_name_list or len(set(names)) != len(names):
        raise InputError(f"{place}: expected a list of names that differ")
    if family is TaskFamily.TC:
        for name in names:
            check_tag(name, place, is_indexed=False)
        if "O" not in names:
            raise InputError(f"{place}: found no O, expected the tags of IOB2, O among them")
    labels = LabelSet(tuple(names), is_indexed=True)
    return labels if is_encoded or not labels.has_numbers else replace(labels, is_indexed=False)


def check_tag(tag: Any, location: str, is_indexed: bool) -> Any:
    """Return `tag` unchanged if it is IOB2 text: O, B-TYPE or I-TYPE.

    Args:
        location: Start of the error.
        is_indexed: Accept a number from 0 too, or its digits as text.

    Raises:
        InputError: The tag is anything else.
    """
    if not (isinstance(tag, str) and IOB2.fullmatch(tag)) and not (
        is_indexed and f"{tag}".isdecimal()
    ):
        hint = "" if is_indexed else " (positions need a meta.json that lists the tags)"
        raise InputError(
            f"{location}: found {_shorten(tag)}, expected IOB2: O, B-TYPE or I-TYPE"
            f"{hint if isinstance(tag, int) else ''}"
        )
    return tag


def build_example(
    family: TaskFamily,
    row: Mapping[str, Any],
    location: str,
    name: str,
    labels: LabelSet,
    pair_template: str,
) -> LabelledText | TaggedWords | Question:
    """Return a row as LabelledText, TaggedWords (TC) or Question (QA).

    SC and regression: `text` (with `text_pair`, joined by the template) and `label`; MULTI_LABEL:
    the labels of `read_label_list` instead. TC: `tokens` and `tags`. QA: `question`, `context` and,
    unless `is_impossible`, `answers` (lists `text` and `answer_start`) that stand in the context.

    Args:
        name, labels: Id if the row has none; labels that it may have, whose indices the example
            has, unused for QA and regression.
        pair_template: Template of pairs (see `build_labelled_text`).

    Raises:
        InputError: The row is invalid; the message begins with `location`, such as file:line.
    """
    row_id = check_id(row, location)
    name = name if row_id is None else str(row_id)
    if family is TaskFamily.TC:
        return _build_tagged_words(row, location, name, labels)
    if family is TaskFamily.QA:
        return _build_question(row, location, name)
    if family is TaskFamily.MULTI_LABEL:
        label = tuple(
            sorted({labels.index(value, location) for value in read_label_list(row, location)})
        )
    elif family is TaskFamily.REGRESSION:
        label = parse_number(get_value(row, "label", location), location)
    else:
        label = labels.index(get_value(row, "label", location), location)
    return build_labelled_text(row, location, name, label, pair_template)


def check_id(row: Mapping[str, Any], location: str) -> str | int | None:
    """Return the value of a row's key `id`, or None if it is missing, null or "".

    Args:
        location: Start of the error, such as file:line.

    Raises:
        InputError: The id is neither text nor an integer.
    """
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int, type(None))):
        raise InputError(
            f"{location}: key `id`: found {_format_value(row_id)}, expected text or an integer"
        )
    # A table has no null: its empty cell means the same.
    return None if row_id == "" else row_id


def build_labelled_text(
    row: Mapping[str, Any], location: str, name: str, label: Any, pair_template: str
) -> LabelledText:
    """Return the example of a row of SEQUENCE_FAMILIES from its texts.

    `name` and `label` are id and label of the example; those of the row are not read. A row
    without `text_pair`, or with null or "" there, is its `text` whatever the template.

    Args:
        location: Start of the error, such as file:line.
        pair_template: Template with {text} and {text_pair}, which become one text; TOKENIZER_PAIRS
            to keep both, for the tokenizer; empty to ignore `text_pair`.

    Raises:
        InputError: `text` is missing, or one of the two is not text.
    """
    text = get_value(row, "text", location, str)
    # A table has no null: its empty cell means the same.
    if row.get("text_pair") in (None, "") or not pair_template:
        return LabelledText(name, text, label)
    text_pair = get_value(row, "text_pair", location, str)
    if pair_template == TOKENIZER_PAIRS:
        return LabelledText(name, text, label, text_pair)
    return LabelledText(name, pair_template.format(text=text, text_pair=text_pair), label)


def _build_tagged_words(
    row: Mapping[str, Any], location: str, name: str, labels: LabelSet
) -> TaggedWords:
    """Convert a row of TC.

    Raises:
        InputError: The row is invalid.
    """
    words = get_value(row, "tokens", location, list)
    tags = get_value(row, "tags", location, list)
    if len(words) != len(tags):
        raise InputError(
            f"{location}: found {len(words)} tokens and {len(tags)} tags, "
            "expected as many of one as of the other"
        )
    for word_number, word in enumerate(words, 1):
        if not isinstance(word, str):
            raise InputError(
                f"{location}: token {word_number}: found {_format_value(word)}, expected text"
            )
    checked = (
        check_tag(tag, f"{location}: tag {tag_number}", labels.is_indexed)
        for tag_number, tag in enumerate(tags, 1)
    )
    return TaggedWords(name, tuple(words), tuple(labels.index(tag, location) for tag in checked))


def _build_question(row: Mapping[str, Any], location: str, name: str) -> Question:
    """Convert a row of QA, whose answers must stand in the context.

    Raises:
        InputError: The row is invalid.
    """
    is_impossible = row.get("is_impossible")
    if is_impossible not in (None, False, True):
        raise InputError(
            f"{location}: key `is_impossible`: found {_format_value(is_impossible)}, "
            "expected true or false"
        )
    answers = {"text": [], "answer_start": []}
    if not is_impossible:
        answers = get_value(row, "answers", location)
    if not isinstance(answers, Mapping):
        raise InputError(
            f"{location}: key `answers`: found {_format_value(answers)}, "
            "expected text and answer_start, a list each"
        )
    texts = get_value(answers, "text", f"{location}: answers")
    starts = get_value(answers, "answer_start", f"{location}: answers")
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise InputError(
            f"{location}: answers: text and answer_start differ in length, "
            "expected two lists of one length"
        )
    context = get_value(row, "context", location, str)
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text:
            raise InputError(f"{location}: answer: found {_format_value(text)}, expected text")
        if isinstance(start, bool) or not isinstance(start, int):
            raise InputError(
                f"{location}: answer_start: found {_format_value(start)}, expected an integer"
            )
        answer = context[start : start + len(text)] if start >= 0 else ""
        if answer != text:
            raise InputError(
                f"{location}: answer_start {start}: found {_format_value(answer)} in the context, "
                f"expected the answer {_format_value(text)}"
            )
    return Question(
        name, get_value(row, "question", location, str), context, tuple(map(Answer, texts, starts))
    )


def register_id(places: dict[str, str], key: str, location: str, kind: str = "id") -> None:
    """Record in `places` that the id `key` stands at `location`, to find duplicates.

    Args:
        places: First location of each id so far, by id; changed in place.
        location: Place of the id, such as file:line.
        kind: Name of the id's field in the error.

    Raises:
        InputError: The id is repeated; the message names both places.
    """
    if key in places:
        raise InputError(
            f"{location}: {kind} {_shorten(key)}: found at {places[key]} too, expected unique ids"
        )
    places[key] = location


def get_value(row: Mapping[str, Any], key: str, location: str, kind: type = object) -> Any:
    """Return the value `row[key]` after a check of its type.

    Args:
        location: Start of the error, such as file:line.
        kind: str, list, or object for any value but null.

    Raises:
        InputError: The value is missing, null or not of type `kind`.
    """
    if key not in row:
        raise InputError(f"{location}: no key `{key}`; found {format_names(list(row))}")
    if row[key] is None or not isinstance(row[key], kind):
        expected = {str: "text", list: "a list"}.get(kind, "a value")
        raise InputError(
            f"{location}: key `{key}`: found {_format_value(row[key])}, expected {expected}"
        )
    return row[key]


def format_name_list(names: Sequence[str]) -> str:
    """Return the first 12 names joined by commas, for an error message.

    `and N more` follows if there are more. A name has at most 60 characters.
    """
    first_names = [truncate_text(name, _MAX_LENGTH) for name in names[:12]]
    return ", ".join(first_names) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _shorten(value: Any) -> str:
    """Return `repr(value)`, of at most 60 characters, for an error message."""
    return truncate_text(repr(value), _MAX_LENGTH)


def _format_value(value: Any) -> str:
    """Format `value` as JSON of at most 40 characters, for an error message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # parsed with fewer calls on the stack
        text = f"a deep {type(value).__name__}"
    except TypeError:
        text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
