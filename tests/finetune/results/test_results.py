"""What runs write is what is read back; what was published is read too."""

import dataclasses
import json
from pathlib import Path

import fake_runs
import pytest
import trees
from small_data import read_json

from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig, format_learning_rate
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.grid.jobs import parse_model
from megaenc.finetune.job import FinetuneJob, Fingerprints, NamedSource
from megaenc.finetune.results import files as result_files

FINGERPRINTS = Fingerprints(
    "m" * 64, "t" * 64, "p" * 64, {"nq": "n" * 64, "sst2": "s" * 64}, "stamp"
)


def job(
    output, family=TaskFamily.SC, dataset="sst2", train_on="sst2", rate=2e-5, **protocol
) -> FinetuneJob:
    model = NamedSource("toy", "/models/toy")
    sets = (NamedSource(dataset, dataset),)
    return FinetuneJob(
        model,
        family,
        train_on,
        sets,
        rate,
        3,
        str(output),
        FinetuneConfig(**protocol),
        DatasetConfig(),
        FINGERPRINTS,
    )


def write(one: FinetuneJob, dataset="sst2", **fitting) -> Path:
    splits = {split: fake_runs.scores(one, dataset, split) for split in ("validation", "test")}
    found = dataclasses.replace(one.protocol, **fitting)
    result_files.write_result(
        one, result_files.DatasetResult(dataset, splits, 7, found, "0" * 64, {"training": 1.23456})
    )
    return result_files.job_directory(one, dataset)


def test_a_fraction_that_splits_the_data_is_recorded(tmp_path):
    split = dataclasses.replace(job(tmp_path / "a"), data=DatasetConfig(validation_fraction=0.1))
    assert read_json(write(split) / "results.json")["validation_fraction"] == 0.1
    assert "validation_fraction" not in read_json(write(job(tmp_path / "b")) / "results.json")


@pytest.mark.parametrize(
    ("rate", "name"), [(1e-5, "1e-05"), (1.5e-5, "1.5e-05"), (0.1, "1e-01"), (3e-4 / 7, None)]
)
def test_rates_are_named_as_in_published_results(rate, name):
    assert float(format_learning_rate(rate)) == rate and (
        name is None or format_learning_rate(rate) == name
    )


def test_directories_are_those_of_published_results(tmp_path):
    assert result_files.job_directory(job("out"), "sst2") == Path("out/toy/SC/sst2/lr2e-05_sd3")
    retrieval = job("out", TaskFamily.IR, "nq", "msmarco_pairs", 5e-4)
    assert result_files.job_directory(retrieval, "nq") == Path(
        "out/toy/IR/nq/msmarco_pairs_lr5e-04_sd3"
    )


def test_what_is_written_is_read_back_and_holds_no_time(tmp_path):
    one = job(tmp_path)
    directory = write(one)
    [found] = result_files.read_result_tree(tmp_path)
    asked = fake_runs.scores(one, "sst2", "test")
    assert (found.model, found.family, found.dataset, found.train_on) == (
        "toy",
        "SC",
        "sst2",
        "sst2",
    )
    assert (found.learning_rate, found.seed, found.failure) == (2e-5, 3, None)
    assert found.test == result_files.SplitScores(asked.score, asked.metrics, None, asked.baseline)
    assert found.validation.score == fake_runs.scores(one, "sst2", "validation").score
    assert not found.scores_only and found.has_common_examples
    values = read_json(directory / "results.json")
    assert (
        values["test"]["scores_i"]
        and values["test"]["metrics_i"]["accuracy"]
        and "seconds" not in values
    )
    assert values["fingerprints"] == {
        "model": "m" * 64,
        "tokenizer": "t" * 64,
        "train_on": "p" * 64,
        "dataset": "s" * 64,
    }
    assert values["protocol"]["batch_size"] == 32 and values["steps"] == 7
    assert read_json(directory / "timing.json") == {"training": 1.235}


def test_a_result_takes_the_place_of_a_failure(tmp_path):
    one = job(tmp_path)
    result_files.write_failure(one, "the loss is nan in step 3", step=3, protocol=one.protocol)
    assert result_files.read_job_state(one, "sst2") == "failed"
    [found] = result_files.read_result_tree(tmp_path)
    assert found.failure == "the loss is nan in step 3" and found.test is None
    write(one)
    assert result_files.read_job_state(one, "sst2") == "finished" and not list(
        tmp_path.rglob("failed.json")
    )


@pytest.mark.parametrize(("field", "value"), [("batch_size", 16), ("attention", "causal")])
def test_results_of_another_protocol_are_named(tmp_path, field, value):
    assert result_files.read_job_state(job(tmp_path), "sst2") == "missing"
    write(job(tmp_path))
    with pytest.raises(
        InputError, match=rf"results.json: field `protocol.{field}`: found .*, expected '?{value}"
    ):
        result_files.read_job_state(job(tmp_path, **{field: value}), "sst2")


