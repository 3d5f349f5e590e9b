"""What a difference between models is worth: intervals over seeds and examples, Holm's correction, effect sizes, seeds needed.

docs/study-claims.md has the formulas, why they are these, and how often each raises a false alarm. Whatever is compared is a
contrast: numbers of models times weights that sum to zero. Shapes: S seeds, N examples of a data set.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import gammaln, ndtr, stdtr, stdtrit

LEVEL = 0.05
_NOTHING = 1e-9  # fractions nearer than that are equal: sums in floating point are not exact
_MANY = 1e6  # degrees of freedom from which t is the normal distribution


@dataclass(frozen=True)
class VarianceComponents:
    """Where the uncertainty of a mean over seeds and examples comes from: variances of that mean, not of a single score."""

    seeds: float
    """variance over the seeds' means / S; nan for one seed"""
    examples: float
    """what other examples of the same kind would change in all seeds alike; nan without examples"""

    @property
    def total(self) -> float:
        """The sum; an unknown part counts as none."""
        return float(np.nansum([self.seeds, self.examples]))


@dataclass(frozen=True)
class TestResult:
    """A contrast, its 95 % interval and the probability of one so far from 0 if there were none. In the units of the scores."""

    difference: float
    low: float
    high: float
    p: float
    """two-sided; nan where nothing says how far chance alone goes: one seed, or seeds that agree to the last digit"""
    variance_components: VarianceComponents
    df: float
    seeds: int
    """0 if it is made of published intervals, or of parts with seeds of their own"""
    margin_p: float = math.nan
    """with a margin: the probability of a contrast so near 0 if it were outside of the margin"""


def variance_components(scores: np.ndarray, examples: Sequence[np.ndarray] = ()) -> VarianceComponents:
    """Return those of the mean of float[S] `scores`, from float[S, N] of what the examples of each data set behind them scored.

    The contributions of several data sets to a score add up. Two-way analysis of variance without repetition (Dorfman, Berbaum
    and Metz 1992): examples share (MS_examples - MS_residual) / (S * N) in all seeds, 0 where negative; the seeds' variance holds
    the residuals already.
    """
    return VarianceComponents(variance_of_mean(scores), math.fsum(example_variance([block]) for block in examples) if len(examples) else math.nan)


def variance_of_mean(scores: np.ndarray) -> float:
    """Return the variance of the mean of float[S]; nan for one."""
    return float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else math.nan


def example_variance(parts: Sequence[np.ndarray]) -> float:
    """Return the variance that N examples give the sum of the means of `parts`, float[S, N] each with its own S.

    Of one part (MS_examples - MS_residual) / (S * N). Of several, their means over seeds are added up by example before, and
    what chance leaves over in each is taken off.
    """
    of = parts[0].shape[1]
    if of < 2:
        return 0.0
    by_example, left = np.zeros(of), 0.0
    for block in parts:
        block = np.asarray(block, dtype=np.float64)
        count, centred = len(block), block - block.mean()
        mean, by_seed = centred.mean(0), centred.mean(1)
        by_example += mean
        if count > 1:
            residual = float(np.vdot(centred, centred)) - count * float(mean @ mean) - of * float(by_seed @ by_seed)
            left += residual / ((count - 1) * (of - 1) * count)
    return max(float(by_example @ by_example) / (of - 1) - left, 0.0) / of


def contrast_t_test(scores: np.ndarray, examples: Sequence[np.ndarray] = (), margin: float = 0.0) -> TestResult:
    """Test that the mean of float[S] `scores` is 0, and, with a `margin`, that it is outside of it.

    `examples`: see `variance_components`. t tests: over the seeds alone with S - 1 degrees of freedom, and over seeds and examples with
    those of Hillis (2007); the less certain of both counts. One seed has an interval, over its examples alone, and no p.
    """
    parts, count = variance_components(scores, examples), len(scores)
    if count > 1:
        return welch_satterthwaite_test(float(np.mean(scores)), [(parts.seeds, count - 1)], parts.examples, margin, count)
    df = float(min(block.shape[1] for block in examples) - 1) if len(examples) else math.nan
    return _most_conservative_test(float(scores[0]), parts, [(parts.examples, df)], count, margin=None)


