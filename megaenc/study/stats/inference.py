"""Statistical tests of differences between models.

There are t tests over seeds and examples, Holm's correction, effect sizes and power. A contrast is
a weighted sum of model scores, float[S], and of their example scores, float[S, N], with weights
that sum to zero (S seeds, N examples of a data set). docs/study-claims.md has the formulas and the
false alarm rates.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import gammaln, ndtr, stdtr, stdtrit

LEVEL = 0.05
_TOLERANCE = 1e-9  # floating-point sums of equal fractions differ by less
_NORMAL_DF = 1e6  # Student's t equals the normal distribution from here on


@dataclass(frozen=True)
class VarianceComponents:
    """Variance of a mean score due to seeds, and due to test examples.

    `seed_variance` and `example_variance` are in squared units of the score, NaN if unknown.
    """

    seed_variance: float
    """variance over the seeds' scores / S; NaN for one seed"""
    example_variance: float
    """variance that other test examples would cause in all seeds alike; NaN without examples"""

    @property
    def total(self) -> float:
        """Return the sum of both variances; NaN counts as 0."""
        return float(np.nansum([self.seed_variance, self.example_variance]))


@dataclass(frozen=True)
class TestResult:
    """Result of a t test of a difference: 95 % interval, and p for any bound.

    The tests of this module build it. `difference` and the interval, `low` to `high`, are in the
    unit of the tested scores. `p` is two-sided, against 0; `p_above` and `p_below` are one-sided,
    against a bound. Of the tests over seeds, and over seeds and examples, the larger p and the
    wider interval count. Each p is NaN if the chance variation between seeds is unknown: for one
    seed, or if all seeds agree. The interval then covers the test examples only, and is NaN without
    them. `components` (VarianceComponents) are the variances of `difference`. `seed_count` is 0 if
    it is not one number.
    """

    difference: float
    errors: Sequence[tuple[float, float]]
    """(standard error, degrees of freedom) over seeds, and over seeds and examples; the wider
    interval and the larger p count; empty if nothing varies"""
    components: VarianceComponents
    seed_count: int = 0
    """0 for published intervals and for sums of parts with different seeds"""

    def p_above(self, bound: float = 0.0) -> float:
        """Return the one-sided p of a difference up to `bound`: small if it is above.

        `bound` is in the unit of `difference`. NaN if the variation between seeds is unknown.
        """
        return self._largest_p(bound - self.difference)

    def p_below(self, bound: float = 0.0) -> float:
        """Return the one-sided p of a difference from `bound` up: small if it is below.

        `bound` is in the unit of `difference`. NaN if the variation between seeds is unknown.
        """
        return self._largest_p(self.difference - bound)

    def _largest_p(self, distance: float) -> float:
        if not self.components.seed_variance > _TOLERANCE**2:
            return math.nan
        return max(float(stdtr(min(df, _NORMAL_DF), distance / error)) for error, df in self.errors)

    @property
    def p(self) -> float:
        """Return the two-sided p of no difference: small if the difference is not 0.

        It is NaN if the variation between seeds is unknown.
        """
        return 2 * min(self.p_above(), self.p_below())

    @property
    def _half_width(self) -> float:
        return max((error * float(t_quantile(df)) for error, df in self.errors), default=math.nan)

    @property
    def low(self) -> float:
        """Return the lower end of the 95 % interval of `difference`, in its unit.

        With one seed the interval covers the examples only. NaN if nothing varies.
        """
        return self.difference - self._half_width

    @property
    def high(self) -> float:
        """Return the upper end of the 95 % interval of `difference`, in its unit.

        With one seed the interval covers the examples only. NaN if nothing varies.
        """
        return self.difference + self._half_width


