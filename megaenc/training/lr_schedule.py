"""The learning-rate schedule as a pure function of the step, without state to save."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from megaenc.errors import InputError

if TYPE_CHECKING:
    from megaenc.training.config_groups import OptimizerConfig


WSD_DECAY_STYLE = "linear"
"""Default of --lr-wsd-decay-style."""

DECAY_COEFFICIENTS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
    "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
}
"""Remaining share of the peak above --min-lr, by style, of the elapsed share of the decay; as in megatron-core."""


@dataclass(frozen=True)
class WSDSchedule:
    """Callable learning rate of a step: `warmup` steps up to `peak`, constant, fall to `min_lr` over last `decay` of `total`.

    For steps n = 1..total: peak * n / warmup for n <= warmup, then peak, then min_lr + (peak - min_lr) * f(r) over the last
    `decay` steps, where r = (n - 1 - (total - decay)) / decay, and f(r) by `style`: linear 1 - r, cosine (1 + cos(pi r)) / 2,
    minus_sqrt 1 - sqrt(r), exponential 2 * 0.5^r - 1. The first of them still has the peak, and the rate of no step is zero.
    megatron-core has the same rates of decay, and its warm-up is one step later, so that the rate of its first step is zero.
    """

    peak: float
    warmup: int
    decay: int
    total: int
    style: str = WSD_DECAY_STYLE
    min_lr: float = 0.0

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
        if step <= self.total - self.decay:
            return self.peak
        if self.style == "linear" and not self.min_lr:
            return self.peak * (self.total - step + 1) / self.decay  # rounds once less
        elapsed = (step - 1 - (self.total - self.decay)) / self.decay
        return self.min_lr + (self.peak - self.min_lr) * DECAY_COEFFICIENTS[self.style](elapsed)

    @property
    def last_peak(self) -> int:
        """Return the last step with the peak rate: the first step of a decay still has it."""
        return self.total - max(self.decay, 1) + 1

    @classmethod
    def from_config(cls, optimizer: "OptimizerConfig", total: int) -> Self:
        """Return the schedule of the flags `optimizer` in a run of `total` steps; InputError if they do not fit together.

        The decay styles linear and cosine are a decay of all steps after the warm-up; constant is none.
        """
        style = optimizer.lr_decay_style
        decay_style = optimizer.lr_wsd_decay_style
        decay_flags = {name: getattr(optimizer, name) for name in ("lr_wsd_decay_iters", "lr_wsd_decay_fraction")}
        decay_flags["lr_wsd_decay_style"] = None if decay_style == WSD_DECAY_STYLE else decay_style
        decay_flags |= {"min_lr": optimizer.min_lr or None} if style == "constant" else {}
        for name, value in decay_flags.items() if style != "WSD" else ():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                expected = "another style" if name == "min_lr" else "WSD"
                raise InputError(f"{flag}: found {value} with --lr-decay-style {style}, expected {expected}, or no {flag}")
        if optimizer.min_lr > optimizer.lr:
            raise InputError(f"--min-lr: found {optimizer.min_lr:g}, expected at most --lr {optimizer.lr:g}")
        warmup = resolve_steps("lr-warmup", optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction, total)
        if style == "WSD":
            decay = resolve_steps("lr-wsd-decay", optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_fraction, total)
        else:
            decay, decay_style = (0, WSD_DECAY_STYLE) if style == "constant" else (max(total - warmup, 0), style)
        return cls(optimizer.lr, warmup, decay, total, decay_style, optimizer.min_lr)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the entries of a run's identity, without the peak and the number of steps."""
        return {
            "lr_warmup_iters": self.warmup,
            "lr_wsd_decay_iters": self.decay,
            "lr_wsd_decay_style": self.style,
            "min_lr": self.min_lr,
        }

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> Self:
        """Return the schedule of a run by its `identity`; ValueError if that holds none."""
        rates = [identity.get(name) for name in ("lr", "min_lr")]
        steps = [identity.get(name) for name in ("lr_warmup_iters", "lr_wsd_decay_iters", "train_iters")]
        style = identity.get("lr_wsd_decay_style")
        if not all(type(rate) in (int, float) for rate in rates) or not all(type(count) is int for count in steps):
            raise ValueError("no learning rate")
        if str(style) not in DECAY_COEFFICIENTS:
            raise ValueError(f"unknown decay style {style}")
        peak, min_lr = rates
        return cls(peak, *steps, style, min_lr)

    def describe(self) -> str:
        """Return the schedule as text for the console.

        `to 0.002 over 10 steps, constant, down over the last 10 steps (cosine) to 4.9e-05 in the last`
        """
        text = f"to {self.peak:g} over {self.warmup:,} steps"
        if self.warmup + self.decay < self.total:
            text += ", constant"
        if not self.decay:
            return text
        style = "" if self.style == WSD_DECAY_STYLE else f" ({self.style})"
        return f"{text}, down over the last {self.decay:,} steps{style} to {self(self.total):.4g} in the last"


@dataclass(frozen=True)
class PhasedSchedule:
    """Callable learning rate of a step in a run whose phases have learning-rate schedules `parts` of their own."""

    parts: tuple[WSDSchedule, ...]

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step` (1, 2, ...)."""
        for part in self.parts[:-1]:
            if step <= part.total:
                return part(step)
            step -= part.total
        return self.parts[-1](step)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the entry `lr_phases` of a run's identity: flags and steps of each part."""
        return {"lr_phases": [{"train_iters": part.total, "lr": part.peak, **part.identity} for part in self.parts]}

    def describe(self) -> str:
        """Return the texts of the parts, such as `to 0.002 over 10 steps, constant`, joined by `then`."""
        return "; then ".join(part.describe() for part in self.parts)


LearningRate = WSDSchedule | PhasedSchedule


def learning_rate_from_identity(identity: Mapping[str, Any]) -> LearningRate:
    """Return the learning-rate schedule of a run by its `identity`; ValueError if that holds none."""
    if "lr_phases" not in identity:
        return WSDSchedule.from_identity(identity)
    rows = identity["lr_phases"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no learning rate")
    return PhasedSchedule(tuple(WSDSchedule.from_identity(row) for row in rows))


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
