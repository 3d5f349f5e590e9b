"""Print the scores of a grid: means with intervals, averages, learning rates."""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from megaenc import flags, tables
from megaenc.atomic_io import atomic_write
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results import aggregate
from megaenc.finetune.results.aggregate import PAPER_SCORE, IntervalKind, ScoreCell
from megaenc.finetune.results.files import Result, read_result_tree
from megaenc.output_paths import check_output_file, create_parent_with_rollback, refuse_input
from megaenc.tables import escape_markdown

PAPER_METRIC = "paper's"
_WIDTH = 80


@dataclass(frozen=True)
class GridSummaryConfig:
    """Options of `megaenc finetune summary`: results, metrics, intervals and output.

    Each field is a flag, except `results`, the command's argument, a directory. `metrics` are
    "paper", "standard" or "both", `interval` is "normal" or "t", and `output` a .json, .csv or .md
    file for all numbers, which is replaced if it exists, "" for none.
    """

    results: Annotated[str, Positional, arg(metavar="RESULTS")]
    """directory of results (--output of a grid), or the study's published results"""
    metrics: Literal["paper", "standard", "both"] = "both"
    """the paper's scores, standard metrics, or both; the paper's scores choose the learning rate in
    any case"""
    interval: IntervalKind = "normal"
    """half width of the 95 % intervals: 1.96 standard errors, as in the paper, or Student's t,
    which suits few seeds"""
    output: str = ""
    """file to write all numbers to as well; its suffix gives the format: .json, .csv or .md"""


@dataclass(frozen=True)
class SummaryRow:
    """Row of the score table, in percent: a model's metric on a data set or average.

    `build_summary` builds it. `dataset` of a task `family` is `average of N` in averages, and
    `train_on` is empty if they have several training sets. `metric` is PAPER_METRIC for the study's
    own score. `mean` is over `seeds` seeds at the chosen `learning_rate`, which is None in
    averages; mean and rate are None, and `seeds` 0, if no rate has all seeds, the mean of an
    average also if its data sets have other seeds. `half` is half the width of the interval, None
    also for one seed. `baseline` is the metric of a trivial predictor, None if unknown. `runs` is
    text such as `30/30`, `collapsed` such as `2 of 5: REASON` of runs at the chosen rate, or empty
    without such runs; both are empty in averages.
    """

    model: str
    family: str
    dataset: str
    train_on: str
    """Training set; empty in averages over several training sets."""
    metric: str
    learning_rate: float | None
    """Chosen learning rate; None in averages, and if none can be chosen."""
    mean: float | None
    """None if the grid is not finished."""
    half: float | None
    """Half width of the interval; None also for a single seed."""
    baseline: float | None
    """The metric of a trivial predictor: majority class, most frequent tag of a word, never
    answering, random ranking. None if the results lack it."""
    seeds: int
    """Number of seeds of `mean`, 0 without it."""
    runs: str
    """Finished of planned runs, `30/30`; empty in averages."""
    collapsed: str
    """Number of collapsed runs at the chosen rate with their reason, `2 of 5: REASON`; empty
    without any, and in averages."""


@dataclass(frozen=True)
class RateRow:
    """Row of the learning-rate table, in percent: a model's mean scores by rate.

    `model`, `family`, `dataset` and `train_on` are those of the ScoreCell. `means` has the study's
    score of the rates that have a finished run of every seed, `incomplete` the other rates.
    `chosen` is the rate of `means` with the best validation score, `spread` the highest mean minus
    the lowest, `near_best` the number of rates within one point of the best, the best included. If
    `means` is empty, they are None, NaN and 0.
    """

    model: str
    family: str
    dataset: str
    train_on: str
    chosen: float | None
    means: dict[float, float]
    spread: float
    near_best: int
    """Number of rates within one point of the best."""
    incomplete: tuple[float, ...]
    """Rates that lack a finished run of a seed, so that they cannot be chosen."""


