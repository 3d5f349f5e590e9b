"""Fine-tuning scores of a study, with intervals and the scores of single runs.

They are computed from a results directory of `megaenc finetune` or of the study itself, by the
study's rules (megaenc.finetune.results.aggregate): learning rate chosen on validation, mean and
interval over seeds, averages formed by seed.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megaenc.errors import InputError
from megaenc.finetune.examples import STUDY_FAMILIES
from megaenc.finetune.results.aggregate import (
    PAPER_SCORE,
    STUDY_DATASETS,
    IncompleteRate,
    IntervalKind,
    ScoreCell,
    average_by_seed,
    compute_interval,
    group_cells,
    group_for_averages,
    has_repeated_datasets,
)
from megaenc.finetune.results.files import RESULTS, Result, read_example_scores, read_result_tree
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import EMPTY_SCOPE, StudyScope
from megaenc.study.results.groups import (
    AVERAGE,
    Groups,
    dataset_label,
    datasets_by_family,
    group_by_setup,
    is_average,
    reference_mask_ratio,
    sort_sizes,
)

RateScores = Mapping[float, Mapping[int, float]]
"""Scores by learning rate, then by fine-tuning seed."""


@dataclass(frozen=True)
class Score:
    """Mean score of one model on a data set, or its average over a task family.

    Scores are fractions, from 0 or, of correlations, from -1 to 1. `model` is the name, `model_key`
    None outside the study, `family` the value of a TaskFamily or ZS, `dataset` a name, maybe with
    " after TRAINSET", or AVERAGE. `mean` and `seed_scores`, by seed, are at the `learning_rate`
    chosen on validation (None for averages), `rate_scores` of finished runs, by rate and seed, at
    all; for published tables, the rate is None and both are empty. `half_width` is half the 95 %
    interval over fine-tuning seeds; None for a single seed. `baseline` is a trivial prediction's
    score, or None. `planned_runs` (0: unknown), `ended_runs` and `collapsed_runs` count runs at all
    rates, `collapsed_at_rate` at the chosen one; `failed_seeds`, by rate, had a NaN loss. `members`
    are the scores behind an average, else empty. `stack_examples` calls `load_examples`.
    """

    model: str
    model_key: ModelKey | None
    """None for a model that does not belong to the study"""
    family: str
    dataset: str
    """name as in `megaenc finetune`, or AVERAGE; with " after TRAINSET" if it was evaluated after
    training on several sets"""
    mean: float
    half_width: float | None
    """half the width of the 95 % interval; None for a single seed"""
    seed_scores: Mapping[int, float] = field(default_factory=dict)
    """scores by fine-tuning seed at the chosen learning rate; empty for published tables"""
    rate_scores: RateScores = field(default_factory=dict)
    """scores of the finished runs; an average has the seeds that all its data sets share"""
    load_examples: Callable[[], Mapping[int, np.ndarray]] = field(
        default=dict, compare=False, repr=False
    )
    """cached reader of float32[N] by seed at the chosen rate; empty for averages, if a file has no
    example scores, and if the runs were tested on different examples"""
    collapsed_runs: int = 0
    """runs at any rate with worthless predictions or a NaN loss"""
    ended_runs: int = 0
    """finished and failed runs; in an average, a training run that several data sets share counts
    once"""
    planned_runs: int = 0
    """requested runs; 0 if unknown, as for published tables"""
    collapsed_at_rate: int = 0
    """runs at the chosen rate with worthless predictions, summed over the data sets of an
    average"""
    failed_seeds: Mapping[float, frozenset[int]] = field(default_factory=dict)
    """seeds whose loss became NaN, by rate; `rate_scores` does not contain them"""
    baseline: float | None = None
    """score of a trivial prediction (majority class, no answer, ...); None if the results do not
    contain it"""
    learning_rate: float | None = None
    """chosen learning rate; None for averages and published tables"""
    members: tuple["Score", ...] = field(default=(), repr=False)
    """scores that an average is formed over; empty for data sets and published tables"""

    @property
    def is_collapsed(self) -> bool:
        """Return whether half or more of the runs at the chosen rate collapsed.

        An average has collapsed if that holds on any of its data sets. It is False if no scores by
        seed are known, as for published tables.
        """
        if self.members:
            return any(member.is_collapsed for member in self.members)
        return 0 < len(self.seed_scores) <= 2 * self.collapsed_at_rate

    @property
    def rate_scores_with_failures(self) -> RateScores:
        """Return scores by learning rate, ascending, and seed, failed runs included.

        A failed run, whose loss became NaN, counts as the trivial baseline; it is left out if that
        is unknown. Of an average, only rates and seeds are in it that all its data sets have.
        """
        if self.members:
            return _mean_rate_scores([member.rate_scores_with_failures for member in self.members])
        scores = {rate: dict(by_seed) for rate, by_seed in self.rate_scores.items()}
        if self.baseline is not None:
            for rate, seeds in self.failed_seeds.items():
                scores.setdefault(rate, {}).update(dict.fromkeys(seeds, self.baseline))
        return dict(sorted(scores.items()))

    def stack_examples(self, seeds: Sequence[int]) -> np.ndarray | None:
        """Return the scores of all test examples for each of `seeds`, at the chosen rate.

        The array is float32[S, N], as fractions, for S seeds, in that order, and N examples; a
        Score reads its files once. The result is None if some scores are missing, if their numbers
        differ, if `seeds` is empty, and for averages and published tables.

        Args:
            seeds: Fine-tuning seeds.

        Raises:
            InputError: A result file has become missing or invalid.
        """
        by_seed = self.load_examples()
        if (
            any(seed not in by_seed for seed in seeds)
            or len({len(by_seed[seed]) for seed in seeds}) != 1
        ):
            return None
        return np.stack([by_seed[seed] for seed in seeds])


@dataclass(frozen=True)
class GridStatus:
    """State of a model's fine-tuning runs on one data set; `build_evidence` builds it.

    `model`, `model_key`, `family` and `dataset` are as in Score, `train_on` is the training set.
    The grid has a run for each learning rate and seed, `planned_runs` in all. `collapsed_by_run`
    has, by (rate, seed) of each run that ended, whether it collapsed or failed; `failed_runs`
    counts those whose loss became NaN. `incomplete_rates` are rates without results of some seeds.
    """

    model: str
    model_key: ModelKey | None
    family: str
    dataset: str
    """name as in Score"""
    train_on: str
    """training set"""
    collapsed_by_run: Mapping[tuple[float, int], bool]
    """for each ended run, by (rate, seed): whether it collapsed or failed"""
    failed_runs: int
    """number of runs whose loss became NaN"""
    planned_runs: int
    """number of requested runs"""
    incomplete_rates: tuple[IncompleteRate, ...] = ()
    """learning rates without results of some seeds"""


@dataclass(frozen=True)
class Evidence:
    """All scores of a study in one metric, with the states of its fine-tuning grids.

    `build_evidence` and `read_evidence` build it from results, `published` from the published
    tables. `scores` is a list of Score, averages included, in `metric`, with intervals of `kind`
    ("normal" or "t"). `grids` is a list of GridStatus, also for models without a score, and empty
    for published tables. `scope` is what the manifest plans, and empty without a manifest.
    """

    scores: list[Score]
    metric: str = PAPER_SCORE
    """PAPER_SCORE, the study's own score, or the name of a standard metric"""
    kind: IntervalKind = "normal"
    """kind of the intervals"""
    scope: StudyScope = EMPTY_SCOPE
    """models, data sets and grid that a manifest plans"""
    grids: list[GridStatus] = field(default_factory=list)
    """state of each model and data set with a run, also without a score; empty for published
    tables"""

    @functools.cached_property
    def _score_index(self) -> dict[tuple[ModelKey | str, str, str], Score]:
        """Return the scores by (model, data set, family).

        Family "" has the first score of each model and data set.
        """
        index: dict[tuple[ModelKey | str, str, str], Score] = {}
        for score in self.scores:
            for family in (score.family, ""):
                index.setdefault((score.model_key or score.model, score.dataset, family), score)
        return index

    def find(self, model: ModelKey | str, dataset: str, family: str = "") -> Score | None:
        """Return the score of a model on a data set; None if there is none.

        Args:
            model: Key of the model, or its name if it has no key; others are not found by name.
            dataset: Name as in Score, or AVERAGE.
            family: Code of the task family, such as SC; "" matches any, the first if several.
        """
        return self._score_index.get((model, dataset, str(family)))

    def model_names(self) -> dict[ModelKey, str]:
        """Return the names of the models with a score by model key.

        They are in order of appearance; models without a key are left out.
        """
        names: dict[ModelKey, str] = {}
        for score in self.scores:
            if score.model_key is not None:
                names.setdefault(score.model_key, score.model)
        return names

    def model_keys(self) -> list[ModelKey]:
        """Return the keys of the models with a score, in order of appearance.

        Models without a key are left out.
        """
        return list(self.model_names())

    def planned_model_keys(self) -> list[ModelKey]:
        """Return the keys of all models that the study is about, with or without scores.

        They are those of the manifest, then those with a score whose size the manifest lacks; other
        models with a score are left out. Without a manifest, they are all with a score.
        """
        planned = self.scope.model_keys.values()
        return [
            *planned,
            *(key for key in self.model_keys() if not planned or key.size not in self.scope.sizes),
        ]

    def group_by_setup(self, model_keys: Iterable[ModelKey] | None = None) -> Groups:
        """Return model keys by kind of pretraining: "base", "efficiency", "pfs", ...

        Kinds and order are those of `megaenc.study.results.groups.group_by_setup`, with the planned
        models and sizes of this study; kinds without models are left out.

        Args:
            model_keys: Keys to group; None for those of all models with a score.
        """
        return group_by_setup(
            self.model_keys() if model_keys is None else model_keys,
            self.planned_model_keys(),
            self.scope.sizes,
        )

    def sort_sizes(self, model_keys: Iterable[ModelKey]) -> list[str]:
        """Return the distinct size names of models, smallest first.

        They are in the manifest's order, else by numbers such as 210M; other names are then last.
        """
        return sort_sizes(model_keys, self.scope.sizes)

    @functools.cached_property
    def reference_mask_ratio(self) -> float | None:
        """Return the mask ratio, 0 to 1, of the MLM models that are compared.

        It is the most frequent one of the planned models without a schedule, on ties that nearest
        0.4; None if no model has a ratio.
        """
        return reference_mask_ratio(self.planned_model_keys())

    def select_study_families(self) -> "Evidence":
        """Return the evidence for claims and figures: that of STUDY_FAMILIES."""
        return replace(
            self,
            scores=[score for score in self.scores if score.family in STUDY_FAMILIES],
            grids=[grid for grid in self.grids if grid.family in STUDY_FAMILIES],
        )

    def datasets(self) -> list[tuple[str, str]]:
        """Return the distinct (family, data set) pairs with a score.

        Families are in the order of TaskFamily, then others. In each, the study's data sets come
        first, then others by appearance, then averages.
        """
        by_family = datasets_by_family(
            ((score.family, score.dataset) for score in self.scores), STUDY_DATASETS
        )
        return [(family, name) for family, names in by_family.items() for name in names]


