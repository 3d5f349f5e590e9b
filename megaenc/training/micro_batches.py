"""Micro-batches: building, distribution over data-parallel ranks, prefetching."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.packed_dataset import PackedDataset, position_ids
from megaenc.model.linear_cross_entropy import Predictions
from megaenc.model.packed_sequences import PackedSequences, copy_to_device
from megaenc.objectives import Attention, Objective

DEPTH = 2  # prefetched micro-batches: the next, and one more in case it takes longer than usual
FIRST_RANGE = 128  # positions in the first range of TokenGroups; the later ranges double


@dataclass(frozen=True)
class TokenGroups:
    """Groups of predicted tokens whose losses a validation also reports.

    `from_packs` makes it. A token is in one range of positions (0-127, 128-255, 256-511, ...) and
    in one corpus; the corpora of a pattern in --data-path count as one, named by the pattern. The
    position is that of the predicted token itself, from the document's start in the pack. `starts`
    has the first position of each range, `corpora` the names of the corpora. Groups are indexed
    from 0, ranges before corpora; `len` is their number.
    """

    starts: tuple[int, ...]
    """First position of each range."""
    corpora: tuple[str, ...]

    @classmethod
    def from_packs(cls, packs: BlendedDataset) -> "TokenGroups":
        """Return the groups that can occur in `packs`.

        These are the ranges up to the length of a pack, and all corpora of the blend.
        """
        starts = [0]
        start = FIRST_RANGE
        while start < packs.seq_length:
            starts.append(start)
            start *= 2
        return cls(tuple(starts), tuple(dict.fromkeys(packs.sources)))

    def __len__(self) -> int:
        return len(self.starts) + len(self.corpora)

    def find_ranges(self, positions: np.ndarray) -> np.ndarray:
        """Return whether each token is in each range of positions, bool[N, len(starts)].

        Each token is in exactly one, as the last range has no end.

        Args:
            positions: Positions of the tokens in their documents, from 0, int[N].
        """
        ranges = np.searchsorted(self.starts, positions, side="right") - 1
        return ranges[:, None] == np.arange(len(self.starts))

    def find_corpus(self, corpus: str) -> int:
        """Return the group index of `corpus`, len(starts) or above.

        Raises:
            ValueError: `corpora` lacks it.
        """
        return len(self.starts) + self.corpora.index(corpus)

    def mean_losses(self, sums: np.ndarray) -> dict[str, dict[str, float]]:
        """Return the mean loss of each group, as nested dictionaries.

        Args:
            sums: Sums of the losses, and numbers of tokens or sums of their weights, float64[2,
                len(self)].

        Returns:
            Such as {"by_position": {"0-127": 2.5, "128-255": 2.25}, "by_corpus": {...}}. Groups
            without tokens are left out, and so is an entry with fewer than two left.
        """
        ranges = [f"{start}-{max(2 * start, FIRST_RANGE) - 1}" for start in self.starts]
        range_count = len(ranges)
        losses = {}
        for kind, names, part in (
            ("by_position", ranges, sums[:, :range_count]),
            ("by_corpus", self.corpora, sums[:, range_count:]),
        ):
            scored = zip(names, *part, strict=True)
            means = {name: loss / count for name, loss, count in scored if count}
            if len(means) > 1:
                losses[kind] = means
        return losses


@dataclass(frozen=True)
class MicroBatch:
    """Packs end to end in one row of S tokens, as tensors on one device.

    `build_micro_batch` makes it. `tokens` is int64[1, S], `positions` int64[S], from 0 in each
    document; `packing` (PackedSequences) holds the documents' boundaries, `predictions`
    (Predictions) the N predicted positions and their labels. The last `fill_documents` documents
    only fill the row. `loss_count` is this row's part of the divisor of the loss. With `groups`
    (TokenGroups), `in_range`, bool[N, len(groups.starts)], tells the range of each predicted token,
    and `corpus_spans` has the group and the number of predicted tokens of each pack, in order;
    without groups they are None and ().
    """

    tokens: Tensor
    """Input tokens, int64[1, S]."""
    positions: Tensor
    """Positions from 0 in each document, int64[S]."""
    packing: PackedSequences
    """Document edges."""
    predictions: Predictions
    loss_count: int
    """Divisor of the summed loss, together with those of the other micro-batches."""
    groups: TokenGroups | None = None
    """Groups whose losses are also reported."""
    in_range: Tensor | None = None
    """Membership of each predicted token in each range of positions of `groups`, bool[N, R]."""
    corpus_spans: tuple[tuple[int, int], ...] = ()
    """Group of each pack's corpus, and its number of predicted tokens."""
    fill_documents: int = 0
    """Number of the row's last documents whose tokens count nothing."""

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (start, prefix end, stop) of each document, as token indices of the row.

        The prefix end is `stop` under bidirectional and `start` under causal attention. Documents
        that only fill the row are left out. The device is not synchronized.
        """
        return self.packing.spans()[: len(self.packing.documents) - self.fill_documents]


def build_micro_batch(
    packs: PackedDataset,
    samples: Sequence[int],
    objective: Objective,
    seed: int,
    device: torch.device,
    groups: TokenGroups | None = None,
    weight: int = 1,
    length: int = 0,
    dropout: bool = False,
) -> MicroBatch:
    """Read packs, and return them end to end in a row, with targets of an objective.

    Args:
        packs: Data set of packs of one length.
        samples: Indices of the packs in `packs`; may be empty if `length` is given.
        objective: Objective whose targets are drawn under `seed`, for each pack independently.
        device: Device of the tensors.
        groups: Groups of predicted tokens, for packs of a BlendedDataset; None in training.
        weight: Factor of the losses and of their divisor, `loss_count`.
        length: Least number of tokens of the row; zeros, as extra documents, fill a shorter one.
        dropout: Whether the row gets random numbers for dropout, drawn under `seed`.
    """
    read = [packs[sample] for sample in samples]
    randomness = [SampleRandomness(seed, pack.sample, pack.epoch) for pack in read]
    targets = list(map(objective.targets, read, randomness))
    cu_seqlens = [0]
    predict_at = [_NOTHING]
    for pack, target in zip(read, targets, strict=True):
        start = cu_seqlens[-1]
        cu_seqlens += (pack.cu_seqlens[1:] + start).tolist()
        predict_at.append(target.predict_at + start)

    # Documents of zeros fill the row.
    fill = np.zeros(max(0, length - cu_seqlens[-1]), dtype=np.int64)
    fill_documents = 0
    while cu_seqlens[-1] < length:
        cu_seqlens.append(min(cu_seqlens[-1] + packs.seq_length, length))
        fill_documents += 1

    prefixes = [target.prefixes for target in targets if target.prefixes is not None]
    if objective.attention == Attention.PREFIX:
        prefixes.append(np.zeros(fill_documents, dtype=np.int64))
    packing = PackedSequences.from_cu_seqlens(
        cu_seqlens, objective.attention, device, np.concatenate(prefixes) if prefixes else None
    )
    if dropout:
        keys = []
        for source, target in zip(randomness, targets, strict=True):
            keys.append(source.words("dropout", len(target.inputs)).view(np.int64))
        packing.dropout_keys = _join([*keys, fill], device)

    weights = []
    for target in targets:
        if target.weights is not None:
            weights.append(weight * target.weights)
        elif weight != 1:
            weights.append(np.full(len(target.labels), weight, dtype=np.float32))
    soft_labels = [target.soft_labels for target in targets if target.soft_labels is not None]

    in_range = []
    corpus_spans = []
    if groups is not None:
        in_range.append(np.zeros((0, len(groups.starts)), dtype=bool))
        for sample, pack, target in zip(samples, read, targets, strict=True):
            predicted_positions = pack.positions[target.predict_at + objective.shift]
            in_range.append(groups.find_ranges(predicted_positions))
            source = packs.sources[packs.corpus_of_sample(sample)]
            corpus_spans.append((groups.find_corpus(source), len(predicted_positions)))
    return MicroBatch(
        tokens=_join([*(target.inputs for target in targets), fill], device)[None],
        positions=_join([position_ids(np.array(cu_seqlens))], device),
        packing=packing,
        predictions=Predictions(
            _join(predict_at, device),
            _join([_NOTHING, *(target.labels for target in targets)], device),
            _join(weights, device),
            tuple(_join(part, device) for part in zip(*soft_labels, strict=True)) or None,
            classes=objective.classes,
            per_token=groups is not None,
        ),
        loss_count=sum(weight * target.loss_count for target in targets),
        groups=groups,
        in_range=_join(in_range, device),
        corpus_spans=tuple(corpus_spans),
        fill_documents=fill_documents,
    )


_NOTHING = np.zeros(0, dtype=np.int64)


def _join(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor | None:
    """Return `arrays` end to end as a tensor on `device`; None without any."""
    return copy_to_device(torch.from_numpy(np.concatenate(arrays)), device) if arrays else None


class MicroBatchSpec(NamedTuple):
    """Named tuple of the arguments of `build_micro_batch`, in order, without `device`.

    Options have the same defaults. `samples` are a tuple, so that specs can be compared by ==.
    `build` returns the MicroBatch.
    """

    packs: PackedDataset
    samples: tuple[int, ...]
    objective: Objective
    seed: int
    groups: TokenGroups | None = None
    weight: int = 1
    length: int = 0
    dropout: bool = False

    def build(self, device: torch.device) -> MicroBatch:
        """Read the packs, draw the targets, and return the MicroBatch on `device`.

        It is that of `build_micro_batch` with these arguments; each call builds a new one.
        """
        packs, samples, objective, seed, *options = self
        return build_micro_batch(packs, samples, objective, seed, device, *options)


@dataclass(frozen=True)
class DataParallelSampler:
    """Division of global batches into rows of packs for one data-parallel rank.

    Each of `size` ranks, of which this is `rank`, gets its part of a batch of `global_batch_size`
    packs; the first ranks may have one pack more. A part is cut into as few rows of at most
    `micro_batch_size` packs as possible, which differ by at most one pack, in a multiple of
    `row_multiple` rows (1 by default). `samples` returns the rows. The first rows of all ranks
    follow each other in the batch, then the second ones, and so on.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    size: int
    row_multiple: int = 1
    """Number that the rows of a rank are a multiple of, as interleaved stages need."""

    @property
    def max_packs_per_rank(self) -> int:
        """Return the number of packs of a batch that the rank with most packs gets."""
        return -(-self.global_batch_size // self.size)

    def samples(self, start: int) -> list[range]:
        """Return the samples of each row (micro-batch) of this rank in a global batch.

        There are one or more rows, whose number may differ between ranks. A row is empty if there
        are fewer packs than rows.

        Args:
            start: Index of the batch's first sample among those that are read; the results are such
                indices, too.
        """
        # The first `larger` ranks have one pack more.
        least, larger = divmod(self.global_batch_size, self.size)
        most_rows = self._cut(least + 1)
        least_rows = self._cut(least)
        local_sizes = most_rows if self.rank < larger else least_rows
        rows = []
        for most, fewest in zip_longest(most_rows if larger else (), least_rows, fillvalue=0):
            if len(rows) == len(local_sizes):
                break
            before = min(self.rank, larger) * most + max(0, self.rank - larger) * fewest
            rows.append(range(start + before, start + before + local_sizes[len(rows)]))
            start += larger * most + (self.size - larger) * fewest
        return rows

    def _cut(self, packs: int) -> list[int]:
        """Return the number of packs of each row of a share."""
        rows = max(1, -(-packs // self.micro_batch_size))
        rows = -(-rows // self.row_multiple) * self.row_multiple
        least, larger = divmod(packs, rows)
        return [least + (row < larger) for row in range(rows)]


class Prefetcher:
    """Background thread that computes `build(key)` in advance.

    It is made with `build` and, if its thread must be set up first, `set_up`. `iterate` yields the
    values of keys in order; the thread is up to DEPTH keys ahead of the one in use. Keys are
    compared by ==, and a wrong guess of the next ones only costs the time of building them. The
    thread ends with the interpreter or when this object is deleted.
    """

    def __init__(
        self, build: Callable[[Any], Any], set_up: Callable[[], object] | None = None
    ) -> None:
        """Start the thread, which calls `set_up` first.

        Args:
            build: Returns the value of a key, such as a micro-batch of its spec; called in the
                thread.
            set_up: Sets up the thread, such as its device; None for nothing.
        """
        self._build = build
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches", initializer=set_up)
        self._pending: deque[tuple[Any, Future]] = deque()

    def iterate(self, keys: Sequence[Any], next_keys: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield `build(key)` for each of `keys` in order.

        The iterator must be consumed completely before the next call. Errors of `build` are raised
        when their key is due, and end the iterator; the next call is possible.

        Args:
            next_keys: Likely keys of the next call, which it begins to build.
        """
        if [key for key, _ in self._pending] != list(keys[: len(self._pending)]):
            while self._pending:
                self._pending.popleft()[1].cancel()
        remaining = deque([*keys, *next_keys][len(self._pending) :])
        for _ in keys:
            while remaining and len(self._pending) < 1 + DEPTH:
                self._pending.append(
                    (remaining[0], self._pool.submit(self._build, remaining.popleft()))
                )
            _, future = self._pending.popleft()
            yield future.result()
