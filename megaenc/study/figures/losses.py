"""Held-out losses of the pretraining runs, a panel for each objective that some were validated under."""

from collections.abc import Mapping

from megaenc.study.axes import styles
from megaenc.study.compare import curves_of
from megaenc.study.figures.panels import BLUE, FAINT, GREEN, ORANGE, PURPLE, Drawn, Line, Missing, Panel, Picture, Point
from megaenc.study.run_tree import TrainedRun

KEY, TITLE = "losses", "Held-out loss of the runs"

_FEW = 6  # runs that a legend can name
_DOTS = 60  # points of a line that the eye can use
_KINDS = {
    "MLM": ("MLM", ORANGE),
    "CLM": ("CLM", BLUE),
    "CLM + MLM": ("CLM, then MLM", GREEN),
    "continued": ("on a finished model", PURPLE),
    "other": ("other schedules", FAINT),
}


def picture(runs: Mapping[str, TrainedRun]) -> Drawn:
    """Every run over its steps; a branch begins where it left its parent."""
    curves = {name: found for name, run in runs.items() if (found := curves_of(run.validated))}
    if not curves:
        why = "No run has a validation." if runs else "No runs were given: --runs names their folder."
        return Missing(KEY, TITLE, why)
    few = len(curves) <= _FEW
    style = styles(list(curves))
    panels = []
    for objective in dict.fromkeys(objective for each in curves.values() for objective in each):
        lines = []
        for kind, (label, colour) in _KINDS.items():
            for name, each in curves.items():
                if runs[name].kind != kind or objective not in each:
                    continue
                x, losses = each[objective]
                thinned = range(0, len(x), -(-len(x) // _DOTS))
                points = tuple(Point(x[at], losses[at]) for at in sorted({*thinned, len(x) - 1}))
                marker = "" if len(points) > 12 else style[name][1] if few else "."
                lines.append(Line(name if few else label, style[name][0] if few else colour, marker, points))
        panels.append(Panel(f"under {objective}", tuple(lines), "step", "loss (nats a predicted token)", unit="steps"))
    caption = (
        "Loss on text that no run was trained on, under each objective, whatever the run was trained with at the time. A branch "
        "begins at the step where it left its parent; what went on from a finished model counts its own steps."
    )
    return Picture(KEY, TITLE, caption, tuple(panels))
