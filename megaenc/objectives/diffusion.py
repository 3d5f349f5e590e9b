"""Masked diffusion: each document is hidden by a random ratio of its own.

Predictions are weighted by the inverse of the ratio.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.masking import check_mask_token, text_token_mask
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """Objective `diffusion`: masked diffusion, under bidirectional attention.

    It is that of LLaDA (Nie et al. 2025, arXiv 2502.09992) and MDLM (arXiv 2406.07524). A ratio t,
    uniform in [`low`, `high`), is drawn for each document or cut piece, and each of its tokens,
    except special ones, becomes the mask token with probability t. The loss is the sum of the
    cross-entropies of the hidden tokens over t, divided by the number of all tokens that are not
    special: with `low` near 0 and `high` 1, an upper bound of the negative log-likelihood per
    token. No ratio is 0, as its weight would be infinite.
    """

    name = "diffusion"
    attention = Attention.BIDIRECTIONAL

    low: float = option(0.001, "smallest ratio of hidden tokens", above=0, high=1)
    high: float = option(1.0, "largest ratio of hidden tokens", above=0, high=1)

    def __post_init__(self) -> None:
        """Check the options and that the vocabulary has a mask token.

        Raises:
            OptionError: An option has a wrong value.
            InputError: There is no mask token.
        """
        super().__post_init__()
        if self.low > self.high:
            raise OptionError(
                self.name,
                "low",
                f"found {self.low:g} with high={self.high:g}, expected at most as much",
            )
        check_mask_token(self.name, self.vocabulary)

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack.

        Only hidden tokens are predicted, at their own position, with 1 / (the document's ratio) as
        weight; `count` is the number of tokens that are not special.
        """
        lengths = np.diff(pack.cu_seqlens)
        ratios = self.low + (self.high - self.low) * randomness.uniforms("ratio", len(lengths))
        ratio_of_token = np.repeat(ratios, lengths)
        eligible = text_token_mask(self.vocabulary)[pack.tokens]
        (positions,) = (
            (randomness.uniforms("mask", len(pack.tokens)) < ratio_of_token) & eligible
        ).nonzero()
        inputs = pack.tokens.copy()
        inputs[positions] = self.vocabulary.mask_id
        weights = (1 / ratio_of_token[positions]).astype(np.float32)
        return Targets(
            inputs, positions, pack.tokens[positions], weights=weights, count=int(eligible.sum())
        )
