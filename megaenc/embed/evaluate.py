"""Zero-shot retrieval by embeddings and by BM25, with bootstrap intervals.

Rankings are exact; the measures are NDCG@10 and recall@100.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megaenc.embed.evaluation_file import EvaluationRow
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import load_beir_test
from megaenc.finetune.tasks.retrieval import (
    RANKING_DEPTH,
    compute_query_baseline,
    compute_trec_order,
    find_excluded_document,
    iterate_cosines,
    ndcg,
    rank_top_documents,
    recall,
)

METRICS = ("ndcg@10", "recall@100")
# Lucene's parameters of BM25
BM25_K1 = 1.2
BM25_B = 0.75
_DRAWS = 10_000
_DRAWS_AT_ONCE = 100


@dataclass(frozen=True)
class RetrievalSet:
    """Test set of retrieval: queries with relevant documents, and the whole corpus.

    `load` builds it, under a `name`; `score` scores rankings. `relevant` has the grades above 0 of
    each query, in the order of `queries`, by document id. `documents`, with their `document_ids`,
    are in trec_eval's order of equal scores. If `query_ids` is not empty, rankings leave out the
    document with the query's own id, unless it is in `relevant` (`find_excluded_document`).
    """

    name: str
    queries: list[str]
    documents: list[str]
    document_ids: list[str]
    relevant: list[dict[str, int]]
    """Grades above 0 of each query, by document id; documents that are not in the corpus count as
    misses."""
    query_ids: list[str] = field(default_factory=list)
    """Ids of the queries, whose rankings leave out `find_excluded_document`; empty: no document is
    left out."""

    @classmethod
    def load(cls, name: str, directory: Path) -> "RetrievalSet":
        """Return the RetrievalSet of a BEIR directory's test split, called `name`.

        Raises:
            InputError: A file is missing or malformed (see `load_beir_test`).
        """
        examples = load_beir_test(directory)
        ids = list(examples.documents)
        ids = [ids[index] for index in compute_trec_order(ids)]
        documents = [examples.documents[document] for document in ids]
        queries = examples.queries
        relevant = list(examples.relevant.values())
        return cls(name, list(queries.values()), documents, ids, relevant, list(queries))

    def score(self, rankings: Iterator[np.ndarray]) -> dict[str, np.ndarray]:
        """Return ndcg@10 and recall@100 of each query, as trec_eval, by measure's name.

        They are float64[queries], from 0 to 1.

        Args:
            rankings: For each query in order, the indices in `documents` of at least RANKING_DEPTH
                + 1 documents, or of all that are retrieved, best first; that of
                `find_excluded_document` among them is skipped.
        """
        values: dict[str, list[float]] = {name: [] for name in METRICS}
        for best, excluded, grade_of in zip(
            rankings, self._excluded_ids, self.relevant, strict=True
        ):
            ranked = [self.document_ids[index] for index in best]
            grades = np.array(
                [grade_of.get(document, 0) for document in ranked if document != excluded],
                dtype=np.int64,
            )
            values["ndcg@10"].append(ndcg(grades, list(grade_of.values())))
            values["recall@100"].append(recall(grades, len(grade_of)))
        return {name: np.array(by_query) for name, by_query in values.items()}

    def score_random_ranking(self) -> dict[str, np.ndarray]:
        """Return each query's expected measures over random rankings, by measure's name.

        They are float64[queries], from 0 to 1, of the measures of `score`.
        """
        documents = set(self.document_ids)
        queries = zip(self.relevant, self._excluded_ids, strict=True)
        baselines = [
            compute_query_baseline(grade_of, documents, excluded) for grade_of, excluded in queries
        ]
        return {name: np.array([baseline[name] for baseline in baselines]) for name in METRICS}

    @property
    def _excluded_ids(self) -> Sequence[str | None]:
        """Return the id of the document that each query's ranking leaves out."""
        if not self.query_ids:
            return [None] * len(self.relevant)
        return list(map(find_excluded_document, self.query_ids, self.relevant))


