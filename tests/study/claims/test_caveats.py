"""Caveats of verdicts: one run, collapsed sides, missing seeds and rates."""

import dataclasses
import math

import numpy as np
import pytest
from small_studies import by_claim, mini, sized, verdict_on

from megaenc.errors import InputError
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.claims.verdicts import judge
from megaenc.study.manifest.model_key import ModelKey, format_model_name, parse_model_name
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.published import published
from megaenc.study.stats.comparisons import ModelSelector
from megaenc.study.stats.run_noise import estimate_run_noise, parse_run_noise


def test_a_verdict_says_what_it_is_about():
    """Models pretrained once, with the noise of the curves, a given noise, or none."""
    for verdict in judge(published()):
        assert "Another pretraining run: " in verdict.reason or verdict.verdict == "no data"
    sentence = (
        "by how much another pretraining run differs is unknown here: pretrain with several seeds, "
        "or state --run-noise"
    )
    unknown = {
        name: verdict for name, verdict in by_claim(mini(5)).items() if verdict.verdict != "no data"
    }
    assert all(sentence in verdict.reason for verdict in unknown.values())
    assert unknown["4a"].label == "holds for these runs" and math.isnan(unknown["4a"].p_another_run)
    quiet = parse_run_noise(["SC=0.01", "IR=0.01"])
    loud = parse_run_noise(["SC=9", "IR=9"])
    given = by_claim(mini(5), noise=quiet)["4a"]
    assert (
        given.label == "holds"
        and "noise between runs: 0.01 points on SC, 0.01 on IR, given" in given.reason
    )
    assert by_claim(mini(5), noise=loud)["4a"].label == "holds for these runs"
    several = judge(mini(5, pretraining_seeds=(1, 2)))
    assert all(
        "nother pretraining run" not in verdict.reason and verdict.label == verdict.verdict
        for verdict in several
    )


@pytest.mark.parametrize("text", ["SC", "XX=1", "SC=-1", "SC=nan"])
def test_odd_noise_is_one_line(text):
    with pytest.raises(
        InputError, match=r"^--run-noise .*: expected FAMILY=POINTS, such as SC=0.5"
    ):
        parse_run_noise([text])


def test_the_published_noise_is_that_of_the_curves():
    """Least squares of three sizes and one bend: twelve scores, seven parameters."""
    noise = estimate_run_noise(ModelSelector(published()))
    sizes = ("210m", "610m", "1b")
    ratios = (20, 30, 40, 50)
    rows = [
        [
            *(other_size == size for other_size in sizes),
            *((other_size == size) * ratio for other_size in sizes),
            ratio**2,
        ]
        for size in sizes
        for ratio in ratios
    ]
    found = []
    for family, names in STUDY_DATASETS.items():
        keys = [parse_model_name(f"{size}-mlm{ratio}-42k") for size in sizes for ratio in ratios]
        means = [
            np.mean([published().find(key, name, family).mean for name in names]) for key in keys
        ]
        variance, finetuning = noise.variance({(str(family), name): 1 / 3 for name in names})
        assert variance == pytest.approx(
            np.linalg.lstsq(np.array(rows, float), np.array(means))[1][0] / 5
        )
        assert 0 < finetuning < variance
        found.append(100 * math.sqrt(variance - finetuning))
    assert noise.df == 5 and found == pytest.approx([0.44, 0.18, 2.50, 0.50], abs=0.005)


def collapsed(evidence, where, runs=5):
    """The same with worthless predictions in so many runs at the chosen rate."""
    return Evidence(
        [
            dataclasses.replace(score, collapsed_at_rate=runs * where(score))
            for score in evidence.scores
        ]
    )


def test_collapsed_models_count_once_as_such_and_once_left_out():
    evidence = mini(5, families=(("SC", "toy_sc"), ("TC", "toy_tc"), ("IR", "toy_ir")))
    all_collapsed = by_claim(collapsed(evidence, lambda score: score.family == "TC"))["1c"]
    assert (
        all_collapsed.overall is not None
        and "nothing is left without the collapsed models" in all_collapsed.reason
    )
    assert "A side has collapsed: TC at tiny (MLM 15 % and CLM collapsed)." in all_collapsed.reason
    some_collapsed = by_claim(
        collapsed(evidence, lambda score: score.family == "SC" and score.model_key.clm_steps == 10)
    )["4a"]
    assert [comparison.verdict for comparison in some_collapsed.comparisons] == [
        "holds",
        "holds",
        "holds",
    ]
    assert (
        some_collapsed.comparisons[0].where == "tiny, 40 steps, 15 % (25 % CLM, then MLM collapsed)"
    )
    assert (
        some_collapsed.verdict == "holds"
        and "without the collapsed models holds (p " in some_collapsed.reason
    )
    # One seed of five: its score says so
    few_collapsed = by_claim(collapsed(evidence, lambda score: True, runs=1))["4a"]
    assert not any(comparison.collapsed for comparison in few_collapsed.comparisons)


