"""What the pictures have in common: colours, what a loss is drawn against, and plain axes."""

import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

Against = Literal["step", "tokens", "predicted_tokens", "flops"]
"""A field of every row of metrics.jsonl and validation.jsonl: how far the run had come."""

AXIS_LABELS: dict[Against, str] = {
    "step": "step",
    "tokens": "tokens",
    "predicted_tokens": "predicted tokens",
    "flops": "FLOPs of the matrix products, forward and backward",
}
GREY = "#555555"
HELD_OUT = {"markerfacecolor": "white", "clip_on": False}
LEGEND = {"fontsize": 9, "edgecolor": "none", "framealpha": 0.8}

# Okabe and Ito's colours for every kind of colour vision; a name keeps its own throughout a picture.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: the two part after the sixth name


def assign_styles(names: list[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each name, in the order in which they come up."""
    return dict(zip(dict.fromkeys(names), zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False), strict=False))


def without_math_text(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that draws: names with dollar signs are written as they are, and not as formulas."""

    @wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):
            return draw(*args, **kwargs)

    return drawn


def format_count_ticks(axis: Any) -> None:
    """Write the ticks of an axis of counts as 1.5M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def format_count(count: float) -> str:
    """Return 1500000 as 1.5M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="").format_eng(count)


def style_axes(*panels: Any) -> None:
    """Leave of each panel's frame the left and lower side, with thin lines across at the ticks of the left."""
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
