"""Rows of queries, relevant documents and hard negatives."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaenc.data.sources.text_files import format_names
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats
from megaenc.finetune.examples import RankingQuery

# Of sentence-transformers and SQuAD too.
_QUERY_KEYS = ("query", "anchor", "question")
_DOCUMENT_KEYS = ("document", "positive", "context")
_NEGATIVE_KEY = re.compile(r"negative(?:_(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """Texts of a training pair, without prefixes; a frozen, hashable dataclass.

    They are a `query`, its relevant `document`, and hard `negatives`, irrelevant documents that are
    similar to the query; () without any.
    """

    query: str
    document: str
    negatives: tuple[str, ...] = ()


def build_pair(row: Mapping[str, Any], location: str) -> TrainingPair:
    """Return the TrainingPair of a row.

    Raises:
        InputError: A text is missing or empty, or the query or a negative is the document itself.
    """
    query = _get_text(row, _QUERY_KEYS, location)
    document = _get_text(row, _DOCUMENT_KEYS, location)
    if query.strip() == document.strip():
        raise InputError(
            f"{location}: query and document are the same text, expected two different texts"
        )
    negatives = _get_negatives(row, location)
    if document in negatives:
        raise InputError(
            f"{location}: negative {negatives.index(document) + 1} is the document itself, "
            "expected another text"
        )
    return TrainingPair(query, document, negatives)


def merge_queries(rows: Iterable[formats.Row]) -> list[RankingQuery]:
    """Return one RankingQuery for all rows with the same query, in order.

    A row is that of `build_pair`; with a `label` of 0 its document is not relevant. A document that
    is relevant in any row of its query is so in all. Either kind of documents may be missing.

    Args:
        rows: (location, fields) pairs.

    Raises:
        InputError: A row is invalid, or its label is neither 0 nor 1.
    """
    documents: dict[str, dict[str, bool]] = {}
    for location, row in rows:
        pair = build_pair(row, location)
        is_relevant = read_relevance(row, location)
        relevance = documents.setdefault(pair.query, {})
        relevance[pair.document] = relevance.get(pair.document, False) or is_relevant
        for document in pair.negatives:
            relevance.setdefault(document, False)
    return [
        RankingQuery(
            query,
            tuple(document for document, is_relevant in relevance.items() if is_relevant),
            tuple(document for document, is_relevant in relevance.items() if not is_relevant),
        )
        for query, relevance in documents.items()
    ]


def read_relevance(row: Mapping[str, Any], location: str) -> bool:
    """Return whether the document of a row is relevant: its `label`, by default 1.

    Raises:
        InputError: The label is neither 0 nor 1, as number, text or bool.
    """
    label = row.get("label", 1)
    if label not in (0, 1, "0", "1", "0.0", "1.0"):
        raise InputError(
            f"{location}: label {repr(label)[:40]}: expected 1 for a relevant document, else 0"
        )
    return float(label) == 1


def _get_text(row: Mapping[str, Any], keys: Sequence[str], location: str) -> str:
    """Return the text of the only column among `keys` that the row has.

    Raises:
        InputError: The row has none or several of them, or the text is empty.
    """
    present = [key for key in keys if key in row]
    if len(present) != 1:
        raise InputError(
            f"{location}: found {format_names(present or row)}, expected one column of "
            f"{', '.join(keys)}"
        )
    text = formats.get_value(row, present[0], location, str)
    if not text.strip():
        raise InputError(f"{location}: key `{present[0]}`: found an empty text, expected words")
    return text


def _get_negatives(row: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Return the hard negatives of a row, without empty cells.

    They are the list `negatives`, or the columns `negative`, `negative_1` and so on.
    """
    columns = {key: match for key in row if (match := _NEGATIVE_KEY.fullmatch(key))}
    if "negatives" not in row:
        ordered = sorted(columns, key=lambda key: int(columns[key][1] or 0))
        # Rows of a table may have fewer
        cells = [(key, row[key]) for key in ordered if row[key] not in (None, "")]
        return tuple(formats.get_value(row, key, location, str) for key, _ in cells)
    if columns:
        raise InputError(
            f"{location}: found `negatives` and {format_names(columns)}, expected one of the two "
            "forms"
        )
    negatives = row["negatives"] or []
    if not isinstance(negatives, list):
        raise InputError(
            f"{location}: key `negatives`: expected a list of texts; in a table use negative_1, "
            "negative_2 ..."
        )
    for position, text in enumerate(negatives, 1):
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"{location}: negative {position}: found {json.dumps(text)[:40]}, expected words"
            )
    return tuple(negatives)
