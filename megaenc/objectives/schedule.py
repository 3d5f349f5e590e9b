"""The schedule of a run, `clm:0.25,mlm(mask=0.3):0.75`: which objective each update trains.

    schedule  = item { "," item }
    item      = phase | count "x" "(" schedule ")"       the same as writing what is inside `count` times
    phase     = what [ ":" amount ]                      a phase without an amount stands alone and takes the whole run
    what      = objective | mixture
    mixture   = "mix" "(" objective ":" weight { "," objective ":" weight } ")"
    objective = name [ "(" option { "," option } ")" ]
    option    = name "=" value [ "->" value ]            with two values, a number that changes over the phase
    amount    = a number with a point, a share of the run, or a whole number of steps; one schedule holds one kind
    weight    = a number above zero; weights need not add up to 1

Spaces may stand between any two of these. Every error names the character and shows the text with the wrong piece in brackets.

Each step of a mixture trains one of its objectives, drawn by weight from randomness keyed by the seed and the step alone. An
option that changes has its first value at the phase's first step, its second at the last, and lies on a straight line between.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, pairwise

from megaenc import counter_rng
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import Objective, OptionError
from megaenc.objectives.parser import MIXTURE, ParsedObjective, ParsedPhase, build_error, parse_schedule
from megaenc.objectives.registry import find, package_origin

_MAX_SPELLED_OUT_PHASES = 16
"""Of more phases a run's identity holds the digest: it is compared and printed as one line."""


@dataclass(frozen=True)
class ScheduledObjective:
    """What a step of a phase may train: the options go from those of `start` to those of `end`, the same where none changes."""

    weight: int
    """Its part of the phase's steps is weight / the sum of the phase's weights."""
    start: Objective
    end: Objective

    @property
    def text(self) -> str:
        """As a schedule spells it, `mlm(mask=0.4->0.15)`."""
        return self.start.describe(end=self.end)


@dataclass(frozen=True)
class Phase:
    """Updates first_step..last_step, both included and counted from 1, each train one of `choices`, drawn by weight."""

    index: int
    first_step: int
    last_step: int
    choices: tuple[ScheduledObjective, ...]

    @property
    def text(self) -> str:
        """As a schedule spells it, `mix(clm:3,mlm:7)`: weights as the smallest whole numbers, no option that has its default."""
        return self.describe()

    def describe(self, every: bool = False) -> str:
        """As `text`, or with `every` option."""
        texts = [choice.start.describe(every, choice.end) for choice in self.choices]
        if len(texts) == 1:
            return texts[0]
        return f"{MIXTURE}({','.join(f'{text}:{choice.weight}' for text, choice in zip(texts, self.choices, strict=True))})"

    def __len__(self) -> int:
        """Steps."""
        return self.last_step - self.first_step + 1

    def objective(self, choice: ScheduledObjective, step: int) -> Objective:
        """One of `choices` as update `step` would train it: with the options that its place in the phase gives."""
        length = self.last_step - self.first_step
        return choice.start.interpolate(choice.end, (step - self.first_step) / length) if length else choice.start

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the phase's steps that each choice has on average; they add up to 1."""
        total = sum(choice.weight for choice in self.choices)
        return tuple(choice.weight / total for choice in self.choices)


@dataclass(frozen=True)
class Schedule:
    """The phases of a run in order; together they hold every update 1..train_iters once."""

    phases: tuple[Phase, ...]
    seed: int
    """What the draws of mixtures follow from."""

    @classmethod
    def build(cls, text: str, train_iters: int, vocabulary: Vocabulary, seed: int = 0) -> "Schedule":
        """Parse `text` and lay its phases over updates 1..train_iters.

        A phase that is given in shares ends at its cumulative share times train_iters, half rounded up. Raises InputError.
        """
        if train_iters < 1:
            raise InputError(f"--train-iters: found {train_iters}, expected at least 1")
        written = parse_schedule(text, train_iters)
        ends = _compute_phase_ends(text, written, train_iters)
        # Thousands of phases train the same few things: each is made once, and tried once for each length.
        made: dict[Hashable, tuple[ScheduledObjective, ...]] = {}
        tried: set[tuple[Hashable, int]] = set()
        phases = []
        for index, (phase, (before, last)) in enumerate(zip(written, pairwise([0, *ends]), strict=True)):
            if phase.components not in made:
                made[phase.components] = _build_choices(text, phase, vocabulary)
            choices, length = made[phase.components], (phase.components, last - before)
            if length not in tried:
                tried.add(length)
                _check_interpolation(text, phase, choices, last - before)
            phases.append(Phase(index, before + 1, last, choices))
        return cls(tuple(phases), seed)

    def phase_at(self, step: int) -> Phase:
        """The phase of update `step`, counted from 1."""
        if not 1 <= step <= self.phases[-1].last_step:
            raise ValueError(f"step {step} is not one of 1..{self.phases[-1].last_step}")
        return self.phases[bisect_left(self.phases, step, key=lambda phase: phase.last_step)]

    def objective(self, step: int) -> Objective:
        """What update `step` trains: the mixture's draw, with the options that its place in the phase gives."""
        return self.phase_at(step).objective(self._drawn(step), step)

    def text_at(self, step: int) -> str:
        """The objective of update `step` as written, `mlm(mask=0.4->0.15)`: the same at every step of a phase that draws it."""
        return self._drawn(step).text

    def final_objectives(self) -> dict[str, Objective]:
        """Every objective of the schedule by its text, in the order in which they come up; options that change at their end."""
        return {choice.end.describe(): choice.end for choice in self._choices()}

    def initial_objectives(self) -> dict[str, Objective]:
        """As `final_objectives`, options that change at their start."""
        return {choice.start.describe(): choice.start for choice in self._choices()}

    def packages(self) -> dict[str, str]:
        """Of each objective that another package offers, by its name, which package, version and source that is."""
        origins = {choice.start.name: package_origin(type(choice.start)) for choice in self._choices()}
        return {name: found for name, found in origins.items() if found}

    def _distinct(self) -> dict[int, Phase]:
        """One phase for each tuple of choices, by its identity."""
        return {id(phase.choices): phase for phase in self.phases}

    def _choices(self) -> list[ScheduledObjective]:
        return [choice for phase in self._distinct().values() for choice in phase.choices]

    @property
    def canonical(self) -> str:
        """The schedule in steps with every option, or the digest of that: equal for two runs exactly when their phases are."""
        spelled = {key: phase.describe(every=True) for key, phase in self._distinct().items()}
        parts = [f"{spelled[id(phase.choices)]}:{len(phase)}" for phase in self.phases]
        if len(parts) <= _MAX_SPELLED_OUT_PHASES:
            return ",".join(parts)
        digest = hashlib.sha256(",".join(parts).encode()).hexdigest()
        return f"{len(parts)} phases with sha256 {digest}, the first {parts[0]}"

    def _drawn(self, step: int) -> ScheduledObjective:
        choices = self.phase_at(step).choices
        if len(choices) == 1:
            return choices[0]
        bounds = list(accumulate(choice.weight for choice in choices))
        draw = counter_rng.uniforms(self.seed, "mixture", 1, counters=(step,))[0] * bounds[-1]
        return next(choice for choice, bound in zip(choices, bounds, strict=True) if draw < bound)


