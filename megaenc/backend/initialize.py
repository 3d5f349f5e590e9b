"""Initialization of a run's processes: threads, process groups, parallelism."""

import contextlib
import ctypes
import os
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from megaenc.backend.device import Backend, detect_backend
from megaenc.backend.megatron import prepare_megatron
from megaenc.backend.parallel_config import ParallelConfig
from megaenc.dist_env import (
    LAUNCHER_VARIABLES,
    get_local_world_size,
    get_rank,
    get_world_size,
    is_launched,
)
from megaenc.errors import InputError
from megaenc.machine import usable_core_count

# Of glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4


def init_distributed(
    layout: ParallelConfig, seed: int, chunks: int = 1, timeout: timedelta = timedelta(minutes=10)
) -> Backend:
    """Initialize process groups and device; return the hardware of this process.

    All ranks call this together, before any process group; without torchrun's variables this
    process is the only one. torch's number of threads is set, and megatron-core is patched.
    InputError is raised if the processes do not fit `layout` or the accelerators, or for an unknown
    version of megatron-core.

    Args:
        seed: Seed of megatron-core's random state; weights, data and masks do not depend on it.
        chunks: Model chunks per pipeline stage (`ParallelConfig.chunks_per_stage`).
        timeout: Timeout of each collective and of joining; RuntimeError if not all ranks join.
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
    init_process_group(backend, timeout)
    parallel_state.initialize_model_parallel(
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
        create_gloo_process_groups=False,  # of all replicas: gloo connects each pair of ranks
    )
    # Only megatron-core reads this state, which it forks around dropout; our random numbers are
    # counter-based.
    tensor_parallel.model_parallel_cuda_manual_seed(seed % 2**31, force_reset_rng=True)
    return backend


def check_launcher_variables() -> None:
    """Raise InputError if environment variables are not as torchrun sets them.

    These are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without
    RANK, this is a run of one process, and WORLD_SIZE must be 1 or missing; if SLURM has started
    several processes, each prints a line on standard output.
    """
    for name in LAUNCHER_VARIABLES:
        value = os.environ.get(name, "")
        if value and not value.isdecimal():
            raise InputError(
                f"{name}: found {value!r} in the environment, expected a whole number; torchrun "
                "sets it"
            )
    if is_launched() and get_rank() >= get_world_size():
        raise InputError(
            f"RANK: found {get_rank()} in the environment, expected less than WORLD_SIZE, "
            f"{get_world_size()}"
        )
    if not is_launched() and get_world_size() > 1:
        place = "in the environment without RANK"
        raise InputError(
            f"WORLD_SIZE: found {get_world_size()} {place}, expected both, as torchrun sets them, "
            "or neither"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if is_launched() and not os.environ.get(name):
            raise InputError(
                f"{name}: missing in the environment, which has RANK: start with torchrun, or "
                "unset RANK"
            )
    tasks = os.environ.get("SLURM_NTASKS", "")
    if not is_launched() and tasks.isdecimal() and int(tasks) > 1:
        print(
            f"SLURM_NTASKS is {tasks}, but RANK is not set: this is a run of one process; "
            "docker/slurm has job files for all"
        )


def init_process_group(backend: Backend, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Initialize torch.distributed by torchrun's environment variables.

    All ranks call this together, before any process group. Without RANK the group has only this
    process. `check_launcher_variables` checks the variables.

    Args:
        backend: Hardware of this process, which decides between nccl and gloo.
        timeout: Timeout of joining and of each collective.

    Raises:
        InputError: This process has a process group already, even one of only itself.
        RuntimeError: Not all processes join.
    """
    if dist.is_initialized():
        raise InputError(
            "torch.distributed: found a process group of this process, expected none; call "
            "torch.distributed.destroy_process_group() first"
        )
    if is_launched():
        store, rank, size = rendezvous(timeout)
        # Without `device_id`, with which all ranks take part in creating each group: ten for each
        # rank, one after another.
        dist.init_process_group(
            backend.process_group, store=store, rank=rank, world_size=size, timeout=timeout
        )
    else:
        dist.init_process_group(backend.process_group, store=dist.HashStore(), rank=0, world_size=1)


