"""Verdicts on studies without differences, planted ones and the published tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
import simulated
from scipy import stats
from small_studies import TWO, by_claim, mini, sized, verdict_on

from megaenc.finetune.examples import TaskFamily
from megaenc.study.claims.decision import EQUALITY_MARGINS
from megaenc.study.claims.verdicts import judge
from megaenc.study.manifest.model_key import format_model_name, parse_model_name
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.published import published

CLAIMS = ["1a", "1b", "1c", "1d", "1e", "2", "3", "4a", "4b", "5a", "5b", "6a", "6b", "6c"]


NULLS = (  # a study of each in turn
    {},
    {"uneven": 0.01},
    {"quiet": True, "runs": 0.01, "pretrained": {"210M": 3, "610M": 2, "1B": 1}},
    {"quiet": True, "runs": 0.01},
)


@pytest.mark.slow
def test_false_alarms_in_studies_without_differences():
    """At most 5 % of 200 have a false verdict; above 19 has probability 0.005.

    Also if seeds of MLM are noisier, and if runs of the pretraining differ and models have one, two
    or three of them.
    """
    alarms = 0
    pooled = []
    single = []
    for study_index in range(200):
        world = NULLS[study_index % len(NULLS)]
        found = simulated.verdicts(study_index, examples=200, **world)
        alarms += any(
            simulated.false_alarm(verdict, another_run="runs" in world) for verdict in found
        )
        names = simulated.OF_EQUALITY
        directional = [
            verdict
            for verdict in found
            if verdict.overall is not None and f"{verdict.claim}{verdict.part}" not in names
        ]
        # Where runs differ and only one is known, tests of these models are not at their level
        if world == NULLS[-1]:
            continue
        pooled += [verdict.overall.p < 0.05 for verdict in directional]
        single += [
            comparison.p < 0.05 for verdict in directional for comparison in verdict.comparisons
        ]
    assert alarms <= stats.binom.ppf(0.995, 200, 0.05) == 19
    # Not because they never say anything: before any correction they are at their level, pooled and
    # alone.
    assert 0.03 < np.mean(pooled) < 0.07 and 0.03 < np.mean(single) < 0.07


def only_mlm(key):
    return key.mlm_steps > 0 and not key.clm_steps and not key.cpt_mlm_steps and key.decayed


PLANTED = {  # what is better by so many logits, if the claim holds; with -1 the other way round
    "1a": lambda key, family, sign: sign * 0.4 * (only_mlm(key) and family == TaskFamily.SC),
    "1d": lambda key, family, sign: (
        only_mlm(key)
        * (family == TaskFamily.IR)
        * {"210M": 0.5 + sign * 0.3, "610M": 0.5, "1B": 0.5 - sign * 0.3}[key.size]
    ),
    "2": lambda key, family, sign: (
        sign * 0.4 * (not key.decayed and not key.mlm_steps and key.steps <= 10_000)
    ),
    "4a": lambda key, family, sign: sign * 0.3 * (key.mlm_steps > 0 and 0.2 < key.clm_share < 0.3),
    "5a": lambda key, family, sign: (
        sign * 0.3 * (key.clm_steps > 0 and key.cpt_mlm_steps == 22_000)
    ),
    "6b": lambda key, family, sign: (
        sign * 2.0 * (only_mlm(key) and family == TaskFamily.IR) * ((key.mask_ratio or 0) - 0.35)
    ),
}


@pytest.mark.parametrize("claim", PLANTED)
@pytest.mark.parametrize(("sign", "expected"), [(1, "holds"), (-1, "reversed")])
def test_planted_effects_are_found_with_their_sign(claim, sign, expected):
    plant = PLANTED[claim]
    found = by_claim(
        simulated.study(3, lambda key, family: plant(key, family, sign), quiet=True, examples=1000)
    )
    assert found[claim].verdict == expected
    # Which touch nothing that another one looks at, but for the longest run of CLM and MLM both
    if claim in (
        "2",
        "4a",
    ):
        others = [
            verdict.verdict
            for name, verdict in found.items()
            if name not in (claim, *simulated.OF_EQUALITY)
        ]
        assert set(others) <= {"not resolved", "no data"}


@pytest.mark.parametrize(("sign", "expected"), [(1, "holds"), (-1, "reversed")])
def test_planted_effects_are_found_where_sizes_have_unequal_runs(sign, expected):
    """A run of the pretraining is a point better or worse; the largest size has one."""
    runs = {"pretrained": {"210M": 5, "610M": 3}, "runs": 0.01}
    found = by_claim(
        simulated.study(4, lambda key, family: PLANTED["1a"](key, family, sign), quiet=True, **runs)
    )["1a"]
    assert found.verdict == expected and [
        comparison.pretraining_runs for comparison in found.comparisons
    ] == [
        5,
        3,
        1,
    ]
    assert "1 of 3 comparisons have one pretraining run" in found.reason and found.label == expected


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.0, "holds"), (0.003, "not resolved"), (0.01, "reversed"), (-0.01, "reversed")],
)
def test_about_equal_is_within_the_margin_of_the_family(gap, expected):
    """Of 0.3 points on TC; 1.8 points would make a point equal on SC."""
    scores = [
        replace(score, family="TC", dataset="uner_en") for score in sized("10M", [1], gap, runs=0)
    ]
    assert verdict_on("1c", scores).verdict == expected


@pytest.mark.parametrize(
    ("on_tc", "on_sc", "expected"),
    [(0.0, 0.0, "holds"), (0.02, 0.05, "holds"), (-0.02, 0.0, "mixed"), (-0.02, -0.05, "reversed")],
)
def test_comparable_is_not_lower_in_any_family(on_tc, on_sc, expected):
    """Any higher score is comparable; below the margin on one family only is mixed."""
    scores = []
    for family, dataset, gap in (("TC", "uner_en", on_tc), ("SC", "sst2", on_sc)):
        for score in sized("10M", [1], gap, runs=0):
            key = parse_model_name("10m-mlm40-600")
            key = (
                replace(key, clm_steps=450, mlm_steps=150) if not score.model_key.clm_steps else key
            )
            scores.append(
                replace(
                    score,
                    family=family,
                    dataset=dataset,
                    model_key=key,
                    model=format_model_name(key),
                )
            )
    assert verdict_on("4b", scores).verdict == expected


def test_no_single_best_ratio_and_one():
    def some_here_some_there(key, family):
        return (
            0.5
            * only_mlm(key)
            * (((key.mask_ratio or 0) > 0.35) == (family in (TaskFamily.SC, TaskFamily.TC)))
        )

    def one_everywhere(key, family):
        return 0.5 * (only_mlm(key) and key.mask_ratio == 0.3)

    found = by_claim(simulated.study(0, some_here_some_there, quiet=True, examples=500))["6a"]
    assert (
        found.verdict == "holds"
        and "20 % is beaten by" in found.reason
        and len(found.comparisons) == 6 * 3 * 4
    )
    # The better one stands first
    assert all(comparison.difference >= 0 for comparison in found.comparisons)
    found = by_claim(simulated.study(0, one_everywhere, quiet=True, examples=500))["6a"]
    assert found.verdict == "reversed" and "30 % is not shown to be beaten anywhere" in found.reason


def test_the_published_tables():
    """As they fell: claim 5a is mixed, and of claims 3 and 6c nothing is printed."""
    found = by_claim(published())
    assert {claim: found[claim].label for claim in CLAIMS} == {
        "1a": "holds",
        "1b": "holds",
        "1c": "holds for these runs",
        "1d": "holds for these runs",
        "1e": "holds for these runs",
        "2": "holds",
        "3": "no data",
        "4a": "holds for these runs",
        "4b": "holds for these runs",
        "5a": "mixed for these runs",
        "5b": "holds for these runs",
        "6a": "holds for these runs",
        "6b": "holds",
        "6c": "no data",
    }
    assert "two or more learning rates" in found["3"].reason
    gap = {
        comparison.where: round(comparison.difference, 2) for comparison in found["1a"].comparisons
    }
    assert gap == {"210M": 2.09, "610M": 3.42, "1B": 5.55}  # of the printed averages
    assert (
        "early is step 1,000, 2,000, 5,000, 10,000; 610M on SC: MLM is ahead from step 10,000 on"
        in found["2"].reason
    )
    assert "QA -15.71 points after 2,000 steps" in found["5a"].reason
    families = {
        comparison.family: (round(comparison.difference, 2), comparison.verdict)
        for comparison in found["5a"].families
    }
    assert families == {
        "SC": (0.93, "holds"), "TC": (0.59, "holds"), "QA": (-1.04, "reversed"), "IR": (0.25,
                                                                                        "not "
                                                                                        "resolved"),
    }  # fmt: skip


def test_the_margins_are_the_spread_of_the_published_models():
    evidence = published()
    keys = {
        key
        for setup, of_setup in evidence.group_by_setup().items()
        if setup in ("base", "cpt")
        for key in of_setup
    }
    for family, margin in EQUALITY_MARGINS.items():
        means = [evidence.find(key, "average", family).mean for key in keys]
        assert len(means) == 21 and np.std(means, ddof=1) == pytest.approx(margin, abs=0.0005)


def test_any_manifest_can_be_judged():
    found = by_claim(mini(5))
    quarter = found["4a"]
    assert quarter.verdict == "holds" and [
        comparison.dataset for comparison in quarter.comparisons
    ] == [
        "toy_sc",
        "toy_ir",
    ]
    assert (
        quarter.comparisons[0].left == "25 % CLM, then MLM"
        and quarter.comparisons[0].where == "tiny, 40 steps, 15 %"
    )
    assert [claim for claim in CLAIMS if found[claim].verdict != "no data"] == ["1a", "4a"]
    assert "MLM 15 %" in found["1a"].question
    assert quarter.overall.seeds_needed == 3 and quarter.overall.effect > 3
    nothing = judge(Evidence([]))
    assert {verdict.verdict for verdict in nothing} == {"no data"} and all(
        verdict.reason.startswith("Needs ") for verdict in nothing
    )


def test_one_seed_is_never_a_verdict():
    """Another seed might differ, however many examples there are."""
    verdicts = by_claim(mini(1, examples=5000, families=(*TWO, ("TC", "toy_tc"))))
    assert {verdict.verdict for verdict in verdicts.values()} == {"not resolved", "no data"}
    assert abs(verdicts["1c"].overall.difference) < 0.5 and math.isnan(verdicts["1c"].overall.p)
    found = verdicts["4a"]
    assert (
        found.verdict == "not resolved" and "the variation between seeds is unknown" in found.reason
    )
    assert all(math.isnan(comparison.p) and comparison.low > 0 for comparison in found.comparisons)
