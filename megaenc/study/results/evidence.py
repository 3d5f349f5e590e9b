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
from megaenc.finetune.results.aggregate import STUDY, Kind, ScoreCell, average, averaged, by_rate, cells, interval, trained_apart
from megaenc.finetune.results.files import RESULTS, Result, read_examples, scan
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import NOTHING, Scope
from megaenc.study.results.groups import AVERAGE, Groups, dataset_label, datasets_of, grouped, reference_mask, sizes_of

PAPER = "score"
Rates = Mapping[float, Mapping[int, float]]
"""Scores by learning rate, by fine-tuning seed."""


@dataclass(frozen=True)
class Score:
    """Of a model on a data set, or on the average of a family: what a table's cell is made of. All scores are fractions."""

    model: str
    setting: ModelKey | None
    """None for a model that is none of the study's"""
    family: str
    dataset: str
    """as `megaenc finetune` names it; AVERAGE; with " after TRAINSET" if a set was evaluated after several trainings"""
    mean: float
    half: float | None
    """half the 95 % interval; None for a single seed"""
    seeds: Mapping[int, float] = field(default_factory=dict)
    """by fine-tuning seed, at the chosen rate; empty for published tables"""
    rates: Rates = field(default_factory=dict)
    """of what has finished; an average has the seeds that all its sets have"""
    examples: Callable[[], Mapping[int, np.ndarray]] = field(default=dict, compare=False, repr=False)
    """reads float32[examples] by seed at the chosen rate, once; empty where no file has them and for averages"""
    collapsed: int = 0
    """trainings at any rate whose predictions are worthless, or whose loss became NaN"""
    runs: int = 0
    """trainings that have ended, failed ones among them; of an average, those of several sets that share one count once"""
    planned: int = 0
    """trainings that were asked for; 0 if that is not known, as of published tables"""
    at_rate_collapsed: int = 0
    """those at the chosen rate whose predictions are worthless, so that `mean` says little; of an average, of all its sets"""
    rates_failed: Mapping[float, frozenset[int]] = field(default_factory=dict)
    """by rate, the seeds whose loss became NaN; `rates` has nothing of them"""
    floor: float | None = None
    """the score that needs no model: majority class, never an answer, ...; None where the results do not say"""
    rate: float | None = None
    """the chosen one; None for averages and published tables"""
    members: tuple["Score", ...] = field(default=(), repr=False)
    """what an average is formed over; empty for data sets and published tables"""

    @property
    def counted(self) -> Rates:
        """`rates` with every failed run at the floor, where that is known: a rate that broke a model cost it all that it had."""
        if self.members:
            return _mean_by_rate([member.counted for member in self.members])
        found = {rate: dict(of_seeds) for rate, of_seeds in self.rates.items()}
        if self.floor is not None:
            for rate, seeds in self.rates_failed.items():
                found.setdefault(rate, {}).update(dict.fromkeys(seeds, self.floor))
        return dict(sorted(found.items()))

    def examples_of(self, seeds: Sequence[int]) -> np.ndarray | None:
        """Return float32[S, N] of one data set; None if some seed has no examples, or other ones."""
        of_seed = self.examples()
        if any(seed not in of_seed for seed in seeds) or len({len(of_seed[seed]) for seed in seeds}) != 1:
            return None
        return np.stack([of_seed[seed] for seed in seeds])


