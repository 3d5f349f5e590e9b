"""Phases of a run with flags of their own, and the batch size of each step.

Such flags are data, pack length, rotary base and learning rate.
"""

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megaenc import flags
from megaenc.data.packing.data_path import may_share_weights
from megaenc.data.packing.packed_dataset import check_two_chunks_fit
from megaenc.errors import InputError, closest_match
from megaenc.objectives.parser import parse_schedule
from megaenc.training.lr_schedule import (
    WSD,
    WSD_FLAGS,
    LearningRate,
    LearningRateConfig,
    LearningRateSchedule,
    PhasedSchedule,
)

if TYPE_CHECKING:
    from megaenc.training.config import PretrainConfig

LEARNING_RATE_FLAGS = tuple(field.name for field in dataclasses.fields(LearningRateConfig))
"""Flags of a phase that give each phase a learning-rate schedule of its own."""

_LENGTHS = ("train_iters", "train_tokens")

REPLACES = {
    "train_iters": ("train_tokens",),
    "train_tokens": ("train_iters",),
    "lr_warmup_iters": ("lr_warmup_fraction",),
    "lr_warmup_fraction": ("lr_warmup_iters",),
    "lr_wsd_decay_iters": ("lr_wsd_decay_fraction",),
    "lr_wsd_decay_fraction": ("lr_wsd_decay_iters",),
    "branch_from": ("branch_at", "init_from", "init_at"),
    "init_from": ("init_at", "branch_from", "branch_at"),
    "phases": ("objective_schedule", "train_iters", "train_tokens", "rampup_batch_size"),
}
"""Fields that a given field sets to their defaults in the settings that it is applied to."""


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Global batch size of each step in packs: a ramp-up, then `full`.

    `build_batch_sizes` makes it; `size` returns the packs of a step. `starts` has the first sample,
    from 0, of each training step of the ramp-up and of the first step with `full` packs: (0,)
    without a ramp-up.
    """

    full: int
    starts: tuple[int, ...] = (0,)

    def first_sample(self, step: int) -> int:
        """Return the number of samples (packs) read before `step` (1, 2, ...).

        It is the position, from 0, of the step's first sample among those that are read.
        """
        ramp_steps = len(self.starts)
        return (
            self.starts[step - 1]
            if step <= ramp_steps
            else self.starts[-1] + (step - ramp_steps) * self.full
        )

    def size(self, step: int) -> int:
        """Return the global batch size of `step` (1, 2, ...) in packs."""
        return self.first_sample(step + 1) - self.first_sample(step)

    def steps_for(self, samples: int) -> int:
        """Return the smallest number of steps that together read `samples` packs or more."""
        if samples <= self.starts[-1]:
            return bisect_left(self.starts, samples)
        return len(self.starts) - 1 + -(-(samples - self.starts[-1]) // self.full)


@functools.cache
def build_batch_sizes(full: int, rampup: tuple[int, ...] | None) -> BatchSizeSchedule:
    """Return the global batch size of each step, up to `full` packs.

    Args:
        full: Packs a step after the ramp-up.
        rampup: First size, increment, and samples over which it grows (--rampup-batch-size,
            checked), by megatron-core's rule; None for a constant size.
    """
    if not rampup:
        return BatchSizeSchedule(full)
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, samples = rampup
    rule = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    starts = [0]
    while rule.get_current_global_batch_size() < full:
        starts.append(starts[-1] + rule.get_current_global_batch_size())
        rule.update(starts[-1], consistency_check=False)
    return BatchSizeSchedule(full, tuple(starts))


@dataclass(frozen=True)
class PhaseConfig:
    """Steps of a phase, with settings that describe them like a run of their own.

    `resolve_phases` makes it. `first_step` and `last_step` are inclusive, and count from 1 over all
    phases. `settings` are the phase's flags over those of the run, with its objective as
    `objective_schedule`; its steps count from 1.
    """

    first_step: int
    last_step: int
    settings: "PretrainConfig"
    """Flags of the phase over those of the run, with its objective as schedule; its steps count
    from 1."""


def resolve_phases(config: "PretrainConfig") -> tuple[PhaseConfig, ...]:
    """Return the phases of a run in order, only one if `config` has no `phases`.

    `PretrainConfig.phase_configs` keeps the result.

    Raises:
        InputError: A phase is wrong; the error names phase and field.
    """
    if not config.phases:
        return (PhaseConfig(1, config.phase_iters, config),)
    _check_top_level(config)
    parsed = [
        _resolve_phase(config, text, f"phase {index}")
        for index, text in enumerate(config.phases, 1)
    ]
    ends = accumulate(settings.phase_iters for settings in parsed)
    return tuple(
        PhaseConfig(end - settings.phase_iters + 1, end, settings)
        for end, settings in zip(ends, parsed, strict=True)
    )


def build_learning_rate(config: "PretrainConfig") -> LearningRate:
    """Return the learning-rate schedule of a run.

    It is a PhasedSchedule, with a schedule for each phase, if any phase names a learning-rate flag;
    else one LearningRateSchedule over all steps.

    Raises:
        InputError: Flags do not fit together; the error names the phase, if it is of one.
    """
    if not any(
        set(LEARNING_RATE_FLAGS) & set(parse_phase(text, "phases")) for text in config.phases
    ):
        return LearningRateSchedule.from_config(config.learning_rate, config.total_iters)
    parts = []
    for index, phase in enumerate(config.phase_configs, 1):
        try:
            parts.append(
                LearningRateSchedule.from_config(
                    phase.settings.learning_rate, phase.settings.phase_iters
                )
            )
        except InputError as error:
            raise InputError(f"phase {index}: {error}") from None
    return PhasedSchedule(tuple(parts))


def drop_replaced(settings: "PretrainConfig", values: Mapping[str, Any]) -> "PretrainConfig":
    """Return a copy of `settings` with defaults for fields that `values` replace.

    For use before `values` are applied over `settings`. REPLACES names the fields, such as
    train_tokens for a value of train_iters; an lr_decay_style other than WSD replaces the fields of
    WSD's decay.

    Args:
        values: New values by field name, also of fields in groups such as `data`. They are not
            applied here; a value None replaces nothing.
    """
    replaced = set()
    for given, value in values.items():
        if value is not None:
            replaced.update(REPLACES.get(given, ()))
    if values.get("lr_decay_style") not in (None, WSD):
        replaced.update(WSD_FLAGS)
    defaults = flags.flatten(type(settings)(bf16=settings.bf16))  # whose default imports torch
    return flags.replace_fields(settings, {name: defaults[name] for name in replaced}, source="")


def _check_top_level(config: "PretrainConfig") -> None:
    """Raise InputError for flags next to `phases` that only a phase can have."""
    given = {"train_iters": config.train_iters, "train_tokens": config.train_tokens}
    given["rampup_batch_size"] = config.rampup_batch_size and " ".join(
        map(str, config.rampup_batch_size)
    )
    given["objective_schedule"] = (
        config.objective_schedule
        if config.objective_schedule != type(config).objective_schedule
        else None
    )
    for name, value in given.items():
        if value is not None:
            place = (
                "`objective` of each phase"
                if name == "objective_schedule"
                else f"{name} in a phase"
            )
            raise InputError(
                f"--{name.replace('_', '-')}: found {value} together with phases, expected {place}"
            )


def parse_phase(text: str, source: str) -> dict[str, Any]:
    """Return the fields of a phase by name, from a YAML mapping as text.

    Names get underscores for hyphens; they and the values are not checked.

    Args:
        text: Such as "{objective: mlm, train_iters: 100, seq_length: 512}".
        source: Beginning of errors.

    Raises:
        InputError: `text` is no YAML mapping, or gives a field in two spellings.
    """
    return flags.parse_mapping(text, source, "{objective: mlm, train_iters: 100, seq_length: 512}")


def phase_field_names(settings: Any) -> list[str]:
    """Return the names of the fields of `settings` that may differ by phase.

    They have `phase` in their metadata. A nested dataclass is listed by its fields, not its name.

    Args:
        settings: Instance of a dataclass of flags, such as PretrainConfig.
    """
    names = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            names += phase_field_names(value)
        elif "phase" in field.metadata:
            names.append(field.name)
    return names


def _resolve_phase(config: "PretrainConfig", text: str, source: str) -> "PretrainConfig":
    """Return the settings of a phase, its objective and flags over those of `config`."""
    values = parse_phase(text, source)
    known = ("objective", *phase_field_names(config))
    for name in values:
        if name not in known:
            near = closest_match(name, known)
            hint = f"did you mean `{near}`?" if near else f"expected one of {', '.join(known)}"
            raise InputError(f"{source}: field `{name}` cannot change by phase; {hint}")
    objective = values.pop("objective", None)
    if not isinstance(objective, str):
        problem = "missing" if objective is None else f"found {objective!r}"
        raise InputError(
            f"{source}: field `objective`: {problem}, expected an objective, mixture or sum such "
            "as mlm(mask=0.3)"
        )
    given = [name for name in _LENGTHS if values.get(name) is not None]
    if len(given) != 1:
        raise InputError(
            f"{source}: found {' and '.join(given) or 'neither train_iters nor train_tokens'}, "
            "expected one of them"
        )
    settings = dataclasses.replace(config, phases=(), objective_schedule=objective)
    settings = flags.replace_fields(drop_replaced(settings, values), values, source=source)
    try:
        settings.check_rampup()
        if settings.data.packing == "random-length":
            check_two_chunks_fit(settings.data.seq_length)
        if (
            settings.data.blend_temperature != 1
            and "blend_temperature" in values
            and not may_share_weights(settings.data.data_path)
        ):
            raise InputError(
                f"field `blend_temperature`: found {settings.data.blend_temperature:g} without a "
                "group of corpora in data_path, "
                "expected a pattern such as 'data/*_text_document', or corpora without weights"
            )
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    try:
        parsed = parse_schedule(objective, settings.phase_iters)
    except InputError as error:
        raise InputError(f"{source}: field `objective`: {error}") from None
    # A sole phase without amount begins with it.
    if len(parsed) != 1 or objective[: parsed[0].amount_text.start].strip():
        raise InputError(
            f"{source}: field `objective`: found {objective}, expected one objective, mixture or "
            "sum without an amount"
        )
    return settings