def variance_components(
    scores: np.ndarray, examples: Sequence[np.ndarray] = ()
) -> VarianceComponents:
    """Return the variance of a mean score due to seeds and to test examples.

    Two-way analysis of variance without repetition (Dorfman, Berbaum and Metz 1992): the example
    variance is (MS_examples - MS_residual) / (S * N), at least 0, summed over data sets; the seed
    variance includes the residuals.

    Args:
        scores: Scores by seed, float[S]; of one seed the seed variance is NaN.
        examples: Example scores of each data set, float[S, N], with seeds in the same order; N may
            differ. Without any the example variance is NaN.
    """
    return VarianceComponents(
        variance_of_mean(scores),
        math.fsum(example_variance([block]) for block in examples) if len(examples) else math.nan,
    )


def variance_of_mean(scores: np.ndarray) -> float:
    """Return the variance of the mean of `scores`, float[S]; NaN below two scores.

    It is the sample variance divided by S.
    """
    return float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else math.nan


def example_variance(blocks: Sequence[np.ndarray]) -> float:
    """Return the variance that the choice of N test examples gives a sum of means.

    The means are those of `blocks`. Means over seeds are summed by example, and the residual
    variance is subtracted; for one block that is (MS_examples - MS_residual) / (S * N). The result
    is at least 0, and 0 for one example.

    Args:
        blocks: Example scores, float[S, N], at least one block; S may differ between them, N and
            the examples not.
    """
    example_count = blocks[0].shape[1]
    if example_count < 2:
        return 0.0
    by_example = np.zeros(example_count)
    noise = 0.0
    for block in blocks:
        block = np.asarray(block, dtype=np.float64)
        count = len(block)
        centred = block - block.mean()
        mean = centred.mean(0)
        by_seed = centred.mean(1)
        by_example += mean
        if count > 1:
            residual = (
                float(np.vdot(centred, centred))
                - count * float(mean @ mean)
                - example_count * float(by_seed @ by_seed)
            )
            noise += residual / ((count - 1) * (example_count - 1) * count)
    return max(float(by_example @ by_example) / (example_count - 1) - noise, 0.0) / example_count


def contrast_t_test(
    scores: np.ndarray,
    examples: Sequence[np.ndarray] = (),
    run_variances: Sequence[tuple[float, float]] = (),
) -> TestResult:
    """Test that the mean of scores is 0, by t over seeds, and over seeds and examples.

    Degrees of freedom are S - 1 over the seeds, and by Hillis 2007 over both. One seed gives no p,
    and an interval over its examples, NaN without them.

    Args:
        scores: Scores by seed, float[S], such as differences of two models; at least one.
        examples: Example scores of each data set, float[S, N]; empty for a test over seeds only.
        run_variances: (variance, degrees of freedom) of the noise between pretraining runs, which
            is added to that of the seeds; ignored for one seed.
    """
    parts = variance_components(scores, examples)
    count = len(scores)
    if count > 1:
        by_seed = [(parts.seed_variance, count - 1), *run_variances]
        return welch_satterthwaite_test(
            float(np.mean(scores)), by_seed, parts.example_variance, count
        )
    example_counts = [block.shape[1] for block in examples]
    errors = []
    if example_counts:
        errors = _standard_errors([(parts.example_variance, min(example_counts) - 1)])
    return TestResult(float(scores[0]), errors, parts, count)


def welch_satterthwaite_test(
    difference: float,
    seed_variances: Sequence[tuple[float, float]],
    example_variance: float,
    seed_count: int = 0,
) -> TestResult:
    """Test that a difference is 0, by t over seeds, and over seeds and examples.

    Degrees of freedom of the sum of variances are by Welch and Satterthwaite; the example variance
    counts as known (as in Hillis). If the seed variance is NaN (one seed) or 0, there is no p, and
    the interval is over examples only.

    Args:
        seed_variances: (variance, degrees of freedom) of each part of the difference, in its
            squared unit.
        example_variance: Variance due to test examples; NaN if unknown, for a test over seeds only.
        seed_count: Number of seeds to put into the result; it has no effect on the test.
    """
    parts = VarianceComponents(
        math.fsum(variance for variance, _ in seed_variances), example_variance
    )
    if not parts.seed_variance > _TOLERANCE**2:
        return TestResult(
            difference, _standard_errors([(example_variance, math.inf)]), parts, seed_count
        )
    # a known variance has infinite df
    bottom = math.fsum(variance**2 / df for variance, df in seed_variances)
    totals = [parts.seed_variance, parts.seed_variance + example_variance]
    errors = _standard_errors(
        [(total, total**2 / bottom if bottom else math.inf) for total in totals]
    )
    return TestResult(difference, errors, parts, seed_count)


