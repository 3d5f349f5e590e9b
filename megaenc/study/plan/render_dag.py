"""The graph of a study to look at: a tree of runs as text, and bars over steps as a picture."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaenc.estimate.layout_case import PhaseWork
from megaenc.study.plan.dag import StageGraph
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.viz.style import GREY, LEGEND, assign_styles, format_count_ticks, without_math_text

_MAX_PHASES = 3
_CLM_COLOUR, _MLM_COLOUR = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class DagRow:
    """A run in its place: below the one that it leaves, to the right of where it leaves it."""

    run: PretrainStage
    offset: int = 0
    """Steps that lie behind its step 0: those of the model that it continues."""
    parent: int | None = None
    """The row that it leaves."""
    rails: str = ""
    """The lines of the tree in front of its name."""
    stem: str = ""
    """Those that go on below it."""

    @property
    def start(self) -> int:
        """Return its first step less one, on the axis of all."""
        return self.offset + self.run.branch_step

    @property
    def end(self) -> int:
        return self.offset + self.run.model.steps


def layout_rows(graph: StageGraph) -> list[DagRow]:
    """Every run, trunks in the order of the graph. Under each those that leave it, the latest first: so no line crosses a bar."""
    children: dict[str, list[PretrainStage]] = defaultdict(list)
    for run in graph.runs.values():
        children[run.parent].append(run)
    rows: list[DagRow] = []
    left = [DagRow(trunk) for trunk in reversed(children[""])]
    while left:  # no recursion: a chain of branches may be long
        row = left.pop()
        rows.append(row)
        below = [(row.offset if child.start == "branch" else row.end, child) for child in children[row.run.name]]
        for number, (offset, child) in enumerate(reversed(sorted(below, key=lambda one: -one[0] - one[1].branch_step))):
            rails, stem = ("├─ ", "│  ") if number else ("└─ ", "   ")
            left.append(DagRow(child, offset, len(rows) - 1, row.stem + rails, row.stem + stem))
    return rows


def format_tree(graph: StageGraph) -> Iterator[str]:
    """Return the runs as lines of text: name, where each begins, what it trains, the steps that it makes, what is evaluated."""
    rows = layout_rows(graph)
    on_the_way: dict[str, list[int]] = defaultdict(list)
    for export in graph.exports.values():
        if not export.key.decayed:
            on_the_way[export.run].append(export.step)
    width = max(len(row.rails + row.run.name) for row in rows)
    size = ""
    for row in rows:
        run, model = row.run, row.run.model
        if model.key.size != size and not run.parent:
            size = model.key.size
            yield f"{size}:"
        begins = {"new": "", "branch": f"from step {run.branch_step:,}", "weights": f"after its {row.offset:,}"}[run.start]
        what = _format_phases(run) + (", all of it decay" if run.steps <= model.decay else "")
        what += "" if model.evaluate else "  (not evaluated)"
        if steps := on_the_way[run.name]:
            what += f"  evaluated at {' '.join(f'{step:,}' for step in sorted(steps))} too"
        yield f"  {row.rails + run.name:<{width}}  {begins:<16}  {f'+{run.steps:,}':>9}  {what}"


def _format_phases(run: PretrainStage) -> str:
    """Say what the steps of a run train that it makes itself, `CLM to 10,000, MLM 40 % to 42,000`."""
    made = [phase for phase in run.model.phases if phase.last > run.branch_step]
    texts = [f"{format_phase(phase)} to {phase.last:,}" for phase in made[:_MAX_PHASES]]
    more = len(made) - _MAX_PHASES
    return ", ".join(texts) + (f", ... {more} more to {made[-1].last:,}" if more > 0 else "")


def format_phase(phase: PhaseWork) -> str:
    """Say what a phase trains, for the eye: `CLM`, `MLM 40 %`, or as a schedule spells it."""
    name, (work, _) = phase.text.partition("(")[0], phase.parts[0]
    if name in ("mlm", "mntp") and not re.search(",|->", phase.text):
        return f"{name.upper()} {100 * work.predicted / work.tokens:g} %"
    return "CLM" if phase.text == "clm" else phase.text


@without_math_text
def draw_graph(graph: StageGraph, title: str) -> Any:
    """Return matplotlib's Figure: each run is a bar from the step where it begins to its end, its height the learning rate."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = layout_rows(graph)
    last, colours, places = max(row.end for row in rows), _choose_phase_colours(rows), _row_positions(rows)
    figure = Figure(figsize=(11, 2.0 + 0.235 * places[-1]), dpi=130, layout="constrained")
    panel = figure.subplots()
    for row, y in zip(rows, places, strict=True):
        if row.parent is not None:
            line = ":" if row.run.start == "weights" else "-"
            panel.plot([row.start] * 2, [places[row.parent], y], color=GREY, linewidth=0.9, linestyle=line, zorder=1)
        first = row.run.branch_step
        for phase in row.run.model.phases:
            if phase.last > first:
                x, height = _compute_bar_outline(row, first, phase.last)
                panel.fill_between(x, y - height, y + height, color=colours[format_phase(phase)], linewidth=0, zorder=2)
                first = phase.last
        look = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        panel.annotate(row.run.name, (row.end, y), (5, 0), color="black" if row.run.model.evaluate else GREY, **look)
    at = {row.run.name: (row.offset, y) for row, y in zip(rows, places, strict=True)}
    on_the_way = [(export.step, *at[export.run]) for export in graph.exports.values() if not export.key.decayed]
    dot = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.7}
    panel.scatter([step + offset for step, offset, _ in on_the_way], [y for *_, y in on_the_way], s=14, zorder=3, **dot)
    label_of_x = "steps of pretraining; a bar is as high as the learning rate"
    panel.set(ylim=(places[-1] + 0.7, -0.9), xlim=(0, last * 1.3), yticks=[], xlabel=label_of_x)
    format_count_ticks(panel.xaxis)
    panel.set_xticks([tick for tick in panel.get_xticks() if tick <= last])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_title(title, loc="left", fontsize=11, pad=10)
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if on_the_way:
        dot = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "markeredgecolor": "black"}
        handles.append(Line2D([], [], linestyle="", **dot, label="evaluated on the way"))
    ways = {"branch": ("-", "branch: optimizer and rate go on"), "weights": (":", "finished weights, new optimizer")}
    for start in [start for start in ways if any(row.run.start == start for row in rows)]:
        line, words = ways[start]
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, linestyle=line, label=words))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 5), **{**LEGEND, "fontsize": 8})
    return figure


