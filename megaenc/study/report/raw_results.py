"""Checks of raw results: missing runs, and the printed cells of the study that its own result files reproduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megaenc.finetune.config import LEARNING_RATES, format_learning_rate
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS, IncompleteRate, Interval, compute_interval
from megaenc.finetune.results.files import Result
from megaenc.study.report.table import Column, Table, TableRow, format_score
from megaenc.study.results.evidence import Evidence, GridStatus, Score
from megaenc.study.results.groups import dataset_label
from megaenc.study.results.published import is_study_result, published

MISSING, REPRODUCTION = "missing-results", "reproduction"
_LISTED = 3  # entries of a sentence; the table has all


def check_raw_results(evidence: Evidence, results: Sequence[Result]) -> tuple[list[Table], list[str]]:
    """Return the Tables of reproduced printed cells and of missing runs, and a text on each; without those that are empty."""
    cells = reproduce_printed_cells(evidence, results)
    tables = (build_reproduction_table(cells), build_missing_table(evidence))
    texts = (describe_reproduction(cells), describe_missing_results(evidence))
    return [table for table in tables if table is not None], [text for text in texts if text]


def _join_first(entries: Sequence[str]) -> str:
    """Return the first entries of a list, joined by semicolons, and the number of the others."""
    more = [f"and {len(entries) - _LISTED:,} more"] if len(entries) > _LISTED else []
    return "; ".join([*entries[:_LISTED], *more])


def _list_incomplete(evidence: Evidence) -> list[tuple[GridStatus, IncompleteRate]]:
    """Return each learning rate without results of some seeds, with the grid it belongs to."""
    return [(grid, one) for grid in evidence.grids for one in grid.incomplete_rates]


def _format_seeds(seeds: Sequence[int]) -> str:
    """Format seeds as `1, 2`."""
    return ", ".join(map(str, seeds))


def describe_missing_results(evidence: Evidence) -> str:
    """Return sentences on missing runs: number, first models with data set, rate and seeds, and effect; "" if none."""
    if not (incomplete := _list_incomplete(evidence)):
        return ""
    missing = sum(len(one.missing_seeds) for _, one in incomplete)
    entries = [
        f"{grid.model} {grid.family} {dataset_label(grid.family, grid.dataset)} at {format_learning_rate(one.rate)}: "
        f"seed{'s' * (len(one.missing_seeds) > 1)} {_format_seeds(one.missing_seeds)}"
        for grid, one in incomplete
    ]
    text = f"Missing: {missing:,} of {sum(grid.planned_runs for grid in evidence.grids):,} results: {_join_first(entries)}."
    better = sum(one.validation_lead is not None and one.validation_lead > 0 for _, one in incomplete)
    effect = f"; {better:,} of {len(incomplete):,} would validate better than the chosen one" if better else ""
    return f"{text} Rates that lack a seed cannot be chosen{effect} (table {MISSING})."


def build_missing_table(evidence: Evidence) -> Table | None:
    """Return the Table of missing runs by model, data set and learning rate; None if none is missing."""
    rows: list[TableRow] = []
    for grid, one in _list_incomplete(evidence):
        lead = None if one.validation_lead is None else f"{100 * one.validation_lead:+.2f}"
        place = (grid.model, grid.family, dataset_label(grid.family, grid.dataset))
        cells = (*place, format_learning_rate(one.rate), _format_seeds(one.missing_seeds), lead)
        rows.append(TableRow(cells, rule=bool(rows) and rows[-1].cells[0] != grid.model))
    columns = (
        *(Column(name, number=False) for name in ("Model", "Family", "Data set", "Rate", "Missing seeds")),
        Column("Validation"),
    )
    note = (
        "Runs without results.json and failed.json, of all rates and seeds that any model has on the data set. A rate that lacks "
        "a seed cannot be chosen. Validation: its mean validation score less that of the chosen rate, over the seeds that both "
        "have, in points; a positive one could have changed the choice."
    )
    return Table(MISSING, "Missing results", note, columns, tuple(rows), folded=True) if rows else None


@dataclass(frozen=True)
class ReproducedCell:
    """Printed cell of the study's tables and the score that its raw results give."""

    printed: Score
    recomputed: Score

    @property
    def place(self) -> tuple[str, str, str]:
        """Return the model's name, the family and the data set's label."""
        score = self.recomputed
        return score.model, score.family, dataset_label(score.family, score.dataset)

    @property
    def interval(self) -> Interval:
        """Return the recomputed mean and interval, always 1.96 standard errors as printed."""
        return compute_interval(list(self.recomputed.seed_scores.values()))

    @property
    def texts(self) -> tuple[str | None, str | None]:
        """Return the printed and the recomputed value as `91.65 (0.45)`."""
        return (
            format_score(self.printed.mean, self.printed.half_width),
            format_score(self.interval.mean, self.interval.half),
        )

    @property
    def difference(self) -> str:
        """Return the recomputed less the printed mean (interval) in points as `+0.10 (-0.02)`; "" if equal as printed."""
        printed, recomputed = self.texts
        pairs = [(self.interval.mean, self.printed.mean), (self.interval.half, self.printed.half_width)]
        parts = [f"{round(round(100 * own, 2) - 100 * other, 2) + 0.0:+.2f}" for own, other in pairs if not math.isnan(own)]
        return "" if printed == recomputed else parts[0] + "".join(f" ({part})" for part in parts[1:])


