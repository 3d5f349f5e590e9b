"""One model, or several, against another: which numbers of the evidence that takes, and what the statistics say of them.

A line is a question such as "MLM less CLM, 610M, on SC": scores times weights, by seed of the pretraining. Lines are tested one
by one and pooled, all of a claim together; what pooled models share (a data set, a seed) is kept, as weights of the same score
add up before anything is tested.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import STUDY
from megaenc.study import statistics
from megaenc.study.evidence import AVERAGE, Evidence, Score
from megaenc.study.setting import Setting
from megaenc.study.setups import is_average
from megaenc.study.statistics import LEVEL, Test

Outcome = Literal["holds", "reversed", "not resolved", "no data"]
Terms = Sequence[tuple[float, Score]]

_PRINTED_DIGIT = 0.00005  # tables are rounded to 0.01 percent: an interval of 0.00 may be half a digit


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
    """of the 95 % interval; nan where there is none; with one seed, over its examples alone"""
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

    @functools.cached_property
    def seeds_needed(self) -> int | None:
        """With which a true difference of this size is seen in 80 % of studies; None: never, or not known."""
        return (
            statistics.seeds_needed(self.test.difference, self.test.components, self.test.seeds) if self.test.seeds > 1 else None
        )


@dataclass(frozen=True)
class Line:
    """A question to the evidence, before it is tested. Give `terms`, or `left` and `right` of what is no score."""

    names: tuple[str, str]
    where: str
    family: str
    dataset: str
    terms: Mapping[int, Terms] = field(default_factory=dict)
    """by seed of the pretraining: scores times weights, the left side's weights positive"""
    left: Mapping[int, float] = field(default_factory=dict)
    """by fine-tuning seed"""
    right: Mapping[int, float] = field(default_factory=dict)


def of_family(evidence: Evidence, family: str, settings: Sequence[Setting]) -> tuple[str, list[list[tuple[float, Score]]]] | None:
    """What stands for a family: its average where all have one over the same sets, else the mean over the sets all have.

    The name of that and, for each setting, the scores with weights that add up to one; None where there is nothing in common.
    """
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
        by_seed, label = {}, ""
        for seed, pair in sides.items():
            if (standing := of_family(evidence, family, pair)) is not None:
                label, (left, right) = standing
                by_seed[seed] = [*left, *((-weight, score) for weight, score in right)]
        if by_seed:
            found.append(Line(names, where, family, label, by_seed))
    return found


def alike(lines: Sequence[Line]) -> list[Line]:
    """The lines with the same seeds of the pretraining: those that all have, or the first of each where less than two are."""
    having = [set(line.terms) for line in lines if line.terms]
    common = sorted(set.intersection(*having)) if having else []
    kept = common if len(common) > 1 else None
    return [replace(line, terms={seed: line.terms[seed] for seed in kept or sorted(line.terms)[:1]}) for line in lines]


def pooled(lines: Sequence[Line], weights: Sequence[float] | None = None) -> Line:
    """The mean of lines that are alike, or a weighted sum of them."""
    weights = weights or [1 / len(lines)] * len(lines)
    terms: dict[int, list[tuple[float, Score]]] = {}
    for at in range(len(lines[0].terms)):  # a single seed need not be the same one everywhere
        each = [(weight, list(line.terms.values())[at]) for weight, line in zip(weights, lines, strict=True)]
        terms[at] = [(weight * part, score) for weight, of_line in each for part, score in of_line]
    sides = []
    for name in ("left", "right"):
        each = [getattr(line, name) for line in lines]
        seeds = sorted(set.intersection(*map(set, each)))
        sides.append({seed: math.fsum(weight * side[seed] for weight, side in zip(weights, each, strict=True)) for seed in seeds})
    families = list(dict.fromkeys(line.family for line in lines))
    sets = list(dict.fromkeys(line.dataset for line in lines))
    places = list(dict.fromkeys(line.where for line in lines))
    return Line(
        names=lines[0].names,
        where=places[0] if len(places) == 1 else f"{len(places)} pairs",
        family=families[0] if len(families) == 1 else "",
        dataset=sets[0] if len(sets) == 1 and len(families) == 1 else "all",
        terms=terms,
        left=sides[0],
        right=sides[1],
    )


