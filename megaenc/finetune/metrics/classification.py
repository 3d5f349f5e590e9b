"""Sequence classification: the study's metric and the field's are the same."""

import numpy as np


def accuracy(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """float64[examples], 1 where the class is right; the accuracy is its mean. Both arguments are int[examples]."""
    return (gold == predicted).astype(np.float64)


def majority_class(gold: np.ndarray) -> int:
    """The class that a constant prediction does best with, the smallest of several."""
    return int(np.bincount(gold).argmax())
