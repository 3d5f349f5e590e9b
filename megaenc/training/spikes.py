"""Losses that leap: found from the losses alone, so that a run that was stopped, or is branched, finds the same ones."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

WINDOW, SHORTEST = 128, 32
"""Losses that a new one is compared with, at most and at least."""


def deviations(loss: float, recent: Sequence[float]) -> float:
    """How many robust standard deviations `loss` lies above the median of `recent`.

    The deviation is 1.4826 times the median distance from the median, which for normal noise is the standard deviation. Unlike
    mean and standard deviation these two do not move when a spike is among the losses, so the next one is found as well. It is
    at least a thousandth of the median: losses that are all the same leave room for rounding.
    """
    middle = median(recent)
    spread = 1.4826 * median(abs(other - middle) for other in recent)
    return (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-30)


class RecentLosses:
    """The last losses of each objective by its text: those of another say nothing, and losses leap where objectives change."""

    def __init__(self, state: dict[str, Any] | None = None):
        """`state` is what the attribute was when a checkpoint was saved."""
        self.state: dict[str, Any] = {text: dict(window) for text, window in (state or {}).items()}
        """JSON-ready: by objective its last `step` and its `losses`, at most WINDOW."""

    def add(self, step: int, objective: str, loss: float | None) -> float | None:
        """Add the loss of update `step` and return its `deviations` from those before, None if there are too few.

        An objective that comes back after more than SHORTEST steps of others begins anew: the model has changed meanwhile.
        """
        if loss is None or not math.isfinite(loss):
            return None
        window = self.state.get(objective)
        recent = window["losses"] if window and step - window["step"] <= SHORTEST else []
        found = deviations(loss, recent) if len(recent) >= SHORTEST else None
        self.state[objective] = {"step": step, "losses": [*recent, loss][-WINDOW:]}
        return found
