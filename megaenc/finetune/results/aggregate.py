"""Statistics of a grid by the study's rules.

Intervals are over seeds, the learning rate is selected on validation, and data sets are averaged.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.files import Result

IntervalKind = Literal["normal", "t"]

PAPER_SCORE = "score"
"""Name of the study's own score among metrics."""
STUDY_DATASETS = {
    TaskFamily.SC: ("sst2", "qqp", "mnli_m"),
    TaskFamily.TC: ("conll2003_en", "ontonotes", "uner_en"),
    TaskFamily.QA: ("squad", "squad_v2", "record"),
    TaskFamily.IR: ("msmarco", "nq", "mldr_en"),
}
"""Data sets of each family in the study's averages; its published results have more."""


def read_metric(run: Result, metric: str) -> float | None:
    """Return a test metric of a finished run, as a fraction, or None if it lacks it.

    Args:
        run: Run that has not failed.
        metric: Name of a metric, or PAPER_SCORE.
    """
    return run.test.score if metric == PAPER_SCORE else run.test.metrics.get(metric)


@dataclass(frozen=True)
class Interval:
    """Mean of scores and half the width of its 95 % interval, by `compute_interval`.

    `mean` and `half` are in the unit of the scores; `half` is NaN for a single score.
    """

    mean: float
    half: float


def compute_interval(scores: Sequence[float], kind: IntervalKind = "normal") -> Interval:
    """Return the mean of `scores`, at least one, and half its 95 % interval's width.

    Half the width is q standard errors (of the deviation with n - 1), NaN for one score. q is 1.96
    if `kind` is "normal", as in the study, or the 97.5 % quantile of Student's t with n - 1 degrees
    of freedom if it is "t".
    """
    mean = math.fsum(scores) / len(scores)
    count = len(scores)
    if count == 1:
        return Interval(mean, math.nan)
    quantile = 1.96
    if kind == "t":
        from scipy.stats import t  # slow to import

        quantile = float(t.ppf(0.975, count - 1))
    return Interval(mean, quantile * statistics.stdev(scores, mean) / math.sqrt(count))


