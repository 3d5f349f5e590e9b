"""Weights and optimizer state of one rank, and the chunks of them that it saves."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megaenc.training.engine import Engine

MAX_CHUNK_BYTES = 32 << 20
"""Largest chunk, which bounds the buffers of a save and of a load."""
MASTER_PREFIX = "optimizer.state.fp32_param."
"""Prefix of the float32 master weights' names in checkpoints of bf16 runs."""


@dataclass(frozen=True)
class StateTensor:
    """A weight, or a state of the optimizer for it, as far as one rank holds it.

    `list_engine_state` and `list_module_state` build it. `shards` are the places of the rank's
    tensor-parallel part in the whole weight; `values`, flat, are the elements of the part that the
    rank holds, from element `start` of the part on; `local_range`, which also counts from the start
    of the part, has those that it saves and reads, and no other data-parallel rank does. `prefix`,
    before the weight's name in a checkpoint, names the state and is empty for the weight itself;
    `weight_index` counts the weights of all chunks of the rank.
    """

    weight_index: int
    """Index of the weight among those of all chunks of the rank, from 0."""
    prefix: str
    """Text before the weight's name in a checkpoint; empty for the weight itself."""
    shards: Sequence[ShardedTensor]
    """Places of the rank's tensor-parallel part in the whole weight.

    They follow each other in memory: one, or the gate and up projection of a fused matrix.
    """
    values: torch.Tensor
    """Flat tensor of the elements that the rank holds."""
    start: int
    """Number of elements of the part before `values`."""
    local_range: range
    """Elements of the part that no other data-parallel rank saves and reads."""

    @property
    def is_first_copy(self) -> bool:
        """Return whether no model-parallel rank before this one holds the same part.

        It is the same on all data-parallel ranks, which divide the part by `local_range`.
        """
        return not any(self.shards[0].replica_id[:2])

    @property
    def is_on_all_tensor_ranks(self) -> bool:
        """Return whether each tensor-parallel rank holds the whole weight.

        It is True for all weights without tensor parallelism.
        """
        size = math.prod(self.shards[0].global_shape[self.shards[0].prepend_axis_num :])
        return size == sum(math.prod(shard.local_shape) for shard in self.shards)

    @property
    def is_zero(self) -> bool:
        """Return whether it only stands for zeros, which are saved but not loaded.

        Its `values` then are one zero, expanded, and must not be written to.
        """
        return self.values.stride() == (0,)

    def elements(self, selected: range) -> torch.Tensor:
        """Return the elements `selected` of the part, a view of `values`.

        They count from the start of the tensor-parallel part, and `values` must hold them.
        """
        return self.values[selected.start - self.start : selected.stop - self.start]

    def chunks(self) -> Iterator[ShardedTensor]:
        """Yield the rectangles of the whole weight that the elements `local_range` fill.

        Their `data` are views of `values`, of at most MAX_CHUNK_BYTES each.
        """
        first = 0
        for shard in self.shards:
            stop = first + math.prod(shard.local_shape)
            common = range(max(self.local_range.start, first), min(self.local_range.stop, stop))
            if common:
                named = dataclasses.replace(shard, key=self.prefix + shard.key, data=None)
                yield from cut_range(named, self.elements(common), common.start - first)
            first = stop


