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
    """Objective in which position i predicts token i + 1; the last token of a document, or of a cut piece, predicts nothing."""

    name = "clm"
    attention = Attention.CAUSAL
    shift = 1

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack."""
        has_next = np.ones(len(pack.tokens), dtype=bool)
        has_next[pack.edges[1:] - 1] = False
        predict_at = np.flatnonzero(has_next)
        return Targets(pack.tokens, predict_at, pack.tokens[predict_at + 1])
