"""A run as one number of hours, its steps under each objective put together; and the layout that suits its machine.

Of all ways to lay a model over the devices: the fastest that fits, the simplest among equals.
"""

import functools
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaenc.errors import InputError
from megaenc.estimate.hardware import Rates
from megaenc.estimate.layout_case import HypotheticalLayout, LayoutCase, ObjectiveWork, PhaseWork, PipelineStage, write_split
from megaenc.estimate.memory import RankMemory, worst_memory
from megaenc.estimate.step_time import StepTime, micro_batch_terms, step_time

ALIKE = 1.02  # times within this of the best: then the simpler layout is better
_MOST_STAGES = 64
_FLAGS = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity", "recompute_modules",
)  # fmt: skip
"""Of layouts that are suggested, in the order in which they are written."""
_RECOMPUTE = ({}, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, {"recompute_granularity": "full"})


@dataclass(frozen=True)
class Workload:
    """What is to be computed, whatever the layout."""

    phases: tuple[PhaseWork, ...]
    validations: int
    """times that the model is validated"""
    validated: int
    """global batches of each, over all objectives"""
    mfu: float | None = None
    """share of the peak to take as reached"""

    @property
    def works(self) -> list[ObjectiveWork]:
        """Every objective once, the one of most steps first."""
        steps: Counter[ObjectiveWork] = Counter()
        for phase in self.phases:
            for work, count in phase.parts:
                steps[work] += count
        return [work for work, _ in steps.most_common()]


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

    case: LayoutCase
    memory: RankMemory
    fits: bool
    steps: tuple[tuple[ObjectiveWork, StepTime], ...]
    """of each objective, at the full batch"""
    phases: tuple[PhaseCost, ...]
    validation: float
    """seconds of all validations"""

    @property
    def seconds(self) -> float:
        """Of the whole run; saving is not counted."""
        return sum(phase.seconds for phase in self.phases) + self.validation

    @property
    def hours(self) -> float:
        """Of all devices together."""
        return self.seconds * self.case.gpus / 3600


def estimate(case: LayoutCase, demand: Workload, rates: Rates) -> Estimate:
    """Return memory, steps and hours of `case`."""
    works = demand.works
    memory = worst_memory(case, works, rates)

    @functools.cache
    def timed(work: ObjectiveWork, packs: int) -> StepTime:
        step = step_time(replace(case, global_batch_size=packs), work, rates)
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


def best_layout(case: LayoutCase, demand: Workload, rates: Rates) -> Estimate | None:
    """Return the fastest that fits, or one within 2 % of it that is simpler; None where nothing fits.

    The batch, the model and the number of devices stay. Recomputation is tried only where a layout does not fit without it.
    """
    fitting: list[Estimate] = []
    for plain in dict.fromkeys(_layouts(case, demand.works[0], rates)):
        for recompute in _RECOMPUTE:
            found = estimate(replace(plain, layout=replace(plain.layout, **recompute)), demand, rates)
            if found.fits:
                fitting.append(found)
                break
    fastest = min((found.seconds for found in fitting), default=0.0)
    return min((found for found in fitting if found.seconds <= ALIKE * fastest), key=_complexity, default=None)


def _layouts(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> Iterator[LayoutCase]:
    """Every layout of `case`'s devices that its model can be cut for, with and without what costs nothing but a flag."""
    for tensor in _divisors(min(rates.devices, case.gpus)):
        try:
            case.shape.check(tensor)
        except InputError:
            continue
        for stages in _divisors(min(case.gpus // tensor, _MOST_STAGES)):
            data, left = divmod(case.gpus, tensor * stages)
            if left or stages > case.shape.num_layers or case.global_batch_size % data:
                continue
            for micro_batch in _divisors(case.global_batch_size // data):
                overlap = data > 1 and not rates.host
                layout = HypotheticalLayout(
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=stages,
                    sequence_parallel=tensor > 1 and (micro_batch * case.seq_length) % tensor == 0,
                    use_distributed_optimizer=data > 1,
                    overlap_grad_reduce=overlap,
                    overlap_param_gather=overlap,
                )
                even = replace(case, layout=layout, split=layout.layers_per_chunk(case.shape.num_layers), micro_batch_size=micro_batch)
                yield even
                yield replace(even, layout=replace(layout, use_distributed_optimizer=False, overlap_param_gather=False))
                if stages > 1 and (split := balanced(even, work, rates)) != even.split:
                    written = replace(layout, pipeline_model_parallel_layout=write_split(split))
                    yield replace(even, layout=written, split=split)


def balanced(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> tuple[int, ...]:
    """Return layers of each stage, of one part each, such that the longest is shortest: embedding and head weigh on the ends.

    Each layer goes to the stage that is done first, which is best where all layers take as long.
    """

    def seconds(layers: int, first: bool = False, last: bool = False) -> float:
        return sum(term[1] for term in micro_batch_terms(case, work, PipelineStage(0, layers, 0, first, last), rates))

    stages, layer = case.stages, seconds(1) - seconds(0)
    busy = [seconds(0, first=stage == 0, last=stage == stages - 1) for stage in range(stages)]
    counts = [0] * stages
    for _ in range(case.shape.num_layers):
        least = min(range(stages), key=lambda stage: (busy[stage], abs(2 * stage - stages + 1)))
        busy[least] += layer
        counts[least] += 1
    return tuple(counts) if all(counts[1:-1]) else case.split


def _complexity(found: Estimate) -> tuple:
    case, layout = found.case, found.case.layout
    flags = (layout.recompute_granularity, layout.pipeline_model_parallel_layout, layout.use_distributed_optimizer)
    return (case.tensor * case.stages, *map(bool, flags), found.seconds)


def flags_of(case: LayoutCase) -> list[str]:
    """Return the layout as flags of `megaenc pretrain`."""
    words = ["--micro-batch-size", str(case.micro_batch_size)]
    for name in _FLAGS:
        value, flag = getattr(case.layout, name), "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value and value != 1:
            words += [flag, *(value if isinstance(value, tuple) else [shlex.quote(str(value))])]
    return words


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
