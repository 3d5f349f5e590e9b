"""Micro-batches: packs in one row with their targets, made by each rank for itself, on an accelerator in a thread."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import PackedDataset, position_ids
from megaenc.model.packed_sequences import PackedSequences, copy_to_device
from megaenc.objectives import Objective

DEPTH = 2  # micro-batches ahead: the next, and one more for when that takes longer than usual


@dataclass(frozen=True)
class MicroBatch:
    """S = packs x seq_length tokens in one row; N of its positions are predicted (N may be 0)."""

    tokens: Tensor  # int64[1, S]
    positions: Tensor  # int64[S], from 0 in each document
    packing: PackedSequences
    predict_at: Tensor  # int64[N]
    labels: Tensor  # int64[N]


def build_micro_batch(
    packs: PackedDataset, samples: Sequence[int], objective: Objective, seed: int, device: torch.device
) -> MicroBatch:
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
        copy_to_device(torch.from_numpy(array), device) for array in (row, position_ids(np.array(edges)), predicted, wanted)
    )
    packing = PackedSequences.from_edges(edges, objective.attention, device, np.concatenate(prefixes) if prefixes else None)
    return MicroBatch(row[None], at, packing, predicted, wanted)


class MicroBatchSpec(NamedTuple):
    """What `build_micro_batch` makes a micro-batch of."""

    packs: PackedDataset
    samples: tuple[int, ...]
    objective: Objective
    seed: int

    def build(self, device: torch.device) -> MicroBatch:
        """Make it."""
        return build_micro_batch(*self, device)


@dataclass(frozen=True)
class DataParallelSampler:
    """The samples of a global batch that one data-parallel rank reads."""

    global_batch_size: int
    micro_batch_size: int
    rank: int
    size: int

    def samples(self, start: int) -> Iterator[range]:
        """Yield the samples of each micro-batch of the global batch that begins with sample `start`."""
        micro = self.micro_batch_size
        for first in range(start + self.rank * micro, start + self.global_batch_size, micro * self.size):
            yield range(first, first + micro)


class Prefetcher:
    """Calls `make` in one thread: while one result is used, up to DEPTH of the next are made.

    A wrong guess of what is asked for next costs the time of making it, no more. The thread ends with the interpreter, or when
    nobody has this object any more.
    """

    def __init__(self, make: Callable[[Any], Any], set_up: Callable[[], object] | None = None) -> None:
        """`set_up` is called in the thread before anything else."""
        self._make = make
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches", initializer=set_up)
        self._begun: deque[tuple[Any, Future]] = deque()

    def iterate(self, keys: Sequence[Any], following: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield `make(key)` of each of `keys`, to be taken to the end; `following` is what the next call will ask for."""
        if [key for key, _ in self._begun] != list(keys[: len(self._begun)]):
            while self._begun:
                self._begun.popleft()[1].cancel()
        left = deque([*keys, *following][len(self._begun) :])
        for _ in keys:
            while left and len(self._begun) < 1 + DEPTH:  # the one that is asked for now, and those ahead of it
                self._begun.append((left[0], self._pool.submit(self._make, left.popleft())))
            _, made = self._begun.popleft()
            yield made.result()