@dataclass(frozen=True)
class Grid:
    """What has become of the runs of a model on a data set, whether or not they make a score."""

    model: str
    setting: ModelKey | None
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
    metric: str = PAPER
    """PAPER, the study's own, or a name of the field's metrics"""
    kind: Kind = "normal"
    """of the intervals"""
    scope: Scope = NOTHING
    """what a manifest says should be there"""
    grids: list[Grid] = field(default_factory=list)
    """of every model and data set with a run, those without a score too; none of published tables"""

    @functools.cached_property
    def _places(self) -> dict[tuple[ModelKey | str, str, str], Score]:
        found: dict[tuple[ModelKey | str, str, str], Score] = {}
        for score in self.scores:
            for family in (score.family, ""):
                found.setdefault((score.setting or score.model, score.dataset, family), score)
        return found

    def find(self, model: ModelKey | str, dataset: str, family: str = "") -> Score | None:
        """Return the score of a model, by its name if it has no setting, on a data set; of averages `family` says which."""
        return self._places.get((model, dataset, str(family)))

    def names(self) -> dict[ModelKey, str]:
        """Return what the models that have a setting are called, in the order in which they come up."""
        found: dict[ModelKey, str] = {}
        for score in self.scores:
            if score.setting is not None:
                found.setdefault(score.setting, score.model)
        return found

    def settings(self) -> list[ModelKey]:
        """Return the models that have a setting, in the order in which they come up."""
        return list(self.names())

    def planned(self) -> list[ModelKey]:
        """Return all models of the study, evaluated or not: the manifest's, and what there is of sizes that it does not have."""
        names = self.scope.names.values()
        return [*names, *(one for one in self.settings() if not names or one.size not in self.scope.sizes)]

    def grouped(self, settings: Iterable[ModelKey] | None = None) -> Groups:
        """Return its models, or these, by setup, as setups.grouped has them."""
        return grouped(self.settings() if settings is None else settings, self.planned(), self.scope.sizes)

    def sizes_of(self, settings: Iterable[ModelKey]) -> list[str]:
        """Return their sizes, smallest first, as far as manifest or names say it."""
        return sizes_of(settings, self.scope.sizes)

    @functools.cached_property
    def mask_ratio(self) -> float | None:
        """The one that stands for MLM, as setups.reference_mask has it."""
        return reference_mask(self.planned())

    def datasets(self) -> list[tuple[str, str]]:
        """Return (family, data set): the study's families and sets in its order, then others as they come up; averages last."""
        found = datasets_of(((score.family, score.dataset) for score in self.scores), STUDY)
        return [(family, name) for family, names in found.items() for name in names]


def read_evidence(results: Path, settings: Mapping[str, ModelKey], metric: str = PAPER, kind: Kind = "normal") -> Evidence:
    """Read a tree of results; `settings`: its models by name, others keep None. Raises InputError for no results or metric."""
    return of_results(scan(results), settings.get, metric, kind)


def of_results(
    results: Sequence[Result],
    setting_of: Callable[[str], ModelKey | None],
    metric: str = PAPER,
    kind: Kind = "normal",
    scope: Scope = NOTHING,
) -> Evidence:
    """Return the scores of runs that were found in a tree; `setting_of` says what a model's name stands for, if it is known.

    With the grid of a `scope`, only what is in it counts. Raises InputError for a metric that no finished run has.
    """
    known = {PAPER, *(name for run in results if run.test is not None for name in run.test.metrics)}
    if metric not in known:
        expected = " or ".join([PAPER, *sorted(known - {PAPER})])
        raise InputError(f"metric `{metric}`: no result has it, expected {expected}")
    by_model: dict[tuple[str, str], list[ScoreCell]] = defaultdict(list)
    for cell in cells(results, scope.asked):
        by_model[cell.family, cell.model].append(cell)
    found: list[Score] = []
    grids: list[Grid] = []
    for (family, model), members in by_model.items():
        after = " after {}" if trained_apart(members) else ""
        setting, made = setting_of(model), {}
        for cell in members:
            name = cell.dataset + after.format(cell.train_on)
            failed = sum(run.failure is not None for run in cell.runs)
            grids.append(Grid(model, setting, str(family), name, cell.train_on, _ended(cell), failed, cell.planned))
            made[id(cell)] = _score(name, [cell], setting, metric, kind)
        of_average = []
        for over in averaged(family, members):
            of_sets = [made[id(cell)] for cell in over]
            if None not in of_sets:
                of_average.append(_score(AVERAGE + after.format(over[0].train_on), over, setting, metric, kind, of_sets))
        found += [score for score in (*made.values(), *of_average) if score is not None]
    return Evidence(found, metric, kind, scope, grids)


def _ended(cell: ScoreCell) -> dict[tuple[float, int], bool]:
    return {(run.learning_rate, run.seed): run.failure is not None or bool(run.test.collapsed) for run in cell.runs}


