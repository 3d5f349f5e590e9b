"""Objectives that hide tokens and predict them, MLM and MNTP.

MLM predicts them at their own position, MNTP from the previous one.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, closest_match
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.registry import register
from megaenc.objectives.units.matching import check_collocations, find_unit_starts


@dataclass(frozen=True)
class Masking(Objective):
    """Base class of bidirectional objectives that hide and predict random tokens.

    Each eligible token is chosen with probability `mask`, singly, in spans or in units (`unit`:
    `token`, `word` or a file of collocations). A chosen token becomes the mask token, or with
    probability `random` a random text token, or stays with probability `keep`:
    `mask=0.15,random=0.1,keep=0.1` is BERT's 80/10/10 (Devlin et al. 2019, arXiv 1810.04805).

    With `span` = s, chosen tokens form runs of geometric length with mean s (as in SpanBERT, Joshi
    et al. 2020, arXiv 1907.10529): a stationary Markov chain over the tokens. The first token of a
    document and a token after an ineligible one are chosen with probability `mask`; a token after a
    chosen one with probability 1 - 1/s, after an unchosen one with mask / (s (1 - mask)). So every
    token is chosen with probability `mask`, and no run crosses an edge or a special token.

    With `unit=word`, all tokens of a word are chosen together, each word with probability `mask`
    (whole-word masking of BERT; Cui et al. 2021, arXiv 1906.08101). With the path of a file of
    `megaenc objective collocations`, all tokens of each collocation in it are, from the left the
    longest at each place, and all other tokens singly (PMI-Masking, Levine et al. 2021, arXiv
    2010.01825). Both exclude `span`. No unit crosses an edge or an ineligible token. `random` and
    `keep` are drawn for each token, as in BERT's code, so that a chosen unit may become part mask
    tokens, part random tokens.
    """

    attention = Attention.BIDIRECTIONAL
    _requires_span = False  # whether `span` cannot be 0

    mask: float = option(0.4, "share of the tokens to predict", above=0, high=1)
    random: float = option(0.0, "share of these that become a random token", low=0, high=1)
    keep: float = option(0.0, "share of these that stay unchanged", low=0, high=1)
    span: float = option(0.0, "mean length of hidden runs, 0 for independent tokens", low=0)
    unit: str = option("token", "tokens hidden together: token, word, or a file of collocations")

    def __post_init__(self) -> None:
        """Check the options and that the vocabulary has a mask token.

        Raises:
            OptionError: An option has a wrong value.
            InputError: There is no mask token.
        """
        super().__post_init__()
        if self.random + self.keep > 1 + 1e-9:
            raise OptionError(
                self.name,
                "keep",
                f"found random + keep = {self.random + self.keep:g}, expected at most 1",
            )
        if self.span and self.span * (1 - self.mask) < 1 - 1e-9:
            # Independent tokens have this mean run length; shorter runs are impossible here.
            expected = "0: every token is hidden"
            if self.mask < 1:
                shortest = math.ceil(1000 / (1 - self.mask) - 1e-6) / 1000
                expected = f"{'' if self._requires_span else '0 or '}from {shortest:g} up"
            raise OptionError(
                self.name,
                "span",
                f"found {self.span:g} with mask={self.mask:g}, expected {expected}",
            )
        check_mask_token(self.name, self.vocabulary)
        self._check_unit()

    def _check_unit(self) -> None:
        """Check `unit` and read its file.

        Raises:
            OptionError: It is no unit that can be used.
        """
        if self.unit != "token" and self.span:
            raise OptionError(
                self.name,
                "unit",
                f"found {self.unit} with span={self.span:g}, expected token"
                + ("" if self._requires_span else ", or no span"),
            )
        if self.unit == "word":
            if self.vocabulary.fingerprint and not self.vocabulary.word_codes:
                raise OptionError(
                    self.name,
                    "unit",
                    "found word, but the tokens of this tokenizer do not show where words begin",
                )
        elif self.unit != "token":
            near = closest_match(self.unit, ("token", "word"))
            if near and not Path(self.unit).exists():
                raise OptionError(
                    self.name,
                    "unit",
                    f"found {self.unit}, expected token, word or a file; did you mean `{near}`?",
                )
            try:
                check_collocations(self.unit, self.vocabulary)
            except InputError as error:
                raise OptionError(self.name, "unit", str(error)) from None

    def files(self) -> tuple[Path, ...]:
        """Return the file that the option `unit` names, or () if it is `token` or `word`."""
        return () if self.unit in ("token", "word") else (Path(self.unit),)

    @abstractmethod
    def eligible(self, pack: Pack) -> np.ndarray:
        """Return which of the pack's T tokens may be hidden and predicted, bool[T].

        Each objective implements it: `mlm` leaves out special tokens, `mntp` also the first token
        of each document.
        """

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack, without weights.

        Only drawn tokens, which are hidden, random or kept in the input, are predicted, `shift`
        positions earlier (`Objective.shift`).
        """
        (positions,) = self._choose_tokens(pack, randomness).nonzero()
        labels = pack.tokens[positions]
        hidden = self.vocabulary.mask_id
        if self.random or self.keep:
            fate = randomness.uniforms("fate", len(pack.tokens))[positions]
            draws = randomness.uniforms("random token", len(pack.tokens))[positions]
            replacements = text_token_ids(self.vocabulary)
            random_tokens = replacements[(draws * len(replacements)).astype(np.int64)]
            hidden = np.where(
                fate < self.random,
                random_tokens,
                np.where(fate < self.random + self.keep, labels, hidden),
            )
        inputs = pack.tokens.copy()
        inputs[positions] = hidden
        return Targets(inputs, positions - self.shift, labels)

    def _choose_tokens(self, pack: Pack, randomness: SampleRandomness) -> np.ndarray:
        """Draw the tokens to hide and predict, bool[T]."""
        # One draw per position, eligible or not, so that draws do not depend on the tokens.
        eligible = self.eligible(pack)
        if self.unit != "token":
            starts = find_unit_starts(self.unit, pack, eligible, self.vocabulary)
            first = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
            return randomness.bernoulli("mask", len(starts), self.mask)[first] & eligible
        if not self.span:
            return randomness.bernoulli("mask", len(pack.tokens), self.mask) & eligible
        draws = randomness.uniforms("mask", len(pack.tokens))
        is_start = np.ones(len(draws), dtype=bool)
        is_start[1:] = ~eligible[:-1]
        is_start[pack.cu_seqlens[:-1]] = True
        starts_run = draws < np.where(
            is_start, self.mask, self.mask / (self.span * (1 - self.mask))
        )
        ends_run = draws >= 1 - 1 / self.span
        # A settled position does not depend on the previous one; all others repeat the last settled
        # state.
        settled = is_start | starts_run | ends_run | ~eligible
        last_settled = np.maximum.accumulate(np.where(settled, np.arange(len(draws)), 0))
        return (starts_run & eligible)[last_settled]


