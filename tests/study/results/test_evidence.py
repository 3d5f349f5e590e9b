"""Trees of results as evidence: published cells to the digit, nothing made up."""

import tomllib
from pathlib import Path

import numpy as np
import published_tree
import pytest
from study_directories import write_result

from megaenc.errors import InputError
from megaenc.finetune.examples import STUDY_FAMILIES
from megaenc.finetune.results.aggregate import STUDY_DATASETS, GridSpec
from megaenc.finetune.results.files import read_result_tree
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.manifest.scope import StudyScope
from megaenc.study.results.evidence import (
    AVERAGE,
    build_evidence,
    describe_missing_scores,
    read_evidence,
)
from megaenc.study.results.published import (
    DATASET_NAMES,
    TABLES,
    parse_model_key,
    published,
    raw,
    read_published_rows,
)

MLM = "610m-mlm40-42k"
CLM = "610m-clm-42k"


def test_every_published_cell_to_the_printed_digit(tmp_path):
    published_tree.write(tmp_path, rates=1)
    evidence = raw(tmp_path)
    assert len(evidence.scores) == 46 * 16
    for row in read_published_rows():
        key = parse_model_key(row)
        dataset = DATASET_NAMES[row["dataset"]]
        score = evidence.find(key, dataset, row["task"])
        printed = (f"{100 * score.mean:.2f}", f"{100 * score.half_width:.2f}")
        if dataset == AVERAGE:  # whose interval depends on the seeds of its sets
            by_seed = np.mean(
                [list(member.seed_scores.values()) for member in score.members], axis=0
            )
            assert score.half_width == pytest.approx(1.96 * np.std(by_seed, ddof=1) / np.sqrt(5))
            assert printed[0] == row["mean"], row
        else:
            assert printed == (row["mean"], row["ci95"]), row


def test_rates_are_chosen_on_validation_and_averages_formed_by_seed(tmp_path):
    published_tree.write(tmp_path, models=[MLM, CLM])
    evidence = raw(tmp_path)
    for score in evidence.scores:
        if score.dataset != AVERAGE:
            assert score.learning_rate == published_tree.chosen_rate(score.model, score.dataset)
            assert set(score.rate_scores) == set(published_tree.RATES)
            assert score.seed_scores == score.rate_scores[score.learning_rate]
            assert score.ended_runs == 15
    average = evidence.find(parse_model_name(CLM), AVERAGE, "SC")
    assert [member.dataset for member in average.members] == [
        "sst2",
        "qqp",
        "mnli_m",
    ] and average.load_examples() == {}
    for seed, value in average.seed_scores.items():
        assert value == pytest.approx(
            np.mean([member.seed_scores[seed] for member in average.members])
        )
    assert average.ended_runs == 45 and average.learning_rate is None


def test_examples_are_those_of_the_chosen_rate_read_when_they_are_asked_for(tmp_path):
    published_tree.write(tmp_path, models=[MLM])
    first = raw(tmp_path).find(parse_model_name(MLM), "squad")
    second = raw(tmp_path).find(parse_model_name(MLM), "squad")
    found = first.load_examples()
    assert sorted(found) == [0, 1, 2, 3, 4] and found is first.load_examples()  # read once
    for seed, of_each in found.items():
        assert of_each.shape == (10,) and of_each.mean(dtype=np.float64) == pytest.approx(
            first.seed_scores[seed], abs=1e-7
        )
    for path in tmp_path.rglob("results.json"):
        path.unlink()
    with pytest.raises(InputError, match=r"results\.json.*expected what a run wrote"):
        second.load_examples()


