"""Sensitivity to the learning rate, noise, and runs that failed or are missing."""

import math

import numpy as np
import pytest
from small_studies import verdict_on

from megaenc.study.manifest.model_key import ModelKey, format_model_name, parse_model_name
from megaenc.study.results.evidence import Score


def rated(grids, of_sides=({}, {})):
    """The verdict on an MLM and a CLM model with these scores by rate and seed."""
    sides = (parse_model_name("tiny-mlm15-40"), ModelKey("tiny", clm_steps=40))
    scores = [
        Score(
            format_model_name(setting),
            setting,
            "SC",
            "toy",
            0.9,
            0.01,
            by_rate[1e-4],
            by_rate,
            **of_side,
        )
        for setting, by_rate, of_side in zip(sides, grids, of_sides, strict=True)
    ]
    return verdict_on("3", scores)


def grid(losses, seeds=5, noise=0.001):
    """Scores by rate and seed, of what each rate loses."""
    random = np.random.default_rng([seeds, *(int(1e4 * lost) for lost in losses.values())])
    return {
        rate: {seed: 0.9 - lost + noise * random.standard_normal() for seed in range(seeds)}
        for rate, lost in losses.items()
    }


def test_a_rate_that_fails_is_no_steadiness():
    """MLM fails with every seed at the highest rate: it counts as trivial baseline."""
    clm = grid({1e-4: 0.0, 2e-4: 0.01, 5e-4: 0.03})
    mlm = grid({1e-4: 0.0, 2e-4: 0.01})
    failed = {"failed_seeds": {5e-4: frozenset(range(5))}}
    found = rated((mlm, clm), of_sides=({"baseline": 0.5, **failed}, {"baseline": 0.5}))
    assert found.verdict == "holds" and found.overall.difference > 0.9
    assert "failed runs count as the trivial baseline: 5 of MLM 15 %" in found.reason
    reversed_sides = rated((clm, mlm), of_sides=({"baseline": 0.5}, {"baseline": 0.5, **failed}))
    assert reversed_sides.verdict == "reversed"
    # Results that do not say what the baseline gets
    unknown = rated((mlm, clm), of_sides=(failed, {}))
    assert (
        "failed runs count as the worst run of that data set" in unknown.reason
        and unknown.overall.difference < 0.9
    )


def test_a_rate_counts_with_the_seeds_that_both_have():
    """At the highest rate MLM loses 20 points and CLM 2, with three of five seeds."""
    mlm = grid({1e-4: 0.0, 2e-4: 0.01, 5e-4: 0.2})
    clm = grid({1e-4: 0.0, 2e-4: 0.01, 5e-4: 0.02})
    for missing in (3, 4):
        del mlm[5e-4][missing]
    found = rated((mlm, clm))
    assert (
        found.verdict == "holds"
        and found.overall.test.seed_count == 3
        and found.overall.difference > 0.9
    )
    assert "fine-tuning seeds left out because a side lacks one of their rates: 2" in found.reason
    del clm[5e-4][0]  # two are left, which is no test: the other rates are
    found = rated((mlm, clm))
    assert (
        found.verdict == "not resolved"
        and found.overall.test.seed_count == 5
        and abs(found.overall.difference) < 0.5
    )
    assert "rates left out because the sides share fewer than 3 seeds there: 1" in found.reason
    two = rated((grid({1e-4: 0.0, 2e-4: 0.03}, seeds=2), grid({1e-4: 0.0, 2e-4: 0.01}, seeds=2)))
    # One pair of seeds: no spread
    assert two.verdict == "not resolved" and math.isnan(two.overall.p)


def test_another_run_is_tested_over_the_sizes_and_noisier_seeds_are_no_sensitivity():
    """Sizes are runs of their own: three that agree are evidence, one is not."""
    scores = []
    for size, more in (("10M", 0.030), ("20M", 0.033), ("40M", 0.036)):
        for setting, lost in (
            (ModelKey(size, mlm_steps=40, mask_ratio=0.15), 0.01 + more),
            (ModelKey(size, clm_steps=40), 0.01),
        ):
            by_rate = grid({1e-4: 0.0, 2e-4: lost})
            scores.append(
                Score(
                    format_model_name(setting),
                    setting,
                    "SC",
                    "toy",
                    0.9,
                    0.01,
                    by_rate[1e-4],
                    by_rate,
                )
            )
    assert verdict_on("3", scores).label == "holds"
    verdict = verdict_on("3", scores[:2])
    assert (
        verdict.label == "holds for these runs" and "pretrain with several seeds." in verdict.reason
    )
    # The same of both: best less worst mean would be against MLM
    losses = {
        1e-4: 0.0,
        2e-4: 0.004,
        5e-4: 0.008,
    }
    noisy = rated((grid(losses, noise=0.006), grid(losses, noise=0.001)))
    assert noisy.verdict == "not resolved"


def test_spreads_over_mask_ratios():
    """After CLM the ratios are a point apart, alone five."""
    random = np.random.default_rng(0)
    scores = []
    for clm_steps, apart in ((0, 0.05), (30, 0.01)):
        for index, ratio in enumerate((0.2, 0.3, 0.4, 0.5)):
            setting = ModelKey(
                "tiny", clm_steps=clm_steps, mlm_steps=40 - clm_steps, mask_ratio=ratio
            )
            by_seed = {
                seed: 0.8 - apart * index + 0.001 * random.standard_normal() for seed in range(5)
            }
            scores.append(
                Score(format_model_name(setting), setting, "SC", "toy", 0.8, 0.01, by_seed)
            )
    found = verdict_on("6c", scores)
    assert found.label == "holds for these runs" and found.overall.difference == pytest.approx(
        24 / 26, abs=0.01
    )
    assert found.comparisons[0].where == "tiny, 30 of 40 steps of CLM"
    assert verdict_on("6c", scores[1:]).verdict == "holds"  # three ratios on both sides
    assert verdict_on("6c", scores[2:]).verdict == "no data"
