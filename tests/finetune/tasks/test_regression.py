"""Regression: correlations equal to scipy's, and collapse of constant models."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import LabelledText
from megaenc.finetune.tasks.regression import Regression, pearson_correlation

TEXTS = ["The garden.", "The old man walked.", "Nobody came.", "A book", "Lyon and Paris"]
GOLD = [4.75, 0.0, 2.5, 2.5, 5.0]
EXAMPLES = [
    LabelledText(f"{at}", text, label)
    for at, (text, label) in enumerate(zip(TEXTS, GOLD, strict=True))
]


@pytest.fixture
def evaluate(dataset, encoder, oracle):
    """Return the scores of a model that predicts the given numbers."""

    def run(predicted, examples=EXAMPLES):
        task = Regression(dataset(["score"]), FinetuneConfig(tokens_per_forward=20))
        data = task.encode(examples, encoder)
        return task.evaluate(oracle(task, (data, np.array(predicted)[:, None])), data, examples)

    return run


@pytest.mark.parametrize("predicted", [GOLD, [-10, 3, 3, 8, 7.5], [5, 4, 3, 2, 1], [1, 1, 1, 1, 2]])
def test_scores_are_scipys(evaluate, predicted):
    scores = evaluate(predicted)
    pearson = pearsonr(GOLD, predicted).statistic
    spearman = spearmanr(GOLD, predicted).statistic
    assert scores.metrics == pytest.approx({"pearson": pearson, "spearman": spearman}, abs=1e-12)
    assert scores.score == pytest.approx((pearson + spearman) / 2, abs=1e-12)
    assert scores.collapsed is None
    assert scores.baseline == {"score": 0, "pearson": 0, "spearman": 0}


@pytest.mark.parametrize("scale", [1e-200, 1e38])
def test_extreme_numbers_have_a_correlation(scale):
    gold = scale * np.array([1.0, 2, 3])
    assert pearson_correlation(gold, np.array([1.0, 2, 3])) == pytest.approx(1)


def test_a_constant_prediction_of_different_numbers_is_a_collapse(evaluate):
    scores = evaluate([2.5] * 5)
    assert (scores.score, scores.collapsed) == (0, "constant prediction 2.5")
    assert evaluate(2.5 + 1e-6 * np.arange(5)).collapsed == "constant prediction 2.5"
    assert evaluate(2.5 + 1e-3 * np.arange(5)).collapsed is None
    scores = evaluate([2.5] * 2, EXAMPLES[2:4])
    assert (scores.score, scores.collapsed) == (0, None)
