"""Sequence classification on a text's pooled token states."""

from typing import ClassVar

import numpy as np
from torch import Tensor

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts
from megaenc.finetune.tasks.base import POOLING_FUNCTIONS, FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts


class Classification(FinetuneTask):
    """FinetuneTask of sequence classification (SC) on a text's pooled states.

    It learns by cross-entropy. The score is the accuracy.
    """

    family: ClassVar[TaskFamily] = TaskFamily.SC

    def encode(self, examples: list[LabelledText], encoder: TextEncoder) -> TokenizedTexts:
        """Return the texts of `examples` as tokenized by `encoder.encode`, with labels.

        A pair's two texts are joined by the tokenizer. The column `labels` has the result of
        `encode_labels`.
        """
        rows = encoder.encode([example.content for example in examples])
        rows.columns["labels"] = self.encode_labels(examples)
        return rows

    def encode_labels(self, examples: list[LabelledText]) -> np.ndarray:
        """Return the class index of each example, int64[n], which is its `label`."""
        return np.array([example.label for example in examples], dtype=np.int64)

    def pool(self, states: Tensor, packed: PackedTexts) -> Tensor:
        """Return the pooled states of each text of a pack, float32[texts, hidden_size].

        `protocol.pooling` selects their mean, or the state of the first or last token.

        Args:
            states: States of the tokens of `packed`, [T, hidden_size].
        """
        return POOLING_FUNCTIONS[self.protocol.pooling](states, packed)

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the class index of each of the texts `rows`, int64[len(rows)]."""
        return data.columns["labels"][rows]

    def count_labels(self, data: TokenizedTexts) -> np.ndarray:
        """Return the number of texts of each class, int64[labels]."""
        return np.bincount(data.columns["labels"], minlength=self.output_count)

    def evaluate(
        self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]
    ) -> Scores:
        """Return the Scores of the model on a split: accuracy and Matthews correlation.

        The metrics are `accuracy`, which is the score, and `matthews_correlation`. The baseline
        always predicts the split's most frequent class.

        Args:
            data: Result of `encode`.
            examples: Not used.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        gold = data.columns["labels"]
        predicted = np.zeros(len(data), dtype=np.int64)
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            predicted[rows] = logits.argmax(1).cpu().numpy()
        right = gold == predicted
        majority = float((gold == np.bincount(gold).argmax()).mean())
        return Scores.from_examples(
            right,
            {"accuracy": right},
            collapsed=self.describe_constant_prediction(predicted, gold),
            baseline={"score": majority, "accuracy": majority, "matthews_correlation": 0.0},
            metrics={
                "accuracy": float(right.mean()),
                "matthews_correlation": matthews_correlation(gold, predicted),
            },
        )


def matthews_correlation(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Return the Matthews correlation, from -1 to 1, of gold and predicted classes.

    It is 0 if either is constant. For any number of classes it is Gorodkin's R_K (Computational
    Biology and Chemistry 28, 2004): the correlation of the classes as one-hot vectors.

    Args:
        gold: Class index of each example, int[examples], at least one.
        predicted: Predicted class indices, int[examples].
    """
    classes = int(max(gold.max(), predicted.max())) + 1
    of_gold = np.bincount(gold, minlength=classes) / len(gold)
    of_predicted = np.bincount(predicted, minlength=classes) / len(gold)
    covariance = (gold == predicted).mean() - of_gold @ of_predicted
    variances = (1 - of_gold @ of_gold) * (1 - of_predicted @ of_predicted)
    return float(covariance / np.sqrt(variances)) if variances > 0 else 0.0
