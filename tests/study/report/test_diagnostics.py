"""Rates, collapsed runs, seeds beside examples: numbers worked out by hand."""

import math

import numpy as np
import pytest
from study_directories import write_result

from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.report.score_tables import (
    build_collapse_table,
    build_diagnostic_tables,
    build_rate_table,
    build_variance_table,
    rate_sensitivity,
)
from megaenc.study.results.evidence import Evidence, Score, read_evidence
from megaenc.study.results.published import published
from megaenc.study.stats.inference import required_seeds, variance_components

ONE = ModelKey("mini", 10)
OTHER = parse_model_name("mini-mlm40-10")


def score(setting, seeds, **more):
    mean = float(np.mean(list(seeds.values())))
    return Score(
        "clm" if setting is ONE else "mlm", setting, "SC", "sst2", mean, 0.01, seeds, **more
    )


def rate_cell(**more):
    """The one cell of the table of rates, and its note."""
    table = build_rate_table(Evidence([score(ONE, {0: 0.9, 1: 0.9}, **more)]))
    [row] = table.rows
    return row.cells[1], table.note


def test_rates_with_every_seed_make_the_spread():
    rates = {
        1e-5: {0: 0.80, 1: 0.82},
        1e-4: {0: 0.90, 1: 0.90},
        5e-4: {0: 0.10},
        2e-4: {0: 0.894, 1: 0.892},
    }
    found = score(ONE, {0: 0.9, 1: 0.9}, rate_scores=rates)
    assert rate_sensitivity(found).means == pytest.approx({1e-5: 0.81, 1e-4: 0.9, 2e-4: 0.893})
    assert rate_cell(rate_scores=rates)[0] == "9.00 (2/3)"
    runs = {"ended_runs": 4, "collapsed_runs": 4, "collapsed_at_rate": 2, "planned_runs": 12}
    cell, note = rate_cell(rate_scores=rates, **runs)
    assert cell == "9.00 (2/3) †4/4 [4/12]"
    assert (
        "if all collapse, the spread is small too" in note
        and "only k of n fine-tuning runs" in note
    )
    assert build_rate_table(Evidence([score(ONE, {0: 0.9}, rate_scores={1e-5: {0: 0.9}})])) is None


def test_a_rate_that_broke_runs_counts_at_the_floor():
    """Two broken rates of six make a model no steadier than a loss of four points."""
    rates = {
        rate: {0: 0.9 - loss, 1: 0.9 - loss}
        for rate, loss in ((1e-5, 0.005), (2e-5, 0.0), (5e-5, 0.02))
    }
    failed = {1e-4: frozenset({0, 1}), 2e-4: frozenset({1})}
    runs = {
        "rate_scores": {**rates, 2e-4: {0: 0.9}},
        "failed_seeds": failed,
        "ended_runs": 10,
        "planned_runs": 10,
    }
    known = score(ONE, {0: 0.9, 1: 0.9}, baseline=0.5, **runs)
    assert rate_sensitivity(known).means == pytest.approx(
        {1e-5: 0.895, 2e-5: 0.9, 5e-5: 0.88, 1e-4: 0.5, 2e-4: 0.7}
    )
    cell, note = rate_cell(baseline=0.5, **runs)
    assert cell == "40.00 (2/5, 2 failed)" and "counts as the trivial baseline" in note
    assert rate_cell(**runs)[0] == "2.00 (2/5, 2 failed)"


def test_collapsed_runs_are_counted_by_data_set_and_by_rate(tmp_path):
    """A training for three retrieval sets counts once; models without scores count."""
    for rate in ("1e-05", "5e-05"):
        for seed in range(5):
            for dataset in ("msmarco", "nq"):
                worthless = "random" if (rate, seed, dataset) == ("5e-05", 0, "nq") else None
                directory = tmp_path / "clm" / "IR" / dataset / f"pairs_lr{rate}_sd{seed}"
                write_result(directory, 0.9, collapsed=worthless, baseline={"score": 0.5})
            failed = tmp_path / "mlm" / "SC" / "sst2" / f"lr{rate}_sd{seed}" / "failed.json"
            failed.parent.mkdir(parents=True)
            failed.write_text('{"reason": "the loss is nan", "step": 3}')
    evidence = read_evidence(tmp_path, {"clm": ONE, "mlm": OTHER})
    average = evidence.find(ONE, "average", "IR")
    assert (average.collapsed_runs, average.ended_runs, average.planned_runs) == (1, 10, 10)
    assert evidence.find(OTHER, "sst2") is None
    table = build_collapse_table(evidence)
    names = [f"{column.group} {column.name}".strip() for column in table.columns]
    assert names[1:6] == [
        "SC SST-2",
        "IR NQ",
        "IR MS MARCO",
        "By learning rate 1e-05",
        "By learning rate 5e-05",
    ]
    assert [row.cells for row in table.rows] == [
        ("mlm", "10/10", None, None, "5/5", "5/5", "10/10", "100.0 % (72.2 to 100.0)"),
        ("clm", None, "1/10", "0/10", "0/5", "1/5", "1/10", "10.0 % (1.8 to 40.4)"),
        ("all models", "10/10", "1/10", "0/10", "5/10", "6/10", "11/20", "55.0 % (34.2 to 74.2)"),
    ]


def test_variances_and_seeds_needed_are_those_of_the_statistics():
    random = np.random.default_rng(0)
    ease = 0.1 * random.normal(size=400)
    noise = [
        0.01 * random.normal(size=(5, 1)) + 0.02 * random.normal(size=(5, 400)) for _ in range(2)
    ]
    blocks = [0.5 + ease + noise[0], 0.52 + ease + noise[1]]
    sides = []
    for setting, block in zip((ONE, OTHER), blocks, strict=True):
        by_seed = dict(enumerate(block))
        sides.append(score(setting, dict(enumerate(block.mean(1))), load_examples=by_seed.copy))
    [row] = build_variance_table(Evidence(sides)).rows
    parts = [variance_components(block.mean(1), [block]) for block in blocks]
    of_seeds = math.sqrt(np.mean([part.seed_variance for part in parts]))
    of_examples = math.sqrt(np.mean([part.example_variance for part in parts]))
    spreads = [f"{100 * std:.2f}" for std in (math.sqrt(5) * of_seeds, of_seeds, of_examples)]
    less = blocks[0] - blocks[1]
    needed = [
        required_seeds(wanted, variance_components(less.mean(1), [less]), 5)
        for wanted in (0.002, 0.005, 0.01, 0.02)
    ]
    assert row.cells == ("SC", "SST-2", 2, 5, *spreads, *needed) and None not in needed
    [alone] = build_variance_table(Evidence([score(ONE, {0: 0.5, 1: 0.6})])).rows
    # No examples, no number
    assert alone.cells[4:] == (
        "7.07",
        "5.00",
        None,
        None,
        None,
        None,
        None,
    )
    assert build_diagnostic_tables(published()) == []
