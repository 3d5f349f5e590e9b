"""What was measured: for each model and data set a score with its interval, the scores of its seeds and of single examples.

Read out of a tree of results as `megaenc finetune` writes it and as the study has published it. The numbers follow the study's
rules (megaenc.finetune.intervals): rate chosen on validation, mean and interval over seeds, averages formed by seed.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaenc.errors import InputError
from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import STUDY, Cell, Kind, Read, average, averaged, cells, interval, scores, trained_apart
from megaenc.finetune.results import RESULTS, Result, scan
from megaenc.study.setting import Setting

PAPER = "score"
AVERAGE = "average"


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
    """runs at any rate whose predictions are worthless, or whose loss became no number"""
    runs: int = 0
    at_rate_collapsed: int = 0
    """of `seeds`, those whose predictions are worthless; of an average over all its sets"""
    rates_failed: dict[float, frozenset[int]] = field(default_factory=dict)
    """by rate, the seeds whose run could not be finished there; empty for averages"""
    floor: float | None = None
    """what the family's trivial baseline gets; None for averages and where results do not say"""
    rate: float | None = None
    """the chosen one; None for averages and published tables"""
    members: tuple["Score", ...] = field(default=(), repr=False)
    """what an average is formed over; empty for data sets and published tables"""


@dataclass(frozen=True)
class Evidence:
    """Scores of one metric."""

    scores: list[Score]
    metric: str = PAPER
    """PAPER, the study's own, or a name of the field's metrics"""

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

    @functools.cached_property
    def _datasets(self) -> list[tuple[str, str]]:
        order = {(str(family), name): at for at, (family, name) in enumerate((f, n) for f in Family for n in STUDY[f])}
        families = list(Family)

        def place(of: tuple[str, str]) -> tuple[int, bool, int]:
            return families.index(Family(of[0])), of[1].startswith(AVERAGE), order.get(of, len(order))

        return sorted(dict.fromkeys((score.family, score.dataset) for score in self.scores), key=place)

    def datasets(self) -> list[tuple[str, str]]:
        """(family, data set): the study's families and sets in its order, then others as they come up; averages last in each."""
        return list(self._datasets)


def read_evidence(results: Path, settings: Mapping[str, Setting], metric: str = PAPER, kind: Kind = "normal") -> Evidence:
    """Read a tree of results; `settings` says what its models are by name, the others keep None.

    Raises InputError for a tree without results and for a metric that no finished run has.
    """
    return of_results(scan(results), settings.get, metric, kind)


def of_results(
    results: Sequence[Result], setting_of: Callable[[str], Setting | None], metric: str = PAPER, kind: Kind = "normal"
) -> Evidence:
    """The scores of runs that were found in a tree; `setting_of` says what a model's name stands for. See read_evidence."""
    read = _reader(results, metric)
    by_model: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(results):
        by_model[cell.family, cell.model].append(cell)
    found: list[Score] = []
    for (family, model), members in by_model.items():
        apart = trained_apart(members)
        made = {id(cell): _score(cell, setting_of(model), metric, read, kind, apart) for cell in members}
        of_sets = [score for score in made.values() if score is not None]
        found += of_sets
        for over in averaged(family, members):
            parts = [made[id(cell)] for cell in over]
            if None not in parts and (by_seed := average(over, read)) is not None:
                name = f"{AVERAGE} after {over[0].train_on}" if apart else AVERAGE
                found.append(_average(name, parts, by_seed, kind))
    return Evidence(found, metric)


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
    rates: dict[float, dict[int, float]] = {}
    for rate in cell.rates:
        of_rate = {run.seed: read(run) for run in cell.at(rate)}
        if of_rate and None not in of_rate.values():
            rates[rate] = of_rate
    failed: dict[float, set[int]] = defaultdict(set)
    for run in cell.runs:
        if run.failure is not None:
            failed[run.learning_rate].add(run.seed)
    chosen = cell.at(cell.chosen)
    mean, half = _summary(by_seed, kind)
    return Score(
        model=cell.model,
        setting=setting,
        family=str(cell.family),
        dataset=f"{cell.dataset} after {cell.train_on}" if apart else cell.dataset,
        mean=mean,
        half=half,
        seeds=by_seed,
        rates=rates,
        examples=functools.cache(functools.partial(_examples, {run.seed: run.path for run in chosen}, metric)),
        collapsed=sum(run.failure is not None or bool(run.test.collapsed) for run in cell.runs),
        runs=len(cell.runs),
        at_rate_collapsed=sum(bool(run.test.collapsed) for run in chosen),
        rates_failed={rate: frozenset(seeds) for rate, seeds in failed.items()},
        floor=chosen[0].test.baseline.get("score" if metric == PAPER else metric),
        rate=cell.chosen,
    )


def _average(name: str, parts: Sequence[Score], by_seed: dict[int, float], kind: Kind) -> Score:
    rates = {}
    for rate in parts[0].rates:
        each = [part.rates.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, each))):
            rates[rate] = {seed: math.fsum(of_set[seed] for of_set in each) / len(each) for seed in common}
    mean, half = _summary(by_seed, kind)
    return Score(
        model=parts[0].model,
        setting=parts[0].setting,
        family=parts[0].family,
        dataset=name,
        mean=mean,
        half=half,
        seeds=by_seed,
        rates=rates,
        collapsed=sum(part.collapsed for part in parts),
        runs=sum(part.runs for part in parts),
        at_rate_collapsed=sum(part.at_rate_collapsed for part in parts),
        members=tuple(parts),
    )


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
