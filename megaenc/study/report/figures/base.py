"""What a figure is made of: lines of scores in panels, one a family, drawn wide for a page and narrow for a phone."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.methods import describe_intervals
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.groups import AVERAGE, FAMILY_LABELS, dataset_label, datasets_by_family, is_average
from megaenc.viz.style import format_count_ticks

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # of Okabe and Ito, as in megaenc.viz.style
OBJECTIVE_STYLES = {"CLM": (BLUE, "o"), "MLM": (ORANGE, "s"), "CLM + MLM": (GREEN, "^")}
"""Colour and marker of each objective, the same in all figures."""
TEXT_COLOUR, MUTED_COLOUR, GRID_COLOUR, BACKGROUND_COLOUR = "#1a1a1a", "#5f5f5f", "#dcdcdc", "#ffffff"
"""What is not data; the page puts its own colours in their places."""
WIDE, NARROW = 2, 1
"""Columns of panels on a page and on a phone."""


@dataclass(frozen=True)
class FigurePoint:
    """A mean in percent, half the width of its interval where it has one, at a place of the axis."""

    x: float
    mean: float
    half_width: float | None = None
    collapsed: bool = False
    """Whether worthless predictions are in the mean; such a point is hollow."""


@dataclass(frozen=True)
class FigureLine:
    """Points of one name; `joined` where what lies between them has a meaning."""

    name: str
    colour: str
    marker: str
    points: tuple[FigurePoint, ...]
    joined: bool = True
    light: bool = False
    """Behind the others: published values, or single models behind their mean."""
    labelled: bool = True


@dataclass(frozen=True)
class FigurePanel:
    """One pair of axes."""

    title: str
    lines: tuple[FigureLine, ...]
    x_label: str
    y_label: str = "score (%)"
    ticks: Mapping[float, str] | None = None
    """Places that are named, where the axis has no other numbers."""
    log: bool = False
    unit: Literal["", "steps", "operations"] = ""
    """What the numbers of the axis are written as: 10k, 2e19."""


@dataclass(frozen=True)
class FigureSpec:
    """A figure, not drawn yet; without panels one that there is nothing to draw of."""

    key: str
    title: str
    caption: str
    """a sentence or two on what is seen (the alternative text too), or why nothing is"""
    panels: tuple[FigurePanel, ...] = ()

    def draw(self, columns: int = WIDE) -> Any:
        """Return matplotlib's Figure with the panels in so many columns."""
        from matplotlib import rc_context

        with rc_context(_STYLE):
            return _draw_panels(self, columns)

    @cached_property
    def wide(self) -> Any:
        """The Figure for files and pages, drawn once."""
        return self.draw(WIDE)

    @cached_property
    def svg(self) -> str:
        """The same as SVG."""
        return figure_to_svg(self.wide, self.key)


FigureSeries = Sequence[tuple[str, tuple[str, str], Sequence[tuple[float, ModelKey]]]]
"""Of each line its name, its colour and marker, and models with their places on the axis."""


def headline_datasets(evidence: Evidence) -> dict[str, str]:
    """Return what a figure shows of each family: the average, or the only data set."""
    sets = datasets_by_family(evidence.datasets())
    return {family: next(filter(is_average, names), names[0]) for family, names in sets.items()}


def build_family_figure(
    key: str,
    title: str,
    caption: str,
    evidence: Evidence,
    series: FigureSeries,
    published: Evidence | None = None,
    dodge: float = 0.0,
    joined: bool = True,
    **axis: Any,
) -> FigureSpec:
    """Return a figure with a panel for each family with a point in it. `published` values of the same models lie lightly behind.

    `dodge` moves series apart by so much of the axis, where their points would cover each other.
    """
    panels = []
    for family, dataset in headline_datasets(evidence).items():
        lines = []
        for at, (name, look, models) in enumerate(series):
            shift = dodge * (at - (len(series) - 1) / 2)
            places = [(x + shift, dataset, setting) for x, setting in sorted(models, key=lambda place: place[0])]
            own: list[FigureLine] = []
            for seed in sorted({setting.seed for _, setting in models}):  # of the pretraining: the first one's are joined
                if points := build_points(evidence, family, [place for place in places if place[-1].seed == seed]):
                    own.append(FigureLine(name, *look, points, joined and not own, bool(own), not own))
            lines += own
            if published is not None and (points := build_points(published, family, places)):
                lines.append(FigureLine(published_label(name), *look, points, joined, light=True))
        if lines:
            panels.append(FigurePanel(panel_title(family, dataset), tuple(lines), **axis))
    return FigureSpec(key, title, f"{caption} {describe_bars(evidence, published, panels)}", tuple(panels))


