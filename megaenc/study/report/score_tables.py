"""Tables of the report on scores and the runs behind them, and scores as CSV."""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results import aggregate
from megaenc.finetune.results.aggregate import RateSensitivity
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.methods import describe_intervals
from megaenc.study.report.table import CellValue, Column, Table, TableRow, format_score
from megaenc.study.results.evidence import Evidence, GridStatus, Score, collapsed_by_training
from megaenc.study.results.groups import (
    METRIC_LABELS,
    SETUP_TITLES,
    STANDARD_METRICS,
    Setup,
    dataset_label,
    datasets_by_family,
    format_percent,
    objective_name,
)
from megaenc.study.stats.inference import (
    VarianceComponents,
    collapse_rate,
    required_seeds,
    variance_components,
)
from megaenc.tables import format_csv

_TEXT_COLUMNS = ("Size", "Objective", "Schedule", "Model")
_MODEL_COLUMNS: dict[str, Callable[[ModelKey], CellValue]] = {
    "Size": lambda key: key.size,
    "Objective": objective_name,
    "Schedule": objective_name,
    "Mask": lambda key: format_percent(key.mask_ratio),
    "CLM steps": lambda key: key.clm_steps,
    "MLM steps": lambda key: key.mlm_steps,
    "CPT steps": lambda key: key.cpt_mlm_steps,
    "Step": lambda key: key.steps,
    "Steps": lambda key: key.steps,
    "Seed": lambda key: key.seed,
}
_SETUP_COLUMNS: dict[Setup, tuple[int, list[str]]] = {
    "base": (1, ["Size", "Objective", "Mask"]),
    "efficiency": (3, ["Size", "Objective", "Mask", "Step"]),
    "pfs": (2, ["Size", "Steps", "CLM steps", "MLM steps", "Mask"]),
    "cpt": (3, ["Size", "CLM steps", "MLM steps", "CPT steps", "Mask"]),
    "other": (1, ["Size", "Schedule", "Step", "CPT steps", "Mask"]),
}
"""Columns that identify the model of a row, by setup; a line separates rows that differ in the
first so many of them."""

ScoreColumn = tuple[str, Evidence, str, str]
"""Column of scores: (group heading, evidence, task family, data set)."""

_COLLAPSED_RUNS = (
    "†k/n: k of the n runs of a cell have collapsed to worthless predictions (the same for every "
    "example, never an answer); if all have, the cell says nothing about the model."
)
_UNFINISHED = (
    "[k/n]: only k of n fine-tuning runs (rates times seeds) have ended, so the learning rate was "
    "chosen from fewer; not comparable with complete cells."
)


def _format_note(text: str, *marks: tuple[str, Iterable[bool]]) -> str:
    """Return a table's note with the meaning of each mark that occurs.

    Args:
        marks: Meaning and occurrences of each mark.
    """
    return " ".join([text, *(meaning for meaning, occurrences in marks if any(occurrences))])


def _list_score_columns(evidence: Evidence) -> list[ScoreColumn]:
    """Return a score column for each data set, grouped by family."""
    return [
        (family, evidence, family, name)
        for family, names in datasets_by_family(evidence.datasets()).items()
        for name in names
    ]


def _build_columns(places: Iterable[ScoreColumn]) -> list[Column]:
    return [Column(dataset_label(family, name), group) for group, _, family, name in places]


def build_score_tables(evidence: Evidence, published: Evidence | None = None) -> list[Table]:
    """Build a table of the study's score for each kind of pretraining that has models.

    Kinds and rows are those of `group_by_setup`; models without a key are last under "other". A row
    is a model, a column a data set or average. Cells are mean and half the 95 % interval in
    percent, with marks for collapsed and missing runs, which the table's note explains.

    Args:
        published: Published scores, in a row below that of the same model; None for none.
    """
    note = "Percent on test: mean over the seeds (half the interval)."
    return _build_setup_tables(evidence, _list_score_columns(evidence), "{}", "{}", note, published)


