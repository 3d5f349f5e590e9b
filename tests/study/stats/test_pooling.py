"""Seeds and examples behind a comparison, and sums of lines with different ones."""

import dataclasses
import math

import numpy as np
import pytest
from small_studies import by_claim, mini, sized, verdict_on

from megaenc.study.results.evidence import Evidence
from megaenc.study.results.published import published
from megaenc.study.stats import inference


def test_each_line_has_all_its_pretraining_seeds():
    """A second size with one run does not take the runs of the first."""
    first = sized("10M", range(1, 6))
    second = sized("20M", [1], gap=0.02, runs=0)
    alone = verdict_on("1a", first)
    both = verdict_on("1a", first + second)
    assert alone.verdict == both.verdict == "not resolved"
    assert (
        both.comparisons[0].test == alone.comparisons[0].test
        and both.comparisons[0].pretraining_runs == 5
    )
    # Its fine-tunings agree: what another run would give is taken from the other size
    single = both.comparisons[1]
    assert (
        single.has_borrowed_variance
        and single.verdict == "not resolved"
        and single.high - single.low > 2 * alone.overall.high - alone.overall.low
    )
    assert both.overall.difference == pytest.approx(
        np.mean([comparison.difference for comparison in both.comparisons])
    )
    assert (
        both.overall.seeds_needed is None
        and both.overall.pretraining_runs == 1
        and both.overall.has_borrowed_variance
    )
    assert "1 of 2 comparisons have one pretraining run a side" in both.reason
    assert verdict_on("1a", second).verdict == "holds"  # of these two models


def test_unequal_seeds_are_welch_and_satterthwaite():
    """Sizes share no runs: variances add up, and are greater with fewer seeds."""
    scores = sized("10M", range(1, 6)) + sized("20M", (1, 2))
    pooled = verdict_on("1a", scores).overall
    differences = []
    for examples in (slice(0, 10), slice(10, 14)):
        means = [np.mean(list(score.seed_scores.values())) for score in scores[examples]]
        differences.append(np.array(means[::2]) - np.array(means[1::2]))
    variances = [np.var(part, ddof=1) / len(part) / 4 for part in differences]
    assert pooled.test.components.seed_variance == pytest.approx(sum(variances))
    assert pooled.test.errors[0][1] == pytest.approx(
        sum(variances) ** 2 / (variances[0] ** 2 / 4 + variances[1] ** 2 / 1)
    )
    equal = verdict_on("1a", sized("10M", (1, 2, 3)) + sized("20M", (1, 2, 3))).overall
    # By seed, whatever they share
    assert equal.test.seed_count == 3 and equal.test.errors[0][1] == pytest.approx(2)


def test_other_examples_leave_the_seeds_alone():
    """Two models that were evaluated on different examples cannot be paired by them."""
    evidence = mini(5)
    odd = []
    for score in evidence.scores:
        if score.model_key.clm_steps == 10:
            score = dataclasses.replace(
                score, load_examples=lambda: {seed: np.ones(7) for seed in range(5)}
            )
        odd.append(score)
    both = by_claim(evidence)["4a"].overall
    alone = by_claim(Evidence(odd))["4a"].overall
    assert not math.isnan(both.test.components.example_variance) and math.isnan(
        alone.test.components.example_variance
    )
    assert alone.difference == pytest.approx(both.difference)


def test_seeds_that_have_nothing_in_common():
    scores = []
    for score in mini(5).scores:
        shift = 5 if score.model_key.clm_steps else 0
        by_seed = {seed + shift: value for seed, value in score.seed_scores.items()}
        scores.append(dataclasses.replace(score, seed_scores=by_seed))
    found = verdict_on("1a", scores)
    assert (
        found.verdict == "not resolved"
        and "No fine-tuning seed that all of these models have" in found.reason
    )


def test_seeds_needed_are_never_enough_or_not_known():
    found = by_claim(published())["1a"].overall
    assert found.seeds_needed is None
    of_examples = inference.TestResult(
        0.01, [(0.006, 50.0)], inference.VarianceComponents(1e-6, 4e-5), 5
    )
    assert dataclasses.replace(found, test=of_examples).seeds_needed == math.inf
