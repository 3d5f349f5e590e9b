"""The objectives that hide tokens and predict them: where they stand (MLM), or from the position before (MNTP)."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.registry import register


@dataclass(frozen=True)
class Masking(Objective):
    """Every token that `eligible` allows is chosen with probability `mask`, by itself or in spans.

    A chosen one becomes the mask token, or with probability `random` another token, or with probability `keep` stays:
    `mask=0.15,random=0.1,keep=0.1` is BERT's 80/10/10 (Devlin et al. 2019, arXiv 1810.04805).

    With `span` = s the chosen tokens come in runs of geometric length with mean s (as SpanBERT's do, Joshi et al. 2020, arXiv
    1907.10529): a stationary Markov chain over the tokens. The first token of a document and the token after one that is not
    eligible are chosen with probability `mask`; a chosen token is followed by another with probability 1 - 1/s, one that was
    not by a chosen one with probability mask / (s (1 - mask)). So every token is chosen with probability `mask`, and no run
    crosses an edge or a special token.
    """

    attention = Attention.BIDIRECTIONAL

    mask: float = option(0.4, "share of the tokens to predict", above=0, high=1)
    random: float = option(0.0, "share of these that a random token replaces", low=0, high=1)
    keep: float = option(0.0, "share of these that stay as they are", low=0, high=1)
    span: float = option(0.0, "mean length of a hidden run, 0 for each token by itself", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random + self.keep > 1 + 1e-9:
            raise OptionError(self.name, "keep", f"found random + keep = {self.random + self.keep:g}, expected at most 1")
        if self.span and self.span * (1 - self.mask) < 1 - 1e-9:
            # Shorter runs than those of independent tokens would have to repel each other.
            expected = "0: every token is hidden"
            if self.mask < 1:
                expected = f"0 or from {math.ceil(1000 / (1 - self.mask) - 1e-6) / 1000:g} up"
            raise OptionError(self.name, "span", f"found {self.span:g} with mask={self.mask:g}, expected {expected}")
        if self.vocabulary.mask_id is None:
            raise InputError(
                f"{self.name}: the tokenizer ({self.vocabulary.fingerprint[:12]}) has no mask token, expected one; "
                "`megaenc tokenizer` makes a tokenizer that has"
            )

    @abstractmethod
    def eligible(self, pack: Pack) -> np.ndarray:
        """bool[T]: which tokens may be chosen."""

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        (places,) = self._chosen(pack, randomness).nonzero()
        labels = pack.tokens[places]
        hidden = self.vocabulary.mask_id
        if self.random or self.keep:
            fate = randomness.uniforms("fate", len(pack.tokens))[places]
            draws = randomness.uniforms("random token", len(pack.tokens))[places]
            replacements = text_token_ids(self.vocabulary)
            others = replacements[(draws * len(replacements)).astype(np.int64)]
            hidden = np.where(fate < self.random, others, np.where(fate < self.random + self.keep, labels, hidden))
        inputs = pack.tokens.copy()
        inputs[places] = hidden
        return Targets(inputs, places - self.shift, labels)

    def _chosen(self, pack: Pack, randomness: SampleRandomness) -> np.ndarray:
        """bool[T]: the tokens to hide and predict."""
        # A number for every position, eligible or not: the same draws whatever the tokens are.
        eligible = self.eligible(pack)
        if not self.span:
            return randomness.chances("mask", len(pack.tokens), self.mask) & eligible
        draws = randomness.uniforms("mask", len(pack.tokens))
        afresh = np.ones(len(draws), dtype=bool)
        afresh[1:] = ~eligible[:-1]
        afresh[pack.edges[:-1]] = True
        begins = draws < np.where(afresh, self.mask, self.mask / (self.span * (1 - self.mask)))
        ends = draws >= 1 - 1 / self.span
        # Where a draw settles a token whatever came before it, the chain is known; between such places it stays as it was.
        settled = afresh | begins | ends | ~eligible
        last_settled = np.maximum.accumulate(np.where(settled, np.arange(len(draws)), 0))
        return (begins & eligible)[last_settled]


@register
@dataclass(frozen=True)
class MaskedLanguageModeling(Masking):
    """Position i predicts token i where that is hidden; every token that is not special may be."""

    name = "mlm"

    def eligible(self, pack: Pack) -> np.ndarray:
        return text_token_mask(self.vocabulary)[pack.tokens]


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
        eligible = text_token_mask(self.vocabulary)[pack.tokens]
        eligible[pack.edges[:-1]] = False
        return eligible


@lru_cache(maxsize=8)
def text_token_mask(vocabulary: Vocabulary) -> np.ndarray:
    """bool[vocabulary]: whether a token is text and no special token."""
    found = np.ones(vocabulary.size, dtype=bool)
    found[list(vocabulary.special_ids)] = False
    found.flags.writeable = False
    return found


@lru_cache(maxsize=8)
def text_token_ids(vocabulary: Vocabulary) -> np.ndarray:
    """int64[...]: the ids of the tokens that are text, ascending."""
    return np.flatnonzero(text_token_mask(vocabulary))
