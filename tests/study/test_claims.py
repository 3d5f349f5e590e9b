"""Verdicts: silent on studies without differences, right on planted ones, on the published tables as they fell."""

import dataclasses
import math

import numpy as np
import pytest
import simulated
from scipy import stats

from megaenc.finetune.examples import Family
from megaenc.study.claims import judge
from megaenc.study.evidence import Evidence, Score
from megaenc.study.published import published
from megaenc.study.setting import Setting, name_of

CLAIMS = ["1a", "1b", "1c", "1d", "2", "3", "4", "5", "6"]


def by_claim(evidence, **more):
    return {f"{one.claim}{one.part}": one for one in judge(evidence, **more)}


def test_false_alarms_in_studies_without_differences():
    """Over 200: at most 5 % have a false verdict (more than 19 would have probability 0.005), and single tests have 5 %."""
    alarms, whole, single = 0, [], []
    for number in range(200):
        found = simulated.verdicts(number, examples=200)
        alarms += any(simulated.false_alarm(one) for one in found)
        directional = [one for one in found if one.overall is not None and (one.claim, one.part) != (1, "c")]
        whole += [one.overall.p < 0.05 for one in directional]
        single += [comparison.p < 0.05 for one in directional for comparison in one.comparisons]
    assert alarms <= stats.binom.ppf(0.995, 200, 0.05) == 19
    # Not because they never say anything: before any correction they are at their level, pooled and alone.
    assert 0.03 < np.mean(whole) < 0.07 and 0.03 < np.mean(single) < 0.07


def only_mlm(one):
    return one.mlm_steps > 0 and not one.clm_steps and not one.cpt_mlm_steps and one.decayed


PLANTED = {  # what is better by so many logits, if the claim holds; with -1 the other way round
    "1a": lambda one, family, way: way * 0.4 * (only_mlm(one) and family == Family.SC),
    "1b": lambda one, family, way: way * 0.4 * (only_mlm(one) and family == Family.QA),
    "1d": lambda one, family, way: (
        only_mlm(one) * (family == Family.IR) * {"210M": 0.5 + way * 0.3, "610M": 0.5, "1B": 0.5 - way * 0.3}[one.size]
    ),
    "2": lambda one, family, way: way * 0.4 * (not one.decayed and not one.mlm_steps and one.steps <= 10_000),
    "4": lambda one, family, way: way * 0.3 * (one.mlm_steps > 0 and 0.2 < one.clm_share < 0.3),
    "5": lambda one, family, way: way * 0.3 * (one.clm_steps > 0 and one.cpt_mlm_steps == 22_000),
}


@pytest.mark.parametrize("claim", PLANTED)
@pytest.mark.parametrize(("way", "expected"), [(1, "holds"), (-1, "reversed")])
def test_planted_effects_are_found_with_their_sign(claim, way, expected):
    plant = PLANTED[claim]
    found = by_claim(simulated.study(3, lambda one, family: plant(one, family, way), quiet=True, examples=500), draws=0)
    assert found[claim].verdict == expected
    outcomes = {comparison.verdict for comparison in found[claim].comparisons}
    assert ("holds" if way < 0 else "reversed") not in outcomes or claim == "1d"  # there they are of the gap, not of its trend
    if claim in "24":  # which touch nothing that another one looks at, but for the longest run of CLM and MLM both
        assert all(one.verdict == "not resolved" for name, one in found.items() if name not in (claim, "1c"))


@pytest.mark.parametrize(("shift", "expected"), [(0.0, "holds"), (0.4, "reversed")])
def test_about_equal_and_not(shift, expected):
    quiet = simulated.study(3, lambda one, family: shift * (only_mlm(one) and family == Family.TC), quiet=True, examples=2000)
    assert by_claim(quiet, draws=0)["1c"].verdict == expected


@pytest.mark.parametrize(("way", "expected"), [(1, "holds"), (-1, "reversed")])
def test_sensitivity_to_the_rate(way, expected):
    found = by_claim(simulated.study(2, away=lambda one, family: 0.02 * ((one.mlm_steps > 0) == (way > 0))), draws=0)["3"]
    assert found.verdict == expected and len(found.comparisons) == 3 * 4
    assert found.overall.difference == pytest.approx(way * 4, abs=1)  # two steps of two points


def test_no_single_best_ratio_and_one():
    def some_here_some_there(one, family):
        return 0.5 * only_mlm(one) * (((one.mask_ratio or 0) > 0.35) == (family in (Family.SC, Family.TC)))

    def one_everywhere(one, family):
        return 0.5 * (only_mlm(one) and one.mask_ratio == 0.3)

    found = by_claim(simulated.study(0, some_here_some_there, quiet=True), draws=0)["6"]
    assert found.verdict == "holds" and "20 % is beaten by" in found.reason and len(found.comparisons) == 6 * 3 * 4
    assert all(comparison.difference >= 0 for comparison in found.comparisons)  # the better one stands first
    found = by_claim(simulated.study(0, one_everywhere, quiet=True), draws=0)["6"]
    assert found.verdict == "reversed" and "30 % is not shown to be beaten anywhere" in found.reason


