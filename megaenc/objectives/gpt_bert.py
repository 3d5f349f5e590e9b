"""Hybrid of GPT-BERT: causal and bidirectional documents in one batch.

Bidirectional documents have hidden tokens.
"""

from dataclasses import dataclass

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives.base import Attention, Targets, option
from megaenc.objectives.masking import MaskedNextTokenPrediction
from megaenc.objectives.registry import register


@register
@dataclass(frozen=True)
class GPTBERT(MaskedNextTokenPrediction):
    """Objective `gpt_bert`: CLM in some documents, MNTP in all others.

    It follows Charpentier and Samuel 2024 (arXiv 2410.24159). Each document, or cut piece, is
    causal with probability `causal`: every token that is neither special nor the first is
    predicted, by the one before it. All others are as under `mntp`, with its options. A hidden
    token counts 1 / `mask` and the divisor is the number of tokens that can be predicted, so that a
    causal document counts as much as any other of its length, as in the paper.
    """

    name = "gpt_bert"
    attention = Attention.PREFIX

    causal: float = option(0.0625, "share of the documents that are causal", low=0, high=1)

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of one pack, with weights.

        A causal document has a prefix of 0 tokens and weights of 1, any other one a prefix of all
        its tokens and weights of 1 / `mask`. `count` is the number of tokens that can be predicted.
        """
        masked = super().targets(pack, randomness)
        lengths = np.diff(pack.cu_seqlens).astype(np.int64)
        document_is_causal = randomness.bernoulli("causal", len(lengths), self.causal)
        is_causal = np.repeat(document_is_causal, lengths)
        eligible = self.eligible(pack)
        is_hidden = np.zeros(len(pack.tokens), dtype=bool)
        is_hidden[masked.predict_at + self.shift] = True
        (predicted,) = np.where(is_causal, eligible, is_hidden).nonzero()
        weights = np.where(is_causal[predicted], 1.0, 1 / self.mask).astype(np.float32)
        inputs = np.where(is_causal, pack.tokens, masked.inputs)
        prefixes = np.where(document_is_causal, 0, lengths)
        return Targets(
            inputs,
            predicted - self.shift,
            pack.tokens[predicted],
            prefixes,
            weights,
            int(eligible.sum()),
        )
