"""What was measured: for each model and data set a score with its interval, the scores of its seeds and of single examples.

Read out of a tree of results as `megaenc finetune` writes it and as the study has published it. The numbers follow the study's
rules (megaenc.finetune.intervals): rate chosen on validation, mean and interval over seeds, averages formed by seed.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    trained_apart,
)
from megaenc.finetune.results import RESULTS, Result, read_examples, scan
from megaenc.study.scope import NOTHING, Scope
from megaenc.study.score import Grid, Score, mean_by_rate, trainings
from megaenc.study.setting import Setting
from megaenc.study.setups import AVERAGE, Setup, dataset_label, grouped, is_average, reference_mask, sizes_of

PAPER = "score"


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
    def _places(self) -> dict[tuple[Setting | str, str, str], Score]:
        found: dict[tuple[Setting | str, str, str], Score] = {}
        for score in self.scores:
            for family in (score.family, ""):
                found.setdefault((score.setting or score.model, score.dataset, family), score)
        return found

    def find(self, model: Setting | str, dataset: str, family: str = "") -> Score | None:
        """Return the score of a model, by its name if it has no setting, on a data set; of averages `family` says which."""
        return self._places.get((model, dataset, str(family)))

    def names(self) -> dict[Setting, str]:
        """Return what the models that have a setting are called."""
        return {score.setting: score.model for score in reversed(self.scores) if score.setting is not None}

    def settings(self) -> list[Setting]:
        """The models that have a setting, in the order in which they come up."""
        return list(dict.fromkeys(score.setting for score in self.scores if score.setting is not None))

    def planned(self) -> list[Setting]:
        """All models of the study, evaluated or not: the manifest's, and what there is of sizes that it does not have."""
        names = self.scope.names.values()
        return [*names, *(one for one in self.settings() if not names or one.size not in self.scope.sizes)]

    def grouped(self, settings: Iterable[Setting] | None = None) -> dict[Setup, list[Setting]]:
        """Return its models, or these, by setup, as setups.grouped has them."""
        return grouped(self.settings() if settings is None else settings, self.planned(), self.scope.sizes)

    def sizes_of(self, settings: Iterable[Setting]) -> list[str]:
        """Their sizes, smallest first, as far as manifest or names say it."""
        return sizes_of(settings, self.scope.sizes)

    @functools.cached_property
    def mask_ratio(self) -> float | None:
        """The one that stands for MLM, as setups.reference_mask has it."""
        return reference_mask(self.planned())

    def datasets(self) -> list[tuple[str, str]]:
        """Return (family, data set): the study's families and sets in its order, then others as they come up; averages last."""
        order = {(str(family), name): at for at, (family, name) in enumerate((f, n) for f in Family for n in STUDY[f])}
        families = list(Family)

        def place(of: tuple[str, str]) -> tuple[int, bool, int]:
            return families.index(Family(of[0])), is_average(of[1]), order.get(of, len(order))

        return sorted(dict.fromkeys((score.family, score.dataset) for score in self.scores), key=place)


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
    """Return the scores of runs that were found in a tree; `setting_of` says what a model's name stands for, if it is known.

    With the grid of a `scope`, only what is in it counts. Raises InputError for a metric that no finished run has.
    """
    read = _reader(results, metric)
    by_model: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(results, scope.asked):
        by_model[cell.family, cell.model].append(cell)
    found: list[Score] = []
    grids: list[Grid] = []
    for (family, model), members in by_model.items():
        apart, setting = trained_apart(members), setting_of(model)
        made: dict[int, Score] = {}
        for cell in members:
            name = f"{cell.dataset} after {cell.train_on}" if apart else cell.dataset
            failed = sum(run.failure is not None for run in cell.runs)
            grids.append(Grid(model, setting, str(family), name, cell.train_on, _ended(cell), failed, cell.planned))
            if (score := _score(name, [cell], setting, metric, read, kind)) is not None:
                made[id(cell)] = score
        found += made.values()
        for over in averaged(family, members):
            if all(id(cell) in made for cell in over):
                name = f"{AVERAGE} after {over[0].train_on}" if apart else AVERAGE
                of_sets = [made[id(cell)] for cell in over]
                if (score := _score(name, over, setting, metric, read, kind, of_sets)) is not None:
                    found.append(score)
    return Evidence(found, metric, kind, scope, grids)


def _ended(cell: Cell) -> dict[tuple[float, int], bool]:
    return {(run.learning_rate, run.seed): run.failure is not None or bool(run.test.collapsed) for run in cell.runs}


def _reader(results: Iterable[Result], metric: str) -> Read:
    if metric == PAPER:
        return lambda run: run.test.score
    known = sorted({name for run in results if run.test is not None for name in run.test.metrics})
    if metric not in known:
        raise InputError(f"metric `{metric}`: no result has it, expected {' or '.join([PAPER, *known])}")
    return lambda run: run.test.metrics.get(metric)


def _score(
    name: str,
    over: Sequence[Cell],
    setting: Setting | None,
    metric: str,
    read: Read,
    kind: Kind,
    members: Sequence[Score] = (),
) -> Score | None:
    """Return the score of one cell, or of an average over the `members` of several.

    None if no rate of some cell is complete yet, if the family has no such metric, or if the seeds of the cells differ.
    """
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
        rates=mean_by_rate([by_rate(cell, read) for cell in over]),
        collapsed=sum(ended.values()),
        runs=len(ended),
        planned=sum({cell.train_on: cell.planned for cell in over}.values()),
        at_rate_collapsed=sum(bool(run.test.collapsed) for run in chosen),
        rates_failed={rate: frozenset(seeds) for rate, seeds in failed.items()},
        members=tuple(members),
        **of_one,
    )


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
    there = {(one.model, one.dataset) for one in evidence.scores}
    grids: dict[str, dict[str, Grid]] = defaultdict(dict)
    for one in evidence.grids:
        grids[one.model][one.dataset] = one
    planned = [name for _, name in evidence.scope.datasets]
    begun, never = [], []
    for model in dict.fromkeys([*evidence.scope.names, *grids]):
        of_model = grids.get(model, {})
        if not of_model:
            never.append(model)
            continue
        parts = [_of_grid(one) for dataset, one in of_model.items() if (model, dataset) not in there]
        known = {dataset.partition(" after ")[0] for dataset in of_model}
        parts += [f"{dataset}: no run" for dataset in planned if dataset not in known]
        if parts:
            begun.append(f"{model} ({'; '.join(parts)})")
    said = []
    if begun:
        said.append(f"Without a score, which takes a learning rate with every seed finished: {', '.join(begun)}.")
    if never:
        said.append(f"Without any run: {', '.join(never)}.")
    return " ".join(said)


def _of_grid(one: Grid) -> str:
    failed = f", {one.failed} failed" if one.failed else ""
    return f"{one.family} {dataset_label(one.family, one.dataset)}: {len(one.ended)} of {one.planned} runs ended{failed}"