def read_evidence(
    results: Path,
    model_keys: Mapping[str, ModelKey],
    metric: str = PAPER_SCORE,
    kind: IntervalKind = "normal",
) -> Evidence:
    """Read the scores of a results directory in one metric, without a manifest.

    Args:
        results: Directory of `megaenc finetune grid`, or of the study's own results.
        model_keys: Key of each model by name; models without one are kept, with the key None.
        metric: PAPER_SCORE, the study's own score, or a standard metric such as "accuracy".
        kind: 95 % interval over seeds, 1.96 standard errors ("normal") or Student's ("t").

    Raises:
        InputError: There are no results, one is invalid, or no finished run has the standard
            metric.
    """
    return build_evidence(read_result_tree(results), model_keys.get, metric, kind)


def build_evidence(
    results: Sequence[Result],
    resolve_model_key: Callable[[str], ModelKey | None],
    metric: str = PAPER_SCORE,
    kind: IntervalKind = "normal",
    scope: StudyScope = EMPTY_SCOPE,
) -> Evidence:
    """Build the scores, averages and states of runs in one metric from results.

    A score is at the rate with the best validation of those with every seed, planned or else of any
    model on the data set; without such a rate there is none. An average needs two or more data
    sets, all with scores of the same seeds.

    Args:
        results: Fine-tuning results, finished and failed, such as those of `read_result_tree`.
        resolve_model_key: Function from a model's name to its key, or to None if it has none.
        metric: PAPER_SCORE, or the name of a standard metric; InputError if no finished run has it.
        kind: 95 % interval over seeds, 1.96 standard errors ("normal") or Student's ("t").
        scope: What a manifest plans; other rates and seeds are ignored, other models and sets not.
    """
    known = {
        PAPER_SCORE,
        *(name for run in results if run.test is not None for name in run.test.metrics),
    }
    if metric not in known:
        expected = " or ".join([PAPER_SCORE, *sorted(known - {PAPER_SCORE})])
        raise InputError(f"metric `{metric}`: no result has it, expected {expected}")
    by_model: dict[tuple[str, str], list[ScoreCell]] = defaultdict(list)
    for cell in group_cells(results, scope.grid):
        by_model[cell.family, cell.model].append(cell)
    scores: list[Score] = []
    grids: list[GridStatus] = []
    for (family, model), members in by_model.items():
        suffix = " after {}" if has_repeated_datasets(members) else ""
        model_key = resolve_model_key(model)
        score_by_cell = {}
        for cell in members:
            name = cell.dataset + suffix.format(cell.train_on)
            failed = sum(run.failure is not None for run in cell.runs)
            grids.append(
                GridStatus(
                    model,
                    model_key,
                    str(family),
                    name,
                    cell.train_on,
                    _collapsed_by_run(cell),
                    failed,
                    cell.planned_run_count,
                    cell.find_incomplete_rates(),
                )
            )
            score_by_cell[id(cell)] = _build_score(name, [cell], model_key, metric, kind)
        averages = []
        for over in group_for_averages(family, members):
            dataset_scores = [score_by_cell[id(cell)] for cell in over]
            if None not in dataset_scores:
                averages.append(
                    _build_score(
                        AVERAGE + suffix.format(over[0].train_on),
                        over,
                        model_key,
                        metric,
                        kind,
                        dataset_scores,
                    )
                )
        scores += [score for score in (*score_by_cell.values(), *averages) if score is not None]
    return Evidence(scores, metric, kind, scope, grids)


