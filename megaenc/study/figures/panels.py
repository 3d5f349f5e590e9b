"""What a figure is made of: lines of scores in panels, one a family, drawn wide for a page and narrow for a phone."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

from megaenc.study.axes import plain_counts
from megaenc.study.evidence import Evidence
from megaenc.study.made import words
from megaenc.study.score import Score
from megaenc.study.setting import Setting
from megaenc.study.setups import AVERAGE, FAMILIES, dataset_label, datasets_of, is_average

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # of Okabe and Ito, as in megaenc.study.axes
OBJECTIVES = {"CLM": (BLUE, "o"), "MLM": (ORANGE, "s"), "CLM + MLM": (GREEN, "^")}
"""Colour and marker of each objective, the same in all figures."""
INK, FAINT, GRID, PAPER = "#1a1a1a", "#5f5f5f", "#dcdcdc", "#ffffff"
"""What is not data; the page puts its own colours in their places."""
WIDE, NARROW = 2, 1
"""Columns of panels on a page and on a phone."""


@dataclass(frozen=True)
class Point:
    """A mean in percent, half the width of its interval where it has one, at a place of the axis."""

    x: float
    mean: float
    half: float | None = None
    collapsed: bool = False
    """Whether worthless predictions are in the mean; such a point is hollow."""


@dataclass(frozen=True)
class Line:
    """Points of one name; `joined` where what lies between them has a meaning."""

    name: str
    colour: str
    marker: str
    points: tuple[Point, ...]
    joined: bool = True
    light: bool = False
    """Behind the others: published values, or single models behind their mean."""
    labelled: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Line, ...]
    x_label: str
    y_label: str = "score (%)"
    ticks: Mapping[float, str] | None = None
    """Places that are named, where the axis has no other numbers."""
    log: bool = False
    unit: Literal["", "steps", "operations"] = ""
    """What the numbers of the axis are written as: 10k, 2e19."""


@dataclass(frozen=True)
class Picture:
    """A figure, not drawn yet; without panels one that there is nothing to draw of."""

    key: str
    title: str
    caption: str
    """What is seen, in a sentence or two (it is the alternative text too), or why nothing is."""
    panels: tuple[Panel, ...] = ()

    def draw(self, columns: int = WIDE) -> Any:
        """Return matplotlib's Figure with the panels in so many columns."""
        from matplotlib import rc_context

        with rc_context(_STYLE):
            return _draw(self, columns)

    @cached_property
    def wide(self) -> Any:
        """The Figure for files and pages, drawn once."""
        return self.draw(WIDE)

    @cached_property
    def svg(self) -> str:
        """That as SVG."""
        return as_svg(self.wide, self.key)


@dataclass(frozen=True)
class Series:
    """Models that make a line, and where each stands on the axis."""

    name: str
    colour: str
    marker: str
    places: tuple[tuple[float, Setting], ...]
    joined: bool = True


def headline(evidence: Evidence) -> dict[str, str]:
    """For each family what a figure shows of it: the average, or the only data set."""
    return {
        family: next((name for name in names if is_average(name)), names[0])
        for family, names in datasets_of(evidence.datasets()).items()
    }


def picture_of(
    key: str,
    title: str,
    caption: str,
    evidence: Evidence,
    series: Sequence[Series],
    published: Evidence | None = None,
    dodge: float = 0.0,
    **axis: Any,
) -> Picture:
    """Return a figure with a panel for each family with a point in it. `published` values of the same models lie lightly behind.

    `dodge` moves series apart by so much of the axis, where their points would cover each other.
    """
    panels = []
    for family, dataset in headline(evidence).items():
        lines = []
        for at, one in enumerate(series):
            shift = dodge * (at - (len(series) - 1) / 2)
            own: list[Line] = []
            for seed in sorted({setting.seed for _, setting in one.places}):  # of the pretraining: the first one's are joined
                places = [(x, setting) for x, setting in one.places if setting.seed == seed]
                if points := _points(evidence, family, dataset, places, shift):
                    own.append(Line(one.name, one.colour, one.marker, points, one.joined and not own, bool(own), not own))
            lines += own
            if published is not None and (theirs := _points(published, family, dataset, one.places, shift)):
                lines.append(Line(behind(one.name), one.colour, one.marker, theirs, one.joined, True))
        if lines:
            panels.append(Panel(panel_title(family, dataset), tuple(lines), **axis))
    return Picture(key, title, f"{caption} {bars(evidence, published, panels)}", tuple(panels))


def laid_over(panels: Sequence[Panel]) -> bool:
    """Whether published values lie behind some line."""
    return any(line.light and line.name.endswith(_PUBLISHED) for panel in panels for line in panel.lines)


def bars(evidence: Evidence, published: Evidence | None, panels: Sequence[Panel]) -> str:
    """For a caption: what the bars of these panels are, and what hollow points."""
    hollow = any(point.collapsed for panel in panels for line in panel.lines for point in line.points)
    said = " Hollow points in strong colours: runs behind them have collapsed to worthless predictions." if hollow else ""
    return f"Bars: {words(evidence, published if laid_over(panels) else None)}.{said}"


_PUBLISHED = ", published"


def behind(name: str) -> str:
    """The name of a line of published values."""
    return name + _PUBLISHED


def panel_title(family: str, dataset: str) -> str:
    """`Retrieval`, and which data set where it is not the average."""
    name = FAMILIES.get(family, family)
    return name if dataset == AVERAGE else f"{name}: {dataset_label(family, dataset)}"


