"""What a table's cell is made of: the score of a model on a data set, and what became of the runs behind it."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megaenc.study.setting import Setting


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
            return mean_by_rate([member.counted for member in self.members])
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


def examples_of(score: Score, seeds: Sequence[int]) -> np.ndarray | None:
    """float32[S, N] of one data set; None where some seed has no examples, or other ones."""
    of_seed = score.examples()
    if any(seed not in of_seed for seed in seeds) or len({len(of_seed[seed]) for seed in seeds}) != 1:
        return None
    return np.stack([of_seed[seed] for seed in seeds])


def trainings(ended: Iterable[tuple[Hashable, Mapping[tuple[float, int], bool]]]) -> dict[tuple[Hashable, float, int], bool]:
    """From what each set was trained on and what ended on it: every training once, and whether it collapsed on some set."""
    found: dict[tuple[Hashable, float, int], bool] = {}
    for train_on, of_set in ended:
        for (rate, seed), collapsed in of_set.items():
            found[train_on, rate, seed] = found.get((train_on, rate, seed), False) or collapsed
    return found


def mean_by_rate(parts: Sequence[Mapping[float, Mapping[int, float]]]) -> dict[float, dict[int, float]]:
    """Of several sets: at each rate and seed that all have, their mean."""
    found = {}
    for rate in parts[0]:
        each = [part.get(rate, {}) for part in parts]
        if common := sorted(set.intersection(*map(set, each))):
            found[rate] = {seed: math.fsum(of_set[seed] for of_set in each) / len(each) for seed in common}
    return found
