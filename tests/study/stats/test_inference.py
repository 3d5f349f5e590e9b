"""Formulas against scipy, published tables and simulations with a known truth."""

import math

import levels
import numpy as np
import pytest
from scipy import stats

from megaenc.study.stats import inference
from megaenc.study.stats.inference import (
    VarianceComponents,
    contrast_t_test,
    holm_adjust,
    required_seeds,
    variance_components,
    welch_from_intervals,
)

NAN = math.nan


def test_over_seeds_alone_it_is_the_paired_t_test_and_over_examples_that_of_one_sample():
    first = np.array([0.91, 0.93, 0.92, 0.90, 0.94])
    second = np.array([0.90, 0.91, 0.92, 0.88, 0.92])
    found = contrast_t_test(first - second)
    expected = stats.ttest_rel(first, second)
    assert (
        found.p == pytest.approx(expected.pvalue, rel=1e-9)
        and found.errors[0][1] == 4
        and found.seed_count == 5
    )
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    block = np.array([[1.0, 0, 0, 1, -1, 1, 1, 0]])
    found = contrast_t_test(block.mean(1), [block])
    expected = stats.ttest_1samp(block[0], 0)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval())
    assert math.isnan(found.p) and math.isnan(found.p_below(0.9))  # one seed


def test_parts_with_seeds_of_their_own_are_welchs_test():
    first = np.array([0.91, 0.93, 0.92, 0.90, 0.94])
    second = np.array([0.80, 0.90])
    variances = [(np.var(part, ddof=1) / len(part), len(part) - 1) for part in (first, second)]
    found = inference.welch_satterthwaite_test(first.mean() - second.mean(), variances, NAN)
    expected = stats.ttest_ind(first, second, equal_var=False)
    assert found.p == pytest.approx(expected.pvalue) and found.errors[0][1] == pytest.approx(
        expected.df
    )
    more = inference.welch_satterthwaite_test(first.mean() - second.mean(), variances, 0.1)
    assert more.p > found.p and more.components.example_variance == 0.1
    one_seed = inference.welch_satterthwaite_test(0.1, [(NAN, 0), (0.01, 4)], NAN)
    assert one_seed.seed_count == 0 and math.isnan(one_seed.p)


def test_examples_that_parts_share_add_up():
    """Two parts on the same 200 examples: the sum has 0.3 + 0.1 of them, or 0.3 - 0.1."""
    random = np.random.default_rng(0)
    for sign in (1, -1):
        found = []
        for _ in range(1000):
            ease = random.standard_normal((1, 200))
            parts = [
                0.3 * ease + 0.5 * random.standard_normal((5, 200)),
                sign * 0.1 * ease + 0.5 * random.standard_normal((2, 200)),
            ]
            found.append(inference.example_variance(parts))
        assert np.mean(found) == pytest.approx((0.3 + sign * 0.1) ** 2 / 200, rel=0.1)


def test_seeds_and_examples_by_hand():
    # Three seeds that differ by 0, 3, 6 from the mean of examples that differ by 0, 8 and a
    # residual of 1 at one place.
    block = np.array([[0.0, 8.0], [3.0, 11.0], [6.0, 15.0]])
    by_seed = block.mean(1)
    by_example = block.mean(0)
    left = block - by_seed[:, None] - by_example + block.mean()
    between = 3 * np.var(by_example, ddof=1)
    residual = (left**2).sum() / 2
    found = contrast_t_test(by_seed, [block])
    assert found.components.seed_variance == pytest.approx(np.var(by_seed, ddof=1) / 3)
    assert found.components.example_variance == pytest.approx((between - residual) / 6)
    total = found.components.total
    assert found.errors[1] == pytest.approx(
        (math.sqrt(total), total**2 / (found.components.seed_variance**2 / 2))
    )
    assert found.p == pytest.approx(
        2 * stats.t.sf(block.mean() / math.sqrt(total), found.errors[1][1])
    )
    of_two = variance_components(2 * by_seed, [block, block])
    assert of_two.example_variance == pytest.approx(2 * found.components.example_variance)
    assert of_two.seed_variance == pytest.approx(4 * found.components.seed_variance)


def test_published_means_are_compared_as_welch_does():
    found = welch_from_intervals([0.92, 0.90], [0.005, 0.010], [1, -1])
    sd = [half * math.sqrt(5) / 1.96 for half in (0.005, 0.010)]
    expected = stats.ttest_ind_from_stats(0.92, sd[0], 5, 0.90, sd[1], 5, equal_var=False)
    assert (
        found.p == pytest.approx(expected.pvalue)
        and found.difference == pytest.approx(0.02)
        and found.seed_count == 0
    )


def test_equivalence_is_two_one_sided_tests():
    scores = np.array([0.001, -0.002, 0.003, 0.0, 0.002])
    found = contrast_t_test(scores)
    for bound in (-0.005, 0.0, 0.005):
        assert found.p_above(bound) == pytest.approx(
            stats.ttest_1samp(scores, bound, alternative="greater").pvalue
        )
        assert found.p_below(bound) == pytest.approx(
            stats.ttest_1samp(scores, bound, alternative="less").pvalue
        )


