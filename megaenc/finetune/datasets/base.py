"""The type of every data set, and rules that several sources share."""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaenc.console import say
from megaenc.errors import InputError
from megaenc.finetune.examples import Examples, Family, Retrieval, SplitName

QUERY, DOCUMENT = "Query: ", "Document: "
"""Prefixes of every query and every document, as in the study."""
_VALIDATION_SEED = 42
_TRAIN_SHARE = 0.95


class Unreachable(OSError):
    """Data that the network does not give now, and may give later: not wrong input. The message is one line."""


@dataclass(frozen=True)
class Dataset:
    """A labelled data set. Finding one reads little; `split` reads."""

    name: str
    """Also the folder's name in results."""
    family: Family
    labels: tuple[str, ...]
    """Classes of SC, tags of TC (with "O"); nothing for QA and IR."""
    train_on: str
    """The data set that models are trained on before this one reads them; its own name, but for retrieval."""
    fingerprint: str
    """sha256 in hex of the files, or of Hub id, config, revision and rules."""
    train_fingerprint: str
    """The fingerprint of `train_on`."""
    load: Callable[[SplitName], Examples] = field(repr=False, compare=False)
    """Reads a split; `split` is for callers."""

    def split(self, name: SplitName) -> Examples:
        """Return the examples of a split; of retrieval, `train` is a list of Pair and the others are a Retrieval.

        Raises InputError for a split that is missing or empty, and for one with a bad row.
        """
        examples = self.load(name)
        if not (examples.relevant if isinstance(examples, Retrieval) else examples):
            raise InputError(f"{self.name}: the {name} split is empty, expected at least one example")
        return examples


def digest(content: Any) -> str:
    """Return sha256 in hex of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def say_once(text: str) -> None:
    """Print one line, once in a process."""
    say(text)


def validation_share(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 (rows to train on, rows to validate on) of `count`: the study's rule where a data set has too few splits.

    They are those of `datasets`' train_test_split(train_size=0.95, seed=42), in its order.
    """
    order = np.random.default_rng(_VALIDATION_SEED).permutation(count)
    held_out = count - math.floor(_TRAIN_SHARE * count)
    return order[held_out:], order[:held_out]


def too_few(count: int, what: str, file: str) -> str:
    """Word the error of a split that is too small to give part of it away."""
    return f"found {count}, too few {what} to validate on part of them, expected 2 at least or a file {file}"


def validation_half(query_ids: list[str]) -> set[str]:
    """Return half of the queries, to validate on where only test queries are judged: the study's rule for NQ, with our seed."""
    ordered = sorted(query_ids)
    order = np.random.default_rng(_VALIDATION_SEED).permutation(len(ordered))
    return {ordered[at] for at in order[: round(len(ordered) / 2)]}