@dataclass(frozen=True)
class GridSummary:
    """Summary of a results tree: rows of its tables, and collapsed and failed runs.

    `build_summary` builds it. `rows` are those of the score table, averages included, `rates` those
    of the learning-rate table. `collapsed` has finished runs with worthless predictions, `failed`
    those that failed. `repeated_families` are the (model, family) pairs with a data set that was
    evaluated after several trainings.
    """

    rows: list[SummaryRow]
    rates: list[RateRow]
    collapsed: list[Result]
    failed: list[Result]
    repeated_families: set[tuple[str, str]]
    """(model, family) pairs with a data set evaluated after several trainings."""

    def format_dataset(self, row: SummaryRow | RateRow | Result) -> str:
        """Return the row's data set, or `DATASET after TRAINSET` if it is ambiguous.

        It is ambiguous if the row's model has, in the row's family, results on any data set after
        several training sets, and the row is not an average over training sets.
        """
        is_repeated = (row.model, row.family) in self.repeated_families
        return (
            f"{row.dataset} after {row.train_on}" if is_repeated and row.train_on else row.dataset
        )

    @property
    def learning_rates(self) -> list[float]:
        """Return all learning rates of `rates`, ascending, complete or not."""
        return sorted({rate for row in self.rates for rate in (*row.means, *row.incomplete)})


def build_summary(
    results: Sequence[Result], metrics: str = "both", kind: IntervalKind = "normal"
) -> GridSummary:
    """Return the GridSummary of `results`, sorted by family, model and data set.

    Rates and seeds are those of `group_cells` without a grid. Averages follow the data sets of
    their family and model. A standard metric is left out if a finished run of the row lacks it.

    Args:
        results: Finished and failed runs, such as those of `read_result_tree`.
        metrics: "paper" (the study's score), "standard" or "both".
        kind: Kind of the intervals (see `compute_interval`).
    """
    order = list(TaskFamily)
    by_model: dict[tuple[TaskFamily, str], list[ScoreCell]] = defaultdict(list)
    for cell in aggregate.group_cells(results):
        by_model[TaskFamily(cell.family), cell.model].append(cell)
    collapsed = [result for result in results if result.test is not None and result.test.collapsed]
    summary = GridSummary(
        [], [], collapsed, [result for result in results if result.failure is not None], set()
    )
    for family, model in sorted(by_model, key=lambda key: (order.index(key[0]), key[1])):
        members = sorted(by_model[family, model], key=lambda cell: (cell.dataset, cell.train_on))
        if aggregate.has_repeated_datasets(members):
            summary.repeated_families.add((model, str(family)))
        for group in [
            *([cell] for cell in members),
            *aggregate.group_for_averages(family, members),
        ]:
            summary.rows.extend(
                _build_row(group, metric, kind) for metric in _select_metrics(group, metrics)
            )
        summary.rates.extend(row for cell in members if (row := _build_rate_row(cell)) is not None)
    return summary


def _select_metrics(members: Sequence[ScoreCell], metrics_option: str) -> list[str]:
    """Return the metrics of --metrics that every finished run of `members` has."""
    metrics = [] if metrics_option == "standard" else [PAPER_SCORE]
    if metrics_option != "paper":
        finished = [
            run.test.metrics for cell in members for run in cell.runs if run.test is not None
        ]
        metrics += [
            name
            for name in (finished[0] if finished else ())
            if all(name in of_run for of_run in finished)
        ]
    return metrics


def _build_row(members: Sequence[ScoreCell], metric: str, kind: IntervalKind) -> SummaryRow:
    """Build a row: a metric of one cell, or of the average over several."""
    first = members[0]
    dataset = f"average of {len(members)}"
    rate = None
    runs = ""
    collapsed = ""
    if len(members) == 1:
        dataset = first.dataset
        rate = first.chosen_rate
        runs = f"{sum(run.test is not None for run in first.runs)}/{first.planned_run_count}"
        at_rate = first.runs_at_rate(rate) if rate is not None else []
        if reasons := [run.test.collapsed for run in at_rate if run.test.collapsed]:
            collapsed = f"{len(reasons)} of {len(at_rate)}: {reasons[0]}"
    by_seed = aggregate.average_by_seed(members, metric) or {}
    mean = None
    half = None
    if by_seed:
        interval = aggregate.compute_interval(list(by_seed.values()), kind)
        mean = 100 * interval.mean
        half = None if math.isnan(interval.half) else 100 * interval.half
    # Every run on a data set has the same baseline.
    bases = [
        next((run.test.baseline.get(metric) for run in cell.runs if run.test is not None), None)
        for cell in members
    ]
    return SummaryRow(
        model=first.model,
        family=first.family,
        dataset=dataset,
        train_on=first.train_on if len({cell.train_on for cell in members}) == 1 else "",
        metric=PAPER_METRIC if metric == PAPER_SCORE else metric,
        learning_rate=rate,
        mean=mean,
        half=half,
        baseline=None if None in bases else 100 * math.fsum(bases) / len(bases),
        seeds=len(by_seed),
        runs=runs,
        collapsed=collapsed,
    )


