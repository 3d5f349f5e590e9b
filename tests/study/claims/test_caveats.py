"""What a verdict leaves open is said: one run, collapsed sides, seeds and rates that are not there."""

import dataclasses
import math

import numpy as np
import pytest
from small_studies import by_claim, mini, sized

from megaenc.study.claims.verdicts import judge
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.published import published


def test_a_verdict_says_what_it_is_about():
    sentence = "This holds for these trained models; another pretraining run may differ by more."
    for evidence in (published(), mini(5)):
        assert all(sentence in one.reason for one in judge(evidence, draws=0) if one.verdict != "no data")
    assert all(sentence not in one.reason for one in judge(mini(5, pretraining_seeds=(1, 2)), draws=0))


def test_models_without_a_partner_are_counted():
    scores = sized("10M", (1, 2, 3))[:-1]  # no CLM of the third seed
    found = by_claim(Evidence(scores))["1a"]
    assert found.comparisons[0].pretraining_runs == 2
    assert "1 model is left out because the other side lacks the same pretraining seed." in found.reason


def collapsed(evidence, where, runs=None):
    """The same with worthless predictions in so many runs at the chosen rate."""
    return Evidence(
        [
            dataclasses.replace(one, collapsed_at_rate=len(one.seed_scores) if runs is None else runs) if where(one) else one
            for one in evidence.scores
        ]
    )


def test_a_side_that_collapsed_is_not_compared():
    evidence = mini(5, families=(("SC", "toy_sc"), ("TC", "toy_tc"), ("IR", "toy_ir")))
    found = by_claim(collapsed(evidence, lambda one: one.family == "TC"))
    assert found["1c"].verdict == "not resolved" and found["1c"].overall is None
    assert "Not compared, as a side has collapsed: TC at tiny (MLM 15 % and CLM collapsed)." in found["1c"].reason
    some = by_claim(collapsed(evidence, lambda one: one.family == "SC" and one.model_key.clm_steps == 10))["4"]
    assert [one.verdict for one in some.comparisons] == ["not resolved", "holds", "holds"]
    assert some.comparisons[0].where == "tiny, 40 steps, 15 % (25 % CLM, then MLM collapsed)" and math.isnan(
        some.comparisons[0].p
    )
    rest = [one.difference for one in some.comparisons[1:]]
    assert some.verdict == "holds" and some.overall.difference == pytest.approx(np.mean(rest))
    few = by_claim(collapsed(evidence, lambda one: True, runs=1))["4"]  # one seed of five: its score says so
    assert not any(one.collapsed for one in few.comparisons)


def test_what_is_not_complete_is_said():
    evidence = mini(5)
    half = [
        dataclasses.replace(score, seed_scores={seed: value for seed, value in score.seed_scores.items() if seed < 2})
        if score.model_key.clm_steps == 40
        else score
        for score in evidence.scores
    ]
    found = by_claim(Evidence(half))
    assert "Not complete: 2 of 2 pairs of models lack fine-tuning seeds (2 of 5)." not in found["4"].reason
    assert "Not complete: 1 of 1 pairs of models lack fine-tuning seeds (2 of 5)." in found["1a"].reason
