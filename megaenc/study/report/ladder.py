"""Tables and figures of the report on a ladder: scaling laws of objectives."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megaenc.console import format_number
from megaenc.errors import InputError
from megaenc.study.report.figures.base import FigureLine, FigurePanel, FigurePoint, FigureSpec
from megaenc.study.report.table import CellValue, Column, Table, TableRow
from megaenc.study.results.ladder import POINT_COLUMNS, LadderRun, group_points
from megaenc.study.stats.scaling import (
    IsoFlopOptima,
    ScalingLaw,
    ScalingPoint,
    budget_indices,
    find_crossing,
    fit_isoflop,
    fit_scaling_law,
    percentile_interval,
)
from megaenc.viz.style import assign_styles

_CURVE_POINTS = 40


@dataclass(frozen=True)
class LadderFit:
    """Fits of the losses of one objective under one measure.

    `law` and `optima` are pairs of an estimate and its resamples, or None with the reason in
    `failures`.
    """

    measure: str
    objective: str
    points: Sequence[ScalingPoint]
    law: tuple[ScalingLaw, ScalingLaw] | None
    optima: tuple[IsoFlopOptima, IsoFlopOptima] | None
    failures: Sequence[str]


def fit_ladder(runs: Sequence[LadderRun]) -> list[LadderFit]:
    """Fit the losses of each objective under each measure that its runs have.

    Args:
        runs: Finished runs, of `read_ladder_runs`.
    """
    fits = []
    for measure in dict.fromkeys(measure for run in runs for measure in run.losses):
        for objective, points in group_points(runs, measure).items():
            results = []
            failures = []
            for fit in (fit_scaling_law, fit_isoflop):
                try:
                    results.append(fit(points))
                except InputError as error:
                    results.append(None)
                    failures.append(str(error))
            fits.append(LadderFit(measure, objective, points, *results, failures))
    return fits


def build_ladder_tables(runs: Sequence[LadderRun], fits: Sequence[LadderFit]) -> list[Table]:
    """Build the tables of exponents, optimal sizes, crossings, rates and points."""
    with np.errstate(all="ignore"):  # resamples without an optimum are NaN or infinite
        tables = [
            _build_exponent_table(fits),
            _build_optimum_table(fits),
            _build_crossing_table(fits),
            _build_rate_table(runs),
            _build_point_table(runs),
        ]
    return [table for table in tables if table.rows]


def describe_missing_fits(fits: Sequence[LadderFit]) -> list[str]:
    """Return a sentence for each fit that failed."""
    return [
        f"No fit of {fit.objective} under {fit.measure}: {reason}."
        for fit in fits
        for reason in fit.failures
    ]


def _build_exponent_table(fits: Sequence[LadderFit]) -> Table:
    """Build the table of the parameters of each law."""
    rows = []
    for fit in fits:
        cells: list[CellValue] = [fit.measure, fit.objective, len(fit.points)]
        if fit.law:
            law, resamples = fit.law
            for name in ("alpha", "beta", "E", "parameters_exponent"):
                cells.append(
                    _format_interval(getattr(law, name), getattr(resamples, name), "{:.3f}".format)
                )
        else:
            cells += [None] * 4
        cells.append(None)
        if fit.optima:
            optima, resamples = fit.optima
            cells[-1] = _format_interval(
                optima.parameters_exponent, resamples.parameters_exponent, "{:.3f}".format
            )
        cells.append(f"{100 * _residual(fit.law[0], fit.points):.2f}" if fit.law else None)
        rows.append(TableRow(tuple(cells), rule=_starts_measure(rows, fit), name=fit.objective))
    columns = (
        Column("Loss", numeric=False),
        Column("Objective", numeric=False),
        Column("Runs"),
        *(Column(name, "L = E + A / N^alpha + B / D^beta") for name in ("alpha", "beta", "E")),
        Column("law", "a of optimal N ~ FLOPs^a"),
        Column("isoFLOP", "a of optimal N ~ FLOPs^a"),
        Column("Residual (%)"),
    )
    note = (
        "N: parameters without an untied input embedding, D: training tokens. In brackets: 95 % "
        "bootstrap intervals, over sizes and budgets for the law, over residuals for isoFLOP "
        "parabolas. Residual: root mean square of the log loss. Different losses cannot be "
        "compared. Parabolas far from their minimum are biased: the law is the better estimate."
    )
    return Table("ladder-exponents", "Scaling laws", note, columns, tuple(rows))


def _starts_measure(rows: Sequence[TableRow], fit: LadderFit) -> bool:
    """Return whether a row of a fit is the first of another measure."""
    return bool(rows) and rows[-1].cells[0] != fit.measure


def _format_interval(
    value: float, resamples: np.ndarray, format_value: Callable[[float], str]
) -> str:
    """Format an estimate with its interval, such as `0.348 (0.312 to 0.390)`.

    The interval is left out if too many resamples are NaN; a NaN estimate is empty.
    """
    if math.isnan(value):
        return ""
    text = format_value(value)
    low, high = percentile_interval(np.asarray(resamples))
    if math.isfinite(low):
        text += f" ({format_value(low)} to {format_value(high)})"
    return text


def _residual(law: ScalingLaw, points: Sequence[ScalingPoint]) -> float:
    """Return the root mean square of the log losses less those of the law."""
    differences = [
        math.log(point.loss / law.loss(point.parameters, point.tokens)) for point in points
    ]
    return math.sqrt(math.fsum(difference**2 for difference in differences) / len(differences))


def _build_optimum_table(fits: Sequence[LadderFit]) -> Table:
    """Build the table of compute-optimal sizes at three budgets within the runs."""
    rows = []
    for fit in fits:
        if not fit.law:
            continue
        law, resamples = fit.law
        low, high = law.flops_range
        sizes = [point.parameters for point in fit.points]
        for flops in (low, math.sqrt(low * high), high):
            size = law.optimal_parameters(flops)
            text = _format_interval(size, resamples.optimal_parameters(flops), format_number)
            outside = "" if min(sizes) <= size <= max(sizes) else " *"
            cells = (
                fit.measure,
                fit.objective,
                f"{flops:.1e}",
                f"{text}{outside}",
                f"{law.optimal_tokens(flops) / size:.3g}",
                f"{law.optimal_loss(flops):.3f}",
            )
            rows.append(TableRow(cells, rule=_starts_measure(rows, fit), name=fit.objective))
    columns = (
        Column("Loss", numeric=False),
        Column("Objective", numeric=False),
        *(Column(name) for name in ("FLOPs", "N", "D / N", "loss")),
    )
    note = (
        "Size with the lowest loss at the lowest, the middle and the highest FLOPs of the "
        "objective's runs, by its law (bootstrap 95 % interval), with tokens per parameter and "
        "loss. *: outside the trained sizes, extrapolated."
    )
    return Table("ladder-optimum", "Compute-optimal sizes", note, columns, tuple(rows))


def _build_crossing_table(fits: Sequence[LadderFit]) -> Table:
    """Build the table of where the envelopes of two objectives cross."""
    rows = []
    for first, second in combinations([fit for fit in fits if fit.law], 2):
        if first.measure != second.measure:
            continue
        laws = (first.law[0], second.law[0])
        low = max(law.flops_range[0] for law in laws)
        high = min(law.flops_range[1] for law in laws)
        if low >= high:
            continue
        resamples = find_crossing(first.law[1], second.law[1])
        crossing = find_crossing(*laws)
        cells: list[CellValue] = [first.measure, f"{first.objective} less {second.objective}"]
        for flops in (low, high):
            gaps = [
                law.optimal_loss(flops) - other.optimal_loss(flops)
                for law, other in zip(first.law, second.law, strict=True)
            ]
            cells.append(_format_interval(*gaps, "{:+.3f}".format))
        cells.append("none" if math.isnan(crossing) else f"{crossing:.2e}")
        cells.append(f"{100 * np.isfinite(resamples).mean():.0f} %")
        rows.append(TableRow(tuple(cells), rule=_starts_measure(rows, first)))
    columns = (
        Column("Loss", numeric=False),
        Column("Objectives", numeric=False),
        Column("at the lowest FLOPs"),
        Column("at the highest"),
        Column("Crossing (FLOPs)"),
        Column("Resamples that cross"),
    )
    note = (
        "Lowest loss of the first objective less that of the second, by their laws, at the lowest "
        "and the highest FLOPs that both have runs of, with bootstrap 95 % intervals. Crossings "
        "are sought between these only."
    )
    return Table("ladder-crossings", "Which objective is ahead", note, columns, tuple(rows))


def _build_rate_table(runs: Sequence[LadderRun]) -> Table:
    """Build the table of losses by peak rate, of sizes with several rates."""
    factors = sorted({run.rate_factor for run in runs})
    tried = dict.fromkeys((run.size, run.objective) for run in runs if not run.is_fitted)
    rows = []
    for size, objective in tried:
        members = [run for run in runs if (run.size, run.objective) == (size, objective)]
        flops = min(run.flops for run in members)
        members = [run for run in members if run.flops < 1.1 * flops]
        for measure in dict.fromkeys(measure for run in members for measure in run.losses):
            losses = {
                run.rate_factor: run.losses[measure]
                for run in reversed(members)
                if measure in run.losses
            }
            if len(losses) < 2:
                continue
            best = min(losses, key=losses.__getitem__)
            texts = {factor: f"{loss:.3f}" for factor, loss in losses.items()}
            texts[best] += " (lowest)"
            rows.append(
                TableRow(
                    (size, objective, measure, *(texts.get(factor) for factor in factors)),
                    rule=bool(rows) and rows[-1].cells[0] != size,
                )
            )
    columns = (
        *(Column(name, numeric=False) for name in ("Size", "Objective", "Loss")),
        *(Column(f"x {factor:g}", "peak rate over the rule's") for factor in factors),
    )
    note = (
        "Loss at the lowest budget by peak learning rate. A rate that suits one objective better "
        "than another would bias their comparison."
    )
    return Table("ladder-rates", "Learning rates of the ladder", note, columns, tuple(rows))


def _build_point_table(runs: Sequence[LadderRun]) -> Table:
    """Build the table of all runs, whose CSV file the manifest's `points` reads."""
    measures = list(dict.fromkeys(measure for run in runs for measure in run.losses))
    rows = []
    for run in runs:
        fields = [getattr(run, name) for name in POINT_COLUMNS.values()]
        losses = [
            f"{run.losses[measure]:.6g}" if measure in run.losses else None for measure in measures
        ]
        rows.append(TableRow((*map(_format_field, fields), *losses), name=run.name))
    columns = (
        *(
            Column(name, numeric=name not in ("Model", "Objective", "Size"))
            for name in POINT_COLUMNS
        ),
        *(Column(measure) for measure in measures),
    )
    note = "Every finished run of the ladder; `points` of a manifest reads the CSV file."
    return Table("ladder-points", "Runs of the ladder", note, columns, tuple(rows), folded=True)


