"""Dense retrieval with pooled embeddings and cosine similarity, and its metrics."""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from megaenc.finetune.examples import Pair, RetrievalExamples, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts, pack_texts
from megaenc.finetune.model.gradient_caching import backward_by_packs
from megaenc.finetune.tasks.base import POOLING_FUNCTIONS, FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts

RANKING_DEPTH = 100
"""Number of documents that are ranked for a query."""
_MAX_COSINES = 1 << 24  # 64 MiB for a block of queries and all documents
_MIN_COSINE_SPREAD = 1e-4


class RetrievalTask(FinetuneTask):
    """FinetuneTask of retrieval (IR): embeddings trained by in-batch InfoNCE.

    The loss is that of queries to documents only. Cosines are multiplied by `protocol.scale`. All
    other documents of the batch are negatives, even equal ones. A batch larger than one forward
    pass uses gradient caching (`megaenc.finetune.model.gradient_caching`). The score is
    `retrieved_ndcg` at 10. `evaluate` keeps the embeddings of documents until the next `backward`:
    call `clear_cache` if the weights change otherwise.
    """

    family: ClassVar[TaskFamily] = TaskFamily.IR

    _document_cache: tuple[TaskModel, bytes, Tensor] | None = None

    def encode(
        self, examples: list[Pair] | RetrievalExamples, encoder: TextEncoder
    ) -> dict[str, TokenizedTexts]:
        """Return tokenized texts by name: "queries" and "documents".

        Row i of both is training pair i; of a validation or test split, rows are in the order of
        its dicts. No prefix is added to the texts.

        Raises:
            InputError: A text has no token and gets no special token.
        """
        if isinstance(examples, RetrievalExamples):
            queries = list(examples.queries.values())
            documents = list(examples.documents.values())
        else:
            queries = [pair.query for pair in examples]
            documents = [pair.document for pair in examples]
        return {"queries": encoder.encode(queries), "documents": encoder.encode(documents)}

    def clear_cache(self) -> None:
        """Drop the embeddings of documents that `evaluate` has kept.

        Call it if the weights have changed; `backward` calls it itself.
        """
        self._document_cache = None

    def build_head(self, hidden_size: int) -> nn.Module:
        """Return the identity module: embeddings are computed without a head."""
        return nn.Identity()

    def count_examples(self, data: dict[str, TokenizedTexts]) -> int:
        """Return the number of training pairs, one for each tokenized query in `data`."""
        return len(data["queries"])

    def backward(
        self, model: TaskModel, data: dict[str, TokenizedTexts], rows: np.ndarray
    ) -> float:
        """Backpropagate the mean InfoNCE loss of the pairs `rows`; return the loss.

        Gradients are added to those that parameters have. A batch that does not fit in one forward
        pass uses gradient caching. The loss may be NaN or inf.

        Args:
            data: Training split as tokenized by `encode`: "queries" and "documents", a row of each
                for a pair.
            rows: Indices of the batch's pairs, int64.
        """
        self.clear_cache()
        texts = data["queries"].gather_rows(rows) + data["documents"].gather_rows(rows)
        parts = self.split_into_forwards(np.array([len(text) for text in texts]))
        packs = [pack_texts([texts[index] for index in part], model.device) for part in parts]
        order = np.argsort(np.concatenate(parts))

        def compute_loss(vectors: Tensor) -> Tensor:
            queries, documents = vectors[order].chunk(2)
            targets = torch.arange(len(queries), device=vectors.device)
            return cross_entropy(self.protocol.scale * queries @ documents.T, targets)

        return backward_by_packs(
            packs, lambda packed: self.compute_outputs(model, packed), compute_loss
        ).item()

    def evaluate(
        self, model: TaskModel, data: dict[str, TokenizedTexts], examples: RetrievalExamples
    ) -> Scores:
        """Return the Scores of ranking, each the mean over queries, from 0 to 1.

        The score is `retrieved_ndcg`, the metrics are `ndcg@10`, `mrr@10` and `recall@100`, in
        which relevant documents that are not in `examples.documents` are misses. Queries without a
        relevant document are ignored (trec_eval), in `scores_i` too; one must have some. The
        baseline is the expectation of a random ranking. Embeddings of documents are kept for
        further calls with this model (`clear_cache`), which is left in eval mode.

        Raises:
            NonFinitePredictionError: An embedding is NaN or inf.
        """
        judged_rows = np.flatnonzero(
            [bool(examples.relevant.get(query)) for query in examples.queries]
        )
        judged = [query for query in examples.queries if examples.relevant.get(query)]
        names = list(examples.documents)
        order = compute_trec_order(names)
        names = [names[index] for index in order]
        row_of = {name: row for row, name in enumerate(names)}
        values: dict[str, list[float]] = {
            "score": [],
            "ndcg@10": [],
            "mrr@10": [],
            "recall@100": [],
        }
        spread = 0.0
        documents = self._embed_documents(model, data["documents"], order, queries=len(judged_rows))
        queries = self._embed_texts(model, data["queries"], judged_rows, before=len(order))
        random_metrics = []
        for cosines, query in zip(iterate_cosines(queries, documents), judged, strict=True):
            grade_of = examples.relevant[query]
            spread = max(spread, float(cosines.max() - cosines.min()))
            best = rank_top_documents(cosines, RANKING_DEPTH + 1)
            excluded = (
                find_excluded_document(query, grade_of) if examples.ignore_identical_ids else None
            )
            best = best[best != row_of.get(excluded, -1)][:RANKING_DEPTH]
            grades = np.array([grade_of.get(names[index], 0) for index in best])
            values["score"].append(retrieved_ndcg(grades > 0, cosines[best]))
            values["ndcg@10"].append(ndcg(grades, list(grade_of.values())))
            values["mrr@10"].append(reciprocal_rank(grades))
            values["recall@100"].append(recall(grades, len(grade_of)))
            random_metrics.append(compute_query_baseline(grade_of, examples.documents, excluded))
        baseline = {
            name: float(np.mean([metrics[name] for metrics in random_metrics])) for name in values
        }
        collapsed = (
            "all documents are alike to every query"
            if spread < _MIN_COSINE_SPREAD and len(names) > 1
            else None
        )
        return Scores.from_examples(
            values.pop("score"), values, collapsed=collapsed, baseline=baseline
        )

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Return the embedding of each text of a pack, float32[texts, hidden_size].

        An embedding is the pooled state scaled to length 1.
        """
        pool = POOLING_FUNCTIONS[self.protocol.pooling]
        return normalize(pool(model.backbone.compute_states(packed), packed), dim=1)

    def _embed_texts(
        self, model: TaskModel, data: TokenizedTexts, rows: np.ndarray, **others: int
    ) -> Tensor:
        """Embed the texts `rows` of `data`, float32[rows, hidden_size], in order."""
        parts, embedded = zip(*self.predict(model, data, rows, **others), strict=True)
        return torch.cat(embedded)[
            torch.from_numpy(np.argsort(np.concatenate(parts))).to(model.device)
        ]

    def _embed_documents(
        self, model: TaskModel, data: TokenizedTexts, order: np.ndarray, queries: int
    ) -> Tensor:
        """Embed all documents in `order`.

        Embeddings are cached until the next `backward`, as both splits have the same documents.
        """
        digest = hashlib.sha256(
            data.tokens.tobytes() + data.starts.tobytes() + order.tobytes()
        ).digest()
        if (
            self._document_cache is None
            or self._document_cache[0] is not model
            or self._document_cache[1] != digest
        ):
            self._document_cache = (
                model,
                digest,
                self._embed_texts(model, data, order, after=queries),
            )
        return self._document_cache[2]


def iterate_cosines(queries: Tensor, documents: Tensor) -> Iterator[np.ndarray]:
    """Yield the cosines of each query with all documents, float32[documents].

    Queries and documents are in order.

    Args:
        queries: Embeddings of length 1, float[queries, size].
        documents: Embeddings of length 1, float[documents, size], at least one.
    """
    size = max(1, _MAX_COSINES // len(documents))
    for rows in queries.split(size):
        yield from (rows @ documents.T).cpu().numpy()


def _compute_discounts(count: int) -> np.ndarray:
    """Compute DCG discounts 1 / log2(1 + rank) of the first `count` ranks."""
    return 1 / np.log2(np.arange(2, count + 2))


def _compute_ideal_dcg(grades: Sequence[float], depth: int) -> float:
    """Compute the DCG of `grades` in the best order, at most `depth` of them."""
    best = np.sort(np.asarray(grades, dtype=np.float64))[::-1][:depth]
    return float((best * _compute_discounts(len(best))).sum())


def retrieved_ndcg(relevant: np.ndarray, scores: np.ndarray, depth: int = 10) -> float:
    """Return NDCG, 0 to 1, of the first `depth` documents against their best order.

    Relevant documents that were not retrieved do not lower it, and documents of equal score share
    their discounts: it is scikit-learn's `ndcg_score([relevant], [scores])` on the first `depth`
    documents, but one document may be ranked too. It is 0 if none of them is relevant.

    Args:
        relevant: bool[documents], in the order of the ranking.
        scores: float[documents], descending.
    """
    return tied_ndcg(relevant[:depth], scores[:depth], depth)


def tied_ndcg(relevant: np.ndarray, scores: np.ndarray, depth: int = 10) -> float:
    """Return NDCG at `depth`, 0 to 1, in which equal scores share their discounts.

    It is scikit-learn's `ndcg_score([relevant], [scores], k=depth)`, but one document may be ranked
    too. It is 0 if none is relevant.

    Args:
        relevant: bool[documents], in the order of the ranking.
        scores: float[documents], descending.
    """
    gains = relevant.astype(np.float64)
    if not gains.any():
        return 0.0
    first = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
    sizes = np.diff(np.append(first, len(scores)))
    shared = np.repeat(np.add.reduceat(gains, first) / sizes, sizes)[:depth]
    dcg = (shared * _compute_discounts(len(shared))).sum()
    return float(dcg / _compute_ideal_dcg(gains, depth))


def ndcg(grades: np.ndarray, all_grades: Sequence[int], depth: int = 10) -> float:
    """Return NDCG at `depth`, from 0 to 1, with grades as gains, as trec_eval.

    The best order of all relevant documents normalizes the gain; without any the result is 0.

    Args:
        grades: Grade of each ranked document, int[documents], best rank first, 0 if not relevant.
        all_grades: Grades of all relevant documents, ranked or not.
    """
    ideal = _compute_ideal_dcg(all_grades, depth)
    ranked = grades[:depth]
    return float((ranked * _compute_discounts(len(ranked))).sum() / ideal) if ideal else 0.0


def reciprocal_rank(grades: np.ndarray, depth: int = 10) -> float:
    """Return 1 / rank, from 1, of the first document with a grade other than 0.

    It is 0 if none of the first `depth` documents has one.

    Args:
        grades: Grade of each ranked document, int[documents], best rank first, 0 if not relevant.
    """
    ranks = np.flatnonzero(grades[:depth])
    return 1 / (int(ranks[0]) + 1) if len(ranks) else 0.0


def recall(grades: np.ndarray, relevant: int, depth: int = 100) -> float:
    """Return the fraction of all relevant documents that are in the first `depth`.

    Without relevant documents the result is 0.

    Args:
        grades: Grade of each ranked document, int[documents], best rank first, 0 if not relevant.
        relevant: Number of all relevant documents, ranked or not.
    """
    return float(np.count_nonzero(grades[:depth]) / relevant) if relevant else 0.0


def compute_trec_order(names: Sequence[str]) -> np.ndarray:
    """Return the indices, int64, that sort document ids as trec_eval breaks ties.

    The order is descending by the UTF-8 bytes of the ids `names`.
    """
    keys = [name.encode("utf-8", "surrogatepass") for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__, reverse=True), dtype=np.int64)


def rank_top_documents(scores: np.ndarray, depth: int) -> np.ndarray:
    """Return the indices, int64, of the `depth` highest scores, best first.

    Fewer scores give fewer indices. Equal scores keep their order: if documents are in the order of
    `compute_trec_order`, the ranking is trec_eval's.

    Args:
        scores: Score of each document, float[documents], at least one, without NaN.
        depth: At least 1.
    """
    depth = min(depth, len(scores))
    least = np.partition(scores, len(scores) - depth)[len(scores) - depth]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:depth]]


def find_excluded_document(query: str, grade_of: Mapping[str, int]) -> str | None:
    """Return the id of the document that a query's ranking leaves out, or None.

    It is the query's own id, as in BEIR, where a document of this id is the query itself; it need
    not exist. If the document of this id is judged relevant, as in sets that number pairs, the
    result is None.

    Args:
        query: Id of the query.
        grade_of: Grades of the query's relevant documents, by id.
    """
    return None if query in grade_of else query


def compute_query_baseline(
    grade_of: Mapping[str, int], documents: Collection[str], excluded: str | None
) -> dict[str, float]:
    """Return a query's expected metrics over random orders of `documents`.

    They are score (that is `retrieved_ndcg`), ndcg@10, mrr@10 and recall@100, by name, from 0 to 1.
    The dict is cached, so it must not be changed.

    Args:
        grade_of: Grades of all relevant documents, at least one, by id, also of those that are not
            ranked.
        documents: Ids of all documents, a dict or set.
        excluded: Id of the document that is not ranked, which need not exist; None: none.
    """
    count = len(documents) - (excluded in documents)
    missing = [grade for document, grade in grade_of.items() if document not in documents]
    return compute_random_baseline(
        max(count, 1), tuple(sorted(grade_of.values())), tuple(sorted(missing))
    )


@lru_cache(maxsize=1 << 16)
def compute_random_baseline(
    documents: int, all_grades: tuple[int, ...], missing: tuple[int, ...] = ()
) -> dict[str, float]:
    """Return a query's exact expected metrics over random orders of documents.

    They are score (that is `retrieved_ndcg`), ndcg@10, mrr@10 and recall@100, by name, from 0 to 1.
    The dict is cached, so it must not be changed.

    Args:
        documents: Number of ranked documents, at least 1.
        all_grades: Grades of the query's relevant documents, at least one, above 0.
        missing: Those of `all_grades` whose documents are not ranked.
    """
    relevant = len(all_grades) - len(missing)
    depth = min(10, documents)
    discounts = float(_compute_discounts(depth).sum())
    # The number k of relevant documents in the top ten is hypergeometric; each is at any of the
    # ten ranks equally often.
    orders = math.comb(documents, relevant)
    terms = []
    for k in range(1, min(depth, relevant) + 1):
        probability = math.comb(depth, k) * math.comb(documents - depth, relevant - k) / orders
        ideal = _compute_ideal_dcg([1] * k, depth)
        terms.append(probability * k / depth * discounts / ideal)
    none_yet = 1.0
    first = 0.0
    for rank in range(1, depth + 1):
        first += none_yet * relevant / (documents - rank + 1) / rank
        none_yet *= max(0, documents - relevant - rank + 1) / (documents - rank + 1)
        if not none_yet:
            break
    return {
        "score": sum(terms),
        "ndcg@10": (sum(all_grades) - sum(missing))
        / documents
        * discounts
        / _compute_ideal_dcg(all_grades, 10),
        "mrr@10": first,
        "recall@100": min(100, documents) / documents * relevant / len(all_grades),
    }
