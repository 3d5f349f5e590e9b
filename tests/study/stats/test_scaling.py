"""Fits of planted scaling laws, and properties of laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar

from megaenc.errors import InputError
from megaenc.study.stats.scaling import (
    ScalingLaw,
    ScalingPoint,
    find_crossing,
    fit_isoflop,
    fit_scaling_law,
    percentile_interval,
)

BUDGETS = (3e17, 3e18, 3e19)
SIZES = np.geomspace(1e7, 6e8, 6)
LAW = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, 6.0, (BUDGETS[0], BUDGETS[-1]))


def plant_points(
    law: ScalingLaw, std: float = 0.0, draw: int = 0, seeds: int = 1
) -> list[ScalingPoint]:
    """Return runs of six sizes at three budgets, with normal noise of log losses."""
    random = np.random.default_rng(draw)
    points = []
    for flops in BUDGETS:
        for size in SIZES:
            tokens = flops / 6 / size
            for seed in range(seeds):
                loss = law.loss(size, tokens) * math.exp(std * random.standard_normal())
                points.append(ScalingPoint("mlm", size, tokens, flops, loss, seed))
    return points


def plant_parabolas(exponent: float, std: float = 0.0, draw: int = 0) -> list[ScalingPoint]:
    """Return five sizes around the optimum 1e8 (C / 3e18)^exponent of each budget."""
    random = np.random.default_rng(draw)
    points = []
    for index, flops in enumerate(BUDGETS):
        for offset in (-1.2, -0.6, 0.0, 0.5, 1.0):
            size = 1e8 * (flops / 3e18) ** exponent * math.exp(offset)
            loss = 3 - 0.4 * index + 0.1 * offset**2 + std * random.standard_normal()
            points.append(ScalingPoint("mlm", size, flops / 6 / size, flops, loss))
    return points


def is_covered(value: float, resamples: np.ndarray) -> bool:
    low, high = percentile_interval(resamples)
    return low <= value <= high


def test_a_law_without_noise_is_fitted_exactly():
    law, resamples = fit_scaling_law(plant_points(LAW), 20)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(law, name) == pytest.approx(getattr(LAW, name), rel=1e-4)
        assert getattr(resamples, name) == pytest.approx(np.full(20, getattr(LAW, name)), rel=1e-3)
    assert law.flops_factor == pytest.approx(6)
    assert law.flops_range == (3e17, 3e19)


@pytest.mark.slow
def test_intervals_cover_planted_exponents():
    covered = np.zeros(3, dtype=int)
    for draw in range(100):
        _, resamples = fit_scaling_law(plant_points(LAW, 0.003, draw, seeds=3), 100)
        covered += [
            is_covered(LAW.alpha, resamples.alpha),
            is_covered(LAW.beta, resamples.beta),
            is_covered(LAW.parameters_exponent, resamples.parameters_exponent),
        ]
    assert covered.min() >= 89, covered
    assert covered.max() <= 99, covered


def test_a_reversed_pair_of_exponents_is_found():
    reverse = replace(LAW, A=140.0, B=5300.0, alpha=LAW.beta, beta=0.40)
    _, first = fit_scaling_law(plant_points(LAW, 0.003), 100)
    _, second = fit_scaling_law(plant_points(reverse, 0.003), 100)
    assert percentile_interval(first.alpha - first.beta)[0] > 0
    assert percentile_interval(second.alpha - second.beta)[1] < 0
    assert percentile_interval(first.parameters_exponent)[1] < 0.5
    assert percentile_interval(second.parameters_exponent)[0] > 0.5


def test_an_outlier_hardly_moves_the_fit():
    points = plant_points(LAW, 0.0005)
    expected, _ = fit_scaling_law(points, 0)
    points[7] = replace(points[7], loss=1.2 * points[7].loss)
    law, _ = fit_scaling_law(points, 0)
    squares, _ = fit_scaling_law(points, 0, delta=10.0)
    assert abs(law.alpha - expected.alpha) < 0.02 < abs(squares.alpha - expected.alpha)


def test_seeds_of_a_point_are_resampled_together():
    points = plant_points(LAW, 0.003)
    _, expected = fit_scaling_law(points, 20)
    _, resamples = fit_scaling_law([replace(p, seed=s) for p in points for s in range(3)], 20)
    assert resamples.alpha == pytest.approx(expected.alpha, rel=1e-3)


def test_resamples_depend_on_the_seed_only():
    points = plant_points(LAW, 0.003)
    _, first = fit_scaling_law(points, 5, seed=1)
    _, again = fit_scaling_law(points, 5, seed=1)
    _, other = fit_scaling_law(points, 5, seed=2)
    assert first.alpha.tolist() == again.alpha.tolist()
    assert np.all(first.alpha != other.alpha)


def test_points_with_budgets_of_their_own_are_resampled_too():
    points = [
        replace(point, flops=point.flops * 1.3**index)
        for index, point in enumerate(plant_points(LAW, 0.003))
    ]
    _, resamples = fit_scaling_law(points, 20)
    assert len(set(resamples.alpha)) == 20


def test_the_optimum_has_the_lowest_loss_of_its_budget():
    for flops in (1e17, 1e21):
        found = minimize_scalar(
            lambda log_size, flops=flops: LAW.loss(
                math.exp(log_size), flops / 6 / math.exp(log_size)
            ),
            bounds=(10, 30),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert LAW.optimal_parameters(flops) == pytest.approx(math.exp(found.x), rel=1e-4)
        assert LAW.optimal_loss(flops) == pytest.approx(found.fun, rel=1e-12)
        assert 6 * LAW.optimal_parameters(flops) * LAW.optimal_tokens(flops) == pytest.approx(flops)
    ratio = math.log(LAW.optimal_parameters(1e21) / LAW.optimal_parameters(1e17)) / math.log(1e4)
    assert LAW.parameters_exponent == pytest.approx(ratio)
    assert LAW.parameters_exponent + LAW.tokens_exponent == pytest.approx(1)


def test_minima_and_exponents_of_parabolas():
    # whole steps: FLOPs of a budget differ
    points = [
        replace(point, flops=point.flops * (1 + 0.02 * (index % 3 - 1)))
        for index, point in enumerate(plant_parabolas(0.4))
    ]
    optima, _ = fit_isoflop(points, 1)
    sizes = 1e8 * (np.array(BUDGETS) / 3e18) ** 0.4
    assert optima.flops == pytest.approx(BUDGETS, rel=0.01)
    assert optima.parameters == pytest.approx(sizes)
    assert optima.tokens == pytest.approx(BUDGETS / sizes / 6)
    assert optima.losses == pytest.approx([3, 2.6, 2.2])
    assert optima.curvatures == pytest.approx([0.1] * 3)
    assert optima.parameters_exponent == pytest.approx(0.4, rel=0.01)
    assert optima.tokens_exponent == pytest.approx(0.6, rel=0.01)


def test_intervals_cover_exponents_of_planted_parabolas():
    covered = 0
    for draw in range(100):
        _, resamples = fit_isoflop(plant_parabolas(0.4, 0.005, draw), 500)
        covered += is_covered(0.4, resamples.parameters_exponent)
    assert 89 <= covered <= 99


def test_budgets_without_a_minimum_within_their_sizes_are_left_out():
    points = plant_parabolas(0.4)
    rising = [replace(point, loss=math.log(point.parameters)) for point in points]
    without_first, _ = fit_isoflop([*points[:2], *points[5:]], 1)
    assert without_first.flops == pytest.approx(BUDGETS[1:])
    without_last, _ = fit_isoflop([*points[:10], *rising[10:]], 1)
    assert without_last.flops == pytest.approx(BUDGETS[:2])
    only_first, resamples = fit_isoflop(points[:5], 3)
    assert math.isnan(only_first.parameters_exponent)
    assert np.isnan(resamples.parameters_exponent).tolist() == [True] * 3
    with pytest.raises(InputError, match="3 budgets: no parabola over at least three sizes"):
        fit_isoflop(rising)


def test_parabolas_through_all_points_have_no_interval():
    points = plant_parabolas(0.4)
    optima, resamples = fit_isoflop(points[:5:2] + points[5:10:2], 4)
    assert optima.parameters_exponent == pytest.approx(0.4)
    assert np.isnan(percentile_interval(resamples.parameters_exponent)).all()


def test_envelopes_cross_within_the_runs_of_both_objectives():
    other = replace(LAW, E=1.89, A=300.0)
    expected = brentq(lambda flops: LAW.optimal_loss(flops) - other.optimal_loss(flops), 1e16, 1e20)
    assert 3e17 < expected < 3e19
    assert find_crossing(LAW, other) == pytest.approx(expected, rel=1e-4)
    assert find_crossing(other, LAW) == pytest.approx(expected, rel=1e-4)
    outside = replace(other, flops_range=(1.01 * expected, 1e25))
    assert math.isnan(find_crossing(LAW, outside))
    assert math.isnan(find_crossing(LAW, replace(other, flops_range=(1e20, 1e21))))
    assert math.isnan(find_crossing(LAW, LAW))


def test_crossings_of_resamples_have_an_interval():
    other = replace(LAW, E=1.89, A=300.0)
    first, first_resamples = fit_scaling_law(plant_points(LAW, 0.002, 1), 40)
    second, second_resamples = fit_scaling_law(plant_points(other, 0.002, 1001), 40)
    crossings = find_crossing(first_resamples, second_resamples)
    assert crossings.shape == (40,)
    low, high = percentile_interval(crossings)
    assert low < find_crossing(first, second) < high
    assert low < find_crossing(LAW, other) < high


def test_intervals_are_percentiles_of_known_values():
    values = np.arange(1001.0)
    assert percentile_interval(values) == (25, 975)
    values[::25] = math.nan
    assert percentile_interval(values) == pytest.approx((26, 974), abs=1)
    values[::20] = math.nan
    assert np.isnan(percentile_interval(values)).all()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_points_need_finite_positive_numbers(value: float):
    with pytest.raises(InputError, match=f"loss {value} of a clm run, seed 3: .* leave the run"):
        ScalingPoint("clm", 1e7, 1e9, 6e16, value, 3)


def test_laws_need_enough_points_and_falling_losses():
    points = plant_points(LAW)
    with pytest.raises(InputError, match="5 points of 5 sizes and 5 numbers of tokens"):
        fit_scaling_law(points[:5])
    few = [point for point in points if point.parameters in SIZES[:2]]
    with pytest.raises(InputError, match="6 points of 2 sizes and 6 numbers of tokens"):
        fit_scaling_law(few)
    rising = [replace(point, loss=point.loss * point.tokens**0.5) for point in points]
    with pytest.raises(InputError, match=r"beta -.*, expected above 0: losses do not fall"):
        fit_scaling_law(rising)
