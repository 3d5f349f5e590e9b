"""The tables of a report: scores as in the study's appendix, the effect of rates, collapses and seeds, all scores as one file."""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.results import aggregate
from megaenc.finetune.results.aggregate import RateSensitivity
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.methods import describe_intervals
from megaenc.study.report.table import CellValue, Column, Table, TableRow, format_csv, format_score
from megaenc.study.results.evidence import Evidence, GridStatus, Score, collapsed_by_training
from megaenc.study.results.groups import (
    FAMILY_LABELS,
    METRIC_LABELS,
    SETUP_TITLES,
    STANDARD_METRICS,
    Setup,
    dataset_label,
    datasets_by_family,
    format_percent,
    objective_name,
)
from megaenc.study.stats.inference import VarianceComponents, collapse_rate, required_seeds, variance_components

_TEXT_COLUMNS = ("Size", "Objective", "Schedule", "Model")
_MODEL_COLUMNS: dict[str, Callable[[ModelKey], CellValue]] = {
    "Size": lambda one: one.size,
    "Objective": objective_name,
    "Schedule": objective_name,
    "Mask": lambda one: format_percent(one.mask_ratio),
    "CLM steps": lambda one: one.clm_steps,
    "MLM steps": lambda one: one.mlm_steps,
    "CPT steps": lambda one: one.cpt_mlm_steps,
    "Step": lambda one: one.steps,
    "Steps": lambda one: one.steps,
    "Seed": lambda one: one.seed,
}
_SETUP_COLUMNS: dict[Setup, tuple[int, list[str]]] = {
    "base": (1, ["Size", "Objective", "Mask"]),
    "efficiency": (3, ["Size", "Objective", "Mask", "Step"]),
    "pfs": (2, ["Size", "Steps", "CLM steps", "MLM steps", "Mask"]),
    "cpt": (3, ["Size", "CLM steps", "MLM steps", "CPT steps", "Mask"]),
    "other": (1, ["Size", "Schedule", "Step", "CPT steps", "Mask"]),
}
"""What says which model a row is; rows with the same first so many of them stand together, a line between them and the next."""

ScoreColumn = tuple[str, Evidence, str, str]
"""A column of scores: the heading of its group, where the scores are from, the family and the data set."""

_COLLAPSED_RUNS = (
    "†k/n: of the n runs behind a cell, k have collapsed to worthless predictions (the same for every example, never an answer); "
    "where all have, mean and interval say nothing of the model."
)
_UNFINISHED = (
    "[k/n]: only k of n fine-tunings (rates times seeds) have ended, so the learning rate is the best of fewer: not to be "
    "compared with whole cells."
)


def _format_note(text: str, *marks: tuple[str, Iterable[bool]]) -> str:
    """Return a table's note, with what each mark means if it is there anywhere."""
    return " ".join([text, *(meaning for meaning, occurrences in marks if any(occurrences))])


def _list_score_columns(evidence: Evidence) -> list[ScoreColumn]:
    """Return a column for each data set, in a group for each family."""
    return [
        (family, evidence, family, name) for family, names in datasets_by_family(evidence.datasets()).items() for name in names
    ]


def _build_columns(places: Iterable[ScoreColumn]) -> list[Column]:
    return [Column(dataset_label(family, name), group) for group, _, family, name in places]


def build_score_tables(evidence: Evidence, published: Evidence | None = None) -> list[Table]:
    """Return a table for each setup, of the paper's score; below a row what was `published` for the same setting."""
    note = "Percent on test: mean over the seeds (half the interval)."
    return _build_setup_tables(evidence, _list_score_columns(evidence), "{}", "{}", note, published)


def build_standard_metric_tables(evidence: Evidence, standard: Sequence[Evidence]) -> list[Table]:
    """Return the same for the metrics that other papers print, where results have them. Published tables have none."""
    of_metric = {one.metric: one for one in standard}
    places = [
        (f"{family}, {METRIC_LABELS[metric]}", of_metric[metric], family, name)
        for family in FAMILY_LABELS
        for metric in STANDARD_METRICS[family]
        if metric in of_metric
        for name in datasets_by_family(of_metric[metric].datasets()).get(family, ())
    ]
    note = "Percent on test: mean over the seeds (half the interval), rates chosen by the paper's score."
    return _build_setup_tables(evidence, places, "{}-standard", "{}: standard metrics", note, None) if places else []