def welch_satterthwaite_test(
    difference: float, of_seeds: Sequence[tuple[float, float]], of_examples: float, margin: float = 0.0, seeds: int = 0
) -> TestResult:
    """Test a sum of independent parts: (variance, degrees of freedom) of each over its seeds, and what examples add.

    Degrees of freedom by Welch and Satterthwaite: of seeds alone, and with the examples, whose variance counts as known (as in
    Hillis). A variance that is nan, as of one seed, or is nothing at all leaves no p: seeds that agree say nothing of others.
    """
    parts = VarianceComponents(math.fsum(variance for variance, _ in of_seeds), of_examples)
    if math.isnan(parts.seeds) or parts.seeds <= _NOTHING**2:
        return _most_conservative_test(difference, parts, [(np.nan_to_num(of_examples), math.inf)], seeds, margin=None)
    bottom = math.fsum(variance**2 / df for variance, df in of_seeds)
    ways = [variance for variance in (parts.seeds, parts.seeds + of_examples) if not math.isnan(variance)]
    return _most_conservative_test(difference, parts, [(variance, variance**2 / bottom) for variance in ways], seeds, margin)


def welch_from_intervals(
    means: Sequence[float], halves: Sequence[float], weights: Sequence[float], seeds: int = 5, margin: float = 0.0
) -> TestResult:
    """Test published means by their half intervals, 1.96 * sd / sqrt(seeds), alone: Welch's t test for independent seeds."""
    each = (np.asarray(weights) * np.asarray(halves) / 1.96) ** 2
    return welch_satterthwaite_test(float(np.dot(weights, means)), [(variance, seeds - 1) for variance in each], math.nan, margin)


def _most_conservative_test(
    difference: float, parts: VarianceComponents, ways: Sequence[tuple[float, float]], seeds: int, margin: float | None
) -> TestResult:
    """Return the widest interval and the greatest p of several (variance, degrees of freedom); no p without a `margin`."""
    known = [(math.sqrt(variance), df) for variance, df in ways if variance > _NOTHING**2]
    if not known:  # no spread at all says nothing of how far chance goes
        return TestResult(difference, math.nan, math.nan, math.nan, parts, math.nan, seeds)
    half, df = max((error * float(_t_quantile(df)), df) for error, df in known)
    p = margin_p = math.nan
    if margin is not None:
        p = max(2 * _t_cdf(-abs(difference) / error, df) for error, df in known)
    if margin:
        margin_p = max(_t_cdf((abs(difference) - margin) / error, df) for error, df in known)
    return TestResult(difference, difference - half, difference + half, p, parts, df, seeds, margin_p)


def _t_quantile(df: float | np.ndarray) -> np.ndarray:
    """Return the 97.5 % point of Student's t: what scipy.stats.t uses, without the hundred microseconds before it."""
    return stdtrit(np.minimum(df, _MANY), 1 - LEVEL / 2)


def _t_cdf(value: float, df: float) -> float:
    return float(stdtr(min(df, _MANY), value))


