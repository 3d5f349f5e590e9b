"""Table and notice of the missing runs of a results directory without a manifest."""

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.results.aggregate import IncompleteRate
from megaenc.study.report.table import Column, Table, TableRow
from megaenc.study.results.evidence import Evidence, GridStatus
from megaenc.study.results.groups import dataset_label

MISSING = "missing-results"


def find_missing_results(evidence: Evidence) -> tuple[list[Table], list[str]]:
    """Return the table of missing fine-tuning runs and a sentence on their number.

    The grid of a data set is all learning rates and seeds that any model has on it, unless a
    manifest plans it; a run of it is missing if it neither finished nor failed. Models without any
    run on a data set are not considered there. Table and sentence are each in a list, which is
    empty if no run is missing.
    """
    incomplete = [(grid, rate) for grid in evidence.grids for rate in grid.incomplete_rates]
    if not incomplete:
        return [], []
    missing = sum(len(rate.missing_seeds) for _, rate in incomplete)
    planned = sum(grid.planned_runs for grid in evidence.grids)
    better = sum(
        rate.validation_lead is not None and rate.validation_lead > 0 for _, rate in incomplete
    )
    effect = ""
    if better:
        effect = f"; {better:,} of {len(incomplete):,} would validate better than the chosen one"
    notice = (
        f"Missing: {missing:,} of {planned:,} results. Rates that lack a seed cannot be "
        f"chosen{effect} (table {MISSING})."
    )
    return [_build_missing_table(incomplete)], [notice]


def _build_missing_table(incomplete: list[tuple[GridStatus, IncompleteRate]]) -> Table:
    rows: list[TableRow] = []
    for grid, rate in incomplete:
        lead = None if rate.validation_lead is None else f"{100 * rate.validation_lead:+.2f}"
        seeds = ", ".join(map(str, rate.missing_seeds))
        place = (grid.model, grid.family, dataset_label(grid.family, grid.dataset))
        is_next_model = bool(rows) and rows[-1].cells[0] != grid.model
        rows.append(
            TableRow((*place, format_learning_rate(rate.rate), seeds, lead), rule=is_next_model)
        )
    columns = (
        *(
            Column(name, numeric=False)
            for name in ("Model", "Family", "Data set", "Rate", "Missing seeds")
        ),
        Column("Validation"),
    )
    note = (
        "Runs without results.json and failed.json, of all rates and seeds that any model has on "
        "the data set. A rate that lacks a seed cannot be chosen. Validation: its mean validation "
        "score less that of the chosen rate, over the seeds that both have, in points; a positive "
        "one could have changed the choice."
    )
    return Table(MISSING, "Missing results", note, columns, tuple(rows), folded=True)
