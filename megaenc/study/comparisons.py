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
    """Two sides on a data set, or over several. Numbers are in points (percent); the difference is left less right."""

    left: str
    right: str
    where: str
    """size, steps, ...: what both sides share"""
    family: str
    """empty where several are pooled"""
    dataset: str
    """`average` of a family, or "all" of several"""
    difference: float
    low: float
    """of the 95 % interval; nan where there is none; where seeds say nothing, over the examples alone"""
    high: float
    p: float
    """nan where nothing says how far chance goes: one seed, or seeds that agree to the last digit"""
    p_adjusted: float
    """Holm's, over the comparisons of the claim; of a pooled one over the claims"""
    effect: float
    """Hedges' g: the difference over the sd of the seeds; nan where that is not known"""
    verdict: Outcome
    """with respect to the claim: `holds` if it goes the claimed way"""
    test: Test
    """the same as fractions, with degrees of freedom and where the uncertainty comes from"""
    bootstrap: tuple[tuple[float, float], tuple[float, float]] | None = None
    """percentile and studentised intervals of seeds and examples resampled, for a look; no verdict rests on them"""
    pretrained: int = 1
    """runs of the pretraining of each side; of pooled lines the fewest"""
    lent: bool = False
    """whether lines of one run have the variance between runs from other lines of the claim"""
    collapsed: tuple[str, ...] = ()
    """the sides that are no more than what a model says that learned nothing: not to be compared"""

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
    left: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """by seed of the pretraining, by fine-tuning seed: what is compared where it is not the scores"""
    right: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the pretraining."""
        return tuple(sorted(self.terms))

    @functools.cached_property
    def collapsed(self) -> tuple[str, ...]:
        """The sides with worthless predictions in at least half of the runs at the chosen rate, on one of the data sets."""
        counted: dict[tuple[bool, str], list[int]] = defaultdict(lambda: [0, 0])
        for weight, score in (term for terms in self.terms.values() for term in terms):
            for member in score.members or (score,):
                runs = counted[weight > 0, member.dataset]
                runs[0], runs[1] = runs[0] + member.at_rate_collapsed, runs[1] + len(member.seeds)
        sides = {side for (side, _), (worthless, runs) in counted.items() if worthless and 2 * worthless >= runs}
        return tuple(name for name, side in zip(self.names, (True, False), strict=True) if side in sides)


@dataclass(frozen=True)
class Pool:
    """Lines times weights, added up."""

    names: tuple[str, str]
    where: str
    family: str
    dataset: str
    lines: tuple[tuple[float, Line], ...]


def of_family(evidence: Evidence, family: str, settings: Sequence[Setting]) -> tuple[str, list[list[tuple[float, Score]]]] | None:
    """What stands for a family: its average where all have one over the same sets, else the mean over the sets all have.

    The name of that and, for each setting, the scores with weights that add up to one; None where there is nothing in common.
    """
    if not settings:
        return None
    averages = [evidence.find(setting, AVERAGE, family) for setting in settings]
    if None not in averages and len({tuple(member.dataset for member in average.members) for average in averages}) == 1:
        return AVERAGE, [[(1.0, average)] for average in averages]
    names = [name for of, name in evidence.datasets() if of == family and not is_average(name)]
    common = [name for name in names if all(evidence.find(setting, name, family) is not None for setting in settings)]
    of_study = [name for name in STUDY[Family(family)] if name in common]
    if len(of_study) == 3:
        common = of_study
    if not common:
        return None
    weight = 1 / len(common)
    label = common[0] if len(common) == 1 else f"{AVERAGE} of {', '.join(common)}"
    return label, [[(weight, evidence.find(setting, name, family)) for name in common] for setting in settings]


def lines_of(
    evidence: Evidence,
    names: tuple[str, str],
    where: str,
    sides: Mapping[int, tuple[Setting, Setting]],
    families: Sequence[str],
) -> list[Line]:
    """A line for each family in which the sides, given by seed of the pretraining, have been evaluated on the same sets."""
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


def pooled(lines: Sequence[Line], weights: Sequence[float] | None = None) -> Pool:
    """The mean of lines, or a weighted sum of them."""
    weights = weights or [1 / len(lines)] * len(lines)
    families = list(dict.fromkeys(line.family for line in lines))
    sets = list(dict.fromkeys(line.dataset for line in lines))
    places = list(dict.fromkeys(line.where for line in lines))
    return Pool(
        names=lines[0].names,
        where=places[0] if len(places) == 1 else f"{len(places)} pairs",
        family=families[0] if len(families) == 1 else "",
        dataset=sets[0] if len(sets) == 1 and len(families) == 1 else "all",
        lines=tuple((weight, line) for weight, line in zip(weights, lines, strict=True) if weight),
    )


def adjusted(found: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons of one claim with Holm's p and the verdict of each: holds above 0, reversed below."""
    corrected = statistics.holm([one.p for one in found])
    return [replace(one, p_adjusted=p, verdict=_directed(one.difference, p)) for one, p in zip(found, corrected, strict=True)]


def _directed(difference: float, p: float) -> Outcome:
    if not p < LEVEL:
        return "not resolved"
    return "holds" if difference > 0 else "reversed"


def better_first(one: Comparison) -> Comparison:
    """The same with the better side on the left."""
    if not one.difference < 0:
        return one
    turned = replace(one.test, difference=-one.test.difference, low=-one.test.high, high=-one.test.low)
    return replace(
        one,
        left=one.right,
        right=one.left,
        difference=-one.difference,
        low=-one.high,
        high=-one.low,
        effect=-one.effect,
        verdict="holds" if one.verdict == "reversed" else one.verdict,
        test=turned,
    )
