"""Schedule of a run's objectives, which gives the objective of each step.

It is written as `clm:0.25,mlm(mask=0.3):0.75`:

    schedule  = item { "," item }
    item      = phase | count "x" "(" schedule ")"       the contents `count` times
    phase     = content [ ":" amount ]                   without an amount the only one
    content   = objective | combined "(" objective ":" weight { "," objective ":" weight } ")"
    combined  = "mix" | "sum"
    objective = name [ "(" option { "," option } ")" ]
    option    = name "=" value [ "->" value ]            two values: a number that changes
    amount    = number                                   with a point a share, else steps
    weight    = number                                   above zero

Spaces are allowed between all of these. Every error names the character and shows the text with the
wrong part in brackets. An amount with a point is a share of the run, any other a whole number of
steps; one schedule holds one kind. Weights need not add up to 1; in a sum, as the smallest whole
numbers, they are at most 16777216.

Each step of a mixture (`mix`) trains one of its objectives, drawn by weight; the draw depends only
on the seed and the step. Each step of a `sum` trains all of its objectives on the same packs, one
pass each; a prediction counts as many times as its weight. An option that changes goes linearly
from its first value at the phase's first step to its second at the last.
"""

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from megaenc import counter_rng
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import Objective, OptionError
from megaenc.objectives.parser import (
    FLAG,
    MIXTURE,
    SUM,
    ParsedObjective,
    ParsedPhase,
    build_error,
    parse_schedule,
)
from megaenc.objectives.registry import OBJECTIVES, find

_MAX_SPELLED_OUT_PHASES = 16
"""Number of phases above which a run's identity holds their digest, so that it fits one line."""
_MAX_SUM_WEIGHT = 1 << 24
"""Largest weight in a sum: float32, the dtype of the losses' factors, holds whole numbers to it."""


@dataclass(frozen=True)
class ScheduledObjective:
    """Objective of a phase with its `weight` in a mixture or sum.

    The weights of a phase are the smallest whole numbers in the ratio of the text, 1 without a
    combination. The options go linearly from those of `start` at the first step of the phase to
    those of `end`, of the same class, at the last.
    """

    weight: int
    start: Objective
    end: Objective

    @property
    def text(self) -> str:
        """Return the objective as schedule text, `mlm(mask=0.4->0.15)`.

        Options at their default are left out.
        """
        return self.start.describe(end=self.end)


@dataclass(frozen=True)
class Phase:
    """Phase of a run, the steps `first_step` to `last_step`, inclusive, from 1.

    Each step trains one of `choices`, drawn by weight, or, if `is_sum`, all of them on the same
    packs. `index` is the phase's place in the schedule, from 0. `len` is the number of steps.
    `objective` gives a choice the options of a step. `Schedule.build` makes phases.
    """

    index: int
    first_step: int
    last_step: int
    choices: tuple[ScheduledObjective, ...]
    is_sum: bool = False

    @property
    def text(self) -> str:
        """Return the phase as schedule text without its amount, `mix(clm:3,mlm:7)`.

        Options at their default are left out; weights are integers.
        """
        return self.describe()

    def describe(self, every: bool = False) -> str:
        """Return the phase as schedule text without its amount, `mix(clm:3,mlm:7)`.

        Options at their default are left out, unless `every`.
        """
        texts = [choice.start.describe(every, choice.end) for choice in self.choices]
        if len(texts) == 1:
            return texts[0]
        keyword = SUM if self.is_sum else MIXTURE
        pairs = zip(texts, self.choices, strict=True)
        return f"{keyword}({','.join(f'{text}:{choice.weight}' for text, choice in pairs)})"

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.last_step - self.first_step + 1

    def objective(self, choice: ScheduledObjective, step: int) -> Objective:
        """Return the objective that one of `choices` trains at a step.

        Its options change linearly from `choice.start` at `first_step` to `choice.end` at
        `last_step`; integers are rounded, half up. In a phase of one step they are those of the
        start.

        Args:
            choice: One of `choices`, which is not checked.
            step: Step of the run. Steps outside the phase have the options of its ends.
        """
        length = self.last_step - self.first_step
        return (
            choice.start.interpolate(choice.end, (step - self.first_step) / length)
            if length
            else choice.start
        )

    @property
    def passes(self) -> int:
        """Return the number of passes (forward and backward) of a step over each pack.

        It is 1, or in a sum the number of objectives.
        """
        return len(self.choices) if self.is_sum else 1

    @property
    def fractions(self) -> tuple[float, ...]:
        """Return the expected fraction of the phase's passes that train each choice.

        They are in the order of `choices`. The fractions add up to 1; in a sum they are equal,
        whatever the weights.
        """
        if self.is_sum:
            return (1 / self.passes,) * self.passes
        total = sum(choice.weight for choice in self.choices)
        return tuple(choice.weight / total for choice in self.choices)


