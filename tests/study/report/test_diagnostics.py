"""Rates, collapsed runs, seeds beside examples: numbers worked out by hand."""

import json
import math

import numpy as np
import pytest

from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.score_tables import (
    build_collapse_table,
    build_diagnostic_tables,
    build_rate_table,
    build_variance_table,
    rate_sensitivity,
)
from megaenc.study.results.evidence import Evidence, Score, read_evidence
from megaenc.study.results.published import published
from megaenc.study.stats.inference import VarianceComponents, required_seeds

ONE, OTHER = ModelKey("mini", 10), ModelKey("mini", 0, 10, mask_ratio=0.4)


def score(setting, seeds, examples=None, **more):
    given = {"mean": float(np.mean(list(seeds.values()))), "half_width": 0.01, "seed_scores": seeds}
    if examples is not None:
        given["load_examples"] = lambda: examples
    return Score("clm" if setting is ONE else "mlm", setting, "SC", "sst2", **given, **more)


def test_rates_with_every_seed_make_the_spread():
    rates = {1e-5: {0: 0.80, 1: 0.82}, 1e-4: {0: 0.90, 1: 0.90}, 5e-4: {0: 0.10}, 2e-4: {0: 0.894, 1: 0.892}}
    found = score(ONE, {0: 0.9, 1: 0.9}, rate_scores=rates)
    assert rate_sensitivity(found).means == pytest.approx({1e-5: 0.81, 1e-4: 0.9, 2e-4: 0.893})
    assert [row.cells for row in build_rate_table(Evidence([found])).rows] == [("clm", "9.00 (2/3)")]
    assert build_rate_table(Evidence([score(ONE, {0: 0.9}, rate_scores={1e-5: {0: 0.9}})])) is None


def test_a_rate_that_broke_runs_counts_at_the_floor():
    """A model that two of six rates break is no steadier than one that they cost four points."""
    rates = {rate: {0: 0.9 - loss, 1: 0.9 - loss} for rate, loss in ((1e-5, 0.005), (2e-5, 0.0), (5e-5, 0.02))}
    failed = {1e-4: frozenset({0, 1}), 2e-4: frozenset({1})}
    runs = {"rate_scores": {**rates, 2e-4: {0: 0.9}}, "failed_seeds": failed, "ended_runs": 10, "planned_runs": 10}
    known = score(ONE, {0: 0.9, 1: 0.9}, baseline=0.5, **runs)
    assert rate_sensitivity(known).means == pytest.approx({1e-5: 0.895, 2e-5: 0.9, 5e-5: 0.88, 1e-4: 0.5, 2e-4: 0.7})
    table = build_rate_table(Evidence([known]))
    assert table.rows[0].cells == ("clm", "40.00 (2/5, 2 failed)") and "counts as the trivial baseline" in table.note
    unknown = score(ONE, {0: 0.9, 1: 0.9}, **runs)
    assert build_rate_table(Evidence([unknown])).rows[0].cells == ("clm", "2.00 (2/5, 2 failed)")


def test_a_model_that_always_collapses_is_not_called_steady_and_a_grid_that_is_not_done_is_marked():
    rates = {1e-5: {0: 0.80, 1: 0.82}, 1e-4: {0: 0.90, 1: 0.90}}
    runs = {"rate_scores": rates, "ended_runs": 4, "collapsed_runs": 4, "collapsed_at_rate": 2, "planned_runs": 12}
    table = build_rate_table(Evidence([score(ONE, {0: 0.9, 1: 0.9}, **runs)]))
    assert table.rows[0].cells == ("clm", "9.00 (1/2) †4/4 [4/12]")
    assert "if all collapse, the spread is small too" in table.note and "only k of n fine-tuning runs" in table.note


def run(place, rate, seed, collapsed=None, score=0.9, train="", baseline=0.5):
    folder = place / f"{train}lr{rate}_sd{seed}"
    folder.mkdir(parents=True)
    if score is None:
        (folder / "failed.json").write_text('{"reason": "the loss is nan", "step": 3}')
        return
    split = {"score": score, "collapsed": collapsed, "baseline": {"score": baseline}}
    (folder / "results.json").write_text(json.dumps({"validation": split, "test": split}))


