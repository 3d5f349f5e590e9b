"""The numbers of a summary: means and intervals at the chosen rates, averages of families, what each learning rate gives."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import (
    Cell,
    Kind,
    Read,
    average,
    averaged,
    by_rate,
    cells,
    interval,
    scores,
    sensitivity,
    trained_apart,
)
from megaenc.finetune.results import Result

PAPER = "paper's"


@dataclass(frozen=True)
class Row:
    """A number of a table: a metric of a model on a data set, or on the average of a family, in percent."""

    model: str
    family: str
    dataset: str
    train_on: str
    """What was trained on; empty in averages over sets with a training each."""
    metric: str
    learning_rate: float | None
    """None in averages, where each data set has its own, and where none can be chosen."""
    mean: float | None
    """None where the grid has not got so far."""
    half: float | None
    """None for a single seed too."""
    baseline: float | None
    """What this metric is without any model: majority class, a word's usual tag, never answering, a random ranking. None where
    the results do not say."""
    seeds: int
    runs: str
    """Finished of those that there are or should be, `30/30`."""
    collapsed: str
    """What the runs of the chosen rate have in common that makes their mean worthless, and how many do."""


@dataclass(frozen=True)
class RateRow:
    """How the paper's score of a model on a data set depends on the learning rate, in percent."""

    model: str
    family: str
    dataset: str
    train_on: str
    chosen: float | None
    means: dict[float, float]
    spread: float
    near_best: int
    """How many rates are within one point of the best."""
    incomplete: tuple[float, ...]
    """Rates without a result of every seed; they cannot be chosen."""


@dataclass(frozen=True)
class Summary:
    """Everything that is printed."""

    rows: list[Row]
    rates: list[RateRow]
    collapsed: list[Result]
    failed: list[Result]
    apart: set[tuple[str, str]]
    """Models and families with a set that was evaluated after several trainings."""

    def place(self, of: Row | RateRow | Result) -> str:
        """The data set, with what was trained on where that tells rows apart."""
        return f"{of.dataset} after {of.train_on}" if (of.model, of.family) in self.apart and of.train_on else of.dataset


def summarise(results: Sequence[Result], metrics: str = "both", kind: Kind = "normal") -> Summary:
    """Make the tables of a tree: families in the study's order, models and data sets in the order of their names."""
    order = list(Family)
    found = sorted(cells(results), key=lambda cell: (order.index(Family(cell.family)), cell.model, cell.dataset, cell.train_on))
    rows: list[Row] = []
    apart = set()
    for family in order:
        by_model: dict[str, list[Cell]] = defaultdict(list)
        for cell in found:
            if cell.family == family:
                by_model[cell.model].append(cell)
        for model, members in by_model.items():
            apart |= {(model, str(family))} if trained_apart(members) else set()
            rows += [_row(cell, name, read, kind) for cell in members for name, read in _metrics([cell], metrics)]
            for over in averaged(family, members):
                rows += [_average(over, name, read, kind) for name, read in _metrics(over, metrics)]
    rates = [row for cell in found if (row := _rates(cell)) is not None]
    collapsed = [result for result in results if result.test is not None and result.test.collapsed]
    return Summary(rows, rates, collapsed, [result for result in results if result.failure is not None], apart)


def _metrics(members: Sequence[Cell], which: str) -> list[tuple[str, Read]]:
    """What can be read out of every finished run of `members`, by name; in percent later."""
    found: list[tuple[str, Read]] = [(PAPER, lambda run: run.test.score)] if which != "standard" else []
    if which != "paper":
        finished = [run for cell in members for run in cell.runs if run.test is not None]
        common = [
            name for name in (finished[0].test.metrics if finished else ()) if all(name in run.test.metrics for run in finished)
        ]
        found += [(name, lambda run, name=name: run.test.metrics.get(name)) for name in common]
    return found


def _row(cell: Cell, name: str, read: Read, kind: Kind) -> Row:
    by_seed, rate = scores(cell, read), cell.chosen
    at_rate = cell.at(rate) if rate is not None else []
    reasons = [run.test.collapsed for run in at_rate if run.test.collapsed]
    collapsed = f"{len(reasons)} of {len(at_rate)}: {reasons[0]}" if reasons else ""
    runs = f"{sum(run.test is not None for run in cell.runs)}/{cell.planned}"
    mean, half, seeds = _percent(by_seed, kind)
    where = (cell.model, cell.family, cell.dataset, cell.train_on)
    return Row(*where, name, rate, mean, half, _baseline([cell], name), seeds, runs, collapsed)


def _average(members: Sequence[Cell], name: str, read: Read, kind: Kind) -> Row:
    first = members[0]
    mean, half, seeds = _percent(average(members, read), kind)
    trained = {cell.train_on for cell in members}
    train_on = first.train_on if len(trained) == 1 else ""
    place = f"average of {len(members)}"
    return Row(first.model, first.family, place, train_on, name, None, mean, half, _baseline(members, name), seeds, "", "")


def _baseline(members: Sequence[Cell], name: str) -> float | None:
    """In percent, the mean over `members`; every run on a data set has the same."""
    name = "score" if name == PAPER else name
    found = [next((run.test.baseline.get(name) for run in cell.runs if run.test is not None), None) for cell in members]
    return None if None in found else 100 * math.fsum(found) / len(found)


def _percent(by_seed: dict[int, float] | None, kind: Kind) -> tuple[float | None, float | None, int]:
    """Mean and half width in percent, None for what there is not, and the number of seeds."""
    if by_seed is None:
        return None, None, 0
    made = interval(list(by_seed.values()), kind)
    return 100 * made.mean, None if math.isnan(made.half) else 100 * made.half, made.scores


def _rates(cell: Cell) -> RateRow | None:
    incomplete = tuple(rate for rate in cell.rates if rate not in cell.complete)
    where = (cell.model, cell.family, cell.dataset, cell.train_on)
    if (found := sensitivity(by_rate(cell, lambda run: run.test.score), cell.seeds)) is None:
        return RateRow(*where, None, {}, math.nan, 0, incomplete) if incomplete else None
    means = {rate: 100 * mean for rate, mean in found.means.items()}
    return RateRow(*where, cell.chosen, means, 100 * found.spread, found.near_best(), incomplete)