@dataclass(frozen=True)
class Schedule:
    """Objective schedule of a run, by `build`.

    Its `phases` cover the steps 1..train_iters in order; `seed` is that of the draws from mixtures.
    `objectives` has those that a step trains, and `phase_at` its phase. All methods are pure
    functions.
    """

    phases: tuple[Phase, ...]
    seed: int
    """Seed of the draws from mixtures."""

    @classmethod
    def build(
        cls, text: str, train_iters: int, vocabulary: Vocabulary, seed: int = 0
    ) -> "Schedule":
        """Return the Schedule of a text, with its objectives built and checked.

        A phase given as a share ends at its cumulative share times `train_iters`, half rounded up.

        Args:
            text: Schedule, such as `clm:0.25,mlm(mask=0.3):0.75`, in the syntax of this module.
            train_iters: Steps of the run.
            seed: Seed of the draws from mixtures.

        Raises:
            InputError: The text is invalid or does not fit `vocabulary`, shares do not add up to 1
                or steps to `train_iters`, or a phase has no step.
        """
        if train_iters < 1:
            raise InputError(f"--train-iters: found {train_iters}, expected at least 1")
        parsed_phases = parse_schedule(text, train_iters)
        ends = _compute_phase_ends(text, parsed_phases, train_iters)
        # Thousands of phases may repeat: each is built once, and checked once per length.
        built: dict[Hashable, tuple[ScheduledObjective, ...]] = {}
        checked: set[tuple[Hashable, int]] = set()
        phases = []
        for index, (phase, (before, last)) in enumerate(
            zip(parsed_phases, pairwise([0, *ends]), strict=True)
        ):
            key = (phase.components, phase.is_sum)
            if key not in built:
                built[key] = _build_choices(text, phase, vocabulary)
            choices = built[key]
            length = (phase.components, last - before)
            if length not in checked:
                checked.add(length)
                _check_interpolation(text, phase, choices, last - before)
            phases.append(Phase(index, before + 1, last, choices, phase.is_sum))
        return cls(tuple(phases), seed)

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step, counted from 1.

        Raises:
            ValueError: The step is outside the schedule.
        """
        if not 1 <= step <= self.phases[-1].last_step:
            raise ValueError(f"step {step} is not one of 1..{self.phases[-1].last_step}")
        return self.phases[bisect_left(self.phases, step, key=lambda phase: phase.last_step)]

    def objectives(self, step: int) -> tuple[tuple[int, Objective], ...]:
        """Return (weight, objective) of each pass of a step, with interpolated options.

        A sum has one for each objective, and each of its predictions counts `weight` times in the
        loss. Any other phase has one of weight 1, in a mixture for the objective that is drawn.
        Steps count from 1.

        Raises:
            ValueError: The step is outside the schedule.
        """
        phase = self.phase_at(step)
        if phase.is_sum:
            return tuple((choice.weight, phase.objective(choice, step)) for choice in phase.choices)
        return ((1, phase.objective(self._draw_choice(step), step)),)

    def objective(self, step: int) -> Objective:
        """Return the objective that a step trains, with interpolated options.

        Of a mixture it is the one that is drawn. Steps count from 1.

        Raises:
            ValueError: The step trains a sum of several, or is outside the schedule.
        """
        if self.phase_at(step).is_sum:
            raise ValueError(f"step {step} trains {self.text_at(step)}, expected one objective")
        [(_, objective)] = self.objectives(step)
        return objective

    def describe_step(self, step: int) -> str:
        """Return the objectives that a step trains as text, with interpolated options.

        It is for example `mlm(mask=0.3)`, or `clm + mlm` in a sum, without weights. Options at
        their default are left out. Steps count from 1.

        Raises:
            ValueError: The step is outside the schedule.
        """
        return " + ".join(objective.describe() for _, objective in self.objectives(step))

    def text_at(self, step: int) -> str:
        """Return the schedule text of the objectives that a step trains, not interpolated.

        It is for example `mlm(mask=0.4->0.15)` or `sum(clm:1,mlm:1)`, without options at their
        default and with integer weights, however the schedule was written. Of a mixture it is the
        one that is drawn. Steps count from 1.

        Raises:
            ValueError: The step is outside the schedule.
        """
        phase = self.phase_at(step)
        return phase.text if phase.is_sum else self._draw_choice(step).text

    def final_objectives(self) -> dict[str, Objective]:
        """Return the distinct objectives by text, with their options at a phase's end.

        They are in the order of the phases, those of mixtures and sums one by one. Keys are their
        texts with these options, such as `mlm(mask=0.15)`; a phase that ends with others adds one.
        """
        return {choice.end.describe(): choice.end for choice in self._distinct_choices()}

    def initial_objectives(self) -> dict[str, Objective]:
        """Return the distinct objectives by text, with their options at a phase's start.

        They are in the order of the phases, those of mixtures and sums one by one. Keys are their
        texts with these options, such as `mlm(mask=0.4)`; a phase that starts with others adds one.
        """
        return {choice.start.describe(): choice.start for choice in self._distinct_choices()}

    def packages(self) -> dict[str, str]:
        """Return the packages that define objectives, and their files, by objective name.

        Values are texts `PACKAGE VERSION (HASH)`, of the installed package that registers the
        objective, and `FILE (HASH)`, for each of its `files`, sorted and joined by `, `. HASH is
        the first 12 digits of the SHA-256 of the objective's source file, or of FILE. Objectives
        with neither are left out.

        Raises:
            InputError: The files of an objective cannot be found.
        """
        needs: dict[str, set[str]] = {}
        for choice in self._distinct_choices():
            kind = type(choice.start)
            files = {*choice.start.files(), *choice.end.files()}
            origin = OBJECTIVES.package_origin(kind.name, kind)
            texts = {origin} if origin else set()
            needs.setdefault(kind.name, set()).update(
                texts, (f"{file.name} ({_hash_file(file)})" for file in files)
            )
        return {name: ", ".join(sorted(texts)) for name, texts in needs.items() if texts}

    def _distinct_phases(self) -> dict[int, Phase]:
        """Return one phase for each distinct tuple of choices, by the tuple's id."""
        return {id(phase.choices): phase for phase in self.phases}

    def _distinct_choices(self) -> list[ScheduledObjective]:
        return [choice for phase in self._distinct_phases().values() for choice in phase.choices]

    @property
    def canonical(self) -> str:
        """Return a text that is equal exactly for schedules with equal phases.

        It is the schedule with all options and amounts in steps, or above 16 phases their number,
        SHA-256 and the first one. The seed is not part of it.
        """
        texts = {key: phase.describe(every=True) for key, phase in self._distinct_phases().items()}
        parts = [f"{texts[id(phase.choices)]}:{len(phase)}" for phase in self.phases]
        if len(parts) <= _MAX_SPELLED_OUT_PHASES:
            return ",".join(parts)
        digest = hashlib.sha256(",".join(parts).encode()).hexdigest()
        return f"{len(parts)} phases with sha256 {digest}, the first {parts[0]}"

    def _draw_choice(self, step: int) -> ScheduledObjective:
        """Draw the choice of a step that is in no sum."""
        choices = self.phase_at(step).choices
        if len(choices) == 1:
            return choices[0]
        bounds = list(accumulate(choice.weight for choice in choices))
        draw = counter_rng.uniforms(self.seed, "mixture", 1, counters=(step,))[0] * bounds[-1]
        return next(choice for choice, bound in zip(choices, bounds, strict=True) if draw < bound)


