"""The largest micro-batch that fits the memory of every rank's accelerator."""

import dataclasses
import gc
from bisect import bisect_left
from collections.abc import Collection, Sequence

import torch
from torch.distributed import ReduceOp

from megaenc.backend.reductions import reduce_over_ranks
from megaenc.console import print_rank_0
from megaenc.data.packing.packed_dataset import PackedDataset
from megaenc.model.config import ModelConfig
from megaenc.objectives import Objective
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan

MEMORY_FRACTION = 0.92  # fraction of the free memory for tensors; the rest is fragmentation
MAX_TENSOR_SIZE = 2**31 - 1  # elements of a tensor that 32-bit kernels can index
_STATE_BYTES = 8  # of AdamW's moments of a parameter, which the first step allocates


def fill_micro_batches(plan: Plan, engine: Engine) -> Plan:
    """Return `plan` with each `auto` replaced by the most packs that fit.

    It measures --micro-batch-size on an accelerator, for each phase with `auto` (at least one): at
    most the packs that a rank gets of a batch, and 1 if not even one fits. All ranks call this
    together, before the first step. `engine` gets the new plan and enters its first phase; its
    weights stay as they are. Rank 0 prints the sizes.
    """
    state_size = sum(
        shard.param.numel()
        for index, shard in enumerate(engine.shards)
        if shard.param is not None and index not in engine.always_frozen
    )
    room = measure_room() - _STATE_BYTES * state_size
    objectives = plan.schedule.final_objectives().values()
    settings = plan.settings
    sizes = []
    for phase in settings.phase_configs:
        if phase.settings.micro_batch_size != "auto":
            sizes.append(phase.settings.packs_at_once)
            continue
        engine.enter_phase(phase.first_step)
        largest = min(
            engine.sampler.max_packs_per_rank,
            largest_indexable(phase.settings.shape, phase.settings.data.seq_length),
        )
        packs = plan.data_at(phase.first_step).train
        first = plan.first_sample(phase.first_step)
        candidates = range(1, 1 + max(1, largest))
        sizes.append(find_largest_batch(engine, objectives, candidates, room, packs, first))
    plan = dataclasses.replace(plan, settings=settings.with_micro_batch_sizes(sizes))
    engine.plan = plan
    engine.enter_phase(1)
    text = " and ".join(f"{packs:,}" for packs in dict.fromkeys(sizes))
    print_rank_0(f"--micro-batch-size auto: {text} packs at once, the most that fit")
    return plan


def find_largest_batch(
    engine: Engine,
    objectives: Collection[Objective],
    candidates: Sequence[int],
    room: float,
    packs: PackedDataset | None = None,
    first: int = 0,
) -> int:
    """Return the largest of `candidates` whose micro-batch fits on every rank.

    It must fit under all `objectives`; the first candidate is returned if none does. All ranks call
    this together, with the same candidates. Each trial runs both passes without an optimizer step;
    running out of memory counts as not fitting. Gradients are zero afterwards.

    Args:
        candidates: Numbers of packs of a micro-batch, one or more, ascending; tried by bisection.
        room: Bytes of this rank's device that tensors may have at the peak, existing ones such as
            weights included. Subtract what is allocated later, such as moments of the first step.
        packs: Data set; None for that of the first phase.
        first: Index of the first sample to read.
    """

    def too_large(count: int) -> bool:
        try:
            samples = range(first, first + count)
            is_too_large = any(
                measure_peak(engine, objective, samples, packs) > room for objective in objectives
            )
        except torch.OutOfMemoryError:
            is_too_large = True
        discard_batch(engine)
        [votes] = reduce_over_ranks([is_too_large], ReduceOp.MAX)
        return bool(votes)

    return candidates[max(0, bisect_left(candidates, True, key=too_large) - 1)]


def measure_room() -> float:
    """Return the bytes of this accelerator for tensors, existing ones included.

    They are MEMORY_FRACTION of the memory that is free or reserved by torch in this process.
    """
    free, _ = torch.cuda.mem_get_info()
    return MEMORY_FRACTION * (free + torch.cuda.memory_reserved())


def measure_peak(
    engine: Engine, objective: Objective, samples: Sequence[int], packs: PackedDataset | None
) -> float:
    """Return the peak bytes of tensors in a micro-batch, forward and backward.

    All ranks call this together. All tensors on this rank's accelerator count, weights included.
    torch's peak statistics are reset. Gradients are zero afterwards.

    Args:
        samples: Indices of the samples of the micro-batch.
        packs: Data set; None for that of the first phase.

    Raises:
        torch.OutOfMemoryError: The micro-batch does not fit this rank; call `discard_batch`.
    """
    torch.cuda.reset_peak_memory_stats()
    with engine.no_grad_reduction():
        engine.local_loss_and_grad_norm(samples, objective, packs)
    return float(torch.cuda.max_memory_allocated())


def discard_batch(engine: Engine) -> None:
    """Free the accelerator memory of a tried micro-batch, and set gradients to zero.

    Nothing is communicated. torch's cache is emptied, too.
    """
    engine.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()


def largest_indexable(shape: ModelConfig, seq_length: int) -> int:
    """Return the most packs of a micro-batch that 32-bit kernels can index.

    The widest activation, of gate and up or of queries, of all tensor-parallel ranks together, then
    has at most MAX_TENSOR_SIZE elements. The result is 0 if that of one pack has more.

    Args:
        seq_length: Tokens of a pack.
    """
    return MAX_TENSOR_SIZE // (seq_length * max(shape.mlp_input_size, shape.query_size))