def _collapsed_by_run(cell: ScoreCell) -> dict[tuple[float, int], bool]:
    """Return by (rate, seed) whether each run of a cell collapsed or failed."""
    return {
        (run.learning_rate, run.seed): run.failure is not None or bool(run.test.collapsed)
        for run in cell.runs
    }


def _build_score(
    name: str,
    over: Sequence[ScoreCell],
    model_key: ModelKey | None,
    metric: str,
    kind: IntervalKind,
    members: Sequence[Score] = (),
) -> Score | None:
    """Return the score of one cell, or the average over several cells.

    Args:
        members: Scores of the cells for an average; else empty.

    Returns:
        The score; None if some cell has no complete rate yet, if the family has no such metric, or
        if the seeds of the cells differ.
    """
    by_seed = average_by_seed(over, metric)
    if not by_seed:
        return None
    interval = compute_interval(list(by_seed.values()), kind)
    chosen = [run for cell in over for run in cell.runs_at_rate(cell.chosen_rate)]
    ended = collapsed_by_training((cell.train_on, _collapsed_by_run(cell)) for cell in over)
    failed: dict[float, set[int]] = defaultdict(set)
    for cell in over:
        for run in cell.runs:
            if run.failure is not None:
                failed[run.learning_rate].add(run.seed)
    load_examples = dict
    if not members and all(run.has_common_examples for run in chosen):
        paths = {run.seed: run.path for run in chosen}
        load_examples = functools.cache(functools.partial(_read_example_scores, paths, metric))
    return Score(
        model=over[0].model,
        model_key=model_key,
        family=str(over[0].family),
        dataset=name,
        mean=interval.mean,
        half_width=None if math.isnan(interval.half) else interval.half,
        seed_scores=by_seed,
        rate_scores=_mean_rate_scores([cell.scores_by_rate(metric) for cell in over]),
        collapsed_runs=sum(ended.values()),
        ended_runs=len(ended),
        planned_runs=sum({cell.train_on: cell.planned_run_count for cell in over}.values()),
        collapsed_at_rate=sum(bool(run.test.collapsed) for run in chosen),
        failed_seeds={rate: frozenset(seeds) for rate, seeds in failed.items()},
        members=tuple(members),
        learning_rate=None if members else over[0].chosen_rate,
        baseline=None if members else chosen[0].test.baseline.get(metric),
        load_examples=load_examples,
    )


