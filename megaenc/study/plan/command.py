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
from megaenc.console import print_rank_0, quiet
from megaenc.errors import InputError, one_line_errors
from megaenc.finetune.grid.command import count
from megaenc.output_paths import check_output_file, created_parent
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.cost import Amount, Chain, Cost, cost_of, explained
from megaenc.study.plan.dag import StageGraph, build_graph
from megaenc.study.plan.render_dag import picture, tree

_FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class PlanConfig:
    """What `megaenc study plan` takes."""

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file: configs/study/*.yaml."""
    picture: str = ""
    """Draw the runs to this file, .png, .pdf or .svg."""
    data: str = ""
    """Folder in which the manifest's relative paths of data begin; the manifest's own unless given."""


def lines(graph: StageGraph, cost: Cost) -> Iterator[str]:
    """Return the plan as text: the runs, then what they take."""
    manifest = graph.manifest
    yield f"{manifest.title or manifest.path}: {_counts(graph)}"
    for part in (tree(graph), _pretraining(graph, cost), _finetuning(graph, cost) if graph.grids else ()):
        yield from ("", *part) if part else ()
    yield ""
    kinds = [f"{_bytes(size)} of {what}" for what, size in cost.disk.items() if size]
    yield f"disk: {_bytes(sum(cost.disk.values()))}: {', '.join(kinds)}"
    yield from _waits(graph, cost)


def _counts(graph: StageGraph) -> str:
    models = graph.manifest.models
    evaluated = sum(model.evaluate for model in models)
    on_the_way, left = len(graph.exports) - evaluated, len(models) - evaluated
    text = count(len(models), "model") + (f" and {count(on_the_way, 'checkpoint')} on the way" if on_the_way else "")
    if not evaluated:
        return f"{text}, none of them evaluated"
    return text + (f", {left} of the models not evaluated" if left else "")


def _pretraining(graph: StageGraph, cost: Cost) -> Iterator[str]:
    hardware, reported = graph.manifest.hardware, graph.manifest.reported
    rows = [(group or "models", *both) for group, both in cost.groups.items()]
    if len(rows) > 1:
        rows.append(("together", cost.shared, cost.alone))
    width = max(len("pretraining"), *(len(row[0]) for row in rows))
    says = f"  {reported.source or 'reported'} says" if reported.steps else ""
    columns = f"{'steps':>12} {'tokens':>8} {'FLOP':>9} {'hours':>9}"
    yield f"{'pretraining':<{width}}  {columns}   {'without sharing':>15} {'hours':>9}{says}"
    for name, shared, alone in rows:
        said = [f"{reported.steps[name]:,}"] if name in reported.steps else []
        said += [f"{reported.gpu_hours[name]:,} h"] if name in reported.gpu_hours else []
        yield (
            f"{name:<{width}}  {shared.steps:>12,} {_scaled(shared.tokens):>8} {shared.flops:>9.2e} {_hours(shared):>9}   "
            f"{alone.steps:>15,} {_hours(alone):>9}" + (f"  {', '.join(said)}" if said else "")
        )
    for group, text in explained(graph).items():
        yield f"  {group or 'models'}: {text}"
    if cost.shared.device_hours is not None:
        rate = f" at {hardware.tokens_per_second:,.0f} tokens/s" if hardware.tokens_per_second else ""
        yield f"  hours of one {hardware.device}{rate}" + (f"; {hardware.source}" if hardware.source else "")
    else:
        yield "  hours: not known; `hardware: {tokens_per_second: ...}` in the manifest says how fast a device is"


def _finetuning(graph: StageGraph, cost: Cost) -> Iterator[str]:
    grid, hardware, reported = next(iter(graph.grids.values())), graph.manifest.hardware, graph.manifest.reported
    sets = sum(len(training.datasets) for training in grid.trainings)
    rates, seeds = len(grid.flags["learning_rates"]), grid.flags["seeds"]
    results, who = len(graph.grids) * grid.results, reported.source or "reported"
    axes = ((len(graph.grids), "checkpoint"), (sets, "data set"), (rates, "rate"), (seeds, "seed"))
    yield f"fine-tuning: {count(results, 'result')}, {' x '.join(count(number, noun) for number, noun in axes)}"
    if cost.trainings != results:
        yield f"  from {count(cost.trainings, 'run')}, where retrieval trains once for all its sets"
    if said := reported.fine_tunings:
        checkpoints, rest = divmod(said, grid.results)
        how = "" if rest else f", {checkpoints} checkpoints x {grid.results}; which it leaves out it does not say"
        yield f"  {who} says {said:,}{how}"
    if cost.finetune_hours is not None:
        hours = reported.gpu_hours.get("finetune")
        also = f"; {who} says {hours:,}" if hours else ""
        each = f"one {hardware.device} at {hardware.finetune_seconds:,.0f} seconds a run"
        yield f"  {cost.finetune_hours:,.1f} hours of {each}{also}"


def _waits(graph: StageGraph, cost: Cost) -> Iterator[str]:
    hardware = graph.manifest.hardware
    if cost.at_the_branch.hours is None:
        return
    each = f"{hardware.devices} x" if hardware.devices > 1 else "one"
    also = " and one for each fine-tuning run" if graph.grids else ""
    yield f"longest wait, with {each} {hardware.device} for each pretraining run{also}, all at once:"
    yield f"  {_clock(cost.at_the_end.hours)} where a branch waits for its parent's end (`study run`): {_chain(cost.at_the_end)}"
    yield f"  {_clock(cost.at_the_branch.hours)} where it begins when its checkpoint is there: {_chain(cost.at_the_branch)}"
    together = (cost.shared.device_hours or 0.0) + (cost.finetune_hours or 0.0)
    yield f"  {_clock(together / hardware.devices)} on {hardware.devices} x {hardware.device} in all, one thing after another"


def _chain(chain: Chain) -> str:
    return " > ".join(stage for stage in chain.stages if not stage.startswith("export/"))


def _hours(amount: Amount) -> str:
    return "-" if amount.device_hours is None else f"{amount.device_hours:,.{0 if amount.device_hours >= 100 else 2}f}"


def _clock(hours: float) -> str:
    if hours >= 96:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"


def _bytes(count: float) -> str:
    return f"{count / 1e12:,.0f} TB" if count >= 1e15 else _scaled(count, (" bytes", " kB", " MB", " GB", " TB"))


def _scaled(count: float, units: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """Return three digits of a number and its unit."""
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{units[power]}"


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc study plan`."""
    quiet()
    settings = flags.parse(PlanConfig, argv, prog="megaenc study plan", description=__doc__)
    output = Path(settings.picture) if settings.picture else None
    if output and output.suffix.lower() not in _FORMATS:
        raise InputError(f"--picture {output}: found the ending {output.suffix!r}, expected {', '.join(_FORMATS)}")
    if output:
        check_output_file(output, "--picture")
    with created_parent(output, "--picture") if output else contextlib.nullcontext():
        graph = build_graph(read_manifest(settings.manifest, settings.data or None))
        cost = cost_of(graph)
        if output:
            title = f"{graph.manifest.title or graph.manifest.path.name}\n{_counts(graph)}: {cost.shared.steps:,} steps"
            more = f", {cost.alone.steps:,} without sharing" if cost.alone.steps != cost.shared.steps else ""
            with atomic_files(output) as [temporary]:
                picture(graph, title + more).savefig(temporary, format=output.suffix.lower().removeprefix("."))
    for line in [*lines(graph, cost), *([f"{output}: the runs over their steps"] if output else [])]:
        print_rank_0(line)
