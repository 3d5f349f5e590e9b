"""JSON file of `megaenc embed eval`, its writer and its reader."""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.json_files import read_json_or_empty

Place = tuple[str, str, str]
"""Model, data set and measure."""


@dataclass(frozen=True)
class EvaluationRow:
    """Row of a zero-shot evaluation: a `model`'s `metric` on a `dataset`, in percent.

    `build_rows` and `ProbeTask.evaluate` build it. `low` and `high` are the 95 % interval of
    `mean`, both None without one, as for a random ranking or probe, a single query, or a task of
    several languages. In retrieval (BEIR directories) `queries` and `documents` are counts and
    `scores` has each query's measure as a fraction; else they are None, None and (), and `examples`
    is the number of test examples, None if unknown.
    """

    dataset: str
    model: str
    metric: str
    mean: float
    low: float | None
    """Lower end of the interval; None for the expectation of a random ranking or probe, and for a
    single query."""
    high: float | None
    queries: int | None
    documents: int | None
    """Both None in rows of other tasks than BEIR directories."""
    examples: int | None = None
    """Test examples of such a task: pairs of similarity, texts of classification."""
    scores: tuple[float, ...] = field(default=(), repr=False)
    """The measure of each query of a BEIR directory, as a fraction."""

    @property
    def fields_without_scores(self) -> dict[str, Any]:
        """Return all fields but the scores of queries, by name."""
        return {name: value for name, value in vars(self).items() if name != "scores"}


@dataclass(frozen=True)
class QueryScores:
    """Scores by query of one model on one data set by one measure.

    It is a value of `Evaluation.scores`. `values`, float64[queries] in the order of `query_ids`,
    and `interval`, the (low, high) bootstrap interval of their mean, are fractions; `interval` is
    None for a single query and for a random ranking. `fingerprint` is that of the data set.
    """

    values: np.ndarray
    """float64[queries], as fractions"""
    interval: tuple[float, float] | None = None
    """bootstrap interval, as fractions"""
    query_ids: tuple[str, ...] = field(default=(), repr=False)
    fingerprint: str = ""
    """of the data set"""

    @property
    def mean(self) -> float:
        """Return the mean over the queries, as a fraction."""
        return float(self.values.mean())


@dataclass(frozen=True)
class Evaluation:
    """Evaluation: settings, fingerprints, and scores by model, data set, measure.

    `read_evaluation` reads it from a file of `megaenc embed eval`. `settings` are the flags that
    change embeddings. `data` has the fingerprint of each retrieval set by name. `fingerprints` has
    for each model, by name, a mapping with "model", "tokenizer" and "stamp". The keys of `scores`
    are (model, data set, measure), the values QueryScores.
    """

    settings: Mapping[str, Any]
    """Flags that change embeddings."""
    data: Mapping[str, str]
    """Fingerprint of each retrieval set, by name."""
    fingerprints: Mapping[str, Mapping[str, str]]
    """Fingerprints of each model, by name."""
    scores: Mapping[Place, QueryScores]

    def datasets_of(self, model: str) -> set[str]:
        """Return the names of retrieval sets with scores of `model`; empty if unknown."""
        return {dataset for scored, dataset, _ in self.scores if scored == model}


def format_evaluation(
    rows: Sequence[EvaluationRow], models: Mapping[str, Any], origin: Mapping[str, Any]
) -> str:
    """Return the text of an evaluation's JSON file, which `read_evaluation` reads.

    Args:
        models: EmbeddingConfig by name of the model.
        origin: Other fields of the file: "settings", "data" and "fingerprints" as in Evaluation,
            and "queries", the query ids by data set.
    """
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row.scores:
            scores.setdefault(row.model, {}).setdefault(row.dataset, {})[row.metric] = list(
                row.scores
            )
    parts = {
        "rows": json.dumps([row.fields_without_scores for row in rows], indent=1),
        "models": json.dumps(
            {name: dataclasses.asdict(config) for name, config in models.items()}, indent=1
        ),
    }
    for name, value in {**origin, "scores": scores}.items():
        parts[name] = json.dumps(value)
    return (
        "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"
    )


def read_evaluation(file: Path) -> Evaluation | None:
    """Return the Evaluation in a file, or None if it is missing or anything else.

    Scores include those of the baselines `BM25` and `random`; rows of other tasks than retrieval
    are left out. The result is cached while the file does not change, so it must not be changed.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return _parse(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=10_000)
def _parse(file: Path, *version: int) -> Evaluation | None:
    """Return the Evaluation in a `version` of `file`, None if it is anything else."""
    values = read_json_or_empty(file)
    try:
        # Files of a study share them
        queries = {name: tuple(map(sys.intern, ids)) for name, ids in values["queries"].items()}
        scores = {}
        for row in values["rows"]:
            if row["queries"] is None:  # of another task than retrieval
                continue
            place = (row["model"], row["dataset"], row["metric"])
            model, dataset, metric = place
            by_query = np.array(values["scores"][model][dataset][metric], dtype=np.float64)
            if not np.isfinite(by_query).all() or len(by_query) != len(queries[dataset]):
                return None
            interval = None if row["low"] is None else (row["low"] / 100, row["high"] / 100)
            scores[place] = QueryScores(
                by_query, interval, queries[dataset], values["data"][dataset]
            )
        return Evaluation(values["settings"], values["data"], dict(values["fingerprints"]), scores)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
