"""Rates, collapsed runs, seeds beside examples: numbers worked out by hand."""

import math

import numpy as np
import pytest

from megaenc.study.evidence import Evidence, Score
from megaenc.study.published import published
from megaenc.study.setting import Setting
from megaenc.study.spread_tables import collapse_table, rate_table, sensitivity, spread_tables, variance_table
from megaenc.study.statistics import seeds_needed

ONE, OTHER = Setting("mini", 10), Setting("mini", 0, 10, mask_ratio=0.4)


def score(setting, seeds, examples=None, **more):
    given = {"mean": float(np.mean(list(seeds.values()))), "half": 0.01, "seeds": seeds}
    if examples is not None:
        given["examples"] = lambda: examples
    return Score("clm" if setting is ONE else "mlm", setting, "SC", "sst2", **given, **more)


def test_published_means_say_nothing_of_rates_seeds_or_runs():
    assert spread_tables(published()) == []


def test_rates_with_every_seed_make_the_spread():
    rates = {1e-5: {0: 0.80, 1: 0.82}, 1e-4: {0: 0.90, 1: 0.90}, 5e-4: {0: 0.10}, 2e-4: {0: 0.894, 1: 0.892}}
    found = score(ONE, {0: 0.9, 1: 0.9}, rates=rates)
    assert sensitivity(found).means == pytest.approx({1e-5: 0.81, 1e-4: 0.9, 2e-4: 0.893})
    assert [row.cells for row in rate_table(Evidence([found])).rows] == [("clm", "9.00 (2/3)")]
    assert rate_table(Evidence([score(ONE, {0: 0.9}, rates={1e-5: {0: 0.9}})])) is None


def test_collapsed_runs_are_counted():
    average = Score("clm", ONE, "SC", "average", 0.5, None, collapsed=3, runs=60)
    table = collapse_table(Evidence([score(ONE, {0: 0.5}, collapsed=3, runs=30), average]))
    assert table.rows[0].cells == ("clm", "3/30", "5.0 % (1.7 to 13.7)")


def test_seeds_and_examples_part_the_variance():
    random = np.random.default_rng(0)
    ease, seeds, count = random.normal(size=400), 5, 400
    sides = {}
    for setting, shift in ((ONE, 0.0), (OTHER, 0.02)):
        block = 0.5 + shift + 0.1 * ease + 0.01 * random.normal(size=(seeds, 1)) + 0.02 * random.normal(size=(seeds, count))
        sides[setting] = score(setting, dict(enumerate(block.mean(1))), dict(enumerate(block)))
    [row] = variance_table(Evidence(list(sides.values()))).rows
    assert row.cells[:4] == ("SC", "SST-2", 2, 5)
    run, of_seeds, of_examples = (float(cell) for cell in row.cells[4:7])
    assert of_seeds == pytest.approx(run / math.sqrt(5), abs=0.006)
    assert run == pytest.approx(1.0, rel=0.5)  # five seeds say it roughly
    assert of_examples == pytest.approx(100 * 0.1 / math.sqrt(count), rel=0.1)
    needed = row.cells[7:]
    assert all(isinstance(seeds, int) for seeds in needed) and sorted(needed, reverse=True) == list(needed)
    assert needed[0] > needed[3] >= 2


def test_seeds_needed_are_those_of_the_statistics():
    ours = score(ONE, {0: 0.50, 1: 0.52, 2: 0.54})
    theirs = score(OTHER, {0: 0.60, 1: 0.60, 2: 0.63})
    [row] = variance_table(Evidence([theirs, ours])).rows
    from megaenc.study.statistics import Components

    differences = np.array([0.10, 0.08, 0.09])
    parts = Components(float(differences.var(ddof=1)) / 3, math.nan)
    assert row.cells[7:] == tuple(seeds_needed(wanted, parts, 3) for wanted in (0.002, 0.005, 0.01, 0.02))
    assert row.cells[6] is None  # no examples, no number


def test_one_model_alone_has_no_difference():
    [row] = variance_table(Evidence([score(ONE, {0: 0.5, 1: 0.6})])).rows
    assert row.cells[4:] == ("7.07", "5.00", None, None, None, None, None)
