"""Sequence classification on a text's pooled token states."""

from typing import ClassVar

import numpy as np
from torch import Tensor

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts
from megaenc.finetune.tasks.base import POOLING_FUNCTIONS, FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts


class Classification(FinetuneTask):
    """Sequence classification on a text's pooled states, by cross-entropy.

    The score is the accuracy.
    """

    family: ClassVar[TaskFamily] = TaskFamily.SC

    def encode(self, examples: list[LabelledText], encoder: TextEncoder) -> TokenizedTexts:
        """Return the texts of `examples` tokenized, with the column `labels`, int64[n], of their class indices."""
        rows = encoder.encode([example.content for example in examples])
        rows.columns["labels"] = np.array([example.label for example in examples], dtype=np.int64)
        return rows

    def pool(self, states: Tensor, packed: PackedTexts) -> Tensor:
        """Return the pooled states of each text of a pack, float32[texts, hidden_size]."""
        return POOLING_FUNCTIONS[self.protocol.pooling](states, packed)

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the class index of each of the texts `rows`, int64[len(rows)]."""
        return data.columns["labels"][rows]

    def count_labels(self, data: TokenizedTexts) -> np.ndarray:
        """Return the number of texts of each class, int64[labels]."""
        return np.bincount(data.columns["labels"], minlength=self.output_count)

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]) -> Scores:
        """Return the Scores of the model on a split: accuracy, and as baseline that of the split's most frequent class."""
        gold = data.columns["labels"]
        predicted = np.zeros(len(data), dtype=np.int64)
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            predicted[rows] = logits.argmax(1).cpu().numpy()
        right = gold == predicted
        majority = float((gold == np.bincount(gold).argmax()).mean())
        baseline = {"score": majority, "accuracy": majority}
        return Scores.from_examples(
            right, {"accuracy": right}, collapsed=self.describe_constant_prediction(predicted, gold), baseline=baseline
        )
