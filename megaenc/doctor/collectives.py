"""The collectives that training uses, over the process group that it would use: right numbers, time, bytes a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from megaenc.doctor.findings import Asked, Finding, ok, problem
from megaenc.doctor.ranks import join
from megaenc.ranks import rank

_SMALL, _SMALL_TURNS = 16, 30  # numbers for each rank; turns, after some that warm up
_MEGABYTES = {"cpu": 4, "cuda": 64}
_TURNS, _WARM = 5, 2
_MODULUS = 251  # numbers are small and whole, so that every order of adding them gives the same


@dataclass(frozen=True)
class Collective:
    """`run(tensor of n * W numbers, group)` for W ranks, and what comes out of it on this rank."""

    name: str
    run: Callable
    expected: Callable
    travels: Callable[[int], float]
    """Of the tensor's bytes, those that a rank sends at least, for W ranks: what bytes a second are counted by."""


def collectives(asked: Asked) -> list[Finding]:
    """Each of them, on all ranks together."""
    import torch
    import torch.distributed as dist

    from megaenc.backend.device import detect

    join(asked.seconds)
    backend = detect()
    group = None
    if not backend.is_host:
        torch.cuda.set_device(backend.device)
        group = dist.new_group(backend=backend.process_group)
    library = {"rocm": "RCCL", "cuda": "NCCL"}.get(backend.name, "gloo")
    size = dist.get_world_size()
    return [_tried(each, library, backend.device, group, size) for each in known() if size > 1 or each.name != "send and receive"]


def known() -> list[Collective]:
    """All-reduce, reduce-scatter, all-gather, and a ring of sends, each with whole numbers."""
    import torch
    import torch.distributed as dist

    def all_reduce(tensor, group):
        result = tensor.clone()
        dist.all_reduce(result, group=group)
        return result

    def reduce_scatter(tensor, group):
        result = tensor.new_empty(tensor.numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(result, tensor, group=group)
        return result

    def all_gather(tensor, group):
        own = tensor.chunk(dist.get_world_size())[0]
        result = torch.empty_like(tensor)
        dist.all_gather_into_tensor(result, own.contiguous(), group=group)
        return result

    def ring(tensor, group):
        result, size = torch.empty_like(tensor), dist.get_world_size()
        there, back = (rank() + 1) % size, (rank() - 1) % size
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, there, group), dist.P2POp(dist.irecv, result, back, group)]
        ):
            work.wait()
        return result

    def total(made, size):
        return sum(made(each) for each in range(size))

    def own_part(made, size):
        return total(made, size).chunk(size)[rank()]

    def parts(made, size):
        # Each cut out of its rank's numbers, for a view would keep all of them: as many times 64 MiB as there are ranks.
        return torch.cat([made(each).chunk(size)[0].clone() for each in range(size)])

    def neighbour(made, size):
        return made((rank() - 1) % size)

    return [
        Collective("all-reduce", all_reduce, total, lambda size: 2 * (size - 1) / size),
        Collective("reduce-scatter", reduce_scatter, own_part, lambda size: (size - 1) / size),
        Collective("all-gather", all_gather, parts, lambda size: (size - 1) / size),
        Collective("send and receive", ring, neighbour, lambda size: 1.0),
    ]


def made(of: int, numbers: int, device):
    """float32[numbers] of rank `of`: whole numbers, others on each rank and at each place."""
    import torch

    return ((torch.arange(numbers, device=device) * (of + 1) + of) % _MODULUS).float()


def _tried(each: Collective, library: str, device, group, size: int) -> Finding:
    import torch

    place = f"{each.name}, {library}"
    large = _MEGABYTES[device.type] * 2**20 // 4 // size * size
    seconds = []
    for numbers, turns in ((_SMALL * size, _SMALL_TURNS), (large, _TURNS)):
        own = made(rank(), numbers, device)
        found = each.run(own, group)
        expected = each.expected(lambda of, numbers=numbers: made(of, numbers, device), size)
        if not torch.equal(found, expected):
            wrong = int((found != expected).sum())
            advice = "no run over this network can be trusted: NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, tell which link it is"
            return problem(place, f"{wrong:,} of {found.numel():,} numbers are wrong on rank {rank()}", advice)
        seconds.append(_timed(lambda own=own: each.run(own, group), turns, device))
    if size == 1:
        return ok(place, "right, with one rank")
    rate = large * 4 * each.travels(size) / seconds[1]
    small = f"{1e6 * seconds[0]:,.0f} µs for {_SMALL * size * 4:,} bytes"
    return ok(place, f"right, {small}, {rate / 1e9:.3g} GB/s for {large * 4 / 2**20:.0f} MiB")


def _timed(run: Callable[[], object], turns: int, device) -> float:
    """Seconds of a turn, without the first ones."""
    import torch

    for _ in range(_WARM):
        run()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(turns):
        run()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / turns
