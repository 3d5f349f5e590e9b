"""What was measured: for each model and data set a score with its interval, the scores of its seeds and of single examples.

Read out of a tree of results as `megaenc finetune` writes it and as the study has published it. The numbers follow the study's
rules (megaenc.finetune.intervals): rate chosen on validation, mean and interval over seeds, averages formed by seed.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaenc.errors import InputError
from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import (
    STUDY,
    Cell,
    Kind,
    Read,
    average,
    averaged,
    by_rate,
    cells,
    interval,
    scores,
    trained_apart,
)
from megaenc.finetune.results import RESULTS, Result, scan
from megaenc.study.scope import NOTHING, Scope
from megaenc.study.setting import Setting
from megaenc.study.setups import AVERAGE, Setup, grouped, is_average, reference_mask, sizes_of

PAPER = "score"


def nothing() -> dict[int, np.ndarray]:
    """The scores of examples where there are none."""
    return {}


@dataclass(frozen=True)
class Score:
    """Of a model on a data set, or on the average of a family: what a table's cell is made of. All scores are fractions."""

    model: str
    setting: Setting | None
    """None for a model that is none of the study's"""
    family: str
    dataset: str
    """as `megaenc finetune` names it; AVERAGE; with " after TRAINSET" where a set was evaluated after several trainings"""
    mean: float
    half: float | None
    """half the 95 % interval; None for a single seed"""
    seeds: dict[int, float] = field(default_factory=dict)
    """by fine-tuning seed, at the chosen rate; empty for published tables"""
    rates: dict[float, dict[int, float]] = field(default_factory=dict)
    """by rate, by seed, of what has finished; an average has the seeds that all its sets have"""
    examples: Callable[[], dict[int, np.ndarray]] = field(default=nothing, compare=False, repr=False)
    """reads float32[examples] by seed at the chosen rate, once; empty where no file has them and for averages"""
    collapsed: int = 0
    """trainings at any rate whose predictions are worthless, or whose loss became no number"""
    runs: int = 0
    """trainings that have ended, failed ones among them; of an average, those of several sets that share one count once"""
    planned: int = 0
    """trainings that were asked for; 0 where nobody knows, as of published tables"""
    at_rate_collapsed: int = 0
    """those at the chosen rate whose predictions are worthless, so that `mean` says little; of an average, of all its sets"""
    rates_failed: dict[float, frozenset[int]] = field(default_factory=dict)
    """by rate, the seeds whose loss became no number; `rates` has nothing of them"""
    floor: float | None = None
    """the score that needs no model: majority class, never an answer, ...; None where the results do not say"""
    rate: float | None = None
    """the chosen one; None for averages and published tables"""
    members: tuple["Score", ...] = field(default=(), repr=False)
    """what an average is formed over; empty for data sets and published tables"""

    @property
    def counted(self) -> dict[float, dict[int, float]]:
        """`rates` with every failed run at the floor, where that is known: a rate that broke a model cost it all that it had."""
        if self.members:
            return _mean_by_rate([member.counted for member in self.members])
        if self.floor is None:
            return self.rates
        found = {rate: dict(of_seeds) for rate, of_seeds in self.rates.items()}
        for rate, seeds in self.rates_failed.items():
            found.setdefault(rate, {}).update(dict.fromkeys(seeds, self.floor))
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Grid:
    """What has become of the runs of a model on a data set, whether or not they make a score."""

    model: str
    setting: Setting | None
    family: str
    dataset: str
    """as a score has it"""
    train_on: str
    ended: Mapping[tuple[float, int], bool]
    """by rate and seed, whether a run that has ended collapsed or failed"""
    failed: int
    """runs whose loss became no number"""
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
    def _places(self) -> dict[tuple[Setting | None, str, str], Score]:
        found: dict[tuple[Setting | None, str, str], Score] = {}
        for score in self.scores:
            for family in (score.family, ""):
                found.setdefault((score.setting, score.dataset, family), score)
        return found

    def find(self, setting: Setting, dataset: str, family: str = "") -> Score | None:
        """The score of a model on a data set; of averages `family` says which."""
        return self._places.get((setting, dataset, str(family)))

    def settings(self) -> list[Setting]:
        """The models that have a setting, in the order in which they come up."""
        return list(dict.fromkeys(score.setting for score in self.scores if score.setting is not None))

    def planned(self) -> list[Setting]:
        """All models of the study, evaluated or not: the manifest's, and what there is of sizes that it does not have."""
        names = self.scope.names.values()
        return [*names, *(one for one in self.settings() if not names or one.size not in self.scope.sizes)]

    def grouped(self) -> dict[Setup, list[Setting]]:
        """Its models by setup, as setups.grouped has them."""
        return grouped(self.settings(), self.planned(), self.scope.sizes)

    def sizes_of(self, settings: Iterable[Setting]) -> list[str]:
        """Their sizes, smallest first, as far as manifest or names say it."""
        return sizes_of(settings, self.scope.sizes)

    @functools.cached_property
    def mask_ratio(self) -> float | None:
        """The one that stands for MLM, as setups.reference_mask has it."""
        return reference_mask(self.planned())

    @functools.cached_property
    def _datasets(self) -> list[tuple[str, str]]:
        order = {(str(family), name): at for at, (family, name) in enumerate((f, n) for f in Family for n in STUDY[f])}
        families = list(Family)

        def place(of: tuple[str, str]) -> tuple[int, bool, int]:
            return families.index(Family(of[0])), is_average(of[1]), order.get(of, len(order))

        return sorted(dict.fromkeys((score.family, score.dataset) for score in self.scores), key=place)

    def datasets(self) -> list[tuple[str, str]]:
        """(family, data set): the study's families and sets in its order, then others as they come up; averages last in each."""
        return list(self._datasets)