def build_standard_metric_tables(evidence: Evidence, standard: Sequence[Evidence]) -> list[Table]:
    """Build a table of standard metrics for each kind of pretraining.

    Kinds are those of `group_by_setup`. A row is a model, a column a data set in one metric, with
    cells as of `build_score_tables`. The page shows these tables folded.

    Args:
        evidence: Scores whose models and their order the tables have.
        standard: Scores of the same results, one Evidence per metric; those of a family in
            STANDARD_METRICS in other metrics are ignored. If none is left, the list is empty.
    """
    by_metric = {metric_evidence.metric: metric_evidence for metric_evidence in standard}
    places = [
        (f"{family}, {METRIC_LABELS.get(metric, metric)}", by_metric[metric], str(family), name)
        for family in TaskFamily
        for metric in STANDARD_METRICS.get(family, by_metric)
        if metric in by_metric
        for name in datasets_by_family(by_metric[metric].datasets()).get(family, ())
    ]
    note = (
        "Percent on test: mean over the seeds (half the interval), rates chosen by the paper's "
        "score."
    )
    if not places:
        return []
    tables = _build_setup_tables(
        evidence, places, "{}-standard", "{}: standard metrics", note, None
    )
    return [replace(table, folded=True) for table in tables]


def _build_setup_tables(
    evidence: Evidence,
    places: Sequence[ScoreColumn],
    key: str,
    title: str,
    note: str,
    published: Evidence | None,
) -> list[Table]:
    """Build a table of the score columns `places` for each kind of pretraining.

    Args:
        key: Template of the key, filled with the kind of pretraining.
        title: Template of the title, filled with that of the kind.
    """
    tables = []
    groups = evidence.group_by_setup()
    names = evidence.model_names()
    unnamed = list(
        dict.fromkeys(score.model for score in evidence.scores if score.model_key is None)
    )
    seed = ["Seed"] * (len({model_key.seed for model_key in names}) > 1)
    for setup, (together, setup_columns) in _SETUP_COLUMNS.items():
        model_keys = groups.get(setup, [])
        others = unnamed if setup == "other" else []
        if not model_keys and not others:
            continue
        heads = ["Model"] * bool(others) + setup_columns + seed
        has_published = published is not None and any(
            published.find(model_key, name, family)
            for model_key in model_keys
            for *_, family, name in places
        )
        study_source = ["ours"] * has_published
        published_source = ["published"] * has_published
        rows: list[TableRow] = []
        shown_scores: list[Score] = []
        previous = None
        for model in [*model_keys, *others]:
            head = [model, *[None] * (len(heads) - 1)]
            group = None
            if model in names:
                values = [_MODEL_COLUMNS[name](model) for name in setup_columns + seed]
                head = [names[model]] * bool(others) + values
                group = values[:together]
            row_scores = [source.find(model, name, family) for _, source, family, name in places]
            shown_scores += [score for score in row_scores if score is not None]
            rule = None not in (previous, group) and group != previous
            rows.append(
                TableRow(
                    (*head, *study_source, *map(_format_score_cell, row_scores)),
                    rule=rule,
                    name=names.get(model, ""),
                )
            )
            previous = group
            if has_published and model in names:
                published_cells = [
                    _format_score_cell(published.find(model, name, family))
                    for *_, family, name in places
                ]
                if any(published_cells):
                    rows.append(
                        TableRow(
                            (*head, *published_source, *published_cells),
                            light=True,
                            name="published",
                        )
                    )
        columns = [Column(name, numeric=name not in _TEXT_COLUMNS) for name in heads] + [
            Column("Source", numeric=False)
        ] * has_published
        full_note = _format_note(
            f"{note} Intervals: "
            f"{describe_intervals(evidence, published if has_published else None)}.",
            (_COLLAPSED_RUNS, (score.collapsed_at_rate > 0 for score in shown_scores)),
            (_UNFINISHED, (score.ended_runs < score.planned_runs for score in shown_scores)),
        )
        tables.append(
            Table(
                key.format(setup),
                title.format(SETUP_TITLES[setup]),
                full_note,
                (*columns, *_build_columns(places)),
                tuple(rows),
            )
        )
    return tables


