"""Masked next-token prediction: tokens are hidden as in masked language modelling and predicted from the position before."""

from dataclasses import dataclass

import numpy as np

from megaenc.data.packs import Pack
from megaenc.objectives.masking import Masking, ordinary
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class MaskedNextTokenPrediction(Masking):
    """Position i - 1 predicts token i where that is hidden (LLM2Vec, BehnamGhader et al. 2024, arXiv 2404.05961).

    The first token of a document, or of a piece cut by the pack's start, has no position before it and is never chosen; to
    spans it is what a special token is.
    """

    name = "mntp"
    shift = 1

    def eligible(self, pack: Pack) -> np.ndarray:
        eligible = ordinary(self.vocabulary)[pack.tokens]
        eligible[pack.edges[:-1]] = False
        return eligible
