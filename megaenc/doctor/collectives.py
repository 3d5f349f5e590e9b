"""Checks of the collectives used in training: results, latency and bandwidth."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from megaenc.backend.device import detect_backend
from megaenc.dist_env import get_rank
from megaenc.doctor.cross_rank import join_group
from megaenc.doctor.result import CheckContext, Finding, ok, problem

_SMALL_COUNT = 16  # elements per rank
_MEGABYTES = {"cpu": 4, "cuda": 64}
_MODULUS = 251  # small integers: exact sums in any order


def check_collectives(context: CheckContext) -> list[Finding]:
    """Check results, latency and bandwidth of each collective on this rank's device.

    All ranks call it together; it calls `join_group` and, on accelerators, makes a group of NCCL or
    RCCL and sets the CUDA device. Each rank returns its own findings, one each for all-reduce,
    reduce-scatter, all-gather and, with several ranks, send and receive. A finding is a problem if
    results are wrong, else ok, at any speed.

    Raises:
        RuntimeError: Ranks do not join within `context.timeout` seconds.
    """
    join_group(context.timeout)
    backend = detect_backend()
    group = None
    size = dist.get_world_size()
    if not backend.is_cpu:
        torch.cuda.set_device(backend.device)
        group = dist.new_group(backend=backend.process_group)
    library = {"rocm": "RCCL", "cuda": "NCCL"}.get(backend.name, "gloo")
    # The third column is the minimum traffic of a rank in multiples of the tensor's bytes, for the
    # bandwidth.
    fraction = (size - 1) / size
    tried = [
        ("all-reduce", _all_reduce, 2 * fraction),
        ("reduce-scatter", _reduce_scatter, fraction),
        ("all-gather", _all_gather, fraction),
    ]
    if size > 1:
        tried.append(("send and receive", _ring, 1.0))
    return [
        _check_collective(run, f"{name}, {library}", backend.device, group, sent)
        for name, run, sent in tried
    ]


# Each takes this rank's tensor of n * world size elements, a function that builds any rank's
# tensor, and the group; each returns the result and a function that computes the expected result.


def _all_reduce(local_tensor, build_tensor, group):
    """Return the all-reduced tensor and a function for the expected sum."""
    result = local_tensor.clone()
    dist.all_reduce(result, group=group)
    return result, lambda: sum(build_tensor(rank) for rank in range(dist.get_world_size()))


def _reduce_scatter(local_tensor, build_tensor, group):
    """Return this rank's reduced chunk and a function for the expected chunk."""
    size = dist.get_world_size()
    result = local_tensor.new_empty(local_tensor.numel() // size)
    dist.reduce_scatter_tensor(result, local_tensor, group=group)
    return result, lambda: sum(build_tensor(rank).chunk(size)[get_rank()] for rank in range(size))


def _all_gather(local_tensor, build_tensor, group):
    """Return the all-gathered chunks and a function for the expected tensor."""
    size = dist.get_world_size()
    result = torch.empty_like(local_tensor)
    dist.all_gather_into_tensor(result, local_tensor.chunk(size)[0].contiguous(), group=group)
    # Cloned, since a view would keep each rank's full tensor: 64 MiB per rank.
    return result, lambda: torch.cat(
        [build_tensor(rank).chunk(size)[0].clone() for rank in range(size)]
    )


def _ring(local_tensor, build_tensor, group):
    """Send to the next rank; return the previous rank's tensor and the expected one.

    The expected tensor is returned as a function that builds it.
    """
    size = dist.get_world_size()
    result = torch.empty_like(local_tensor)
    destination = (get_rank() + 1) % size
    source = (get_rank() - 1) % size
    operations = [
        dist.P2POp(dist.isend, local_tensor, destination, group),
        dist.P2POp(dist.irecv, result, source, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return result, lambda: build_tensor(source)


def build_rank_tensor(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return a test tensor of a rank: integers from 0 to 250 as float32[count].

    They differ by position and rank. Every rank can build that of any other.

    Args:
        rank: Rank that contributes the tensor to the collective.
    """
    return ((torch.arange(count, device=device) * (rank + 1) + rank) % _MODULUS).float()


def _check_collective(
    run: Callable,
    name: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    traffic_factor: float,
) -> Finding:
    """Return a finding about a collective's result, latency and bandwidth."""
    size = dist.get_world_size()
    seconds = []
    large = _MEGABYTES[device.type] * 2**20 // 4 // size * size
    for count, repeats in ((_SMALL_COUNT * size, 30), (large, 5)):
        build_tensor = partial(build_rank_tensor, count=count, device=device)
        call = (build_tensor(get_rank()), build_tensor, group)
        output, expected = run(*call)
        wrong = int((output != expected()).sum())
        if wrong:
            advice = (
                "runs over this network are not trustworthy: find the link with "
                "NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1"
            )
            return problem(
                name,
                f"{wrong:,} of {output.numel():,} numbers are wrong on rank {get_rank()}",
                advice,
            )
        timer = Timer("run(*call)", globals={"run": run, "call": call})
        # The same repeats on all ranks; Timer warms up and synchronizes
        seconds.append(timer.timeit(repeats).mean)
    if size == 1:
        return ok(name, "right, with one rank")
    small = f"{1e6 * seconds[0]:,.0f} µs for {_SMALL_COUNT * size * 4:,} bytes"
    return ok(
        name,
        f"right, {small}, {large * 4 * traffic_factor / seconds[1] / 1e9:.3g} GB/s for "
        f"{large * 4 / 2**20:.0f} MiB",
    )
