"""Whole runs of all four families: identical bytes, alone and in a grid."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from small_data import read_json
from text_helpers import text_encoder

from megaenc import flags
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.command import run_main
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.grid.command import GridConfig, plan_grid
from megaenc.finetune.grid.jobs import build_jobs
from megaenc.finetune.job import RunProgress
from megaenc.finetune.optimizer import count_training_steps
from megaenc.finetune.results.summary import summary_main
from megaenc.finetune.tasks.retrieval import RetrievalTask
from megaenc.finetune.tasks.token_classification import TokenClassification
from megaenc.finetune.train import SplitLoader, iterate_batches, train_and_evaluate

FEW = ["--max-steps", "6", "--batch-size", "8", "--epochs", "9"]
FAMILIES = ["sc", "tc", "qa", "ir"]


def results(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(Path(directory).rglob("results.json"))
    }


def alone(model, dataset, output, *flags):
    """Run in this process, after other runs; those of the grid are forks."""
    given = (
        "--model",
        model,
        "--dataset",
        dataset,
        "--output",
        output,
        "--precision",
        "fp32",
        *FEW,
        *flags,
    )
    run_main([str(flag) for flag in given])


@pytest.fixture(scope="module")
def grid(model, data, tmp_path_factory):
    """Return the output of a grid of all families: two seeds, one unstable rate."""
    output = tmp_path_factory.mktemp("grid")
    sets = [data / name for name in (*FAMILIES, "other")]
    flags = [
        "--model",
        model,
        "--datasets",
        *sets,
        "--train-on",
        data / "ir",
        "--output",
        output,
        "--precision",
        "fp32",
        *FEW,
    ]
    flags += ["--learning-rates", "1e-3", "1e30", "--seeds", 2, "--jobs", 2]
    command = [sys.executable, "-m", "megaenc", "finetune", "grid", *map(str, flags)]
    return output, runs.run(command, timeout=400, expect=1).stdout


def result_of(grid, name):
    return read_json(grid[0] / "little" / name / "results.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_alone_gives_the_bytes_that_it_gives_in_a_grid(family, model, data, grid, tmp_path):
    alone(model, data / family, tmp_path, "--learning-rate", "1e-3", "--seed", 1)
    [(name, content)] = results(tmp_path).items()
    assert results(grid[0])[name] == content


def test_the_studys_file_trains_every_family_on_this_machine(model, data, tmp_path):
    paper = Path(__file__).parents[2] / "configs" / "finetune" / "paper.yaml"
    argv = [
        "--model",
        model,
        "--config",
        paper,
        "--datasets",
        *(data / name for name in FAMILIES),
        "--train-on",
        data / "ir",
    ]
    argv += ["--learning-rates", "1e-3", "--seeds", 1, "--max-steps", 2, "--output", tmp_path]
    settings = flags.parse_with_config(
        GridConfig, [str(flag) for flag in argv], prog="grid", description="a grid"
    )
    for job in plan_grid(settings, find_dataset).pending:
        assert train_and_evaluate(job)
    found = [json.loads(content) for content in results(tmp_path).values()]
    assert len(found) == 4 and {result["protocol"]["precision"] for result in found} == {
        "paper-bf16"
    }


def test_what_a_grid_writes(grid):
    """Sets of the same pairs are evaluated after one training, and seeds matter."""
    assert "20 results from 16 trainings" in grid[1]
    one = result_of(grid, "IR/ir/ir_lr1e-03_sd0")
    seed = result_of(grid, "IR/ir/ir_lr1e-03_sd1")
    other = result_of(grid, "IR/other/ir_lr1e-03_sd0")
    assert (
        one["trained"] == other["trained"] != seed["trained"]
        and one["train_on"] == other["train_on"] == "ir"
    )
    assert one["test"]["scores_i"] not in (other["test"]["scores_i"], seed["test"]["scores_i"])
    found = result_of(grid, "SC/sc/lr1e-03_sd0")
    assert re.fullmatch("[0-9a-f]{64}", found["trained"])
    assert (found["steps"], found["protocol"]["max_length"], found["protocol"]["precision"]) == (
        6,
        63,
        "fp32",
    )
    assert [len(found[split]["scores_i"]) for split in ("validation", "test")] == [12, 12]


def test_a_rate_that_makes_the_loss_nan_is_a_failed_run_and_others_go_on(grid, model, data, capfd):
    output, said = grid
    assert len(results(output)) == 10 and "failed.json says why" in said
    failures = [read_json(path) for path in output.rglob("failed.json")]
    assert len(failures) == 10 and {failure["learning_rate"] for failure in failures} == {1e30}
    assert all(
        re.fullmatch(r"the (loss|gradient norm) is (nan|inf) in step \d", failure["reason"])
        for failure in failures
    )
    with pytest.raises(SystemExit) as stop:
        alone(model, data / "sc", output, "--learning-rate", "1e30")
    assert stop.value.code == 1
    found = capfd.readouterr().out
    assert "failed before: the " in found and "choose a smaller --learning-rate" in found


def test_texts_longer_than_the_model_reads_are_counted_once(model, data, tmp_path, capfd):
    expected = [
        f"sc, {split}: {count} texts are longer than 5 tokens and are cut"
        for split, count in (("train", 40), ("validation", 12), ("test", 12))
    ]
    for seed in (0, 1):
        alone(model, data / "sc", tmp_path, "--max-length", 5, "--seed", seed)
        said = capfd.readouterr().out.splitlines()
        assert [line for line in said if "are cut" in line] == ([] if seed else expected)
        assert said[-1].startswith("in brackets: majority class; ")


def test_a_threshold_is_printed_as_a_probability_and_is_no_score(model, data, tmp_path, capfd):
    alone(model, data / "multi_label", tmp_path, "--threshold", "auto")
    printed = re.findall(
        r"labels are predicted from probability (0\.\d{4})\n", capfd.readouterr().out
    )
    assert len(printed) == 1 and printed != ["0.5000"]
    summary_main([str(tmp_path)])
    said = capfd.readouterr().out
    assert "macro_f1" in said and "threshold" not in said


def planned(model, dataset, output, **protocol):
    few = FinetuneConfig(max_steps=2, batch_size=8, precision="fp32", **protocol)
    [job] = build_jobs(
        [str(model)], [str(dataset)], [1e-3], [0], str(output), few, DatasetConfig(), find_dataset
    )
    return job


def test_texts_are_told_as_they_are_read(model, data, tmp_path):
    """Silence counts as a hang: tokenization and evaluation report progress too."""
    told: list[RunProgress] = []
    train_and_evaluate(planned(model, data / "sc", tmp_path, tokens_per_forward=50), told.append)
    for stage in ("validation", "test"):
        done = [at.done for at in told if at.stage == stage and at.total == 12]
        assert done == sorted(done) and done[-1] == 12 and len(done) > 2
        assert {at.fields["data set"] for at in told if at.stage == stage} == {"sc"}
    assert [at.total for at in told if at.stage == "loading" and at.total] == [40, 12, 12]


def test_what_is_wrong_with_a_test_split_costs_no_training(model, data, tmp_path):
    shutil.copytree(data / "sc", tmp_path / "sc")
    with open(tmp_path / "sc" / "test.jsonl", "a") as file:
        file.write('{"text": "mill", "label": 7}\n')
    told: list[RunProgress] = []
    with pytest.raises(
        InputError,
        match=r"test.jsonl:13: label 7: outside the label set, expected one of bad, good",
    ):
        train_and_evaluate(planned(model, tmp_path / "sc", tmp_path / "out"), told.append)
    assert {at.stage for at in told} == {"loading"}


@pytest.mark.parametrize("changed", ["sc/test.jsonl", "little/tokenizer.json"])
def test_what_has_changed_since_it_was_planned_is_refused(changed, model, data, tmp_path):
    shutil.copytree(data / "sc", tmp_path / "sc")
    shutil.copytree(model, tmp_path / "little")
    job = planned(tmp_path / "little", tmp_path / "sc", tmp_path / "out")
    with open(tmp_path / changed, "a") as file:
        file.write("\n")
    with pytest.raises(
        InputError,
        match=(
            r"(sc|the tokenizer in .*little): has changed since the run was planned; run the same"
        ),
    ):
        train_and_evaluate(job)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def read(model, tmp_path):
    return SplitLoader(
        tmp_path, text_encoder(load_tokenizer(str(model)), 60), lambda progress: None
    )


def test_tokens_are_those_of_the_examples_that_are_scored(read, data):
    """As of a set of the Hub without a revision, which changes under one fingerprint."""
    dataset = find_dataset(str(data / "tc"))
    task = TokenClassification(dataset, FinetuneConfig())
    before, examples = read.load_evaluation(task, "test")
    task.dataset = dataclasses.replace(
        dataset, read_split=lambda split: dataset.read_split(split)[:5]
    )
    tokens, five = read.load_evaluation(task, "test")
    assert (len(before), len(examples), len(tokens), len(five)) == (12, 12, 5, 5)
    assert np.array_equal(tokens.tokens, before.tokens[: tokens.starts[-1]])


def test_training_examples_are_read_once_and_splits_share_the_tokens_of_their_documents(
    read, data, tmp_path
):
    dataset = find_dataset(str(data / "ir"))
    calls = []
    counted = dataclasses.replace(
        dataset, read_split=lambda split: calls.append(split) or dataset.read_split(split)
    )
    task = RetrievalTask(counted, FinetuneConfig())
    first = read.load_training(task)
    second = read.load_training(task)
    assert calls == ["train"] and np.array_equal(
        first["documents"].tokens, second["documents"].tokens
    )
    for split in ("validation", "test"):
        tokens, examples = read.load_evaluation(task, split)
        whole = task.encode(examples, read.encoder)
        assert list(tokens) == list(whole)
        assert all(np.array_equal(tokens[name].tokens, whole[name].tokens) for name in whole)
    # Training, the queries of either split, and documents
    assert len(list(tmp_path.iterdir())) == 4


def test_each_pass_reads_every_example_once_in_an_order_of_its_own():
    made = list(iterate_batches(3, 10, 4, 7))
    assert [len(rows) for rows in made] == [4, 4, 2, 4, 4, 2, 4]
    first = np.concatenate(made[0:3])
    second = np.concatenate(made[3:6])
    assert sorted(first) == sorted(second) == list(range(10)) and (first != second).any()
    assert (np.concatenate(list(iterate_batches(4, 10, 4, 3))) != first).any()


@pytest.mark.parametrize(
    ("epochs", "most", "in_epoch", "steps"), [(1, 1000, 2105, 1000), (0.5, 9, 1, 1), (3, 0, 2, 6)]
)
def test_steps_are_the_epochs_or_a_maximum(epochs, most, in_epoch, steps):
    assert count_training_steps(epochs, most, in_epoch) == steps
