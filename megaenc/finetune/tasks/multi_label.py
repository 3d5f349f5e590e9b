"""Multi-label classification: any number of labels for each text or pair of texts."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.tasks.base import Scores, TaskModel
from megaenc.finetune.tasks.classification import Classification
from megaenc.finetune.tokenized import TokenizedTexts


class MultiLabel(Classification):
    """Multi-label classification on a text's pooled states, by binary cross-entropy.

    It is made from a Dataset and a FinetuneConfig. A label is predicted if its probability, the
    sigmoid of its logit, is at least `threshold`: 0.5, or after `calibrate` with --threshold auto
    the best one. The score is the micro F1.
    """

    family: ClassVar[TaskFamily] = TaskFamily.MULTI_LABEL
    threshold = 0.5
    """Smallest probability of a predicted label; `calibrate` may change it."""

    def encode_labels(self, examples: list[LabelledText]) -> np.ndarray:
        """Return 1 for each index in an example's `label`, else 0, float32[n, labels]."""
        labels = np.zeros((len(examples), self.output_count), dtype=np.float32)
        for row, example in zip(labels, examples, strict=True):
            row[list(example.label)] = 1
        return labels

    def sum_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy summed over texts and labels, a scalar.

        Args:
            outputs: Logits, float32[texts, labels].
            targets: 1 for each label of a text, else 0, float32[texts, labels].
        """
        return binary_cross_entropy_with_logits(outputs, targets, reduction="sum")

    def count_labels(self, data: TokenizedTexts) -> np.ndarray:
        """Return the number of texts with each label, int64[labels]."""
        return data.columns["labels"].sum(0, dtype=np.int64)

    def _compute_probabilities(self, model: TaskModel, data: TokenizedTexts) -> np.ndarray:
        """Return the probability of each label, float64[n, labels].

        In float32 those of many large logits would be equal.
        """
        probabilities = np.zeros((len(data), self.output_count))
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            probabilities[rows] = torch.sigmoid(logits.cpu().double()).numpy()
        return probabilities

    def calibrate(self, model: TaskModel, data: TokenizedTexts) -> None:
        """Set `threshold` to the one with the best micro F1, with --threshold auto.

        With --threshold 0.5 nothing is computed, else the model is left in eval mode.

        Args:
            model: Model to predict with.
            data: Validation split.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        if self.protocol.threshold == "auto":
            probabilities = self._compute_probabilities(model, data)
            self.threshold = choose_threshold(data.columns["labels"], probabilities)

    def evaluate(
        self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]
    ) -> Scores:
        """Return the Scores of the model on a split: micro and macro F1.

        The metrics are `micro_f1`, which is the score, and `macro_f1`. There are no scores of
        single examples: `scores_i` and `metrics_i` are empty. The baseline predicts only the
        split's most frequent label. The model is left in eval mode.

        Args:
            data: Result of `encode`, at least one text.
            examples: Not used.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        gold = data.columns["labels"] > 0
        predicted = self._compute_probabilities(model, data) >= self.threshold
        most_frequent = np.zeros_like(gold)
        most_frequent[:, gold.sum(0).argmax()] = True
        metrics = compute_f1(gold, predicted)
        baseline = compute_f1(gold, most_frequent)
        baseline = {"score": baseline["micro_f1"], **baseline}
        collapsed = None
        if (predicted == predicted[0]).all() and not (gold == gold[0]).all():
            names = [self.label_names[index] for index in np.flatnonzero(predicted[0])]
            collapsed = f"constant prediction {'|'.join(names) or 'of no label'}"
        return Scores(metrics["micro_f1"], metrics, collapsed, baseline, [], {})


def compute_f1(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the micro and the macro F1 of predicted labels, by metric name.

    `micro_f1` is over all texts and labels, `macro_f1` the mean over labels. An F1 without gold and
    predicted labels is 0.

    Args:
        gold: Whether a text has a label, bool[texts, labels].
        predicted: Whether it is predicted to have it, bool[texts, labels].
    """
    right = (gold & predicted).sum(0)
    total = gold.sum(0) + predicted.sum(0)
    return {
        "micro_f1": float(2 * right.sum() / max(1, total.sum())),
        "macro_f1": float(np.mean(2 * right / np.maximum(1, total))),
    }


def choose_threshold(gold: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the threshold of probabilities with the best micro F1.

    Of equal ones it is the highest. It is halfway between two neighbouring probabilities, so that
    rounding changes no prediction, or half the smallest one. At least one label is predicted.

    Args:
        gold: 1 for each label of a text, else 0, [texts, labels]; not empty.
        probabilities: Probability of each label, float64[texts, labels].
    """
    order = np.argsort(-probabilities, axis=None, kind="stable")
    ranked = probabilities.flat[order]
    right = np.cumsum(gold.flat[order])
    scores = 2 * right / (np.arange(1, gold.size + 1) + gold.sum())
    scores[:-1][ranked[:-1] == ranked[1:]] = -1  # no threshold is between equal probabilities
    best = int(scores.argmax())
    next_probabilities = np.append(ranked[1:], 0.0)
    return float((ranked[best] + next_probabilities[best]) / 2)
