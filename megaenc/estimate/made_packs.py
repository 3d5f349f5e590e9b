"""Packs of random tokens, cut as a run's own would be: what measurements read."""

from dataclasses import dataclass

import numpy as np

from megaenc.data.packs import SHORTEST_CHUNK, Pack
from megaenc.training.settings import PretrainSettings


@dataclass(frozen=True)
class MadePacks:
    """Packs of random tokens, whose documents have lengths drawn from `lengths`, or are the pack, or its two chunks."""

    settings: PretrainSettings
    lengths: tuple[int, ...]
    vocab_size: int

    @property
    def seq_length(self) -> int:
        """Tokens of a pack."""
        return self.settings.data.seq_length

    def __getitem__(self, sample: int) -> Pack:
        rng, length = np.random.default_rng(sample), self.seq_length
        tokens = rng.integers(2, self.vocab_size, length)
        if self.settings.data.packing == "random-length":
            cuts = [int(rng.integers(SHORTEST_CHUNK, length - SHORTEST_CHUNK + 1))]
        elif self.lengths:
            weights = np.array(self.lengths, dtype=np.float64)
            first = rng.choice(self.lengths, p=weights / weights.sum())  # a pack begins inside long documents more often
            cuts = [int(rng.integers(1, first + 1))]
            while cuts[-1] < length:
                cuts.append(cuts[-1] + int(rng.choice(self.lengths)))
            cuts = [cut for cut in cuts if cut < length]
        else:
            cuts = []
        return Pack(sample, 0, tokens, np.array([0, *cuts, length], dtype=np.int32))
