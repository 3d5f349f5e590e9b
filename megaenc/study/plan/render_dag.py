"""Drawings of the stage graph: a tree as text, and bars over steps as a figure."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megaenc.errors import InputError
from megaenc.estimate.work import PhaseWork
from megaenc.study.plan.dag import StageGraph
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.training.lr_schedule import LearningRateSchedule
from megaenc.viz.style import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    LEGEND,
    ORANGE,
    PURPLE,
    SKY_BLUE,
    YELLOW,
    format_count_ticks,
    without_math_text,
)

_MAX_LISTED_PHASES = 3
_MAX_DRAWN_PHASES = 5_000  # they take 3 milliseconds each
_OTHER_COLOURS = (GREEN, PURPLE, YELLOW, SKY_BLUE, "#6A3D9A", "#8C8C8C")
"""Colours of phases that are neither CLM nor MLM at a fixed mask ratio."""
_CONNECTIONS = {
    "branch": ("-", "branch: optimizer and rate continue"),
    "weights": (":", "finished weights, new optimizer"),
}
"""Style and legend text of the line from a parent, by the start of the run."""
_FIXED_MASK = re.compile(r"(mlm|mntp)(\(mask=[^,>]*\))?")
"""Phase without other options than a fixed mask ratio."""


@dataclass(frozen=True)
class DagRow:
    """Row of a drawing: a run, its offset, its parent's row, and its tree lines.

    `layout_rows` builds it. `run` is the stage, `parent` the index of the parent's row, None
    without one. `offset` is the x position of the run's step 0: of a branch, that of its parent,
    whose steps it continues to count; of a run that takes only weights, the parent's `end`; else 0.
    The run's own steps are drawn from `start` to `end`. `rails` are the tree lines in front of its
    name, `stem` those that continue below it.
    """

    run: PretrainStage
    offset: int = 0
    """Steps before its step 0: those of the model that it continues."""
    parent: int | None = None
    """Index of the parent's row; None for a trunk."""
    rails: str = ""
    """Tree lines in front of its name."""
    stem: str = ""
    """Tree lines that continue below it."""

    @property
    def start(self) -> int:
        """Return the x position, in steps, where the run's own steps begin.

        Steps of a branch's parent up to the branch, and of a model that is continued, lie before.
        """
        return self.offset + self.run.branch_step

    @property
    def end(self) -> int:
        """Return the x position, in steps, of the run's last step."""
        return self.offset + self.run.model.steps


def layout_rows(graph: StageGraph) -> list[DagRow]:
    """Return a DagRow for every run in drawing order.

    Children are below their parent, the latest branch first.
    """
    children: dict[str, list[PretrainStage]] = defaultdict(list)
    for run in graph.runs.values():
        children[run.parent].append(run)
    rows: list[DagRow] = []
    pending = [DagRow(trunk) for trunk in reversed(children[""])]
    while pending:  # a recursion could get too deep
        row = pending.pop()
        rows.append(row)
        branches = []
        for child in children[row.run.name]:
            offset = row.offset if child.start == "branch" else row.end
            branches.append(DagRow(child, offset, len(rows) - 1))
        branches.sort(key=lambda branch: -branch.start)
        for index, branch in enumerate(reversed(branches)):
            is_lowest = index == 0
            rails = row.stem + ("└─ " if is_lowest else "├─ ")
            stem = row.stem + ("   " if is_lowest else "│  ")
            pending.append(replace(branch, rails=rails, stem=stem))
    return rows


def format_tree(graph: StageGraph) -> Iterator[str]:
    """Yield the lines of a tree of runs, grouped by size.

    A line has name, start, number of own steps, phases, remarks on an inferred or unevaluated
    model, and intermediate checkpoints.
    """
    rows = layout_rows(graph)
    intermediate: dict[str, list[int]] = defaultdict(list)
    for export in graph.exports.values():
        if not export.key.decayed:
            intermediate[export.run].append(export.step)
    width = max(len(row.rails + row.run.name) for row in rows)
    size = ""
    for row in rows:
        run = row.run
        model = row.run.model
        if model.key.size != size and not run.parent:
            size = model.key.size
            yield f"{size}:"
        start = {
            "new": "",
            "branch": f"from step {run.branch_step:,}",
            "weights": f"after its {row.offset:,}",
        }[run.start]
        text = _format_phases(run)
        if run.steps <= model.decay:
            text += ", decay only"
        if model.inferred:
            text += ", inferred"
        if not model.evaluate:
            text += "  (not evaluated)"
        steps = sorted(intermediate[run.name])
        if steps:
            text += f"  also evaluated at {' '.join(f'{step:,}' for step in steps)}"
        yield f"  {row.rails + run.name:<{width}}  {start:<16}  {f'+{run.steps:,}':>9}  {text}"