def _build_setup_tables(
    evidence: Evidence, places: Sequence[ScoreColumn], key: str, title: str, note: str, published: Evidence | None
) -> list[Table]:
    tables = []
    groups, names = evidence.group_by_setup(), evidence.model_names()
    unnamed = list(dict.fromkeys(one.model for one in evidence.scores if one.model_key is None))
    seed = ["Seed"] * (len({one.seed for one in names}) > 1)
    for setup, (together, of_setup) in _SETUP_COLUMNS.items():
        settings, others = groups.get(setup, []), unnamed if setup == "other" else []
        if not settings and not others:
            continue
        heads = ["Model"] * bool(others) + of_setup + seed
        has_published = published is not None and any(
            published.find(one, name, of) for one in settings for *_, of, name in places
        )
        ours, theirs = (["ours"], ["published"]) if has_published else ([], [])
        rows: list[TableRow] = []
        shown_scores: list[Score] = []
        before = None
        for one in [*settings, *others]:
            head, parted = [one, *[None] * (len(heads) - 1)], None
            if one in names:
                of_model = [_MODEL_COLUMNS[name](one) for name in of_setup + seed]
                head, parted = [names[one]] * bool(others) + of_model, of_model[:together]
            row_scores = [source.find(one, name, family) for _, source, family, name in places]
            shown_scores += [each for each in row_scores if each is not None]
            rule = None not in (before, parted) and parted != before
            rows.append(TableRow((*head, *ours, *map(_format_score_cell, row_scores)), rule=rule, name=names.get(one, "")))
            before = parted
            if has_published and one in names:
                printed = [_format_score_cell(published.find(one, name, family)) for *_, family, name in places]
                if any(printed):
                    rows.append(TableRow((*head, *theirs, *printed), light=True, name="published"))
        columns = [Column(name, number=name not in _TEXT_COLUMNS) for name in heads] + [
            Column("Source", number=False)
        ] * has_published
        full_note = _format_note(
            f"{note} Intervals: {describe_intervals(evidence, published if has_published else None)}.",
            (_COLLAPSED_RUNS, (one.collapsed_at_rate > 0 for one in shown_scores)),
            (_UNFINISHED, (one.ended_runs < one.planned_runs for one in shown_scores)),
        )
        tables.append(
            Table(
                key.format(setup), title.format(SETUP_TITLES[setup]), full_note, (*columns, *_build_columns(places)), tuple(rows)
            )
        )
    return tables


def _format_score_cell(score: Score | None) -> CellValue:
    """Return mean and interval, marked if worthless predictions are in the mean or if the grid is not done."""
    if score is None:
        return None
    run_count = sum(len(one.seed_scores) for one in score.members or (score,))
    collapsed = f" †{score.collapsed_at_rate}/{run_count}" if score.collapsed_at_rate else ""
    return f"{format_score(score.mean, score.half_width)}{collapsed}{_format_unfinished_mark(score)}"


def _format_unfinished_mark(score: Score) -> str:
    return f" [{score.ended_runs}/{score.planned_runs}]" if score.ended_runs < score.planned_runs else ""


CSV_COLUMNS = ("setup", "size", "clm_steps", "mlm_steps", "cpt_mlm_steps", "mask_ratio", "task", "dataset", "mean", "ci95")
"""The columns of the published file."""
_RUN_COLUMNS = (
    "model",
    "pretraining_seed",
    "finetuning_seeds",
    "metric",
    "collapsed_runs",
    "ended_trainings",
    "planned_trainings",
)


def format_scores_csv(evidence: Sequence[Evidence]) -> str:
    """Return all scores as CSV, a line each, in the columns of the published file and, behind them, of what model and runs.

    `collapsed_runs` are those at the chosen rate, `ended_trainings` of `planned_trainings` those of all rates.
    """
    lines: list[list[object]] = [[*CSV_COLUMNS, *_RUN_COLUMNS]]
    for each in evidence:
        setups: list[tuple[str, ModelKey | None]] = [(setup, one) for setup, of in each.group_by_setup().items() for one in of]
        for setup, setting in [*setups, ("other", None)]:
            scores = [one for one in each.scores if one.model_key == setting]
            for family, names in datasets_by_family((one.family, one.dataset) for one in scores).items():
                family_scores = sorted((one for one in scores if one.family == family), key=lambda one: names.index(one.dataset))
                lines += [_build_csv_row(setup, one, each.metric) for one in family_scores]
    return format_csv(lines)


def _build_csv_row(setup: str, one: Score, metric: str) -> list[object]:
    of, half = one.model_key, "" if one.half_width is None else f"{100 * one.half_width:.2f}"
    model, seed = [""] * 5, ""
    if of is not None:
        mask = "" if of.mask_ratio is None else f"{of.mask_ratio:g}"
        model, seed = [of.size, of.clm_steps, of.mlm_steps, of.cpt_mlm_steps, mask], of.seed
    runs = (one.collapsed_at_rate, one.ended_runs, one.planned_runs) if one.planned_runs else ("", "", "")
    numbers = [one.family, dataset_label(one.family, one.dataset), f"{100 * one.mean:.2f}", half]
    return [setup, *model, *numbers, one.model, seed, len(one.seed_scores) or "", metric, *runs]


