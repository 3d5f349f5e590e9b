"""Training pairs of contrastive training, from files, BEIR directories or the Hub."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc.console import print_rank_0
from megaenc.data.sources.text_files import strip_compression_suffix
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats
from megaenc.finetune.datasets.beir import load_beir_pairs
from megaenc.finetune.datasets.hub import load_from_hub
from megaenc.finetune.datasets.hub_repository import parse_hub_reference
from megaenc.finetune.datasets.pair_rows import TrainingPair, build_pair, read_relevance

EXPECTED_PAIRS = (
    "pairs in .jsonl, .csv, .tsv or .parquet (columns query and document, or anchor and positive), "
    "SQuAD's .json, "
    "a BEIR directory with qrels/train.tsv, or ORG/NAME on the Hugging Face Hub"
)
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class PairData:
    """Distinct training pairs in order, and a digest of their content.

    `digest` is the SHA-256 (hex) of all texts of the pairs. `load_pairs` builds it.
    """

    pairs: list[TrainingPair]
    digest: str
    """Hex SHA-256 of all fields of the pairs, in order."""


def load_pairs(sources: Sequence[str]) -> PairData:
    """Return the distinct pairs of all sources, in order, and print their counts.

    A source is a file or a BEIR directory with qrels/train.tsv, else a repository of the Hugging
    Face Hub, whose split `train` is read: ORG/NAME or ORG/NAME:CONFIG, with or without @REVISION.
    Files may be .jsonl, .csv, .tsv, .parquet, or SQuAD's .json, whose unanswerable questions are
    left out. Columns are `query` (or `anchor`, `question`), `document` (or `positive`, `context`)
    and, if any, `negatives` (a list; or `negative_1` and so on) and `label`, which must be 1. Pairs
    that differ only in their hard negatives are distinct.

    Raises:
        InputError: A source is missing, invalid or without a pair, a document is labelled as not
            relevant, or there are fewer than two distinct pairs.
    """
    if not sources:
        raise InputError(f"--data: missing, expected {EXPECTED_PAIRS}")
    pairs: dict[TrainingPair, None] = {}
    total = 0
    unanswerable = 0
    for source in sources:
        before = total
        for location, row in _read_source(source):
            answers = row.get("answers")
            # Of SQuAD 2.0
            if "context" in row and isinstance(answers, Mapping) and answers.get("text") == []:
                unanswerable += 1
                continue
            pair = build_pair(row, location)
            if not read_relevance(row, location):
                raise InputError(
                    f"{location}: label 0: found a document that is not relevant, "
                    "expected it among the `negatives` of a relevant one"
                )
            pairs[pair] = None
            total += 1
        if total == before:
            raise InputError(f"{source}: found no pair, expected {EXPECTED_PAIRS}")
    if len(pairs) < 2:
        raise InputError(
            f"{', '.join(sources)}: found 1 pair, expected at least 2: other documents are the "
            "negatives"
        )
    print_rank_0(_describe(list(pairs), total - len(pairs), unanswerable))
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps([pair.query, pair.document, *pair.negatives]).encode() + b"\n")
    return PairData(list(pairs), digest.hexdigest())


def _read_source(source: str) -> Iterator[formats.Row]:
    """Yield (location, fields) of each pair of a source.

    Raises:
        InputError: There is no such source, or the split `train` on the Hub cannot be read.
    """
    path = Path(source)
    if os.path.isdir(source):
        for location, query, document in load_beir_pairs(path):
            yield location, {"query": query, "document": document}
        return
    bare = strip_compression_suffix(path.name).lower()
    if not os.path.exists(source):  # False for a name that is too long
        if not bare.endswith(_SUFFIXES) and (reference := parse_hub_reference(source)):
            repository, config, revision = reference
            advice = "expected a network once, or a local file of pairs"
            rows = load_from_hub(
                source, repository, config or None, revision, f"{source}: ", advice, split="train"
            )
            for row_number, row in enumerate(rows, 1):
                yield f"{source}: row {row_number}", row
            return
        raise InputError(f"{source}: no such file or directory; expected {EXPECTED_PAIRS}")
    if not os.path.isfile(path):
        raise InputError(f"{source}: not a file; expected {EXPECTED_PAIRS}")
    if not bare.endswith(_SUFFIXES):
        raise InputError(f"{source}: found the ending {path.suffix!r}, expected {EXPECTED_PAIRS}")
    yield from formats.read_rows(path)


def _describe(pairs: Sequence[TrainingPair], duplicates: int, unanswerable: int) -> str:
    """Return the line with the counts of pairs, texts, negatives and rows left out."""
    different = {(pair.query, pair.document) for pair in pairs}
    queries = Counter(query for query, _ in different)
    documents = Counter(document for _, document in different)
    several_documents = sum(count > 1 for count in queries.values())
    several_queries = sum(count > 1 for count in documents.values())
    parts = [f"{len(pairs):,} pairs of {len(queries):,} queries and {len(documents):,} documents"]
    parts += [f"{several_documents:,} queries with several documents"] if several_documents else []
    parts += [f"{several_queries:,} documents with several queries"] if several_queries else []
    with_negatives = sum(bool(pair.negatives) for pair in pairs)
    parts += [f"{with_negatives:,} pairs with hard negatives"] if with_negatives else []
    parts += [f"{duplicates:,} duplicate pairs left out"] if duplicates else []
    parts += [f"{unanswerable:,} unanswerable questions left out"] if unanswerable else []
    return "; ".join(parts)
