"""Masked language modelling: tokens chosen at random are hidden and predicted where they stand."""

from dataclasses import dataclass

import numpy as np

from megaenc.data.packs import Pack
from megaenc.objectives.masking import Masking, ordinary
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class MaskedLanguageModeling(Masking):
    """Position i predicts token i where that is hidden; every token that is not special may be."""

    name = "mlm"

    def eligible(self, pack: Pack) -> np.ndarray:
        return ordinary(self.vocabulary)[pack.tokens]
