"""Statistics of a grid by the study's rules: mean and interval over seeds, the learning rate chosen on validation, averages."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.files import Result

IntervalKind = Literal["normal", "t"]

STUDY_DATASETS = {
    TaskFamily.SC: ("sst2", "qqp", "mnli_m"),
    TaskFamily.TC: ("conll2003_en", "ontonotes", "uner_en"),
    TaskFamily.QA: ("squad", "squad_v2", "record"),
    TaskFamily.IR: ("msmarco", "nq", "mldr_en"),
}
"""The data sets of each family that the study averages over; what was published holds others too."""


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval; nan for a single score."""

    mean: float
    half: float
    read_chosen_scores: int


def compute_interval(scores: Sequence[float], kind: IntervalKind = "normal") -> Interval:
    """Return the mean of at least one score with q * sd(ddof=1) / sqrt(n).

    q is 1.96, as in the study, or the 97.5 % point of Student's t with n - 1 degrees of freedom.
    """
    mean, count = math.fsum(scores) / len(scores), len(scores)
    if count == 1:
        return Interval(mean, math.nan, 1)
    quantile = 1.96
    if kind == "t":
        from scipy.stats import t  # takes a second to import

        quantile = float(t.ppf(0.975, count - 1))
    return Interval(mean, quantile * statistics.stdev(scores, mean) / math.sqrt(count), count)


@dataclass(frozen=True)
class GridSpec:
    """The rates of a planned grid, each with every one of its seeds."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class ScoreCell:
    """The runs of a model on one data set: those of all rates and seeds that were asked for."""

    model: str
    family: str
    dataset: str
    train_on: str
    runs: tuple[Result, ...]
    rates: tuple[float, ...]
    """Every rate that was asked for, with or without runs."""
    seeds: tuple[int, ...]
    """Every seed that a rate needs before it can be chosen."""

    def runs_at_rate(self, rate: float) -> list[Result]:
        """Return the finished runs of a rate, by seed."""
        return sorted((run for run in self.runs if run.learning_rate == rate and run.test is not None), key=lambda run: run.seed)

    @property
    def complete_rates(self) -> tuple[float, ...]:
        """The rates with a finished run of every seed: only these can be chosen."""
        return tuple(rate for rate in self.rates if len(self.runs_at_rate(rate)) == len(self.seeds))

    @property
    def planned_run_count(self) -> int:
        """How many runs were asked for."""
        return len(self.rates) * len(self.seeds)

    @property
    def chosen_rate(self) -> float | None:
        """The complete rate with the best mean validation score, of equals the lower; None where none is complete."""
        means = {
            rate: compute_interval([run.validation.score for run in self.runs_at_rate(rate)]).mean for rate in self.complete_rates
        }
        return max(means, key=lambda rate: (means[rate], -rate), default=None)


def group_cells(results: Iterable[Result], grid: GridSpec | None = None) -> list[ScoreCell]:
    """Group results by model, data set and set trained on, in the order in which they come up.

    Results outside the grid `asked` are left out. By default it is every rate and seed that any model has on that data set.
    """
    runs_by_cell: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    rates_and_seeds: dict[tuple[str, ...], tuple[set[float], set[int]]] = defaultdict(lambda: (set(), set()))
    for result in results:
        if grid is None or (result.learning_rate in grid.rates and result.seed in grid.seeds):
            place = (result.family, result.dataset, result.train_on)
            runs_by_cell[(result.model, *place)].append(result)
            rates_and_seeds[place][0].add(result.learning_rate)
            rates_and_seeds[place][1].add(result.seed)
    grids = {
        place: grid or GridSpec(tuple(sorted(rates)), tuple(sorted(seeds))) for place, (rates, seeds) in rates_and_seeds.items()
    }
    return [ScoreCell(*key, tuple(runs), grids[key[1:]].rates, grids[key[1:]].seeds) for key, runs in runs_by_cell.items()]


ScoreReader = Callable[[Result], float | None]
"""Takes a number out of a run: the paper's score or a metric of test; None where the run has none such."""


def read_chosen_scores(cell: ScoreCell, read: ScoreReader) -> dict[int, float] | None:
    """Return the numbers of the chosen rate by seed; None where no rate can be chosen or a number is missing."""
    return read_scores_by_rate(cell, read).get(cell.chosen_rate)


def group_for_averages(family: str, members: Sequence[ScoreCell]) -> list[list[ScoreCell]]:
    """Return the cells of a model that each average in `family` is over: the study's three where all are there, else all.

    There is one average; one for each set trained on where some set has been evaluated after several trainings.
    """
    groups: dict[str, list[ScoreCell]] = defaultdict(list)
    is_repeated = has_repeated_datasets(members)
    for cell in members:
        groups[cell.train_on if is_repeated else ""].append(cell)
    averages = []
    for group in groups.values():
        of_study = [cell for name in STUDY_DATASETS.get(family, ()) for cell in group if cell.dataset == name]
        averages.append(of_study if len(of_study) == 3 else group)
    return [group for group in averages if len(group) > 1]


def has_repeated_datasets(members: Sequence[ScoreCell]) -> bool:
    """Return whether some set of a model's cells in a family has been evaluated after several trainings."""
    return len({cell.dataset for cell in members}) < len(members)


def average_by_seed(members: Sequence[ScoreCell], read: ScoreReader) -> dict[int, float] | None:
    """Return the mean over data sets by seed, each at its own chosen rate; None where their scores are not of the same seeds."""
    by_set = [read_chosen_scores(cell, read) for cell in members]
    if not by_set or None in by_set or len({frozenset(seed_scores) for seed_scores in by_set}) != 1:
        return None
    return {seed: math.fsum(seed_scores[seed] for seed_scores in by_set) / len(by_set) for seed in by_set[0]}


@dataclass(frozen=True)
class RateSensitivity:
    """The mean score of a cell at each complete learning rate."""

    means: dict[float, float]

    @property
    def spread(self) -> float:
        """Best mean less worst."""
        return max(self.means.values()) - min(self.means.values())

    def count_near_best(self, within: float = 0.01) -> int:
        """Return how many rates have a mean that is at most one point (of a hundred) below the best."""
        return sum(max(self.means.values()) - mean <= within + 1e-12 for mean in self.means.values())


def read_scores_by_rate(cell: ScoreCell, read: ScoreReader) -> dict[float, dict[int, float]]:
    """Return the numbers of the finished runs by rate and seed, without rates that lack a number in one of their runs."""
    scores = {rate: {run.seed: read(run) for run in cell.runs_at_rate(rate)} for rate in cell.rates}
    return {rate: of_seeds for rate, of_seeds in scores.items() if of_seeds and None not in of_seeds.values()}


def compute_sensitivity(scores: Mapping[float, Mapping[int, float]], seeds: Collection[int]) -> RateSensitivity | None:
    """Return the means of numbers by rate and seed at each rate that has all `seeds`; None where there is none."""
    complete = {rate: of_seeds for rate, of_seeds in scores.items() if of_seeds.keys() >= set(seeds)}
    means = {rate: compute_interval([of_seeds[seed] for seed in seeds]).mean for rate, of_seeds in complete.items()}
    return RateSensitivity(means) if means else None
