"""What a study costs: steps, operations, hours and bytes, with every beginning shared and with none, and the longest wait.

Operations are counted as training counts them (`ModelConfig.training_flops`), at the expected lengths of documents and numbers of
predictions. Hours follow from the tokens a second that the manifest states, bytes from the parameters.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megaenc.finetune.grid.command import format_count
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.manifest.schema import Manifest

if TYPE_CHECKING:
    from megaenc.study.plan.dag import StageGraph
    from megaenc.study.run.pretrain_stage import PretrainStage

RESULT_BYTES = 272_000
"""Of one fine-tuning result on average: 18,000 of the study's form and size take 4.9 GB (docs/grid.md)."""


@dataclass(frozen=True)
class TrainingCost:
    """What some steps amount to."""

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    device_hours: float | None = 0.0
    """None where no rate is known"""

    def __add__(self, other: "TrainingCost") -> "TrainingCost":
        hours = (self.device_hours, other.device_hours)
        known = None if None in hours else sum(hours)
        return TrainingCost(self.steps + other.steps, self.tokens + other.tokens, self.flops + other.flops, known)


class StageChain(NamedTuple):
    """A chain of stages of which none can begin before what it needs of the one before."""

    hours: float | None
    stages: tuple[str, ...]


@dataclass(frozen=True)
class StudyCost:
    """What a study costs."""

    groups: dict[str, tuple[TrainingCost, TrainingCost]]
    """Pretraining by group of models: every beginning trained once; every model from its own first step, what is continued
    still from the study's own parent."""
    with_sharing: TrainingCost
    without_sharing: TrainingCost
    """The first and the second of all groups."""
    finetune_runs: int
    """Fine-tuning runs, retrieval once for all its sets."""
    finetune_hours: float | None
    disk: dict[str, int]
    """Bytes of each kind, when all is done and nothing removed. Checkpoints: the last of each run, and those that others need."""
    longest_chain: StageChain
    """Where a branch begins as soon as its checkpoint is there, each run on the manifest's devices, fine-tunings all at once."""
    longest_chain_run_by_run: StageChain
    """Where it waits for its parent's end."""


def compute_study_cost(graph: "StageGraph") -> StudyCost:
    """Count what `graph` costs."""
    groups = {model.group: (TrainingCost(), TrainingCost()) for model in graph.manifest.models}
    for run in graph.runs.values():
        shared, alone = groups[run.model.group]
        whole = compute_training_cost(graph.manifest, run.model, 0, run.model.steps)
        groups[run.model.group] = (shared + run.cost, alone + whole)
    shared, alone = (sum(each, TrainingCost()) for each in zip(*groups.values(), strict=True))
    trainings, seconds = sum(grid.run_count for grid in graph.grids.values()), graph.manifest.hardware.finetune_seconds
    return StudyCost(
        groups=groups,
        with_sharing=shared,
        without_sharing=alone,
        finetune_runs=trainings,
        finetune_hours=trainings * seconds / 3600 if seconds or not trainings else None,
        disk=_compute_disk_bytes(graph),
        longest_chain=_find_longest_chain(graph, wait_for_end=False),
        longest_chain_run_by_run=_find_longest_chain(graph, wait_for_end=True),
    )


def compute_training_cost(manifest: Manifest, model: PlannedModel, after: int, last: int) -> TrainingCost:
    """Return what the updates after + 1..last of a model's run take."""
    run, rate = model.run, manifest.hardware.rate(model.key.size)
    packs, vocab_size = run.global_batch_size, manifest.vocab_size(model)
    parts = ((share, *part) for phase, share in model.phase_shares(after, last) for part in phase.parts)
    flops = sum(share * steps * packs * work.flops(run.shape, vocab_size) for share, work, steps in parts)
    tokens = (last - after) * packs * run.data.seq_length
    return TrainingCost(last - after, tokens, flops, tokens / rate / 3600 if rate else None)


def _compute_disk_bytes(graph: "StageGraph") -> dict[str, int]:
    """Return bytes; of a checkpoint those of the weights, of master weights where these are bfloat16, and of AdamW's moments."""
    checkpoints = exports = 0
    exported = Counter(export.run for export in graph.exports.values())
    for run in graph.runs.values():
        parameters = run.model.run.shape.parameter_count(graph.manifest.vocab_size(run.model))
        checkpoints += (len(run.checkpoint_steps) + 1) * parameters * (14 if run.model.run.bf16 else 12)
        exports += exported[run.name] * parameters * (2 if run.model.run.bf16 else 4)
    results = RESULT_BYTES * sum(grid.result_count for grid in graph.grids.values())
    return {"checkpoints with optimizer": checkpoints, "exports": exports, "results": results}


