"""Pseudo-perplexity: a measure to compare bidirectional models.

The models may have different objectives and mask ratios.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.masking import check_mask_token, text_token_mask


@dataclass(frozen=True)
class PseudoPerplexity(Objective):
    """Objective of validation only: each token is hidden and predicted once.

    Tokens are spread over `passes` forward passes, its `parts`, with bidirectional attention;
    special ones are left out. Their summed loss over their number of predictions is the
    pseudo-log-likelihood loss of Salazar et al. 2020 (arXiv 1910.14659) with several tokens hidden
    at once, and `compute_perplexity` of it the pseudo-perplexity. The tokens of a document, or of a
    cut piece, are spread evenly in random order; with a pass for each, one is hidden at a time.

    `passes`, 1 or more, must be given; `part` is the pass, from 0, that `targets` makes. `ahead`,
    by default 0, is the `shift` of the model's training objective. The first `ahead` tokens of a
    document are neither hidden nor predicted. A vocabulary without mask token is an InputError.
    """

    name = "pseudo_perplexity"
    attention = Attention.BIDIRECTIONAL

    passes: int = option(0, "forward passes, over which the tokens are spread", low=1)
    part: int = option(0, "number of the pass, from 0", low=0)
    ahead: int = option(0, "distance from a prediction to its token", low=0)

    def __post_init__(self) -> None:
        """Check the options and that the vocabulary has a mask token.

        Raises:
            OptionError: An option has a wrong value.
            InputError: There is no mask token.
        """
        super().__post_init__()
        if self.part >= self.passes:
            raise OptionError(
                self.name, "part", f"found {self.part}, expected less than passes={self.passes}"
            )
        check_mask_token(self.name, self.vocabulary)

    @property
    def shift(self) -> int:
        """Return `ahead`, by how many positions a prediction precedes its token.

        In other objectives it is a constant of the class.
        """
        return self.ahead

    def describe(self, every: bool = False, end: Objective | None = None) -> str:
        """Return the key in validation.jsonl, `pseudo_perplexity(passes=8)`.

        With a shift it is `pseudo_perplexity(passes=8,shift=1)`. `every` and `end` have no effect:
        it always has the passes, and no schedule changes them.
        """
        return f"{self.name}(passes={self.passes}{f',shift={self.shift}' if self.shift else ''})"

    @property
    def parts(self) -> tuple["PseudoPerplexity", ...]:
        """Return the objective of each of the `passes`, in order.

        Together they predict every token once. Special tokens and the first `ahead` of each
        document are left out. `part` of this objective is not read.
        """
        return tuple(dataclasses.replace(self, part=part) for part in range(self.passes))

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack in pass `part`.

        The tokens of this pass are hidden, and predicted from `shift` positions earlier. They are
        drawn from `randomness`, which must be equal in all passes. Special tokens, and the first
        `shift` tokens of each document or cut piece, are in no pass.
        """
        is_text = text_token_mask(self.vocabulary)[pack.tokens]
        is_hidden = (
            is_text
            & (self._assign_parts(pack, is_text, randomness) == self.part)
            & (pack.positions >= self.shift)
        )
        (positions,) = is_hidden.nonzero()
        inputs = pack.tokens.copy()
        inputs[positions] = self.vocabulary.mask_id
        return Targets(inputs, positions - self.shift, pack.tokens[positions])

    def _assign_parts(
        self, pack: Pack, is_text: np.ndarray, randomness: SampleRandomness
    ) -> np.ndarray:
        """Return the pass of each token, int64[T]; any for those that are not `is_text`.

        It does not depend on `shift`. A document's tokens, in random order, go to consecutive
        passes from a random one on, so that their numbers in two passes differ by one at most.
        """
        lengths = np.diff(pack.cu_seqlens)
        document = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort((randomness.uniforms("order", len(pack.tokens)), ~is_text, document))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = pack.positions  # the sorted tokens are still document by document
        first_part = (randomness.uniforms("first part", len(lengths)) * self.passes).astype(
            np.int64
        )
        return (rank + first_part[document]) % self.passes


def pseudo_perplexity_shifts(objectives: Iterable[Objective]) -> list[int]:
    """Return the shifts of the pseudo-perplexities of a trained model, ascending.

    A shift is the distance from a prediction to its token. They are 0 and those of the training
    `objectives` that are not causal, without duplicates.
    """
    return sorted(
        {
            0,
            *(
                objective.shift
                for objective in objectives
                if objective.attention != Attention.CAUSAL
            ),
        }
    )


def build_pseudo_perplexities(
    objectives: Iterable[Objective], vocabulary: Vocabulary, passes: int
) -> dict[str, PseudoPerplexity]:
    """Return the pseudo-perplexity of each of the `pseudo_perplexity_shifts` by text.

    The texts are those of `PseudoPerplexity.describe`, such as `pseudo_perplexity(passes=8)`.

    Args:
        objectives: Training objectives of the model, which decide on the shifts.
        passes: Forward passes of each; 0 for an empty result.

    Raises:
        InputError: `passes` is negative, or it is not 0 and the vocabulary has no mask token.
    """
    if not passes:
        return {}
    check_mask_token(f"--eval-pseudo-perplexity-passes {passes}", vocabulary)
    shifts = pseudo_perplexity_shifts(objectives)
    measures = [PseudoPerplexity(vocabulary, passes=passes, ahead=shift) for shift in shifts]
    return {measure.describe(): measure for measure in measures}


def compute_perplexity(loss: float) -> float:
    """Return exp(loss), the perplexity of a mean loss in nats, inf if beyond float64."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
