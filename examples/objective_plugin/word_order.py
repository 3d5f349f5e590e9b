"""Objective plug-in: the model predicts the original tokens of shuffled windows.

The word structural objective of StructBERT (Wang et al. 2019, arXiv 1908.04577), which shuffles 5 %
of trigrams.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.objectives import Attention, Objective, Targets, option


@dataclass(frozen=True)
class WordOrder(Objective):
    """Objective that shuffles windows of `length` tokens with probability `share`.

    Windows have no special tokens.
    """

    name = "word_order"
    attention = Attention.BIDIRECTIONAL

    share: float = option(0.05, "share of the windows to shuffle", above=0, high=1)
    length: int = option(3, "tokens of a window", low=2)

    def targets(self, pack, randomness):
        """Return the shuffled inputs of a pack, with the original tokens as labels."""
        count = len(pack.tokens)
        position = pack.positions
        is_start = position % self.length == 0  # windows do not cross document boundaries
        window = np.cumsum(is_start) - 1
        text = ~np.isin(pack.tokens, self.vocabulary.special_ids)
        is_complete = np.bincount(window, weights=text) == self.length
        is_drawn = randomness.uniforms("word order: windows", len(is_complete)) < self.share
        chosen = (is_complete & is_drawn)[window]
        # Within each window
        shuffled = np.lexsort((randomness.uniforms("word order: tokens", count), window))
        inputs = np.where(chosen, pack.tokens[shuffled], pack.tokens)
        predict_at = np.flatnonzero(chosen)
        return Targets(inputs, predict_at, pack.tokens[predict_at])
