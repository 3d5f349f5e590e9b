"""Where the time of a step goes, and how much memory a run takes: the highest value of any rank."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from megatron.core.timers import Timers

from megaenc.backend import Backend

Item = TypeVar("Item")

DATA, FORWARD_BACKWARD, OPTIMIZER = "data", "forward_backward", "optimizer"


class StepTimers:
    """Seconds of the parts of a step on this rank, by the clock and those in which this thread computed.

    Parts end where a step waits for the device in any case: forward_backward with its sums, optimizer with the gradient's norm.
    """

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.processor: Counter[str] = Counter()

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add what happens inside to `part`."""
        wall, processor = time.perf_counter(), time.thread_time()
        yield
        self.wall[part] += time.perf_counter() - wall
        self.processor[part] += time.thread_time() - processor

    def measure_items(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, the making of each being added to `part`."""
        iterator = iter(items)
        while True:
            with self.measure(part):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def seconds(self) -> dict[str, float]:
        """Return those by the clock of making micro-batches, computing with them, updating; the first is not in the second."""
        forward_backward = self.wall[FORWARD_BACKWARD] - self.wall[DATA]
        return {DATA: self.wall[DATA], FORWARD_BACKWARD: forward_backward, OPTIMIZER: self.wall[OPTIMIZER]}


def memory_usage(backend: Backend) -> dict[str, float]:
    """Return the GiB that this process has: at most so far of an accelerator's memory, else now of the host's."""
    resident = psutil.Process().memory_info().rss / 2**30
    if backend.is_cpu:
        return {"memory_gib": resident}
    return {
        "memory_gib": torch.cuda.max_memory_allocated(backend.device) / 2**30,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(backend.device) / 2**30,
        "host_memory_gib": resident,
    }


def max_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the largest that any rank has of each value; all ranks call this together, with the same names."""
    found = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(values, found.tolist(), strict=True))


def max_timer_seconds(timers: Timers) -> dict[str, float]:
    """Return the seconds of each timer on the rank where it took longest; all ranks call this together."""
    mine = {name: timer.elapsed(reset=False) for name, timer in timers._timers.items()}
    of_all: list = [None] * dist.get_world_size()  # names and all: stages of a pipeline need not have the same timers
    dist.all_gather_object(of_all, mine)
    names = sorted({name for found in of_all for name in found})
    return {name: max(found.get(name, 0.0) for found in of_all) for name in names}