def cut_range(shard: ShardedTensor, values: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yield the rectangles that a flat range of a matrix or vector fills, in order.

    These are the rest of a row, whole rows and the start of a row. Those larger than
    MAX_CHUNK_BYTES are cut further. Their `data` are views of `values`.

    Args:
        shard: Place of the matrix or vector in the whole weight.
        values: Flat tensor of the elements in the range.
        start: Number of elements of the matrix or vector before the range.
    """
    axes = len(shard.local_shape)
    width = shard.local_shape[1] if axes == 2 else 1
    limit = MAX_CHUNK_BYTES // values.element_size()
    before = shard.global_offset[: shard.prepend_axis_num]
    corner = shard.global_offset[shard.prepend_axis_num :]
    position = 0
    while position < values.numel():
        row, column = divmod(start + position, width)
        size = min(values.numel() - position, limit)
        if column or size < width:
            rows = 1
            columns = min(width - column, size)
        else:
            rows = size // width
            columns = width
        yield dataclasses.replace(
            shard,
            data=values[position : position + rows * columns].view((rows, columns)[:axes]),
            dtype=values.dtype,
            local_shape=(rows, columns)[:axes],
            global_offset=(
                *before,
                *(offset + shift for offset, shift in zip(corner, (row, column), strict=False)),
            ),
            axis_fragmentations=None,
        )
        position += rows * columns


def list_engine_state(engine: Engine) -> list[StateTensor]:
    """Return the weights of this rank and the optimizer's state for them, as views.

    Each weight, a whole tensor-parallel part, is followed by its states, with bf16 by its float32
    master weight too. The states hold the elements that the rank updates; a weight of which it
    updates none has no states. States that no step has made yet are created as zeros, or stand for
    zeros without memory (`is_zero`) if no phase trains the weight. With the distributed optimizer,
    `local_range` has the elements that the rank updates; else all data-parallel ranks hold all, and
    each has an equal share.
    """
    [optimizer] = engine.optimizer.chained_optimizers
    places = {
        id(weight): shards
        for chunk in engine.chunks
        for _, weight, shards in _find_places(chunk.module)
    }
    weights = [weight for chunk in engine.chunks for weight in chunk.parameters()]
    updated = engine.shards
    if engine.layout.use_distributed_optimizer:
        local_ranges = [
            range(0)
            if shard.param is None
            else range(shard.start, shard.start + shard.param.numel())
            for shard in updated
        ]
    else:
        local_ranges = equal_shares(engine, parallel_state.get_data_parallel_rank())
    tensors = []
    for index, (weight, update) in enumerate(zip(weights, updated, strict=True)):
        shards = places[id(weight)]
        tensors.append(
            StateTensor(index, "", shards, weight.detach().view(-1), 0, local_ranges[index])
        )
        if update.param is None:
            continue
        if index in engine.always_frozen:
            zeros = update.param.new_zeros(1).expand(update.param.numel())
            moments = {"exp_avg": zeros, "exp_avg_sq": zeros}
        else:
            optimizer.optimizer.create_state(update.param)
            moments = optimizer.optimizer.state[update.param]
        states = {f"optimizer.state.{name}.": state for name, state in moments.items()}
        if engine.plan.settings.bf16:
            states[MASTER_PREFIX] = update.param.detach()
        for prefix, state in states.items():
            tensors.append(
                StateTensor(
                    index, prefix, shards, state.view(-1), update.start, local_ranges[index]
                )
            )
    return tensors


def equal_shares(engine: Engine, rank: int) -> list[range]:
    """Return the elements of each weight that data-parallel rank `rank` saves.

    It is for runs without the distributed optimizer. The weights that this rank holds, one after
    the other, are divided into parts of equal size.

    Returns:
        A range for each weight of this rank's model chunks, in order, counted from the start of the
        weight's tensor-parallel part; many are empty.
    """
    ranks = parallel_state.get_data_parallel_world_size()
    sizes = [weight.numel() for chunk in engine.chunks for weight in chunk.parameters()]
    start = sum(sizes) * rank // ranks
    stop = sum(sizes) * (rank + 1) // ranks
    shares = []
    for size in sizes:
        shares.append(range(max(0, min(start, size)), max(0, min(stop, size))))
        start -= size
        stop -= size
    return shares


def list_module_state(module: torch.nn.Module) -> dict[str, StateTensor]:
    """Return the weights of a module on one rank by name, as views.

    The `local_range` of each has all elements. Names are as of named_parameters.

    Args:
        module: Megatron module that is not divided over ranks, with a sharded_state_dict.
    """
    return {
        name: StateTensor(0, "", shards, weight.detach().view(-1), 0, range(weight.numel()))
        for name, weight, shards in _find_places(module)
    }


def _find_places(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, list[ShardedTensor]]]:
    """Yield name, weight and places in the whole weight of each weight of `module`."""
    for name, value in module.sharded_state_dict(prefix="model.").items():
        shards = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        if isinstance(shards[0], ShardedTensor):
            yield name.removeprefix("model."), value.data, shards
