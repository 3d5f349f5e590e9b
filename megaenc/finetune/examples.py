"""Labelled data sets: example types, `Dataset`, and rules of validation splits."""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np

from megaenc.console import print_rank_0
from megaenc.errors import InputError

QUERY = "Query: "
"""Prefix of every query, as in the study."""
DOCUMENT = "Document: "
"""Prefix of every document, as in the study."""
TOKENIZER_PAIRS = "tokenizer"
"""Value of a pair template with which the tokenizer joins the two texts by its special tokens."""
_VALIDATION_SEED = 42
_TRAIN_FRACTION = 0.95


class TaskFamily(StrEnum):
    """Enum of task families, whose values are their names on the command line.

    SC is sequence classification, TC token classification, QA extractive question answering and IR
    retrieval: the four of the study (STUDY_FAMILIES). REGRESSION ("regression") predicts a number
    for each text, MULTI_LABEL ("multi_label") any number of labels, RERANKING ("reranking") the
    relevance of a document to a query.
    """

    SC = "SC"  # sequence classification
    TC = "TC"  # token classification
    QA = "QA"  # extractive question answering
    IR = "IR"  # retrieval
    REGRESSION = "regression"  # a number for each text
    MULTI_LABEL = "multi_label"  # any number of labels for each text
    RERANKING = "reranking"  # relevance of documents to a query


STUDY_FAMILIES = (TaskFamily.SC, TaskFamily.TC, TaskFamily.QA, TaskFamily.IR)
"""Task families of the study's claims, figures and averages; the others are in its tables only."""
SEQUENCE_FAMILIES = (TaskFamily.SC, TaskFamily.REGRESSION, TaskFamily.MULTI_LABEL)
"""Task families whose examples are `LabelledText`."""
POOLED_FAMILIES = (*SEQUENCE_FAMILIES, TaskFamily.RERANKING)
"""Task families whose head reads one state of each text or pair of texts."""

SplitName: TypeAlias = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class LabelledText:
    """Example of SEQUENCE_FAMILIES, with an `id`: one or two texts, and a label.

    `label` is an index in `Dataset.labels`, a number in regression, and a tuple of ascending
    indices in MULTI_LABEL. `text_pair` is the second text; None for a single text and for a pair
    that a template has joined to one, `text`.
    """

    id: str
    text: str
    label: int | float | tuple[int, ...]
    text_pair: str | None = None

    @property
    def content(self) -> str | tuple[str, str]:
        """Return the text, or both texts of a pair as a tuple."""
        return self.text if self.text_pair is None else (self.text, self.text_pair)


@dataclass(frozen=True)
class TaggedWords:
    """Example of token classification, with an `id`: `words` of a sentence and tags.

    `tags` has an index in `Dataset.labels` for each word.
    """

    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Answer span in a context: `text` and its character offset `start`, from 0."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """Example of question answering: `question`, `context` and accepted `answers`.

    `id` is a text, `answers` a tuple of Answer. Training uses only the first answer; evaluation
    accepts any. An unanswerable question has none.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Pair:
    """Training pair of retrieval, with an `id`: `query` and relevant `document`.

    Both texts include their prefixes, QUERY and DOCUMENT.
    """

    id: str
    query: str
    document: str


@dataclass(frozen=True)
class RankingQuery:
    """Example of reranking: a query, its relevant documents and other candidates.

    All are texts without prefixes. No document is given twice.
    """

    query: str
    positives: tuple[str, ...]
    """Relevant documents."""
    negatives: tuple[str, ...]
    """Other candidates, which are not relevant."""

    @property
    def documents(self) -> tuple[str, ...]:
        """Return all candidates, the relevant ones first."""
        return self.positives + self.negatives


