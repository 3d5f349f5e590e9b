"""Sequence classification: the mean of a text's states says its class."""

from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megaenc.finetune.encoded import Encoded, TextEncoder
from megaenc.finetune.examples import Family, LabelledText
from megaenc.finetune.metrics.classification import accuracy, majority_class
from megaenc.finetune.tasks.base import (
    Model,
    Scores,
    Task,
    backward_in_parts,
    column,
    evaluating,
    finite,
    linear_head,
    mean_states,
)


class Classification(Task):
    """Cross-entropy of the classes, the mean over the batch; the score is the accuracy."""

    family: ClassVar[Family] = Family.SC

    def encode(self, examples: list[LabelledText], encoder: TextEncoder) -> Encoded:
        """Rows of the texts; column `labels`, int64[n]."""
        rows = encoder.encode([example.text for example in examples])
        rows.columns["labels"] = np.array([example.label for example in examples], dtype=np.int64)
        return rows

    def head(self, hidden_size: int) -> nn.Module:
        """One linear layer."""
        return linear_head(hidden_size, len(self.dataset.labels))

    def backward(self, model: Model, data: Encoded, rows: np.ndarray) -> float:
        """See Task."""

        def loss_sum(packed, states, some):
            labels = torch.from_numpy(data.columns["labels"][some]).to(states.device)
            return cross_entropy(model.logits(mean_states(states, packed)), labels, reduction="sum")

        return backward_in_parts(self, model, data, rows, loss_sum, len(rows))

    def evaluate(self, model: Model, data: Encoded, examples: list[LabelledText]) -> Scores:
        """See Task. The baseline is the class that is most frequent in these very examples."""
        gold, predicted = data.columns["labels"], np.zeros(len(data), dtype=np.int64)
        with evaluating(model):
            for rows, packed, states in self.predictions(model, data):
                predicted[rows] = finite(model.logits(mean_states(states, packed))).argmax(1).cpu().numpy()
        right = accuracy(gold, predicted)
        constant = float(accuracy(gold, np.full_like(gold, majority_class(gold))).mean())
        collapsed = None
        if (predicted == predicted[0]).all() and not (gold == gold[0]).all():
            collapsed = f"constant prediction {self.dataset.labels[predicted[0]]}"
        return Scores(
            score=float(right.mean()),
            scores_i=column(right),
            metrics={"accuracy": float(right.mean())},
            metrics_i={"accuracy": column(right)},
            collapsed=collapsed,
            baseline={"score": constant, "accuracy": constant},
        )