def test_examples_of_the_studys_nq_are_never_paired(tmp_path):
    """Each run drew other halves of NQ, in contrast to `megaenc finetune`."""
    for model, more in ((MLM, {}), ("mine", {"metrics": {"ndcg@10": 0.5}})):
        for dataset in ("nq", "msmarco"):
            for seed in range(2):
                write_result(
                    tmp_path / model / "IR" / dataset / f"msmarco_pairs_lr2e-05_sd{seed}",
                    0.5,
                    **more,
                )
    found = read_evidence(tmp_path, {})
    for model in (MLM, "mine"):
        for dataset in ("nq", "msmarco"):
            alone = found.find(model, dataset).stack_examples([0, 1]) is None
            assert alone == ((model, dataset) == (MLM, "nq"))
    assert found.find(MLM, "nq").load_examples() == {} and found.find(MLM, "nq").seed_scores == {
        0: 0.5,
        1: 0.5,
    }


def test_only_the_sets_of_the_tables_are_read_of_the_study(tmp_path):
    for place in ("QA/squad", "QA/qed", "SC/other"):
        write_result(tmp_path / MLM / place / "lr2e-05_sd0", 0.5)
    assert raw(tmp_path).datasets() == [("QA", "squad")]
    assert len(read_evidence(tmp_path, {}).datasets()) == 4  # with the average of two QA sets


def test_models_of_a_manifest_and_others(tmp_path):
    for model in ("mine", "another"):
        write_result(tmp_path / model / "SC/toy/lr2e-05_sd0", 0.5)
    key = parse_model_name("tiny-mlm40-40")
    found = read_evidence(tmp_path, {"mine": key})
    assert [(score.model, score.model_key) for score in found.scores] == [
        ("another", None),
        ("mine", key),
    ]
    assert found.model_keys() == [key]
    assert found.scores[0].half_width is None  # a single seed


def test_other_metrics_and_their_examples(tmp_path):
    for seed in range(2):
        made = {
            "metrics": {"exact": 0.5, "f1": 0.9},
            "metrics_i": {"exact": [0.0, 1.0], "counts": [2, 3]},
        }
        write_result(tmp_path / "a" / "mine" / "QA/squad" / f"lr2e-05_sd{seed}", 0.6, **made)
    exact = read_evidence(tmp_path / "a", {}, "exact").scores[0]
    f1 = read_evidence(tmp_path / "a", {}, "f1").scores[0]
    assert exact.mean == 0.5 and list(exact.load_examples()[1]) == [0.0, 1.0]
    assert f1.mean == 0.9 and f1.load_examples() == {}  # not a mean over examples
    write_result(tmp_path / "b" / "mine" / "QA/squad" / "lr2e-05_sd0", 0.6, scores_i=[0.1, 0.2])
    # Not what the score is of
    assert read_evidence(tmp_path / "b", {}).scores[0].load_examples() == {}
    with pytest.raises(
        InputError, match="metric `accuracy`: no result has it, expected score or exact or f1"
    ):
        read_evidence(tmp_path / "a", {}, "accuracy")


def test_runs_that_collapsed_or_failed_are_counted(tmp_path):
    """Collapsed at the chosen rate are those that are in the mean."""
    said = {"baseline": {"score": 0.4, "accuracy": 0.3}, "metrics": {"accuracy": 0.5}}
    for dataset in ("sst2", "qqp"):
        place = tmp_path / "mine/SC" / dataset
        for seed in range(2):
            worthless = "constant prediction" if (dataset, seed) == ("qqp", 1) else None
            write_result(place / f"lr2e-05_sd{seed}", 0.9, collapsed=worthless, **said)
            write_result(place / f"lr5e-05_sd{seed}", 0.5, collapsed="constant prediction", **said)
    (place / "lr1e-04_sd0").mkdir()
    (place / "lr1e-04_sd0" / "failed.json").write_text('{"reason": "the loss is nan"}')
    found = {score.dataset: score for score in read_evidence(tmp_path, {}).scores}
    assert {
        name: (score.collapsed_at_rate, score.collapsed_runs) for name, score in found.items()
    } == {
        "sst2": (0, 2),
        "qqp": (1, 4),
        AVERAGE: (1, 6),
    }
    failed = found["qqp"]
    assert (failed.ended_runs, failed.learning_rate, failed.failed_seeds) == (5, 2e-5, {1e-4: {0}})
    assert set(failed.rate_scores) == {2e-5, 5e-5} and failed.baseline == 0.4
    assert failed.rate_scores_with_failures == {**failed.rate_scores, 1e-4: {0: 0.4}}
    assert read_evidence(tmp_path, {}, "accuracy").scores[0].baseline == 0.3


