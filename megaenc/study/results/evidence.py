"""What was measured: for each model and data set a score with its interval, the scores of its seeds and of single examples.

Read out of a tree of results as `megaenc finetune` writes it and as the study has published it. The numbers follow the study's
rules (megaenc.finetune.results.aggregate): rate chosen on validation, mean and interval over seeds, averages formed by seed.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaenc.errors import InputError
from megaenc.finetune.results.aggregate import STUDY_DATASETS, IntervalKind, ScoreCell, average_by_seed, group_for_averages, read_scores_by_rate, group_cells, compute_interval, has_repeated_datasets
from megaenc.finetune.results.files import RESULTS, Result, read_example_scores, read_result_tree
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import EMPTY_SCOPE, StudyScope
from megaenc.study.results.groups import AVERAGE, Groups, dataset_label, datasets_by_family, group_by_setup, reference_mask_ratio, sort_sizes

PAPER_SCORE = "score"
RateScores = Mapping[float, Mapping[int, float]]
"""Scores by learning rate, by fine-tuning seed."""


@dataclass(frozen=True)
class Score:
    """Of a model on a data set, or on the average of a family: what a table's cell is made of. All scores are fractions."""

    model: str
    model_key: ModelKey | None
    """None for a model that is none of the study's"""
    family: str
    dataset: str
    """as `megaenc finetune` names it; AVERAGE; with " after TRAINSET" if a set was evaluated after several trainings"""
    mean: float
    half_width: float | None
    """half the 95 % interval; None for a single seed"""
    seeds: Mapping[int, float] = field(default_factory=dict)
    """by fine-tuning seed, at the chosen rate; empty for published tables"""
    rates: RateScores = field(default_factory=dict)
    """of what has finished; an average has the seeds that all its sets have"""
    examples: Callable[[], Mapping[int, np.ndarray]] = field(default=dict, compare=False, repr=False)
    """reads float32[examples] by seed at the chosen rate, once; empty where no file has them and for averages"""
    collapsed: int = 0
    """trainings at any rate whose predictions are worthless, or whose loss became NaN"""
    runs: int = 0
    """trainings that have ended, failed ones among them; of an average, those of several sets that share one count once"""
    planned: int = 0
    """trainings that were asked for; 0 if that is not known, as of published tables"""
    collapsed_at_rate: int = 0
    """those at the chosen rate whose predictions are worthless, so that `mean` says little; of an average, of all its sets"""
    failed_seeds: Mapping[float, frozenset[int]] = field(default_factory=dict)
    """by rate, the seeds whose loss became NaN; `rates` has nothing of them"""
    baseline: float | None = None
    """the score that needs no model: majority class, never an answer, ...; None where the results do not say"""
    rate: float | None = None
    """the chosen one; None for averages and published tables"""
    members: tuple["Score", ...] = field(default=(), repr=False)
    """what an average is formed over; empty for data sets and published tables"""

    @property
    def rate_scores_with_failures(self) -> RateScores:
        """`rates` with every failed run at the floor, where that is known: a rate that broke a model cost it all that it had."""
        if self.members:
            return _mean_rate_scores([member.rate_scores_with_failures for member in self.members])
        scores = {rate: dict(by_seed) for rate, by_seed in self.rates.items()}
        if self.baseline is not None:
            for rate, seeds in self.failed_seeds.items():
                scores.setdefault(rate, {}).update(dict.fromkeys(seeds, self.baseline))
        return dict(sorted(scores.items()))

    def stack_examples(self, seeds: Sequence[int]) -> np.ndarray | None:
        """Return float32[S, N] of one data set; None if some seed has no examples, or other ones."""
        of_seed = self.examples()
        if any(seed not in of_seed for seed in seeds) or len({len(of_seed[seed]) for seed in seeds}) != 1:
            return None
        return np.stack([of_seed[seed] for seed in seeds])


@dataclass(frozen=True)
class GridStatus:
    """What has become of the runs of a model on a data set, whether or not they make a score."""

    model: str
    model_key: ModelKey | None
    family: str
    dataset: str
    """as a score has it"""
    train_on: str
    ended: Mapping[tuple[float, int], bool]
    """by rate and seed, whether a run that has ended collapsed or failed"""
    failed: int
    """runs whose loss became NaN"""
    planned: int


