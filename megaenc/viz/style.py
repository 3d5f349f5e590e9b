"""Common style of the plots: colours, markers, axis labels and tick formats."""

import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

Against = Literal["step", "tokens", "predicted_tokens", "flops"]
"""Quantity on the x axis, a progress field of every row of metrics.jsonl and validation.jsonl."""

AXIS_LABELS: dict[Against, str] = {
    "step": "step",
    "tokens": "tokens",
    "predicted_tokens": "predicted tokens",
    "flops": "FLOPs of the matrix products, forward and backward",
}
GREY = "#555555"
GRID = {"color": "#dddddd", "linewidth": 0.6}
HELD_OUT = {"markerfacecolor": "white", "clip_on": False}
LEGEND = {"fontsize": 9, "edgecolor": "none", "framealpha": 0.8}

# Okabe-Ito palette, which is safe for colour-blind readers
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
YELLOW = "#E69F00"
SKY_BLUE = "#56B4E9"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY_BLUE)
# one more than colours, so that pairs repeat only after 42 names
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = [(_COLOURS[index % 6], _MARKERS[index % 7]) for index in range(42)]
"""All pairs of a colour and a marker, in the order in which lines get them."""


def assign_styles(names: list[str]) -> dict[str, tuple[str, str]]:
    """Return (colour, marker) by name, assigned in order of first appearance.

    Colours are hex texts, markers those of matplotlib. Pairs repeat after 42 names.
    """
    return dict(zip(dict.fromkeys(names), itertools.cycle(STYLES), strict=False))


def without_math_text(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return `draw` wrapped so that matplotlib parses no formulas in text.

    Dollar signs in texts that are created during a call are shown as they are, also when the figure
    is saved later.
    """

    @wraps(draw)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):
            return draw(*args, **kwargs)

    return wrapper


def format_count_ticks(axis: Any) -> None:
    """Label the ticks of a matplotlib axis as numbers with an SI prefix, such as 1.5M.

    `axis` is the `xaxis` or `yaxis` of axes.
    """
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def format_tick(count: float) -> str:
    """Return a count as text with an SI prefix: 5 as 5, 1500 as 1.5k, 2.5e9 as 2.5G."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="").format_eng(count)


def style_axes(*panels: Any) -> None:
    """Remove the top and right spines of axes, and add thin horizontal grid lines.

    The lines are behind the data. `panels` are matplotlib Axes.
    """
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", **GRID)
        panel.set_axisbelow(True)
