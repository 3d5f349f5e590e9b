"""The processes of a run: threads, process groups, model parallelism."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megaenc.backend.device import Backend, detect
from megaenc.backend.megatron import prepare_megatron
from megaenc.errors import InputError
from megaenc.processes import usable_cores
from megaenc.ranks import local_world_size, world_size


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes; what remains is data parallel."""

    tensor_model_parallel_size: int = 1
    """processes that share each layer's matrices"""
    pipeline_model_parallel_size: int = 1
    """stages that the layers are cut into"""
    sequence_parallel: bool = False
    """shard norms and residuals along the sequence too (needs tensor parallelism)"""

    def check(self, world_size: int) -> None:
        """InputError unless `world_size` processes can be laid out so."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for flag, size in (("--tensor-model-parallel-size", tensor), ("--pipeline-model-parallel-size", pipeline)):
            if size < 1:
                raise InputError(f"{flag}: found {size}, expected 1 or more")
        if world_size % (tensor * pipeline):
            raise InputError(
                f"{world_size} processes cannot be laid out as tensor parallel {tensor} x pipeline parallel {pipeline}: "
                f"expected a multiple of {tensor * pipeline} (torchrun --nproc-per-node)"
            )
        if self.sequence_parallel and tensor == 1:
            raise InputError("--sequence-parallel: found --tensor-model-parallel-size 1, expected 2 or more")


def start(layout: Layout, seed: int) -> Backend:
    """Join the process groups of this run and lay the model-parallel ones out; returns the backend.

    Works under torchrun and, as a world of one, in a plain process. InputError if the processes do not fit the layout.
    """
    layout.check(world_size())
    backend = detect()
    share_cores()
    prepare_megatron()
    from megatron.core import parallel_state, tensor_parallel

    if not backend.is_host:
        torch.cuda.set_device(backend.device)
    if "RANK" in os.environ:
        device = None if backend.is_host else backend.device
        dist.init_process_group(backend.process_group, timeout=timedelta(minutes=10), device_id=device)
    else:
        dist.init_process_group(backend.process_group, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size)
    # Nothing of ours reads this state (randomness is counted, not stored); megatron-core forks it around dropout.
    tensor_parallel.model_parallel_cuda_manual_seed(seed % 2**31, force_reset_rng=True)
    return backend


def stop() -> None:
    """Leave the process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def share_cores() -> None:
    """Give each process of this node its share of the cores as threads; one process alone has them all.

    OMP_NUM_THREADS is honoured for one process; torchrun sets it to 1 for several, so there it tells nothing of the user's wish.
    """
    if local_world_size() == 1 and "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(max(1, usable_cores() // local_world_size()))