def _compute_phase_ends(text: str, written: tuple[ParsedPhase, ...], train_iters: int) -> list[int]:
    """The last update of each phase."""
    shares = isinstance(written[0].amount, Fraction)
    for phase in written:
        if isinstance(phase.amount, Fraction) != shares:
            kinds = "steps after a share" if shares else "a share after steps"
            raise build_error(text, phase.amount_text, f"found {kinds}, expected one kind (shares have a point: 0.25, 1.0)")
    # Shares as whole numbers of their smallest common part: sums are exact, and fast.
    whole = math.lcm(*{phase.amount.denominator for phase in written}) if shares else 1
    totals = list(accumulate(int(phase.amount * whole) for phase in written))
    expected = whole if shares else train_iters
    if totals[-1] != expected:
        # Where the sum first goes too far; where it never does, the last phase is the one to look at.
        culprit = next((phase for phase, total in zip(written, totals, strict=True) if total > expected), written[-1])
        kind, wanted = ("shares", "1") if shares else ("steps", f"{train_iters}, the steps of the run")
        if not shares and [phase.amount for phase in written] == [1]:
            wanted += "; `1` is one step, write 1.0 for the whole run"
        found = format((Decimal(totals[-1]) / whole).normalize(), "f")  # a sum of decimal fractions has an end
        raise build_error(text, culprit.amount_text, f"{kind} add up to {found}, expected {wanted}")
    ends = [(2 * total * train_iters + whole) // (2 * whole) for total in totals] if shares else totals
    for phase, (before, end) in zip(written, pairwise([0, *ends]), strict=True):
        if end == before:
            complaint = f"{phase.amount_text} of {train_iters} steps is no step, expected at least one"
            raise build_error(text, phase.amount_text, complaint)
    return ends


def _build_choices(text: str, written: ParsedPhase, vocabulary: Vocabulary) -> tuple[ScheduledObjective, ...]:
    whole = math.lcm(*(weight.denominator for weight, _ in written.components))
    counts = [int(weight * whole) for weight, _ in written.components]
    smallest = math.gcd(*counts)
    choices = []
    for count, (_, parsed) in zip(counts, written.components, strict=True):
        start = end = _build_objective(text, parsed, vocabulary)
        numbers = {field.name for field in start.options() if type(field.default) in (int, float)}
        for option in parsed.options:
            if option.end and option.name not in numbers:
                complaint = f"{start.name}: option `{option.name}` is no number and cannot change, expected one value"
                raise build_error(text, option.end, complaint)
        if any(option.end for option in parsed.options):
            end = _build_objective(text, parsed, vocabulary, at_end=True)
        choices.append(ScheduledObjective(count // smallest, start, end))
    return tuple(choices)


def _build_objective(text: str, written: ParsedObjective, vocabulary: Vocabulary, at_end: bool = False) -> Objective:
    """The objective as its phase begins, or as it ends."""
    values = {option.name: option.end if at_end and option.end else option.value for option in written.options}
    places = {option.name: option.name for option in written.options}  # of what an error may be about
    try:
        kind = find(written.name)
        places |= {field.name: values[field.name] for field in kind.options() if field.name in values}
        return kind.from_texts(vocabulary, values)
    except InputError as error:
        raise build_error(text, places.get(getattr(error, "option", ""), written.name), error) from error


def _check_interpolation(text: str, written: ParsedPhase, choices: tuple[ScheduledObjective, ...], steps: int) -> None:
    """Between two values that can be used may lie some that cannot, span=0->3: the steps beside the ends and the middle tell."""
    for choice, (_, parsed) in zip(choices, written.components, strict=True):
        for step in {1, steps // 2, steps - 2} if choice.start != choice.end else ():
            if 0 < step < steps - 1:
                try:
                    choice.start.interpolate(choice.end, step / (steps - 1))
                except OptionError as error:
                    places = {option.name: option.end for option in parsed.options if option.end}
                    complaint = f"at step {step + 1} of the phase: {error}"
                    raise build_error(text, places.get(error.option, parsed.name), complaint) from None
