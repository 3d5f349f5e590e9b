"""Causal language modeling: every token predicts the next one of its document."""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Objective, Targets
from megaenc.objectives.masking import text_token_mask
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class CausalLanguageModeling(Objective):
    """Objective `clm`: under causal attention each token predicts the next one.

    The last token of a document, or of its piece if packs cut it, predicts none. A next token that
    is special is not predicted, except `Vocabulary.eos_id` wherever it stands, from which the model
    learns where a text ends.
    """

    name = "clm"
    attention = Attention.CAUSAL
    shift = 1

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack, whose inputs are unchanged.

        `inputs` is the pack's own array. `labels` has only the predicted tokens: text tokens and
        `eos_id`, never the first token of a document. `predict_at` has the position before each.
        `weights` and `count` are None; `randomness` is not used.
        """
        is_predicted = text_token_mask(self.vocabulary)[pack.tokens]
        if self.vocabulary.eos_id is not None:
            is_predicted |= pack.tokens == self.vocabulary.eos_id
        is_predicted[pack.cu_seqlens[:-1]] = False
        predicted = np.flatnonzero(is_predicted)
        return Targets(pack.tokens, predicted - self.shift, pack.tokens[predicted])