def test_collapsed_runs_are_counted_by_data_set_and_by_rate(tmp_path):
    """A training for three retrieval sets is one training; a model without a score is there too."""
    for rate in ("1e-05", "5e-05"):
        for seed in range(5):
            for dataset in ("msmarco", "nq"):
                worthless = "random" if (rate, seed, dataset) == ("5e-05", 0, "nq") else None
                run(tmp_path / "clm" / "IR" / dataset, rate, seed, worthless, train="pairs_")
            run(tmp_path / "mlm" / "SC" / "sst2", rate, seed, score=None)
    evidence = read_evidence(tmp_path, {"clm": ONE, "mlm": OTHER})
    average = evidence.find(ONE, "average", "IR")
    assert (average.collapsed_runs, average.ended_runs, average.planned_runs) == (1, 10, 10)
    assert evidence.find(OTHER, "sst2") is None
    table = build_collapse_table(evidence)
    assert [f"{column.group} {column.name}".strip() for column in table.columns] == [
        "Model", "SC SST-2", "IR NQ", "IR MS MARCO", "By learning rate 1e-05", "By learning rate 5e-05", "All collapsed",
        "All share",
    ]  # fmt: skip
    assert [row.cells for row in table.rows] == [
        ("mlm", "10/10", None, None, "5/5", "5/5", "10/10", "100.0 % (72.2 to 100.0)"),
        ("clm", None, "1/10", "0/10", "0/5", "1/5", "1/10", "10.0 % (1.8 to 40.4)"),
        ("all models", "10/10", "1/10", "0/10", "5/10", "6/10", "11/20", "55.0 % (34.2 to 74.2)"),
    ]
    assert "narrower than it should be" in table.note


def test_seeds_and_examples_part_the_variance():
    random, count = np.random.default_rng(0), 400
    ease = 0.1 * random.normal(size=count)
    sides = []
    for setting, shift in ((ONE, 0.0), (OTHER, 0.02)):
        block = 0.5 + shift + ease + 0.01 * random.normal(size=(5, 1)) + 0.02 * random.normal(size=(5, count))
        sides.append(score(setting, dict(enumerate(block.mean(1))), dict(enumerate(block))))
    [row] = build_variance_table(Evidence(sides)).rows
    assert row.cells[:4] == ("SC", "SST-2", 2, 5)
    run, of_seeds, of_examples = (float(cell) for cell in row.cells[4:7])
    assert of_seeds == pytest.approx(run / math.sqrt(5), abs=0.006)
    assert run == pytest.approx(1.0, rel=0.5)  # five seeds say it roughly
    assert of_examples == pytest.approx(100 * 0.1 / math.sqrt(count), rel=0.1)
    assert list(row.cells[7:]) == sorted(row.cells[7:], reverse=True) and row.cells[7] > row.cells[10] >= 2


def test_seeds_needed_are_those_of_the_statistics():
    ours = score(ONE, {0: 0.50, 1: 0.52, 2: 0.54})
    theirs = score(OTHER, {0: 0.60, 1: 0.60, 2: 0.63})
    [row] = build_variance_table(Evidence([theirs, ours])).rows
    differences = np.array([0.10, 0.08, 0.09])
    parts = VarianceComponents(float(differences.var(ddof=1)) / 3, math.nan)
    assert row.cells[7:] == tuple(required_seeds(wanted, parts, 3) for wanted in (0.002, 0.005, 0.01, 0.02))
    assert row.cells[6] is None  # no examples, no number
    [alone] = build_variance_table(Evidence([score(ONE, {0: 0.5, 1: 0.6})])).rows
    assert alone.cells[4:] == ("7.07", "5.00", None, None, None, None, None)
    assert build_diagnostic_tables(published()) == []