@dataclass(frozen=True)
class Evidence:
    """Scores of one metric."""

    scores: list[Score]
    metric: str = PAPER_SCORE
    """PAPER, the study's own, or a name of the field's metrics"""
    kind: IntervalKind = "normal"
    """of the intervals"""
    scope: StudyScope = EMPTY_SCOPE
    """what a manifest says should be there"""
    grids: list[GridStatus] = field(default_factory=list)
    """of every model and data set with a run, those without a score too; none of published tables"""

    @functools.cached_property
    def _places(self) -> dict[tuple[ModelKey | str, str, str], Score]:
        index: dict[tuple[ModelKey | str, str, str], Score] = {}
        for score in self.scores:
            for family in (score.family, ""):
                index.setdefault((score.model_key or score.model, score.dataset, family), score)
        return index

    def find(self, model: ModelKey | str, dataset: str, family: str = "") -> Score | None:
        """Return the score of a model, by its name if it has no setting, on a data set; of averages `family` says which."""
        return self._places.get((model, dataset, str(family)))

    def names(self) -> dict[ModelKey, str]:
        """Return what the models that have a setting are called, in the order in which they come up."""
        names: dict[ModelKey, str] = {}
        for score in self.scores:
            if score.model_key is not None:
                names.setdefault(score.model_key, score.model)
        return names

    def settings(self) -> list[ModelKey]:
        """Return the models that have a setting, in the order in which they come up."""
        return list(self.names())

    def planned(self) -> list[ModelKey]:
        """Return all models of the study, evaluated or not: the manifest's, and what there is of sizes that it does not have."""
        names = self.scope.model_keys.values()
        return [*names, *(one for one in self.settings() if not names or one.size not in self.scope.sizes)]

    def grouped(self, settings: Iterable[ModelKey] | None = None) -> Groups:
        """Return its models, or these, by setup, as setups.grouped has them."""
        return group_by_setup(self.settings() if settings is None else settings, self.planned(), self.scope.sizes)

    def sizes_of(self, settings: Iterable[ModelKey]) -> list[str]:
        """Return their sizes, smallest first, as far as manifest or names say it."""
        return sort_sizes(settings, self.scope.sizes)

    @functools.cached_property
    def mask_ratio(self) -> float | None:
        """The one that stands for MLM, as setups.reference_mask has it."""
        return reference_mask_ratio(self.planned())

    def datasets(self) -> list[tuple[str, str]]:
        """Return (family, data set): the study's families and sets in its order, then others as they come up; averages last."""
        by_family = datasets_by_family(((score.family, score.dataset) for score in self.scores), STUDY_DATASETS)
        return [(family, name) for family, names in by_family.items() for name in names]


def read_evidence(results: Path, settings: Mapping[str, ModelKey], metric: str = PAPER_SCORE, kind: IntervalKind = "normal") -> Evidence:
    """Read a tree of results; `settings`: its models by name, others keep None. Raises InputError for no results or metric."""
    return build_evidence(read_result_tree(results), settings.get, metric, kind)


def build_evidence(
    results: Sequence[Result],
    resolve_model_key: Callable[[str], ModelKey | None],
    metric: str = PAPER_SCORE,
    kind: IntervalKind = "normal",
    scope: StudyScope = EMPTY_SCOPE,
) -> Evidence:
    """Return the scores of runs that were found in a tree; `setting_of` says what a model's name stands for, if it is known.

    With the grid of a `scope`, only what is in it counts. Raises InputError for a metric that no finished run has.
    """
    known = {PAPER_SCORE, *(name for run in results if run.test is not None for name in run.test.metrics)}
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
        model_key, score_by_cell = resolve_model_key(model), {}
        for cell in members:
            name = cell.dataset + suffix.format(cell.train_on)
            failed = sum(run.failure is not None for run in cell.runs)
            grids.append(GridStatus(model, model_key, str(family), name, cell.train_on, _collapsed_by_run(cell), failed, cell.planned_run_count))
            score_by_cell[id(cell)] = _build_score(name, [cell], model_key, metric, kind)
        averages = []
        for over in group_for_averages(family, members):
            dataset_scores = [score_by_cell[id(cell)] for cell in over]
            if None not in dataset_scores:
                averages.append(_build_score(AVERAGE + suffix.format(over[0].train_on), over, model_key, metric, kind, dataset_scores))
        scores += [score for score in (*score_by_cell.values(), *averages) if score is not None]
    return Evidence(scores, metric, kind, scope, grids)


def _collapsed_by_run(cell: ScoreCell) -> dict[tuple[float, int], bool]:
    return {(run.learning_rate, run.seed): run.failure is not None or bool(run.test.collapsed) for run in cell.runs}