def _format_phases(run: PretrainStage) -> str:
    """Return a run's own phases, as `CLM to 10,000, MLM 40 % to 42,000`."""
    phases = [phase for phase in run.model.phases if phase.last > run.branch_step]
    texts = [f"{format_phase(phase)} to {phase.last:,}" for phase in phases[:_MAX_LISTED_PHASES]]
    more = len(phases) - _MAX_LISTED_PHASES
    return ", ".join(texts) + (f", ... {more} more to {phases[-1].last:,}" if more > 0 else "")


def format_phase(phase: PhaseWork) -> str:
    """Return the label of a phase, such as `CLM`, `MLM 40 %` or `MNTP 40 %`.

    MLM and MNTP with other options than a fixed mask ratio, and other objectives, are labelled by
    their text in the schedule.
    """
    if match := _FIXED_MASK.fullmatch(phase.text):
        work, _ = phase.parts[0]
        return f"{match[1].upper()} {100 * work.predicted / work.tokens:g} %"
    return "CLM" if phase.text == "clm" else phase.text


@without_math_text
def draw_graph(graph: StageGraph, title: str) -> Any:
    """Return a matplotlib Figure with a bar per run over its own steps.

    Bars are coloured by phase, and as high as the learning rate. The figure is not one of pyplot,
    and need not be closed.

    Raises:
        InputError: The runs have more than 5,000 phases.
    """
    from matplotlib.figure import Figure

    rows = layout_rows(graph)
    count = sum(len(row.run.model.phases) for row in rows)
    if count > _MAX_DRAWN_PHASES:
        raise InputError(
            f"--picture: {graph.manifest.path} has {count:,} phases, expected at most "
            f"{_MAX_DRAWN_PHASES:,}; plan it without"
        )
    colours = _choose_phase_colours(rows)
    positions = _row_positions(rows)
    figure = Figure(figsize=(11, 2.0 + 0.235 * positions[-1]), dpi=130, layout="constrained")
    panel = figure.subplots()
    for row, y in zip(rows, positions, strict=True):
        if row.parent is not None:
            line, _ = _CONNECTIONS[row.run.start]
            panel.plot(
                [row.start] * 2,
                [positions[row.parent], y],
                color=GREY,
                linewidth=0.9,
                linestyle=line,
                zorder=1,
            )
        _draw_run(panel, row, y, colours)
    run_places = {row.run.name: (row.offset, y) for row, y in zip(rows, positions, strict=True)}
    checkpoint_steps = []
    checkpoint_positions = []
    for export in graph.exports.values():
        if not export.key.decayed:
            offset, y = run_places[export.run]
            checkpoint_steps.append(offset + export.step)
            checkpoint_positions.append(y)
    panel.scatter(
        checkpoint_steps,
        checkpoint_positions,
        s=14,
        zorder=3,
        facecolor="white",
        edgecolor="black",
        linewidth=0.7,
    )
    _style_panel(panel, max(row.end for row in rows), positions[-1])
    panel.set_title(title, loc="left", fontsize=11, pad=10)
    handles = _build_legend(rows, colours, bool(checkpoint_steps))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(len(handles), 5),
        **{**LEGEND, "fontsize": 8},
    )
    return figure