def _mean_rate_scores(parts: Sequence[RateScores]) -> dict[float, dict[int, float]]:
    """Return the mean over several data sets at each rate and seed that all have."""
    means = {}
    for rate in parts[0]:
        seed_scores = [part.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, seed_scores))):
            means[rate] = {
                seed: math.fsum(by_seed[seed] for by_seed in seed_scores) / len(seed_scores)
                for seed in common
            }
    return means


def collapsed_by_training(
    grids: Iterable[tuple[Hashable, Mapping[tuple[float, int], bool]]],
) -> dict[tuple[Hashable, float, int], bool]:
    """Return by (training set, rate, seed) whether a run collapsed or failed anywhere.

    One training run may be evaluated on several data sets, each with a GridStatus of its own; one
    of them suffices.

    Args:
        grids: Pairs of a training set (or a tuple with it) and GridStatus.collapsed_by_run.
    """
    collapsed_runs: dict[tuple[Hashable, float, int], bool] = defaultdict(bool)
    for train_on, collapsed_by_run in grids:
        for run, collapsed in collapsed_by_run.items():
            collapsed_runs[train_on, *run] |= collapsed
    return collapsed_runs


def _read_example_scores(paths: Mapping[int, Path], metric: str) -> dict[int, np.ndarray]:
    """Read the example scores, float32[N], of the run directory of each seed.

    The result is empty if a file has none for this metric.
    """
    scores = {}
    for seed, run_dir in paths.items():
        values = read_example_scores(run_dir / RESULTS, None if metric == PAPER_SCORE else metric)
        if not values:
            return {}
        scores[seed] = np.array(values, dtype=np.float32)
    return scores


