"""The processes of a run: threads, process groups, model parallelism."""

import ctypes
import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from megaenc.backend.device import Backend, detect_backend
from megaenc.backend.megatron import prepare_megatron
from megaenc.backend.parallel_config import ParallelConfig
from megaenc.dist_env import get_local_world_size, get_world_size
from megaenc.processes import usable_core_count

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def init_distributed(layout: ParallelConfig, seed: int, chunks: int = 1, timeout: timedelta = timedelta(minutes=10)) -> Backend:
    """Join the process groups of this run, under torchrun or alone; return the backend. InputError if they do not fit `layout`.

    `chunks`: parts of the model on each pipeline stage (`ParallelConfig.chunks`). `timeout`: of each collective.
    """
    layout.check(get_world_size())
    backend = detect_backend()
    divide_cores_among_ranks()
    prepare_megatron()
    from megatron.core import parallel_state, tensor_parallel

    if backend.is_cpu:
        retain_freed_memory()
    else:
        torch.cuda.set_device(backend.device)
    if "RANK" in os.environ:
        device = None if backend.is_cpu else backend.device
        store, rank, size = rendezvous(timeout)
        dist.init_process_group(backend.process_group, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    else:
        dist.init_process_group(backend.process_group, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
    )
    # Nothing of ours reads this state (randomness is counted, not stored); megatron-core forks it around dropout.
    tensor_parallel.model_parallel_cuda_manual_seed(seed % 2**31, force_reset_rng=True)
    return backend


def destroy_distributed() -> None:
    """Leave the process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def divide_cores_among_ranks() -> None:
    """Give each process of this node its share of the cores as threads."""
    # OMP_NUM_THREADS counts for one process alone: for several, torchrun sets it to 1 by itself.
    if get_local_world_size() > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_core_count() // get_local_world_size()))


def retain_freed_memory() -> bool:
    """Have malloc keep what is freed, for the rest of this process; return whether it does.

    The kernel clears the pages of each new tensor above 32 MB: up to a fifth of a training step (docs/performance.md). A malloc
    with settings of its own (MALLOC_*, GLIBC_TUNABLES) is left alone.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


_POLL_SECONDS = 0.05


def rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store with nothing but the keys of this attempt, the rank, and the number of processes.

    torchrun's store lives through restarts: so each attempt puts a name of its own in front of every key. RuntimeError if not all
    processes are there after `timeout`.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"megaenc/{_agree_on_attempt(store, rank, size, timeout)}", store)
    return store, rank, size


def _agree_on_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name for this attempt, chosen by rank 0: torchrun's count of restarts may differ from node to node.

    Each process shows a new name, by which rank 0 answers, so that none can read an answer meant for one before it. A name that a
    process of an earlier attempt has left is answered too, until the new one replaces it.
    """
    mine = uuid.uuid4().hex
    store.set(f"megaenc/process {rank}", mine)
    if rank:
        attempt = _decode_attempt(store.get(f"{mine}/attempt"))  # waits for it
        store.add(f"{attempt}/present", 1)
        return attempt
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{mine}/present", 0) < size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {size} processes were there after {timeout.total_seconds():.0f} s")
        for other in range(1, size):
            key = f"megaenc/process {other}"
            if store.check([key]) and (name := _decode_attempt(store.get(key))) not in answered:
                store.set(f"{name}/attempt", mine)
                answered.add(name)
        time.sleep(_POLL_SECONDS)
    return mine


def _decode_attempt(value: bytes) -> str:
    """Return a name out of the store; anybody who reaches its port can have put anything there."""
    return value[:100].decode(errors="replace")