def _row_positions(rows: list[DagRow]) -> list[float]:
    """The height of each row, with some room around trunks that have branches and between sizes."""
    places = [0.0]
    for before, row, after in zip(rows[:-1], rows[1:], [*rows[2:], None], strict=True):
        branched = before.rails or (after is not None and after.rails)
        other = row.run.model.key.size != before.run.model.key.size
        places.append(places[-1] + (1.7 if not row.rails and (branched or other) else 1.0))
    return places


def _compute_bar_outline(row: DagRow, first: int, last: int) -> tuple[Any, Any]:
    """(x, half the bar's height there) of the steps first..last of a run: the height follows the learning rate."""
    import numpy as np

    model = row.run.model
    corners = {first, last, *(step for step in (model.warmup, model.last_undecayed_step) if first < step < last)}
    x = np.array(sorted(corners), dtype=np.float64)
    rising = np.minimum(1.0, x / model.warmup) if model.warmup else np.ones_like(x)
    falling = np.minimum(1.0, (model.steps - x) / model.decay)
    return x + row.offset, 0.36 * np.maximum(0.12, np.minimum(rising, falling))


def _choose_phase_colours(rows: list[DagRow]) -> Mapping[str, Any]:
    """A colour for each thing that is trained: blue for CLM, an orange for each mask ratio of MLM, others for the rest."""
    from matplotlib.colors import to_hex, to_rgb

    parts = {format_phase(phase): phase for row in rows for phase in row.run.model.phases}
    masks = sorted((phase.parts[0][0].predicted, name) for name, phase in parts.items() if name.startswith("MLM "))
    found: dict[str, Any] = {"CLM": _CLM_COLOUR} if "CLM" in parts else {}
    for number, (_, name) in enumerate(masks):
        depth = 1.0 if len(masks) == 1 else 0.4 + 0.6 * number / (len(masks) - 1)
        found[name] = to_hex([1 - depth * (1 - channel) for channel in to_rgb(_MLM_COLOUR)])
    others = [name for name in parts if name not in found]
    spare = [colour for colour, _ in assign_styles([*"abcdef"]).values() if colour not in (_CLM_COLOUR, _MLM_COLOUR)]
    spare += ["#6A3D9A", "#8C8C8C"]
    return found | {name: spare[number % len(spare)] for number, name in enumerate(others)}
