"""A run as one number of hours: its steps under each objective, put together."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from megaenc.estimate.case import Case, PhaseWork, Work
from megaenc.estimate.machines import Rates
from megaenc.estimate.memory import RankMemory, worst_memory
from megaenc.estimate.time import StepTime, step_time


@dataclass(frozen=True)
class PhaseCost:
    """What a phase of the run takes."""

    text: str
    first: int
    last: int
    tokens: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """A run in one layout."""

    case: Case
    memory: RankMemory
    fits: bool
    steps: tuple[tuple[Work, StepTime], ...]
    """of each objective, at the full batch"""
    phases: tuple[PhaseCost, ...]
    validation: float
    """seconds of all validations"""

    @property
    def seconds(self) -> float:
        """Of the whole run; saving is not counted."""
        return sum(phase.seconds for phase in self.phases) + self.validation

    @property
    def tokens(self) -> int:
        """That it reads to train."""
        return sum(phase.tokens for phase in self.phases)

    @property
    def flops(self) -> float:
        """Of training."""
        return sum(phase.flops for phase in self.phases)

    @property
    def hours(self) -> float:
        """Of all devices together."""
        return self.seconds * self.case.gpus / 3600


@dataclass(frozen=True)
class Demand:
    """What is to be computed, whatever the layout."""

    phases: tuple[PhaseWork, ...]
    validations: int
    """times that the model is validated"""
    validated: int
    """global batches of each, over all objectives"""
    mfu: float | None = None
    """share of the peak to take as reached"""

    @property
    def works(self) -> list[Work]:
        """Every objective once, the one of most steps first."""
        steps: Counter[Work] = Counter()
        for phase in self.phases:
            for work, count in phase.parts:
                steps[work] += count
        return [work for work, _ in steps.most_common()]


def estimate(case: Case, demand: Demand, rates: Rates) -> Estimate:
    """Memory, step and hours of `case`."""
    works = demand.works
    memory = worst_memory(case, works, rates)

    @functools.cache
    def timed(work: Work, packs: int) -> StepTime:
        step = step_time(case.with_batch(packs), work, rates)
        if demand.mfu is None:
            return step
        return replace(step, seconds=step.flops / (demand.mfu * rates.peak * case.gpus), terms=())

    phases = []
    for phase in demand.phases:
        whole = sum(steps for _, steps in phase.batches)
        tokens, flops, seconds = 0, 0.0, 0.0
        for packs, steps in phase.batches:
            tokens += steps * packs * case.seq_length
            for work, count in phase.parts:
                found = timed(work, packs)
                flops += steps * count / whole * found.flops
                seconds += steps * count / whole * found.seconds
        phases.append(PhaseCost(phase.text, phase.first, phase.last, tokens, flops, seconds))
    steps = tuple((work, timed(work, case.global_batch_size)) for work in works)
    forward = demand.validations * demand.validated * steps[0][1].seconds / 3
    return Estimate(case, memory, memory.total <= rates.memory, steps, tuple(phases), forward)
