"""The learning-rate schedule as a pure function of the step.

There is no state to save.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

from megaenc.errors import InputError
from megaenc.flags import (
    BY_PHASE,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    setting,
)
from megaenc.plugins import Registry

WSD = "WSD"
CONSTANT = "constant"
WSD_FLAGS = ("lr_wsd_decay_iters", "lr_wsd_decay_fraction", "lr_wsd_decay_style")


@dataclass(frozen=True)
class LearningRateConfig:
    """Flags of the learning rate: peak, warm-up and decay, which may differ by phase.

    `PretrainConfig.learning_rate` is one; `LearningRateSchedule.from_config` makes a schedule of
    it. `lr` is the peak. The warm-up has `lr_warmup_iters` steps or `lr_warmup_fraction` of the
    run, the decay of the style WSD `lr_wsd_decay_iters` or `lr_wsd_decay_fraction`; either is 0.05
    of the run by default. `lr_decay_style` is WSD, constant (no decay) or a shape such as cosine,
    decaying from the warm-up on; `lr_wsd_decay_style` is the shape of WSD's decay. `min_lr` is the
    rate that a decay would reach in the step after the last.
    """

    lr: PositiveFloat = setting(2e-3, BY_PHASE)
    """peak learning rate"""
    lr_warmup_iters: NonNegativeInt | None = setting(None, BY_PHASE)
    """steps of linear warm-up; alternative: --lr-warmup-fraction"""
    lr_warmup_fraction: Fraction | None = setting(None, BY_PHASE)
    """linear warm-up as a fraction of the run; 0.05 if neither flag is given"""
    lr_decay_style: str = setting("WSD", BY_PHASE)
    """learning rate after the warm-up. WSD: constant, then a decay at the end of the run; constant:
    no decay; linear, cosine or another style of --lr-wsd-decay-style: a decay from the warm-up
    on"""
    lr_wsd_decay_iters: NonNegativeInt | None = setting(None, BY_PHASE)
    """steps of WSD's decay to --min-lr at the end of the run; alternative:
    --lr-wsd-decay-fraction"""
    lr_wsd_decay_fraction: Fraction | None = setting(None, BY_PHASE)
    """WSD's decay as a fraction of the run; 0.05 if neither flag is given"""
    lr_wsd_decay_style: str = setting("linear", BY_PHASE)
    """shape of WSD's decay: linear, cosine, minus_sqrt (1 - sqrt(elapsed fraction)), exponential,
    or one of a package"""
    min_lr: NonNegativeFloat = setting(0.0, BY_PHASE)
    """learning rate at which a decay would end in the step after the run's last"""


# A run's identity has other values of these.
_RESOLVED = (
    "lr_warmup_iters",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
)


def linear(elapsed: float) -> float:
    """Return the fraction 1 - r of peak minus --min-lr that remains in a decay.

    Args:
        elapsed: r, the elapsed fraction of the decay, 0 to 1.
    """
    return 1.0 - elapsed


def cosine(elapsed: float) -> float:
    """Return the fraction (1 + cos(pi r)) / 2 of peak minus --min-lr that remains.

    Args:
        elapsed: r, the elapsed fraction of the decay, 0 to 1.
    """
    return 0.5 * (math.cos(math.pi * elapsed) + 1.0)


def minus_sqrt(elapsed: float) -> float:
    """Return the fraction 1 - sqrt(r) of peak minus --min-lr that remains in a decay.

    Args:
        elapsed: r, the elapsed fraction of the decay, 0 to 1.
    """
    return 1.0 - math.sqrt(elapsed)


def exponential(elapsed: float) -> float:
    """Return the fraction 2 * 0.5^r - 1 of peak minus --min-lr that remains.

    Args:
        elapsed: r, the elapsed fraction of the decay, 0 to 1.
    """
    return 2.0 * math.pow(0.5, elapsed) - 1.0


