"""Building blocks of the report's figures, and their drawing as SVG.

They are points, lines, and panels, one per task family.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.methods import describe_intervals
from megaenc.study.results.evidence import Evidence, headline_datasets
from megaenc.study.results.groups import (
    AVERAGE,
    FAMILY_LABELS,
    dataset_label,
)
from megaenc.viz.style import BLUE, GREEN, ORANGE, format_count_ticks

OBJECTIVE_STYLES = {"CLM": (BLUE, "o"), "MLM": (ORANGE, "s"), "CLM + MLM": (GREEN, "^")}
"""Colour and marker of each objective in all figures."""
# the page replaces these colours by those of its colour scheme
TEXT_COLOUR = "#1a1a1a"
MUTED_COLOUR = "#5f5f5f"
GRID_COLOUR = "#dcdcdc"
BACKGROUND_COLOUR = "#ffffff"


@dataclass(frozen=True)
class FigurePoint:
    """Mean at one x of a figure, with the half width of its 95 % interval.

    `half_width` is None if it is unknown. `x` is in the unit of the x axis, `mean` and `half_width`
    in that of the y axis, such as percent. `collapsed` tells whether the mean includes collapsed
    runs; such a point is hollow.
    """

    x: float
    mean: float
    half_width: float | None = None
    collapsed: bool = False
    """whether the mean includes collapsed runs; such a point is hollow"""


@dataclass(frozen=True)
class FigureLine:
    """Points under one legend entry with colour and marker.

    `colour` is a hex colour, `marker` one of matplotlib or "" for none. `joined` connects the
    points by a line; `light` draws them lightly behind the others; `labelled` gives the line the
    legend entry `name`.
    """

    name: str
    colour: str
    marker: str
    points: tuple[FigurePoint, ...]
    joined: bool = True
    light: bool = False
    """whether it is drawn lightly behind the others: published values, or single models behind
    their mean"""
    labelled: bool = True


@dataclass(frozen=True)
class FigurePanel:
    """Pair of axes of a figure, with its `lines`.

    `title`, `x_label` and `y_label` are plain text with the unit, such as "score (%)". `ticks` are
    labels by position on the x axis, None for numbers, which are in the format of `unit` ("",
    "steps" or "operations"); `log` makes the axis logarithmic.
    """

    title: str
    lines: tuple[FigureLine, ...]
    x_label: str
    y_label: str = "score (%)"
    ticks: Mapping[float, str] | None = None
    """tick labels by position on the x axis; None for numeric ticks"""
    log: bool = False
    """whether the x axis is logarithmic"""
    unit: Literal["", "steps", "operations"] = ""
    """number format of the x axis: `steps` as 10k, `operations` as 2e19"""


@dataclass(frozen=True)
class FigureSpec:
    """Content of a figure, which is drawn on the first access to `figure` or `svg`.

    `key` is the name of its files and its id on the page, `title` its heading. `panels` is empty if
    there is nothing to draw; `caption` then gives the reason, and `figure` and `svg` must not be
    accessed.
    """

    key: str
    title: str
    caption: str
    """description, which is also the alternative text, or the reason why there are no panels"""
    panels: tuple[FigurePanel, ...] = ()

    @cached_property
    def figure(self) -> Any:
        """Return the matplotlib Figure with all panels, drawn on the first access.

        There must be a panel, which is not checked.
        """
        from matplotlib import rc_context

        with rc_context(_STYLE):
            return _draw_panels(self)

    @cached_property
    def svg(self) -> str:
        """Return the figure as SVG text by `figure_to_svg`, drawn on the first access.

        There must be a panel, which is not checked.
        """
        return figure_to_svg(self.figure, self.key)


FigureSeries = Sequence[tuple[str, tuple[str, str], Sequence[tuple[float, ModelKey]]]]
"""Name, (colour, marker) and (x position, model) pairs of each line."""


def build_family_figure(
    key: str,
    title: str,
    caption: str,
    *,
    evidence: Evidence,
    series: FigureSeries,
    published: Evidence | None = None,
    dodge: float = 0.0,
    joined: bool = True,
    **axis: Any,
) -> FigureSpec:
    """Build a figure with a panel per task family and a line per series.

    A panel shows the family's average (else its first data set) in percent; families without scores
    have none. Pretraining seeds of a series after its first are light points, not in the legend.

    Args:
        caption: Description, to which a sentence on the bars is added, also without any panel.
        series: (name, (colour, marker), (x position, model) pairs) of each line.
        published: Published scores, which are drawn lightly; None for none.
        dodge: Shift between neighbouring series, in units of the x axis, to keep points apart.
        joined: Whether lines connect the points of a series.
        axis: Further fields of FigurePanel, of which `x_label` is required.
    """
    panels = []
    for family, dataset in headline_datasets(evidence).items():
        lines = []
        for index, (name, style, models) in enumerate(series):
            shift = dodge * (index - (len(series) - 1) / 2)
            places = [
                (x + shift, dataset, model_key)
                for x, model_key in sorted(models, key=lambda place: place[0])
            ]
            seed_lines: list[FigureLine] = []
            # only the first pretraining seed gets a line and a legend entry
            for seed in sorted({model_key.seed for _, model_key in models}):
                if points := build_points(
                    evidence, family, [place for place in places if place[-1].seed == seed]
                ):
                    seed_lines.append(
                        FigureLine(
                            name,
                            *style,
                            points,
                            joined and not seed_lines,
                            bool(seed_lines),
                            not seed_lines,
                        )
                    )
            lines += seed_lines
            if published is not None and (points := build_points(published, family, places)):
                lines.append(FigureLine(published_label(name), *style, points, joined, light=True))
        if lines:
            panels.append(FigurePanel(panel_title(family, dataset), tuple(lines), **axis))
    return FigureSpec(
        key, title, f"{caption} {describe_bars(evidence, published, panels)}", tuple(panels)
    )


def has_published_lines(panels: Sequence[FigurePanel]) -> bool:
    """Return whether any panel has a light line of published values."""
    return any(
        line.light and line.name.endswith(_PUBLISHED) for panel in panels for line in panel.lines
    )


def describe_bars(
    evidence: Evidence, published: Evidence | None, panels: Sequence[FigurePanel]
) -> str:
    """Return caption sentences: on the interval bars, and on hollow points if any.

    Args:
        published: Published scores, whose bars are described only if `panels` have lines of them;
            None for none.
        panels: Panels of the figure.
    """
    if not has_published_lines(panels):
        published = None
    text = f"Bars: {describe_intervals(evidence, published)}."
    if any(point.collapsed for panel in panels for line in panel.lines for point in line.points):
        text += (
            " Hollow points in strong colours include runs that collapsed to worthless predictions."
        )
    return text


_PUBLISHED = ", published"


def published_label(name: str) -> str:
    """Return the legend label of published values: `name` followed by ", published"."""
    return name + _PUBLISHED


def panel_title(family: str, dataset: str) -> str:
    """Return a panel's title, such as "Sequence classification: SST-2".

    The data set's label is left out if `dataset` is AVERAGE.

    Args:
        family: Code of the task family, such as SC; an unknown one is shown as it is.
        dataset: Name of the data set, such as sst2.
    """
    name = FAMILY_LABELS.get(family, family)
    return name if dataset == AVERAGE else f"{name}: {dataset_label(family, dataset)}"


def build_points(
    evidence: Evidence, family: str, places: Iterable[tuple[float, str, ModelKey]]
) -> tuple[FigurePoint, ...]:
    """Build the points, in percent, of the models that have a score on their data set.

    Others are left out. A point is hollow if a run collapsed at the learning rate of its score.

    Args:
        family: Code of the task family, such as SC.
        places: X position, data set and model of each point, in order.
    """
    points = []
    for x, dataset, key in places:
        score = evidence.find(key, dataset, family)
        if score is not None:
            half_width = None if score.half_width is None else 100 * score.half_width
            points.append(FigurePoint(x, 100 * score.mean, half_width, score.collapsed_at_rate > 0))
    return tuple(points)


def _draw_panels(spec: FigureSpec) -> Any:
    """Draw all panels in up to two columns under a common legend.

    Returns:
        The matplotlib Figure.
    """
    from matplotlib.figure import Figure

    names = list(
        dict.fromkeys(
            line.name
            for panel in spec.panels
            for line in panel.lines
            if line.labelled and line.name
        )
    )
    columns = min(2, len(spec.panels))
    rows = -(-len(spec.panels) // columns)
    longest = max(map(len, names), default=0)
    across = max(
        1, min(len(names), 2 * columns, int(columns * _WIDTH // (_HANDLE + _LETTER * longest)))
    )
    legend = 0.185 * -(-len(names) // across) + 0.14 if names else 0.0
    width = columns * _WIDTH
    height = rows * _HEIGHT + legend
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        _LEFT / width, _BOTTOM / height, 1 - _RIGHT / width, 1 - (legend + _TOP) / height,
        (_LEFT + _RIGHT) / (_WIDTH - _LEFT - _RIGHT), (_TOP + _BOTTOM) / (_HEIGHT - _TOP - _BOTTOM),
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for position, panel in enumerate(spec.panels, 1):
        axis = figure.add_subplot(rows, columns, position)
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
    "figure.dpi": 150, "figure.facecolor": BACKGROUND_COLOUR,
    "axes.facecolor": BACKGROUND_COLOUR, "axes.edgecolor": MUTED_COLOUR,
    "axes.xmargin": 0.06, "axes.ymargin": 0.1, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlecolor": TEXT_COLOUR, "axes.labelsize": 9.5, "axes.labelcolor": MUTED_COLOUR,
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": GRID_COLOUR, "grid.linewidth": 0.6,
    "legend.fontsize": 9.5, "legend.frameon": False, "legend.labelcolor": TEXT_COLOUR,
    "legend.handlelength": 1.8, "legend.columnspacing": 1.4, "legend.borderaxespad": 0.1,
    "legend.borderpad": 0.2, "legend.labelspacing": 0.35,
    "text.parse_math": False,  # names may contain dollar signs
}  # fmt: skip
# widths of a legend handle and of a letter, in inches
_HANDLE = 0.4
_LETTER = 0.075
# size of a panel, in inches
_WIDTH = 4.5
_HEIGHT = 2.75
# margins of a panel for its labels, in inches; matplotlib's layout engines would double the
# drawing time
_LEFT = 0.66
_RIGHT = 0.14
_TOP = 0.32
_BOTTOM = 0.52


def _draw_line(axis: Any, line: FigureLine) -> Any:
    """Draw a line with its interval bars on a matplotlib axis.

    Returns:
        The legend handle.
    """
    style: dict[str, Any] = {
        "color": line.colour,
        "marker": line.marker,
        "linestyle": "-" if line.joined else "none",
    }
    if line.light:
        style |= {
            "alpha": 0.45,
            "markersize": 4.2,
            "zorder": 2,
            "markerfacecolor": BACKGROUND_COLOUR,
            "linewidth": 0.7,
        }
        if line.marker:
            style |= {"linestyle": (0, (2, 2)) if line.joined else "none", "linewidth": 1.2}
        bar = {"elinewidth": 0.7, "capsize": 1.5, "alpha": 0.45, "zorder": 1.5}
    else:
        style |= {"markersize": 5.2, "zorder": 3, "markerfacecolor": line.colour, "linewidth": 1.6}
        bar = {"elinewidth": 1.2, "capsize": 2.5, "zorder": 2.5}
    if known := [
        (point.x, point.mean, point.half_width) for point in line.points if point.half_width
    ]:
        axis.errorbar(*zip(*known, strict=True), fmt="none", ecolor=line.colour, **bar)
    [handle] = axis.plot(
        [point.x for point in line.points], [point.mean for point in line.points], **style
    )
    if hollow := [(point.x, point.mean) for point in line.points if point.collapsed]:
        inside = {
            "marker": line.marker,
            "markersize": 2.8,
            "linestyle": "none",
            "color": BACKGROUND_COLOUR,
            "zorder": 3.5,
        }
        axis.plot(*zip(*hollow, strict=True), **inside)
    return handle


def _set_x_ticks(axis: Any, panel: FigurePanel) -> None:
    """Set scale, positions and labels of the ticks on the x axis."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
    )

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
            axis.xaxis.set_major_locator(
                LogLocator(subs=(1, 2, 5) if max(places) <= 60 * min(places) else (1,))
            )
        else:
            axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda count, _: f"{count:.2g}".replace("e+", "e") if count else "0")
        )