def destroy_distributed() -> None:
    """Destroy the groups of megatron-core and, if initialized, of torch.distributed.

    Each rank calls it after its last collective.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    parallel_state.destroy_model_parallel()
    # These caches keep modules of the run, and so a group with its threads and sockets.
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def divide_cores_among_ranks() -> None:
    """Set torch's thread count to the node's usable cores divided by its processes.

    LOCAL_WORLD_SIZE gives the processes; the count is at least 1. With several processes this
    overrides OMP_NUM_THREADS, which torchrun sets to 1; if a single process has OMP_NUM_THREADS,
    nothing is changed.
    """
    # With several processes, torchrun sets OMP_NUM_THREADS to 1 itself.
    if get_local_world_size() > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_core_count() // get_local_world_size()))


def retain_freed_memory() -> bool:
    """Make this process's malloc keep freed memory for later tensors.

    Otherwise the kernel clears the pages of each new tensor above 32 MB in every step.

    Returns:
        True if malloc keeps it; False if the C library lacks mallopt, or if the user has set
        MALLOC_* or GLIBC_TUNABLES.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


_POLL_SECONDS = 0.05
_FAN_OUT = 16


def rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Join the other processes by torchrun's environment variables.

    All ranks call this together. torchrun's store survives its restarts; the keys of the returned
    store have a prefix that earlier attempts did not use.

    Returns:
        A store with only this attempt's keys, the rank, and the world size.

    Raises:
        RuntimeError: Not all processes join within `timeout`.
        ValueError: A variable is missing.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"megaenc/{_agree_on_attempt(store, rank, size, timeout)}", store)
    return store, rank, size


def _agree_on_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the name of this attempt, on which all ranks agree.

    Rank 0 chooses it, because torchrun's restart counts may differ between nodes. Each process
    publishes a new random name, and its parent in a tree, whose root is rank 0, stores the answer
    under it, so that no process reads an answer meant for an earlier one. Names left by earlier
    attempts are answered too, until new ones replace them. A parent waits for all below it.
    """
    attempt = process_name = uuid.uuid4().hex
    store.set(f"megaenc/process {rank}", process_name)
    if rank:
        # Blocks until it is set.
        attempt, _, parent = _decode_answer(store.get(f"{process_name}/attempt")).partition(" ")
    children = range(_FAN_OUT * rank + 1, min(_FAN_OUT * (rank + 1) + 1, size))
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{process_name}/present", 0) < len(children):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"not all of {size} processes joined within {timeout.total_seconds():.0f} s"
            )
        for child in children:
            key = f"megaenc/process {child}"
            if store.check([key]) and (name := _decode_answer(store.get(key))) not in answered:
                store.set(f"{name}/attempt", f"{attempt} {process_name}")
                answered.add(name)
        time.sleep(_POLL_SECONDS)
    if rank:
        store.add(f"{parent}/present", 1)
    return attempt


def _decode_answer(value: bytes) -> str:
    """Decode one or two names from the store, cut to 100 bytes.

    The content of the store is not trusted.
    """
    return value[:100].decode(errors="replace")


@contextlib.contextmanager
def restore_torch_state() -> Iterator[None]:
    """Restore torch's random state, threads and deterministic kernels after the block.

    Also restores `sys.excepthook`, which each process group wraps.
    """
    excepthook = sys.excepthook
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = torch.utils.deterministic.fill_uninitialized_memory
    uses_efficient_attention = torch.backends.cuda.mem_efficient_sdp_enabled()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            sys.excepthook = excepthook
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills_memory
            torch.backends.cuda.enable_mem_efficient_sdp(uses_efficient_attention)
