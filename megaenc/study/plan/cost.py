"""Cost of a study: steps, FLOPs, hours and bytes, and the critical path.

Pretraining is counted with and without shared prefixes, and FLOPs as in training
(`ModelConfig.training_flops`), at the expected document lengths and numbers of predictions. Hours
follow from the manifest's tokens per second, bytes from the parameter counts.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megaenc.study.plan.dag import StageGraph
from megaenc.study.plan.training_cost import TrainingCost, compute_training_cost
from megaenc.study.run.pretrain_stage import PretrainStage

RESULT_BYTES = 272_000
"""Average size of a fine-tuning result: 18,000 of the study's form and size take 4.9 GB
(docs/grid.md).
"""


class StageChain(NamedTuple):
    """Chain of stages, each of which waits for the one before.

    `stages` are ids. `hours` pass from the study's start to the end of the chain, with all runs of
    a fine-tuning grid in parallel; unknown durations of stages other than pretraining count as 0.
    If the throughput of pretraining is unknown, `hours` is None and `stages` is empty.
    """

    hours: float | None
    stages: tuple[str, ...]


@dataclass(frozen=True)
class StudyCost:
    """Cost of a study: pretraining, fine-tuning, contrastive training and disk.

    `groups` has the pretraining cost by `group` of the models, (with, without) shared prefixes, and
    `with_sharing` and `without_sharing` the sums. `finetune_runs` and `embed_runs` count runs,
    `finetune_hours` and `embed_hours` are device hours, None if unknown, and `disk` is in bytes by
    kind. `longest_chain` and `longest_chain_run_by_run` are critical paths: a branch starts once
    its checkpoint exists, or at its parent's end.
    """

    groups: dict[str, tuple[TrainingCost, TrainingCost]]
    """Pretraining cost by group of models, with and without shared prefixes. Without them, each
    model trains from its own first step; continued models still start from the study's own parent.
    """
    with_sharing: TrainingCost
    without_sharing: TrainingCost
    """Sums over all groups."""
    finetune_runs: int
    """Number of fine-tuning runs; retrieval trains once for all its data sets."""
    finetune_hours: float | None
    """Device hours of all fine-tuning runs."""
    embed_runs: int
    """Number of contrastive trainings."""
    embed_hours: float | None
    """Device hours of all contrastive trainings."""
    disk: dict[str, int]
    """Bytes by kind of a finished study; of checkpoints, the last of each run and those that other
    stages need.
    """
    longest_chain: StageChain
    """Critical path if a branch starts once its checkpoint exists and all fine-tuning runs are
    parallel.
    """
    longest_chain_run_by_run: StageChain
    """Critical path if a branch waits for its parent's end."""


def compute_study_cost(graph: StageGraph) -> StudyCost:
    """Return the cost of all stages of a study, finished ones included.

    Hours are None if the manifest's hardware lacks the throughput or the seconds of a run that they
    follow from.
    """
    groups = {model.group: (TrainingCost(), TrainingCost()) for model in graph.manifest.models}
    for run in graph.runs.values():
        shared, unshared = groups[run.model.group]
        model_cost = compute_training_cost(graph.manifest, run.model, 0, run.model.steps)
        groups[run.model.group] = (shared + run.cost, unshared + model_cost)
    finetune_runs = sum(grid.run_count for grid in graph.grids.values())
    seconds = graph.manifest.hardware.finetune_seconds
    embed_runs = sum(stage.run_count for stage in graph.embeds.values())
    embed_seconds = graph.manifest.hardware.embed_seconds
    return StudyCost(
        groups=groups,
        with_sharing=sum((shared for shared, _ in groups.values()), TrainingCost()),
        without_sharing=sum((unshared for _, unshared in groups.values()), TrainingCost()),
        finetune_runs=finetune_runs,
        finetune_hours=finetune_runs * seconds / 3600 if seconds or not finetune_runs else None,
        embed_runs=embed_runs,
        embed_hours=embed_runs * embed_seconds / 3600 if embed_seconds or not embed_runs else None,
        disk=_compute_disk_bytes(graph),
        longest_chain=_find_longest_chain(graph, wait_for_end=False),
        longest_chain_run_by_run=_find_longest_chain(graph, wait_for_end=True),
    )


def _compute_disk_bytes(graph: StageGraph) -> dict[str, int]:
    """Return the bytes of checkpoints, exports, results, and embedding models.

    A checkpoint holds the weights, the float32 master weights of bfloat16 ones, and AdamW's
    moments.
    """
    checkpoints = exports = embeddings = 0
    exported = Counter(export.run for export in graph.exports.values())
    trained: Counter[str] = Counter()
    for name, stage in graph.embeds.items():
        trained[graph.exports[name].run] += stage.run_count
    for run in graph.runs.values():
        parameters = run.model.config.shape.parameter_count(graph.manifest.vocab_size(run.model))
        checkpoints += (
            (len(run.checkpoint_steps) + 1) * parameters * (14 if run.model.config.bf16 else 12)
        )
        exports += exported[run.name] * parameters * (2 if run.model.config.bf16 else 4)
        embeddings += trained[run.name] * parameters * 4
    results = RESULT_BYTES * sum(grid.result_count for grid in graph.grids.values())
    kinds = {"checkpoints with optimizer": checkpoints, "exports": exports, "results": results}
    return kinds | ({"contrastively trained models": embeddings} if embeddings else {})


def _find_longest_chain(graph: StageGraph, wait_for_end: bool) -> StageChain:
    """Return the chain of stages that ends last.

    With `wait_for_end`, branches start when their parent has ended, otherwise once their checkpoint
    exists.
    """
    if any(run.cost.device_hours is None for run in graph.runs.values()):
        return StageChain(None, ())
    hardware = graph.manifest.hardware
    starts: dict[str, StageChain] = {}

    def end_hours(run: PretrainStage, step: int) -> float:
        duration = (
            (run.cost.device_hours or 0.0) / hardware.devices * (step - run.branch_step) / run.steps
        )
        return starts[run.name].hours + duration

    ends = []
    for run in graph.runs.values():
        starts[run.name] = StageChain(0.0, (run.id,))
        if run.parent:
            parent = graph.runs[run.parent]
            start_step = (
                parent.model.steps if wait_for_end or not run.branch_step else run.branch_step
            )
            starts[run.name] = StageChain(
                end_hours(parent, start_step), (*starts[run.parent].stages, run.id)
            )
        ends.append(StageChain(end_hours(run, run.model.steps), starts[run.name].stages))
    last_stages = [(grid, hardware.finetune_seconds) for grid in graph.grids.values()]
    last_stages += [
        (stage, stage.run_count * hardware.embed_seconds) for stage in graph.embeds.values()
    ]
    for stage, seconds in last_stages:
        export = graph.exports[stage.name]
        stages = (*starts[export.run].stages, export.id, stage.id)
        ends.append(
            StageChain(end_hours(graph.runs[export.run], export.step) + seconds / 3600, stages)
        )
    return max(ends, key=lambda chain: chain.hours)
