"""Multi-label classification: F1 equal to scikit-learn's, thresholds and collapse."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import LabelledText
from megaenc.finetune.tasks.multi_label import MultiLabel, choose_threshold, compute_f1

TEXTS = ["The garden.", "The old man walked.", "Nobody came.", "A book"]
GOLD = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]])
EXAMPLES = [
    LabelledText(f"{at}", text, tuple(np.flatnonzero(labels).tolist()))
    for at, (text, labels) in enumerate(zip(TEXTS, GOLD, strict=True))
]


@pytest.fixture
def evaluate(dataset, encoder, oracle):
    """Return the task and scores of a model with the given logits, calibrated on them."""

    def run(logits, examples=EXAMPLES, **protocol):
        task = MultiLabel(dataset("abc"), FinetuneConfig(tokens_per_forward=20, **protocol))
        data = task.encode(examples, encoder)
        model = oracle(task, (data, np.array(logits)))
        task.calibrate(model, data)
        return task, task.evaluate(model, data, examples)

    return run


@pytest.mark.parametrize("seed", range(4))
def test_f1_is_scikit_learns(seed):
    random = np.random.default_rng(seed)
    gold, predicted = random.random((2, 30, 5)) < 0.3
    gold[:, 0] = predicted[:, 0] = False
    for answers in (predicted, gold, np.zeros_like(gold)):
        scores = compute_f1(gold, answers)
        for average in ("micro", "macro"):
            expected = f1_score(gold, answers, average=average, zero_division=0)
            assert scores[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)


def test_labels_are_predicted_from_even_odds(evaluate):
    _, scores = evaluate([[2, -1, 0], [-1, -1, -1], [1, -0.1, -3], [-2, -1, 4]])
    assert scores.metrics == pytest.approx({"micro_f1": 2 / 3, "macro_f1": 22 / 45})
    assert scores.score == scores.metrics["micro_f1"] and scores.collapsed is None
    # Label a for each text: 3 of 4 right, 3 of 5 found
    assert scores.baseline == pytest.approx({"score": 2 / 3, "micro_f1": 2 / 3, "macro_f1": 2 / 7})


def test_the_threshold_with_the_best_score_is_chosen(evaluate):
    logits = np.where(GOLD, -1.0, -3.0)
    task, scores = evaluate(logits)
    assert scores.score == 0 and task.threshold == 0.5
    task, scores = evaluate(logits, threshold="auto")
    between = np.mean(1 / (1 + np.exp([1.0, 3.0])))
    assert scores.score == 1 and task.threshold == pytest.approx(between)
    assert scores.baseline.keys() == {"score", *scores.metrics}


def test_a_threshold_is_found_between_large_logits(evaluate):
    task, scores = evaluate(np.where(GOLD, 20.0, 18.0), threshold="auto")
    assert scores.score == 1 and task.threshold > 0.99999


@pytest.mark.parametrize("seed", range(5))
def test_no_threshold_is_better(seed):
    """With equal probabilities, and also without a gold label."""
    random = np.random.default_rng(seed)
    gold = random.random((20, 3)) < 0.2 * seed
    probabilities = random.integers(0, 12, (20, 3)) / 12
    threshold = choose_threshold(gold, probabilities)
    best = max(
        compute_f1(gold, probabilities >= value)["micro_f1"] for value in np.linspace(0, 1.1, 200)
    )
    assert compute_f1(gold, probabilities >= threshold)["micro_f1"] == best


def test_constant_predictions_of_different_labels_are_a_collapse(evaluate):
    assert evaluate([[1, -1, 1]] * 4)[1].collapsed == "constant prediction a|c"
    assert evaluate([[-1, -1, -1]] * 4)[1].collapsed == "constant prediction of no label"
    assert evaluate([[1, -1, 1]], EXAMPLES[:1])[1].collapsed is None
