"""Reranking: the relevance of each candidate document to a query."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from megaenc.finetune.examples import RankingQuery, TaskFamily
from megaenc.finetune.tasks.base import Scores, TaskModel
from megaenc.finetune.tasks.classification import Classification
from megaenc.finetune.tasks.retrieval import compute_random_baseline, reciprocal_rank, tied_ndcg
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts

_ROUNDING = 1e-5
"""Range of scores, relative to the highest, up to which they count as equal."""


class Reranking(Classification):
    """FinetuneTask of a cross-encoder: one logit for each pair of query and document.

    The loss is binary cross-entropy, 1 for relevant documents and 0 for other candidates. A score
    is the sigmoid of the logit, as by `sentence_transformers.CrossEncoder`. The score of a split is
    NDCG@10 over the candidates of each query.
    """

    family: ClassVar[TaskFamily] = TaskFamily.RERANKING

    def encode(self, examples: list[RankingQuery], encoder: TextEncoder) -> TokenizedTexts:
        """Return a row for each pair of a query and one of its `documents`, in order.

        The tokenizer joins the two texts. The column `labels`, float32[n, 1], has 1 for relevant
        documents, else 0.

        Raises:
            InputError: The special tokens of `encoder` cannot join pairs.
        """
        pairs = []
        labels = []
        for example in examples:
            pairs += [(example.query, document) for document in example.documents]
            labels += [1] * len(example.positives) + [0] * len(example.negatives)
        rows = encoder.encode(pairs)
        rows.columns["labels"] = np.array(labels, dtype=np.float32)[:, None]
        return rows

    def sum_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy summed over pairs, a scalar.

        Args:
            outputs: Logits, float32[pairs, 1].
            targets: 1 for relevant documents, else 0, float32[pairs, 1].
        """
        return binary_cross_entropy_with_logits(outputs, targets, reduction="sum")

    def count_labels(self, data: TokenizedTexts) -> None:
        """Return None: most candidates are not relevant, as in use."""
        return

    def evaluate(
        self, model: TaskModel, data: TokenizedTexts, examples: list[RankingQuery]
    ) -> Scores:
        """Return the Scores of ranking, each the mean over queries, from 0 to 1.

        The metrics are `ndcg@10`, which is the score, and `mrr@10`. Only a query's own candidates
        are ranked; equal scores share their discounts in NDCG, and irrelevant documents come first
        in MRR. The baseline is the expectation of a random ranking.

        Args:
            data: Result of `encode`.
            examples: Queries with at least one relevant document each.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        scores = np.zeros(len(data), dtype=np.float32)
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            # In float32 as by CrossEncoder, so that the same scores are equal.
            scores[rows] = torch.sigmoid(logits[:, 0]).cpu().numpy()
        ends = np.cumsum([len(example.documents) for example in examples])
        metrics: dict[str, list[float]] = {"ndcg@10": [], "mrr@10": []}
        random_metrics = []
        is_constant = True
        for example, candidates in zip(examples, np.split(scores, ends[:-1]), strict=True):
            order = np.argsort(candidates, kind="stable")[::-1]
            is_relevant = order < len(example.positives)
            metrics["ndcg@10"].append(tied_ndcg(is_relevant, candidates[order]))
            metrics["mrr@10"].append(reciprocal_rank(is_relevant))
            grades = (1,) * len(example.positives)
            random_metrics.append(compute_random_baseline(len(candidates), grades))
            is_constant &= np.ptp(candidates) <= _ROUNDING * candidates.max()
        baseline = {
            name: float(np.mean([values[name] for values in random_metrics])) for name in metrics
        }
        return Scores.from_examples(
            metrics["ndcg@10"],
            metrics,
            collapsed="all documents are alike to every query" if is_constant else None,
            baseline={"score": baseline["ndcg@10"], **baseline},
        )