def _points(
    evidence: Evidence, family: str, dataset: str, places: Iterable[tuple[float, Setting]], shift: float
) -> tuple[Point, ...]:
    found = [(x, evidence.find(setting, dataset, family)) for x, setting in sorted(places, key=lambda place: place[0])]
    return tuple(point_of(x + shift, one) for x, one in found if one is not None)


def point_of(x: float, score: Score) -> Point:
    """A score at a place of the axis."""
    return Point(x, 100 * score.mean, None if score.half is None else 100 * score.half, score.at_rate_collapsed > 0)


def _draw(picture: Picture, columns: int) -> Any:
    from matplotlib.figure import Figure

    columns = min(columns, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    names = list(dict.fromkeys(line.name for panel in picture.panels for line in panel.lines if line.labelled and line.name))
    width = columns * (_PANEL[0] if columns > NARROW else _PHONE)
    longest = max(map(len, names), default=0)
    across = max(1, min(len(names), 4 if columns > NARROW else 2, int(width // (_HANDLE + _LETTER * longest))))
    legend = 0.185 * -(-len(names) // across) + 0.14 if names else 0.0
    size = width, rows * _PANEL[1] + legend
    figure = Figure(figsize=size)
    of_panel = width / columns
    axes = []
    for at in range(len(picture.panels)):
        row, column = divmod(at, columns)
        left, bottom = column * of_panel + _LEFT, size[1] - legend - (row + 1) * _PANEL[1] + _BOTTOM
        across_by_down = ((of_panel - _LEFT - _RIGHT) / width, (_PANEL[1] - _TOP - _BOTTOM) / size[1])
        axes.append(figure.add_axes((left / width, bottom / size[1], *across_by_down)))
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, picture.panels, strict=True):
        for line in panel.lines:
            handle = _line(axis, line)
            if line.labelled and line.name:
                handles.setdefault(line.name, handle)
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        _ticks(axis, panel)
        axis.tick_params(labelsize=9, labelcolor=INK, color=FAINT)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=across)
    return figure


_STYLE = {
    "figure.dpi": 150, "figure.facecolor": PAPER, "axes.facecolor": PAPER, "axes.edgecolor": FAINT, "axes.xmargin": 0.06,
    "axes.ymargin": 0.1, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlecolor": INK, "axes.labelsize": 9.5, "axes.labelcolor": FAINT,
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.6,
    "legend.fontsize": 9.5, "legend.frameon": False, "legend.labelcolor": INK, "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4, "legend.borderaxespad": 0.1, "legend.borderpad": 0.2, "legend.labelspacing": 0.35,
    "text.parse_math": False,  # names of data sets and models may have dollar signs
}  # fmt: skip
_HANDLE, _LETTER = 0.4, 0.075
"""Widths of what stands before a name in the legend and of a letter, in inches."""
_PANEL, _PHONE = (4.5, 2.75), 3.75
"""Width and height of a panel in inches, and its width on a phone."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.66, 0.14, 0.32, 0.52
"""What a panel leaves for its labels, in inches. A layout that looks at every label takes as long as all the rest."""


def _line(axis: Any, line: Line) -> Any:
    """What stands for the line in the legend."""
    x, mean = [point.x for point in line.points], [point.mean for point in line.points]
    style = {
        "color": line.colour,
        "marker": line.marker,
        "markersize": 4.2 if line.light else 5.2,
        "zorder": 2 if line.light else 3,
    }
    if line.light:
        dashes = (0, (2, 2)) if line.marker else "-"
        style |= {"alpha": 0.45, "linestyle": dashes if line.joined else "none", "markerfacecolor": PAPER}
        style["linewidth"] = 1.2 if line.marker else 0.7
    else:
        style |= {"linestyle": "-" if line.joined else "none", "linewidth": 1.6, "markerfacecolor": line.colour}
    if known := [point for point in line.points if point.half]:
        ends = [[point.x for point in known], [point.mean for point in known], [point.half for point in known]]
        thin = {"elinewidth": 0.7, "capsize": 1.5, "alpha": 0.45, "zorder": 1.5}
        strong = {"elinewidth": 1.2, "capsize": 2.5, "zorder": 2.5}
        axis.errorbar(*ends, fmt="none", ecolor=line.colour, **(thin if line.light else strong))
    [handle] = axis.plot(x, mean, **style)
    if hollow := [point for point in line.points if point.collapsed]:
        inside = {"marker": line.marker, "markersize": 2.8, "linestyle": "none", "color": PAPER, "zorder": 3.5}
        axis.plot([point.x for point in hollow], [point.mean for point in hollow], **inside)
    return handle


def _ticks(axis: Any, panel: Panel) -> None:
    """The ticks of the axis below."""
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
        plain_counts(axis.xaxis)
    elif panel.unit == "operations":
        if panel.log:
            places = [point.x for line in panel.lines for point in line.points]
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(places) <= 60 * min(places) else (1,)))
        else:
            axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.2g}".replace("e+", "e") if count else "0"))


def as_svg(figure: Any, name: str) -> str:
    """The figure as SVG with its text as text, the same bytes each time; `name` begins the ids in it."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def inline(svg: str, name: str, alt: str) -> str:
    """SVG for a page: ids that begin with `name`, the page's colours for what is not data, a text for who cannot see it."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    for colour, role in ((INK, "ink"), (FAINT, "muted"), (GRID, "grid"), (PAPER, "card")):
        svg = svg.replace(colour, f"var(--{role})")
    start = f'<svg role="img" aria-label="{escape(alt)}" '
    svg = re.sub(r"<svg [^>]*?(?=viewBox)", lambda _: start, svg, count=1)
    return svg.strip()