def _find_longest_chain(graph: "StageGraph", wait_for_end: bool) -> StageChain:
    """Return the chain that ends last; `wait_for_end`: branches begin when their parent has ended."""
    if any(run.cost.device_hours is None for run in graph.runs.values()):
        return StageChain(None, ())
    hardware = graph.manifest.hardware
    begins: dict[str, StageChain] = {}

    def end(run: "PretrainStage", step: int) -> float:
        took = (run.cost.device_hours or 0.0) / hardware.devices * (step - run.branch_step) / run.steps
        return begins[run.name].hours + took

    ends = []
    for run in graph.runs.values():
        begins[run.name] = StageChain(0.0, (run.id,))
        if run.parent:
            parent = graph.runs[run.parent]
            at = parent.model.steps if wait_for_end or not run.branch_step else run.branch_step
            begins[run.name] = StageChain(end(parent, at), (*begins[run.parent].stages, run.id))
        ends.append(StageChain(end(run, run.model.steps), begins[run.name].stages))
    for grid in graph.grids.values():
        export = graph.exports[grid.name]
        stages = (*begins[export.run].stages, export.id, grid.id)
        ends.append(StageChain(end(graph.runs[export.run], export.step) + hardware.finetune_seconds / 3600, stages))
    return max(ends, key=lambda chain: chain.hours)


def explain_steps(graph: "StageGraph") -> dict[str, str]:
    """Say for each group of models how its shared steps come about, and how they compare with what was reported."""
    groups = dict.fromkeys(model.group for model in graph.manifest.models)
    return {group: _explain_group(graph, group) for group in groups}


def _explain_group(graph: "StageGraph", group: str) -> str:
    runs, reported = [run for run in graph.runs.values() if run.model.group == group], graph.manifest.reported
    guessed = [run for run in runs if run.model.inferred]
    counted = [run for run in runs if not run.model.inferred]
    text = f"{_sum_steps(runs):,} steps: {_format_step_origins(counted)}"
    if guessed:
        text += f" and {_sum_steps(guessed):,} for the {len(guessed)} of its {len(runs)} models that are inferred"
    said = reported.steps.get(group)
    if said is None:
        return text
    mine, starts = _sum_steps(counted), _steps_by_parent(counted)
    text += f"; {reported.source or 'reported'} says {said:,}"
    if mine == said:
        return f"{text}, the same" + (" without these" if guessed else "")
    if len(starts) > 1 and set(starts.values()) == {said}:
        return f"{text}, one of the {len(starts)} starts alone"
    difference, tail = abs(mine - said), next((run.model.decay for run in counted if run.is_decay_only), 0)
    text += f", {difference:,} {'less' if said < mine else 'more'}" + (f" than the {mine:,}" if guessed else "")
    if tail and difference % tail == 0:
        decays = "one decay" if difference == tail else f"{difference // tail} decays"
        text += f": as much as {decays} of {tail:,}; which, it does not say"
    return text


def _format_step_origins(runs: list["PretrainStage"]) -> str:
    """Return how the steps of some runs come about, by where they begin."""
    starts = _steps_by_parent(runs)
    if len(set(starts.values())) == 1:
        first, each = next(iter(starts.items()))
        decays, decay = [min(run.model.decay, run.steps) for run in runs if run.model.after == first], runs[0].model.decay
        inside = f" ({each - sum(decays):,} undecayed and {len(decays)} x {decay:,} of decay)" if set(decays) == {decay} else ""
        return f"{each:,}{inside}" + (f" for each of {len(starts)} starts" if len(starts) > 1 else "")
    kinds: dict[str, list[PretrainStage]] = {"new": [], "branch": [], "tail": [], "weights": []}
    for run in runs:
        kinds["tail" if run.is_decay_only else run.start].append(run)
    new, branches, tails, others = kinds.values()
    said = [
        f"{_format_run_steps(new)} from new weights" if new else "",
        f"{_sum_steps(branches):,} in {len(branches)} {'branches' if len(branches) > 1 else 'branch'}" if branches else "",
        f"{_format_run_steps(tails)} of decay alone" if tails else "",
        f"{_sum_steps(others):,} in {format_count(len(others), 'run')} on finished models" if others else "",
    ]
    said = [words for words in said if words]
    return ", ".join(said) + (f" ({_sum_steps(runs):,})" if len(said) > 1 else "")


def _steps_by_parent(runs: list["PretrainStage"]) -> dict[str, int]:
    """Return the steps by the model that is continued, where all continue finished models."""
    names = dict.fromkeys(run.model.after for run in runs)
    return {} if "" in names else {name: _sum_steps([run for run in runs if run.model.after == name]) for name in names}


def _format_run_steps(runs: list["PretrainStage"]) -> str:
    same = {run.steps for run in runs}
    return f"{len(runs)} x {same.pop():,}" if len(same) == 1 else f"{_sum_steps(runs):,} in {len(runs)} runs"


def _sum_steps(runs: list["PretrainStage"]) -> int:
    return sum(run.steps for run in runs)
