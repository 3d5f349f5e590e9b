"""Print the plan of a study: its runs, with shared prefixes, and their cost.

Every shared prefix is trained once. Nothing is trained or written.

megaenc study plan configs/study/mini.yaml
megaenc study plan configs/study/paper.yaml --picture plan.png
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import atomic_files
from megaenc.console import format_count, format_duration, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_output_file, create_parent_with_rollback
from megaenc.study.manifest.ladder import LADDER, count_parameters
from megaenc.study.manifest.schema import Manifest, read_manifest
from megaenc.study.plan.cost import StudyCost, compute_study_cost
from megaenc.study.plan.dag import StageGraph, build_graph
from megaenc.study.plan.render_dag import draw_graph, format_tree
from megaenc.study.plan.training_cost import TrainingCost

_PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class PlanConfig:
    """Flags of `megaenc study plan`, each a field; only `manifest` is positional.

    `manifest` is the YAML file, `picture` an image to draw, "" for none, and `data` the directory
    of relative data paths, "" for that of the manifest.
    """

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file, or the name of a packaged one such as study/mini."""
    picture: str = ""
    """Also draw the runs to this .png, .pdf or .svg file."""
    data: str = ""
    """Directory that relative data paths of the manifest start from; default: that of the file, or
    the current one for a packaged manifest."""


