"""Micro-batches: packs in one row with their targets, made by each rank for itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaenc.data.packs import Packs, places
from megaenc.model.attention import Packing, to_device
from megaenc.objectives import Objective
from megaenc.randomness import SampleRandomness


@dataclass(frozen=True)
class MicroBatch:
    """S = packs x seq_length tokens in one row; N of its positions are predicted (N may be 0)."""

    tokens: Tensor  # int64[1, S]
    positions: Tensor  # int64[S], from 0 in each document
    packing: Packing
    predict_at: Tensor  # int64[N]
    labels: Tensor  # int64[N]


def micro_batch(packs: Packs, samples: Sequence[int], objective: Objective, seed: int, device: torch.device) -> MicroBatch:
    """The packs of `samples` side by side, with what `objective` makes of them under `seed`."""
    edges, tokens, predict_at, labels, prefixes = [0], [], [], [], []
    for sample in samples:
        pack = packs[sample]
        targets = objective.targets(pack, SampleRandomness(seed, pack.sample, pack.epoch))
        start = edges[-1]
        edges += (pack.edges[1:] + start).tolist()
        tokens.append(targets.inputs)
        predict_at.append(targets.predict_at + start)
        labels.append(targets.labels)
        if targets.prefixes is not None:
            prefixes.append(targets.prefixes)
    row, predicted, wanted = (np.concatenate(parts) for parts in (tokens, predict_at, labels))
    row, at, predicted, wanted = (
        to_device(torch.from_numpy(array), device) for array in (row, places(np.array(edges)), predicted, wanted)
    )
    packing = Packing.of(edges, objective.attention, device, np.concatenate(prefixes) if prefixes else None)
    return MicroBatch(row[None], at, packing, predicted, wanted)


@dataclass(frozen=True)
class Wanted:
    """What a micro-batch is made of: see `micro_batch`."""

    packs: Packs
    samples: tuple[int, ...]
    objective: Objective
    seed: int

    def made(self, device: torch.device) -> MicroBatch:
        """The micro-batch."""
        return micro_batch(self.packs, self.samples, self.objective, self.seed, device)


@dataclass(frozen=True)
class Share:
    """Which samples of a global batch this data-parallel rank reads."""

    global_batch_size: int
    micro_batch_size: int
    rank: int
    size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a rank runs for one global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.size)

    def samples(self, start: int) -> Iterator[range]:
        """The samples of each micro-batch of the global batch that begins with sample `start`."""
        start += self.rank * self.micro_batch_size
        for number in range(self.micro_batches):
            first = start + number * self.micro_batch_size * self.size
            yield range(first, first + self.micro_batch_size)