@dataclass(frozen=True)
class RetrievalExamples:
    """Validation or test split of retrieval: queries, documents and relevance grades.

    `queries` and `documents` are texts by id, with the prefixes QUERY and DOCUMENT in fine-tuning.
    `relevant` has the grades above 0 by query id, then document id; a document may be missing in
    `documents`. If `ignore_identical_ids`, the document with a query's id is not ranked.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    """Grades above 0 by query id, then by document id. A document may be missing in `documents`."""
    ignore_identical_ids: bool = False
    """True to rank as BEIR does, without the document that has the query's id."""


Examples: TypeAlias = (
    list[LabelledText]
    | list[TaggedWords]
    | list[Question]
    | list[Pair]
    | list[RankingQuery]
    | RetrievalExamples
)


class DataUnavailable(OSError):
    """OSError that a download failed for a temporary reason; a retry may succeed.

    The message has one line.
    """


@dataclass(frozen=True)
class Dataset:
    """Labelled data set: family, labels, fingerprints and a reader of its splits.

    `find_dataset` builds it by name or path, and `load_split` reads its examples by `read_split`.
    `family` is that of the task. `labels` are classes or tags in the order of their indices,
    ("score",) for regression and reranking, empty for QA and IR. `train_on` names the training
    data, which differs from `name` only in retrieval. `fingerprint`, and `train_fingerprint` of the
    training data, are SHA-256 (hex) of the data, or of id and revision on the Hub. `pair_template`
    is set only in SEQUENCE_FAMILIES, and there without pairs, too.
    """

    name: str
    """Name of the data set and of its directory in results."""
    family: TaskFamily
    labels: tuple[str, ...]
    """Labels of SC and MULTI_LABEL, tags of TC (with "O"), ("score",) of regression and reranking;
    empty for QA and IR."""
    train_on: str
    """Name of the training data set: `name`, except in retrieval."""
    fingerprint: str
    """Hexadecimal SHA-256 of the files, or of Hub id, config, revision and rules."""
    train_fingerprint: str
    """Fingerprint of `train_on`."""
    read_split: Callable[[SplitName], Examples] = field(repr=False, compare=False)
    """Function that reads a split without the check of `load_split`."""
    pair_template: str = ""
    """Template that joins the two texts of a pair, TOKENIZER_PAIRS if the tokenizer joins them, or
    empty in other families than SEQUENCE_FAMILIES."""

    def load_split(self, name: SplitName) -> Examples:
        """Return the examples of a split, in order: a list, or RetrievalExamples.

        Validation and test of IR are RetrievalExamples. Data sets of HUB_DATASETS are downloaded
        unless they are in the cache; the examples themselves are not cached.

        Raises:
            InputError: The split is missing or empty, or a row is invalid.
            DataUnavailable: A download of HUB_DATASETS failed for a temporary reason.
        """
        examples = self.read_split(name)
        if not (examples.relevant if isinstance(examples, RetrievalExamples) else examples):
            raise InputError(
                f"{self.name}: the {name} split is empty, expected at least one example"
            )
        return examples


def hash_json(content: Any) -> str:
    """Return the SHA-256 (hex) of a value as JSON, whatever the order of dicts' keys."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


@functools.cache
def print_once(text: str) -> None:
    """Print `text` as a line on rank 0, only at this process's first call with it."""
    print_rank_0(text)