@dataclass(frozen=True)
class GridSpec:
    """Learning rates and seeds of a planned grid, which has a run for each pair.

    `rates` are peak learning rates, `seeds` the seeds themselves.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class IncompleteRate:
    """Learning rate that cannot be chosen, as results of some seeds are missing.

    `ScoreCell.find_incomplete_rates` builds it, from `rate` and its `missing_seeds`.
    `validation_lead` is its mean validation score minus that of the chosen rate over the seeds of
    both, as a fraction; None without a common seed or a chosen rate.
    """

    rate: float
    missing_seeds: tuple[int, ...]
    validation_lead: float | None
    """Mean validation score less that of the chosen rate, over the seeds of both, as a fraction;
    None without a common seed or a chosen rate."""


@dataclass(frozen=True)
class ScoreCell:
    """Runs of one `model` on one data set after one training set.

    `group_cells` builds it; `family`, `dataset` and `train_on` are names as in Result. `runs` are
    finished and failed ones of all learning rates and seeds; `rates` are all learning rates of the
    grid, with or without runs, and `seeds` those that a rate needs to be chosen.
    """

    model: str
    family: str
    dataset: str
    train_on: str
    runs: tuple[Result, ...]
    rates: tuple[float, ...]
    """All learning rates of the grid, with or without runs."""
    seeds: tuple[int, ...]
    """Seeds that a learning rate needs to be chosen."""

    def runs_at_rate(self, rate: float) -> list[Result]:
        """Return the finished runs, with test scores, of a learning rate, sorted by seed.

        Failed runs are left out; without a run the list is empty.
        """
        return sorted(
            (run for run in self.runs if run.learning_rate == rate and run.test is not None),
            key=lambda run: run.seed,
        )

    @property
    def complete_rates(self) -> tuple[float, ...]:
        """Return the learning rates that have a finished run for every seed.

        They are in the order of the grid.
        """
        return tuple(rate for rate in self.rates if len(self.runs_at_rate(rate)) == len(self.seeds))

    @property
    def planned_run_count(self) -> int:
        """Return the number of runs that the grid plans for the cell: rates times seeds."""
        return len(self.rates) * len(self.seeds)

    @property
    def chosen_rate(self) -> float | None:
        """Return the complete rate with the best mean validation score over the seeds.

        Of equal ones it is the lowest rate. Without a complete rate the result is None.
        """
        means = {
            rate: compute_interval([run.validation.score for run in self.runs_at_rate(rate)]).mean
            for rate in self.complete_rates
        }
        return max(means, key=lambda rate: (means[rate], -rate), default=None)

    def scores_by_rate(self, metric: str = PAPER_SCORE) -> dict[float, dict[int, float]]:
        """Return a test metric, as fractions, of finished runs by learning rate and seed.

        Rates without a finished run, or with one that lacks the metric, are left out.
        """
        scores = {}
        for rate in self.rates:
            by_seed = {run.seed: read_metric(run, metric) for run in self.runs_at_rate(rate)}
            if by_seed and None not in by_seed.values():
                scores[rate] = by_seed
        return scores

    def find_incomplete_rates(self) -> tuple[IncompleteRate, ...]:
        """Return the learning rates of the grid that lack a run of some seed.

        They are in the order of the grid. A failed run is not missing, so a rate with one may be
        neither here nor in `complete_rates`.
        """
        chosen = {run.seed: run.validation.score for run in self.runs_at_rate(self.chosen_rate)}
        incomplete = []
        for rate in self.rates:
            seeds = {run.seed for run in self.runs if run.learning_rate == rate}
            if missing := tuple(seed for seed in self.seeds if seed not in seeds):
                leads = [
                    run.validation.score - chosen[run.seed]
                    for run in self.runs_at_rate(rate)
                    if run.seed in chosen
                ]
                incomplete.append(
                    IncompleteRate(rate, missing, math.fsum(leads) / len(leads) if leads else None)
                )
        return tuple(incomplete)


def group_cells(results: Iterable[Result], grid: GridSpec | None = None) -> list[ScoreCell]:
    """Return a ScoreCell per model, family, data set and training set.

    They are in the order of first appearance in `results`.

    Args:
        grid: Rates and seeds to use; results outside it are dropped. None: for each family, data
            set and training set, all rates and seeds that any model has there, ascending.
    """
    runs_by_cell: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    rates_and_seeds: dict[tuple[str, ...], tuple[set[float], set[int]]] = defaultdict(
        lambda: (set(), set())
    )
    for result in results:
        if grid is None or (result.learning_rate in grid.rates and result.seed in grid.seeds):
            place = (result.family, result.dataset, result.train_on)
            runs_by_cell[(result.model, *place)].append(result)
            rates_and_seeds[place][0].add(result.learning_rate)
            rates_and_seeds[place][1].add(result.seed)
    grids = {
        place: grid or GridSpec(tuple(sorted(rates)), tuple(sorted(seeds)))
        for place, (rates, seeds) in rates_and_seeds.items()
    }
    return [
        ScoreCell(*key, tuple(runs), grids[key[1:]].rates, grids[key[1:]].seeds)
        for key, runs in runs_by_cell.items()
    ]


def group_for_averages(family: str, members: Sequence[ScoreCell]) -> list[list[ScoreCell]]:
    """Return the groups of two or more cells to average, of one model and family.

    There is one group, or one for each training set if `has_repeated_datasets`. A group has the
    family's three data sets in the study, in the order of STUDY_DATASETS, or all its cells if it
    lacks one of these.

    Args:
        members: All cells of the model and family.
    """
    groups: dict[str, list[ScoreCell]] = defaultdict(list)
    is_repeated = has_repeated_datasets(members)
    for cell in members:
        groups[cell.train_on if is_repeated else ""].append(cell)
    averages = []
    for group in groups.values():
        of_study = [
            cell
            for name in STUDY_DATASETS.get(family, ())
            for cell in group
            if cell.dataset == name
        ]
        averages.append(of_study if len(of_study) == 3 else group)
    return [group for group in averages if len(group) > 1]


def has_repeated_datasets(members: Sequence[ScoreCell]) -> bool:
    """Return whether two cells have the same data set, after different training sets.

    Args:
        members: Cells of one model and family.
    """
    return len({cell.dataset for cell in members}) < len(members)


def average_by_seed(
    members: Sequence[ScoreCell], metric: str = PAPER_SCORE
) -> dict[int, float] | None:
    """Return the mean over cells of a test metric, each at its chosen rate, by seed.

    It is a fraction. The result is None if the seeds of the cells differ, if a cell has no chosen
    rate or a run at it lacks the metric, or without cells.

    Args:
        metric: Name of a metric, or PAPER_SCORE.
    """
    by_set = [cell.scores_by_rate(metric).get(cell.chosen_rate) for cell in members]
    if not by_set or None in by_set or len({frozenset(seed_scores) for seed_scores in by_set}) != 1:
        return None
    return {
        seed: math.fsum(seed_scores[seed] for seed_scores in by_set) / len(by_set)
        for seed in by_set[0]
    }


@dataclass(frozen=True)
class RateSensitivity:
    """Mean score over the seeds at each learning rate that has all of them.

    `compute_sensitivity` builds it. `means` has the scores, as fractions, by rate, at least one.
    """

    means: dict[float, float]

    @property
    def spread(self) -> float:
        """Return the highest mean score over the learning rates minus the lowest.

        It is a fraction.
        """
        return max(self.means.values()) - min(self.means.values())

    def count_near_best(self, within: float = 0.01) -> int:
        """Return the number of rates whose mean score is at most `within` below the best.

        The best rate counts. `within` is a fraction: 0.01 is one point of a score in percent.
        """
        return sum(
            max(self.means.values()) - mean <= within + 1e-12 for mean in self.means.values()
        )


def compute_sensitivity(
    scores: Mapping[float, Mapping[int, float]], seeds: Collection[int]
) -> RateSensitivity | None:
    """Return the RateSensitivity of scores by learning rate, then seed.

    Only rates that have all `seeds`, at least one, count, and only these seeds. Without such a rate
    the result is None.

    Args:
        scores: Scores as fractions, as `ScoreCell.scores_by_rate` returns them.
    """
    complete = {
        rate: of_seeds for rate, of_seeds in scores.items() if of_seeds.keys() >= set(seeds)
    }
    means = {
        rate: compute_interval([of_seeds[seed] for seed in seeds]).mean
        for rate, of_seeds in complete.items()
    }
    return RateSensitivity(means) if means else None
