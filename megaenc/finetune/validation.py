"""Validation scores during training, the best weights so far, and early stopping."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.tasks import Scores

Weights = Mapping[nn.Parameter, Tensor]
"""Weight of each trained parameter, on the CPU."""


@dataclass
class ValidationHistory:
    """Validation scores of a training on one data set, and the weights to use.

    It is built from `protocol` only. Call `add` after each evaluation, and `restore` after the
    training. `evaluations` has each (step, score as a fraction). The weights to use, those at
    `step`, are the best if `protocol.uses_best_weights`, else the last; `scores` are theirs, None
    before the first evaluation. Only the best are saved, on the CPU. Histories of several data sets
    that share a training do not depend on each other.
    """

    protocol: FinetuneConfig
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(step, score) of each evaluation."""
    scores: Scores | None = None
    """Scores at `step`; None before the first evaluation."""
    step: int = 0
    """Step of the weights to use."""
    weights: Weights = field(default_factory=dict)
    """Weights at `step`, if they may differ from the last ones."""

    @property
    def is_stopped(self) -> bool:
        """Return whether early stopping has ended the training for this data set.

        That is after `protocol.early_stopping` evaluations in a row without a score better than the
        best; never if it is 0.
        """
        later = [step for step, _ in self.evaluations if step > self.step]
        return 0 < self.protocol.early_stopping <= len(later)

    @property
    def best_step(self) -> int:
        """Return the step of the best score, the earliest of equals.

        Without evaluations it is 0.
        """
        return max(
            self.evaluations,
            key=lambda evaluation: (evaluation[1], -evaluation[0]),
            default=(0, 0.0),
        )[0]

    def add(self, step: int, scores: Scores, copy_weights: Callable[[], Weights]) -> None:
        """Add the Scores of an evaluation after `step`, which is later than all before.

        Args:
            step: Number of steps taken.
            copy_weights: Function that returns copies of the weights, called if they are the best
                so far and `protocol.uses_best_weights`.
        """
        self.evaluations.append((step, scores.score))
        if not self.protocol.uses_best_weights:
            self.step = step
            self.scores = scores
        elif self.scores is None or scores.score > self.scores.score:
            self.step = step
            self.scores = scores
            self.weights = copy_weights()

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the saved best weights into the model's parameters, the keys of `weights`.

        Without saved weights nothing changes; `weights` stays as it is.
        """
        for parameter, weight in self.weights.items():
            parameter.copy_(weight)
