"""Labelled data sets: the types of examples and of a set, and the rules that several sources share."""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np

from megaenc.console import print_rank_0
from megaenc.errors import InputError

QUERY, DOCUMENT = "Query: ", "Document: "
"""Prefixes of every query and every document, as in the study."""
_VALIDATION_SEED = 42
_TRAIN_SHARE = 0.95


class TaskFamily(StrEnum):
    """A kind of task, under the name that result folders have."""

    SC = "SC"  # sequence classification
    TC = "TC"  # token classification
    QA = "QA"  # extractive question answering
    IR = "IR"  # retrieval


SplitName: TypeAlias = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class LabelledText:
    """One text, or a pair that a template made one text of, and the index of its label."""

    id: str
    text: str
    label: int


@dataclass(frozen=True)
class TaggedWords:
    """The words of a sentence and the index of each one's tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """`context[start : start + len(text)] == text`."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a text; without answers, it cannot be answered from the text."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Pair:
    """A query and a document that answers it, for training."""

    id: str
    query: str
    document: str


@dataclass(frozen=True)
class RetrievalExamples:
    """Queries, documents and which of them belong together; texts have their prefixes and titles already."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    """By query: its documents and their grades, above 0."""


Examples: TypeAlias = list[LabelledText] | list[TaggedWords] | list[Question] | list[Pair] | RetrievalExamples


class DataUnavailable(OSError):
    """Data that the network does not give now, and may give later: not wrong input. The message is one line."""


@dataclass(frozen=True)
class Dataset:
    """A labelled data set. Finding one reads little; `split` reads."""

    name: str
    """Also the folder's name in results."""
    family: TaskFamily
    labels: tuple[str, ...]
    """Classes of SC, tags of TC (with "O"); nothing for QA and IR."""
    train_on: str
    """The data set that models are trained on before this one reads them; its own name, but for retrieval."""
    fingerprint: str
    """sha256 in hex of the files, or of Hub id, config, revision and rules."""
    train_fingerprint: str
    """The fingerprint of `train_on`."""
    read_split: Callable[[SplitName], Examples] = field(repr=False, compare=False)
    """Reads a split; `split` is for callers."""

    def load_split(self, name: SplitName) -> Examples:
        """Return the examples of a split; of retrieval, `train` is a list of Pair and the others are a Retrieval.

        Raises InputError for a split that is missing or empty, and for one with a bad row.
        """
        examples = self.read_split(name)
        if not (examples.relevant if isinstance(examples, RetrievalExamples) else examples):
            raise InputError(f"{self.name}: the {name} split is empty, expected at least one example")
        return examples


def hash_json(content: Any) -> str:
    """Return sha256 in hex of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def print_once(text: str) -> None:
    """Print one line, once in a process."""
    print_rank_0(text)


def split_validation_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 (rows to train on, rows to validate on) of `count`: the study's rule where a data set has too few splits.

    They are those of `datasets`' train_test_split(train_size=0.95, seed=42), in its order.
    """
    order = np.random.default_rng(_VALIDATION_SEED).permutation(count)
    held_out = count - math.floor(_TRAIN_SHARE * count)
    return order[held_out:], order[:held_out]


def format_too_few_error(count: int, what: str, file: str) -> str:
    """Word the error of a split that is too small to give part of it away."""
    return f"found {count}, too few {what} to validate on part of them, expected 2 at least or a file {file}"


def choose_validation_queries(query_ids: list[str]) -> set[str]:
    """Return half of the queries, to validate on where only test queries are judged: the study's rule for NQ, with our seed."""
    ordered = sorted(query_ids)
    order = np.random.default_rng(_VALIDATION_SEED).permutation(len(ordered))
    return {ordered[at] for at in order[: round(len(ordered) / 2)]}


def hash_examples(examples: Examples) -> str:
    """Return sha256 in hex of all that examples hold."""
    whole = hashlib.sha256()
    parts = (examples.queries, examples.documents, examples.relevant) if isinstance(examples, RetrievalExamples) else (examples,)
    for part in parts:
        whole.update(f"{len(part)}\n".encode())
        for entry in part.items() if isinstance(part, dict) else part:
            whole.update(f"{entry!r}\n".encode())
    return whole.hexdigest()
