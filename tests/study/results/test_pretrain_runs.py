"""Runs are read back with what they cost, beginnings that they share included."""

import pytest
from run_directories import write_run
from study_directories import settings

from megaenc.errors import InputError
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.results.pretrain_runs import (
    flops_by_model,
    published_model_flops,
    read_runs,
    resolve_model_keys,
)
from megaenc.study.results.published import published


def test_kinds_parents_and_what_each_run_made_itself(runs):
    assert {
        name: runs[name].kind
        for name in ("mini-clm-300", "mini-mlm20-300", "mini-clm-75-mlm40-300")
    } == {
        "mini-clm-300": "CLM",
        "mini-mlm20-300": "MLM",
        "mini-clm-75-mlm40-300": "CLM + MLM",
    }
    continued = runs["mini-clm-dec300-mlm40-330"]
    branch = runs["mini-clm-75-mlm40-300"]
    assert (continued.kind, continued.parent) == ("continued", "mini-clm-300")
    assert (branch.start, branch.parent) == ("branch", "mini-clm-300")


def test_operations_include_what_came_before(runs):
    found = flops_by_model(runs, settings())
    spent = {
        key.steps: found[key]
        for key in (parse_model_name("mini-clm-75-mlm40-300"), parse_model_name("mini-clm-300-50"))
    }
    assert spent == {300: 300e15, 50: 50e15}
    assert found[parse_model_name("mini-clm-dec300-mlm40-450")] == (300 + 150) * 1e15
    assert len(found) == len(settings())
    early = parse_model_name("mini-clm-300-50")  # before the branch it is its parent's
    assert flops_by_model(runs, {"mini-clm-75-mlm40-300-50": early}) == {early: 50e15}
    key = parse_model_name("mini-clm-dec300-mlm40-450")
    spent = flops_by_model(runs, {"mini-clm-dec300-mlm40-450-50": key})
    assert spent == {key: (300 + 50) * 1e15}, "the step of a checkpoint is the run's own"
    # No row says
    assert flops_by_model(runs, {"mini-clm-300-7": parse_model_name("mini-clm-300-7")}) == {}


def test_operations_of_the_study_by_shape():
    clm = published_model_flops(ModelKey("610M", 1000))
    mlm = published_model_flops(parse_model_name("610m-mlm40-1k"))
    tokens = 1000 * 1152 * 2048
    head = 128_256 * 1152
    body = 607.9e6 - head  # looking an embedding up is no matrix product
    for spent, fraction in ((clm, 1.0), (mlm, 0.4)):
        assert (
            1 < spent / (6 * tokens * (body + fraction * head)) < 1.15
        )  # what is left is attention
    assert mlm < clm
    assert published_model_flops(parse_model_name("610m-clm-500-mlm40-1k")) == pytest.approx(
        (clm + mlm) / 2
    )
    assert published_model_flops(ModelKey("mini", 10)) is None
    assert all(published_model_flops(key) for key in published().model_keys())


def test_names_are_the_manifests_first():
    given = {"610m-clm-42k": ModelKey("own", 5)}
    found = resolve_model_keys(["610m-clm-42k", "610m-clm-12k", "something"], given)
    assert found == {"610m-clm-42k": ModelKey("own", 5), "610m-clm-12k": ModelKey("610M", 12_000)}


def test_a_directory_without_runs_is_one_line(tmp_path):
    write_run(tmp_path / "good", made=0)
    (tmp_path / "good/run.json").write_text("{")
    # One that has done nothing spoils nothing
    with pytest.raises(InputError, match="holds no run with a step"):
        read_runs(tmp_path)
    facts = write_run(tmp_path / "run") / "run.json"
    for text, said in (
        ("{", "expected a file written by a run"),
        ('{"identity": 3}', "field `identity`: found 3, expected an object"),
    ):
        facts.write_text(text)
        with pytest.raises(InputError, match=rf"run/run.json: .*{said}"):
            read_runs(tmp_path)
