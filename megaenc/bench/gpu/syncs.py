"""Where the host waits for the accelerator while it should be giving it work."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from megaenc.bench.gpu.breakdown import Watched
from megaenc.objectives import Objective

MICRO_BATCHES = (1, 3)
WAITED = "called a synchronizing"
"""What torch says at each wait. When it starts to look it warns too, that it does."""


def synchronisations(engine: Watched, objective: Objective) -> dict[str, Any]:
    """How often an update's forward and backward wait once, and how often each micro-batch does; `places` are the latter's.

    Told by torch.cuda.set_sync_debug_mode, from the difference between updates of one and of three micro-batches.
    """
    if engine.device.type == "cpu":
        return {"left out": "there is no accelerator"}
    few, more = (_waits(engine, objective, number) for number in MICRO_BATCHES)
    between = MICRO_BATCHES[1] - MICRO_BATCHES[0]
    each = {place: (count - few[place]) / between for place, count in more.items() if count > few[place]}
    return {"of_an_update": few.total() - sum(each.values()), "of_a_micro_batch": sum(each.values()), "places": each}


def _waits(engine: Watched, objective: Objective, micro_batches: int) -> Counter[str]:
    """By place in the source."""
    packs = engine.share.micro_batch_size
    rows = [range(number * packs, (number + 1) * packs) for number in range(micro_batches)]
    engine.clear_gradient()
    engine.forward_and_backward(rows, objective)  # what is made once is made here
    engine.clear_gradient()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.forward_and_backward(rows, objective)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.clear_gradient()
    return Counter(place(one.filename, one.lineno) for one in told if WAITED in str(one.message))


def place(filename: str, line: int) -> str:
    """A line of source, for the eye: the last three parts of its path."""
    return f"{'/'.join(Path(filename).parts[-3:])}:{line}"