def test_a_manifest_says_what_should_be_there(tmp_path):
    """Its grid counts, and its models are the base, for any state of the study."""
    for run in ("lr2e-05_sd0", "lr2e-05_sd1", "lr5e-05_sd0", "lr9e-05_sd0", "lr2e-05_sd7"):
        write_result(tmp_path / "mine" / "SC/sst2" / run, 0.5)
    plan = {
        "mine": ModelKey("tiny", 40),
        "other": ModelKey("tiny", 80),
        "third": parse_model_name("tiny-mlm20-80"),
    }
    scope = StudyScope(
        plan, ("tiny",), GridSpec((2e-5, 5e-5), (0, 1)), (("SC", "sst2"), ("", "own"))
    )
    found = build_evidence(read_result_tree(tmp_path), plan.get, scope=scope)
    [score] = found.scores
    assert (
        score.learning_rate,
        score.ended_runs,
        score.planned_runs,
        sorted(score.seed_scores),
    ) == (2e-5, 3, 4, [0, 1])
    assert found.group_by_setup() == {"pfs": [plan["mine"]]} and found.reference_mask_ratio == 0.2
    assert list(read_evidence(tmp_path, plan).group_by_setup()) == ["base"]
    said = describe_missing_scores(found)
    assert "mine (own: no run)" in said and said.endswith("No run yet: other, third.")


def test_a_model_without_a_score_is_named_with_its_reason(tmp_path):
    for seed in range(2):
        write_result(tmp_path / "mine" / "SC/sst2" / f"lr2e-05_sd{seed}", 0.5)
    write_result(tmp_path / "begun" / "SC/sst2" / "lr2e-05_sd0", 0.5)
    (tmp_path / "begun/SC/sst2/lr2e-05_sd1").mkdir()
    (tmp_path / "begun/SC/sst2/lr2e-05_sd1/failed.json").write_text('{"reason": "the loss is nan"}')
    said = describe_missing_scores(read_evidence(tmp_path, {}))
    assert said.endswith("every seed finished: begun (SC SST-2: 2 of 2 runs ended, 1 failed).")


def test_sets_after_several_trainings_are_told_apart(tmp_path):
    for train_on in ("a", "b"):
        for dataset in ("nq", "msmarco"):
            write_result(tmp_path / "mine" / "IR" / dataset / f"{train_on}_lr2e-05_sd0", 0.5)
    names = [dataset for _, dataset in read_evidence(tmp_path, {}).datasets()]
    assert names == [
        "msmarco after a",
        "msmarco after b",
        "nq after a",
        "nq after b",
        "average after a",
        "average after b",
    ]


def test_all_cells_are_there_and_the_package_says_so():
    rows = read_published_rows()
    assert len(rows) == 800 and {row["setup"] for row in rows} == {
        "base",
        "efficiency",
        "pfs",
        "cpt",
    }
    found = published()
    assert len(found.model_keys()) == 46 and len(found.scores) == 46 * 16
    assert all(parse_model_name(score.model) == score.model_key for score in found.scores)
    in_order = [
        (str(family), name)
        for family in STUDY_FAMILIES
        for name in (*STUDY_DATASETS[family], AVERAGE)
    ]
    assert found.datasets() == in_order
    packaged = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["package-data"]
    assert packaged["megaenc.study.results"] == [TABLES]
    assert set(packaged["megaenc.study.report"]) == {"report.html.j2", "page.css"}
