"""Reranking: metrics equal to scikit-learn's and known ones, ties, collapse."""

import math

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import RankingQuery
from megaenc.finetune.tasks.reranking import Reranking

TEXTS = ["The garden.", "The old man walked.", "Nobody came.", "A book", "Lyon", "The river"]
EXAMPLES = [
    RankingQuery("who?", tuple(TEXTS[:2]), tuple(TEXTS[2:])),
    RankingQuery("where?", (TEXTS[4],), (TEXTS[5], TEXTS[0])),
]


@pytest.fixture
def evaluate(dataset, encoder, oracle):
    """Return the scores of a model with the given logits of the pairs."""

    def run(logits, examples=EXAMPLES):
        task = Reranking(dataset(["score"]), FinetuneConfig(tokens_per_forward=40))
        data = task.encode(examples, encoder)
        model = oracle(task, (data, np.array(logits, dtype=float)[:, None]))
        return task.evaluate(model, data, examples)

    return run


def test_metrics_of_known_ranks(evaluate):
    """Relevant documents at ranks 2 and 4 of six, and at rank 1 of three."""
    scores = evaluate([4, 2, 5, 3, 1, 0, -1, -2, -3])
    first = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert scores.metrics_i["ndcg@10"] == pytest.approx([first, 1])
    assert scores.metrics_i["mrr@10"] == [0.5, 1]
    assert scores.score == scores.metrics["ndcg@10"] == pytest.approx((first + 1) / 2)
    assert scores.metrics["mrr@10"] == 0.75 and scores.collapsed is None
    # The first relevant document of random orders: of six with two, of three with one
    random = ((5 + 4 / 2 + 3 / 3 + 2 / 4 + 1 / 5) / 15 + (1 + 1 / 2 + 1 / 3) / 3) / 2
    assert scores.baseline["mrr@10"] == pytest.approx(random)
    assert scores.baseline["score"] == scores.baseline["ndcg@10"]


@pytest.mark.parametrize("seed", range(4))
def test_ndcg_is_scikit_learns(seed, evaluate):
    """With more than ten candidates and equal scores."""
    random = np.random.default_rng(seed)
    documents = [f"{text} {word}" for text in TEXTS for word in "abc"]
    example = RankingQuery("who?", tuple(documents[: seed + 1]), tuple(documents[seed + 1 :]))
    logits = random.integers(0, 6, len(documents))
    gold = np.arange(len(documents)) <= seed
    assert evaluate(logits, [example]).score == pytest.approx(
        ndcg_score([gold], [logits], k=10), abs=1e-12
    )


def test_equal_scores_are_no_success(evaluate):
    """Scores are probabilities in float32, in which large logits are equal."""
    scores = evaluate([30, 29, 28, 27, 26, 25, 31, 32, 33])
    assert scores.collapsed == "all documents are alike to every query"
    assert scores.metrics["mrr@10"] == pytest.approx((1 / 5 + 1 / 3) / 2)
    assert scores.score == pytest.approx(scores.baseline["score"])
