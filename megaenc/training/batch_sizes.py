"""How many packs each update reads, and with which one it begins: a pure function of its number."""

import functools
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Global batches that grow to `full` packs; `starts` are the first samples of updates 1, 2, ... up to the first full one."""

    full: int
    starts: tuple[int, ...] = (0,)

    def first_sample(self, step: int) -> int:
        """The sample that update number `step` (1, 2, ...) begins with; also how many those before it have read."""
        growing = len(self.starts)
        return self.starts[step - 1] if step <= growing else self.starts[-1] + (step - growing) * self.full

    def size(self, step: int) -> int:
        """Packs of update number `step`."""
        return self.first_sample(step + 1) - self.first_sample(step)

    def steps_for(self, samples: int) -> int:
        """How many updates it takes to read `samples` samples."""
        if samples <= self.starts[-1]:
            return bisect_left(self.starts, samples)
        return len(self.starts) - 1 + -(-(samples - self.starts[-1]) // self.full)


@functools.cache
def batch_sizes(full: int, rampup: tuple[int, ...] | None) -> BatchSizes:
    """Batches of `full` packs, or that grow as `rampup` (first size, increment, samples) says, by megatron-core's rule."""
    if not rampup:
        return BatchSizes(full)
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, samples = rampup
    rule = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    starts = [0]
    while rule.get_current_global_batch_size() < full:
        starts.append(starts[-1] + rule.get_current_global_batch_size())
        rule.update(starts[-1], consistency_check=False)
    return BatchSizes(full, tuple(starts))