def split_validation_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random row indices for training and validation, always the same.

    The study's rule for data sets without a third split: train_test_split(train_size=0.95, seed=42)
    of `datasets`, in its order. A single row validates.

    Returns:
        int64 indices for training, 95 % of `count` rounded down, and those for validation, the
        rest.
    """
    order = np.random.default_rng(_VALIDATION_SEED).permutation(count)
    held_out = count - math.floor(_TRAIN_FRACTION * count)
    return order[held_out:], order[:held_out]


def split_by_fraction(
    examples: list[LabelledText] | list[TaggedWords] | list[Question] | list[RankingQuery],
    fraction: float,
) -> dict[SplitName, list[int]]:
    """Return random row indices by split, ascending, always the same.

    About `fraction` of the examples validate and as many test; the rest trains, with every label.
    So it is for the examples of each label, of each range of numbers, and for those that have
    several labels by their rarest one. Examples with the same text (of pairs the first), words,
    context or query are in one split. Splits of few examples may be empty.

    Args:
        fraction: Fraction of the examples, above 0 and below 0.5.
    """
    classes = [_get_classes(example) for example in examples]
    counts = Counter(label for labels in classes for label in labels)
    ranks = []
    for example, labels in zip(examples, classes, strict=True):
        # All examples without a class have a number, no label, a question or a query.
        unlabelled = (0, getattr(example, "label", 0))
        ranks.append(min(((counts[label], label) for label in labels), default=unlabelled))
    groups: dict[Any, list[int]] = {}
    for row in np.random.default_rng(_VALIDATION_SEED).permutation(len(examples)).tolist():
        groups.setdefault(get_split_key(examples[row]), []).append(row)

    splits: dict[SplitName, list[int]] = {"train": [], "validation": [], "test": []}
    position = 0
    for rows in sorted(groups.values(), key=lambda rows: min(ranks[row] for row in rows)):
        position += len(rows)
        taken = Counter(label for row in rows for label in classes[row])
        smaller = min(("validation", "test"), key=lambda split: len(splits[split]))
        held_out = len(splits["validation"]) + len(splits["test"]) + len(rows)
        # The constant absorbs rounding.
        if held_out <= 2 * fraction * position + 1e-9 and all(
            count < counts[label] for label, count in taken.items()
        ):
            splits[smaller] += rows
            counts -= taken
        else:
            splits["train"] += rows
    return {split: sorted(rows) for split, rows in splits.items()}


def get_split_key(
    example: LabelledText | TaggedWords | Question | RankingQuery,
) -> str | tuple[str, ...]:
    """Return the text, words, context or query of an example.

    Examples with the same are in one split of `split_by_fraction`. Of a pair it is the first text.
    """
    if isinstance(example, LabelledText):
        return example.text
    if isinstance(example, RankingQuery):
        return example.query
    return example.words if isinstance(example, TaggedWords) else example.context


def _get_classes(
    example: LabelledText | TaggedWords | Question | RankingQuery,
) -> tuple[int, ...]:
    """Return the label or tag indices of an example.

    There are none in regression, QA and reranking.
    """
    if isinstance(example, TaggedWords):
        return tuple(set(example.tags))
    label = getattr(example, "label", ())
    if isinstance(label, tuple):
        return label
    return (label,) if isinstance(label, int) else ()


def format_too_few_error(count: int, noun: str, file: str) -> str:
    """Return the error text, without location, that `count` examples are too few.

    Too few examples cannot be split into training and validation.

    Args:
        noun: Word for the examples, in the plural.
        file: Name of the file that would make the split unnecessary.
    """
    return (
        f"found {count}, too few {noun} to validate on part of them, "
        f"expected 2 at least or a file {file}"
    )


def choose_validation_queries(query_ids: list[str]) -> set[str]:
    """Return a random half of the query ids for validation, always the same.

    This is the study's rule for NQ (seed 42). The order of the ids has no effect. Half of an odd
    number is rounded to the even neighbour: 2 of 3, 2 of 5.
    """
    ordered = sorted(query_ids)
    order = np.random.default_rng(_VALIDATION_SEED).permutation(len(ordered))
    return {ordered[index] for index in order[: round(len(ordered) / 2)]}


def hash_examples(examples: Examples) -> str:
    """Return the SHA-256 (hex) of the examples' fields, in the order of the examples.

    `ignore_identical_ids` of RetrievalExamples is not included.
    """
    digest = hashlib.sha256()
    parts = (
        (examples.queries, examples.documents, examples.relevant)
        if isinstance(examples, RetrievalExamples)
        else (examples,)
    )
    for part in parts:
        digest.update(f"{len(part)}\n".encode())
        for entry in part.items() if isinstance(part, dict) else part:
            digest.update(f"{entry!r}\n".encode())
    return digest.hexdigest()
