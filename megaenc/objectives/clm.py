"""Causal language modeling: every token predicts the next token of its document."""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Objective, Targets
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class CausalLanguageModeling(Objective):
    """Objective `clm`: under causal attention each token of a document or cut piece predicts the next one; the last none."""

    name = "clm"
    attention = Attention.CAUSAL
    shift = 1

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack: unchanged inputs, and the next token as label at all but each document's last."""
        has_next = np.ones(len(pack.tokens), dtype=bool)
        has_next[pack.edges[1:] - 1] = False
        predict_at = np.flatnonzero(has_next)
        return Targets(pack.tokens, predict_at, pack.tokens[predict_at + 1])