def welch_from_intervals(
    means: Sequence[float],
    half_widths: Sequence[float],
    weights: Sequence[float],
    seeds: int = 5,
    run_variances: Sequence[tuple[float, float]] = (),
) -> TestResult:
    """Test a weighted sum of means against 0 by Welch's t test of their intervals.

    Args:
        means: Means of independent scores.
        half_widths: 1.96 * sd / sqrt(seeds) of each mean; if one is NaN (unknown), p and interval
            are NaN.
        weights: Weight of each mean, such as 1 and -1 for a difference.
        seeds: Number of seeds behind each mean, the same for all; at least two.
        run_variances: (variance, degrees of freedom) of the noise between pretraining runs, in
            squared units of the means; empty to leave it out.
    """
    mean_variances = (np.asarray(weights) * np.asarray(half_widths) / 1.96) ** 2
    variances = [*((variance, seeds - 1) for variance in mean_variances), *run_variances]
    return welch_satterthwaite_test(float(np.dot(weights, means)), variances, math.nan)


def _standard_errors(variances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (standard error, degrees of freedom) of each known variance above 0."""
    return [(math.sqrt(variance), df) for variance, df in variances if variance > _TOLERANCE**2]


def t_quantile(df: float | np.ndarray) -> np.ndarray:
    """Return the 97.5 % quantile of Student's t.

    This lacks the 100 microseconds of overhead of scipy.stats.t.
    """
    return stdtrit(np.minimum(df, _NORMAL_DF), 1 - LEVEL / 2)


def largest_p(*p: float) -> float:
    """Return the largest of one or more p; NaN if any is NaN."""
    return float(np.max(p))


def holm_adjust(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values (family-wise error rate) in the same order.

    They are at most 1. NaN stays NaN and counts as no test. Source: Scandinavian Journal of
    Statistics 6, 1979.
    """
    adjusted = np.array(p, dtype=np.float64)
    # NaN is last
    order = np.argsort(adjusted, kind="stable")[: np.count_nonzero(~np.isnan(adjusted))]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * adjusted[order]))
    return adjusted.tolist()