def examples_of(score: Score, seeds: Sequence[int]) -> np.ndarray | None:
    """float32[S, N] of one data set; None where some seed has no examples, or other ones."""
    of_seed = score.examples()
    if any(seed not in of_seed for seed in seeds) or len({len(of_seed[seed]) for seed in seeds}) != 1:
        return None
    return np.stack([of_seed[seed] for seed in seeds])


def read_evidence(results: Path, settings: Mapping[str, Setting], metric: str = PAPER, kind: Kind = "normal") -> Evidence:
    """Read a tree of results; `settings` says what its models are by name, the others keep None.

    Raises InputError for a tree without results and for a metric that no finished run has.
    """
    return of_results(scan(results), settings.get, metric, kind)


def of_results(
    results: Sequence[Result],
    setting_of: Callable[[str], Setting | None],
    metric: str = PAPER,
    kind: Kind = "normal",
    scope: Scope = NOTHING,
) -> Evidence:
    """The scores of runs that were found in a tree; `setting_of` says what a model's name stands for. See read_evidence.

    With the grid of a `scope`, only what is in it counts.
    """
    read = _reader(results, metric)
    by_model: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(results, scope.asked):
        by_model[cell.family, cell.model].append(cell)
    found: list[Score] = []
    grids: list[Grid] = []
    for (family, model), members in by_model.items():
        apart, setting = trained_apart(members), setting_of(model)
        grids += [_grid(cell, setting, apart) for cell in members]
        made = {id(cell): _score(cell, setting, metric, read, kind, apart) for cell in members}
        of_sets = [score for score in made.values() if score is not None]
        found += of_sets
        for over in averaged(family, members):
            parts = [made[id(cell)] for cell in over]
            if None not in parts and (by_seed := average(over, read)) is not None:
                name = f"{AVERAGE} after {over[0].train_on}" if apart else AVERAGE
                found.append(_average(name, over, parts, by_seed, kind))
    return Evidence(found, metric, kind, scope, grids)


def _grid(cell: Cell, setting: Setting | None, apart: bool) -> Grid:
    return Grid(
        model=cell.model,
        setting=setting,
        family=str(cell.family),
        dataset=_name(cell, apart),
        train_on=cell.train_on,
        ended=_ended(cell),
        failed=sum(run.failure is not None for run in cell.runs),
        planned=cell.planned,
    )


def _name(cell: Cell, apart: bool) -> str:
    return f"{cell.dataset} after {cell.train_on}" if apart else cell.dataset


def _ended(cell: Cell) -> dict[tuple[float, int], bool]:
    return {(run.learning_rate, run.seed): run.failure is not None or bool(run.test.collapsed) for run in cell.runs}


