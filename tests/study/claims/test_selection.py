"""Which models a claim compares, for any state of a study and names of sizes."""

from dataclasses import replace

import pytest
from small_studies import by_claim, sized, verdict_on

from megaenc.study.claims.verdicts import judge
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import StudyScope
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.published import published
from megaenc.study.stats.comparisons import ModelSelector


def gap_by_words(scope: StudyScope, gaps=(0.01, 0.03, 0.05)):
    """Return claim 1d of a study whose gap narrows, with sizes called by words.

    Models are read in the order of their names.
    """
    scores = []
    for index, (size, gap) in enumerate(zip(("large", "medium", "small"), gaps, strict=True)):
        scores += [
            replace(score, family="IR", dataset="nq")
            for score in sized(size, [1], gap, runs=0, random=index)
        ]
    return by_claim(Evidence(scores, scope=scope))["1d"]


def test_sizes_come_in_the_manifests_order_or_there_are_no_data():
    found = gap_by_words(StudyScope(sizes=("small", "medium", "large")))
    assert found.verdict == "holds" and found.overall.where == "small to large"
    # On average
    no_gap = gap_by_words(StudyScope(sizes=("small", "medium", "large")), gaps=(-0.03, 0.0, 0.03))
    assert no_gap.verdict == "not resolved" and no_gap.overall.p > 0.05
    found = gap_by_words(StudyScope())
    assert found.verdict == "no data" and found.reason.startswith("Needs sizes in a known order")


def only(keep, scope: StudyScope = StudyScope()) -> Evidence:  # noqa: B008
    return Evidence([score for score in published().scores if keep(score.model_key)], scope=scope)


def test_the_end_and_the_ratio_of_a_half_done_study_are_the_planned_ones():
    plan = StudyScope(
        {score.model: score.model_key for score in published().scores}, ("210M", "610M", "1B")
    )

    def half(key):  # CLM is done, MLM has its shorter budget alone
        return (
            key.size == "610M"
            and key.decayed
            and not key.cpt_mlm_steps
            and (key.steps == 22_000 or key.clm_steps == 42_000)
        )

    # All that there is
    assert {pair[1][0].steps for pair in ModelSelector(only(half)).final_pairs().values()} == {
        22_000
    }
    assert ModelSelector(only(half, plan)).final_pairs() == {}
    assert judge(only(half, plan))[0].verdict == "no data"

    def without(key):
        return key.size == "210M" and key.mask_ratio != 0.4

    assert (
        ModelSelector(only(without)).mlm != "MLM 40 %"
        and ModelSelector(only(without, plan)).mlm == "MLM 40 %"
    )


@pytest.mark.parametrize("budget", [100, 0])
def test_early_is_of_the_run_that_a_checkpoint_is_on_the_way_of(budget):
    scores = []
    for step in (10, 20, 40):
        for key in (
            ModelKey("tiny", step, decayed=False, budget=budget),
            ModelKey("tiny", 0, step, mask_ratio=0.4, decayed=False),
        ):
            scores.append(Score(f"{key}", key, "SC", "sst2", 0.5 + step / 1000, 0.01))
    found = verdict_on("2", scores)
    assert ("early is step 10, 20;" in found.reason) == (budget == 100) and (
        "early is step 10;" in found.reason
    ) == (budget == 0)
