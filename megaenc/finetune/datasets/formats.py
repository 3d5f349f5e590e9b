"""Files of labelled data as rows: JSONL, TSV with a header, columns of words and tags (CoNLL, IOB2) and SQuAD's JSON."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from megaenc.data.readers import opened
from megaenc.errors import InputError
from megaenc.finetune.datasets.rows import IOB2, value_of
from megaenc.finetune.examples import Family
from megaenc.json_files import parse_json

EXPECTED = (
    "rows with text and label (SC), tokens and tags (TC) or question, context and answers (QA) in JSONL or TSV, "
    "columns of words and tags (.conll, .iob2), or SQuAD's JSON"
)
_COLUMNS = (".conll", ".iob2", ".iob", ".bio", ".txt")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".tsv", *_COLUMNS)
_LONGEST_LINE = 1 << 26
"""Bytes: texts of a few megabytes occur."""
_LARGEST = 1 << 30
"""Bytes of a file that is read at once."""

Row = tuple[str, dict[str, Any]]
"""(the file and the line or question, for complaints; the row)."""


def stem(path: Path) -> str | None:
    """The name of a file without what tells its format; None for a format that is not read."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), None)


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file, in order. Raises InputError for one that cannot be read as what it looks like."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(_COLUMNS):
        return _sentences(path)
    if name.endswith(".tsv"):
        word = next((line.split("\t") for _, line in lines(path) if line.strip() and not line.startswith("#")), [])
        return _sentences(path) if any(IOB2.fullmatch(cell) for cell in word) else _table(path)
    return _squad(path) if name.endswith(".json") and not _begins_with_row(path) else objects(path)


def family_of(path: Path, row: dict[str, Any]) -> Family:
    """What kind of task a row is of. Raises InputError where it is of none."""
    if "tokens" in row and "tags" in row:
        return Family.TC
    if "question" in row and "context" in row:
        return Family.QA
    if "text" in row or "label" in row:
        return Family.SC
    raise InputError(f"{path}: found rows with {', '.join(row) or 'nothing'}, expected {EXPECTED}; --task says which it is")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text without its line end) of each line of a file, compressed or not.

    InputError for one that is not UTF-8 or longer than any example.
    """
    with opened(str(path)) as (_, stream):
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), 1):
            if len(line) > _LONGEST_LINE:
                raise InputError(f"{path}:{number}: longer than {_LONGEST_LINE:,} bytes, expected one example a line")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputError(f"{path}:{number}: not UTF-8 text") from None


def objects(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file."""
    for number, line in lines(path):
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


def _begins_with_row(path: Path) -> bool:
    """Whether the first line is an object by itself that is not SQuAD's."""
    try:
        row = parse_json(next((line for _, line in lines(path) if line.strip()), ""))
    except ValueError:
        return False
    return isinstance(row, dict) and "data" not in row


def _table(path: Path) -> Iterator[Row]:
    """The rows of a TSV file; quotes are text, as in GLUE's files. Lists of words are parted by spaces."""
    header: list[str] = []
    for number, line in lines(path):
        cells = line.split("\t")
        if header and line:
            if len(cells) != len(header):
                raise InputError(f"{path}:{number}: found {len(cells)} columns, expected {len(header)} as in the header")
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            yield f"{path}:{number}", row | {key: row[key].split() for key in ("tokens", "tags") if key in row}
        header = header or cells


def _sentences(path: Path) -> Iterator[Row]:
    """Sentences of one word a line, parted by blank lines.

    The tags are in the column where most lines have a tag of IOB2, the last of several; words are in the first, or in the second
    where the first counts them. Lines that begin with # and have other columns are comments: `# sent_id = ...` is an id.
    """
    found = list(lines(path))
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


def _squad(path: Path) -> Iterator[Row]:
    """The questions of SQuAD's JSON, of either version; those that are impossible have no answers."""
    with opened(str(path)) as (_, stream):
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise InputError(f"{path}: larger than {_LARGEST:,} bytes, expected SQuAD's layout or one example a line (.jsonl)")
    try:
        read = parse_json(content)
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}; expected SQuAD's layout") from None
    if not isinstance(read, dict) or not isinstance(read.get("data"), list):
        raise InputError(f"{path}: no list `data`, expected SQuAD's layout: data, paragraphs, qas")
    for at, article in enumerate(_entries(read, "data", f"{path}")):
        for inner, paragraph in enumerate(_entries(article, "paragraphs", f"{path}: data[{at}]")):
            where = f"{path}: data[{at}].paragraphs[{inner}]"
            for asked in _entries(paragraph, "qas", where):
                place = f"{path}: question {value_of(asked, 'id', where)}"
                given = [] if asked.get("is_impossible") else _entries(asked, "answers", place)
                answers = {key: [answer.get(key) for answer in given] for key in ("text", "answer_start")}
                row = {"id": asked["id"], "question": asked.get("question"), "context": paragraph.get("context")}
                yield place, row | {"answers": answers}


def _entries(holder: dict[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    found = value_of(holder, key, place, list)
    for entry in found:
        if not isinstance(entry, dict):
            raise InputError(f"{place}: found a {type(entry).__name__}, expected an object of SQuAD's layout")
    return found
