"""From lines to a test: which seeds and examples stand behind a comparison, and how lines with different ones add up.

What pooled lines share (a data set, a seed, a model) is kept: weights of the same score add up before anything is tested.
docs/study-claims.md has the rules in words, and how often they raise a false alarm.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megaenc.study.results.evidence import Score
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, Contrast, Terms
from megaenc.study.stats.inference import VarianceComponents, TestResult

_PRINTED_DIGIT = 0.00005  # tables are rounded to 0.01 percent: an interval of 0.00 may be half a digit

WeightedContrasts = Sequence[tuple[float, Contrast]]
Seeds = tuple[int, ...]
"""Of the pretraining; empty for lines that have one run each."""
ExampleScores = Mapping[tuple[str, str], np.ndarray]
"""float[S, N] by family and data set; empty if some score has no examples, or other ones."""
BetweenRunVariances = Mapping[str, Mapping[Seeds, float]]
"""By family ("" for any other): the variance of a line between runs of the pretraining, and whose seeds say so."""


@dataclass(frozen=True)
class ScoreRows:
    """What lines add up to, by seed: of the pretraining where they have several, else of the fine-tuning."""

    left: np.ndarray
    right: np.ndarray
    examples: ExampleScores
    """of the contrast"""

    @property
    def scores(self) -> np.ndarray:
        return self.left - self.right


def between_run_variance(lines: Sequence[Contrast]) -> BetweenRunVariances:
    """Return what lines with several runs of the pretraining say of how far these differ, for lines that have one.

    The mean over the lines of a family with the same seeds, and over sets of seeds.
    """
    found: dict[str, dict[Seeds, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if len(line.seeds) > 1 and not line.collapsed and (rows := _sum_contrasts([(1.0, line)], line.seeds, False)) is not None:
            for family in (line.family, ""):
                found[family][line.seeds].append(float(np.var(rows.scores, ddof=1)))
    return {
        family: {seeds: float(np.mean(each)) / len(by_seeds) for seeds, each in by_seeds.items()}
        for family, by_seeds in found.items()
    }


def compare_contrasts(
    lines: Sequence[Contrast],
    lent: BetweenRunVariances | None = None,
    margin: float = 0.0,
    draws: int = 0,
    weights: Sequence[float] | None = None,
) -> Comparison:
    """Test one line, or the mean (or weighted sum) of several; `margin` (a fraction) as in statistics.contrast.

    p_adjusted and verdict are to be filled in. Lines with the same seeds of the pretraining are added up by seed; such groups and
    the lines of one run by Welch and Satterthwaite. A line of one run varies as its fine-tunings do, and by what `lent` says
    (None: what the lines themselves say); without that it is about the trained models and not about their recipes. Published
    tables have neither seeds nor examples: see statistics.printed.
    """
    weights = weights or [1 / len(lines)] * len(lines)
    pool = [(weight, line) for weight, line in zip(weights, lines, strict=True) if weight]
    families, sets, places = ({getattr(line, name) for line in lines} for name in ("family", "dataset", "where"))
    family = lines[0].family if len(families) == 1 else ""
    collapsed = lines[0].collapsed if len(lines) == 1 else ()
    where = lines[0].where if len(places) == 1 else f"{len(places)} pairs"

    def compared(made: TestResult, effect: float = math.nan, **more) -> Comparison:
        p = math.nan if collapsed else made.p
        more = {"pretrained": min(len(line.seeds) for _, line in pool), "collapsed": collapsed} | more
        shown = f"{where} ({' and '.join(collapsed)} collapsed)" if collapsed else where
        dataset = lines[0].dataset if len(sets) == 1 and family else "all"
        return Comparison(*lines[0].names, shown, family, dataset, made, p, p, effect, **more)

    lent = between_run_variance([line for _, line in pool]) if lent is None else lent
    if not all(score.seeds for _, line in pool for terms in line.terms.values() for _, score in terms):
        return compared(*_test_published(pool, margin))
    groups: dict[Seeds, list[tuple[float, Contrast]]] = defaultdict(list)
    for weight, line in pool:
        groups[line.seeds if len(line.seeds) > 1 else ()].append((weight, line))
    rows = {seeds: _sum_contrasts(members, seeds) for seeds, members in groups.items()}
    if None in rows.values():  # no fine-tuning seed in common
        unknown = VarianceComponents(math.nan, math.nan)
        return compared(TestResult(math.nan, math.nan, math.nan, math.nan, unknown, math.nan, 0), pretrained=1)
    if len(rows) == 1 and (() not in rows or not lent):
        [made] = rows.values()
        blocks = list(made.examples.values())
        found, drawn = inference.contrast_t_test(made.scores, blocks, margin), None
        if draws and blocks and found.seeds > 2:
            drawn = tuple((100 * low, 100 * high) for low, high in inference.bootstrap_intervals(made.scores, blocks, draws))
        return compared(found, inference.hedges_g(made.left, made.right), bootstrap=drawn)
    difference = math.fsum(float(one.scores.mean()) for one in rows.values())
    found = inference.welch_satterthwaite_test(difference, _variances_by_seeds(groups, rows, lent), _pooled_example_variance(rows.values()), margin)
    return compared(found, lent=() in rows)


def _variances_by_seeds(groups: Mapping[Seeds, WeightedContrasts], rows: Mapping[Seeds, ScoreRows], lent: BetweenRunVariances) -> list[tuple[float, float]]:
    """Return (variance, degrees of freedom) of a pooled contrast, by where it is estimated.

    Parts that have a model size in common may have runs in common: as if they were correlated as far as can be, each variance
    counts as often as there are such parts. For the same reason the lines of one size and one run count as correlated.
    """
    once: dict[str, list[tuple[float, Contrast]]] = defaultdict(list)
    for weight, line in groups.get((), ()):
        once[line.size].append((weight, line))
    parts = [{line.size for _, line in members} for seeds, members in groups.items() if seeds] + [{size} for size in once]
    found: dict[Seeds, float] = defaultdict(float)
    for seeds, members in groups.items():
        alike = 1 if not seeds else sum(bool({line.size for _, line in members} & sizes) for sizes in parts)
        found[seeds] += alike * inference.variance_of_mean(rows[seeds].scores)
    for size, members in once.items():
        alike = sum(size in sizes for sizes in parts)
        whole = math.fsum(abs(weight) for weight, _ in members)
        for weight, line in members:
            for seeds, variance in lent.get(line.family, lent[""]).items():
                found[seeds] += alike * whole * abs(weight) * variance
    return [(variance, (len(seeds) or len(rows[()].scores)) - 1) for seeds, variance in found.items()]


def _pooled_example_variance(rows: Collection[ScoreRows]) -> float:
    """Return the variance that examples add; nan if some of the rows have none, or other ones."""
    by_place: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for place, block in (pair for one in rows for pair in one.examples.items()):
        by_place[place].append(block)
    other = any(len({block.shape[1] for block in blocks}) > 1 for blocks in by_place.values())
    if other or any(not one.examples for one in rows):
        return math.nan
    return math.fsum(inference.example_variance(blocks) for blocks in by_place.values())


def _sum_contrasts(lines: WeightedContrasts, seeds: Seeds, examples: bool = True) -> ScoreRows | None:
    """Return those of lines that have these seeds, or one run each; None if the fine-tunings of a run have no seed in common."""
    if not seeds:
        return _sum_run_contrasts([(weight, line, line.seeds[0]) for weight, line in lines], examples)
    runs = [_sum_run_contrasts([(weight, line, seed) for weight, line in lines], examples) for seed in seeds]
    if None in runs:
        return None
    sides, blocks = (np.array([getattr(run, side).mean() for run in runs]) for side in ("left", "right")), {}
    if all(run.examples.keys() == runs[0].examples.keys() for run in runs):
        means = {place: [run.examples[place].mean(0) for run in runs] for place in runs[0].examples}
        if all(len({one.shape for one in each}) == 1 for each in means.values()):
            blocks = {place: np.stack(each) for place, each in means.items()}
    return ScoreRows(*sides, blocks)


def _sum_run_contrasts(lines: Sequence[tuple[float, Contrast, int]], examples: bool) -> ScoreRows | None:
    """Return the same by fine-tuning seed, of one run of the pretraining for each line."""
    terms = _merge_terms([(weight * part, score) for weight, line, seed in lines for part, score in line.terms[seed]])
    seeds = sorted(set.intersection(*(set(score.seeds) for _, score in terms)))
    if not seeds:
        return None
    sides = (
        np.array([math.fsum(sign * part * score.seeds[seed] for part, score in terms if sign * part > 0) for seed in seeds])
        for sign in (1, -1)
    )
    return ScoreRows(*sides, _sum_example_scores(terms, seeds) if examples else {})


def _merge_terms(terms: Terms) -> list[tuple[float, Score]]:
    """Return averages as the sets that they are formed over, and each score once with all its weight."""
    found: dict[int, tuple[float, Score]] = {}
    for weight, score in terms:
        for member in score.members or (score,):
            before, _ = found.get(id(member), (0.0, member))
            found[id(member)] = (before + weight / max(1, len(score.members)), member)
    return [(weight, score) for weight, score in found.values() if abs(weight) > 1e-12]


def _sum_example_scores(terms: Terms, seeds: Sequence[int]) -> ExampleScores:
    """Return the contrast of the examples of each data set."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for weight, score in terms:
        block, place = score.stack_examples(seeds), (score.family, score.dataset)
        before = found.get(place)
        if block is None or (before is not None and before.shape != block.shape):
            return {}
        found[place] = weight * block if before is None else before + weight * block
    return found


def _test_published(pool: WeightedContrasts, margin: float) -> tuple[TestResult, float]:
    """Return the test of published means, and its effect size."""
    first = _merge_terms([(weight * part, score) for weight, line in pool for part, score in line.terms[line.seeds[0]]])
    weights = [weight for weight, _ in first]
    halves = [math.nan if score.half_width is None else max(score.half_width, _PRINTED_DIGIT) for _, score in first]
    made = inference.welch_from_intervals([score.mean for _, score in first], halves, weights, margin=margin)
    spread = 5 * (np.array(weights) * halves / 1.96) ** 2  # variance of a seed on each side; pooled: their mean
    return made, inference.standardised_difference(made.difference, math.sqrt(spread.sum() / 2), 8)
