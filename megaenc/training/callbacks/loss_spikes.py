"""Detection of loss spikes, by comparison with recent losses."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from megaenc.training.plan import Plan

MAX_RECENT_LOSSES = 128
MIN_RECENT_LOSSES = 32
"""Largest and smallest number of earlier losses that a new loss is compared with."""


def compute_deviations(loss: float, recent: Sequence[float]) -> float:
    """Return by how many robust standard deviations `loss` exceeds `recent` losses.

    They are counted from the median, and negative below it. One deviation is 1.4826 times the
    median absolute deviation (the standard deviation of normal noise), and at least a thousandth of
    the median, so that equal losses leave room for rounding. Earlier spikes hardly change either.

    Args:
        recent: One or more finite losses, in any order.
    """
    center = median(recent)
    spread = 1.4826 * median(abs(recent_loss - center) for recent_loss in recent)
    return (loss - center) / max(spread, 1e-3 * abs(center), 1e-30)


class RecentLosses:
    """Recent losses of each objective, to which new ones are compared.

    `add` compares and keeps a loss; the newest MAX_RECENT_LOSSES of each objective are kept. All
    ranks add the same losses, and nothing is communicated. `RecentLosses()` begins empty. The
    attribute `state`, JSON-ready, is saved in checkpoints; `RecentLosses(state)` restores a copy.
    """

    def __init__(self, state: dict[str, Any] | None = None):
        """Restore the `state` attribute of an earlier instance; None starts empty."""
        self.state: dict[str, Any] = {text: dict(window) for text, window in (state or {}).items()}
        """JSON-ready: for each objective its last `step` and up to MAX_RECENT_LOSSES `losses`."""

    def add(self, step: int, objective: str, loss: float | None) -> float | None:
        """Add a loss of `objective`; return its deviations above recent ones.

        Before a loss is added, the window of its objective is cleared if the last one is more than
        MIN_RECENT_LOSSES steps older, as the model has changed since. Spikes are added too.

        Args:
            objective: Text of the objective, which has a window of its own.
            loss: Mean loss of `step`; one that is None or not finite is not added.

        Returns:
            Deviations (`compute_deviations`); None with fewer than MIN_RECENT_LOSSES recent losses,
            or for a loss that is not added.
        """
        if loss is None or not math.isfinite(loss):
            return None
        window = self.state.get(objective)
        recent = window["losses"] if window and step - window["step"] <= MIN_RECENT_LOSSES else []
        deviations = compute_deviations(loss, recent) if len(recent) >= MIN_RECENT_LOSSES else None
        self.state[objective] = {"step": step, "losses": [*recent, loss][-MAX_RECENT_LOSSES:]}
        return deviations


def format_spike(plan: Plan, step: int, loss: float, deviations: float) -> str:
    """Return the console line that reports a loss spike at `step`.

    If --max-rewinds of `plan` allows rewinds, it has the number of the next one, or reports that
    none is left.

    Args:
        deviations: Robust standard deviations of `loss` above recent ones.
    """
    allowed = plan.settings.health.max_rewinds
    rewinds = len(plan.rewinds)
    action = (
        f"; rewind {rewinds + 1} of {allowed}"
        if rewinds < allowed
        else f"; all of --max-rewinds {allowed} are used"
    )
    spike = (
        f"step {step}: loss {loss:.4f} is a spike, {deviations:.1f} deviations above the recent "
        "ones"
    )
    return spike + (action if allowed else "")
