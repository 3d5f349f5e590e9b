"""Estimate of a whole run in one layout, and search for the fastest layout that fits, the simplest among equals."""

import functools
import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaenc.errors import InputError
from megaenc.estimate.hardware import Rates
from megaenc.estimate.layout_case import HypotheticalLayout, LayoutCase, ObjectiveWork, PhaseWork, PipelineStage, format_split
from megaenc.estimate.memory import RankMemory, compute_max_memory
from megaenc.estimate.step_time import StepTime, compute_step_time, micro_batch_terms

SIMILAR_TIME = 1.02  # within this factor of the best time, the simpler layout is preferred
_MAX_STAGES = 64
_MOST_PACKS = 4096  # in a micro-batch; no device is faster with more
_LAYOUT_FIELDS = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity", "recompute_modules",
)  # fmt: skip
"""Fields of a suggested layout, in the order of printed flags."""
_RECOMPUTE = ({}, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, {"recompute_granularity": "full"})


@dataclass(frozen=True)
class Workload:
    """Computation of a run in any layout: phases, number and batches of validations, and FLOPs utilization if given."""

    phases: tuple[PhaseWork, ...]
    validations: int
    """number of validations"""
    validation_batches: int
    """global batches of each validation, over all objectives"""
    mfu: float | None = None
    """model FLOPs utilization that replaces the estimated step times"""

    @property
    def works(self) -> list[ObjectiveWork]:
        """Return each objective of the run once, the one with most steps first."""
        steps: Counter[ObjectiveWork] = Counter()
        for phase in self.phases:
            for work, count in phase.parts:
                steps[work] += count
        return [work for work, _ in steps.most_common()]


@dataclass(frozen=True)
class PhaseCost:
    """Cost of one phase of the run: first and last step, tokens, FLOPs and seconds."""

    text: str
    first: int
    last: int
    tokens: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run in one layout: memory, whether it fits, step times by objective, and seconds of each phase."""

    case: LayoutCase
    memory: RankMemory
    fits: bool
    steps: tuple[tuple[ObjectiveWork, StepTime], ...]
    """step time of each objective, at the full batch size"""
    phases: tuple[PhaseCost, ...]
    validation: float
    """seconds of all validations"""

    @property
    def seconds(self) -> float:
        """Return the run's duration in seconds: phases and validations, without saving."""
        return sum(phase.seconds for phase in self.phases) + self.validation

    @property
    def hours(self) -> float:
        """Return the device hours of the run: hours x number of devices."""
        return self.seconds * self.case.gpus / 3600


def estimate_layout(case: LayoutCase, workload: Workload, rates: Rates) -> Estimate:
    """Return the Estimate of a run in the layout `case`; step times follow from `workload.mfu` if that is set."""
    works = workload.works
    memory = compute_max_memory(case, works, rates)

    @functools.cache
    def time_step(work: ObjectiveWork, packs: int) -> StepTime:
        step = compute_step_time(replace(case, global_batch_size=packs), work, rates)
        if workload.mfu is None:
            return step
        return replace(step, seconds=step.flops / (workload.mfu * rates.peak * case.gpus), terms=())

    phases = []
    for phase in workload.phases:
        phase_steps = sum(steps for _, steps in phase.batches)
        tokens, flops, seconds = 0, 0.0, 0.0
        for packs, steps in phase.batches:
            tokens += steps * packs * case.seq_length
            for work, count in phase.parts:
                step_cost = time_step(work, packs * phase.passes)
                flops += steps * count / phase_steps * step_cost.flops
                seconds += steps * count / phase_steps * step_cost.seconds
        phases.append(PhaseCost(phase.text, phase.first, phase.last, tokens, flops, seconds))
    steps = tuple((work, time_step(work, case.global_batch_size)) for work in works)
    forward = workload.validations * workload.validation_batches * steps[0][1].seconds / 3
    return Estimate(case, memory, memory.total <= rates.memory, steps, tuple(phases), forward)