def _build_rate_row(cell: ScoreCell) -> RateRow | None:
    """Build the row of a cell's mean scores by learning rate.

    Returns:
        The row, or None if the cell has neither a rate with every seed nor an incomplete one.
    """
    incomplete = tuple(rate for rate in cell.rates if rate not in cell.complete_rates)
    cell_key = (cell.model, cell.family, cell.dataset, cell.train_on)
    sensitivity = aggregate.compute_sensitivity(cell.scores_by_rate(), cell.seeds)
    if sensitivity is None:
        return RateRow(*cell_key, None, {}, math.nan, 0, incomplete) if incomplete else None
    means = {rate: 100 * mean for rate, mean in sensitivity.means.items()}
    return RateRow(
        *cell_key,
        cell.chosen_rate,
        means,
        100 * sensitivity.spread,
        sensitivity.count_near_best(),
        incomplete,
    )


def format_interval(mean: float | None, half: float | None = None) -> str:
    """Return mean and half width as text with two decimals, such as `91.65 (0.45)`.

    It is only the mean if `half` is None, and `-` if `mean` is None.
    """
    if mean is None:
        return "-"
    return f"{mean:.2f}" + (f" ({half:.2f})" if half is not None else "")


def build_tables(summary: GridSummary) -> list[Any]:
    """Return `rich.table.Table`s of scores, and of mean scores by learning rate.

    There is one table of scores per task family; the other comes last, and is left out if no row
    has several rates.
    """
    rendered_tables = []
    for family in dict.fromkeys(row.family for row in summary.rows):
        rows = [row for row in summary.rows if row.family == family]
        compared = ["baseline"] if any(row.baseline is not None for row in rows) else []
        names = ("model", "data set", "metric")
        numbers = ("mean (half)", *compared, "rate", "runs")
        table = tables.build_rich_table(
            f"{family}, percent on test, 95 % interval over seeds", names, numbers
        )
        before: tuple[str, str] = ("", "")
        for row in rows:
            place = summary.format_dataset(row)
            first = (row.model, place) != before
            mark = " !" if row.collapsed and row.metric == rows[0].metric else ""
            table.add_row(
                row.model if row.model != before[0] else "",
                place if first else "",
                row.metric,
                format_interval(row.mean, row.half) + mark,
                *(format_interval(row.baseline) for _ in compared),
                _format_rate(row) if first else "",
                row.runs if first else "",
            )
            before = (row.model, place)
        rendered_tables.append(table)
    if any(len(row.means) + len(row.incomplete) > 1 for row in summary.rates):
        title = "mean score by learning rate (* chosen on validation, x not every seed finished)"
        table = tables.build_rich_table(
            title,
            ("model", "data set"),
            (*map(format_learning_rate, summary.learning_rates), "spread", "near"),
        )
        model = ""
        for row in summary.rates:
            means = {
                rate: f"{mean:.1f}{'*' * (rate == row.chosen)}" for rate, mean in row.means.items()
            }
            means |= dict.fromkeys(row.incomplete, "x")
            numbers_by_rate = [means.get(rate, "") for rate in summary.learning_rates]
            ends = [f"{row.spread:.1f}", f"{row.near_best}"] if row.means else ["", ""]
            table.add_row(
                row.model if row.model != model else "",
                summary.format_dataset(row),
                *numbers_by_rate,
                *ends,
            )
            model = row.model
        rendered_tables.append(table)
    return rendered_tables


def _format_rate(row: SummaryRow) -> str:
    return format_learning_rate(row.learning_rate) if row.learning_rate is not None else ""


def _iterate_unusable_runs(summary: GridSummary) -> Iterator[tuple[str, Result, str]]:
    """Yield ("collapsed" or "failed", result, reason) of each unusable run."""
    yield from (("collapsed", result, result.test.collapsed) for result in summary.collapsed)
    yield from (("failed", result, result.failure) for result in summary.failed)


def format_notes(summary: GridSummary) -> list[str]:
    """Return lines on collapsed runs, then on failed ones, each with rates and seeds.

    Collapsed runs finished with worthless predictions; there is a line per model, data set and
    reason. Failed runs have a line per model and data set, with the reason of the first one.
    Without such runs the list is empty.
    """
    groups: dict[tuple, list[tuple[Result, str]]] = defaultdict(list)
    # Failures differ in their step, so they are grouped without the reason.
    for kind, result, why in _iterate_unusable_runs(summary):
        groups[
            kind, result.model, summary.format_dataset(result), why if kind == "collapsed" else ""
        ].append((result, why))
    lines = []
    for (kind, model, place, _), runs in groups.items():
        run_list = ", ".join(
            dict.fromkeys(
                f"{format_learning_rate(run.learning_rate)} sd{run.seed}" for run, _ in runs
            )
        )
        lines.append(" ".join(f"{kind}: {model} {place}: {runs[0][1]}: {run_list}".split()))
    return lines


