"""What a study would be: its runs with every shared beginning trained once, and what they cost. Nothing is trained or written.

megaenc study plan configs/study/mini.yaml
megaenc study plan configs/study/paper.yaml --picture plan.png
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import atomic_files
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.grid.command import format_count
from megaenc.output_paths import check_output_file, create_parent_with_rollback
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.cost import StageChain, StudyCost, TrainingCost, compute_study_cost, explain_steps
from megaenc.study.plan.dag import StageGraph, build_graph
from megaenc.study.plan.render_dag import draw_graph, format_tree

_PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class PlanConfig:
    """What `megaenc study plan` takes."""

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file: configs/study/*.yaml."""
    draw_graph: str = ""
    """Draw the runs to this file, .png, .pdf or .svg."""
    data: str = ""
    """Folder in which the manifest's relative paths of data begin; the manifest's own unless given."""


def format_plan(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    """Return the plan as text: the runs, then what they take."""
    manifest = graph.manifest
    yield f"{manifest.title or manifest.path}: {_format_counts(graph)}"
    for part in (format_tree(graph), _format_pretraining(graph, cost), _format_finetuning(graph, cost) if graph.grids else ()):
        yield from ("", *part) if part else ()
    yield ""
    kinds = [f"{_format_bytes(size)} of {what}" for what, size in cost.disk.items() if size]
    yield f"disk: {_format_bytes(sum(cost.disk.values()))}: {', '.join(kinds)}"
    yield from _format_waits(graph, cost)


def _format_counts(graph: StageGraph) -> str:
    models = graph.manifest.models
    evaluated = sum(model.evaluate for model in models)
    on_the_way, left = len(graph.exports) - evaluated, len(models) - evaluated
    text = format_count(len(models), "model") + (
        f" and {format_count(on_the_way, 'checkpoint')} on the way" if on_the_way else ""
    )
    if not evaluated:
        return f"{text}, none of them evaluated"
    return text + (f", {left} of the models not evaluated" if left else "")


def _format_pretraining(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    hardware, reported = graph.manifest.hardware, graph.manifest.reported
    rows = [(group or "models", *both) for group, both in cost.groups.items()]
    if len(rows) > 1:
        rows.append(("together", cost.with_sharing, cost.without_sharing))
    width = max(len("pretraining"), *(len(row[0]) for row in rows))
    says = f"  {reported.source or 'reported'} says" if reported.steps else ""
    columns = f"{'steps':>12} {'tokens':>8} {'FLOP':>9} {'hours':>9}"
    yield f"{'pretraining':<{width}}  {columns}   {'without sharing':>15} {'hours':>9}{says}"
    for name, shared, alone in rows:
        said = [f"{reported.steps[name]:,}"] if name in reported.steps else []
        said += [f"{reported.gpu_hours[name]:,} h"] if name in reported.gpu_hours else []
        yield (
            f"{name:<{width}}  {shared.steps:>12,} {_format_scaled(shared.tokens):>8} {shared.flops:>9.2e} {_format_device_hours(shared):>9}   "
            f"{alone.steps:>15,} {_format_device_hours(alone):>9}" + (f"  {', '.join(said)}" if said else "")
        )
    for group, text in explain_steps(graph).items():
        yield f"  {group or 'models'}: {text}"
    if cost.with_sharing.device_hours is not None:
        rate = f" at {hardware.tokens_per_second:,.0f} tokens/s" if hardware.tokens_per_second else ""
        yield f"  hours of one {hardware.device}{rate}" + (f"; {hardware.source}" if hardware.source else "")
    else:
        yield "  hours: not known; `hardware: {tokens_per_second: ...}` in the manifest says how fast a device is"


def _format_finetuning(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    grid, hardware, reported = next(iter(graph.grids.values())), graph.manifest.hardware, graph.manifest.reported
    sets = sum(len(training.datasets) for training in grid.training_sets)
    rates, seeds = len(grid.flags["learning_rates"]), grid.flags["seeds"]
    results, who = len(graph.grids) * grid.result_count, reported.source or "reported"
    axes = ((len(graph.grids), "checkpoint"), (sets, "data set"), (rates, "rate"), (seeds, "seed"))
    yield f"fine-tuning: {format_count(results, 'result')}, {' x '.join(format_count(number, noun) for number, noun in axes)}"
    if cost.finetune_runs != results:
        yield f"  from {format_count(cost.finetune_runs, 'run')}, where retrieval trains once for all its sets"
    if said := reported.fine_tunings:
        checkpoints, rest = divmod(said, grid.result_count)
        how = "" if rest else f", {checkpoints} checkpoints x {grid.result_count}; which it leaves out it does not say"
        yield f"  {who} says {said:,}{how}"
    if cost.finetune_hours is not None:
        hours = reported.gpu_hours.get("finetune")
        also = f"; {who} says {hours:,}" if hours else ""
        each = f"one {hardware.device} at {hardware.finetune_seconds:,.0f} seconds a run"
        yield f"  {cost.finetune_hours:,.1f} hours of {each}{also}"


def _format_waits(graph: StageGraph, cost: StudyCost) -> Iterator[str]:
    hardware = graph.manifest.hardware
    if cost.longest_chain.hours is None:
        return
    each = f"{hardware.devices} x" if hardware.devices > 1 else "one"
    also = " and one for each fine-tuning run" if graph.grids else ""
    yield f"longest wait, with {each} {hardware.device} for each pretraining run{also}, all at once:"
    yield f"  {_format_duration(cost.longest_chain_run_by_run.hours)} where a branch waits for its parent's end (`study run`): {_format_chain(cost.longest_chain_run_by_run)}"
    yield f"  {_format_duration(cost.longest_chain.hours)} where it begins when its checkpoint is there: {_format_chain(cost.longest_chain)}"
    together = (cost.with_sharing.device_hours or 0.0) + (cost.finetune_hours or 0.0)
    yield f"  {_format_duration(together / hardware.devices)} on {hardware.devices} x {hardware.device} in all, one thing after another"


def _format_chain(chain: StageChain) -> str:
    return " > ".join(stage for stage in chain.stages if not stage.startswith("export/"))


def _format_device_hours(amount: TrainingCost) -> str:
    return "-" if amount.device_hours is None else f"{amount.device_hours:,.{0 if amount.device_hours >= 100 else 2}f}"


def _format_duration(hours: float) -> str:
    if hours >= 96:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"


def _format_bytes(count: float) -> str:
    return f"{count / 1e12:,.0f} TB" if count >= 1e15 else _format_scaled(count, (" bytes", " kB", " MB", " GB", " TB"))


def _format_scaled(count: float, units: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """Return three digits of a number and its unit."""
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{units[power]}"


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc study plan`."""
    silence_libraries()
    settings = flags.parse(PlanConfig, argv, prog="megaenc study plan", description=__doc__)
    output = Path(settings.picture) if settings.picture else None
    if output and output.suffix.lower() not in _PICTURE_SUFFIXES:
        raise InputError(f"--picture {output}: found the ending {output.suffix!r}, expected {', '.join(_PICTURE_SUFFIXES)}")
    if output:
        check_output_file(output, "--picture")
    with create_parent_with_rollback(output, "--picture") if output else contextlib.nullcontext():
        graph = build_graph(read_manifest(settings.manifest, settings.data or None))
        cost = compute_study_cost(graph)
        if output:
            title = (
                f"{graph.manifest.title or graph.manifest.path.name}\n{_format_counts(graph)}: {cost.with_sharing.steps:,} steps"
            )
            more = (
                f", {cost.without_sharing.steps:,} without sharing"
                if cost.without_sharing.steps != cost.with_sharing.steps
                else ""
            )
            with atomic_files(output) as [temporary]:
                draw_graph(graph, title + more).savefig(temporary, format=output.suffix.lower().removeprefix("."))
    for line in [*format_plan(graph, cost), *([f"{output}: the runs over their steps"] if output else [])]:
        print_rank_0(line)
