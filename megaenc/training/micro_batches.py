"""Micro-batches: building them from packs, their distribution over data-parallel ranks, and prefetching."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.packed_dataset import PackedDataset, position_ids
from megaenc.model.packed_sequences import PackedSequences, copy_to_device
from megaenc.objectives import Objective, SoftLabels

DEPTH = 2  # prefetched micro-batches: the next, and one more in case it takes longer than usual
FIRST_RANGE = 128  # positions in the first range of TokenGroups; the later ranges double


@dataclass(frozen=True)
class TokenGroups:
    """Groups of predicted tokens whose losses a validation also reports: by position in the document, and by corpus.

    A token is in one range of positions (0-127, 128-255, 256-511, ...) and in one corpus. Positions count from the document's
    start in the pack.
    """

    starts: tuple[int, ...]
    """First position of each range."""
    corpora: tuple[str, ...]

    @classmethod
    def from_packs(cls, packs: BlendedDataset) -> "TokenGroups":
        """Return the groups that occur in `packs`: the ranges up to the length of a pack, and the corpora of the blend."""
        starts, start = [0], FIRST_RANGE
        while start < packs.seq_length:
            starts.append(start)
            start *= 2
        return cls(tuple(starts), tuple(part.stream.corpus.prefix for part in packs.datasets))

    def __len__(self) -> int:
        return len(self.starts) + len(self.corpora)

    def find_members(self, corpus: int, positions: np.ndarray) -> np.ndarray:
        """Return bool[N, G], whether each token, at `positions` (int[N]) in documents of `corpus`, is in each group."""
        ranges = np.searchsorted(self.starts, positions, side="right") - 1
        numbers = np.stack([ranges, np.full_like(ranges, len(self.starts) + corpus)], axis=1)
        return (numbers[:, :, None] == np.arange(len(self))).any(axis=1)

    def mean_losses(self, sums: np.ndarray) -> dict[str, dict[str, float]]:
        """Return `by_position` and `by_corpus`, mean losses by group, of `sums`, float64[2, G] of losses and counts.

        Groups without tokens are left out, and so is a division into fewer than two groups.
        """
        names = [f"{start}-{max(2 * start, FIRST_RANGE) - 1}" for start in self.starts]
        scored = [
            (name, loss / count) if count else None for name, loss, count in zip((*names, *self.corpora), *sums, strict=True)
        ]
        ranges, corpora = (dict(filter(None, part)) for part in (scored[: len(names)], scored[len(names) :]))
        return {kind: losses for kind, losses in (("by_position", ranges), ("by_corpus", corpora)) if len(losses) > 1}


@dataclass(frozen=True)
class MicroBatch:
    """Packs in one row as tensors: input tokens, positions, document edges (`packing`), predicted positions, their labels.

    The row has S = packs x seq_length tokens; N of its positions are predicted (N may be 0).
    """

    tokens: Tensor  # int64[1, S]
    positions: Tensor  # int64[S], from 0 in each document
    packing: PackedSequences
    predict_at: Tensor  # int64[N]
    labels: Tensor  # int64[N]
    loss_count: int  # divisor of the summed loss, together with those of the other micro-batches
    weights: Tensor | None = None  # float32[N], factors of the losses
    soft_labels: tuple[Tensor, Tensor] | None = None  # int64[N, K] ids, float32[N, K] probabilities of label distributions
    members: Tensor | None = None  # bool[N, G], whether each predicted token is in each of the TokenGroups


def build_micro_batch(
    packs: PackedDataset,
    samples: Sequence[int],
    objective: Objective,
    seed: int,
    device: torch.device,
    groups: TokenGroups | None = None,
    weight: int = 1,
) -> MicroBatch:
    """Return a MicroBatch on `device`: packs `samples` end to end in a row, with the targets of `objective` under `seed`.

    `groups`: those of a validation, for packs of a BlendedDataset. `weight`: factor of the losses and of their divisor.
    """
    edges, tokens, predict_at, labels, prefixes, weights, members, loss_count = [0], [], [], [], [], [], [], 0
    soft_labels: list[SoftLabels] = []
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
        if targets.weights is not None:
            weights.append(weight * targets.weights)
        elif weight != 1:
            weights.append(np.full(len(targets.labels), weight, dtype=np.float32))
        if targets.soft_labels is not None:
            soft_labels.append(targets.soft_labels)
        loss_count += weight * targets.loss_count
        if groups is not None:
            predicted_positions = pack.positions[targets.predict_at + objective.shift]
            members.append(groups.find_members(packs.corpus_of_sample(sample), predicted_positions))
    arrays = [np.concatenate(tokens), position_ids(np.array(edges)), np.concatenate(predict_at), np.concatenate(labels)]
    row, positions, predicted, predicted_labels = (copy_to_device(torch.from_numpy(array), device) for array in arrays)
    packing = PackedSequences.from_edges(edges, objective.attention, device, np.concatenate(prefixes) if prefixes else None)
    memberships = copy_to_device(torch.from_numpy(np.concatenate(members)), device) if members else None
    loss_weights = copy_to_device(torch.from_numpy(np.concatenate(weights)), device) if weights else None
    soft = None
    if soft_labels:
        soft = tuple(copy_to_device(torch.from_numpy(np.concatenate(part)), device) for part in zip(*soft_labels, strict=True))
    return MicroBatch(row[None], positions, packing, predicted, predicted_labels, loss_count, loss_weights, soft, memberships)


class MicroBatchSpec(NamedTuple):
    """Description of a micro-batch, with the arguments of `build_micro_batch`, from which `build` makes it on a device."""

    packs: PackedDataset
    samples: tuple[int, ...]
    objective: Objective
    seed: int
    groups: TokenGroups | None = None
    weight: int = 1

    def build(self, device: torch.device) -> MicroBatch:
        """Read the described packs, apply the objective to them, and return the MicroBatch with its tensors on `device`."""
        return build_micro_batch(self.packs, self.samples, self.objective, self.seed, device, self.groups, self.weight)


@dataclass(frozen=True)
class DataParallelSampler:
    """Assignment of a batch's samples to data-parallel rank `rank` of `size`; micro-batches go to the ranks in turn."""

    global_batch_size: int
    micro_batch_size: int
    rank: int
    size: int

    def samples(self, start: int) -> Iterator[range]:
        """Yield a range of sample numbers for each micro-batch of this rank; `start`: first sample of the global batch."""
        micro = self.micro_batch_size
        for first in range(start + self.rank * micro, start + self.global_batch_size, micro * self.size):
            yield range(first, first + micro)


class Prefetcher:
    """Background thread that computes `build(key)` in advance, for up to DEPTH (2) keys beyond the one in use.

    A wrong guess of the next keys only costs the time of building them. The thread ends with the interpreter or when this object
    is deleted.
    """

    def __init__(self, build: Callable[[Any], Any], set_up: Callable[[], object] | None = None) -> None:
        """Start the thread, which calls `set_up` first."""
        self._build = build
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches", initializer=set_up)
        self._pending: deque[tuple[Any, Future]] = deque()

    def iterate(self, keys: Sequence[Any], following: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield `build(key)` for each of `keys` in order, and begin to build `following`, the likely keys of the next call.

        The iterator must be consumed completely.
        """
        if [key for key, _ in self._pending] != list(keys[: len(self._pending)]):
            while self._pending:
                self._pending.popleft()[1].cancel()
        remaining = deque([*keys, *following][len(self._pending) :])
        for _ in keys:
            while remaining and len(self._pending) < 1 + DEPTH:
                self._pending.append((remaining[0], self._pool.submit(self._build, remaining.popleft())))
            _, future = self._pending.popleft()
            yield future.result()
