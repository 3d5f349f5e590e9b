"""All figures of a report, in the order in which they are shown, with those of learning rates and of losses."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaenc.finetune.grid.jobs import rate_name
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures import objectives
from megaenc.study.report.figures.base import (
    BLUE,
    FAINT,
    GREEN,
    OBJECTIVES,
    ORANGE,
    PURPLE,
    FigureSpec,
    Line,
    Panel,
    Point,
    headline,
    laid_over,
    panel_title,
)
from megaenc.study.report.score_tables import sensitivity
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import objective
from megaenc.study.results.pretrain_runs import TrainedRun, flops_of_the_study
from megaenc.viz.run_metrics import curves_of
from megaenc.viz.style import styles


@dataclass(frozen=True)
class RenderedFigure:
    """A figure, and the published numbers drawn the same way where they cannot lie in it."""

    drawn: FigureSpec
    published: FigureSpec | None = None


def figures_of(
    evidence: Evidence, runs: Mapping[str, TrainedRun], flops: Mapping[ModelKey, float], published: Evidence | None = None
) -> list[RenderedFigure]:
    """Return every figure; `flops` by setting, `published` what to lay behind or next to the scores."""
    flops_there = flops_by_shape(published) if published else {}

    def by_flops(of: Evidence, behind: Evidence | None = None) -> FigureSpec:
        return objectives.by_flops(of, flops if of is evidence else flops_there, behind)

    def both(*makes: Callable[..., FigureSpec]) -> list[RenderedFigure]:
        found = []
        for make in makes:
            ours, theirs = make(evidence, published), make(published) if published else None
            found.append(RenderedFigure(ours, theirs if theirs and theirs.panels and not laid_over(ours.panels) else None))
        return found

    others = objectives.schedules(evidence)
    return [
        *both(objectives.clm_and_mlm, objectives.mask_ratios, objectives.mask_ratios_with_clm, objectives.by_step, by_flops),
        RenderedFigure(rates(evidence)),
        *both(objectives.clm_shares, objectives.continued),
        *([RenderedFigure(others)] if others else []),
        RenderedFigure(losses(runs)),
    ]


def flops_by_shape(evidence: Evidence) -> dict[ModelKey, float]:
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


def losses(runs: Mapping[str, TrainedRun]) -> FigureSpec:
    """Draw held-out losses over the steps of every run; a branch begins where it left its parent."""
    key, title = "losses", "Held-out loss of the runs"
    curves = {name: found for name, run in runs.items() if (found := curves_of(run.validated))}
    if not curves:
        why = "No run has a validation." if runs else "No runs were given: --runs names their folder."
        return FigureSpec(key, title, why)
    looks = styles(list(curves)) if len(curves) <= _FEW else {}
    panels = []
    for under in dict.fromkeys(of for each in curves.values() for of in each):
        lines = []
        for kind, (label, colour) in _KINDS.items():
            for name in [name for name, each in curves.items() if runs[name].kind == kind and under in each]:
                x, values = curves[name][under]
                thinned = range(0, len(x), -(-len(x) // _DOTS))
                points = tuple(Point(x[at], values[at]) for at in sorted({*thinned, len(x) - 1}))
                of_run, marker = looks.get(name, (colour, "."))
                lines.append(Line(name if looks else label, of_run, "" if len(points) > 12 else marker, points))
        panels.append(Panel(f"under {under}", tuple(lines), "step", "loss (nats a predicted token)", unit="steps"))
    caption = (
        "Loss on text that no run was trained on, under each objective, whatever the run was trained with at the time. A branch "
        "begins at the step where it left its parent; what went on from a finished model counts its own steps."
    )
    return FigureSpec(key, title, caption, tuple(panels))


def rates(evidence: Evidence) -> FigureSpec:
    """Draw points lost against each model's own best rate: a light line a model, a strong one for the mean of an objective."""
    key, title = "learning-rates", "Sensitivity to the learning rate"
    panels = []
    for family, dataset in headline(evidence).items():
        of_kind: dict[str, list[dict[float, float]]] = {kind: [] for kind in _OBJECTIVES}
        for one in evidence.scores:
            finished = one.setting is not None and one.setting.decayed
            if (one.family, one.dataset) == (family, dataset) and finished and (made := sensitivity(one)) is not None:
                kind = objective(one.setting)
                if kind == "CLM" and one.setting.cpt_mlm_steps:  # MLM on a CLM model is both, one after the other
                    kind = "CLM + MLM"
                best = max(made.means.values())
                lost = {rate: 100 * (mean - best) for rate, mean in sorted(made.means.items())}
                of_kind[kind if kind in of_kind else "other"].append(lost)
        lines = []
        for kind, models in of_kind.items():
            if 1 < len(models) <= 40:
                points = (tuple(itertools.starmap(Point, lost.items())) for lost in models)
                lines += [Line("", _OBJECTIVES[kind][0], "", each, light=True, labelled=False) for each in points]
            common = sorted(set.intersection(*map(set, models))) if models else ()
            if common:
                means = (Point(rate, math.fsum(lost[rate] for lost in models) / len(models)) for rate in common)
                lines.append(Line(kind, *_OBJECTIVES[kind], tuple(means)))
        if lines:
            ticks = {rate: rate_name(rate).replace("e-0", "e-") for rate in sorted({p.x for line in lines for p in line.points})}
            axis = {"x_label": "learning rate of the fine-tuning", "y_label": "points below own best", "log": True}
            panels.append(Panel(panel_title(family, dataset), tuple(lines), ticks=ticks, **axis))
    if not panels:
        why = "No model has results of every seed at two learning rates; published tables have chosen rates alone."
        return FigureSpec(key, title, why)
    caption = (
        "Mean over the seeds at each rate less that of the model's best rate, on test: light lines are finished models, strong "
        "ones the mean of those of an objective. The flatter, the less it matters which rate is taken."
    )
    if any(one.collapsed for one in evidence.scores):
        caption += " What collapses to worthless predictions at every rate is flat too: the table of collapsed runs names it."
    if any(one.rates_failed for one in evidence.scores):
        caption += (
            " Runs whose loss became no number count as the score that needs no model, where results say that; else their rate "
            "is left out of their model's line."
        )
    return FigureSpec(key, title, caption, tuple(panels))


_OBJECTIVES = {kind: OBJECTIVES.get(kind, (PURPLE, "D")) for kind in ("MLM", "CLM", "CLM + MLM", "other")}