def figure_to_svg(figure: Any, name: str) -> str:
    """Return a matplotlib Figure as SVG text with real text.

    The text starts at the svg element, without XML declaration. The same figure and name always
    give the same text. matplotlib's settings stay unchanged, and the figure is not closed.

    Args:
        figure: Figure of matplotlib.
        name: Salt of the ids.
    """
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def embed_svg(svg: str, name: str, alt: str) -> str:
    """Return SVG text to insert into the HTML page, from that of `figure_to_svg`.

    The colours of text, muted text, grid and background become the page's CSS variables `--ink`,
    `--muted`, `--grid` and `--card`, other colours stay; metadata and the fixed size are removed.

    Args:
        name: Prefix of the ids, different for each figure of the page.
        alt: Alternative text, which is escaped here.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for place, replacement in (
        (' id="', f' id="{name}-'),
        ("url(#", f"url(#{name}-"),
        ('xlink:href="#', f'href="#{name}-'),
    ):
        svg = svg.replace(place, replacement)
    for colour, role in (
        (TEXT_COLOUR, "ink"),
        (MUTED_COLOUR, "muted"),
        (GRID_COLOUR, "grid"),
        (BACKGROUND_COLOUR, "card"),
    ):
        svg = svg.replace(colour, f"var(--{role})")
    start = f'<svg role="img" aria-label="{escape(alt)}" '
    return re.sub(r"<svg [^>]*?(?=viewBox)", lambda _: start, svg, count=1).strip()
