"""Accuracy against scikit-learn."""

import numpy as np
from sklearn.metrics import accuracy_score

from megaenc.finetune.metrics.classification import accuracy, majority_class


def test_as_scikit_learn_has_it():
    random = np.random.default_rng(0)
    for classes in (2, 3, 6):
        gold, predicted = random.integers(0, classes, (2, 101))
        right = accuracy(gold, predicted)
        assert right.mean() == accuracy_score(gold, predicted)
        assert right.tolist() == [float(a == b) for a, b in zip(gold, predicted, strict=True)]


def test_no_constant_prediction_beats_the_majority_class():
    gold = np.array([2, 0, 1, 1, 2])
    assert majority_class(gold) == 1  # 1 and 2 are equally frequent
    assert accuracy(gold, np.full(5, 1)).mean() == max(accuracy(gold, np.full(5, c)).mean() for c in range(3)) == 0.4
