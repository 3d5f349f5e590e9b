"""The learning rate as a pure function of the update number: nothing to save, nothing to restore wrongly."""

import math
from dataclasses import dataclass

from megaenc.errors import InputError


@dataclass(frozen=True)
class WSDSchedule:
    """Warm-up, constant, decay over updates n = 1..total.

    peak * n / warmup for n <= warmup, then peak, then peak * (total - n + 1) / decay over the last `decay` updates: no update is
    wasted on a rate of zero.
    """

    peak: float
    warmup: int
    decay: int
    total: int

    def __post_init__(self) -> None:
        if self.warmup + self.decay > self.total:
            raise InputError(
                f"warm-up of {self.warmup} and decay of {self.decay} steps do not fit in the {self.total} steps of the run: "
                "lower --lr-warmup-iters or --lr-wsd-decay-iters (or the fractions)"
            )

    def __call__(self, update: int) -> float:
        """The rate of update number `update`."""
        if update <= self.warmup:
            return self.peak * update / self.warmup
        if update > self.total - self.decay:
            return self.peak * (self.total - update + 1) / self.decay
        return self.peak


def resolve_steps(flag: str, iters: int | None, fraction: float | None, total: int, default: float = 0.05) -> int:
    """Return the steps of `--flag-iters` or `--flag-fraction` (half rounded up). InputError if both or out of range."""
    if iters is not None and fraction is not None:
        raise InputError(f"--{flag}-iters and --{flag}-fraction: found both, expected one")
    if iters is not None:
        if iters < 0:
            raise InputError(f"--{flag}-iters: found {iters}, expected 0 or more")
        return iters
    share = default if fraction is None else fraction
    if not 0 <= share <= 1:
        raise InputError(f"--{flag}-fraction: found {share}, expected 0 to 1")
    return math.floor(share * total + 0.5)
