"""Timers of the parts of a step, and memory usage."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import psutil
import torch

from megaenc.backend import Backend

Item = TypeVar("Item")

DATA = "data"
FORWARD_BACKWARD = "forward_backward"
OPTIMIZER = "optimizer"
EVALUATION = "evaluation"
SAVE = "save"


class StepTimers:
    """Seconds spent in each part of a step on this rank, summed since creation.

    `StepTimers()` begins at 0, and `measure` adds to it. `wall` has wall-clock time, `processor`
    the CPU time of this thread, both by name of the part: DATA, FORWARD_BACKWARD, OPTIMIZER,
    EVALUATION or SAVE, 0 if it was not measured. In both, FORWARD_BACKWARD contains DATA. Parts end
    when a step synchronizes the device anyway: FORWARD_BACKWARD as its sums are read, OPTIMIZER at
    the gradient norm.
    """

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.processor: Counter[str] = Counter()

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the seconds inside the context to the sums of `part`, such as SAVE.

        Nothing is added after an error. The device is not synchronized.
        """
        wall = time.perf_counter()
        processor = time.thread_time()
        yield
        self.wall[part] += time.perf_counter() - wall
        self.processor[part] += time.thread_time() - processor

    def measure_items(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items` up to their end or the first None, which is not yielded.

        The time to produce them, also the None, is added to the sums of `part`.
        """
        iterator = iter(items)
        while True:
            with self.measure(part):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def seconds(self) -> dict[str, float]:
        """Return wall-clock seconds of data, forward_backward and optimizer by name.

        They are sums since creation; subtract an earlier result for those of one step. Here
        forward_backward is without data. A part that was not measured is 0.
        """
        forward_backward = self.wall[FORWARD_BACKWARD] - self.wall[DATA]
        return {
            DATA: self.wall[DATA],
            FORWARD_BACKWARD: forward_backward,
            OPTIMIZER: self.wall[OPTIMIZER],
        }


def memory_usage(backend: Backend) -> dict[str, float]:
    """Return this process's memory in GiB by metric name.

    On a CPU it is `memory_gib`, the resident host memory. With a GPU, `memory_gib` and
    `memory_reserved_gib` are peaks of the memory that torch has allocated and reserved, since the
    last reset of its statistics (there is none here), and `host_memory_gib` is the resident host
    memory.
    """
    resident = psutil.Process().memory_info().rss / 2**30
    if backend.is_cpu:
        return {"memory_gib": resident}
    return {
        "memory_gib": torch.cuda.max_memory_allocated(backend.device) / 2**30,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(backend.device) / 2**30,
        "host_memory_gib": resident,
    }