def trainings(ended: Iterable[tuple[Hashable, Mapping[tuple[float, int], bool]]]) -> dict[tuple[Hashable, float, int], bool]:
    """From what each set was trained on and what ended on it: every training once, and whether it collapsed on some set."""
    found: dict[tuple[Hashable, float, int], bool] = {}
    for train_on, of_set in ended:
        for (rate, seed), collapsed in of_set.items():
            found[train_on, rate, seed] = found.get((train_on, rate, seed), False) or collapsed
    return found


def _reader(results: Iterable[Result], metric: str) -> Read:
    if metric == PAPER:
        return lambda run: run.test.score
    known = sorted({name for run in results if run.test is not None for name in run.test.metrics})
    if metric not in known:
        raise InputError(f"metric `{metric}`: no result has it, expected {' or '.join([PAPER, *known])}")
    return lambda run: run.test.metrics.get(metric)


def _score(cell: Cell, setting: Setting | None, metric: str, read: Read, kind: Kind, apart: bool) -> Score | None:
    if not (by_seed := scores(cell, read)):  # no rate is complete yet, or the family has no such metric
        return None
    mean, half = _summary(by_seed, kind)
    chosen = cell.at(cell.chosen)
    failed: dict[float, set[int]] = defaultdict(set)
    for run in cell.runs:
        if run.failure is not None:
            failed[run.learning_rate].add(run.seed)
    return Score(
        model=cell.model,
        setting=setting,
        family=str(cell.family),
        dataset=_name(cell, apart),
        mean=mean,
        half=half,
        seeds=by_seed,
        rates=by_rate(cell, read),
        examples=functools.cache(functools.partial(_examples, {run.seed: run.path for run in chosen}, metric)),
        collapsed=sum(_ended(cell).values()),
        runs=len(cell.runs),
        planned=cell.planned,
        at_rate_collapsed=sum(bool(run.test.collapsed) for run in chosen),
        rates_failed={rate: frozenset(seeds) for rate, seeds in failed.items()},
        floor=chosen[0].test.baseline.get(metric),
        rate=cell.chosen,
    )


def _average(name: str, over: Sequence[Cell], parts: Sequence[Score], by_seed: dict[int, float], kind: Kind) -> Score:
    mean, half = _summary(by_seed, kind)
    ended = trainings((cell.train_on, _ended(cell)) for cell in over)
    failed: dict[float, set[int]] = defaultdict(set)
    for part in parts:
        for rate, seeds in part.rates_failed.items():
            failed[rate].update(seeds)
    return Score(
        model=parts[0].model,
        setting=parts[0].setting,
        family=parts[0].family,
        dataset=name,
        mean=mean,
        half=half,
        seeds=by_seed,
        rates=_mean_by_rate([part.rates for part in parts]),
        collapsed=sum(ended.values()),
        runs=len(ended),
        planned=sum({cell.train_on: cell.planned for cell in over}.values()),
        at_rate_collapsed=sum(part.at_rate_collapsed for part in parts),
        rates_failed={rate: frozenset(seeds) for rate, seeds in failed.items()},
        members=tuple(parts),
    )


def _mean_by_rate(parts: Sequence[Mapping[float, Mapping[int, float]]]) -> dict[float, dict[int, float]]:
    """Of several sets: at each rate and seed that all have, their mean."""
    found = {}
    for rate in parts[0]:
        each = [part.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, each))):
            found[rate] = {seed: math.fsum(of_set[seed] for of_set in each) / len(each) for seed in common}
    return found


def _summary(by_seed: dict[int, float], kind: Kind) -> tuple[float, float | None]:
    made = interval(list(by_seed.values()), kind)
    return made.mean, None if math.isnan(made.half) else made.half


def _examples(paths: Mapping[int, Path], metric: str) -> dict[int, np.ndarray]:
    """float32[examples] by seed; empty where some file has none of this metric.

    A standard metric is one only where it is the mean of what its examples score: span F1, say, is not.
    """
    found = {}
    for seed, folder in paths.items():
        try:
            test = json.loads((folder / RESULTS).read_bytes())["test"]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{folder / RESULTS}: {error!r}; expected what a run wrote there") from None
        mean = test["score"] if metric == PAPER else test["metrics"][metric]
        of_each = test.get("scores_i") if metric == PAPER else (test.get("metrics_i") or {}).get(metric)
        if not of_each or abs(math.fsum(of_each) / len(of_each) - mean) > 1e-6:
            return {}
        found[seed] = np.array(of_each, dtype=np.float32)
    return found