def _format_score_cell(score: Score | None) -> CellValue:
    """Format mean and interval with marks; None without a score.

    Marks are for collapsed runs and for an incomplete grid.
    """
    if score is None:
        return None
    run_count = sum(len(member.seed_scores) for member in score.members or (score,))
    collapsed = f" †{score.collapsed_at_rate}/{run_count}" if score.collapsed_at_rate else ""
    return (
        f"{format_score(score.mean, score.half_width)}{collapsed}{_format_unfinished_mark(score)}"
    )


def _format_unfinished_mark(score: Score) -> str:
    """Return the mark [k/n] if only k of n planned runs have ended, else empty text."""
    if score.ended_runs < score.planned_runs:
        return f" [{score.ended_runs}/{score.planned_runs}]"
    return ""


CSV_COLUMNS = (
    "setup",
    "size",
    "clm_steps",
    "mlm_steps",
    "cpt_mlm_steps",
    "mask_ratio",
    "task",
    "dataset",
    "mean",
    "ci95",
)
"""Columns of the published file."""
_MODEL_AND_SEEDS = ("model", "pretraining_seed", "finetuning_seeds", "metric")
_RUN_COLUMNS = (*_MODEL_AND_SEEDS, "collapsed_runs", "ended_trainings", "planned_trainings")


def format_scores_csv(evidence: Sequence[Evidence]) -> str:
    """Return CSV text with a header, and a line per score and kind of pretraining.

    A model may have several kinds; without a key it has "other". Columns are CSV_COLUMNS, then
    model, pretraining_seed, finetuning_seeds (their number), metric and numbers of runs:
    `collapsed_runs` at the chosen rate, `ended_trainings` and `planned_trainings` at all rates.
    `mean` and `ci95` (half the 95 % interval) are percent with two decimals. Averages are included.
    Unknown values are empty.

    Args:
        evidence: Scores, one Evidence per metric.
    """
    lines: list[list[object]] = [[*CSV_COLUMNS, *_RUN_COLUMNS]]
    for metric_evidence in evidence:
        setups: list[tuple[str, ModelKey | None]] = [
            (setup, model_key)
            for setup, model_keys in metric_evidence.group_by_setup().items()
            for model_key in model_keys
        ]
        for setup, model_key in [*setups, ("other", None)]:
            scores = [score for score in metric_evidence.scores if score.model_key == model_key]
            for family, names in datasets_by_family(
                (score.family, score.dataset) for score in scores
            ).items():
                family_scores = sorted(
                    (score for score in scores if score.family == family),
                    key=lambda score: names.index(score.dataset),
                )
                lines += [
                    _build_csv_row(setup, score, metric_evidence.metric) for score in family_scores
                ]
    return format_csv(lines)


def _build_csv_row(setup: str, score: Score, metric: str) -> list[object]:
    key = score.model_key
    half = "" if score.half_width is None else f"{100 * score.half_width:.2f}"
    model = [""] * 5
    seed = ""
    if key is not None:
        mask = "" if key.mask_ratio is None else f"{key.mask_ratio:g}"
        model = [key.size, key.clm_steps, key.mlm_steps, key.cpt_mlm_steps, mask]
        seed = key.seed
    runs = (
        (score.collapsed_at_rate, score.ended_runs, score.planned_runs)
        if score.planned_runs
        else ("", "", "")
    )
    numbers = [
        score.family,
        dataset_label(score.family, score.dataset),
        f"{100 * score.mean:.2f}",
        half,
    ]
    return [setup, *model, *numbers, score.model, seed, len(score.seed_scores) or "", metric, *runs]