def parse_objective(text: str, vocabulary: Vocabulary, flag: str) -> Objective:
    """Return one objective with fixed options, written as `mlm(mask=0.3)`.

    Args:
        text: Schedule text of one phase without an amount.
        flag: Flag that gives the text, such as --objective, for errors.

    Raises:
        InputError: The text is invalid or does not fit `vocabulary`, or has phases, a mixture, a
            sum or an option that changes.
    """
    if re.search(r"[:,]", re.sub(r"\([^()]*\)", "", text)):
        raise InputError(
            f"{flag} {text}: found phases or a share, expected one objective such as mlm(mask=0.3)"
        )
    try:
        choices = Schedule.build(text, 1, vocabulary).phases[0].choices
    except InputError as error:
        raise InputError(str(error).replace(FLAG, flag, 1)) from None
    if len(choices) > 1 or choices[0].start != choices[0].end:
        problem = "a mixture or sum" if len(choices) > 1 else "an option that changes"
        raise InputError(
            f"{flag} {text}: found {problem}, expected one objective with fixed options such as "
            "mlm(mask=0.3)"
        )
    return choices[0].start


@lru_cache
def _hash_file(file: Path) -> str:
    """Return the first 12 hexadecimal digits of a file's SHA-256.

    They are computed once in a process.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def _compute_phase_ends(text: str, phases: tuple[ParsedPhase, ...], train_iters: int) -> list[int]:
    """Return the last step of each phase.

    Raises:
        InputError: The amounts do not fit the run.
    """
    has_fractions = isinstance(phases[0].amount, Fraction)
    for phase in phases:
        if isinstance(phase.amount, Fraction) != has_fractions:
            kinds = "steps after a share" if has_fractions else "a share after steps"
            raise build_error(
                text,
                phase.amount_text,
                f"found {kinds}, expected one kind (shares have a point: 0.25, 1.0)",
            )
    # Shares as integer multiples of a common denominator: exact and fast sums.
    denominator = math.lcm(*{phase.amount.denominator for phase in phases}) if has_fractions else 1
    totals = list(accumulate(int(phase.amount * denominator) for phase in phases))
    expected = denominator if has_fractions else train_iters
    if totals[-1] != expected:
        # The phase at which the sum exceeds the run, else the last one.
        culprit = next(
            (phase for phase, total in zip(phases, totals, strict=True) if total > expected),
            phases[-1],
        )
        kind, expected_text = (
            ("shares", "1") if has_fractions else ("steps", f"{train_iters}, the steps of the run")
        )
        if not has_fractions and [phase.amount for phase in phases] == [1]:
            expected_text += "; `1` is one step, write 1.0 for the whole run"
        # Sums of decimal fractions are finite.
        total_text = format((Decimal(totals[-1]) / denominator).normalize(), "f")
        raise build_error(
            text, culprit.amount_text, f"{kind} add up to {total_text}, expected {expected_text}"
        )
    ends = (
        [(2 * total * train_iters + denominator) // (2 * denominator) for total in totals]
        if has_fractions
        else totals
    )
    for phase, (previous_end, end) in zip(phases, pairwise([0, *ends]), strict=True):
        if end == previous_end:
            complaint = (
                f"{phase.amount_text} of {train_iters} steps is no step, expected at least one"
            )
            raise build_error(text, phase.amount_text, complaint)
    return ends


def _build_choices(
    text: str, phase: ParsedPhase, vocabulary: Vocabulary
) -> tuple[ScheduledObjective, ...]:
    """Return the objectives of a phase with integer weights.

    Raises:
        InputError: An option is invalid or cannot change.
    """
    choices = []
    for weight, (_, parsed) in zip(
        _compute_integer_weights(text, phase), phase.components, strict=True
    ):
        start = end = _build_objective(text, parsed, vocabulary)
        numeric_options = {
            field.name for field in start.options() if type(field.default) in (int, float)
        }
        for option in parsed.options:
            if option.end and option.name not in numeric_options:
                complaint = (
                    f"{start.name}: option `{option.name}` is not a number and cannot change, "
                    "expected one value"
                )
                raise build_error(text, option.end, complaint)
        if any(option.end for option in parsed.options):
            end = _build_objective(text, parsed, vocabulary, at_end=True)
        choices.append(ScheduledObjective(weight, start, end))
    return tuple(choices)


def _compute_integer_weights(text: str, phase: ParsedPhase) -> list[int]:
    """Return the weights of a phase as the smallest whole numbers in their ratio.

    Raises:
        InputError: A weight in a sum is above _MAX_SUM_WEIGHT.
    """
    denominator = math.lcm(*(weight.denominator for weight, _ in phase.components))
    counts = [int(weight * denominator) for weight, _ in phase.components]
    divisor = math.gcd(*counts)
    weights = [count // divisor for count in counts]
    if phase.is_sum and max(weights) > _MAX_SUM_WEIGHT:
        _, objective = phase.components[weights.index(max(weights))]
        ratio = ":".join(map(str, weights))
        complaint = (
            f"the weights of this sum are {ratio} as whole numbers, "
            f"expected at most {_MAX_SUM_WEIGHT} each"
        )
        raise build_error(text, objective.name, f"{complaint}; use fewer digits")
    return weights


def _build_objective(
    text: str, parsed: ParsedObjective, vocabulary: Vocabulary, at_end: bool = False
) -> Objective:
    """Return an objective with the options of the start or the end of its phase.

    Raises:
        InputError: The objective is unknown or an option invalid.
    """
    values = {
        option.name: option.end if at_end and option.end else option.value
        for option in parsed.options
    }
    # Parts of the text by the option that an error names.
    parts = {option.name: option.name for option in parsed.options}
    try:
        kind = find(parsed.name)
        parts |= {
            field.name: values[field.name] for field in kind.options() if field.name in values
        }
        return kind.from_texts(vocabulary, values)
    except InputError as error:
        raise build_error(
            text, parts.get(getattr(error, "option", ""), parsed.name), error
        ) from error


def _check_interpolation(
    text: str, phase: ParsedPhase, choices: tuple[ScheduledObjective, ...], steps: int
) -> None:
    """Check that interpolated options are usable.

    They are tested near the ends and in the middle of the phase; span=0->3 is not usable.

    Raises:
        InputError: They are not.
    """
    for choice, (_, parsed) in zip(choices, phase.components, strict=True):
        for step in {1, steps // 2, steps - 2} if choice.start != choice.end else ():
            if 0 < step < steps - 1:
                try:
                    choice.start.interpolate(choice.end, step / (steps - 1))
                except OptionError as error:
                    parts = {option.name: option.end for option in parsed.options if option.end}
                    complaint = f"at step {step + 1} of the phase: {error}"
                    raise build_error(
                        text, parts.get(error.option, parsed.name), complaint
                    ) from None
