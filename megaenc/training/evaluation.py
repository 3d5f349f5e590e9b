"""Held-out loss and accuracy, on packs and masks that never change."""

import hashlib
import json
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
        # What tells whether two runs were asked about the same text.
        asked = [plan.data.fingerprint, plan.settings.data.split, plan.settings.data.seq_length, self.batches * size]
        self.held_out = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]
        self.objectives = validated_objectives(plan.schedule, plan.vocabulary)
        self.most_frequent = {text: self._most_frequent(objective) for text, objective in self.objectives.items()}

    def __call__(self, engine: Engine) -> dict[str, Any]:
        """`held_out`, which differs where the text does, and `objectives`: by text loss, accuracy and most_frequent.

        The last is the accuracy of always guessing the token that is most frequent among the labels.
        """
        found = {}
        for text, objective in self.objectives.items():
            result = engine.evaluate(self.plan.validation, self.batches, objective)
            found[text] = {"loss": result.loss, "accuracy": result.accuracy, "most_frequent": self.most_frequent[text]}
        return {"held_out": self.held_out, "objectives": found}

    def _most_frequent(self, objective: Objective) -> float | None:
        counts = np.zeros(self.plan.vocabulary.size, dtype=np.int64)
        for sample in range(self.batches * self.plan.settings.global_batch_size):
            pack = self.plan.validation[sample]
            labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
            counts += np.bincount(labels, minlength=len(counts))
        return int(counts.max()) / int(counts.sum()) if counts.any() else None