def headline_datasets(evidence: Evidence) -> dict[str, str]:
    """Return the name of the data set that figures show, by code of the task family.

    It is the average if there is one (the first of several), else the first data set.
    """
    sets = datasets_by_family(evidence.datasets())
    return {family: next(filter(is_average, names), names[0]) for family, names in sets.items()}


def describe_missing_scores(evidence: Evidence) -> str:
    """Return sentences that list models and data sets without a score.

    They have the numbers of runs that ended and failed. Without a manifest, only models and data
    sets with a run are known. The result is "" if all have a score.
    """
    scored = {(score.model, score.dataset) for score in evidence.scores}
    grids: dict[str, list[GridStatus]] = {model: [] for model in evidence.scope.model_keys}
    for grid in evidence.grids:
        grids.setdefault(grid.model, []).append(grid)
    incomplete = []
    for model, model_grids in grids.items():
        parts = []
        for grid in model_grids:
            if (model, grid.dataset) not in scored:
                failed = f", {grid.failed_runs} failed" if grid.failed_runs else ""
                counts = f"{len(grid.collapsed_by_run)} of {grid.planned_runs} runs ended{failed}"
                parts.append(f"{grid.family} {dataset_label(grid.family, grid.dataset)}: {counts}")
        tried = {grid.dataset.partition(" after ")[0] for grid in model_grids}
        parts += [f"{name}: no run" for _, name in evidence.scope.datasets if name not in tried]
        if model_grids and parts:
            incomplete.append(f"{model} ({'; '.join(parts)})")
    unstarted = [model for model, model_grids in grids.items() if not model_grids]
    sentences = []
    if incomplete:
        sentences.append(
            "No score yet, which needs a learning rate with every seed finished: "
            f"{', '.join(incomplete)}."
        )
    if unstarted:
        sentences.append(f"No run yet: {', '.join(unstarted)}.")
    return " ".join(sentences)