def find_best_layout(case: LayoutCase, workload: Workload, rates: Rates) -> Estimate | None:
    """Return the Estimate of the fastest layout that fits, or of a simpler one within 2 % of it; None if none fits.

    Global batch size, model and number of devices stay. Recomputation is tried only if a layout does not fit without it.
    """
    fitting: list[Estimate] = []
    batch_sizes = {packs for phase in workload.phases for packs, _ in phase.batches}  # several during a ramp-up
    for plain in dict.fromkeys(_candidate_layouts(case, workload.works[0], rates)):
        if any(packs % (plain.micro_batch_size * plain.data_parallel_size) for packs in batch_sizes):
            continue
        for recompute in _RECOMPUTE:
            estimate = estimate_layout(replace(plain, layout=replace(plain.layout, **recompute)), workload, rates)
            if estimate.fits:
                fitting.append(estimate)
                break
    fastest = min((estimate.seconds for estimate in fitting), default=0.0)
    return min(
        (estimate for estimate in fitting if estimate.seconds <= SIMILAR_TIME * fastest), key=_complexity_key, default=None
    )


def _candidate_layouts(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> Iterator[LayoutCase]:
    """Yield every layout that is valid for the model and the number of devices, with and without the distributed optimizer."""
    for tensor in _divisors(min(rates.devices, case.gpus)):
        try:
            case.shape.check(tensor)
        except InputError:
            continue
        for stages in _divisors(min(case.gpus // tensor, _MAX_STAGES)):
            data, remainder = divmod(case.gpus, tensor * stages)
            if remainder or stages > case.shape.num_layers:
                continue
            for micro_batch in _divisors(math.ceil(case.global_batch_size / data)):
                overlap = data > 1 and not rates.host
                layout = HypotheticalLayout(
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=stages,
                    sequence_parallel=tensor > 1 and (micro_batch * case.seq_length) % tensor == 0,
                    use_distributed_optimizer=data > 1,
                    overlap_grad_reduce=overlap,
                    overlap_param_gather=overlap,
                )
                even = replace(
                    case, layout=layout, split=layout.layers_per_chunk(case.shape.num_layers), micro_batch_size=micro_batch
                )
                yield even
                yield replace(even, layout=replace(layout, use_distributed_optimizer=False, overlap_param_gather=False))
                if stages > 1 and (split := balance_stages(even, work, rates)) != even.split:
                    uneven = replace(layout, pipeline_model_parallel_layout=format_split(split))
                    yield replace(even, layout=uneven, split=split)


def balance_stages(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> tuple[int, ...]:
    """Return the layers per pipeline stage that minimize the slowest stage's time; `case.split` if a middle one got none.

    Greedy: each layer goes to the least busy stage, which is optimal for layers of equal duration.
    """

    def seconds(layers: int, first: bool = False, last: bool = False) -> float:
        return sum(term[1] for term in micro_batch_terms(case, work, PipelineStage(0, layers, 0, first, last), rates))

    stages, layer = case.num_stages, seconds(1) - seconds(0)
    busy = [seconds(0, first=stage == 0, last=stage == stages - 1) for stage in range(stages)]
    counts = [0] * stages
    for _ in range(case.shape.num_layers):
        least = min(range(stages), key=lambda stage: (busy[stage], abs(2 * stage - stages + 1)))
        busy[least] += layer
        counts[least] += 1
    return tuple(counts) if all(counts[1:-1]) else case.split


def _complexity_key(estimate: Estimate) -> tuple:
    """Return a sort key: simpler layouts first, then faster ones."""
    case, layout = estimate.case, estimate.case.layout
    flags = (layout.recompute_granularity, layout.pipeline_model_parallel_layout, layout.use_distributed_optimizer)
    return (case.tensor_parallel_size * case.num_stages, *map(bool, flags), estimate.seconds)


def format_layout_flags(case: LayoutCase) -> list[str]:
    """Return `megaenc pretrain` flags, quoted for a shell: --micro-batch-size, and layout flags that are not the default."""
    words = ["--micro-batch-size", str(case.micro_batch_size)]
    for name in _LAYOUT_FIELDS:
        value, flag = getattr(case.layout, name), "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value and value != 1:
            words += [flag, *(value if isinstance(value, tuple) else [shlex.quote(str(value))])]
    return words


def _divisors(number: int) -> list[int]:
    """Return the divisors of `number` up to _MOST_PACKS in ascending order."""
    return [divisor for divisor in range(1, min(number, _MOST_PACKS) + 1) if number % divisor == 0]