def holm_adjust(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values: below 5 % they make a false alarm in at most 5 % of families, however the tests depend.

    Holm, Scandinavian Journal of Statistics 6 (1979). nan is no test: it stays and does not count.
    """
    adjusted = np.array(p, dtype=np.float64)
    order = np.argsort(adjusted, kind="stable")[: np.count_nonzero(~np.isnan(adjusted))]  # nan is last
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * adjusted[order]))
    return adjusted.tolist()


def hedges_g(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Hedges' g: the difference of means over the pooled sd of the seeds, `standardised_difference`; nan without a spread."""
    sizes = len(first), len(second)
    if min(sizes) < 2:
        return math.nan
    spread = [np.var(side, ddof=1) * (size - 1) for side, size in zip((first, second), sizes, strict=True)]
    return standardised_difference(float(np.mean(first) - np.mean(second)), math.sqrt(sum(spread) / (sum(sizes) - 2)), sum(sizes) - 2)


def standardised_difference(difference: float, sd: float, df: int) -> float:
    """Return a difference over a standard deviation with `df` degrees of freedom, without its small-sample bias (Hedges 1981)."""
    if not sd > _NOTHING:
        return math.nan
    return difference / sd * math.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / math.sqrt(df / 2)


_CHANCES = (np.arange(400) + 0.5) / 400


def t_test_power(difference: float, parts: VarianceComponents, seeds: int, more: int) -> float:
    """Return how often `contrast_t_test` sees a true `difference` at 5 % with `more` seeds, where `seeds` gave `parts`.

    That is the mean, over what variance so many seeds may show (chi-squared, in 400 equal parts), of the chance that the
    difference found is beyond the edges of both its tests. Before any correction.
    """
    of_seeds, of_examples = parts.seeds * seeds / more, float(np.nan_to_num(parts.examples))
    if more < 2 or not of_seeds + of_examples > 0:
        return math.nan
    error = math.sqrt(of_seeds + of_examples)
    shown = of_seeds * stats.chi2.ppf(_CHANCES, more - 1) / (more - 1)
    edges = _t_quantile(more - 1) * np.sqrt(shown)
    if of_examples:
        with np.errstate(divide="ignore"):
            df = (shown + of_examples) ** 2 * (more - 1) / shown**2
        edges = np.maximum(edges, _t_quantile(df) * np.sqrt(shown + of_examples))
    return float(np.mean(ndtr((abs(difference) - edges) / error) + ndtr((-abs(difference) - edges) / error)))


def required_seeds(difference: float, parts: VarianceComponents, seeds: int, wanted: float = 0.8, at_most: int = 10_000) -> int | None:
    """Return the fewest seeds that see a true `difference` with `t_test_power` `wanted`, from `parts` that `seeds` seeds gave.

    None where no `at_most` are enough; they may never be, as examples are as few as before.
    """
    if math.isnan(parts.seeds) or not t_test_power(difference, parts, seeds, at_most) >= wanted:
        return None
    counts = range(2, at_most)  # power grows with them
    return 2 + bisect_left(counts, wanted, key=lambda more: t_test_power(difference, parts, seeds, more))


def rate_variance_pseudo_values(scores: np.ndarray) -> np.ndarray:
    """Return float[S] whose mean is how far the means of float[R, S], by rate and by seed, are apart beyond chance, a variance.

    It is the variance component (MS_rates - MS_residual) / S of a two-way analysis of variance, the mean covariance over the
    rates of two seeds, so that noise adds nothing on average. The values are its jackknife pseudo-values over the seeds, to be
    tested by t (Tukey; Arvesen 1969). Two seeds have one pair: float[1]. Raises ValueError below two rates or seeds.
    """
    rates, count = scores.shape
    if min(rates, count) < 2:
        raise ValueError(f"float[{rates}, {count}]: expected at least two rates and two seeds")
    centred = scores - scores.mean(0)
    pairs = centred.T @ centred / (rates - 1)
    of_seed = (pairs.sum(1) - np.diag(pairs)) / (count - 1)
    if count == 2:
        return of_seed[:1]
    return (2 * (count - 1) * of_seed - count * of_seed.mean()) / (count - 2)


def collapse_rate(collapsed: int, runs: int) -> tuple[float, float, float]:
    """Return the share of runs that collapsed, with Wilson's 95 % interval; nan without runs."""
    if not runs:
        return math.nan, math.nan, math.nan
    found = stats.binomtest(collapsed, runs).proportion_ci(1 - LEVEL, method="wilson")
    return collapsed / runs, float(found.low), float(found.high)


def bootstrap_intervals(
    scores: np.ndarray, examples: Sequence[np.ndarray], draws: int = 2000, seed: int = 0
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return 95 % intervals by resampling seeds and then examples, the same for all models: percentile and studentised.

    For a look next to the t interval of `contrast_t_test`: over five seeds it is calibrated only by luck. nan below three seeds, where a
    draw often has one seed alone.
    """
    count, random = len(scores), np.random.default_rng(seed)
    if count < 3:
        return (math.nan, math.nan), (math.nan, math.nan)
    parts = variance_components(scores, examples)
    times = random.multinomial(count, np.full(count, 1 / count), draws)
    rows = np.broadcast_to(np.asarray(scores, dtype=np.float64), (draws, count)).copy()
    for block in examples:
        block = np.asarray(block, dtype=np.float64) - np.mean(block, axis=1, keepdims=True)
        of = block.shape[1]
        for row in rows:
            row += block @ np.bincount(random.integers(of, size=of), minlength=of) / of
    means = (times * rows).sum(1) / count
    edges = LEVEL / 2, 1 - LEVEL / 2
    low, high = np.quantile(means, edges).tolist()
    errors = np.sqrt((times * (rows - means[:, None]) ** 2).sum(1) / (count - 1) / count + np.nan_to_num(parts.examples))
    middle, error = float(np.mean(scores)), math.sqrt(parts.total)
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.nan_to_num((means - middle) / errors, posinf=np.inf, neginf=-np.inf)
    below, above = np.quantile(pivots, edges).tolist()
    return (low, high), (middle - above * error, middle - below * error)
