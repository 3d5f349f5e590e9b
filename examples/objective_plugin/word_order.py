"""An objective from outside: tokens of short windows are shuffled, and each place predicts the token that stood there.

The word structural objective of StructBERT (Wang et al. 2019, arXiv 1908.04577), which shuffles 5 % of the trigrams.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.objectives import Attention, Objective, Targets, option


@dataclass(frozen=True)
class WordOrder(Objective):
    """Each document is cut into windows of `length` tokens; one without a special token is shuffled with probability `share`."""

    name = "word_order"
    attention = Attention.BIDIRECTIONAL

    share: float = option(0.05, "share of the windows to shuffle", above=0, high=1)
    length: int = option(3, "tokens of a window", low=2)

    def targets(self, pack, randomness):
        count, place = len(pack.tokens), pack.positions
        begins = place % self.length == 0  # a window never crosses from one document to the next
        window = np.cumsum(begins) - 1
        text = ~np.isin(pack.tokens, self.vocabulary.special_ids)
        whole = np.bincount(window, weights=text) == self.length
        drawn = randomness.uniforms("word order: windows", len(whole)) < self.share
        chosen = (whole & drawn)[window]
        shuffled = np.lexsort((randomness.uniforms("word order: tokens", count), window))  # inside each window
        inputs = np.where(chosen, pack.tokens[shuffled], pack.tokens)
        predict_at = np.flatnonzero(chosen)
        return Targets(inputs, predict_at, pack.tokens[predict_at])