def _list_model_names(evidence: Evidence) -> list[str]:
    """Return every model with a run once, in the order of the tables."""
    every = [*evidence.scores, *evidence.grids]
    names = {one.model_key: one.model for one in reversed(every) if one.model_key is not None}
    settings = [one for members in evidence.group_by_setup(names).values() for one in members]
    return list(dict.fromkeys([*(names[one] for one in settings), *(one.model for one in every if one.model_key is None)]))


def build_diagnostic_tables(evidence: Evidence) -> list[Table]:
    """Return those of the tables below that there are numbers for."""
    tables = (build_rate_table(evidence), build_collapse_table(evidence), build_variance_table(evidence))
    return [table for table in tables if table is not None]


def build_rate_table(evidence: Evidence) -> Table | None:
    """Return what the learning rate changes: best less worst mean, and how many are near the best. None if no model had two."""

    def cell(score: Score) -> CellValue:
        if (sensitivity := rate_sensitivity(score)) is None:
            return f"({len(score.failed_seeds)} failed)" if score.failed_seeds else None
        rates = sensitivity.means.keys() | score.failed_seeds.keys()
        failed = f", {len(score.failed_seeds)} failed" if score.failed_seeds else ""
        collapsed = f" †{score.collapsed_runs}/{score.ended_runs}" if score.collapsed_runs else ""
        return f"{100 * sensitivity.spread:.2f} ({sensitivity.count_near_best()}/{len(rates)}{failed}){collapsed}{_format_unfinished_mark(score)}"

    failed = (
        "`failed`: at so many of the rates the loss of a run became no number; such a run counts as the score that needs no "
        "model (majority class, never an answer) where results say that, else its rate is in no spread."
    )
    collapsed = (
        "†k/n: k of the n trainings at all rates collapsed to worthless predictions or failed; what always collapses looks as if "
        "no rate mattered."
    )
    note = _format_note(
        "Best less worst mean score over the learning rates, in points (how many of the rates are within one point of the best). "
        "An average takes one rate for all its sets.",
        (failed, (bool(one.failed_seeds) for one in evidence.scores)),
        (collapsed, (one.collapsed_runs > 0 for one in evidence.scores)),
        (_UNFINISHED, (one.ended_runs < one.planned_runs for one in evidence.scores)),
    )
    places = _list_score_columns(evidence)
    cell_by_place = {(one.model, one.family, one.dataset): cell(one) for one in evidence.scores}
    cells_by_model = {
        model: [cell_by_place.get((model, family, name)) for *_, family, name in places] for model in _list_model_names(evidence)
    }
    rows = tuple(
        TableRow((model, *cells)) for model, cells in cells_by_model.items() if any(value is not None for value in cells)
    )
    columns = (Column("Model", number=False), *_build_columns(places))
    return Table("learning-rates", "Sensitivity to the learning rate", note, columns, rows) if rows else None


def rate_sensitivity(score: Score) -> RateSensitivity | None:
    """Return the mean at each rate that has every seed, failed runs at the floor; None for fewer than two rates."""
    sensitivity = aggregate.compute_sensitivity(score.rate_scores_with_failures, score.seed_scores)
    return sensitivity if sensitivity is not None and len(sensitivity.means) > 1 else None


def build_collapse_table(evidence: Evidence) -> Table | None:
    """Return how many runs collapsed, by data set and by rate, of every model with a run. None if only means are known."""
    if not evidence.grids:
        return None
    sets = datasets_by_family((one.family, one.dataset) for one in evidence.grids)
    places = [(family, name) for family, names in sets.items() for name in names]
    rates = sorted({rate for one in evidence.grids for rate, _ in one.collapsed_by_run})

    def share(ended: Iterable[bool]) -> CellValue:
        ended = list(ended)
        return f"{sum(ended)}/{len(ended)}" if ended else None

    def row(name: str, of: Sequence[GridStatus], rule: bool = False) -> TableRow:
        by_place = [[one for one in of if (one.family, one.dataset) == place] for place in places]
        cells = [share(collapsed for one in place_grids for collapsed in one.collapsed_by_run.values()) for place_grids in by_place]
        ended = collapsed_by_training(((one.model, one.family, one.train_on), one.collapsed_by_run) for one in of)
        cells += [share(collapsed for (_, at, _), collapsed in ended.items() if at == rate) for rate in rates]
        mean, low, high = collapse_rate(sum(ended.values()), len(ended))
        interval = f"{100 * mean:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        return TableRow((name, *cells, share(ended.values()), interval), rule=rule)

    rows = [row(model, [one for one in evidence.grids if one.model == model]) for model in _list_model_names(evidence)]
    if len(rows) > 1:
        rows.append(row("all models", evidence.grids, rule=True))
    columns = (
        Column("Model", number=False),
        *(Column(dataset_label(family, name), family) for family, name in places),
        *(Column(format_learning_rate(rate), "By learning rate") for rate in rates),
        *(Column(name, "All") for name in ("collapsed", "share")),
    )
    note = (
        "Runs whose predictions are worthless (the same for every example, never an answer) or whose loss became no number, of "
        "all that have ended, at any rate. By learning rate and under All a training counts once, on however many sets it was "
        "evaluated. The share has Wilson's 95 % interval, which takes trainings for independent; collapses go by rate, so it is "
        "narrower than it should be."
    )
    return Table("collapse", "Collapsed runs", note, columns, tuple(rows))