def _list_model_names(evidence: Evidence) -> list[str]:
    """Return the distinct names of all models with a run, in the row order of tables."""
    entries = [*evidence.scores, *evidence.grids]
    names = {
        entry.model_key: entry.model for entry in reversed(entries) if entry.model_key is not None
    }
    keys = [key for members in evidence.group_by_setup(names).values() for key in members]
    return list(
        dict.fromkeys(
            [
                *(names[key] for key in keys),
                *(entry.model for entry in entries if entry.model_key is None),
            ]
        )
    )


def build_diagnostic_tables(evidence: Evidence) -> list[Table]:
    """Build the tables of rate sensitivity, collapsed runs and variance.

    Tables that the results do not allow are left out.

    Raises:
        InputError: A result file, read for the variance, has become missing or invalid.
    """
    tables = (
        build_rate_table(evidence),
        build_collapse_table(evidence),
        build_variance_table(evidence),
    )
    return [table for table in tables if table is not None]


def build_rate_table(evidence: Evidence) -> Table | None:
    """Build the table of best less worst mean score over the learning rates.

    Cells are in points, by model and data set or average, with the number of rates within one point
    of the best, and marks for failed, collapsed and missing runs, which the table's note explains.

    Returns:
        The table; None if no model has a failed run or two rates with every seed.
    """

    def format_cell(score: Score) -> CellValue:
        """Format spread, number of near-best rates, and marks of a score."""
        sensitivity = rate_sensitivity(score)
        if sensitivity is None:
            return f"({len(score.failed_seeds)} failed)" if score.failed_seeds else None
        rates = sensitivity.means.keys() | score.failed_seeds.keys()
        failed = f", {len(score.failed_seeds)} failed" if score.failed_seeds else ""
        collapsed = f" †{score.collapsed_runs}/{score.ended_runs}" if score.collapsed_runs else ""
        near_best = f"{sensitivity.count_near_best()}/{len(rates)}{failed}"
        return (
            f"{100 * sensitivity.spread:.2f} "
            f"({near_best}){collapsed}{_format_unfinished_mark(score)}"
        )

    failed = (
        "`failed`: number of rates at which the loss of a run became NaN; such a run counts as "
        "the trivial baseline (majority class, never an answer) if the results contain it, else "
        "its rate is left out."
    )
    collapsed = (
        "†k/n: k of the n runs at all rates collapsed to worthless predictions or failed; if all "
        "collapse, the spread is small too."
    )
    note = _format_note(
        "Best less worst mean score over the learning rates, in points (number of rates within "
        "one point of the best). An average uses one rate for all its data sets.",
        (failed, (bool(score.failed_seeds) for score in evidence.scores)),
        (collapsed, (score.collapsed_runs > 0 for score in evidence.scores)),
        (_UNFINISHED, (score.ended_runs < score.planned_runs for score in evidence.scores)),
    )
    places = _list_score_columns(evidence)
    cell_by_place = {
        (score.model, score.family, score.dataset): format_cell(score) for score in evidence.scores
    }
    cells_by_model = {
        model: [cell_by_place.get((model, family, name)) for *_, family, name in places]
        for model in _list_model_names(evidence)
    }
    rows = tuple(
        TableRow((model, *cells))
        for model, cells in cells_by_model.items()
        if any(value is not None for value in cells)
    )
    if not rows:
        return None
    columns = (Column("Model", numeric=False), *_build_columns(places))
    return Table("learning-rates", "Sensitivity to the learning rate", note, columns, rows)


def rate_sensitivity(score: Score) -> RateSensitivity | None:
    """Return the RateSensitivity of a score: its mean over the seeds by rate.

    Means are fractions, at complete rates only: those with every seed of the chosen rate. Failed
    runs count as the trivial baseline; if that is unknown, their rate is not complete.

    Returns:
        The sensitivity; None below two complete rates, as for published scores.
    """
    sensitivity = aggregate.compute_sensitivity(score.rate_scores_with_failures, score.seed_scores)
    return sensitivity if sensitivity is not None and len(sensitivity.means) > 1 else None


