"""Masked language modelling: tokens chosen at random are hidden and predicted where they stand."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaenc.data.packs import Pack
from megaenc.errors import InputError
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.registry import register
from megaenc.randomness import SampleRandomness


@register
@dataclass(frozen=True)
class MaskedLanguageModeling(Objective):
    """Each token that is not special is chosen independently with probability `mask`.

    A chosen one becomes the mask token, or with probability `random` another token, or with probability `keep` stays:
    `mlm(mask=0.15,random=0.1,keep=0.1)` is BERT's 80/10/10 (Devlin et al. 2019).
    """

    name = "mlm"
    attention = Attention.BIDIRECTIONAL

    mask: float = option(0.4, "share of the tokens to predict", above=0, high=1)
    random: float = option(0.0, "share of these that a random token replaces", low=0, high=1)
    keep: float = option(0.0, "share of these that stay as they are", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random + self.keep > 1 + 1e-9:
            raise OptionError(self.name, "keep", f"found random + keep = {self.random + self.keep:g}, expected at most 1")
        if self.vocabulary.mask_id is None:
            raise InputError(
                f"{self.name}: the tokenizer ({self.vocabulary.fingerprint[:12]}) has no mask token, expected one; "
                "`megaenc tokenizer` makes a tokenizer that has"
            )

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        # A number for every position, special or not: what happens to one token depends on no other.
        chosen = randomness.uniforms("mask", len(pack.tokens)) < self.mask
        predict_at = np.flatnonzero(chosen & self._maskable[pack.tokens])
        labels = pack.tokens[predict_at]
        hidden = np.full(len(labels), self.vocabulary.mask_id, dtype=np.int64)
        if self.random or self.keep:
            fate = randomness.uniforms("fate", len(pack.tokens))[predict_at]
            draws = randomness.uniforms("random token", len(pack.tokens))[predict_at]
            others = self._replacements[(draws * len(self._replacements)).astype(np.int64)]
            hidden = np.where(fate < self.random, others, np.where(fate < self.random + self.keep, labels, hidden))
        inputs = pack.tokens.copy()
        inputs[predict_at] = hidden
        return Targets(inputs, predict_at, labels)

    @cached_property
    def _maskable(self) -> np.ndarray:
        """bool[vocabulary]: whether a token may be chosen."""
        maskable = np.ones(self.vocabulary.size, dtype=bool)
        maskable[list(self.vocabulary.special_ids)] = False
        return maskable

    @cached_property
    def _replacements(self) -> np.ndarray:
        return np.flatnonzero(self._maskable)
