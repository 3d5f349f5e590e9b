"""Micro-batches: packs in one row with their targets, made by each rank for itself, on an accelerator in a thread."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from megaenc.data.packs import Packs, places
from megaenc.model.packing import Packing, to_device
from megaenc.objectives import Objective
from megaenc.randomness import SampleRandomness

Key = TypeVar("Key")
Made = TypeVar("Made")

DEPTH = 2  # micro-batches ahead: the next, and one more for when that takes longer than usual


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


class Ahead(Generic[Key, Made]):
    """Calls `make` in one thread: while one result is used, up to DEPTH of the next are made.

    What is asked for is what is given, whatever was begun: a wrong guess costs the time of making it. The thread waits for
    nobody, so that it ends with the interpreter, or when nobody has this object any more.
    """

    def __init__(self, make: Callable[[Key], Made], set_up: Callable[[], object] | None = None) -> None:
        """`set_up` is called in the thread before anything else."""
        self._make = make
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches", initializer=set_up)
        self._begun: deque[tuple[Key, Future]] = deque()

    def over(self, keys: Sequence[Key], following: Sequence[Key] = ()) -> Iterator[Made]:
        """Yield `make(key)` of each of `keys`, to be taken to the end; `following` is what the next call will ask for."""
        if [key for key, _ in self._begun] != list(keys[: len(self._begun)]):
            self._forget()
        left = deque([*keys, *following][len(self._begun) :])
        for _ in keys:
            while left and len(self._begun) < 1 + DEPTH:  # the one that is asked for now, and those ahead of it
                self._begun.append((left[0], self._pool.submit(self._make, left.popleft())))
            _, made = self._begun.popleft()
            yield made.result()

    def _forget(self) -> None:
        while self._begun:
            self._begun.popleft()[1].cancel()