def build_rows(
    data: RetrievalSet, model: str, values: dict[str, np.ndarray], *, interval: bool = True
) -> list[EvaluationRow]:
    """Return the EvaluationRow of each measure: the mean over queries, in percent.

    Args:
        model: Name of the model.
        values: Measure of each query by name, float64[queries], from 0 to 1.
        interval: Bootstrap the queries for a 95 % interval; a single query has none.
    """
    rows = []
    for metric, by_query in values.items():
        low = high = None
        if interval and len(by_query) > 1:
            ends = bootstrap_mean(by_query)
            low = 100 * ends[0]
            high = 100 * ends[1]
        rows.append(
            EvaluationRow(
                data.name,
                model,
                metric,
                100 * float(by_query.mean()),
                low,
                high,
                len(by_query),
                len(data.documents),
                scores=tuple(by_query.tolist()),
            )
        )
    return rows


def bootstrap_mean(values: np.ndarray) -> tuple[float, float]:
    """Return (low, high), the bootstrap 95 % interval of the mean of `values`.

    `values` are float64[n], n at least 1; low and high, percentiles, have their unit. The 10,000
    draws are the same in every call.
    """
    random = np.random.default_rng(0)
    means = np.concatenate(
        [
            values[random.integers(0, len(values), (_DRAWS_AT_ONCE, len(values)))].mean(axis=1)
            for _ in range(_DRAWS // _DRAWS_AT_ONCE)
        ]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def rank_by_cosine(
    queries: Tensor,
    texts: Tensor,
    progress: Callable[[int], None],
    text_of: np.ndarray | slice = slice(None),
) -> Iterator[np.ndarray]:
    """Yield the documents with the largest cosines to each query, best first.

    They are RANKING_DEPTH + 1 indices of documents, or all if there are fewer, int64. The search is
    exact; equal cosines rank by index.

    Args:
        queries: Embeddings of length 1, float32[queries, size].
        texts: Embeddings of the documents' distinct texts, float32[texts, size], of length 1.
        progress: Called with the number of queries ranked so far.
        text_of: Row in `texts` of each document, int[documents]; default: the document's index.
    """
    for done, cosines in enumerate(iterate_cosines(queries, texts), 1):
        yield rank_top_documents(cosines[text_of], RANKING_DEPTH + 1)
        progress(done)


def import_bm25s() -> Any:
    """Return the module bm25s, an optional dependency.

    Raises:
        InputError: It is not installed.
    """
    try:
        import bm25s
    except ImportError:
        raise InputError(
            "BM25 needs the package bm25s: `pip install bm25s`, or leave BM25 out with --no-bm25"
        ) from None
    return bm25s


def rank_by_bm25(
    queries: Sequence[str], documents: Sequence[str], progress: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yield the documents with the largest BM25 score for each query, best first.

    They are at most RANKING_DEPTH + 1 indices of documents, int64; equal scores rank by index. A
    document without a word of the query is not retrieved. Formula and words are those of Lucene's
    English analyzer as bm25s has them: lower case, two letters or digits or more, without 33 stop
    words, cut by Porter's stemmer. The first item raises InputError if the package bm25s is not
    installed.

    Args:
        progress: Called with the number of queries ranked so far.
    """
    from nltk.stem.porter import PorterStemmer

    bm25s = import_bm25s()
    stem = PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS).stem

    def tokenize(texts: Sequence[str]) -> list[list[str]]:
        stemmer = lambda words: [stem(word) for word in words]  # noqa: E731
        return bm25s.tokenize(
            list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
        )

    words_of_documents = tokenize(documents)
    index = bm25s.BM25(method="lucene", k1=BM25_K1, b=BM25_B)
    is_empty = not any(words_of_documents)
    if not is_empty:
        index.index(words_of_documents, show_progress=False)
    for done, words in enumerate(tokenize(queries), 1):
        scores = (
            np.zeros(len(documents), dtype=np.float32)
            if is_empty or not words
            else index.get_scores(words)
        )
        best = rank_top_documents(scores, RANKING_DEPTH + 1)
        yield best[scores[best] > 0]
        progress(done)