def has_published_lines(panels: Sequence[FigurePanel]) -> bool:
    """Return whether published values lie behind some line."""
    return any(line.light and line.name.endswith(_PUBLISHED) for panel in panels for line in panel.lines)


def describe_bars(evidence: Evidence, published: Evidence | None, panels: Sequence[FigurePanel]) -> str:
    """Return the words of a caption on the bars of these panels and on hollow points."""
    hollow = any(point.collapsed for panel in panels for line in panel.lines for point in line.points)
    said = " Hollow points in strong colours: runs behind them have collapsed to worthless predictions." if hollow else ""
    return f"Bars: {describe_intervals(evidence, published if has_published_lines(panels) else None)}.{said}"


_PUBLISHED = ", published"


def published_label(name: str) -> str:
    """Return the name of a line of published values."""
    return name + _PUBLISHED


def panel_title(family: str, dataset: str) -> str:
    """Return `Retrieval`, and which data set if it is not the average."""
    name = FAMILY_LABELS.get(family, family)
    return name if dataset == AVERAGE else f"{name}: {dataset_label(family, dataset)}"


def build_points(evidence: Evidence, family: str, places: Iterable[tuple[float, str, ModelKey]]) -> tuple[FigurePoint, ...]:
    """Return the scores that there are of a family, at places of the axis, by data set and model."""
    scores = [(x, evidence.find(setting, dataset, family)) for x, dataset, setting in places]
    return tuple(_build_point(x, score) for x, score in scores if score is not None)


def _build_point(x: float, score: Score) -> FigurePoint:
    return FigurePoint(x, 100 * score.mean, None if score.half_width is None else 100 * score.half_width, score.collapsed_at_rate > 0)