def test_a_model_that_always_collapses_is_evidence():
    """All five seeds score 50 %: the other model is better, other sizes leave it out."""
    first = sized("10M", [1], gap=0.05, runs=0)
    first[1] = dataclasses.replace(
        first[1], mean=0.5, seed_scores=dict.fromkeys(range(5), 0.5), collapsed_at_rate=5
    )
    found = verdict_on("1a", [*first, *sized("20M", [1], gap=0.05, runs=0)])
    assert found.verdict == "holds" and found.comparisons[0].difference == pytest.approx(
        35, abs=0.2
    )
    assert (
        found.overall.difference == pytest.approx(20, abs=0.2)
        and "without the collapsed models holds (p " in found.reason
    )
    # Without the collapse MLM is below
    undecided = verdict_on("1a", [*first, *sized("20M", [1], gap=-0.05, runs=0)])
    assert (
        undecided.verdict != "holds"
        and "without the collapsed models reversed (p " in undecided.reason
    )


def test_a_family_counts_as_without_the_collapsed_models_too():
    """CLM is below MLM on both families, but for one size whose MLM collapsed on SC."""
    scores = []
    for family, dataset in (("SC", "sst2"), ("TC", "uner_en")):
        for size in ("10M", "20M"):
            quarter, mlm = sized(size, [1], gap=-0.02, runs=0)
            key = ModelKey(size, clm_steps=150, mlm_steps=450, mask_ratio=0.4)
            quarter = dataclasses.replace(quarter, model_key=key, model=format_model_name(key))
            mlm = dataclasses.replace(
                mlm,
                model_key=dataclasses.replace(key, clm_steps=0, mlm_steps=600),
                model=f"mlm {size}",
            )
            if (family, size) == ("SC", "10M"):
                mlm = dataclasses.replace(
                    mlm, mean=0.5, seed_scores=dict.fromkeys(range(5), 0.5), collapsed_at_rate=5
                )
            scores += [
                dataclasses.replace(score, family=family, dataset=dataset)
                for score in (quarter, mlm)
            ]
    found = verdict_on("4a", scores)
    verdicts = {
        comparison.family: (comparison.verdict, comparison.p_adjusted)
        for comparison in found.families
    }
    assert verdicts["SC"] == ("not resolved", 1.0) and verdicts["TC"][0] == "reversed"
    assert found.verdict != "holds" and "without the collapsed models reversed" in found.reason


def test_what_is_not_complete_is_said():
    half = []
    for score in mini(5).scores:
        if score.model_key.clm_steps == 40:
            kept = {seed: score.seed_scores[seed] for seed in (0, 1)}
            score = dataclasses.replace(score, seed_scores=kept)
        half.append(score)
    found = by_claim(Evidence(half))
    assert "Not complete: " not in found["4a"].reason
    assert (
        "Not complete: 1 of 1 pairs of models lack fine-tuning seeds (2 of 5)."
        in found["1a"].reason
    )
    found = verdict_on("1a", sized("10M", (1, 2, 3))[:-1])  # no CLM of the third seed
    assert found.comparisons[0].pretraining_runs == 2
    assert (
        "1 model is left out because the other side lacks the same pretraining seed."
        in found.reason
    )


def ratios(family, means, collapsed_at=None, clm_steps=0):
    """MLM models of these means by mask ratio, one of which has collapsed."""
    random = np.random.default_rng(3)
    scores = []
    for ratio, mean in means.items():
        key = ModelKey("10M", clm_steps=clm_steps, mlm_steps=600 - clm_steps, mask_ratio=ratio)
        bad = ratio == collapsed_at
        by_seed = {
            seed: (0.1 if bad else mean) + 0.001 * random.standard_normal() for seed in range(5)
        }
        mean = float(np.mean(list(by_seed.values())))
        scores.append(
            Score(
                format_model_name(key),
                key,
                family,
                "toy",
                mean,
                0.001,
                by_seed,
                collapsed_at_rate=5 * bad,
            )
        )
    return scores


def test_a_collapsed_ratio_decides_no_claim_on_ratios():
    """Scores fall with the ratio; a low one collapsed, without it the trend differs."""
    falling = {ratio: 0.8 - 0.05 * ratio for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)}
    assert verdict_on("6b", ratios("IR", falling)).verdict == "reversed"
    found = verdict_on("6b", ratios("IR", falling, 0.1))
    assert found.verdict == "not resolved" and "without the collapsed models" in found.reason
    # Beaten by its collapse only
    best = verdict_on("6a", [*ratios("SC", falling), *ratios("IR", falling, 0.1)])
    assert best.verdict == "not resolved" and "without the collapsed models" in best.reason
    apart = {ratio: 0.8 + 0.01 * index for index, ratio in enumerate((0.2, 0.3, 0.4, 0.5))}
    near = {ratio: 0.8 + 0.002 * index for index, ratio in enumerate((0.2, 0.3, 0.4, 0.5))}
    after_clm = ratios("SC", apart, clm_steps=300)
    assert verdict_on("6c", [*ratios("SC", near), *after_clm]).verdict == "reversed"
    assert verdict_on("6c", [*ratios("SC", near, 0.2), *after_clm]).verdict == "not resolved"
