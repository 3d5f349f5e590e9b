"""Retrieval: texts are the mean of their states, and a query is nearest, by cosine, to the document that answers it."""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from megaenc.finetune.examples import Pair, RetrievalExamples, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts, pack_texts
from megaenc.finetune.tasks.base import FinetuneTask, Scores, TaskModel, mean_pool
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts

_RANKING_DEPTH = 100
_MAX_COSINES = 1 << 24  # of a block of queries with all documents: 64 MiB
_MIN_COSINE_SPREAD = 1e-4


class RetrievalTask(FinetuneTask):
    """InfoNCE: cross-entropy of `scale` times the cosines of a query with the documents of the batch, of which one is its own.

    All other documents of the batch are negatives, even an equal one. A batch that does not fit one forward pass gives the same
    gradients: embeddings first, without a graph; the gradients of the loss with respect to them; then each part again, from there
    on back (gradient caching, Gao et al. 2021, 2101.06983).
    """

    family: ClassVar[TaskFamily] = TaskFamily.IR

    _documents: tuple[TaskModel, bytes, Tensor] | None = None

    def encode(self, examples: list[Pair] | RetrievalExamples, encoder: TextEncoder) -> dict[str, TokenizedTexts]:
        """Return `queries` and `documents`: of pairs, row by row; of a split, in the order of its dictionaries."""
        if isinstance(examples, RetrievalExamples):
            texts = {"queries": list(examples.queries.values()), "documents": list(examples.documents.values())}
        else:
            texts = {"queries": [pair.query for pair in examples], "documents": [pair.document for pair in examples]}
        return {name: encoder.encode(some) for name, some in texts.items()}

    def build_head(self, hidden_size: int) -> nn.Module:
        """Return the identity: embeddings are states."""
        return nn.Identity()

    def count_examples(self, data: dict[str, TokenizedTexts]) -> int:
        """Return the number of training pairs."""
        return len(data["queries"])

    def backward(self, model: TaskModel, data: dict[str, TokenizedTexts], rows: np.ndarray) -> float:
        """See Task. Where dropout is active, a part drops the same both times."""
        self._documents = None  # the weights are about to change
        texts = data["queries"].gather_rows(rows) + data["documents"].gather_rows(rows)
        parts = self.split_into_forwards(np.array([len(text) for text in texts]))
        packs = [pack_texts([texts[at] for at in part], model.device) for part in parts]
        order = np.argsort(np.concatenate(parts))
        if len(packs) == 1:
            loss = self._loss(self.compute_outputs(model, packs[0])[order])
            loss.backward()
            return loss.item()
        on_gpu = model.device.type == "cuda"
        random_states, embedded = [], []
        with torch.no_grad():
            for packed in packs:
                random_states.append((torch.get_rng_state(), torch.cuda.get_rng_state(model.device) if on_gpu else None))
                embedded.append(self.compute_outputs(model, packed))
        vectors = torch.cat(embedded).requires_grad_()
        loss = self._loss(vectors[order])
        loss.backward()
        gradients = vectors.grad.split([len(part) for part in parts])
        for packed, (state, gpu_state), gradient in zip(packs, random_states, gradients, strict=True):
            with torch.random.fork_rng([model.device] if on_gpu else []):
                torch.set_rng_state(state)
                if on_gpu:
                    torch.cuda.set_rng_state(gpu_state, model.device)
                self.compute_outputs(model, packed).backward(gradient)
        return loss.item()

    def evaluate(self, model: TaskModel, data: dict[str, TokenizedTexts], examples: RetrievalExamples) -> Scores:
        """See Task. Queries without a relevant document are left out, as trec_eval does."""
        asked = np.flatnonzero([bool(examples.relevant.get(query)) for query in examples.queries])
        relevant = [examples.relevant[query] for query in np.array(list(examples.queries), dtype=object)[asked]]
        names = list(examples.documents)
        order = compute_trec_order(names)
        names = [names[at] for at in order]
        values: dict[str, list[float]] = {"score": [], "ndcg@10": [], "mrr@10": [], "recall@100": []}
        spread = 0.0
        documents = self._all_documents(model, data["documents"], order, queries=len(asked))
        queries = self._embed_all(model, data["queries"], asked, before=len(order))
        for start in range(0, len(asked), block := max(1, _MAX_COSINES // len(names))):
            cosines = (queries[start : start + block] @ documents.T).cpu().numpy()
            spread = max(spread, float((cosines.max(axis=1) - cosines.min(axis=1)).max()))
            for scores, grade_of in zip(cosines, relevant[start : start + block], strict=True):
                best = rank_top_documents(scores, _RANKING_DEPTH)
                grades = np.array([grade_of.get(names[at], 0) for at in best])
                values["score"].append(retrieved_ndcg(grades > 0, scores[best]))
                values["ndcg@10"].append(ndcg(grades, list(grade_of.values())))
                values["mrr@10"].append(reciprocal_rank(grades))
                values["recall@100"].append(recall(grades, len(grade_of)))
        chance = [compute_random_baseline(len(names), tuple(sorted(grade_of.values()))) for grade_of in relevant]
        baseline = {name: float(np.mean([one[name] for one in chance])) for name in values}
        collapsed = "all documents are alike to every query" if spread < _MIN_COSINE_SPREAD and len(names) > 1 else None
        return Scores.from_examples(values.pop("score"), values, collapsed=collapsed, baseline=baseline)

    def _loss(self, vectors: Tensor) -> Tensor:
        """Compute the loss of `vectors`, [2 * batch, hidden]: the queries, then their documents."""
        queries, documents = vectors.chunk(2)
        own = torch.arange(len(queries), device=vectors.device)
        return cross_entropy(self.protocol.scale * queries @ documents.T, own)

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Compute embeddings, float32[texts, hidden], of length 1 each."""
        return normalize(mean_pool(model.backbone.compute_states(packed), packed), dim=1)

    def _embed_all(self, model: TaskModel, data: TokenizedTexts, rows: np.ndarray, **others: int) -> Tensor:
        """Compute float32[rows, hidden] on the model's device."""
        parts, embedded = zip(*self.predict(model, data, rows, **others), strict=True)
        return torch.cat(embedded)[torch.from_numpy(np.argsort(np.concatenate(parts))).to(model.device)]

    def _all_documents(self, model: TaskModel, data: TokenizedTexts, order: np.ndarray, queries: int) -> Tensor:
        """Embed documents in `order`. Both splits have the same: their embeddings are kept until the next `backward`."""
        digest = hashlib.sha256(data.tokens.tobytes() + data.starts.tobytes() + order.tobytes()).digest()
        if self._documents is None or self._documents[0] is not model or self._documents[1] != digest:
            self._documents = (model, digest, self._embed_all(model, data, order, after=queries))
        return self._documents[2]


def _compute_discounts(count: int) -> np.ndarray:
    return 1 / np.log2(np.arange(2, count + 2))


def _compute_ideal_dcg(grades: Sequence[float], depth: int) -> float:
    best = np.sort(np.asarray(grades, dtype=np.float64))[::-1][:depth]
    return float((best * _compute_discounts(len(best))).sum())


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
    return float((shared * _compute_discounts(len(gains))).sum() / _compute_ideal_dcg(gains, depth))


def ndcg(grades: np.ndarray, all_grades: Sequence[int], depth: int = 10) -> float:
    """trec_eval's ndcg_cut: gains are grades, discounts 1 / log2(1 + rank), normalised by the best order of all judged documents.

    `grades` is int[documents], best first, 0 where not relevant; `all_grades` are those of all relevant documents.
    """
    ideal = _compute_ideal_dcg(all_grades, depth)
    top = grades[:depth]
    return float((top * _compute_discounts(len(top))).sum() / ideal) if ideal else 0.0


def reciprocal_rank(grades: np.ndarray, depth: int = 10) -> float:
    """1 over the rank of the first relevant document, 0 if none is among the first `depth`."""
    found = np.flatnonzero(grades[:depth])
    return 1 / (int(found[0]) + 1) if len(found) else 0.0


def recall(grades: np.ndarray, relevant: int, depth: int = 100) -> float:
    """The share of the `relevant` documents that are among the first `depth`."""
    return float(np.count_nonzero(grades[:depth]) / relevant) if relevant else 0.0


def compute_trec_order(names: Sequence[str]) -> np.ndarray:
    """int64[documents]: the order in which trec_eval takes documents of one score, the greater name first (bytes of UTF-8)."""
    keys = [name.encode("utf-8", "surrogatepass") for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__, reverse=True), dtype=np.int64)


def rank_top_documents(scores: np.ndarray, depth: int) -> np.ndarray:
    """int64[min(depth, documents)]: where the greatest scores are, the greatest first, equal ones in the order they are in.

    Documents laid out by in_trec_order are so ranked as trec_eval ranks them.
    """
    depth = min(depth, len(scores))
    least = np.partition(scores, len(scores) - depth)[len(scores) - depth]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:depth]]


@lru_cache(maxsize=1 << 16)
def compute_random_baseline(documents: int, all_grades: tuple[int, ...]) -> dict[str, float]:
    """What a random order of `documents` gets on average, in closed form: the study's score and trec_eval's measures."""
    relevant, depth = len(all_grades), min(10, documents)
    discounts = float(_compute_discounts(depth).sum())
    # k positives among the first ten: hypergeometric; each then stands at any of the ten ranks alike.
    score = sum(
        math.comb(depth, k) * math.comb(documents - depth, relevant - k) / math.comb(documents, relevant)
        * k / depth * discounts / _compute_ideal_dcg([1] * k, depth)
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
        "ndcg@10": sum(all_grades) / documents * discounts / _compute_ideal_dcg(all_grades, 10),
        "mrr@10": first,
        "recall@100": min(100, documents) / documents,
    }