def _draw_run(panel: Any, row: DagRow, y: float, colours: Mapping[str, str]) -> None:
    """Draw a bar over each phase of the run's own steps, and its name to the right."""
    model = row.run.model
    rates = LearningRateSchedule.from_config(
        replace(
            model.config.learning_rate,
            lr_warmup_iters=model.warmup,
            lr_wsd_decay_iters=model.decay,
            lr_warmup_fraction=None,
            lr_wsd_decay_fraction=None,
        ),
        model.steps,
    )
    first = row.run.branch_step
    for phase in model.phases:
        if phase.last > first:
            x, height = _compute_bar_outline(row, rates, first, phase.last)
            panel.fill_between(
                x,
                y - height,
                y + height,
                color=colours[format_phase(phase)],
                linewidth=0,
                zorder=2,
            )
            first = phase.last
    panel.annotate(
        row.run.name,
        (row.end, y),
        (5, 0),
        color="black" if model.evaluate else GREY,
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _style_panel(panel: Any, last: int, bottom: float) -> None:
    """Set limits, ticks and grid; names of runs take the space after the step `last`."""
    panel.set(
        ylim=(bottom + 0.7, -0.9),
        xlim=(0, last * 1.3),
        yticks=[],
        xlabel="pretraining steps; height: learning rate",
    )
    format_count_ticks(panel.xaxis)
    panel.set_xticks([tick for tick in panel.get_xticks() if tick <= last])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.grid(axis="x", **GRID)
    panel.set_axisbelow(True)


def _build_legend(
    rows: list[DagRow], colours: Mapping[str, str], has_checkpoints: bool
) -> list[Any]:
    """Return the legend's handles: phases, checkpoints, and connections that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if has_checkpoints:
        handles.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker="o",
                markersize=4,
                markerfacecolor="white",
                markeredgecolor="black",
                label="intermediate checkpoint, evaluated",
            )
        )
    starts = {row.run.start for row in rows}
    for start, (line, label) in _CONNECTIONS.items():
        if start in starts:
            handles.append(Line2D([], [], color=GREY, linewidth=0.9, linestyle=line, label=label))
    return handles


def _row_positions(rows: list[DagRow]) -> list[float]:
    """Return the y position of each row.

    There is more room around trunks with branches and between sizes.
    """
    positions = [0.0]
    for before, row, after in zip(rows, rows[1:], [*rows[2:], None], strict=False):
        branched = before.rails or (after is not None and after.rails)
        is_new_size = row.run.model.key.size != before.run.model.key.size
        positions.append(
            positions[-1] + (1.7 if not row.rails and (branched or is_new_size) else 1.0)
        )
    return positions


def _compute_bar_outline(
    row: DagRow, rates: LearningRateSchedule, first: int, last: int
) -> tuple[Any, Any]:
    """Return x and half height of a bar over the steps first..last of a run.

    The height follows the learning rate.
    """
    import numpy as np

    model = row.run.model
    curve = np.linspace(
        model.last_undecayed_step, model.steps, 2 if rates.style == "linear" else 12
    )
    corners = {first, last, *(step for step in (model.warmup, *curve) if first < step < last)}
    x = np.array(sorted(corners), dtype=np.float64)
    rising = np.minimum(1.0, x / model.warmup) if model.warmup else np.ones_like(x)
    elapsed = 1.0 - np.minimum(1.0, (model.steps - x) / model.decay)
    falling = np.array([rates.decayed(fraction) / rates.peak for fraction in elapsed])
    return x + row.offset, 0.36 * np.maximum(0.12, np.minimum(rising, falling))


def _choose_phase_colours(rows: list[DagRow]) -> Mapping[str, str]:
    """Return the colour of each phase label.

    CLM is blue, MLM has shades of orange by mask ratio, and the rest has other colours.
    """
    from matplotlib.colors import to_hex, to_rgb

    phases = {format_phase(phase): phase for row in rows for phase in row.run.model.phases}
    masks = sorted(
        (phase.parts[0][0].predicted, label)
        for label, phase in phases.items()
        if _is_plain_mlm(phase)
    )
    colours = {"CLM": BLUE} if "CLM" in phases else {}
    for index, (_, label) in enumerate(masks):
        depth = 1.0 if len(masks) == 1 else 0.4 + 0.6 * index / (len(masks) - 1)
        colours[label] = to_hex([1 - depth * (1 - channel) for channel in to_rgb(ORANGE)])
    others = [label for label in phases if label not in colours]
    return colours | dict(zip(others, itertools.cycle(_OTHER_COLOURS), strict=False))


def _is_plain_mlm(phase: PhaseWork) -> bool:
    """Return whether a phase is MLM without other options than a fixed mask ratio."""
    match = _FIXED_MASK.fullmatch(phase.text)
    return match is not None and match[1] == "mlm"
