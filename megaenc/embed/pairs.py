"""Pairs of a query and a document, with hard negatives, for contrastive training."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError


@dataclass(frozen=True)
class TrainingPair:
    """Query, a document that answers it, and documents that do not although they look like it."""

    query: str
    document: str
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairData:
    """Pairs of all sources, in order, and a digest of their content."""

    pairs: list[TrainingPair]
    digest: str
    """Hexadecimal SHA-256 of the pairs' content."""


def load_pairs(sources: Sequence[str]) -> PairData:
    """Return the pairs in JSONL files with the fields query, document and maybe negatives; InputError for bad input."""
    pairs: list[TrainingPair] = []
    for source in sources:
        try:
            lines = Path(source).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"--data {source}: {error.strerror}; expected a JSONL file of pairs") from None
        except UnicodeDecodeError:
            raise InputError(f"--data {source}: not UTF-8; expected a JSONL file of pairs") from None
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                pairs.append(TrainingPair(row["query"], row["document"], tuple(row.get("negatives", ()))))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{source}:{number}: expected an object with query, document and maybe negatives") from None
    if not pairs:
        raise InputError(f"--data {' '.join(sources)}: found no pair, expected at least one")
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps([pair.query, pair.document, pair.negatives]).encode() + b"\n")
    return PairData(pairs, digest.hexdigest())
