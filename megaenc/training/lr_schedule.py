"""The learning-rate schedule as a pure function of the step, without state to save."""

import math
from dataclasses import dataclass

from megaenc.errors import InputError


@dataclass(frozen=True)
class WSDSchedule:
    """Callable learning rate of a step: `warmup` steps up to `peak`, constant, linear fall over last `decay` of `total`.

    For steps n = 1..total: peak * n / warmup for n <= warmup, then peak, then peak * (total - n + 1) / decay over the last
    `decay` steps: the rate of no step is zero.
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

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step` (1, 2, ...)."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if step > self.total - self.decay:
            return self.peak * (self.total - step + 1) / self.decay
        return self.peak


def resolve_steps(flag: str, iters: int | None, fraction: float | None, total: int, default: float = 0.05) -> int:
    """Return `iters`, else `fraction` (else `default`) of `total` steps, rounded; InputError if both are given or invalid.

    They are the values of the flags `--{flag}-iters` and `--{flag}-fraction`.
    """
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
