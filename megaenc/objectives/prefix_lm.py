"""Prefix language modelling: the start of a document is read in both directions, and every later token is the next one."""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class PrefixLanguageModeling(Objective):
    """The first p tokens of a document see each other, the rest is causal (Raffel et al. 2020, arXiv 1910.10683).

    In a document, or a piece of one, of L tokens p is floor(u L), u drawn uniformly from [low, high), and L - 1 at most.
    Position i predicts token i + 1 for every token from p on; the first token is predicted by none.
    """

    name = "prefix_lm"
    attention = Attention.PREFIX
    shift = 1

    low: float = option(0.0, "least share of a document that is its prefix", low=0, high=1)
    high: float = option(1.0, "greatest share of a document that is its prefix", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise OptionError(self.name, "low", f"found {self.low:g}, expected at most high={self.high:g}")

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        lengths = np.diff(pack.edges).astype(np.int64)
        shares = self.low + (self.high - self.low) * randomness.uniforms("prefix", len(lengths))
        prefixes = np.minimum((shares * lengths).astype(np.int64), lengths - 1)
        predicted = np.flatnonzero(pack.positions >= np.repeat(np.maximum(prefixes, 1), lengths))
        return Targets(pack.tokens, predicted - 1, pack.tokens[predicted], prefixes)
