"""Held-out loss and accuracy, on packs and masks that never change."""

from typing import Any

import numpy as np

from megaenc.objectives import Objective
from megaenc.randomness import SampleRandomness
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan, validated_objectives


class Validation:
    """Validates under `validated_objectives`, whatever the phase, on packs and masks that follow from the data alone."""

    def __init__(self, plan: Plan):
        self.plan = plan
        size = plan.settings.global_batch_size
        packs = plan.validation.samples_before_repeat  # no held-out token twice, unless one batch needs more than there are
        self.batches = max(1, min(plan.settings.output.eval_iters, packs // size))
        self.objectives = validated_objectives(plan.schedule, plan.vocabulary)
        self.most_frequent = {text: self._most_frequent(objective) for text, objective in self.objectives.items()}

    def __call__(self, engine: Engine) -> dict[str, dict[str, Any]]:
        """By objective: loss, accuracy, and most_frequent, the accuracy of always guessing the labels' most frequent token."""
        found = {}
        for text, objective in self.objectives.items():
            result = engine.evaluate(self.plan.validation, self.batches, objective)
            found[text] = {"loss": result.loss, "accuracy": result.accuracy, "most_frequent": self.most_frequent[text]}
        return found

    def _most_frequent(self, objective: Objective) -> float | None:
        counts = np.zeros(self.plan.vocabulary.size, dtype=np.int64)
        for sample in range(self.batches * self.plan.settings.global_batch_size):
            pack = self.plan.validation[sample]
            labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
            counts += np.bincount(labels, minlength=len(counts))
        return int(counts.max()) / int(counts.sum()) if counts.any() else None
