"""One model, or several, against another: which numbers of the evidence that takes, and how a claim's comparisons are corrected.

A line is a question such as "MLM less CLM, 610M, on SC": scores times weights, by seed of the pretraining. Lines are tested one
by one and pooled, all of a claim together: see megaenc.study.pooling.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import STUDY
from megaenc.study import statistics
from megaenc.study.evidence import AVERAGE, Evidence
from megaenc.study.score import Score
from megaenc.study.setting import Setting
from megaenc.study.setups import is_average
from megaenc.study.statistics import LEVEL, Test

Outcome = Literal["holds", "reversed", "not resolved", "no data"]
Terms = Sequence[tuple[float, Score]]


@dataclass(frozen=True)
class Comparison:
    """Two sides on a data set, or over several. Differences are in points (percent), left less right."""

    left: str
    right: str
    where: str
    """size, steps, ...: what both sides share"""
    family: str
    """empty where several are pooled"""
    dataset: str
    """`average` of a family, or "all" of several"""
    test: Test
    """in fractions, with degrees of freedom and where the uncertainty comes from"""
    p: float
    """nan where nothing says how far chance goes: one seed, or seeds that agree to the last digit"""
    p_adjusted: float
    """Holm's, over the comparisons of the claim; of a pooled one over the claims"""
    effect: float
    """Hedges' g: the difference over the sd of the seeds; nan where that is not known"""
    verdict: Outcome = "not resolved"
    """with respect to the claim: `holds` if it goes the claimed way"""
    bootstrap: tuple[tuple[float, float], tuple[float, float]] | None = None
    """percentile and studentised intervals of seeds and examples resampled, for a look; no verdict rests on them"""
    pretrained: int = 1
    """runs of the pretraining of each side; of pooled lines the fewest"""
    lent: bool = False
    """whether lines of one run have the variance between runs from other lines of the claim"""
    collapsed: tuple[str, ...] = ()
    """the sides that are no more than what a model says that learned nothing: not to be compared"""

    @property
    def difference(self) -> float:
        """In points."""
        return 100 * self.test.difference

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; nan where there is none; where seeds say nothing, over the examples alone."""
        return 100 * self.test.low

    @property
    def high(self) -> float:
        """Its upper end."""
        return 100 * self.test.high

    @functools.cached_property
    def seeds_needed(self) -> float | None:
        """With which a true difference of this size is seen in 80 % of studies, before any correction; None: not known.

        inf where no number of seeds is enough, as the examples are too few.
        """
        if self.test.seeds < 2 or math.isnan(self.test.p):
            return None
        needed = statistics.seeds_needed(self.test.difference, self.test.components, self.test.seeds)
        return math.inf if needed is None else needed


@dataclass(frozen=True)
class Line:
    """A question to the evidence, before it is tested."""

    names: tuple[str, str]
    where: str
    family: str
    dataset: str
    size: str
    terms: Mapping[int, Terms]
    """by seed of the pretraining: scores times weights, the left side's weights positive"""
    source: Mapping[int, Terms] = field(default_factory=dict)
    """the evidence's scores, if `terms` hold numbers made of them"""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the pretraining."""
        return tuple(sorted(self.terms))

    @property
    def members(self) -> list[list[tuple[float, Score]]]:
        """By run of the pretraining, the evidence's scores with their weights, averages as the sets they are formed over."""
        every = (self.source or self.terms).values()
        return [[(weight, member) for weight, score in terms for member in score.members or (score,)] for terms in every]

    @functools.cached_property
    def collapsed(self) -> tuple[str, ...]:
        """The sides with worthless predictions in at least half of the runs at the chosen rate, on one of the data sets."""
        worthless: dict[tuple[bool, str], int] = defaultdict(int)
        runs: dict[tuple[bool, str], int] = defaultdict(int)
        for weight, member in (pair for of_run in self.members for pair in of_run):
            worthless[weight > 0, member.dataset] += member.at_rate_collapsed
            runs[weight > 0, member.dataset] += len(member.seeds)
        sides = {place[0] for place, count in worthless.items() if count and 2 * count >= runs[place]}
        return tuple(name for name, side in zip(self.names, (True, False), strict=True) if side in sides)


def of_family(evidence: Evidence, family: str, settings: Sequence[Setting]) -> tuple[str, list[list[tuple[float, Score]]]] | None:
    """Return what stands for a family: its average if all have one over the same sets, else the mean over the sets all have.

    That is its name and, for each setting, scores with weights that add up to one; None if they have nothing in common.
    """
    if not settings:
        return None
    averages = [evidence.find(setting, AVERAGE, family) for setting in settings]
    if None not in averages and len({tuple(member.dataset for member in average.members) for average in averages}) == 1:
        return AVERAGE, [[(1.0, average)] for average in averages]
    names = [name for of, name in evidence.datasets() if of == family and not is_average(name)]
    common = [name for name in names if all(evidence.find(setting, name, family) is not None for setting in settings)]
    of_study = [name for name in STUDY[Family(family)] if name in common]
    common = of_study if len(of_study) == 3 else common
    if not common:
        return None
    label = common[0] if len(common) == 1 else f"{AVERAGE} of {', '.join(common)}"
    return label, [[(1 / len(common), evidence.find(setting, name, family)) for name in common] for setting in settings]


def lines_of(
    evidence: Evidence,
    names: tuple[str, str],
    where: str,
    sides: Mapping[int, tuple[Setting, Setting]],
    families: Sequence[str],
) -> list[Line]:
    """Return a line for each family in which the sides, given by seed of the pretraining, were evaluated on the same sets."""
    found = []
    for family in families:
        having = {seed: pair for seed, pair in sides.items() if of_family(evidence, family, pair) is not None}
        if (standing := of_family(evidence, family, [one for pair in having.values() for one in pair])) is None:
            continue
        label, parts = standing  # the same sets for every seed of the pretraining
        terms = {
            seed: [*left, *((-weight, score) for weight, score in right)]
            for seed, left, right in zip(having, parts[::2], parts[1::2], strict=True)
        }
        found.append(Line(names, where, family, label, next(iter(having.values()))[0].size, terms))
    return found


def adjusted(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of one claim with Holm's p and the verdict of each: holds above 0, reversed below."""
    corrected = statistics.holm([one.p for one in found])
    return [replace(one, p_adjusted=p, verdict=_directed(one.difference, p)) for one, p in zip(found, corrected, strict=True)]


def _directed(difference: float, p: float) -> Outcome:
    if not p < LEVEL:
        return "not resolved"
    return "holds" if difference > 0 else "reversed"


def better_first(one: Comparison) -> Comparison:
    """Return the same with the better side on the left."""
    if not one.difference < 0:
        return one
    turned = replace(one.test, difference=-one.test.difference, low=-one.test.high, high=-one.test.low)
    verdict = "holds" if one.verdict == "reversed" else one.verdict
    return replace(one, left=one.right, right=one.left, effect=-one.effect, verdict=verdict, test=turned)