def test_without_any_spread_nothing_is_said():
    for scores in (
        np.full(3, 0.1),
        np.array([0.1, 0.1 + 1e-16, 0.3 - 0.2]),
        np.array([0.1]),
        np.zeros(3),
    ):
        # Two models that say the same constant are not shown to be equal
        found = contrast_t_test(scores)
        assert (
            math.isnan(found.p)
            and math.isnan(found.p_above(-0.01))
            and math.isnan(found.p_below(0.01))
        )
    # Other ones: a difference in every example
    constants = np.stack([np.random.default_rng(0).choice([-1.0, 1.0], 300)] * 3)
    found = contrast_t_test(constants.mean(1), [constants])
    assert math.isnan(found.p) and found.low < found.difference < found.high
    assert math.isnan(welch_from_intervals([0.5, 0.4], [NAN, 0.1], [1, -1]).p)
    # Known, although the seeds agree
    given_noise = contrast_t_test(np.full(3, 0.5), run_variances=[(0.0625, math.inf)])
    assert given_noise.p == pytest.approx(2 * stats.norm.sf(2), rel=1e-4)


def test_holm_by_hand():
    # 0.005 x 4, 0.01 x 3, 0.03 x 2, then no less
    assert holm_adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    with_none = holm_adjust([0.01, NAN, 0.5, 0.9])
    assert (
        with_none[0] == pytest.approx(0.03)
        and math.isnan(with_none[1])
        and with_none[2:] == pytest.approx([1.0, 1.0])
    )
    assert holm_adjust([]) == []


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (1.0, 10)])
def test_seeds_needed_are_those_of_the_tables(effect, pairs):
    """Pairs for 80 % power, two-sided 5 %, as in Cohen's tables and G*Power."""
    assert required_seeds(effect, VarianceComponents(1 / 5, NAN), parts_seed_count=5) == pairs


def test_examples_limit_what_seeds_can_show():
    without = VarianceComponents(1e-4, NAN)
    parts = VarianceComponents(1e-4, 2e-5)
    assert required_seeds(0.02, without, 5) < required_seeds(0.02, parts, 5)
    assert required_seeds(0.01, parts, 5) is None  # the examples' standard error alone is 0.0045
    assert required_seeds(0.02, VarianceComponents(NAN, 1e-5), 1) is None
    assert required_seeds(0.5, VarianceComponents(0.0, 1e-5), 5) == 2


def test_power_is_how_often_a_difference_is_seen():
    """By the very test that is used, which is the less certain of two."""
    random = np.random.default_rng(3)
    seen = []
    for _ in range(2000):
        block = (
            0.02 + 0.015 * random.standard_normal((4, 1)) + 0.06 * random.standard_normal((1, 100))
        )
        block = block + 1e-4 * random.standard_normal((4, 100))
        seen.append(contrast_t_test(block.mean(1), [block]).p < 0.05)
    parts = VarianceComponents(0.015**2 / 5, 0.006**2)
    # Three standard errors
    assert inference.t_test_power(0.02, parts, 5, 4) == pytest.approx(np.mean(seen), abs=0.035)


def test_rates_are_apart_by_what_seeds_do_not_do():
    random = np.random.default_rng(0)
    grid = (
        0.8
        + 0.03 * random.standard_normal((6, 1))
        + 0.02 * random.standard_normal((6, 5))
        + 0.1 * random.random((1, 5))
    )
    left = grid - grid.mean(0) - grid.mean(1, keepdims=True) + grid.mean()
    between_rates = 5 * np.var(grid.mean(1), ddof=1)
    residual = (left**2).sum() / (5 * 4)
    found = inference.rate_variance_pseudo_values(grid)
    assert found.mean() == pytest.approx((between_rates - residual) / 5)
    without = [
        inference.rate_variance_pseudo_values(np.delete(grid, seed, axis=1)).mean()
        for seed in range(5)
    ]
    assert found == pytest.approx(5 * found.mean() - 4 * np.array(without))  # jackknife
    with pytest.raises(ValueError, match="at least two rates and two seeds"):
        inference.rate_variance_pseudo_values(grid[:, :1])


def test_collapse_rates_and_hedges_correction():
    first = [1.0, 2, 3, 4, 5]
    second = [0.0, 1, 2, 3, 4]
    exact = math.gamma(4) / (math.sqrt(4) * math.gamma(3.5))  # 8 degrees of freedom
    assert inference.hedges_g(first, second) == pytest.approx(exact / math.sqrt(2.5))
    assert math.isnan(inference.hedges_g([1.0], [2.0])) and math.isnan(
        inference.hedges_g([1.0, 1], [2.0, 2])
    )
    # Wilson: z2 / (n + z2)
    assert inference.collapse_rate(0, 30) == pytest.approx((0, 0, 0.1135), abs=1e-4)
    assert all(math.isnan(part) for part in inference.collapse_rate(0, 0))


WORLDS = ("5 seeds, seeds matter, shared", "5 seeds, examples matter", "2 seeds, seeds matter")


@pytest.mark.parametrize("world", WORLDS)
def test_false_alarms_are_at_most_one_in_twenty(world):
    """Consistent with 5 %: more than 38 of 500 have a probability below 1 / 200."""
    random = np.random.default_rng(11)
    found = [levels.ways(levels.differences(random, *levels.WORLDS[world])) for _ in range(500)]
    assert sum(ways["the less certain"] for ways in found) <= stats.binom.ppf(0.995, 500, 0.05)
    if world == "5 seeds, examples matter":  # which is why examples are in the interval
        assert sum(ways["t over seeds alone"] for ways in found) > 60
