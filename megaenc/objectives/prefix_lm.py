"""Prefix language modeling: a prefix of each document is bidirectional.

The tokens after it are predicted causally.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.masking import text_token_mask
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class PrefixLanguageModeling(Objective):
    """Objective `prefix_lm`: tokens after a random prefix are predicted causally.

    Tokens of the prefix see each other. For a document, or a cut piece, of L tokens, the prefix has
    floor(u L) tokens, at most L - 1, with u drawn uniformly from [low, high), by default [0, 1).
    The token before each of the later ones predicts it (T5, arXiv 1910.10683). The first token and
    special ones are never predicted.
    """

    name = "prefix_lm"
    attention = Attention.PREFIX
    shift = 1

    low: float = option(0.0, "minimum share of a document that is its prefix", low=0, high=1)
    high: float = option(1.0, "maximum share of a document that is its prefix", low=0, high=1)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionError: An option has a wrong value.
        """
        super().__post_init__()
        if self.low > self.high:
            raise OptionError(
                self.name, "low", f"found {self.low:g}, expected at most high={self.high:g}"
            )

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack, with a random prefix per document.

        Its length is in `Targets.prefixes`. Text tokens after the prefix, never the first of a
        document, are predicted at the position before them. `inputs` is the pack's own array. A cut
        piece of a document counts as one.
        """
        lengths = np.diff(pack.cu_seqlens).astype(np.int64)
        fractions = self.low + (self.high - self.low) * randomness.uniforms("prefix", len(lengths))
        prefixes = np.minimum((fractions * lengths).astype(np.int64), lengths - 1)
        follows = pack.positions >= np.repeat(np.maximum(prefixes, 1), lengths)
        predicted = np.flatnonzero(follows & text_token_mask(self.vocabulary)[pack.tokens])
        return Targets(pack.tokens, predicted - 1, pack.tokens[predicted], prefixes)