def build_collapse_table(evidence: Evidence) -> Table | None:
    """Build the table of collapsed or failed runs of each model, as k/n of ended ones.

    A collapsed run gives worthless predictions, such as the same for every example; a failed one
    has a NaN loss. There are columns by data set, by learning rate and for all runs; in the latter
    two, a run counts once for all data sets that it was evaluated on.

    Returns:
        The table; None without runs.
    """
    if not evidence.grids:
        return None
    sets = datasets_by_family((grid.family, grid.dataset) for grid in evidence.grids)
    places = [(family, name) for family, names in sets.items() for name in names]
    rates = sorted({rate for grid in evidence.grids for rate, _ in grid.collapsed_by_run})

    def format_collapsed(collapsed: Iterable[bool]) -> CellValue:
        """Format the fraction of collapsed runs as k/n; None without runs."""
        collapsed = list(collapsed)
        return f"{sum(collapsed)}/{len(collapsed)}" if collapsed else None

    def build_row(name: str, grids: Sequence[GridStatus], rule: bool = False) -> TableRow:
        """Build the row of one model, or of all, from its grids."""
        by_place = [
            [grid for grid in grids if (grid.family, grid.dataset) == place] for place in places
        ]
        cells = [
            format_collapsed(
                collapsed for grid in place_grids for collapsed in grid.collapsed_by_run.values()
            )
            for place_grids in by_place
        ]
        ended = collapsed_by_training(
            ((grid.model, grid.family, grid.train_on), grid.collapsed_by_run) for grid in grids
        )
        cells += [
            format_collapsed(
                collapsed for (_, run_rate, _), collapsed in ended.items() if run_rate == rate
            )
            for rate in rates
        ]
        mean, low, high = collapse_rate(sum(ended.values()), len(ended))
        interval = f"{100 * mean:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        return TableRow((name, *cells, format_collapsed(ended.values()), interval), rule=rule)

    rows = [
        build_row(model, [grid for grid in evidence.grids if grid.model == model])
        for model in _list_model_names(evidence)
    ]
    if len(rows) > 1:
        rows.append(build_row("all models", evidence.grids, rule=True))
    columns = (
        Column("Model", numeric=False),
        *(Column(dataset_label(family, name), family) for family, name in places),
        *(Column(format_learning_rate(rate), "By learning rate") for rate in rates),
        *(Column(name, "All") for name in ("collapsed", "share")),
    )
    note = (
        "Runs with worthless predictions (the same for every example, never an answer) or a NaN "
        "loss, of all ended runs at any rate. By learning rate and under All, a run counts once "
        "for all data sets that it was evaluated on. The share has Wilson's 95 % interval, which "
        "assumes independent runs; collapses depend on the rate, so it is narrower than it should "
        "be."
    )
    return Table("collapse", "Collapsed runs", note, columns, tuple(rows))


TARGET_DIFFERENCES = (0.002, 0.005, 0.01, 0.02)
"""Differences, as fractions, for which the variance table gives the required seeds."""


