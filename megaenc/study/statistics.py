"""What a difference between models is worth: intervals over seeds and examples, Holm's correction, effect sizes, seeds needed.

docs/study-claims.md has the formulas, why they are these, and how often each raises a false alarm. Everything that is compared is
a contrast: numbers of models times weights that sum to zero, by seed and by example. A difference has weights 1 and -1.

Shapes: S seeds, N examples of a data set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import gammaln, stdtr, stdtrit

LEVEL = 0.05
_NOTHING = 1e-9  # fractions nearer than that are equal: sums in floating point are not exact
_MANY = 1e6  # degrees of freedom from which t is the normal distribution


@dataclass(frozen=True)
class Components:
    """Where the uncertainty of a mean over seeds and examples comes from. Variances of that mean, not of a single score."""

    seeds: float
    """what other seeds would change: variance over the seeds' means / S; nan for one seed"""
    examples: float
    """what other examples of the same kind would change in all seeds alike; nan without examples"""

    @property
    def total(self) -> float:
        """Of both; what is not known counts as none."""
        return float(np.nansum([self.seeds, self.examples]))


@dataclass(frozen=True)
class Test:
    """A contrast, its 95 % interval and the probability of one so far from 0 if there were none. In the units of the scores."""

    difference: float
    low: float
    high: float
    p: float
    """two-sided; nan where nothing says how far chance alone goes"""
    components: Components
    df: float
    seeds: int
    """0 where it is made of published intervals"""
    margin_p: float = math.nan
    """where a margin was asked for: the probability of a contrast so near 0 if it were outside of the margin"""


def components(scores: np.ndarray, examples: Sequence[np.ndarray] = ()) -> Components:
    """Of the mean of float[S] `scores`, from what the examples behind them scored: float[S, N] of each data set, or none.

    The contributions of several data sets to a score add up. Works for one model's scores as for a contrast. Two-way analysis of
    variance without repetition, the estimators of Dorfman, Berbaum and Metz (1992): of seeds by examples, MS_examples -
    MS_residual over S * N is what examples share in all seeds, 0 where negative; residuals are in the seeds' variance already.
    """
    count = len(scores)
    of_seeds = float(np.var(scores, ddof=1)) / count if count > 1 else math.nan
    return Components(of_seeds, math.fsum(_shared(block) for block in examples) if len(examples) else math.nan)


def _shared(block: np.ndarray) -> float:
    block = np.asarray(block, dtype=np.float64)
    count, of = block.shape
    if of < 2:
        return 0.0
    centred = block - block.mean()
    by_example, by_seed = centred.mean(0), centred.mean(1)
    between = count * float(by_example @ by_example) / (of - 1)
    if count == 1:
        return between / of
    whole = float(np.vdot(centred, centred))
    left = (whole - between * (of - 1) - of * float(by_seed @ by_seed)) / ((count - 1) * (of - 1))
    return max(between - left, 0.0) / (count * of)


def contrast(scores: np.ndarray, examples: Sequence[np.ndarray] = (), margin: float = 0.0) -> Test:
    """Test that the mean of float[S] `scores` is 0, and, with a `margin`, that it is outside of it.

    `examples`: see `components`. t tests: over the seeds alone with S - 1 degrees of freedom, and over seeds and examples with
    those of Hillis (2007); the less certain of both counts. One seed: over its examples alone, so about these trainings only.
    """
    parts, count = components(scores, examples), len(scores)
    if count == 1:
        df = float(min(block.shape[1] for block in examples) - 1) if len(examples) else math.nan
        return _test(float(scores[0]), parts, [(parts.examples, df)], count, margin)
    both = parts.total
    df = both**2 / (parts.seeds**2 / (count - 1)) if parts.seeds else math.inf
    ways = [(parts.seeds, float(count - 1))] + ([(both, df)] if len(examples) else [])
    return _test(float(np.mean(scores)), parts, ways, count, margin)


def printed(
    means: Sequence[float], halves: Sequence[float], weights: Sequence[float], seeds: int = 5, margin: float = 0.0
) -> Test:
    """The same of published means and half intervals alone: Welch's t test for independent seeds.

    A half is 1.96 * sd / sqrt(seeds), so variance (half / 1.96) ** 2 of its mean; degrees of freedom by Welch and Satterthwaite.
    What the same seeds have in common is not printed and cannot be used, nor are examples.
    """
    each = (np.asarray(weights) * np.asarray(halves) / 1.96) ** 2
    total = float(each.sum())
    df = total**2 / float((each**2 / (seeds - 1)).sum()) if total else math.nan
    return _test(float(np.dot(weights, means)), Components(total, math.nan), [(total, df)], 0, margin)


def _test(difference: float, parts: Components, ways: Sequence[tuple[float, float]], seeds: int, margin: float) -> Test:
    """The widest interval and the greatest p of several (variance, degrees of freedom)."""
    known = [(math.sqrt(variance), df) for variance, df in ways if variance > _NOTHING**2]
    if not known:  # no spread at all says nothing of how far chance goes, except where there is no difference either
        same = abs(difference) < _NOTHING and seeds > 1
        nothing = 0.0 if same else math.nan
        inside = nothing if margin else math.nan
        return Test(difference, nothing, nothing, 1.0 if same else math.nan, parts, math.nan, seeds, inside)
    half, df = max((error * _quantile(df), df) for error, df in known)
    p = max(2 * _below(-abs(difference) / error, df) for error, df in known)
    inside = max(_below((abs(difference) - margin) / error, df) for error, df in known) if margin else math.nan
    return Test(difference, difference - half, difference + half, p, parts, df, seeds, inside)