def _format_field(value: str | float | bool) -> CellValue:
    """Format a field of a run for the table of points."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value


def build_ladder_figures(fits: Sequence[LadderFit]) -> list[FigureSpec]:
    """Build the figures of losses over FLOPs and of isoFLOP curves."""
    styles = assign_styles([fit.objective for fit in fits])
    panels = []
    for measure in dict.fromkeys(fit.measure for fit in fits):
        lines = [
            line
            for fit in fits
            if fit.measure == measure
            for line in _draw_envelope(fit, styles[fit.objective])
        ]
        panels.append(
            FigurePanel(
                measure, tuple(lines), "training FLOPs", "loss", log=True, unit="operations"
            )
        )
    caption = (
        "Final loss of each run (points), and the lowest loss that each objective reaches at a "
        "budget, by its scaling law (lines)."
    )
    losses = FigureSpec("ladder-losses", "Loss over FLOPs", caption, tuple(panels))
    panels = [
        FigurePanel(
            f"{fit.objective}: {fit.measure}",
            tuple(_draw_parabolas(fit)),
            "parameters N",
            "loss",
            log=True,
            unit="steps",
        )
        for fit in fits
    ]
    caption = (
        "Final losses by size at each budget of FLOPs, and the parabolas whose minima are "
        "compute-optimal. Budgets without a parabola have fewer than three sizes, or no minimum "
        "within them."
    )
    return [losses, FigureSpec("ladder-isoflop", "IsoFLOP curves", caption, tuple(panels))]


def _draw_envelope(fit: LadderFit, style: tuple[str, str]) -> Iterator[FigureLine]:
    """Yield the points of an objective, and the envelope of its law if it has one."""
    points = tuple(FigurePoint(point.flops, point.loss) for point in fit.points)
    yield FigureLine(fit.objective, *style, points, joined=False, light=True, labelled=not fit.law)
    if fit.law:
        law = fit.law[0]
        flops = np.geomspace(*law.flops_range, _CURVE_POINTS)
        envelope = tuple(FigurePoint(float(x), float(law.optimal_loss(x))) for x in flops)
        yield FigureLine(fit.objective, style[0], "", envelope)


def _draw_parabolas(fit: LadderFit) -> Iterator[FigureLine]:
    """Yield the points of each budget, and its parabola if it has a minimum."""
    indices = budget_indices(np.array([point.flops for point in fit.points]))
    logs = np.log([point.flops for point in fit.points])
    budgets = {}
    for index in range(indices.max() + 1):
        label = _format_budget(np.exp(logs[indices == index].mean()))
        budgets[label] = [fit.points[run] for run in np.flatnonzero(indices == index)]
    styles = assign_styles(list(budgets))
    for label, points in budgets.items():
        places = tuple(FigurePoint(point.parameters, point.loss) for point in points)
        yield FigureLine(label, *styles[label], places, joined=False)
    if not fit.optima:
        return
    optima = fit.optima[0]
    for index, flops in enumerate(optima.flops):
        label = _format_budget(flops)
        trained = [point.parameters for point in budgets[label]]
        sizes = np.geomspace(min(trained), max(trained), _CURVE_POINTS)
        distances = np.log(sizes / optima.parameters[index])
        losses = optima.losses[index] + optima.curvatures[index] * distances**2
        curve = tuple(map(FigurePoint, sizes.tolist(), losses.tolist()))
        yield FigureLine(label, styles[label][0], "", curve, labelled=False)


def _format_budget(flops: float) -> str:
    return f"{flops:.1e} FLOPs"
