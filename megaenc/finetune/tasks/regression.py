"""Regression: a number for each text or pair of texts."""

from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.nn.functional import mse_loss

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.tasks.base import Scores, TaskModel
from megaenc.finetune.tasks.classification import Classification
from megaenc.finetune.tokenized import TokenizedTexts

_ROUNDING = 1e-5
"""Range of predictions, relative to their size, up to which they count as constant."""


class Regression(Classification):
    """FinetuneTask of regression on a text's pooled states, by mean squared error.

    It is made from a Dataset and a FinetuneConfig. The score is the mean of the Pearson and the
    Spearman correlation, as in GLUE's STS-B. Numbers are learned and predicted in the unit of the
    labels, and never cut to their range.
    """

    family: ClassVar[TaskFamily] = TaskFamily.REGRESSION

    def encode_labels(self, examples: list[LabelledText]) -> np.ndarray:
        """Return the number of each example, float64[n]."""
        return np.array([example.label for example in examples], dtype=np.float64)

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the number of each of the texts `rows`, float32[len(rows), 1]."""
        return data.columns["labels"][rows, None].astype(np.float32)

    def sum_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of squared errors, a scalar.

        Args:
            outputs: Predicted numbers, float32[texts, 1].
            targets: Gold numbers, float32[texts, 1].
        """
        return mse_loss(outputs, targets, reduction="sum")

    def count_labels(self, data: TokenizedTexts) -> None:
        """Return None: there are no classes to count."""
        return

    def evaluate(
        self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]
    ) -> Scores:
        """Return the Scores of the model on a split: Pearson and Spearman correlation.

        The score is their mean, the metrics are `pearson` and `spearman`. There is no score of an
        example, so `scores_i` and `metrics_i` are empty. The baseline predicts one number for all
        texts, which correlates with nothing: 0. The model is left in eval mode.

        Args:
            data: Result of `encode`, at least one text.
            examples: Not used.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        from scipy.stats import rankdata  # slow to import

        gold = data.columns["labels"]
        predicted = np.zeros(len(data))
        for rows, outputs in self.predict(model, data, np.arange(len(data))):
            predicted[rows] = outputs[:, 0].cpu().numpy()
        metrics = {
            "pearson": pearson_correlation(gold, predicted),
            "spearman": pearson_correlation(rankdata(gold), rankdata(predicted)),
        }
        # Equal texts in other batches differ in their last bits.
        scale = max(np.ptp(gold), np.abs(predicted).max())
        is_constant = np.ptp(predicted) <= _ROUNDING * scale and np.ptp(gold) > 0
        return Scores(
            score=float(np.mean([*metrics.values()])),
            metrics=metrics,
            collapsed=f"constant prediction {predicted[0]:g}" if is_constant else None,
            baseline={"score": 0.0, "pearson": 0.0, "spearman": 0.0},
            scores_i=[],
            metrics_i={},
        )


def pearson_correlation(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Return the Pearson correlation, from -1 to 1, of gold and predicted numbers.

    It is 0 if either is constant.

    Args:
        gold: Number of each example, float64[examples], at least one, without NaN and inf.
        predicted: Predicted numbers, float64[examples], without NaN and inf.
    """
    from scipy.stats import pearsonr  # slow to import

    if (gold == gold[0]).all() or (predicted == predicted[0]).all():
        return 0.0
    return float(pearsonr(gold, predicted).statistic)
