"""The collectives that training uses, over the process group that it would use: right numbers, time, bytes a second."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from megaenc.backend.device import detect
from megaenc.dist_env import rank
from megaenc.doctor.cross_rank import join_group
from megaenc.doctor.result import Finding, ProbeContext, ok, problem

_SMALL = 16  # numbers for each rank
_MEGABYTES = {"cpu": 4, "cuda": 64}
_MODULUS = 251  # numbers are small and whole, so that every order of adding them gives the same


def collectives(asked: ProbeContext) -> list[Finding]:
    """Try the collectives that training uses over the process group that it would use: right numbers, time, bytes a second."""
    join_group(asked.seconds)
    backend, group, size = detect(), None, dist.get_world_size()
    if not backend.is_host:
        torch.cuda.set_device(backend.device)
        group = dist.new_group(backend=backend.process_group)
    library = {"rocm": "RCCL", "cuda": "NCCL"}.get(backend.name, "gloo")
    # Of the tensor's bytes, those that a rank sends at least: what bytes a second are counted by.
    share = (size - 1) / size
    tried = [
        ("all-reduce", _all_reduce, 2 * share),
        ("reduce-scatter", _reduce_scatter, share),
        ("all-gather", _all_gather, share),
    ]
    tried += [("send and receive", _ring, 1.0)] if size > 1 else []
    return [_tried(run, f"{name}, {library}", backend.device, group, sent) for name, run, sent in tried]


# Each takes this rank's tensor of n * W numbers for W ranks, `numbers`, which makes those of any rank, and the group. It returns
# what came of it here, and a function for what should have.


def _all_reduce(own, numbers, group):
    result = own.clone()
    dist.all_reduce(result, group=group)
    return result, lambda: sum(numbers(each) for each in range(dist.get_world_size()))


def _reduce_scatter(own, numbers, group):
    size = dist.get_world_size()
    result = own.new_empty(own.numel() // size)
    dist.reduce_scatter_tensor(result, own, group=group)
    return result, lambda: sum(numbers(each).chunk(size)[rank()] for each in range(size))


def _all_gather(own, numbers, group):
    size, result = dist.get_world_size(), torch.empty_like(own)
    dist.all_gather_into_tensor(result, own.chunk(size)[0].contiguous(), group=group)
    # Each cut out of its rank's numbers, for a view would keep all of them: as many times 64 MiB as there are ranks.
    return result, lambda: torch.cat([numbers(each).chunk(size)[0].clone() for each in range(size)])


def _ring(own, numbers, group):
    size, result = dist.get_world_size(), torch.empty_like(own)
    there, back = (rank() + 1) % size, (rank() - 1) % size
    ways = [dist.P2POp(dist.isend, own, there, group), dist.P2POp(dist.irecv, result, back, group)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    return result, lambda: numbers(back)


def made(of: int, numbers: int, device: torch.device) -> torch.Tensor:
    """Make float32[numbers] of rank `of`: whole numbers, others on each rank and at each place."""
    return ((torch.arange(numbers, device=device) * (of + 1) + of) % _MODULUS).float()


def _tried(run: Callable, place: str, device: torch.device, group: dist.ProcessGroup | None, sent: float) -> Finding:
    size, seconds = dist.get_world_size(), []
    large = _MEGABYTES[device.type] * 2**20 // 4 // size * size
    for count, turns in ((_SMALL * size, 30), (large, 5)):
        call = (made(rank(), count, device), lambda of, count=count: made(of, count, device), group)
        found, expected = run(*call)
        if not torch.equal(found, right := expected()):
            wrong = int((found != right).sum())
            advice = "no run over this network can be trusted: NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, tell which link it is"
            return problem(place, f"{wrong:,} of {found.numel():,} numbers are wrong on rank {rank()}", advice)
        timer = Timer("run(*call)", globals={"run": run, "call": call})
        seconds.append(timer.timeit(turns).mean)  # as often on all ranks; it warms up, and waits for the device
    if size == 1:
        return ok(place, "right, with one rank")
    small = f"{1e6 * seconds[0]:,.0f} µs for {_SMALL * size * 4:,} bytes"
    return ok(place, f"right, {small}, {large * 4 * sent / seconds[1] / 1e9:.3g} GB/s for {large * 4 / 2**20:.0f} MiB")