def test_the_published_tables():
    """As they fell: claim 5 is not resolved by what is printed, and of claim 3 nothing is."""
    found = by_claim(published())
    assert [found[claim].verdict for claim in CLAIMS] == [
        "holds", "holds", "holds", "holds", "holds", "no data", "holds", "not resolved", "holds",
    ]  # fmt: skip
    assert "two or more learning rates" in found["3"].reason
    gap = {comparison.where: round(comparison.difference, 2) for comparison in found["1a"].comparisons}
    assert gap == {"210M": 2.09, "610M": 3.42, "1B": 5.55}  # of the printed averages
    assert "early is step 1,000, 2,000, 5,000, 10,000; 610M on SC: MLM is ahead from step 10,000 on" in found["2"].reason
    assert "after 2,000 steps it is -4.63 points" in found["5"].reason


def test_nothing_is_said_without_data():
    found = judge(Evidence([]))
    assert {one.verdict for one in found} == {"no data"} and all(one.reason.startswith("Needs ") for one in found)
    assert "at least two sizes" in found[3].reason


def mini(seeds, pretrained=(1,), gain=0.05, examples=200):
    """A study of one size, forty steps and two tasks, as a manifest may name and choose them."""
    random = np.random.default_rng(1)
    settings = [
        Setting("tiny", mlm_steps=40, mask_ratio=0.15),
        Setting("tiny", clm_steps=40),
        Setting("tiny", clm_steps=10, mlm_steps=30, mask_ratio=0.15),
    ]
    scores = []
    for family, dataset in (("SC", "toy_sc"), ("IR", "toy_ir")):
        for setting, gains in zip(settings, (0, 0, gain), strict=True):
            for pretraining in pretrained:
                ran = 0.01 * random.standard_normal() if len(pretrained) > 1 else 0
                blocks = 0.6 + gains + ran + 0.004 * random.standard_normal((seeds, 1)) + 0.1 * random.random((1, examples))
                by_seed, named = dict(enumerate(blocks)), dataclasses.replace(setting, seed=pretraining)
                means = {seed: float(block.mean()) for seed, block in by_seed.items()}
                mean = float(blocks.mean())
                numbers = (mean, 0.01, means, {1e-5: means}, lambda by_seed=by_seed: by_seed)
                scores.append(Score(name_of(named), named, family, dataset, *numbers))
    return Evidence(scores)


def test_any_manifest_can_be_judged():
    found = by_claim(mini(5))
    assert found["4"].verdict == "holds" and [one.dataset for one in found["4"].comparisons] == ["toy_sc", "toy_ir"]
    assert found["4"].comparisons[0].left == "25 % CLM, then MLM" and found["4"].comparisons[0].where == "tiny, 40 steps, 15 %"
    assert [claim for claim in CLAIMS if found[claim].verdict == "no data"] == ["1b", "1c", "1d", "2", "3", "5", "6"]
    assert "MLM 15 %" in found["1a"].question
    percentile, studentised = found["4"].overall.bootstrap
    assert percentile[0] > 0 and studentised[0] < found["4"].overall.difference < studentised[1]
    assert found["4"].overall.seeds_needed == 2 and found["4"].overall.effect > 3


def test_one_seed_is_never_a_verdict():
    """However many examples say so: another seed might say otherwise."""
    every = by_claim(mini(1))
    assert {one.verdict for one in every.values()} == {"not resolved", "no data"}
    found = every["4"]
    assert found.verdict == "not resolved" and "nothing says what other seeds would give" in found.reason
    assert all(math.isnan(one.p) and one.low > 0 for one in found.comparisons)


def test_several_pretrainings_are_what_is_compared():
    found = by_claim(mini(5, pretrained=(1, 2, 3)), draws=0)["4"]
    assert found.overall.test.seeds == 3 and found.overall.test.df < 5
    assert by_claim(mini(5, pretrained=(2,)), draws=0)["4"].overall.test.seeds == 5


def test_other_examples_leave_the_seeds_alone():
    """Two models that were evaluated on different examples cannot be paired by them."""
    evidence = mini(5)
    odd = [
        dataclasses.replace(score, examples=lambda: {seed: np.ones(7) for seed in range(5)})
        if score.setting.clm_steps == 10
        else score
        for score in evidence.scores
    ]
    both, alone = by_claim(evidence, draws=0)["4"].overall, by_claim(Evidence(odd), draws=0)["4"].overall
    assert not math.isnan(both.test.components.examples) and math.isnan(alone.test.components.examples)
    assert alone.difference == pytest.approx(both.difference)


def test_seeds_that_have_nothing_in_common():
    scores = [
        dataclasses.replace(score, seeds={seed + 5 * bool(score.setting.clm_steps): value for seed, value in score.seeds.items()})
        for score in mini(5).scores
    ]
    found = by_claim(Evidence(scores))["1a"]
    assert found.verdict == "not resolved" and "No seed that all of the models were fine-tuned with" in found.reason
