"""Sequence classification: scores of perfect models and of a constant one."""

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import LabelledText
from megaenc.finetune.tasks.classification import Classification, matthews_correlation

TEXTS = [
    "The garden.",
    "The old man walked down to the river with his dog.",
    "Nobody came, nobody.",
    "A book",
    "Lyon and Paris",
]
EXAMPLES = [
    LabelledText(str(at), text, label)
    for at, (text, label) in enumerate(zip(TEXTS, [0, 2, 1, 2, 2], strict=True))
]


def test_heads_are_drawn_by_the_seed(dataset):
    task = Classification(dataset("abc"), FinetuneConfig())
    first = torch.manual_seed(0) and task.build_head(512)
    again = torch.manual_seed(0) and task.build_head(512)
    other = task.build_head(512)
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)
    assert first.weight.shape == (3, 512) and first.weight.std().item() == pytest.approx(
        0.02, rel=0.1
    )
    assert not first.bias.any()


def test_scores(dataset, encoder, oracle):
    task = Classification(dataset(["a", "b", "c"]), FinetuneConfig(tokens_per_forward=20))
    data = task.encode(EXAMPLES, encoder)
    perfect = oracle(task, (data, np.eye(3)[[0, 2, 1, 2, 2]]))
    heard: list[tuple[int, int]] = []
    task.progress = lambda done, total: heard.append((done, total))
    scores = task.evaluate(perfect, data, EXAMPLES)
    assert heard == sorted(heard) and heard[-1] == (5, 5)
    assert scores.score == 1 and scores.scores_i == [1.0] * 5 and scores.collapsed is None
    assert scores.metrics["accuracy"] == 1 and scores.metrics_i["accuracy"] == [1.0] * 5
    assert scores.baseline["score"] == scores.baseline["accuracy"] == 0.6
    assert perfect.backbone.seen == 5  # one pass

    scores = task.evaluate(oracle(task, (data, np.eye(3)[[0, 2, 1, 0, 1]])), data, EXAMPLES)
    assert scores.score == 0.6 and scores.scores_i == [1, 1, 1, 0, 0] and scores.collapsed is None
    gold = [example.label for example in EXAMPLES]
    assert scores.metrics["matthews_correlation"] == pytest.approx(
        matthews_corrcoef(gold, [0, 2, 1, 0, 1])
    )


@pytest.mark.parametrize("classes", [2, 5])
def test_matthews_correlation_is_scikit_learns(classes):
    random = np.random.default_rng(classes)
    for share in (0.0, 0.3, 1.0):
        gold, drawn = random.integers(classes, size=(2, 60))
        predicted = np.where(random.random(60) < share, gold, drawn)
        for one, other in ((gold, predicted), (gold, gold[::-1]), (gold, np.zeros(60, dtype=int))):
            assert matthews_correlation(one, other) == pytest.approx(
                matthews_corrcoef(one, other), abs=1e-12
            )


def test_a_constant_prediction_of_different_labels_is_a_collapse(dataset, encoder, oracle):
    task = Classification(dataset(["bad", "fair", "good"]), FinetuneConfig())
    for examples, collapsed in ((EXAMPLES, "constant prediction good"), (EXAMPLES[3:], None)):
        data = task.encode(examples, encoder)
        scores = task.evaluate(oracle(task, (data, np.eye(3)[[2] * len(examples)])), data, examples)
        assert scores.collapsed == collapsed