def _quantile(df: float) -> float:
    """97.5 % point of Student's t. What scipy.stats.t uses, without the hundred microseconds before it."""
    return float(stdtrit(min(df, _MANY), 1 - LEVEL / 2))


def _below(value: float, df: float) -> float:
    return float(stdtr(min(df, _MANY), value))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p values: below 5 % they make a false alarm in at most 5 % of families, however the tests depend.

    Holm, Scandinavian Journal of Statistics 6 (1979). nan is no test: it stays and does not count.
    """
    given = np.asarray(p, dtype=np.float64)
    order = [at for at in np.argsort(given, kind="stable") if not math.isnan(given[at])]
    adjusted, highest = given.copy(), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * given[at]))
        adjusted[at] = highest
    return adjusted.tolist()


def effect_size(first: Sequence[float], second: Sequence[float]) -> float:
    """Hedges' g: the difference of means over the pooled sd of the seeds, times what undoes its bias in small samples.

    Hedges (1981): gamma(m / 2) / (sqrt(m / 2) * gamma((m - 1) / 2)) with m degrees of freedom. nan without a spread.
    """
    sizes = len(first), len(second)
    if min(sizes) < 2:
        return math.nan
    spread = [np.var(side, ddof=1) * (size - 1) for side, size in zip((first, second), sizes, strict=True)]
    return standardised(float(np.mean(first) - np.mean(second)), math.sqrt(sum(spread) / (sum(sizes) - 2)), sum(sizes) - 2)


def standardised(difference: float, sd: float, df: int) -> float:
    """A difference over a standard deviation with so many degrees of freedom, corrected as in `effect_size`."""
    if not sd > _NOTHING:
        return math.nan
    return difference / sd * math.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / math.sqrt(df / 2)


def power(difference: float, parts: Components, seeds: int, more: int) -> float:
    """How often a true `difference` would be seen at 5 % with `more` seeds, where `seeds` gave `parts`; the examples stay.

    Of the paired t test over seeds and examples, by the noncentral t distribution.
    """
    of_seeds, of_examples = parts.seeds * seeds / more, np.nan_to_num(parts.examples)
    total = of_seeds + of_examples
    if more < 2 or not total > 0:
        return math.nan
    df = min(total**2 / (of_seeds**2 / (more - 1)), _MANY) if of_seeds else _MANY
    shift, edge = abs(difference) / math.sqrt(total), _quantile(df)
    return float(np.nan_to_num(stats.nct.sf(edge, df, shift), nan=1.0) + np.nan_to_num(stats.nct.cdf(-edge, df, shift)))


def seeds_needed(difference: float, parts: Components, seeds: int, wanted: float = 0.8, at_most: int = 10_000) -> int | None:
    """The fewest seeds with which a true `difference` is seen with power `wanted`; None where no `at_most` are enough.

    They may never be: examples are as few as before. `parts` were estimated with `seeds` seeds.
    """
    if math.isnan(parts.seeds) or not power(difference, parts, seeds, at_most) >= wanted:
        return None
    low, high = 1, at_most  # power grows with seeds: the answer is above low and at most high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, parts, seeds, middle) >= wanted else (middle, high)
    return high


def collapse_rate(collapsed: int, runs: int) -> tuple[float, float, float]:
    """The share of runs that collapsed, with Wilson's 95 % interval; nan without runs."""
    if not runs:
        return math.nan, math.nan, math.nan
    found = stats.binomtest(collapsed, runs).proportion_ci(1 - LEVEL, method="wilson")
    return collapsed / runs, float(found.low), float(found.high)


def bootstrap(
    scores: np.ndarray, examples: Sequence[np.ndarray], draws: int = 2000, seed: int = 0
) -> tuple[tuple[float, float], tuple[float, float]]:
    """95 % intervals by resampling seeds and then examples, the same ones for all models and seeds: percentile and studentised.

    `examples` as in `components`; float[S] `scores` are what their means add up to. Beside the t interval of `contrast`, not in
    its stead: over five seeds it is calibrated only by luck. nan below three seeds, where a draw often has one seed alone.
    """
    count, random = len(scores), np.random.default_rng(seed)
    if count < 3:
        return (math.nan, math.nan), (math.nan, math.nan)
    times = random.multinomial(count, np.full(count, 1 / count), draws)
    rows = np.broadcast_to(np.asarray(scores, dtype=np.float64), (draws, count)).copy()
    for block in examples:
        block = np.asarray(block, dtype=np.float64) - np.mean(block, axis=1, keepdims=True)
        of = block.shape[1]
        for row in rows:
            row += block @ np.bincount(random.integers(of, size=of), minlength=of) / of
    means = (times * rows).sum(1) / count
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    of_examples = np.nan_to_num(components(scores, examples).examples)
    errors = np.sqrt((times * (rows - means[:, None]) ** 2).sum(1) / (count - 1) / count + of_examples)
    middle = float(np.mean(scores))
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.nan_to_num((means - middle) / errors, posinf=np.inf, neginf=-np.inf)
    below, above = np.quantile(pivots, [LEVEL / 2, 1 - LEVEL / 2])
    error = math.sqrt(components(scores, examples).total)
    return (float(low), float(high)), (middle - float(above) * error, middle - float(below) * error)
