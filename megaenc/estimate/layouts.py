"""Which layout suits a machine: the ways to lay a model over its devices, the fastest that fits, the simplest among equals."""

import dataclasses
import shlex
from collections.abc import Iterator

from megaenc.errors import InputError
from megaenc.estimate.case import Case, Stage, Work
from megaenc.estimate.machines import Rates
from megaenc.estimate.settings import PaperLayout, write_split
from megaenc.estimate.time import micro_batch_terms
from megaenc.estimate.whole import Demand, Estimate, estimate

ALIKE = 1.02  # times within this of the best: then the simpler layout is better
WORTH_SAYING = 1.03  # how much faster a layout must be to be suggested where the given one fits
_MOST_STAGES = 64
_FLAGS = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity", "recompute_modules",
)  # fmt: skip
"""Of layouts that are suggested, in the order in which they are written."""
_RECOMPUTE = ({}, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, {"recompute_granularity": "full"})


def best_layout(case: Case, demand: Demand, rates: Rates) -> Estimate | None:
    """Return the fastest that fits, or one within 2 % of it that is simpler; None where nothing fits.

    The batch, the model and the number of devices stay. Recomputation is tried only where a layout does not fit without it.
    """
    fitting: list[Estimate] = []
    seen: set[Case] = set()
    for plain in _without_recomputation(case, demand.works[0], rates):
        for recompute in _RECOMPUTE:
            candidate = dataclasses.replace(plain, layout=dataclasses.replace(plain.layout, **recompute))
            if candidate in seen:
                continue
            seen.add(candidate)
            found = estimate(candidate, demand, rates)
            if found.fits:
                fitting.append(found)
                break
    if not fitting:
        return None
    fastest = min(found.seconds for found in fitting)
    return min((found for found in fitting if found.seconds <= ALIKE * fastest), key=_complexity)


def _without_recomputation(case: Case, work: Work, rates: Rates) -> Iterator[Case]:
    """Every layout of `case`'s devices that its model can be cut for."""
    shape = case.shape
    for tensor in _divisors(min(rates.devices, case.gpus)):
        try:
            shape.check(tensor)
        except InputError:
            continue
        for stages in _divisors(min(case.gpus // tensor, _MOST_STAGES)):
            if case.gpus % (tensor * stages) or stages > shape.num_layers:
                continue
            data = case.gpus // (tensor * stages)
            if case.global_batch_size % data:
                continue
            for micro_batch in _divisors(case.global_batch_size // data):
                yield from _of_size(case, tensor, stages, micro_batch, work, rates)


def _of_size(case: Case, tensor: int, stages: int, micro_batch: int, work: Work, rates: Rates) -> Iterator[Case]:
    """With and without what costs nothing but a flag."""
    data = case.gpus // (tensor * stages)
    distributed = data > 1
    overlap = distributed and not rates.host
    layout = PaperLayout(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        sequence_parallel=tensor > 1 and (micro_batch * case.seq_length) % tensor == 0,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    even = dataclasses.replace(case, layout=layout, split=layout.split(case.shape.num_layers), micro_batch_size=micro_batch)
    yield even
    if distributed:
        plain = dataclasses.replace(layout, use_distributed_optimizer=False, overlap_param_gather=False)
        yield dataclasses.replace(even, layout=plain)
    if stages > 1 and (split := balanced(even, work, rates)) != even.split:
        written = dataclasses.replace(layout, pipeline_model_parallel_layout=write_split(split))
        yield dataclasses.replace(even, layout=written, split=split)


def balanced(case: Case, work: Work, rates: Rates) -> tuple[int, ...]:
    """Return layers of each stage such that the longest stage is shortest: embedding and above all the head weigh on the ends.

    One part a stage. Each layer goes to the stage that is done first, which is best where all layers take as long.
    """

    def seconds(layers: int, first: bool = False, last: bool = False) -> float:
        return sum(term.value for term in micro_batch_terms(case, work, Stage(0, layers, 0, first, last), rates))

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


def flags_of(case: Case) -> list[str]:
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
