"""Estimate of a whole run in one layout, and the simplest layout that fits."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.errors import InputError
from megaenc.estimate.devices import Device
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.memory import RankMemory, compute_max_memory
from megaenc.estimate.work import ObjectiveWork, PhaseWork

_MAX_STAGES = 64
_MOST_PACKS = 4096  # in a micro-batch; no device is faster with more
_LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "recompute_modules",
)
"""Fields of a suggested layout, in the order of printed flags."""
_RECOMPUTE = (
    {},
    {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    {"recompute_granularity": "full"},
)


@dataclass(frozen=True)
class Workload:
    """Computation of a run in any layout: `phases` of its schedule, and validations.

    `build_workload` builds it. `validations` is their number; each computes `validation_batches`
    global batches, those of all objectives together.
    """

    phases: tuple[PhaseWork, ...]
    validations: int
    """number of validations"""
    validation_batches: int
    """global batches of each validation, over all objectives"""

    @property
    def works(self) -> list[ObjectiveWork]:
        """Return each objective of the run once, in descending order of its steps.

        An ObjectiveWork is the mean work of one pack, without the number of steps.
        """
        steps: Counter[ObjectiveWork] = Counter()
        for phase in self.phases:
            for work, count in phase.parts:
                steps[work] += count
        return [work for work, _ in steps.most_common()]


@dataclass(frozen=True)
class StepCost:
    """Cost of a step of one objective at the full batch size.

    `estimate_layout` builds it. `objective` is its text. `predicted_share` is the fraction of the
    tokens whose logits are computed, from 0 to 1. `flops` are those of all devices, forward and
    backward, without recomputation; `seconds` include full recomputation.
    """

    objective: str
    predicted_share: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class PhaseCost:
    """Cost of one phase of the schedule, from step `first` to step `last`, inclusive.

    `estimate_layout` builds it. Steps are counted from 1; `text` is the phase in the schedule.
    `tokens` and `flops` are those of all steps and devices; tokens that a step reads in several
    passes count once. `flops` are forward and backward of all passes, without recomputation;
    `seconds` include full recomputation, but no validation.
    """

    text: str
    first: int
    last: int
    tokens: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a run in one layout, as of `estimate_layout`.

    `case` has the layout. `memory` is that of the rank with the largest peak, under the objective
    that needs most; `fits` tells whether the device has it. `steps` has a StepCost per objective,
    `phases` a PhaseCost per phase of the schedule. `idle` is the fraction of a step in which
    pipeline stages wait for each other, `validation` the seconds of all validations.
    """

    case: LayoutCase
    memory: RankMemory
    fits: bool
    idle: float
    """share of a step in which pipeline stages wait for each other"""
    steps: tuple[StepCost, ...]
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


def compute_idle_fraction(case: LayoutCase) -> float:
    """Return the fraction of a step, from 0 to 1, in which pipeline stages are idle.

    It is (p - 1) / (m v + p - 1), with m micro-batches, and v virtual stages on each of p stages.
    """
    waiting = case.num_stages - 1
    return waiting / (case.micro_batches * case.virtual_stages + waiting)


def compute_step_seconds(case: LayoutCase, flops: float, speed: float) -> float:
    """Return the seconds of a step, without communication.

    Ranks with the most packs are waited for, and the pipeline's idle time is included. Full
    recomputation repeats the forward pass, a third of the work; selective recomputation is not
    counted.

    Args:
        flops: FLOPs of the global batch, forward and backward, without recomputation.
        speed: FLOP/s of all devices together while none is idle.
    """
    load_ratio = case.largest_share * case.data_parallel_size / case.global_batch_size
    repeated = 4 / 3 if case.layout.recompute_granularity == "full" else 1.0
    return flops * load_ratio * repeated / (speed * (1 - compute_idle_fraction(case)))


