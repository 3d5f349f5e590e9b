"""Objective plug-in: the model finds the tokens that were replaced by others.

ELECTRA's replaced token detection (Clark et al. 2020, arXiv 2003.10555), with random tokens in
place of a generator's.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.objectives import Attention, Objective, Targets, option, text_token_mask

ORIGINAL, REPLACED = range(2)


@dataclass(frozen=True)
class ReplacedTokenDetection(Objective):
    """Objective that replaces a share of the tokens by random ones.

    Special tokens are not replaced.
    """

    name = "replaced_tokens"
    attention = Attention.BIDIRECTIONAL
    classes = 2

    share: float = option(0.15, "share of the tokens to replace", above=0, high=1)

    def targets(self, pack, randomness):
        """Return a pack with random tokens, and the class of each token but special ones."""
        is_text = text_token_mask(self.vocabulary)
        text = np.flatnonzero(is_text)
        predict_at = np.flatnonzero(is_text[pack.tokens])
        is_drawn = randomness.bernoulli("replaced tokens: places", len(pack.tokens), self.share)
        draws = randomness.uniforms("replaced tokens: tokens", len(pack.tokens))
        replacements = text[(draws * len(text)).astype(np.int64)]
        inputs = np.where(is_drawn & is_text[pack.tokens], replacements, pack.tokens)
        # A token that is drawn for its own place is the original.
        labels = np.where(inputs == pack.tokens, ORIGINAL, REPLACED)
        return Targets(inputs, predict_at, labels[predict_at])
