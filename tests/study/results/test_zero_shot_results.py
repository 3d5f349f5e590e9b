"""Zero-shot evaluations as scores of models and evidence for claims."""

import json
import math

import numpy as np
import pytest
from zero_shot_directories import QUERIES, write_evaluation, write_study

from megaenc.study.claims.verdicts import judge
from megaenc.study.manifest.model_key import parse_model_name
from megaenc.study.manifest.scope import StudyScope
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.zero_shot import METRIC, RECALL, read_zero_shot

MODELS = {"tiny-mlm40-300": 0.4, "tiny-clm-300": 0.3, "tiny-clm-75-mlm40-300": 0.401}
KEYS = {name: parse_model_name(name) for name in MODELS}


def read(directory, **scope):
    """Return the results below `directory`/embed of the manifest's models in `scope`."""
    return read_zero_shot(directory / "embed", StudyScope(**scope))


def test_scores_are_those_of_the_files(tmp_path):
    scores = np.linspace(0, 1, QUERIES)
    write_evaluation(
        tmp_path / "embed" / "own" / "pretrained.json", {"pretrained": {"sci": scores}}
    )
    write_evaluation(tmp_path / "embed" / "own" / "seed-1.json", {"seed-1": {"sci": scores**2}})
    results = read(tmp_path)
    query_scores = results.pretrained["own", "sci", METRIC]
    assert np.array_equal(query_scores.values, scores) and query_scores.mean == pytest.approx(0.5)
    assert query_scores.interval[0] < 0.5 < query_scores.interval[1]
    assert results.trained["own", "sci", METRIC][1].mean == pytest.approx(np.mean(scores**2))
    assert results.trained["own", "sci", RECALL][1].mean == pytest.approx(
        np.mean(np.minimum(1, 2 * scores**2))
    )
    assert (results.seeds, results.datasets, results.models, results.model_keys) == (
        (1,),
        ["sci"],
        ["own"],
        {},
    )


def test_only_what_the_manifest_plans_counts(tmp_path):
    write_study(tmp_path, MODELS | {"other": 0.5}, seeds=4)
    planned = {"model_keys": KEYS, "retrieval_sets": ("demo_ir",), "contrastive_seeds": (0, 1, 2)}
    results = read(tmp_path, **planned)
    assert (
        set(results.models) == set(MODELS)
        and results.datasets == ["demo_ir"]
        and results.seeds == (0, 1, 2)
    )
    assert results.describe_missing() == ""
    (tmp_path / "embed" / "tiny-clm-300" / "seed-2.json").write_text("{")
    results = read(tmp_path, **planned)
    assert (
        results.describe_missing()
        == "Zero-shot scores are missing, of models (scores so far): tiny-clm-300 (3 of 4)."
    )
    assert {score.model for score in results.build_evidence().scores} == set(MODELS) - {
        "tiny-clm-300"
    }
    assert read(tmp_path, model_keys=KEYS) is None and read(tmp_path / "none") is None


@pytest.mark.parametrize("scores", [[], ["half"], [0.5], [0.5, math.nan]])
def test_an_odd_file_counts_as_missing(tmp_path, scores):
    file = tmp_path / "embed" / "own" / "pretrained.json"
    write_evaluation(file, {"pretrained": {"sci": np.array([0.25, 0.5])}})
    values = json.loads(file.read_text())
    values["queries"]["sci"] = ["q1", "q2"]
    file.write_text(json.dumps(values))
    assert read(tmp_path).models == ["own"]
    values["scores"]["pretrained"]["sci"][METRIC] = scores
    file.write_text(json.dumps(values))
    assert read(tmp_path) is None
    file.write_text("[]")
    assert read(tmp_path) is None


def test_evidence_is_after_training_if_any_model_is_trained_else_as_pretrained(tmp_path):
    write_study(tmp_path, MODELS, seeds=3)
    evidence = read(
        tmp_path, model_keys=KEYS, retrieval_sets=("sci", "demo_ir"), contrastive_seeds=(0, 1, 2)
    ).build_evidence()
    score = evidence.find(KEYS["tiny-clm-300"], "sci")
    assert (
        score.family == "ZS"
        and set(score.seed_scores) == {0, 1, 2}
        and score.mean == pytest.approx(0.4, abs=0.05)
    )
    half = 1.96 * np.std(list(score.seed_scores.values()), ddof=1) / math.sqrt(3)
    assert score.half_width == pytest.approx(half) and score.stack_examples([0, 1, 2]).shape == (
        3,
        QUERIES,
    )
    before = read(tmp_path, model_keys=KEYS, retrieval_sets=("sci", "demo_ir")).build_evidence()
    score = before.find(KEYS["tiny-clm-300"], "sci")
    assert (
        set(score.seed_scores) == {0}
        and score.half_width is None
        and score.mean == pytest.approx(0.3, abs=0.05)
    )


def test_queries_are_paired_only_if_all_models_have_the_same(tmp_path):
    write_study(tmp_path, MODELS, seeds=2)
    file = tmp_path / "embed" / "tiny-clm-300" / "seed-1.json"
    values = json.loads(file.read_text())
    values["queries"]["sci"][0] = "another"
    file.write_text(json.dumps(values))
    evidence = read(tmp_path).build_evidence()
    assert evidence.find("tiny-clm-300", "sci") is None  # known by its key
    scores = {score.dataset: score for score in evidence.scores if score.model == "tiny-mlm40-300"}
    assert (
        scores["sci"].stack_examples([0, 1]) is None
        and scores["demo_ir"].stack_examples([0, 1]) is not None
    )


def verdicts(directory, **options):
    """Return the verdicts on the evidence of `directory` by number and part."""
    zero_shot = read(directory, **options).build_evidence()
    return {
        f"{verdict.claim}{verdict.part}": verdict
        for verdict in judge(Evidence([]), zero_shot=zero_shot)
    }


def test_claims_compare_objectives_and_nothing_else(tmp_path):
    write_study(tmp_path, MODELS, seeds=3)
    found = verdicts(tmp_path)
    without = [f"{verdict.claim}{verdict.part}" for verdict in judge(Evidence([]))]
    assert list(found) == sorted([*without, "1f", "4c", "5c"])
    assert {name for name, verdict in found.items() if verdict.comparisons} == {"1f", "4c"}
    mlm = found["1f"]
    quarter = found["4c"]
    assert mlm.verdict == "holds" and [comparison.family for comparison in mlm.comparisons] == [
        "ZS"
    ]
    assert mlm.overall.difference == pytest.approx(10, abs=1.5) and mlm.overall.test.seed_count == 3
    assert (
        mlm.comparisons[0].dataset == "average of sci, demo_ir"
        and quarter.verdict == "not resolved"
    )
    reasons = "Needs models of continued pretraining from a CLM and from an MLM model"
    assert found["5c"].verdict == "no data" and found["5c"].reason.startswith(reasons)


def test_one_evaluation_as_pretrained_has_an_interval_over_queries_and_no_p(tmp_path):
    write_study(tmp_path, MODELS, seeds=0)
    verdict = verdicts(tmp_path)["1f"]
    assert verdict.verdict == "not resolved" and math.isnan(verdict.overall.p)
    assert verdict.overall.low < verdict.overall.difference < verdict.overall.high
