"""Table of schedules next to MLM, against formulas written out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.report.schedule_table import build_schedule_table, compare_with_control
from megaenc.study.results.evidence import Evidence, Score

MLM = parse_model_name("toy-mlm30-100")
CLM = ModelKey("toy", 100)
DIFFUSION = ModelKey("toy", 0, 100, mask_ratio=0.5, schedule="diffusion")
PREFIX = ModelKey("toy", 80, 0, schedule="prefix_lm")


def build_evidence(means: dict[ModelKey, list[float]], dataset: str = "sst2") -> Evidence:
    """A score for each pretraining seed, 1, 2, ..., of each model."""
    keys = [
        (replace(key, seed=index + 1), mean)
        for key, recipe_means in means.items()
        for index, mean in enumerate(recipe_means)
    ]
    return Evidence([Score(f"{key}", key, "SC", dataset, mean, 0.01) for key, mean in keys])


def test_one_recipe_is_students_t_test():
    left = np.array([0.71, 0.74, 0.72])
    right = np.array([0.66, 0.65])
    result = compare_with_control([left], right)
    expected = stats.ttest_ind(left, right)
    interval = expected.confidence_interval()
    assert result.df == 3 and result.differences[0] == pytest.approx(
        left.mean() - right.mean(), abs=1e-12
    )
    assert result.p[0] == pytest.approx(expected.pvalue, abs=1e-3)
    assert result.half_width[0] == pytest.approx((interval.high - interval.low) / 2, rel=2e-2)


def test_the_deviation_is_pooled_and_the_p_corrected():
    recipes = [np.array([0.60, 0.62]), np.array([0.70, 0.71]), np.array([0.65])]
    control = np.array([0.64, 0.68])
    result = compare_with_control(recipes, control)
    assert result.df == 3
    assert result.run_std == pytest.approx(
        math.sqrt((0.02**2 / 2 + 0.01**2 / 2 + 0.04**2 / 2) / 3), rel=1e-12
    )
    for recipe, p in zip(recipes, result.p, strict=True):
        t = abs(recipe.mean() - control.mean()) / (
            result.run_std * math.sqrt(1 / len(recipe) + 1 / 2)
        )
        single = 2 * stats.t.sf(t, 3)
        # Between no correction and Bonferroni's
        assert single - 1e-3 <= p <= min(1, 3 * single) + 1e-3


@pytest.mark.parametrize("runs", [1, 2])
def test_without_noise_only_the_difference_is_known(runs):
    table = build_schedule_table(build_evidence({MLM: [0.6] * runs, DIFFUSION: [0.5] * runs}))
    assert [row.cells for row in table.rows] == [
        ("toy", "diffusion", 100, 100, runs, "-10.00", None),
        (
            "toy",
            "standard deviation between runs",
            None,
            100,
            None,
            "0.00 (2 df)" if runs == 2 else None,
            None,
        ),
    ]


def test_each_schedule_is_compared_with_mlm_of_as_many_steps_or_the_most():
    longer = replace(MLM, mlm_steps=200)
    means = {
        MLM: [0.6, 0.62],
        longer: [0.64, 0.65],
        CLM: [0.66, 0.66],
        DIFFUSION: [0.5, 0.53],
        PREFIX: [0.7, 0.69],
    }
    table = build_schedule_table(build_evidence(means))
    rows = [row.cells[1:5] for row in table.rows]
    assert (
        ("diffusion", 100, 100, 2) in rows
        and ("prefix_lm", 80, 200, 2) in rows
        and ("CLM", 100, 100, 2) in rows
    )
    cells = {row.cells[1]: row.cells[5] for row in table.rows}
    assert cells["diffusion"].startswith("-9.50 (") and cells["prefix_lm"].startswith("+5.00 (")


def test_models_that_cannot_be_compared_have_empty_cells_or_no_table():
    assert build_schedule_table(build_evidence({MLM: [0.6], CLM: [0.5]})) is None
    assert build_schedule_table(build_evidence({CLM: [0.6], DIFFUSION: [0.5]})) is None
    assert (
        build_schedule_table(build_evidence({replace(MLM, size="other"): [0.6], DIFFUSION: [0.5]}))
        is None
    )
    scores = (
        build_evidence({MLM: [0.6], DIFFUSION: [0.5]}).scores
        + build_evidence({DIFFUSION: [0.4]}, "qqp").scores
    )
    table = build_schedule_table(Evidence(scores))
    assert table.rows[0].cells[5:] == ("-10.00", None, None, None)
    assert [column.group for column in table.columns[5:]] == ["SC SST-2"] * 2 + ["SC QQP"] * 2