def test_what_fits_may_have_been_anything(tmp_path):
    write(job(tmp_path), max_length=2028, precision="bf16")
    assert result_files.read_job_state(job(tmp_path), "sst2") == "finished"
    assert (
        result_files.read_job_state(job(tmp_path, max_length=2028, precision="bf16"), "sst2")
        == "finished"
    )
    with pytest.raises(
        InputError, match=r"field `protocol.precision`: found 'bf16', expected 'fp32'"
    ):
        result_files.read_job_state(job(tmp_path, precision="fp32"), "sst2")


@pytest.mark.parametrize("name", ["model", "tokenizer", "train_on"])
def test_results_of_other_inputs_are_named(tmp_path, name):
    write(job(tmp_path))
    other = dataclasses.replace(
        job(tmp_path), fingerprints=dataclasses.replace(FINGERPRINTS, **{name: "x" * 64})
    )
    with pytest.raises(InputError, match=rf"field `fingerprints.{name}`"):
        result_files.read_job_state(other, "sst2")


def test_published_results_are_read_but_do_not_go_on(tmp_path):
    trees.published(tmp_path, "610m-mlm40-42k", "IR/nq", 5e-4, 2, 0.75, 0.875, "msmarco_pairs_")
    trees.published(tmp_path, "toy", "SC/sst2", 2e-5, 3, 0.5, 0.625)
    retrieval, classified = result_files.read_result_tree(tmp_path)
    assert (retrieval.dataset, retrieval.train_on, retrieval.learning_rate, retrieval.seed) == (
        "nq",
        "msmarco_pairs",
        5e-4,
        2,
    )
    assert (retrieval.validation.score, retrieval.test.score, retrieval.test.collapsed) == (
        0.75,
        0.875,
        None,
    )
    assert (classified.train_on, classified.test.score) == ("sst2", 0.625)
    assert retrieval.scores_only and classified.scores_only
    # Its halves of NQ were drawn without a seed
    assert classified.has_common_examples and not retrieval.has_common_examples
    with pytest.raises(InputError, match=r"field `protocol`: missing"):
        result_files.read_job_state(job(tmp_path), "sst2")


@pytest.mark.parametrize(
    ("place", "test", "why"),
    [
        ("QA/squad_v2", 5945 / 11873, "never answers"),
        ("SC/mnli_m", 3479 / 9815, "constant prediction"),
        ("QA/squad", [0, 0.0, 0] * 200, "every example scores the same"),
        ("SC/toy", [1.0] * 600, None),  # solved
        ("SC/toy", [0.0] * 599 + [1.0], None),
        ("QA/squad_v2", 0.5089, None),
    ],
)
def test_published_runs_that_collapsed_are_seen(tmp_path, place, test, why):
    trees.published(tmp_path, "toy", place, 2e-5, 3, 0.5, test)
    assert result_files.read_result_tree(tmp_path)[0].test.collapsed == why


@pytest.mark.parametrize("lists", [[], [[]], [[1], [2, 3]], [[], [1.5e-5]]])
def test_lists_are_left_out_without_parsing_them(lists):
    others = {"a": ["]", '"scores_i": ['], "scores_i": [1, 2], "b": {}}
    values = {"metrics_i": {f"m{at}": row for at, row in enumerate(lists)}} | others
    for indent in (None, 4):
        read = json.loads(result_files.drop_score_lists(json.dumps(values, indent=indent).encode()))
        assert read == others | {"metrics_i": None, "scores_i": None}


def test_what_is_no_result_is_passed_by(tmp_path):
    with pytest.raises(InputError, match="holds no results"):
        result_files.read_result_tree(tmp_path)
    write(job(tmp_path))
    for other in (
        ".tokenised/SC/sst2/lr1e-05_sd0",
        "toy/SC/sst2/notes",
        "toy/other/sst2/lr1e-05_sd0",
        "toy/SC/sst2/lr1e-04_sd0",
    ):
        (tmp_path / other).mkdir(parents=True)
    assert len(result_files.read_result_tree(tmp_path)) == 1


def test_what_a_killed_run_left_is_swept_away(tmp_path):
    one = job(tmp_path)
    directory = write(one)
    (directory / ".results.json.12-0123abcd.tmp").touch()
    result_files.remove_partial_files(one)
    assert sorted(path.name for path in directory.iterdir()) == ["results.json", "timing.json"]


@pytest.mark.parametrize(("given", "name"), [
    ("toy", "toy"), ("sub/../toy/", "toy"), ("a=toy", "a"), ("=toy", "toy"), ("sub/..", "models"),
    ("..=toy", None), ("a b\n=toy", None), ("\x1b[2J=toy", None), ("a\u202eb=toy", None),
    ("a/../b=toy", None),
])  # fmt: skip
def test_models_are_named_by_their_directory_or_otherwise(tmp_path, monkeypatch, given, name):
    """Their results are below the output, whatever the name."""
    (tmp_path / "models" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    fake_runs.make_model(Path("toy"))
    fake_runs.make_model(Path())
    if name is not None:
        assert parse_model(given).name == name
        return
    with pytest.raises(
        InputError, match="found the name" if "/" not in given else "no such directory"
    ):
        parse_model(given)