def reproduce_printed_cells(evidence: Evidence, results: Sequence[Result]) -> list[ReproducedCell]:
    """Return a ReproducedCell per score that rests on the study's own files only and that its tables have, in table order."""
    others = {(one.model, one.family, one.dataset) for one in results if not is_study_result(one)}
    cells = []
    for setting in evidence.model_keys():
        for family, dataset in evidence.datasets():
            score, printed = evidence.find(setting, dataset, family), published().find(setting, dataset, family)
            if score is None or printed is None:
                continue
            averaged = {one.dataset for one in score.members or printed.members}
            is_own = not any((one.model, one.family, one.dataset) in others for one in score.members or (score,))
            if is_own and (not averaged or averaged == set(STUDY_DATASETS[TaskFamily(family)])):
                cells.append(ReproducedCell(printed, score))
    return cells


def describe_reproduction(cells: Sequence[ReproducedCell]) -> str:
    """Return a sentence with the number of reproduced printed cells and the first that differ; "" without cells."""
    if not cells:
        return ""
    different = [one for one in cells if one.difference]
    entries = [f"{' '.join(one.place)} {one.texts[1]}, printed {one.texts[0]}" for one in different]
    differs = f"; differs: {_join_first(entries)} (table {REPRODUCTION})" if entries else ""
    return f"Reproduces {len(cells) - len(different):,} of {len(cells):,} printed cells{differs}."


def build_reproduction_table(cells: Sequence[ReproducedCell]) -> Table | None:
    """Return the Table of printed cells, recomputed values, chosen rates and differences; None without cells."""
    rows: list[TableRow] = []
    for one in cells:
        score, rates = one.recomputed, (None, None)
        if score.learning_rate is not None:
            complete = sum(seeds.keys() >= score.seed_scores.keys() for seeds in score.rate_scores.values())
            rates = (format_learning_rate(score.learning_rate), f"{complete}/{len(LEARNING_RATES)}")
        is_next_model = bool(rows) and rows[-1].cells[0] != score.model
        rows.append(TableRow((*one.place, *one.texts, *rates, one.difference or "equal"), rule=is_next_model))
    columns = (
        *(Column(name, number=False) for name in ("Model", "Family", "Data set")),
        *(Column(name) for name in ("Printed", "Recomputed", "Rate", "Rates", "Difference")),
    )
    note = (
        "Printed values of the study and the same from its own raw results: mean (half the interval) in percent. Rate: chosen on "
        f"validation. Rates: how many of the study's {len(LEARNING_RATES)} have every seed. Difference: recomputed less printed, "
        "in points; equal if both agree to the printed digit. Files with nothing but scores, of the study's model names, count "
        "as its own."
    )
    return Table(REPRODUCTION, "Printed cells from raw results", note, columns, tuple(rows), folded=True) if rows else None