def format_plan(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Yield the lines of a plan: tree of runs, costs, disk space, critical path.

    The critical path is left out if the throughput is unknown.
    """
    manifest = graph.manifest
    yield f"{manifest.title or manifest.path}: {_format_counts(graph)}"
    parts = [format_tree(graph)]
    if manifest.ladder:
        parts.append(_format_ladder(manifest))
    parts.append(_format_pretraining(graph, cost))
    if graph.grids:
        parts.append(_format_finetuning(graph, cost))
    if graph.embeds:
        parts.append(_format_embedding(graph, cost))
    for part in parts:
        yield ""
        yield from part
    yield ""
    kinds = [f"{_format_bytes(size)} of {kind}" for kind, size in cost.disk.items() if size]
    yield f"disk: {_format_bytes(sum(cost.disk.values()))}: {', '.join(kinds)}"
    yield from _format_waits(graph, cost)


def _format_counts(graph: StageGraph) -> str:
    """Return the numbers of models and intermediate checkpoints."""
    models = graph.manifest.models
    evaluated = sum(model.evaluate for model in models)
    intermediate = len(graph.exports) - evaluated
    unevaluated = len(models) - evaluated
    text = format_count(len(models), "model")
    if intermediate:
        text += f" and {format_count(intermediate, 'intermediate checkpoint')}"
    if not evaluated:
        return f"{text}, none of them evaluated"
    if unevaluated:
        text += f", {unevaluated} of the models not evaluated"
    return text


def _format_pretraining(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Yield the table of pretraining costs by group."""
    hardware = graph.manifest.hardware
    model_counts = Counter(model.group for model in graph.manifest.models)
    rows = [
        (group or "models", model_counts[group], *costs) for group, costs in cost.groups.items()
    ]
    if len(rows) > 1:
        rows.append(("together", model_counts.total(), cost.with_sharing, cost.without_sharing))
    width = max(len("pretraining"), *(len(row[0]) for row in rows))
    columns = f"{'models':>6} {'steps':>12} {'tokens':>8} {'FLOP':>9} {'hours':>9}"
    yield f"{'pretraining':<{width}}  {columns}   {'without sharing':>15} {'hours':>9}"
    for name, model_count, shared, unshared in rows:
        columns = f"{model_count:>6,} {shared.steps:>12,} {_format_scaled(shared.tokens):>8}"
        columns += f" {shared.flops:>9.2e} {_format_device_hours(shared):>9}"
        columns += f"   {unshared.steps:>15,} {_format_device_hours(unshared):>9}"
        yield f"{name:<{width}}  {columns}"
    if cost.with_sharing.device_hours is None:
        yield "  hours: unknown; set `hardware: {tokens_per_second: ...}` in the manifest"
        return
    line = f"  hours of one {hardware.device}"
    if hardware.tokens_per_second:
        line += f" at {hardware.tokens_per_second:,.0f} tokens/s"
    if hardware.source:
        line += f"; {hardware.source}"
    yield line


def _format_ladder(manifest: Manifest) -> Iterator[str]:
    """Yield the table of a ladder's sizes, by the rule of the section."""
    yield "ladder   parameters  width  peak rate  tokens a step  tokens per parameter"
    models = [model for model in manifest.models if model.group == LADDER]
    for size in dict.fromkeys(model.key.size for model in models):
        members = [model for model in models if model.key.size == size]
        config = members[0].config
        parameters = count_parameters(config.shape, manifest.vocab_size(members[0]))
        step = config.global_batch_size * config.data.seq_length
        ratios = sorted(model.steps * step / parameters for model in members)
        columns = f"{_format_scaled(parameters):>11}  {config.shape.hidden_size:>5,}"
        columns += f"  {config.learning_rate.lr:>9.3g}  {step:>13,}"
        yield f"{size:<7} {columns}  {ratios[0]:.3g} to {ratios[-1]:.3g}"


def _format_finetuning(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Yield the lines on fine-tuning: runs, hours, and hours with pretraining."""
    manifest = graph.manifest
    hardware = manifest.hardware
    sets = sum(len(training.datasets) for training in manifest.training_sets)
    rates = len(manifest.finetune_flags["learning_rates"])
    seeds = manifest.finetune_flags["seeds"]
    results = sum(grid.result_count for grid in graph.grids.values())
    axes = (
        (len(graph.exports), "checkpoint"),
        (sets, "data set"),
        (rates, "rate"),
        (seeds, "seed"),
    )
    product = " x ".join(format_count(count, noun) for count, noun in axes)
    yield f"fine-tuning: {format_count(results, 'result')}, {product}"
    if cost.finetune_runs != results:
        runs = format_count(cost.finetune_runs, "run")
        yield f"  from {runs}: retrieval trains once for all its sets"
    if cost.finetune_hours is not None:
        speed = f"{hardware.finetune_seconds:,.0f} seconds a run"
        yield f"  {cost.finetune_hours:,.1f} hours of one {hardware.device} at {speed}"
        if cost.with_sharing.device_hours is not None:
            total = cost.with_sharing.device_hours + cost.finetune_hours
            yield f"  {total:,.1f} hours together with pretraining"


def _format_embedding(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Yield the lines on zero-shot retrieval and contrastive trainings."""
    stage = next(iter(graph.embeds.values()))
    hardware = graph.manifest.hardware
    checkpoints = format_count(len(graph.embeds), "checkpoint")
    sets = format_count(len(stage.data.entry.datasets), "data set")
    evaluations = format_count(len(graph.embeds) * len(stage.models), "evaluation")
    yield f"zero-shot retrieval: {evaluations} on {sets}, {checkpoints} as pretrained"
    if cost.embed_runs:
        seeds = format_count(stage.run_count, "seed")
        trainings = format_count(cost.embed_runs, "contrastive training")
        yield f"  and after {trainings}: {seeds} of each checkpoint"
        if cost.embed_hours is None:
            yield "  hours: unknown; set `hardware: {embed_seconds: ...}` in the manifest"
        else:
            speed = f"{hardware.embed_seconds:,.0f} seconds a training with its evaluation"
            yield f"  {cost.embed_hours:,.1f} hours of one {hardware.device} at {speed}"


def _format_waits(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Yield the lines on the critical path and the total time.

    There are none if the throughput is unknown.
    """
    hardware = graph.manifest.hardware
    if cost.longest_chain.hours is None:
        return
    count = f"{hardware.devices} x" if hardware.devices > 1 else "one"
    uses = f"{count} {hardware.device} per pretraining run"
    if graph.grids:
        uses += " and one per fine-tuning run"
    if graph.embeds:
        uses += " and one per model to embed with"
    yield f"critical path, with {uses}, all in parallel:"
    for condition, chain in (
        ("branches wait for their parent's end (`study run`)", cost.longest_chain_run_by_run),
        ("branches start once their checkpoint exists", cost.longest_chain),
    ):
        stages = " > ".join(stage for stage in chain.stages if not stage.startswith("export/"))
        yield f"  {format_duration(3600 * chain.hours)} if {condition}: {stages}"
    total = (
        (cost.with_sharing.device_hours or 0.0)
        + (cost.finetune_hours or 0.0)
        + (cost.embed_hours or 0.0)
    )
    duration = format_duration(3600 * total / hardware.devices)
    devices = f"{hardware.devices} x {hardware.device}"
    yield f"  {duration} on {devices} in total, one stage at a time"


def _format_device_hours(amount: TrainingCost) -> str:
    """Return the device hours of a cost, or `-` if unknown."""
    hours = amount.device_hours
    if hours is None:
        return "-"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:,.2f}"


def _format_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit."""
    if count >= 1e15:
        return f"{count / 1e12:,.0f} TB"
    return _format_scaled(count, (" bytes", " kB", " MB", " GB", " TB"))


def _format_scaled(count: float, units: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """Return a number with three digits and its unit."""
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g}{units[power]}"


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of a manifest, and draw its runs to --picture if given.

    The picture is a .png, .pdf or .svg file; an existing one is replaced. Wrong input exits with 2.

    Args:
        argv: Words after `megaenc study plan`; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(PlanConfig, argv, prog="megaenc study plan", description=__doc__)
    output = Path(settings.picture) if settings.picture else None
    if output and output.suffix.lower() not in _PICTURE_SUFFIXES:
        raise InputError(
            f"--picture {output}: found the ending {output.suffix!r}, expected "
            f"{', '.join(_PICTURE_SUFFIXES)}"
        )
    if output:
        check_output_file(output, "--picture")
    with create_parent_with_rollback(output, "--picture") if output else contextlib.nullcontext():
        graph = build_graph(read_manifest(settings.manifest, settings.data or None))
        cost = compute_study_cost(graph)
        if output:
            steps = cost.with_sharing.steps
            unshared_steps = cost.without_sharing.steps
            title = f"{graph.manifest.title or graph.manifest.path.name}\n"
            title += f"{_format_counts(graph)}: {steps:,} steps"
            if unshared_steps != steps:
                title += f", {unshared_steps:,} without sharing"
            with atomic_files(output) as [temporary]:
                draw_graph(graph, title).savefig(
                    temporary, format=output.suffix.lower().removeprefix(".")
                )
    for line in format_plan(graph, cost):
        print_rank_0(line)
    if output:
        print_rank_0(f"{output}: the runs over their steps")
