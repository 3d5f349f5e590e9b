"""Examples of labelled data sets: texts with a label, tagged words, questions, queries and documents."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias


class Family(StrEnum):
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
class Retrieval:
    """Queries, documents and which of them belong together; texts have their prefixes and titles already."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    """By query: its documents and their grades, above 0."""


Examples: TypeAlias = list[LabelledText] | list[TaggedWords] | list[Question] | list[Pair] | Retrieval


def digest(examples: Examples) -> str:
    """Return sha256 in hex of all that examples hold."""
    whole = hashlib.sha256()
    parts = (examples.queries, examples.documents, examples.relevant) if isinstance(examples, Retrieval) else (examples,)
    for part in parts:
        whole.update(f"{len(part)}\n".encode())
        for entry in part.items() if isinstance(part, dict) else part:
            whole.update(f"{entry!r}\n".encode())
    return whole.hexdigest()
