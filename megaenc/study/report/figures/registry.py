"""All figures of a report, in the order in which they are shown, with those of learning rates and of losses."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaenc.finetune.config import format_learning_rate
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures import objectives
from megaenc.study.report.figures.base import (
    BLUE,
    GREEN,
    MUTED_COLOUR,
    OBJECTIVE_STYLES,
    ORANGE,
    PURPLE,
    FigureLine,
    FigurePanel,
    FigurePoint,
    FigureSpec,
    has_published_lines,
    headline_datasets,
    panel_title,
)
from megaenc.study.report.score_tables import rate_sensitivity
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import objective_name
from megaenc.study.results.pretrain_runs import TrainedRun, published_model_flops
from megaenc.viz.run_metrics import held_out_curves
from megaenc.viz.style import assign_styles


@dataclass(frozen=True)
class ReportFigure:
    """A figure, and the published numbers drawn the same way where they cannot lie in it."""

    figure: FigureSpec
    published: FigureSpec | None = None


def build_figures(
    evidence: Evidence, runs: Mapping[str, TrainedRun], flops: Mapping[ModelKey, float], published: Evidence | None = None
) -> list[ReportFigure]:
    """Return every figure; `flops` by setting, `published` what to lay behind or next to the scores."""
    published_flops = published_flops_by_model(published) if published else {}

    def by_flops(of: Evidence, behind: Evidence | None = None) -> FigureSpec:
        return objectives.build_flop_efficiency_figure(of, flops if of is evidence else published_flops, behind)

    def with_published(*builders: Callable[..., FigureSpec]) -> list[ReportFigure]:
        figures = []
        for build in builders:
            ours, theirs = build(evidence, published), build(published) if published else None
            figures.append(
                ReportFigure(ours, theirs if theirs and theirs.panels and not has_published_lines(ours.panels) else None)
            )
        return figures

    others = objectives.build_schedule_figure(evidence)
    return [
        *with_published(
            objectives.build_objectives_figure,
            objectives.build_mask_ratio_figure,
            objectives.build_two_stage_mask_ratio_figure,
            objectives.build_step_efficiency_figure,
            by_flops,
        ),
        ReportFigure(build_rate_figure(evidence)),
        *with_published(objectives.build_clm_share_figure, objectives.build_continued_pretraining_figure),
        *([ReportFigure(others)] if others else []),
        ReportFigure(build_loss_figure(runs)),
    ]


def published_flops_by_model(evidence: Evidence) -> dict[ModelKey, float]:
    """Return the operations of the study's own models, from their shapes."""
    counted = {setting: published_model_flops(setting) for setting in evidence.model_keys()}
    return {setting: count for setting, count in counted.items() if count}


_MAX_NAMED_RUNS = 6  # runs that a legend can name
_MAX_POINTS = 60  # points of a line that the eye can use
_RUN_KIND_STYLES = {
    "MLM": ("MLM", ORANGE),
    "CLM": ("CLM", BLUE),
    "CLM + MLM": ("CLM, then MLM", GREEN),
    "continued": ("on a finished model", PURPLE),
    "other": ("other schedules", MUTED_COLOUR),
}


def build_loss_figure(runs: Mapping[str, TrainedRun]) -> FigureSpec:
    """Draw held-out losses over the steps of every run; a branch begins where it left its parent."""
    key, title = "losses", "Held-out loss of the runs"
    curves = {name: run_curves for name, run in runs.items() if (run_curves := held_out_curves(run.validations))}
    if not curves:
        why = "No run has a validation." if runs else "No runs were given: --runs names their folder."
        return FigureSpec(key, title, why)
    looks = assign_styles(list(curves)) if len(curves) <= _MAX_NAMED_RUNS else {}
    panels = []
    for under in dict.fromkeys(of for each in curves.values() for of in each):
        lines = []
        for kind, (label, colour) in _RUN_KIND_STYLES.items():
            for name in [name for name, each in curves.items() if runs[name].kind == kind and under in each]:
                x, values = curves[name][under]
                thinned = range(0, len(x), -(-len(x) // _MAX_POINTS))
                points = tuple(FigurePoint(x[at], values[at]) for at in sorted({*thinned, len(x) - 1}))
                of_run, marker = looks.get(name, (colour, "."))
                lines.append(FigureLine(name if looks else label, of_run, "" if len(points) > 12 else marker, points))
        panels.append(FigurePanel(f"under {under}", tuple(lines), "step", "loss (nats a predicted token)", unit="steps"))
    caption = (
        "Loss on text that no run was trained on, under each objective, whatever the run was trained with at the time. A branch "
        "begins at the step where it left its parent; what went on from a finished model counts its own steps."
    )
    return FigureSpec(key, title, caption, tuple(panels))


def build_rate_figure(evidence: Evidence) -> FigureSpec:
    """Draw points lost against each model's own best rate: a light line a model, a strong one for the mean of an objective."""
    key, title = "learning-rates", "Sensitivity to the learning rate"
    panels = []
    for family, dataset in headline_datasets(evidence).items():
        of_kind: dict[str, list[dict[float, float]]] = {kind: [] for kind in _OBJECTIVES}
        for one in evidence.scores:
            finished = one.model_key is not None and one.model_key.decayed
            if (one.family, one.dataset) == (family, dataset) and finished and (sensitivity := rate_sensitivity(one)) is not None:
                kind = objective_name(one.model_key)
                if kind == "CLM" and one.model_key.cpt_mlm_steps:  # MLM on a CLM model is both, one after the other
                    kind = "CLM + MLM"
                best = max(sensitivity.means.values())
                lost = {rate: 100 * (mean - best) for rate, mean in sorted(sensitivity.means.items())}
                of_kind[kind if kind in of_kind else "other"].append(lost)
        lines = []
        for kind, models in of_kind.items():
            if 1 < len(models) <= 40:
                points = (tuple(itertools.starmap(FigurePoint, lost.items())) for lost in models)
                lines += [FigureLine("", _OBJECTIVES[kind][0], "", each, light=True, labelled=False) for each in points]
            common = sorted(set.intersection(*map(set, models))) if models else ()
            if common:
                means = (FigurePoint(rate, math.fsum(lost[rate] for lost in models) / len(models)) for rate in common)
                lines.append(FigureLine(kind, *_OBJECTIVES[kind], tuple(means)))
        if lines:
            ticks = {
                rate: format_learning_rate(rate).replace("e-0", "e-")
                for rate in sorted({p.x for line in lines for p in line.points})
            }
            axis = {"x_label": "learning rate of the fine-tuning", "y_label": "points below own best", "log": True}
            panels.append(FigurePanel(panel_title(family, dataset), tuple(lines), ticks=ticks, **axis))
    if not panels:
        why = "No model has results of every seed at two learning rates; published tables have chosen rates alone."
        return FigureSpec(key, title, why)
    caption = (
        "Mean over the seeds at each rate less that of the model's best rate, on test: light lines are finished models, strong "
        "ones the mean of those of an objective. The flatter, the less it matters which rate is taken."
    )
    if any(one.collapsed_runs for one in evidence.scores):
        caption += " What collapses to worthless predictions at every rate is flat too: the table of collapsed runs names it."
    if any(one.failed_seeds for one in evidence.scores):
        caption += (
            " Runs whose loss became no number count as the score that needs no model, where results say that; else their rate "
            "is left out of their model's line."
        )
    return FigureSpec(key, title, caption, tuple(panels))


_OBJECTIVES = {kind: OBJECTIVE_STYLES.get(kind, (PURPLE, "D")) for kind in ("MLM", "CLM", "CLM + MLM", "other")}
