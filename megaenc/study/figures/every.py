"""All figures of a report, in the order in which they are shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaenc.study.axes import styles
from megaenc.study.compare import curves_of
from megaenc.study.evidence import Evidence
from megaenc.study.figures import objectives, rates
from megaenc.study.figures.panels import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    Drawn,
    Line,
    Missing,
    Panel,
    Picture,
    Point,
    laid_over,
)
from megaenc.study.run_tree import TrainedRun, flops_of_the_study
from megaenc.study.setting import Setting


@dataclass(frozen=True)
class Shown:
    """A figure, and the published numbers drawn the same way where they cannot lie in it."""

    drawn: Drawn
    published: Picture | None = None


def figures_of(
    evidence: Evidence, runs: Mapping[str, TrainedRun], flops: Mapping[Setting, float], published: Evidence | None = None
) -> list[Shown]:
    """Return every figure; `flops` by setting, `published` what to lay behind or next to the scores."""
    flops_there = flops_by_shape(published) if published else {}

    def by_flops(of: Evidence, behind: Evidence | None = None) -> Drawn:
        return objectives.by_flops(of, flops if of is evidence else flops_there, behind)

    def both(*makes: Callable[..., Drawn]) -> list[Shown]:
        found = []
        for make in makes:
            ours, theirs = make(evidence, published), make(published) if published else None
            found.append(Shown(ours, theirs if isinstance(theirs, Picture) and not laid_over(ours.panels) else None))
        return found

    others = objectives.schedules(evidence)
    return [
        *both(objectives.clm_and_mlm, objectives.mask_ratios, objectives.mask_ratios_with_clm, objectives.by_step, by_flops),
        Shown(rates.picture(evidence)),
        *both(objectives.clm_shares, objectives.continued),
        *([Shown(others)] if others else []),
        Shown(losses(runs)),
    ]


def flops_by_shape(evidence: Evidence) -> dict[Setting, float]:
    """Return the operations of the study's own models, from their shapes."""
    counted = {setting: flops_of_the_study(setting) for setting in evidence.settings()}
    return {setting: count for setting, count in counted.items() if count}


_FEW = 6  # runs that a legend can name
_DOTS = 60  # points of a line that the eye can use
_KINDS = {
    "MLM": ("MLM", ORANGE),
    "CLM": ("CLM", BLUE),
    "CLM + MLM": ("CLM, then MLM", GREEN),
    "continued": ("on a finished model", PURPLE),
    "other": ("other schedules", FAINT),
}


def losses(runs: Mapping[str, TrainedRun]) -> Drawn:
    """Draw held-out losses over the steps of every run; a branch begins where it left its parent."""
    key, title = "losses", "Held-out loss of the runs"
    curves = {name: found for name, run in runs.items() if (found := curves_of(run.validated))}
    if not curves:
        why = "No run has a validation." if runs else "No runs were given: --runs names their folder."
        return Missing(key, title, why)
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
    return Picture(key, title, caption, tuple(panels))