def format_summary(summary: GridSummary, suffix: str) -> str:
    """Return the summary as the text of a file.

    Args:
        suffix: Format, in lower case: ".json" (everything), ".csv" (only `rows`, averages
            included), or, for any other suffix, Markdown tables and notes.
    """
    if suffix == ".json":
        values: dict[str, list] = {
            "rows": [vars(row) for row in summary.rows],
            "rates": [],
            "collapsed": [],
            "failed": [],
        }
        for row in summary.rates:
            means = {format_learning_rate(rate): mean for rate, mean in row.means.items()}
            values["rates"].append(
                vars(row)
                | {"means": means, "spread": None if math.isnan(row.spread) else row.spread}
            )
        for kind, result, why in _iterate_unusable_runs(summary):
            names = ("model", "family", "dataset", "train_on", "learning_rate", "seed")
            values[kind].append({name: getattr(result, name) for name in names} | {"why": why})
        return json.dumps(values, indent=1) + "\n"
    if suffix == ".csv":
        return tables.format_csv(
            [SummaryRow.__dataclass_fields__, *(vars(row).values() for row in summary.rows)]
        )
    scores = []
    for row in summary.rows:
        names = [row.model, row.family, row.dataset, row.train_on, row.metric]
        numbers = [
            format_interval(row.mean, row.half),
            format_interval(row.baseline),
            _format_rate(row),
            row.runs,
        ]
        scores.append([*names, *numbers, row.collapsed])
    rates = []
    for row in summary.rates:
        means = ", ".join(
            f"{format_learning_rate(rate)}: {mean:.2f}" for rate, mean in row.means.items()
        )
        ends = [f"{row.spread:.2f}", f"{row.near_best} of {len(row.means)}"]
        rates.append([row.model, summary.format_dataset(row), means, *ends])
    score_names = [
        "model",
        "family",
        "data set",
        "trained on",
        "metric",
        "mean (half)",
        "baseline",
        "rate",
        "runs",
        "collapsed",
    ]
    rate_names = [
        "model",
        "data set",
        "mean by learning rate",
        "spread",
        "within a point of the best",
    ]
    notes = "\n".join(f"- {escape_markdown(line)}" for line in format_notes(summary))
    parts = [
        tables.format_markdown(score_names, (), scores),
        tables.format_markdown(rate_names, (), rates),
        notes,
    ]
    return "\n".join(parts).rstrip() + "\n"


@handle_command_errors
def summary_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune summary`: print the tables of a results directory.

    With --output they are written to a file too, in the format of its suffix .json, .csv or .md
    (see `format_summary`); an existing file is replaced. Wrong input exits with 2.

    Args:
        argv: Arguments after `megaenc finetune summary`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse(
        GridSummaryConfig, argv, prog="megaenc finetune summary", description=__doc__
    )
    output = Path(settings.output)
    if settings.output and output.suffix not in (".json", ".csv", ".md"):
        raise InputError(
            f"--output {output}: found the ending {output.suffix!r}, expected .json, .csv or .md"
        )
    if settings.output:
        check_output_file(output, "--output")
    with (
        create_parent_with_rollback(output, "--output")
        if settings.output
        else contextlib.nullcontext()
    ):
        results = read_result_tree(settings.results)
        if settings.output:
            refuse_input(output, "--output", [result.path for result in results])
        summary = build_summary(results, settings.metrics, settings.interval)
        if settings.output:
            atomic_write(output, format_summary(summary, output.suffix))
    # The width of the rate table; names longer than 16 letters are folded.
    width = max(_WIDTH, 42 + 6 * len(summary.learning_rates))
    tables.print_tables(build_tables(summary), width)
    for line in format_notes(summary):
        print_rank_0(line)
    if any(row.collapsed for row in summary.rows):
        print_rank_0(
            "! marks a mean over a collapsed run, "
            "whose predictions are worthless whatever its score"
        )
    if settings.metrics == "standard" and not any(
        run.test is not None and run.test.metrics for run in results
    ):
        print_rank_0("these files hold only the paper's scores; use --metrics paper")
    print_rank_0(
        f"{len(results) - len(summary.failed):,} results, {len(summary.failed):,} failed runs"
    )
    if settings.output:
        print_rank_0(f"written: {settings.output}")
