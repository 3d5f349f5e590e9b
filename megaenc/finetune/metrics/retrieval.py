"""Retrieval: the study's NDCG@10 and the field's measures by trec_eval's rules, and what a random order would get."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def _discounts(count: int) -> np.ndarray:
    return 1 / np.log2(np.arange(2, count + 2))


def _ideal(grades: Sequence[float], depth: int) -> float:
    best = np.sort(np.asarray(grades, dtype=np.float64))[::-1][:depth]
    return float((best * _discounts(len(best))).sum())


def retrieved_ndcg(relevant: np.ndarray, scores: np.ndarray, depth: int = 10) -> float:
    """The study's NDCG@10: normalised by the best order of the documents it retrieved, not of all that are relevant.

    `relevant` is bool[documents], best first, and `scores` float[documents] what ranked them. A query whose only retrieved
    positive stands first scores 1, whatever it missed; 0 if none is among the first `depth`. Documents of one score share their
    discounts. The same as scikit-learn's `ndcg_score([relevant], [scores])` on the first `depth` alone.
    """
    gains, scores = relevant[:depth].astype(np.float64), scores[:depth]
    if not gains.any():
        return 0.0
    first = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
    sizes = np.diff(np.append(first, len(scores)))
    shared = np.repeat(np.add.reduceat(gains, first) / sizes, sizes)
    return float((shared * _discounts(len(gains))).sum() / _ideal(gains, depth))


def ndcg(grades: np.ndarray, all_grades: Sequence[int], depth: int = 10) -> float:
    """trec_eval's ndcg_cut: gains are grades, discounts 1 / log2(1 + rank), normalised by the best order of all judged documents.

    `grades` is int[documents], best first, 0 where not relevant; `all_grades` are those of all relevant documents.
    """
    ideal = _ideal(all_grades, depth)
    top = grades[:depth]
    return float((top * _discounts(len(top))).sum() / ideal) if ideal else 0.0


def reciprocal_rank(grades: np.ndarray, depth: int = 10) -> float:
    """1 over the rank of the first relevant document, 0 if none is among the first `depth`."""
    found = np.flatnonzero(grades[:depth])
    return 1 / (int(found[0]) + 1) if len(found) else 0.0


def recall(grades: np.ndarray, relevant: int, depth: int = 100) -> float:
    """The share of the `relevant` documents that are among the first `depth`."""
    return float(np.count_nonzero(grades[:depth]) / relevant) if relevant else 0.0


def in_trec_order(names: Sequence[str]) -> np.ndarray:
    """int64[documents]: the order in which trec_eval takes documents of one score, the greater name first (bytes of UTF-8)."""
    keys = [name.encode("utf-8", "surrogatepass") for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__, reverse=True), dtype=np.int64)


def best_first(scores: np.ndarray, depth: int) -> np.ndarray:
    """int64[min(depth, documents)]: where the greatest scores are, the greatest first, equal ones in the order they are in.

    Documents laid out by in_trec_order are so ranked as trec_eval ranks them.
    """
    depth = min(depth, len(scores))
    least = np.partition(scores, len(scores) - depth)[len(scores) - depth]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:depth]]


@lru_cache(maxsize=1 << 16)
def expected_by_chance(documents: int, all_grades: tuple[int, ...]) -> dict[str, float]:
    """What a random order of `documents` gets on average, in closed form: the study's score and trec_eval's measures."""
    relevant, depth = len(all_grades), min(10, documents)
    discounts = float(_discounts(depth).sum())
    # k positives among the first ten: hypergeometric; each then stands at any of the ten ranks alike.
    score = sum(
        math.comb(depth, k) * math.comb(documents - depth, relevant - k) / math.comb(documents, relevant)
        * k / depth * discounts / _ideal([1] * k, depth)
        for k in range(1, min(depth, relevant) + 1)
    )  # fmt: skip
    none_yet, first = 1.0, 0.0
    for rank in range(1, depth + 1):
        first += none_yet * relevant / (documents - rank + 1) / rank
        none_yet *= max(0, documents - relevant - rank + 1) / (documents - rank + 1)
        if not none_yet:
            break
    return {
        "score": score,
        "ndcg@10": sum(all_grades) / documents * discounts / _ideal(all_grades, 10),
        "mrr@10": first,
        "recall@100": min(100, documents) / documents,
    }
