"""Validation of a run: the scores of its model on held-out packs."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.objectives import Objective, PseudoPerplexity, compute_perplexity
from megaenc.training.engine import BatchSums, Engine
from megaenc.training.micro_batches import TokenGroups
from megaenc.training.plan import Plan


class Validator:
    """Callable that scores an engine's model, always on the same packs and masks.

    `Validator(plan, step)` takes packs of the phase that trains `step`; `parts` has the validation
    sets, and is empty if there is no text or validation is turned off. A call with an Engine, by
    all ranks together, returns a dict of `held_out`, a digest of the text, and `objectives`: the
    scores (`ValidationPart.score`) by OBJECTIVE or, on a named set, NAME/OBJECTIVE. Its
    `before_pass` is called before each set after the first and each later pass of a
    pseudo-perplexity.
    """

    def __init__(self, plan: Plan, step: int = 0):
        self.plan = plan
        self.step = step
        self.phase = plan.settings.phase_at(step)
        self.objectives = plan.validation_objectives
        self.parts: list[ValidationPart] = []
        for name, packs in plan.validation_packs(step).items():
            samples = self._count_named_samples(packs) if name else self._count_phase_samples(packs)
            most_frequent = {
                text: _most_frequent_fraction(objective, packs, samples)
                for text, objective in self.objectives.items()
            }
            self.parts.append(
                ValidationPart(name, packs, samples, TokenGroups.from_packs(packs), most_frequent)
            )
        # What the tokens of the validation depend on.
        data = self.phase.settings.data
        texts = [held_out.identity for held_out in plan.validation_sets]
        texts = texts or [plan.data_at(step).held_out_fingerprint, data.split]
        text_identity = [*texts, data.seq_length, *(part.samples for part in self.parts)]
        self.held_out = hashlib.sha256(json.dumps(text_identity).encode()).hexdigest()[:12]

    def _count_phase_samples(self, packs: BlendedDataset) -> int:
        """Return the packs to read of the phase's own held-out text, in whole batches.

        No token is read twice, unless the text is smaller than one batch.
        """
        batch_size = self.phase.settings.global_batch_size
        samples = batch_size * max(
            1, min(self.plan.settings.output.eval_iters, packs.samples_before_repeat // batch_size)
        )
        return samples if packs.samples is None else min(samples, packs.samples)

    def _count_named_samples(self, packs: BlendedDataset) -> int:
        """Return the packs to read of a named set.

        It is the same text in each phase, and no token is read twice. There is at least one pack,
        which repeats the text of a set that is smaller.
        """
        first = self.plan.settings.phase_configs[0].settings
        tokens = (
            self.plan.settings.output.eval_iters * first.global_batch_size * first.data.seq_length
        )
        [dataset] = packs.datasets
        return max(1, min(tokens, dataset.tokens_per_epoch) // packs.seq_length)

    def __call__(
        self, engine: Engine, before_pass: Callable[[], object] = lambda: None
    ) -> dict[str, Any]:
        """Return the scores of the engine's model under each objective.

        All ranks call this together. The result has `held_out`, a digest of the text, and
        `objectives`: scores by OBJECTIVE or, on a named set, NAME/OBJECTIVE. These are `loss`,
        `accuracy` and `most_frequent`, the accuracy of always predicting the most frequent label,
        all None without predictions; `by_position` and `by_corpus`, the losses of TokenGroups, if
        there are several; and `perplexity` of a pseudo-perplexity.

        Args:
            before_pass: Called before each set after the first, and before each pass of a
                pseudo-perplexity after its first.
        """
        engine.enter_phase(self.step)
        scores = {}
        for index, part in enumerate(self.parts):
            if index:
                before_pass()
            for text, objective in self.objectives.items():
                name = f"{part.name}/{text}" if part.name else text
                scores[name] = part.score(engine, text, objective, before_pass)
        return {"held_out": self.held_out, "objectives": scores}


@dataclass(frozen=True)
class ValidationPart:
    """Packs of one validation set, cut for a phase; `Validator` builds it.

    `score` measures a model on it. `name` is empty for the phase's own held-out text. The first
    `samples` of `packs` are read, by all ranks together. `groups` divides their tokens for losses
    by position and corpus. `most_frequent` has the fraction of the most frequent label by text of
    the objective, None without labels.
    """

    name: str
    """Name of the set, empty for the phase's own held-out text."""
    packs: BlendedDataset
    samples: int
    """Number of packs that are read."""
    groups: TokenGroups
    most_frequent: dict[str, float | None]
    """Share of the most frequent label by objective."""

    def score(
        self, engine: Engine, text: str, objective: Objective, before_pass: Callable[[], object]
    ) -> dict[str, float | dict[str, float] | None]:
        """Return the scores of `engine` under one objective by name, equal on all ranks.

        All ranks call this together, after `Engine.enter_phase`. Scores are loss (nats per
        predicted token), accuracy, most_frequent and, only for a pseudo-perplexity, perplexity,
        each None without predictions. The losses by_position and by_corpus, dicts as of
        `TokenGroups.mean_losses`, are missing with tokens in fewer than two groups.

        Args:
            text: Text of `objective`, a key of `most_frequent`.
            before_pass: Called before each pass of a pseudo-perplexity after the first, as that can
                take long.
        """
        metrics = BatchSums()
        for index, part in enumerate(
            objective.parts if isinstance(objective, PseudoPerplexity) else (objective,)
        ):
            if index:
                before_pass()
            metrics += engine.evaluate(self.packs, self.samples, part, self.groups)
        scores = {
            "loss": metrics.loss,
            "accuracy": metrics.accuracy,
            "most_frequent": self.most_frequent[text],
        }
        if isinstance(objective, PseudoPerplexity):
            scores["perplexity"] = (
                None if metrics.loss is None else compute_perplexity(metrics.loss)
            )
        return scores | self.groups.mean_losses(metrics.group_sums)


def _most_frequent_fraction(
    objective: Objective, packs: BlendedDataset, samples: int
) -> float | None:
    """Return the share of the most frequent label; None without labels.

    It is counted over the first `samples` packs.
    """
    counts = np.zeros(objective.vocabulary.size, dtype=np.int64)
    if isinstance(objective, PseudoPerplexity):
        objective = dataclasses.replace(objective, passes=1)  # one pass over all labels is faster
    for sample in range(samples):
        pack = packs[sample]
        labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
        counts += np.bincount(labels, minlength=len(counts))
    return int(counts.max()) / int(counts.sum()) if counts.any() else None
