"""Sequence classification on the mean of a text's token states."""

from typing import ClassVar

import numpy as np
from torch import Tensor

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts
from megaenc.finetune.tasks.base import FinetuneTask, Scores, TaskModel, mean_pool
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts


class Classification(FinetuneTask):
    """Sequence classification (SC): cross-entropy averaged over texts; the score is the accuracy."""

    family: ClassVar[TaskFamily] = TaskFamily.SC

    def encode(self, examples: list[LabelledText], encoder: TextEncoder) -> TokenizedTexts:
        """Tokenize the texts, with column `labels`, int64[n]."""
        rows = encoder.encode([example.text for example in examples])
        rows.columns["labels"] = np.array([example.label for example in examples], dtype=np.int64)
        return rows

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Compute the logits of each text, float32[texts, labels]."""
        return model.compute_logits(mean_pool(model.backbone.compute_states(packed), packed))

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the class of each of `rows`, int64[rows]."""
        return data.columns["labels"][rows]

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]) -> Scores:
        """Predict a split and compute accuracies; the baseline predicts the split's most frequent class."""
        gold, predicted = data.columns["labels"], np.zeros(len(data), dtype=np.int64)
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            predicted[rows] = logits.argmax(1).cpu().numpy()
        right = gold == predicted
        majority = float((gold == np.bincount(gold).argmax()).mean())
        baseline = {"score": majority, "accuracy": majority}
        return Scores.from_examples(
            right, {"accuracy": right}, collapsed=self.describe_constant_prediction(predicted, gold), baseline=baseline
        )