def _find_defect(name: str, style: Any) -> str:
    """Return why an object cannot be the decay style `name`; empty if it can."""
    if not inspect.isfunction(style):
        return "is no function"
    if name in (WSD, CONSTANT):
        return f"is called `{name}`, which is no shape of a decay"
    known_flags = {field.name for field in fields(LearningRateConfig)} - {*_RESOLVED}
    unknown = next((flag for flag in flags_of(style) if flag not in known_flags), None)
    return f"reads `{unknown}`, which is no flag that a decay style can read" if unknown else ""


def flags_of(style: Callable[..., float]) -> tuple[str, ...]:
    """Return the names of the LearningRateConfig fields that a decay style reads.

    They are its keyword-only parameters.

    Args:
        style: Function such as `linear`, a value of DECAY_STYLES.
    """
    parameters = inspect.signature(style).parameters.values()
    return tuple(
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    )


LEARNING_RATE_IDENTITY = (
    *(field.name for field in fields(LearningRateConfig)),
    "lr_decay_package",
    "lr_phases",
)
"""Possible entries of a run's identity about its learning rate."""
DECAY_STYLES: Registry[Callable[..., float]] = Registry(
    "megaenc.lr_decay_styles", "decay style", _find_defect
)
"""Functions of the elapsed fraction r of a decay, 0 to 1, that return the remaining fraction of the
peak above --min-lr."""
for _style in (linear, cosine, minus_sqrt, exponential):  # as in megatron-core
    DECAY_STYLES.register(_style.__name__, _style)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning rate by step: linear warm-up, constant peak, then a decay.

    `from_config` makes it. `warmup`, `decay` and `total` are numbers of steps, `style` is a name in
    DECAY_STYLES, `options` has the flags that the style reads, as pairs of name and value. Called
    with a step n = 1..total, it returns peak * n / warmup for n <= warmup, then peak, then min_lr +
    (peak - min_lr) * f(r) over the last `decay` steps, where r = (n - 1 - (total - decay)) / decay
    and f is the decay style; the first of them still has the peak. megatron-core's warm-up begins
    with the rate zero instead.

    Raises:
        InputError: Warm-up and decay exceed `total`, or the style is unknown.
    """

    peak: float
    warmup: int
    decay: int
    total: int
    style: str = LearningRateConfig.lr_wsd_decay_style
    min_lr: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    """Flags that the style reads, with their values."""

    def __post_init__(self) -> None:
        if self.warmup + self.decay > self.total:
            raise InputError(
                f"warm-up of {self.warmup} and decay of {self.decay} steps do not fit in the "
                f"{self.total} steps of the run: "
                "lower --lr-warmup-iters or --lr-wsd-decay-iters (or the fractions)"
            )
        object.__setattr__(self, "_remaining", DECAY_STYLES.find(self.style))

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step` (1 to `total`)."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if step <= self.total - self.decay:
            return self.peak
        if self.style == "linear" and not self.min_lr:
            return self.peak * (self.total - step + 1) / self.decay  # rounds once less
        elapsed = (step - 1 - (self.total - self.decay)) / self.decay
        return self.decayed(elapsed)

    def decayed(self, elapsed: float) -> float:
        """Return the learning rate after a fraction of the decay, the peak after 0.

        Args:
            elapsed: Elapsed fraction of the decay, 0 to 1.
        """
        return self.min_lr + (self.peak - self.min_lr) * self._remaining(
            elapsed, **dict(self.options)
        )

    @property
    def last_peak(self) -> int:
        """Return the last step with the peak rate, the first step of the decay.

        It is `total` without a decay.
        """
        return self.total - max(self.decay, 1) + 1

    @classmethod
    def from_config(cls, config: LearningRateConfig, total: int) -> Self:
        """Return the schedule of the flags `config` in a run or phase of `total` steps.

        Fractions of the run are resolved to whole steps.

        Raises:
            InputError: The flags do not fit together, or the decay style is unknown, raises an
                error or returns no finite number.
        """
        style = config.lr_decay_style
        shape = {
            WSD: config.lr_wsd_decay_style,
            CONSTANT: LearningRateConfig.lr_wsd_decay_style,
        }.get(style, style)
        flag = "--lr-wsd-decay-style" if style == WSD else "--lr-decay-style"
        try:
            remaining = DECAY_STYLES.find(shape)
        except InputError as error:
            expected = "" if style == WSD else f" expected {WSD}, {CONSTANT} or a decay style:"
            raise InputError(f"{flag}:{expected} {error}") from None
        style_flags = flags_of(remaining)
        _check_unread(config, style_flags)
        options = {name: getattr(config, name) for name in style_flags}
        _try_style(flag, shape, partial(remaining, **options))
        if config.min_lr > config.lr:
            raise InputError(
                f"--min-lr: found {config.min_lr:g}, expected at most --lr {config.lr:g}"
            )
        warmup = resolve_steps(
            "lr-warmup", config.lr_warmup_iters, config.lr_warmup_fraction, total
        )
        decay = 0
        if style == WSD:
            decay = resolve_steps(
                "lr-wsd-decay", config.lr_wsd_decay_iters, config.lr_wsd_decay_fraction, total
            )
        elif style != CONSTANT:
            decay = max(total - warmup, 0)
        return cls(config.lr, warmup, decay, total, shape, config.min_lr, tuple(options.items()))

    @property
    def identity(self) -> dict[str, Any]:
        """Return the schedule as JSON-ready entries of a run's identity, by field name.

        They are lr, lr_warmup_iters, lr_wsd_decay_iters and lr_wsd_decay_style (with any
        --lr-decay-style), min_lr and the flags in `options`; for a style of a package also
        lr_decay_package. The number of steps, `train_iters`, is not among them. `from_identity`
        reads them.
        """
        entries = {
            "lr": self.peak,
            "lr_warmup_iters": self.warmup,
            "lr_wsd_decay_iters": self.decay,
            "lr_wsd_decay_style": self.style,
            "min_lr": self.min_lr,
        }
        origin = DECAY_STYLES.package_origin(self.style, self._remaining)
        return entries | dict(self.options) | ({"lr_decay_package": origin} if origin else {})

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> Self:
        """Return the schedule that a run's `identity` holds.

        Args:
            identity: Entries of `identity`, and `train_iters` with the number of steps.

        Raises:
            ValueError: Entries are missing, as in the identity of a PhasedSchedule.
            InputError: The decay style is not installed, or warm-up and decay are too long.
        """
        rates = [identity.get(name) for name in ("lr", "min_lr")]
        steps = [
            identity.get(name) for name in ("lr_warmup_iters", "lr_wsd_decay_iters", "train_iters")
        ]
        if not all(type(rate) in (int, float) for rate in rates) or not all(
            type(count) is int for count in steps
        ):
            raise ValueError("no learning rate")
        style = str(identity.get("lr_wsd_decay_style"))
        options = tuple((name, identity.get(name)) for name in flags_of(DECAY_STYLES.find(style)))
        peak, min_lr = rates
        return cls(peak, *steps, style, min_lr, options)

    def describe(self) -> str:
        """Return the schedule as text for the console, a phrase without a full stop.

        It is such as `to 0.002 over 10 steps, constant, down over the last 10 steps (cosine) to
        4.9e-05 in the last`.
        """
        text = f"to {self.peak:g} over {self.warmup:,} steps"
        if self.warmup + self.decay < self.total:
            text += ", constant"
        if not self.decay:
            return text
        style = "" if self.style == LearningRateConfig.lr_wsd_decay_style else f" ({self.style})"
        return (
            f"{text}, down over the last {self.decay:,} steps{style} to {self(self.total):.4g} in "
            "the last"
        )


@dataclass(frozen=True)
class PhasedSchedule:
    """Learning rate by step in a run whose phases have schedules of their own.

    `build_learning_rate` makes it. `parts` has a LearningRateSchedule for each phase, in order,
    each over its `total` steps. It is called with a step, which counts over all phases, from 1 to
    the sum of `total`.
    """

    parts: tuple[LearningRateSchedule, ...]

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`, which counts from 1 over all phases."""
        for part in self.parts[:-1]:
            if step <= part.total:
                return part(step)
            step -= part.total
        return self.parts[-1](step)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the schedule as JSON-ready entries of a run's identity.

        `lr_phases` has a dictionary for each part, its own `identity` with its steps as
        `train_iters`; `lr` is the peak of the last part.
        """
        return {
            "lr_phases": [{"train_iters": part.total, **part.identity} for part in self.parts],
            "lr": self.parts[-1].peak,
        }

    def describe(self) -> str:
        """Return the texts of the parts, joined by `; then `."""
        return "; then ".join(part.describe() for part in self.parts)


LearningRate = LearningRateSchedule | PhasedSchedule


def learning_rate_from_identity(identity: Mapping[str, Any]) -> LearningRate:
    """Return the learning-rate schedule that a run's `identity` holds.

    Args:
        identity: `Plan.identity` of the run, as in its run.json.

    Raises:
        ValueError: The identity holds no schedule.
        InputError: A decay style is not installed, or warm-up and decay are too long.
    """
    if "lr_phases" not in identity:
        return LearningRateSchedule.from_identity(identity)
    rows = identity["lr_phases"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no learning rate")
    return PhasedSchedule(tuple(LearningRateSchedule.from_identity(row) for row in rows))


def resolve_steps(
    flag: str, iters: int | None, fraction: float | None, total: int, default: float = 0.05
) -> int:
    """Return a number of steps given as a number or as a fraction of the run.

    Args:
        flag: Beginning of both flags without the leading hyphens, such as lr-warmup for
            --lr-warmup-iters and --lr-warmup-fraction.
        iters: Value of the first flag, which is returned unchecked; None if it is not given.
        fraction: Value of the second, a fraction of `total`; None if it is not given.
        total: Steps of the run; its product with the fraction is rounded, halves up.
        default: Fraction if neither is given.

    Raises:
        InputError: Both flags are given.
    """
    if iters is not None and fraction is not None:
        raise InputError(f"--{flag}-iters and --{flag}-fraction: found both, expected one")
    if iters is not None:
        return iters
    if fraction is None:
        fraction = default
    return math.floor(fraction * total + 0.5)


def _try_style(flag: str, name: str, remaining: Callable[[float], float]) -> None:
    """Raise InputError, naming `flag`, unless a decay style returns finite numbers.

    A run would need them only at its end.
    """
    for elapsed in (0.0, 0.999):
        try:
            value = remaining(elapsed)
            is_finite = math.isfinite(value)
        except Exception as error:  # a package's function may raise anything
            raise InputError(
                f"{flag}: decay style `{name}` cannot be computed: {type(error).__name__}: {error}"
            ) from error
        if not is_finite:
            raise InputError(
                f"{flag}: decay style `{name}` is {value} after {elapsed:g} of the decay, "
                "expected a number"
            )


def _check_unread(config: LearningRateConfig, style_flags: tuple[str, ...]) -> None:
    """Raise InputError for a flag of decays without effect.

    Neither the decay style, which reads `style_flags`, nor --lr-decay-style has it.
    """
    style = config.lr_decay_style
    read = {WSD: (*WSD_FLAGS, "min_lr"), CONSTANT: ()}.get(style, ("min_lr",))
    always = ("lr", "lr_warmup_iters", "lr_warmup_fraction", "lr_decay_style")
    for field in fields(LearningRateConfig):
        value = getattr(config, field.name)
        if field.name in (*always, *read, *style_flags) or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        expected = WSD if field.name in WSD_FLAGS else "another style"
        raise InputError(
            f"{flag}: found {value} with --lr-decay-style {style}, expected {expected}, or no "
            f"{flag}"
        )