TARGET_DIFFERENCES = (0.002, 0.005, 0.01, 0.02)
"""Differences, as fractions, that the table of seeds asks about."""


def build_variance_table(evidence: Evidence) -> Table | None:
    """Return where the uncertainty comes from, by data set, and the seeds that a difference needs. None without seeds.

    Spreads are root mean squares over the models, seeds needed are for the difference of two neighbours of the tables, which have
    seeds and examples in common.
    """
    rows = []
    order = {model: at for at, model in enumerate(_list_model_names(evidence))}
    for family, names in datasets_by_family(evidence.datasets()).items():
        for name in names:
            scores = [one for one in evidence.scores if (one.family, one.dataset) == (family, name) and len(one.seed_scores) > 1]
            members = sorted(scores, key=lambda one: order[one.model])
            if not members:
                continue
            parts = [_score_variance_components(sorted(one.seed_scores), one) for one in members]
            runs = [len(one.seed_scores) * part.seed_variance for one, part in zip(members, parts, strict=True)]
            spreads = (runs, [part.seed_variance for part in parts], [part.example_variance for part in parts])
            head = (family, dataset_label(family, name), len(members), max(len(one.seed_scores) for one in members))
            cells = [format_score(math.sqrt(_finite_mean(variances))) for variances in spreads]
            rows.append(TableRow((*head, *cells, *_format_required_seeds(members)), rule=name == names[0]))
    columns = (
        *(Column(name, number=False) for name in ("Family", "Data set")),
        *(Column(name) for name in ("Models", "Seeds")),
        *(Column(name, "Standard deviation") for name in ("of a run", "of a mean: seeds", "of a mean: examples")),
        *(Column(f"{100 * difference:g}", "Seeds for a difference of") for difference in TARGET_DIFFERENCES),
    )
    note = (
        "Points; root mean squares over the models. Standard deviations: of a run's score over the seeds; of a mean, as other "
        "fine-tuning seeds would move it, and as other test examples of the same kind would. Seeds for a difference of so many "
        "points: with them a true difference of two models that share seeds and examples is seen in four of five studies; never: "
        "no number of seeds makes up for so few examples. Few seeds say little of their own spread: take these as orders of size."
    )
    return Table("variance", "Seeds and examples: where uncertainty comes from", note, columns, tuple(rows)) if rows else None


def _finite_mean(values: Sequence[float]) -> float:
    """Return the mean of those that are known; nan for none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _score_variance_components(seeds: Sequence[int], *scores: Score) -> VarianceComponents:
    """Return those of a mean over `seeds`, or of the difference of two; without examples if some set has none or other ones."""
    values = (np.array([one.seed_scores[seed] for seed in seeds]) for one in scores)
    members = [one.members or (one,) for one in scores]
    blocks = [[member.stack_examples(seeds) for member in each] for each in members]
    shapes = {tuple(None if block is None else block.shape for block in each) for each in blocks}
    paired = []
    if len(shapes) == 1 and None not in next(iter(shapes)):
        paired = [functools.reduce(operator.sub, each) / len(members[0]) for each in zip(*blocks, strict=True)]
    return variance_components(functools.reduce(operator.sub, values), paired)


def _format_required_seeds(members: Sequence[Score]) -> list[CellValue]:
    """Return cells of WANTED from the mean components of the differences of neighbours that have seeds in common."""
    parts_by_seed_count: dict[int, list[VarianceComponents]] = defaultdict(list)
    for one, other in itertools.pairwise(members):
        seeds = sorted(one.seed_scores.keys() & other.seed_scores.keys())
        if len(seeds) > 1:
            parts_by_seed_count[len(seeds)].append(_score_variance_components(seeds, one, other))
    if not parts_by_seed_count:
        return [None] * len(TARGET_DIFFERENCES)
    parts = parts_by_seed_count[max(parts_by_seed_count)]
    mean = VarianceComponents(_finite_mean([part.seed_variance for part in parts]), _finite_mean([part.example_variance for part in parts]))
    needed = [required_seeds(difference, mean, max(parts_by_seed_count)) for difference in TARGET_DIFFERENCES]
    return ["never" if seeds is None else seeds for seeds in needed]