def hedges_g(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Hedges' g, the bias-corrected difference of means over the pooled sd.

    It is positive if the mean of `first` is larger, and NaN for fewer than two scores on a side,
    and without spread. The sides may have different numbers of scores, and are not paired.
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    squares = sum(np.var(side, ddof=1) * (len(side) - 1) for side in (first, second))
    df = len(first) + len(second) - 2
    return standardised_difference(
        float(np.mean(first) - np.mean(second)), math.sqrt(squares / df), df
    )


def standardised_difference(difference: float, sd: float, df: int) -> float:
    """Return difference / sd with Hedges' correction for small samples.

    Args:
        df: Degrees of freedom of `sd`.

    Returns:
        The standardised difference; NaN without a positive sd.
    """
    if not sd > _TOLERANCE:
        return math.nan
    return difference / sd * math.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / math.sqrt(df / 2)


_QUANTILES = (np.arange(400) + 0.5) / 400


def t_test_power(
    difference: float, parts: VarianceComponents, parts_seed_count: int, seed_count: int
) -> float:
    """Return the power, 0 to 1, of a two-sided t test of a mean at p < 0.05.

    The mean has to be significant over seeds, and over seeds and examples. Power is averaged over
    400 quantiles of the chi-squared distributed variance estimate. It is NaN below two seeds, and
    if the seed variance is NaN or both variances are 0; an example variance of NaN counts as 0.

    Args:
        difference: True mean; its sign has no effect.
        parts: Variances of a mean over `parts_seed_count` seeds; more seeds shrink that of seeds.
        seed_count: Number of seeds of the test.
    """
    seed_variance = parts.seed_variance * parts_seed_count / seed_count
    example_part = float(np.nan_to_num(parts.example_variance))
    if seed_count < 2 or not seed_variance + example_part > 0:
        return math.nan
    error = math.sqrt(seed_variance + example_part)
    sampled_variance = seed_variance * stats.chi2.ppf(_QUANTILES, seed_count - 1) / (seed_count - 1)
    critical_values = t_quantile(seed_count - 1) * np.sqrt(sampled_variance)
    if example_part:
        with np.errstate(divide="ignore"):
            df = (sampled_variance + example_part) ** 2 * (seed_count - 1) / sampled_variance**2
        critical_values = np.maximum(
            critical_values, t_quantile(df) * np.sqrt(sampled_variance + example_part)
        )
    return float(
        np.mean(
            ndtr((abs(difference) - critical_values) / error)
            + ndtr((-abs(difference) - critical_values) / error)
        )
    )


def required_seeds(
    difference: float,
    parts: VarianceComponents,
    parts_seed_count: int,
    target_power: float = 0.8,
    max_seeds: int = 10_000,
) -> int | None:
    """Return the fewest seeds, two or more, with which a two-sided t test has a power.

    The test is that of `t_test_power`. More seeds never make up for too few examples. The result is
    None if more than `max_seeds` are needed, if the seed variance is NaN, or if both variances are
    0.

    Args:
        difference: True mean; its sign has no effect.
        parts: Variances of a mean over `parts_seed_count` seeds.
        target_power: Power to reach, 0 to 1.
    """
    if (
        math.isnan(parts.seed_variance)
        or not t_test_power(difference, parts, parts_seed_count, max_seeds) >= target_power
    ):
        return None
    counts = range(2, max_seeds)  # power grows with the count
    return 2 + bisect_left(
        counts,
        target_power,
        key=lambda seed_count: t_test_power(difference, parts, parts_seed_count, seed_count),
    )


def rate_variance_pseudo_values(scores: np.ndarray) -> np.ndarray:
    """Return jackknife pseudo-values of the variance of scores between rates.

    They are float[S], or float[1] for two seeds. Their mean is the variance component (MS_rates -
    MS_residual) / S of a two-way analysis of variance, to which noise adds nothing on average; they
    can be tested by t (Tukey; Arvesen 1969).

    Args:
        scores: Scores of R rates and S seeds, float[R, S].

    Raises:
        ValueError: There are fewer than two rates or seeds.
    """
    rates, count = scores.shape
    if min(rates, count) < 2:
        raise ValueError(f"float[{rates}, {count}]: expected at least two rates and two seeds")
    centred = scores - scores.mean(0)
    pairs = centred.T @ centred / (rates - 1)
    by_seed = (pairs.sum(1) - np.diag(pairs)) / (count - 1)
    if count == 2:
        return by_seed[:1]
    return (2 * (count - 1) * by_seed - count * by_seed.mean()) / (count - 2)


def collapse_rate(collapsed: int, runs: int) -> tuple[float, float, float]:
    """Return the fraction of collapsed runs with its 95 % interval, Wilson's.

    Args:
        collapsed: Number of collapsed runs.
        runs: Number of all runs.

    Returns:
        Fraction, lower end and upper end, 0 to 1; three NaN without runs.
    """
    if not runs:
        return math.nan, math.nan, math.nan
    interval = stats.binomtest(collapsed, runs).proportion_ci(1 - LEVEL, method="wilson")
    return collapsed / runs, float(interval.low), float(interval.high)
