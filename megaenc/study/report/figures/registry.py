"""List of all figures of a report, and figures of rates and held-out losses."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaenc.finetune.config import format_learning_rate
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures import objectives
from megaenc.study.report.figures.base import (
    MUTED_COLOUR,
    OBJECTIVE_STYLES,
    FigureLine,
    FigurePanel,
    FigurePoint,
    FigureSpec,
    has_published_lines,
    panel_title,
)
from megaenc.study.report.score_tables import rate_sensitivity
from megaenc.study.results.evidence import Evidence, headline_datasets
from megaenc.study.results.groups import objective_name
from megaenc.study.results.pretrain_runs import TrainedRun, published_model_flops
from megaenc.viz.run_metrics import held_out_curves
from megaenc.viz.style import BLUE, GREEN, ORANGE, PURPLE, assign_styles


@dataclass(frozen=True)
class ReportFigure:
    """Figure of the report, `figure`, and a separate one of published results.

    The second, `published`, is None if there are none to show, or if `figure` shows published
    results itself.
    """

    figure: FigureSpec
    published: FigureSpec | None = None


def build_figures(
    evidence: Evidence,
    runs: Mapping[str, TrainedRun],
    flops: Mapping[ModelKey, float],
    published: Evidence | None = None,
) -> list[ReportFigure]:
    """Build all figures of the report but that of zero-shot retrieval, in order.

    They show scores of STUDY_FAMILIES. A figure without the scores that it needs has no panels;
    only that of objective schedules is left out instead. Nothing is drawn yet.

    Args:
        runs: Pretraining runs by name, for the held-out losses; may be empty.
        flops: Cumulative training FLOPs by model of `evidence`; may be empty. Those of published
            models are computed here.
        published: Published results, shown in the figures or next to them; None for none.
    """
    evidence = evidence.select_study_families()
    published_flops = published_flops_by_model(published) if published else {}

    def build_flop_figure(scores: Evidence, published: Evidence | None = None) -> FigureSpec:
        """Build the figure of FLOP efficiency with the FLOPs that belong to `scores`."""
        return objectives.build_flop_efficiency_figure(
            scores, flops if scores is evidence else published_flops, published
        )

    def build_with_published(*builders: Callable[..., FigureSpec]) -> list[ReportFigure]:
        """Build each figure, and that of published results if they do not fit into it."""
        figures = []
        for build in builders:
            study_figure = build(evidence, published)
            published_figure = build(published) if published else None
            is_separate = (
                published_figure
                and published_figure.panels
                and not has_published_lines(study_figure.panels)
            )
            figures.append(ReportFigure(study_figure, published_figure if is_separate else None))
        return figures

    others = objectives.build_schedule_figure(evidence)
    return [
        *build_with_published(
            objectives.build_objectives_figure,
            objectives.build_mask_ratio_figure,
            objectives.build_two_stage_mask_ratio_figure,
            objectives.build_step_efficiency_figure,
            build_flop_figure,
        ),
        ReportFigure(build_rate_figure(evidence)),
        *build_with_published(
            objectives.build_clm_share_figure, objectives.build_continued_pretraining_figure
        ),
        *([ReportFigure(others)] if others else []),
        ReportFigure(build_loss_figure(runs)),
    ]


def published_flops_by_model(evidence: Evidence) -> dict[ModelKey, float]:
    """Return cumulative training FLOPs, both passes, of each model with a score.

    They follow from shapes and batches of the published study (`published_model_flops`), so that
    they are wrong for other studies. Unknown sizes and models with a schedule are left out.
    """
    flops = {key: published_model_flops(key) for key in evidence.model_keys()}
    return {key: count for key, count in flops.items() if count}


_MAX_NAMED_RUNS = 6  # in the legend
_MAX_POINTS = 60  # per line
_RUN_KIND_STYLES = {
    "MLM": ("MLM", ORANGE),
    "CLM": ("CLM", BLUE),
    "CLM + MLM": ("CLM, then MLM", GREEN),
    "continued": ("on a finished model", PURPLE),
    "other": ("other schedules", MUTED_COLOUR),
}


def build_loss_figure(runs: Mapping[str, TrainedRun]) -> FigureSpec:
    """Build the figure of pretraining runs' held-out losses over steps.

    Losses are nats a predicted token. There is a panel per objective that they are measured under,
    with a line per run; a branch starts at its parent's step, continued pretraining at 0. Without
    validations there are no panels, and the caption gives the reason.

    Args:
        runs: Pretraining runs by name, of `read_runs`.
    """
    key = "losses"
    title = "Held-out loss of the runs"
    curves = {
        name: run_curves
        for name, run in runs.items()
        if (run_curves := held_out_curves(run.validations))
    }
    if not curves:
        why = (
            "No run has a validation."
            if runs
            else "No runs were given; pass their directory with --runs."
        )
        return FigureSpec(key, title, why)
    run_styles = assign_styles(list(curves)) if len(curves) <= _MAX_NAMED_RUNS else {}
    panels = []
    for objective in dict.fromkeys(
        objective for objective_curves in curves.values() for objective in objective_curves
    ):
        lines = []
        for kind, (label, colour) in _RUN_KIND_STYLES.items():
            for name, objective_curves in curves.items():
                if runs[name].kind != kind or objective not in objective_curves:
                    continue
                x, values = objective_curves[objective]
                thinned = range(0, len(x), -(-len(x) // _MAX_POINTS))
                points = tuple(
                    FigurePoint(x[index], values[index]) for index in sorted({*thinned, len(x) - 1})
                )
                run_colour, marker = run_styles.get(name, (colour, "."))
                lines.append(
                    FigureLine(
                        name if run_styles else label,
                        run_colour,
                        "" if len(points) > 12 else marker,
                        points,
                    )
                )
        panels.append(
            FigurePanel(
                f"under {objective}",
                tuple(lines),
                "step",
                "loss (nats a predicted token)",
                unit="steps",
            )
        )
    caption = (
        "Loss on held-out text under each objective, whatever the training objective is at that "
        "step. A branch begins at its parent's step; continued pretraining counts its own "
        "steps."
    )
    return FigureSpec(key, title, caption, tuple(panels))


def build_rate_figure(evidence: Evidence) -> FigureSpec:
    """Build the figure of points lost at each fine-tuning rate against the best one.

    A panel per task family, of its average or else first data set, has a line per objective: the
    mean over its finished models of a test score less the model's best, as of `rate_sensitivity`.
    An objective with 2 to 40 of them has light lines of single models too. Without a model with
    every seed at two learning rates there are no panels, and the caption gives the reason.
    """
    key = "learning-rates"
    title = "Sensitivity to the learning rate"
    panels = []
    for family, dataset in headline_datasets(evidence).items():
        lost_by_kind: dict[str, list[dict[float, float]]] = {kind: [] for kind in _OBJECTIVES}
        for score in evidence.scores:
            finished = score.model_key is not None and score.model_key.decayed
            if (
                (score.family, score.dataset) == (family, dataset)
                and finished
                and (sensitivity := rate_sensitivity(score)) is not None
            ):
                kind = objective_name(score.model_key)
                if kind == "CLM" and score.model_key.cpt_mlm_steps:  # continued MLM on a CLM model
                    kind = "CLM + MLM"
                best = max(sensitivity.means.values())
                lost = {
                    rate: 100 * (mean - best) for rate, mean in sorted(sensitivity.means.items())
                }
                lost_by_kind[kind if kind in lost_by_kind else "other"].append(lost)
        lines = []
        for kind, models in lost_by_kind.items():
            if 1 < len(models) <= 40:
                points = (tuple(itertools.starmap(FigurePoint, lost.items())) for lost in models)
                lines += [
                    FigureLine(
                        "", _OBJECTIVES[kind][0], "", model_points, light=True, labelled=False
                    )
                    for model_points in points
                ]
            common = sorted(set.intersection(*map(set, models))) if models else ()
            if common:
                means = (
                    FigurePoint(rate, math.fsum(lost[rate] for lost in models) / len(models))
                    for rate in common
                )
                lines.append(FigureLine(kind, *_OBJECTIVES[kind], tuple(means)))
        if lines:
            ticks = {
                rate: format_learning_rate(rate).replace("e-0", "e-")
                for rate in sorted({p.x for line in lines for p in line.points})
            }
            panels.append(
                FigurePanel(
                    panel_title(family, dataset),
                    tuple(lines),
                    "learning rate of the fine-tuning",
                    "points below own best",
                    ticks=ticks,
                    log=True,
                )
            )
    if not panels:
        why = (
            "No model has results of every seed at two learning rates; published tables have only "
            "chosen rates."
        )
        return FigureSpec(key, title, why)
    caption = (
        "Mean test score over the seeds at each rate, less that at the model's best rate. Light "
        "lines are finished models, strong ones the mean of an objective. The flatter a line, the "
        "less the choice of the rate matters."
    )
    if any(score.collapsed_runs for score in evidence.scores):
        caption += (
            " Models that collapse at every rate are flat too; see the table of collapsed runs."
        )
    if any(score.failed_seeds for score in evidence.scores):
        caption += (
            " Runs with a NaN loss count as the trivial baseline if the results contain it; else "
            "the rate is left out of the model's line."
        )
    return FigureSpec(key, title, caption, tuple(panels))


_OBJECTIVES = {
    kind: OBJECTIVE_STYLES.get(kind, (PURPLE, "D")) for kind in ("MLM", "CLM", "CLM + MLM", "other")
}