def _draw_panels(picture: FigureSpec, columns: int) -> Any:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(line.name for panel in picture.panels for line in panel.lines if line.labelled and line.name))
    columns = min(columns, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    width = _PANEL if columns > NARROW else _PHONE
    longest = max(map(len, names), default=0)
    across = max(1, min(len(names), 4 if columns > NARROW else 2, int(columns * width // (_HANDLE + _LETTER * longest))))
    legend = 0.185 * -(-len(names) // across) + 0.14 if names else 0.0
    inner = width - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    size = columns * width, rows * _HEIGHT + legend
    figure = Figure(figsize=size)
    left, right, bottom, top = _LEFT / size[0], 1 - _RIGHT / size[0], _BOTTOM / size[1], 1 - (legend + _TOP) / size[1]
    figure.subplots_adjust(left, bottom, right, top, (_LEFT + _RIGHT) / inner[0], (_TOP + _BOTTOM) / inner[1])
    handles: dict[str, Any] = {}
    for at, panel in enumerate(picture.panels, 1):
        axis = figure.add_subplot(rows, columns, at)
        for line in panel.lines:
            handle = _draw_line(axis, line)
            if line.labelled and line.name:
                handles.setdefault(line.name, handle)
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        _set_x_ticks(axis, panel)
        axis.tick_params(labelsize=9, labelcolor=TEXT_COLOUR, color=MUTED_COLOUR)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=across)
    return figure


_STYLE = {
    "figure.dpi": 150, "figure.facecolor": BACKGROUND_COLOUR, "axes.facecolor": BACKGROUND_COLOUR, "axes.edgecolor": MUTED_COLOUR, "axes.xmargin": 0.06,
    "axes.ymargin": 0.1, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlecolor": TEXT_COLOUR, "axes.labelsize": 9.5, "axes.labelcolor": MUTED_COLOUR,
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID_COLOUR, "grid.linewidth": 0.6,
    "legend.fontsize": 9.5, "legend.frameon": False, "legend.labelcolor": TEXT_COLOUR, "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4, "legend.borderaxespad": 0.1, "legend.borderpad": 0.2, "legend.labelspacing": 0.35,
    "text.parse_math": False,  # names of data sets and models may have dollar signs
}  # fmt: skip
_HANDLE, _LETTER = 0.4, 0.075
"""Widths of what stands before a name in the legend and of a letter, in inches."""
_PANEL, _PHONE, _HEIGHT = 4.5, 3.75, 2.75
"""Width of a panel on a page and on a phone, and its height, in inches."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.66, 0.14, 0.32, 0.52
"""What a panel leaves for its labels, in inches. A layout that looks at every label takes as long as all the rest."""


def _draw_line(axis: Any, line: FigureLine) -> Any:
    """Draw a line with its bars; return what stands for it in the legend."""
    style: dict[str, Any] = {"color": line.colour, "marker": line.marker, "linestyle": "-" if line.joined else "none"}
    if line.light:
        style |= {"alpha": 0.45, "markersize": 4.2, "zorder": 2, "markerfacecolor": BACKGROUND_COLOUR, "linewidth": 0.7}
        if line.marker:
            style |= {"linestyle": (0, (2, 2)) if line.joined else "none", "linewidth": 1.2}
        bar = {"elinewidth": 0.7, "capsize": 1.5, "alpha": 0.45, "zorder": 1.5}
    else:
        style |= {"markersize": 5.2, "zorder": 3, "markerfacecolor": line.colour, "linewidth": 1.6}
        bar = {"elinewidth": 1.2, "capsize": 2.5, "zorder": 2.5}
    if known := [(point.x, point.mean, point.half_width) for point in line.points if point.half_width]:
        axis.errorbar(*zip(*known, strict=True), fmt="none", ecolor=line.colour, **bar)
    [handle] = axis.plot([point.x for point in line.points], [point.mean for point in line.points], **style)
    if hollow := [(point.x, point.mean) for point in line.points if point.collapsed]:
        inside = {"marker": line.marker, "markersize": 2.8, "linestyle": "none", "color": BACKGROUND_COLOUR, "zorder": 3.5}
        axis.plot(*zip(*hollow, strict=True), **inside)
    return handle


def _set_x_ticks(axis: Any, panel: FigurePanel) -> None:
    """Set the ticks of the axis below."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    if panel.log:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
    if panel.ticks is not None:
        axis.xaxis.set_major_locator(FixedLocator(list(panel.ticks)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticklabels(list(panel.ticks.values()))
        ends = (min(panel.ticks), max(panel.ticks))
        if not panel.log and ends[0] == ends[1]:
            axis.set_xlim(ends[0] - 1, ends[1] + 1)
    elif panel.unit == "steps":
        format_count_ticks(axis.xaxis)
    elif panel.unit == "operations":
        if panel.log:
            places = [point.x for line in panel.lines for point in line.points]
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(places) <= 60 * min(places) else (1,)))
        else:
            axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.2g}".replace("e+", "e") if count else "0"))


def figure_to_svg(figure: Any, name: str) -> str:
    """Return the figure as SVG with its text as text, the same bytes each time; `name` begins the ids in it."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def embed_svg(svg: str, name: str, alt: str) -> str:
    """Return SVG for a page: ids that begin with `name`, its colours for what is not data, a text for who cannot see it."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for place, own in ((' id="', f' id="{name}-'), ("url(#", f"url(#{name}-"), ('xlink:href="#', f'href="#{name}-')):
        svg = svg.replace(place, own)
    for colour, role in ((TEXT_COLOUR, "ink"), (MUTED_COLOUR, "muted"), (GRID_COLOUR, "grid"), (BACKGROUND_COLOUR, "card")):
        svg = svg.replace(colour, f"var(--{role})")
    start = f'<svg role="img" aria-label="{escape(alt)}" '
    return re.sub(r"<svg [^>]*?(?=viewBox)", lambda _: start, svg, count=1).strip()
