"""Runs laid over each other: the held-out loss of each, under every objective that all of them were validated under."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.study.axes import AXIS_LABELS, HELD_OUT, LEGEND, Against, clean, plain_counts, styles, verbatim
from megaenc.study.metrics import Row

Curves = dict[str, tuple[list[float], list[float]]]
"""By objective: how far the run had come at each validation, and the loss there."""


def curves_of(validated: list[Row], against: Against = "step") -> Curves:
    """The held-out losses of one run; a validation without a target has no point."""
    found: Curves = {}
    for row in validated:
        for objective, result in row["objectives"].items():
            if result["loss"] is not None:
                x, losses = found.setdefault(objective, ([], []))
                x.append(row[against])
                losses.append(result["loss"])
    return found


def named(runs: Sequence[str | Path]) -> dict[str, Path]:
    """The runs by the names of their folders, with as much of the path before as tells them apart.

    Raises InputError for a folder that is given twice.
    """
    paths = [Path(run).resolve() for run in runs]
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise InputError(f"{runs[at]}: given twice, expected different runs")
    count, names = 0, []
    while len(set(names)) < len(paths):
        count += 1
        names = [os.fsencode("/".join(path.parts[-count:])).decode("utf-8", "backslashreplace") for path in paths]
    return dict(zip(names, map(Path, runs), strict=True))


@verbatim
def comparison(curves: dict[str, Curves], against: Against) -> tuple[Any, str]:
    """matplotlib's Figure of several runs, a panel an objective, and one line that says what it shows and leaves out.

    `curves`: those of each run by its name. Raises InputError where no objective is common to all.
    """
    from matplotlib.figure import Figure

    objectives = list(dict.fromkeys(objective for each in curves.values() for objective in each))
    shared = [objective for objective in objectives if all(objective in each for each in curves.values())]
    if not shared:
        held = "; ".join(f"{name} has {', '.join(each) or 'none'}" for name, each in curves.items())
        raise InputError(f"no objective that all runs were validated under: {held}; expected one in common")
    style, columns = styles(list(curves)), min(3, len(shared))
    rows = -(-len(shared) // columns)
    picture = Figure(figsize=(max(6.4, 4.9 * columns), 4.3 * rows), dpi=150, layout="constrained")
    panels = list(picture.subplots(rows, columns, squeeze=False).flat)
    for panel, objective in zip(panels, shared, strict=False):
        for at, (name, each) in enumerate(curves.items()):
            colour, marker = style[name]
            x, losses = each[objective]
            panel.plot(
                x, losses, **HELD_OUT, color=colour, marker=marker, markersize=4, markevery=max(1, len(x) // 12), linewidth=1.6,
                zorder=3 + at, label=f"{name}  ({losses[-1]:.3f})",
            )  # fmt: skip
        panel.set_title(objective, loc="left", fontsize=11, fontweight="bold")
        panel.set_xlabel(AXIS_LABELS[against])
        panel.set_ylabel("held-out loss (nats a predicted token)")
        panel.set_xlim(0, max(each[objective][0][-1] for each in curves.values()) or 1)
        panel.margins(y=0.08)
        panel.legend(**LEGEND, title="run (last loss)", title_fontsize=9, alignment="left", loc="best")
        if against != "step":
            plain_counts(panel.xaxis)
        clean(panel)
    for panel in panels[len(shared) :]:  # what the last row has too many
        panel.set_visible(False)
    shown = f"the held-out losses of {len(curves)} runs under {', '.join(shared)}"
    lacking = {name: [run for run in curves if name not in curves[run]] for name in objectives if name not in shared}
    left_out = [f"{name} ({', '.join(runs)})" for name, runs in lacking.items()]
    return picture, shown + (f"; left out, as a run lacks it: {', '.join(left_out)}" if left_out else "")