@register
@dataclass(frozen=True)
class MaskedLanguageModeling(Masking):
    """Objective `mlm`: random tokens are hidden and predicted at their own position.

    Special tokens are never chosen. The options are those of `Masking`: ratio, BERT's random and
    kept tokens, spans, and units such as words.
    """

    name = "mlm"

    def eligible(self, pack: Pack) -> np.ndarray:
        """Return which tokens of the pack are not special, bool[T]."""
        return text_token_mask(self.vocabulary)[pack.tokens]


@register
@dataclass(frozen=True)
class MaskedNextTokenPrediction(Masking):
    """Objective `mntp`: hidden tokens are predicted at the position before them.

    It follows LLM2Vec (arXiv 2404.05961). The options are those of `Masking`. The first token of a
    document, or of a cut piece, has no previous position: it is never chosen and ends spans as a
    special token does.
    """

    name = "mntp"
    shift = 1

    def eligible(self, pack: Pack) -> np.ndarray:
        """Return which tokens are neither special nor the first of a document, bool[T].

        A cut piece counts as a document.
        """
        eligible = text_token_mask(self.vocabulary)[pack.tokens]
        eligible[pack.cu_seqlens[:-1]] = False
        return eligible


def check_mask_token(objective: str, vocabulary: Vocabulary) -> None:
    """Check that a vocabulary has the mask token that an objective needs.

    Args:
        objective: Name of the objective or flag, with which the error begins.

    Raises:
        InputError: It has none.
    """
    if vocabulary.mask_id is None:
        raise InputError(
            f"{objective}: the tokenizer ({vocabulary.fingerprint[:12]}) has no mask token, "
            "expected one; "
            "train one with `megaenc tokenizer`"
        )


@lru_cache(maxsize=8)
def text_token_mask(vocabulary: Vocabulary) -> np.ndarray:
    """Return which tokens are not special, bool[vocabulary size] by token id.

    The array is read-only.
    """
    is_text = np.ones(vocabulary.size, dtype=bool)
    is_text[list(vocabulary.special_ids)] = False
    is_text.flags.writeable = False
    return is_text


@lru_cache(maxsize=8)
def text_token_ids(vocabulary: Vocabulary) -> np.ndarray:
    """Return the ids of all tokens that are not special, int64, ascending.

    The array is shared by all callers and must not be changed.
    """
    return np.flatnonzero(text_token_mask(vocabulary))