def _build_score(
    name: str, over: Sequence[ScoreCell], model_key: ModelKey | None, metric: str, kind: IntervalKind, members: Sequence[Score] = ()
) -> Score | None:
    """Return the score of one cell, or of an average over the `members` of several.

    None if no rate of some cell is complete yet, if the family has no such metric, or if the seeds of the cells differ.
    """

    def read_metric(run: Result) -> float | None:
        return run.test.score if metric == PAPER_SCORE else run.test.metrics.get(metric)

    if not (by_seed := average_by_seed(over, read_metric)):
        return None
    interval = compute_interval(list(by_seed.values()), kind)
    chosen = [run for cell in over for run in cell.runs_at_rate(cell.chosen_rate)]
    ended = collapsed_by_training((cell.train_on, _collapsed_by_run(cell)) for cell in over)
    failed: dict[float, set[int]] = defaultdict(set)
    for run in (run for cell in over for run in cell.runs if run.failure is not None):
        failed[run.learning_rate].add(run.seed)
    single = {}
    if not members:
        paths = {run.seed: run.path for run in chosen}
        single = {"rate": over[0].chosen_rate, "floor": chosen[0].test.baseline.get(metric)}
        single["examples"] = functools.cache(functools.partial(_read_example_scores, paths, metric))
    return Score(
        model=over[0].model,
        model_key=model_key,
        family=str(over[0].family),
        dataset=name,
        mean=interval.mean,
        half_width=None if math.isnan(interval.half) else interval.half,
        seeds=by_seed,
        rates=_mean_rate_scores([read_scores_by_rate(cell, read_metric) for cell in over]),
        collapsed=sum(ended.values()),
        runs=len(ended),
        planned=sum({cell.train_on: cell.planned_run_count for cell in over}.values()),
        collapsed_at_rate=sum(bool(run.test.collapsed) for run in chosen),
        failed_seeds={rate: frozenset(seeds) for rate, seeds in failed.items()},
        members=tuple(members),
        **single,
    )


def _mean_rate_scores(parts: Sequence[RateScores]) -> dict[float, dict[int, float]]:
    """Return the mean of several sets at each rate and seed that all have."""
    means = {}
    for rate in parts[0]:
        each = [part.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, each))):
            means[rate] = {seed: math.fsum(of_set[seed] for of_set in each) / len(each) for seed in common}
    return means


def collapsed_by_training(grids: Iterable[tuple[Hashable, Mapping[tuple[float, int], bool]]]) -> dict[tuple[Hashable, float, int], bool]:
    """Return every training once, and whether it collapsed on some set; `ended`: the set trained on and Grid.ended of each."""
    collapsed_runs: dict[tuple[Hashable, float, int], bool] = defaultdict(bool)
    for train_on, collapsed_by_run in grids:
        for run, collapsed in collapsed_by_run.items():
            collapsed_runs[train_on, *run] |= collapsed
    return collapsed_runs


def _read_example_scores(paths: Mapping[int, Path], metric: str) -> dict[int, np.ndarray]:
    """Return float32[examples] by seed; nothing if some file has none of this metric."""
    scores = {}
    for seed, run_dir in paths.items():
        values = read_example_scores(run_dir / RESULTS, None if metric == PAPER_SCORE else metric)
        if not values:
            return {}
        scores[seed] = np.array(values, dtype=np.float32)
    return scores


def describe_missing_scores(evidence: Evidence) -> str:
    """Return a few sentences that name every model and data set without a score; "" where none lacks one."""
    scored = {(one.model, one.dataset) for one in evidence.scores}
    grids: dict[str, list[GridStatus]] = {model: [] for model in evidence.scope.model_keys}
    for one in evidence.grids:
        grids.setdefault(one.model, []).append(one)
    incomplete = []
    for model, of_model in grids.items():
        parts = []
        for one in of_model:
            if (model, one.dataset) not in scored:
                failed = f", {one.failed} failed" if one.failed else ""
                counts = f"{len(one.ended)} of {one.planned} runs ended{failed}"
                parts.append(f"{one.family} {dataset_label(one.family, one.dataset)}: {counts}")
        tried = {one.dataset.partition(" after ")[0] for one in of_model}
        parts += [f"{name}: no run" for _, name in evidence.scope.datasets if name not in tried]
        if of_model and parts:
            incomplete.append(f"{model} ({'; '.join(parts)})")
    unstarted = [model for model, of_model in grids.items() if not of_model]
    sentences = []
    if incomplete:
        sentences.append(f"Without a score, which takes a learning rate with every seed finished: {', '.join(incomplete)}.")
    if unstarted:
        sentences.append(f"Without any run: {', '.join(unstarted)}.")
    return " ".join(sentences)