def build_variance_table(evidence: Evidence) -> Table | None:
    """Build the table of standard deviations due to seeds and examples, in points.

    A row is for a data set or average, with root mean squares over the models, and the number of
    seeds required to find a true difference between two models in four of five studies. The number
    is estimated from neighbouring rows of the other tables, with the same seeds and examples.

    Returns:
        The table; None if no score has several seeds.

    Raises:
        InputError: A result file, read for the scores of examples, has become missing or invalid.
    """
    rows = []
    order = {model: index for index, model in enumerate(_list_model_names(evidence))}
    for family, names in datasets_by_family(evidence.datasets()).items():
        for name in names:
            scores = [
                score
                for score in evidence.scores
                if (score.family, score.dataset) == (family, name) and len(score.seed_scores) > 1
            ]
            members = sorted(scores, key=lambda score: order[score.model])
            if not members:
                continue
            parts = [
                _score_variance_components(sorted(score.seed_scores), score) for score in members
            ]
            runs = [
                len(score.seed_scores) * part.seed_variance
                for score, part in zip(members, parts, strict=True)
            ]
            spreads = (
                runs,
                [part.seed_variance for part in parts],
                [part.example_variance for part in parts],
            )
            head = (
                family,
                dataset_label(family, name),
                len(members),
                max(len(score.seed_scores) for score in members),
            )
            cells = [format_score(math.sqrt(_finite_mean(variances))) for variances in spreads]
            rows.append(
                TableRow((*head, *cells, *_format_required_seeds(members)), rule=name == names[0])
            )
    columns = (
        *(Column(name, numeric=False) for name in ("Family", "Data set")),
        *(Column(name) for name in ("Models", "Seeds")),
        *(
            Column(name, "Standard deviation")
            for name in ("of a run", "of a mean: seeds", "of a mean: examples")
        ),
        *(
            Column(f"{100 * difference:g}", "Seeds for a difference of")
            for difference in TARGET_DIFFERENCES
        ),
    )
    note = (
        "In points; root mean squares over the models. Standard deviations of a run's score over "
        "the seeds, and of a mean due to the choice of fine-tuning seeds and of test examples. "
        "Seeds for a difference: number of seeds with which a true difference of so many points "
        "between two models that share seeds and examples is found in four of five studies; "
        "never: more than 10,000 seeds, or any number, as the test examples are too few. Estimates "
        "from few seeds are rough, and without scores of examples leave their choice out."
    )
    return (
        Table(
            "variance",
            "Seeds and examples: where uncertainty comes from",
            note,
            columns,
            tuple(rows),
        )
        if rows
        else None
    )


def _finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _score_variance_components(seeds: Sequence[int], *scores: Score) -> VarianceComponents:
    """Return the variance components of the mean over `seeds` of one or two scores.

    Of two scores they are those of the difference. The part of the examples is missing if example
    scores are missing or differ in number.
    """
    values = (np.array([score.seed_scores[seed] for seed in seeds]) for score in scores)
    members = [score.members or (score,) for score in scores]
    blocks = [
        [member.stack_examples(seeds) for member in score_members] for score_members in members
    ]
    shapes = {
        tuple(None if block is None else block.shape for block in score_blocks)
        for score_blocks in blocks
    }
    paired = []
    if len(shapes) == 1 and None not in next(iter(shapes)):
        paired = [
            functools.reduce(operator.sub, dataset_blocks) / len(members[0])
            for dataset_blocks in zip(*blocks, strict=True)
        ]
    return variance_components(functools.reduce(operator.sub, values), paired)


def _format_required_seeds(members: Sequence[Score]) -> list[CellValue]:
    """Return the required seeds for TARGET_DIFFERENCES.

    They are from the mean variance components of the differences between neighbouring scores.
    """
    parts_by_seed_count: dict[int, list[VarianceComponents]] = defaultdict(list)
    for score, next_score in itertools.pairwise(members):
        seeds = sorted(score.seed_scores.keys() & next_score.seed_scores.keys())
        if len(seeds) > 1:
            parts_by_seed_count[len(seeds)].append(
                _score_variance_components(seeds, score, next_score)
            )
    if not parts_by_seed_count:
        return [None] * len(TARGET_DIFFERENCES)
    parts = parts_by_seed_count[max(parts_by_seed_count)]
    mean = VarianceComponents(
        _finite_mean([part.seed_variance for part in parts]),
        _finite_mean([part.example_variance for part in parts]),
    )
    needed = [
        required_seeds(difference, mean, max(parts_by_seed_count))
        for difference in TARGET_DIFFERENCES
    ]
    return ["never" if seeds is None else seeds for seeds in needed]