def test(line: Line, margin: float = 0.0, draws: int = 0) -> Comparison:
    """Test one line; `margin` (a fraction) as in statistics.contrast. p_adjusted and verdict are still to be filled in.

    One seed of the pretraining: over the seeds of the fine-tuning, so about these two trained models. Several: over those, each
    the mean of its fine-tunings, so about the recipes. Published tables have neither: see statistics.printed.
    """
    left, right, blocks = _sides(line)
    if left is not None and not len(left):  # no seed in common
        made = Test(math.nan, math.nan, math.nan, math.nan, statistics.Components(math.nan, math.nan), math.nan, 0)
        return _comparison(line, made, math.nan)
    if left is None:
        return _printed(line, margin)
    made = statistics.contrast(left - right, blocks, margin)
    drawn = statistics.bootstrap(left - right, blocks, draws) if draws and blocks and made.seeds > 2 else None
    return _comparison(line, made, statistics.effect_size(left, right), drawn)


def _merged(terms: Terms) -> list[tuple[float, Score]]:
    """Averages as the sets that they are formed over, and each score once with all its weight."""
    found: dict[int, tuple[float, Score]] = {}
    for weight, score in terms:
        for member in score.members or (score,):
            before, _ = found.get(id(member), (0.0, member))
            found[id(member)] = (before + weight / max(1, len(score.members)), member)
    return [(weight, score) for weight, score in found.values() if abs(weight) > 1e-12]


def _sides(line: Line) -> tuple[np.ndarray | None, np.ndarray | None, list[np.ndarray]]:
    """float[S] of both sides and float[S, N] of the contrast on each data set; None, None where only tables are there."""
    if not line.terms:
        seeds = sorted(set(line.left) & set(line.right))
        return np.array([line.left[seed] for seed in seeds]), np.array([line.right[seed] for seed in seeds]), []
    merged = {seed: _merged(terms) for seed, terms in line.terms.items()}
    every = [score for terms in merged.values() for _, score in terms]
    if not all(score.seeds for score in every):
        return None, None, []
    seeds = sorted(set.intersection(*(set(score.seeds) for score in every)))
    if not seeds:
        return np.empty(0), np.empty(0), []
    sides = []
    for sign in (1, -1):
        each = [
            [math.fsum(sign * weight * score.seeds[seed] for weight, score in terms if sign * weight > 0) for seed in seeds]
            for terms in merged.values()
        ]
        sides.append(np.array(each[0]) if len(each) == 1 else np.array(each).mean(1))
    return sides[0], sides[1], _blocks(merged, seeds)


def _blocks(merged: Mapping[int, Terms], seeds: Sequence[int]) -> list[np.ndarray]:
    """The contrast of the examples of each data set; none at all where some score has none, or other ones."""
    by_set: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for terms in merged.values():
        here: dict[tuple[str, str], np.ndarray] = {}
        for weight, score in terms:
            of_seed = score.examples()
            if not all(seed in of_seed for seed in seeds):
                return []
            if len({len(of_seed[seed]) for seed in seeds}) > 1:
                return []
            place, block = (score.family, score.dataset), weight * np.stack([of_seed[seed] for seed in seeds])
            if place in here and here[place].shape != block.shape:
                return []
            here[place] = here[place] + block if place in here else block
        for place, block in here.items():
            by_set[place].append(block)
    if any(len({block.shape for block in blocks}) > 1 or len(blocks) != len(merged) for blocks in by_set.values()):
        return []
    return [blocks[0] if len(blocks) == 1 else np.stack([block.mean(0) for block in blocks]) for blocks in by_set.values()]


def _printed(line: Line, margin: float) -> Comparison:
    first = _merged(next(iter(line.terms.values())))
    weights = [weight for weight, _ in first]
    halves = [math.nan if score.half is None else max(score.half, _PRINTED_DIGIT) for _, score in first]
    made = statistics.printed([score.mean for _, score in first], halves, weights, margin=margin)
    spread = 5 * (np.array(weights) * halves / 1.96) ** 2  # variance of a seed on each side; pooled: their mean
    return _comparison(line, made, statistics.standardised(made.difference, math.sqrt(spread.sum() / 2), 8))


def _comparison(line: Line, made: Test, effect: float, drawn: Sequence[Sequence[float]] | None = None) -> Comparison:
    p = (
        math.nan if made.seeds == 1 else made.p
    )  # over examples alone it would be about these trainings, not about their objectives
    return Comparison(
        left=line.names[0],
        right=line.names[1],
        where=line.where,
        family=line.family,
        dataset=line.dataset,
        difference=100 * made.difference,
        low=100 * made.low,
        high=100 * made.high,
        p=p,
        p_adjusted=p,
        effect=effect,
        verdict="not resolved",
        test=made,
        bootstrap=tuple(tuple(100 * edge for edge in interval) for interval in drawn) if drawn else None,
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