def estimate_layout(
    case: LayoutCase, workload: Workload, device: Device, utilization: float
) -> Estimate:
    """Return memory and time of a run in the layout `case`.

    Args:
        workload: Computation of the run, with at least one phase.
        utilization: Fraction of the devices' peak FLOP/s that a step reaches.
    """
    memory = compute_max_memory(case, workload.works)
    speed = utilization * device.peak * case.gpus

    def compute_step(work: ObjectiveWork, packs: int) -> tuple[float, float]:
        flops = packs * work.flops(case.shape, case.vocab_size)
        return flops, compute_step_seconds(replace(case, global_batch_size=packs), flops, speed)

    steps = []
    for work in workload.works:
        steps.append(
            StepCost(
                work.objective,
                work.predicted / work.tokens,
                *compute_step(work, case.global_batch_size),
            )
        )
    phases = []
    for phase in workload.phases:
        phase_steps = sum(count for _, count in phase.batches)
        tokens = 0
        flops = 0.0
        seconds = 0.0
        for packs, count in phase.batches:
            tokens += count * packs * case.seq_length
            for work, work_steps in phase.parts:
                step_flops, step_seconds = compute_step(work, packs * phase.passes)
                flops += count * work_steps / phase_steps * step_flops
                seconds += count * work_steps / phase_steps * step_seconds
        phases.append(PhaseCost(phase.text, phase.first, phase.last, tokens, flops, seconds))
    # The forward pass is a third of a step.
    validation = workload.validations * workload.validation_batches * steps[0].seconds / 3
    fits = memory.total <= device.memory
    return Estimate(
        case, memory, fits, compute_idle_fraction(case), tuple(steps), tuple(phases), validation
    )


def find_simplest_layout(case: LayoutCase, workload: Workload, device: Device) -> LayoutCase | None:
    """Return `case` in the simplest layout that fits, None if none does.

    It has the fewest ranks of a replica, then the least recomputation, then the largest
    micro-batch; layout and micro-batch of `case` are not regarded. Global batch size, model and
    number of devices stay. Layouts with virtual stages are not tried, nor tensor parallelism across
    nodes.
    """
    for layouts in _list_candidates(case, device):
        for recompute in _RECOMPUTE:
            for candidate in layouts:
                candidate = replace(candidate, layout=replace(candidate.layout, **recompute))
                if compute_max_memory(candidate, workload.works).total <= device.memory:
                    return candidate
    return None


def _list_candidates(case: LayoutCase, device: Device) -> Iterator[list[LayoutCase]]:
    """Yield layouts with equally many ranks of a replica, fewest first.

    Of each, the largest micro-batch comes first.
    """
    sizes = []
    for tensor in _divisors(min(device.per_node, case.gpus)):
        for stages in _divisors(min(case.gpus // tensor, _MAX_STAGES)):
            if case.gpus % (tensor * stages) == 0 and stages <= case.shape.num_layers:
                sizes.append((tensor * stages, tensor, stages))
    for _, tensor, stages in sorted(sizes):
        try:
            case.shape.check(tensor)
        except InputError:
            continue
        data = case.gpus // (tensor * stages)
        layouts = []
        for micro_batch in reversed(_divisors(math.ceil(case.global_batch_size / data))):
            layout = ParallelConfig(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=stages,
                sequence_parallel=tensor > 1 and (micro_batch * case.seq_length) % tensor == 0,
                use_distributed_optimizer=data > 1,
                overlap_grad_reduce=data > 1,
                overlap_param_gather=data > 1,
            )
            split = layout.layers_per_chunk(case.shape.num_layers)
            layouts.append(replace(case, layout=layout, split=split, micro_batch_size=micro_batch))
        yield layouts


def format_layout_flags(case: LayoutCase) -> list[str]:
    """Return the flags of `megaenc pretrain` for a layout, as words for a shell.

    A value is a word of its own. The flags are --micro-batch-size, and those of
    `find_simplest_layout` that are not the default; others, such as those of virtual stages, are
    left out. Words with special characters are quoted.
    """
    words = ["--micro-batch-size", str(case.micro_batch_size)]
    for name in _LAYOUT_FIELDS:
        value = getattr(case.layout, name)
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value and value != 1:
            words += [flag, *(value if isinstance(value, tuple) else [shlex.quote(str(value))])]
    return words


def _divisors(number: int) -> list[int]:
    """Return the divisors of `number` up to _MOST_PACKS in ascending order."""
    return [divisor for divisor in range(1, min(number, _MOST_PACKS) + 1) if number % divisor == 0]
