"""Sequence classification: the mean of a text's states says its class."""

from typing import ClassVar

import numpy as np
from torch import Tensor

from megaenc.finetune.examples import LabelledText, TaskFamily
from megaenc.finetune.model.backbone import PackedTexts
from megaenc.finetune.tasks.base import FinetuneTask, Scores, TaskModel, mean_pool
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts


class Classification(FinetuneTask):
    """Cross-entropy of the classes, the mean over the batch; the score, which is also the field's, is the accuracy."""

    family: ClassVar[TaskFamily] = TaskFamily.SC

    def encode(self, examples: list[LabelledText], encoder: TextEncoder) -> TokenizedTexts:
        """Return rows of the texts; column `labels`, int64[n]."""
        rows = encoder.encode([example.text for example in examples])
        rows.columns["labels"] = np.array([example.label for example in examples], dtype=np.int64)
        return rows

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Compute the logits of each text."""
        return model.compute_logits(mean_pool(model.backbone.compute_states(packed), packed))

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the classes."""
        return data.columns["labels"][rows]

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[LabelledText]) -> Scores:
        """See Task. The baseline is the class that is most frequent in these very examples."""
        gold, predicted = data.columns["labels"], np.zeros(len(data), dtype=np.int64)
        for rows, logits in self.predict(model, data, np.arange(len(data))):
            predicted[rows] = logits.argmax(1).cpu().numpy()
        right = gold == predicted
        majority = float((gold == np.bincount(gold).argmax()).mean())
        baseline = {"score": majority, "accuracy": majority}
        return Scores.from_examples(
            right, {"accuracy": right}, collapsed=self.describe_constant_prediction(predicted, gold), baseline=baseline
        )