def _score(
    name: str, over: Sequence[ScoreCell], setting: ModelKey | None, metric: str, kind: Kind, members: Sequence[Score] = ()
) -> Score | None:
    """Return the score of one cell, or of an average over the `members` of several.

    None if no rate of some cell is complete yet, if the family has no such metric, or if the seeds of the cells differ.
    """

    def read(run: Result) -> float | None:
        return run.test.score if metric == PAPER else run.test.metrics.get(metric)

    if not (by_seed := average(over, read)):
        return None
    made = interval(list(by_seed.values()), kind)
    chosen = [run for cell in over for run in cell.at(cell.chosen)]
    ended = trainings((cell.train_on, _ended(cell)) for cell in over)
    failed: dict[float, set[int]] = defaultdict(set)
    for run in (run for cell in over for run in cell.runs if run.failure is not None):
        failed[run.learning_rate].add(run.seed)
    of_one = {}
    if not members:
        paths = {run.seed: run.path for run in chosen}
        of_one = {"rate": over[0].chosen, "floor": chosen[0].test.baseline.get(metric)}
        of_one["examples"] = functools.cache(functools.partial(_examples, paths, metric))
    return Score(
        model=over[0].model,
        setting=setting,
        family=str(over[0].family),
        dataset=name,
        mean=made.mean,
        half=None if math.isnan(made.half) else made.half,
        seeds=by_seed,
        rates=_mean_by_rate([by_rate(cell, read) for cell in over]),
        collapsed=sum(ended.values()),
        runs=len(ended),
        planned=sum({cell.train_on: cell.planned for cell in over}.values()),
        at_rate_collapsed=sum(bool(run.test.collapsed) for run in chosen),
        rates_failed={rate: frozenset(seeds) for rate, seeds in failed.items()},
        members=tuple(members),
        **of_one,
    )


def _mean_by_rate(parts: Sequence[Rates]) -> dict[float, dict[int, float]]:
    """Return the mean of several sets at each rate and seed that all have."""
    found = {}
    for rate in parts[0]:
        each = [part.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, each))):
            found[rate] = {seed: math.fsum(of_set[seed] for of_set in each) / len(each) for seed in common}
    return found


def trainings(ended: Iterable[tuple[Hashable, Mapping[tuple[float, int], bool]]]) -> dict[tuple[Hashable, float, int], bool]:
    """Return every training once, and whether it collapsed on some set; `ended`: the set trained on and Grid.ended of each."""
    found: dict[tuple[Hashable, float, int], bool] = defaultdict(bool)
    for train_on, of_set in ended:
        for run, collapsed in of_set.items():
            found[train_on, *run] |= collapsed
    return found


def _examples(paths: Mapping[int, Path], metric: str) -> dict[int, np.ndarray]:
    """Return float32[examples] by seed; nothing if some file has none of this metric."""
    found = {}
    for seed, folder in paths.items():
        of_each = read_examples(folder / RESULTS, None if metric == PAPER else metric)
        if not of_each:
            return {}
        found[seed] = np.array(of_each, dtype=np.float32)
    return found


def without_score(evidence: Evidence) -> str:
    """Return a few sentences that name every model and data set without a score; "" where none lacks one."""
    scored = {(one.model, one.dataset) for one in evidence.scores}
    grids: dict[str, list[Grid]] = {model: [] for model in evidence.scope.names}
    for one in evidence.grids:
        grids.setdefault(one.model, []).append(one)
    begun = []
    for model, of_model in grids.items():
        parts = []
        for one in of_model:
            if (model, one.dataset) not in scored:
                failed = f", {one.failed} failed" if one.failed else ""
                counts = f"{len(one.ended)} of {one.planned} runs ended{failed}"
                parts.append(f"{one.family} {dataset_label(one.family, one.dataset)}: {counts}")
        known = {one.dataset.partition(" after ")[0] for one in of_model}
        parts += [f"{name}: no run" for _, name in evidence.scope.datasets if name not in known]
        if of_model and parts:
            begun.append(f"{model} ({'; '.join(parts)})")
    never = [model for model, of_model in grids.items() if not of_model]
    said = []
    if begun:
        said.append(f"Without a score, which takes a learning rate with every seed finished: {', '.join(begun)}.")
    if never:
        said.append(f"Without any run: {', '.join(never)}.")
    return " ".join(said)
