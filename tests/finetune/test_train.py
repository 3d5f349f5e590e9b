"""Whole runs of all four families: what the commands write, alone and in a grid, to the last byte."""

import copy
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from text_helpers import text_encoder
from transformers import EuroBertConfig, EuroBertForMaskedLM

from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.command import run_main
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.grid.jobs import RunProgress, build_jobs
from megaenc.finetune.tasks.retrieval import RetrievalTask
from megaenc.finetune.tasks.token_classification import TokenClassification
from megaenc.finetune.train import _TokenizedSplitLoader, count_training_steps, hash_weights, iterate_batches, train_and_evaluate

FEW = ["--max-steps", "6", "--batch-size", "8", "--precision", "fp32", "--epochs", "9"]
CUT = [("train", 40), ("validation", 12), ("test", 12)]
WORDS = ["stan", "plark", "mill", "dove", "brack"]


@pytest.fixture(scope="module")
def model(small_corpus, tmp_path_factory):
    """A EuroBERT of two layers with random weights, reading 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "little"
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    tokens = dict(pad_token_id=0, bos_token_id=None, eos_token_id=0, mask_token_id=1)
    config = EuroBertConfig(vocab_size=400, max_position_embeddings=64, **shape, **tokens)
    EuroBertForMaskedLM(config).save_pretrained(folder)
    load_tokenizer(small_corpus.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set of each family, by its family's name: which of two words is there."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("valid", 12), ("test", 12)):
        chosen = rng.integers(0, len(WORDS), (count, 6))
        texts = [" ".join(WORDS[at] for at in row) for row in chosen]
        write(
            root / "sc" / f"{split}.jsonl",
            ({"id": at, "text": text, "label": int(text.startswith(("stan", "mill")))} for at, text in enumerate(texts)),
        )
        tags = [["B-X" if word == "dove" else "O" for word in text.split()] for text in texts]
        words = enumerate(zip(texts, tags, strict=True))
        write(root / "tc" / f"{split}.jsonl", ({"id": at, "tokens": text.split(), "tags": tag} for at, (text, tag) in words))
        write_squad(root / "qa" / f"{split}.json", split, texts)
        for name, word in (("ir", 0), ("other", 1)):
            write_queries(root / name, {"valid": "dev"}.get(split, split), texts, word)
    return root


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_squad(path, split, texts):
    path.parent.mkdir(exist_ok=True)
    asked = [{"question": "which?", "answers": [{"text": text.split()[0], "answer_start": 0}]} for text in texts]
    paragraphs = [
        {"context": text, "qas": [qa | {"id": f"{split}{at}"}]} for at, (text, qa) in enumerate(zip(texts, asked, strict=True))
    ]
    path.write_text(json.dumps({"data": [{"title": "x", "paragraphs": paragraphs}]}))


def write_queries(folder, split, texts, word):
    """Each asks for the text that has its one word at that place."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "a") as corpus, open(folder / "queries.jsonl", "a") as queries:
        for at, text in enumerate(texts):
            corpus.write(json.dumps({"_id": f"d{split}{at}", "title": "", "text": text}) + "\n")
            queries.write(json.dumps({"_id": f"q{split}{at}", "text": text.split()[word]}) + "\n")
    rows = "".join(f"q{split}{at}\td{split}{at}\t1\n" for at in range(len(texts)))
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


def results(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("results.json"))}


def alone(model, dataset, output, *flags):
    """A run in this process, which has done other things before; those of the grid are forks."""
    run_main([str(flag) for flag in ("--model", model, "--dataset", dataset, "--output", output, *FEW, *flags)])


@pytest.fixture(scope="module")
def grid(model, data, tmp_path_factory):
    """The output of a grid of all families, two seeds, and a rate that no model stands beside a good one."""
    output = tmp_path_factory.mktemp("grid")
    flags = [
        "--model",
        model,
        "--datasets",
        *(data / name for name in ("sc", "tc", "qa", "ir", "other")),
        "--train-on",
        data / "ir",
    ]
    flags += ["--learning-rates", "1e-3", "1e30", "--seeds", 2, "--jobs", 2, "--output", output, *FEW]
    command = [sys.executable, "-m", "megaenc", "finetune", "grid", *map(str, flags)]
    return output, runs.run(command, timeout=400, expect=1).stdout


@pytest.mark.parametrize("family", ["sc", "tc", "qa", "ir"])
def test_a_run_alone_gives_the_bytes_that_it_gives_in_a_grid(family, model, data, grid, tmp_path):
    alone(model, data / family, tmp_path, "--learning-rate", "1e-3", "--seed", 1)
    [(name, content)] = results(tmp_path).items()
    assert results(grid[0])[name] == content


def test_the_studys_file_trains_every_family_on_this_machine(model, data, tmp_path):
    paper = Path(__file__).parents[2] / "configs" / "finetune" / "paper.yaml"
    flags = ["--model", model, "--config", paper, "--datasets", *(data / name for name in ("sc", "tc", "qa", "ir"))]
    flags += ["--train-on", data / "ir", "--learning-rates", "1e-3", "--seeds", 1, "--max-steps", 2, "--output", tmp_path]
    runs.run([sys.executable, "-m", "megaenc", "finetune", "grid", *map(str, flags)], timeout=400)
    found = [json.loads(content) for content in results(tmp_path).values()]
    assert len(found) == 4 and {result["protocol"]["precision"] for result in found} == {"paper-bf16"}


def test_sets_of_the_same_pairs_are_evaluated_after_one_training(grid):
    output, said = grid
    assert "20 results from 16 trainings" in said
    places = [output / "little" / "IR" / name / "ir_lr1e-03_sd0" / "results.json" for name in ("ir", "other")]
    one, other = (json.loads(place.read_text()) for place in places)
    assert one["trained"] == other["trained"] and one["train_on"] == other["train_on"] == "ir"
    assert one["test"]["scores_i"] != other["test"]["scores_i"]


def test_one_bit_of_one_weight_makes_another_digest():
    model = torch.nn.Linear(3, 2)
    before = hash_weights(model)
    assert hash_weights(copy.deepcopy(model)) == before
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    assert hash_weights(model) != before


def test_seeds_matter(grid):
    found = [
        json.loads((grid[0] / "little" / "IR" / "ir" / f"ir_lr1e-03_sd{seed}" / "results.json").read_text()) for seed in (0, 1)
    ]
    assert found[0]["test"]["scores_i"] != found[1]["test"]["scores_i"]


def test_what_a_result_holds(grid):
    found = json.loads((grid[0] / "little" / "SC" / "sc" / "lr1e-03_sd0" / "results.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", found["trained"])
    assert (found["steps"], found["protocol"]["max_length"], found["protocol"]["precision"]) == (6, 63, "fp32")
    for split in ("validation", "test"):
        assert len(found[split]["scores_i"]) == 12 and found[split]["score"] == np.mean(found[split]["scores_i"])
        assert found[split]["metrics"].keys() == {"accuracy"} and 0.5 <= found[split]["baseline"]["accuracy"] < 1


def test_a_rate_that_makes_the_loss_nan_is_a_failed_run_and_others_go_on(grid, model, data, capfd):
    output, said = grid
    assert len(results(output)) == 10 and "failed.json says why" in said
    failures = [json.loads(path.read_text()) for path in output.rglob("failed.json")]
    assert len(failures) == 10 and {failure["learning_rate"] for failure in failures} == {1e30}
    assert all(re.fullmatch(r"the (loss|gradient norm) is (nan|inf) in step \d", failure["reason"]) for failure in failures)
    with pytest.raises(SystemExit) as stop:
        alone(model, data / "sc", output, "--learning-rate", "1e30")
    assert stop.value.code == 1
    assert "failed before: the " in (found := capfd.readouterr().out) and "choose a smaller --learning-rate" in found


def test_a_last_update_that_ruins_the_model_is_a_failed_run(model, data, tmp_path):
    with pytest.raises(SystemExit):  # the first of the two updates has rate 0
        alone(model, data / "sc", tmp_path, "--learning-rate", "1e40", "--max-steps", 2, "--warmup", 0.5)
    [failure] = [json.loads(path.read_text()) for path in tmp_path.rglob("failed.json")]
    assert (failure["reason"], failure["step"]) == ("a prediction of the model is NaN or inf after step 2, the last", 2)
    assert not results(tmp_path)


def test_the_parts_that_a_batch_is_read_in_change_nothing_but_rounding(model, data, grid, tmp_path):
    alone(model, data / "ir", tmp_path, "--learning-rate", "1e-3", "--tokens-per-forward", 50)
    name = "little/IR/ir/ir_lr1e-03_sd0/results.json"
    here, there = (json.loads(results(folder)[name])["test"] for folder in (tmp_path, grid[0]))
    np.testing.assert_allclose(here["scores_i"], there["scores_i"], atol=1e-6)


def test_texts_longer_than_the_model_reads_are_counted_once(model, data, tmp_path, capfd):
    for seed in (0, 1):
        alone(model, data / "sc", tmp_path, "--max-length", 5, "--seed", seed)
        said = capfd.readouterr().out.splitlines()
        lines = [line for line in said if "are cut" in line]
        assert lines == (
            [] if seed else [f"sc, {split}: {count} texts are longer than 5 tokens and are cut" for split, count in CUT]
        )
        assert said[-1].startswith("in brackets: majority class; ")


def test_texts_are_told_as_they_are_read(model, data, tmp_path):
    """Silence is taken for a hang: tokenising and evaluation say how far they are, not training alone."""
    told: list[RunProgress] = []
    few = FinetuneConfig(max_steps=2, batch_size=8, tokens_per_forward=50, precision="fp32")
    [job] = build_jobs([str(model)], [str(data / "sc")], [1e-3], [0], str(tmp_path), few, DatasetConfig(), find_dataset)
    train_and_evaluate(job, told.append)
    for stage, texts in (("validation", 12), ("test", 12)):
        done = [at.done for at in told if at.stage == stage and at.total == texts]
        assert done == sorted(done) and done[-1] == 12 and len(done) > 2
        assert {at.fields["data set"] for at in told if at.stage == stage} == {"sc"}
    tokenised = [at.total for at in told if at.stage == "loading" and at.total]
    assert tokenised == [40, 12, 12]


def test_what_is_wrong_with_a_test_split_costs_no_training(model, data, tmp_path):
    shutil.copytree(data / "sc", tmp_path / "sc")
    with open(tmp_path / "sc" / "test.jsonl", "a") as file:
        file.write(json.dumps({"id": 12, "text": "mill", "label": 7}) + "\n")
    told: list[RunProgress] = []
    with pytest.raises(InputError, match=r"test.jsonl:13: label 7: outside the label set, expected one of 0, 1"):
        train_and_evaluate(planned(model, tmp_path / "sc", tmp_path / "out"), told.append)
    assert {at.stage for at in told} == {"loading"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-length", "65"], "--max-length: found 65, expected at most the 64 tokens that the model reads"),
        (["--epochs", "inf"], "--epochs: found inf, expected a finite number"),
        (["--weight-decay", "nan"], "--weight-decay: found nan, expected a finite number"),
        (["--learning-rate", "0"], "--learning-rate: found 0.0, expected more than 0"),
        (["--batch-size", "0"], "--batch-size: found 0, expected at least 1"),
        (["--seed", "-1"], "--seed: found -1, expected at least 0"),
        (["--dataset", "sst3"], "did you mean `sst2`?"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
    ],
)
def test_wrong_input_is_one_line(flags, words, model, data, tmp_path, refusal):
    given = ["--model", model, "--dataset", data / "sc", "--precision", "fp32", "--output", tmp_path / "out"]
    assert words in refusal(run_main, [*given, *flags])
    assert not results(tmp_path)


def planned(model, dataset, output):
    few = FinetuneConfig(max_steps=6, batch_size=8, precision="fp32")
    [job] = build_jobs([str(model)], [str(dataset)], [1e-3], [0], str(output), few, DatasetConfig(), find_dataset)
    return job


@pytest.mark.parametrize("changed", ["sc/test.jsonl", "little/tokenizer.json"])
def test_what_has_changed_since_it_was_planned_is_refused(changed, model, data, tmp_path):
    shutil.copytree(data / "sc", tmp_path / "sc")
    shutil.copytree(model, tmp_path / "little")
    job = planned(tmp_path / "little", tmp_path / "sc", tmp_path / "out")
    with open(tmp_path / changed, "a") as file:
        file.write("\n")
    with pytest.raises(InputError, match=r"(sc|the tokenizer in .*little): has changed since the run was planned; run the same"):
        train_and_evaluate(job)
    assert not (tmp_path / "out").exists()


def reader(model, cache):
    return _TokenizedSplitLoader(cache, text_encoder(load_tokenizer(str(model)), 60), lambda progress: None)


def test_tokens_are_those_of_the_examples_that_are_scored(model, data, tmp_path):
    """As of a set of the Hub without a revision, which changes under one fingerprint."""
    dataset = find_dataset(str(data / "tc"))
    task, read = TokenClassification(dataset, FinetuneConfig()), reader(model, tmp_path)
    before, examples = read.load_evaluation(task, dataset, "test")
    fewer = dataclasses.replace(dataset, read_split=lambda split: dataset.read_split(split)[:5])
    tokens, five = read.load_evaluation(task, fewer, "test")
    assert (len(before), len(examples), len(tokens), len(five)) == (12, 12, 5, 5)
    assert np.array_equal(tokens.tokens, before.tokens[: tokens.starts[-1]])


def test_training_examples_are_read_once_for_all_runs(model, data, tmp_path):
    dataset = find_dataset(str(data / "ir"))
    task, calls = RetrievalTask(dataset, FinetuneConfig()), []
    counted = dataclasses.replace(dataset, read_split=lambda split: calls.append(split) or dataset.read_split(split))
    first, second = (reader(model, tmp_path).load_training(task, counted) for _ in range(2))
    assert calls == ["train"] and np.array_equal(first["documents"].tokens, second["documents"].tokens)


def test_both_splits_share_the_tokens_of_their_documents(model, data, tmp_path):
    dataset = find_dataset(str(data / "ir"))
    task, read = RetrievalTask(dataset, FinetuneConfig()), reader(model, tmp_path)
    for split in ("validation", "test"):
        tokens, examples = read.load_evaluation(task, dataset, split)
        whole = task.encode(examples, read.encoder)
        assert list(tokens) == list(whole)
        assert all(np.array_equal(tokens[name].tokens, whole[name].tokens) for name in whole)
    assert len(list(tmp_path.iterdir())) == 3  # the queries of either, and documents


def test_each_pass_reads_every_example_once_in_an_order_of_its_own():
    made = list(iterate_batches(3, 10, 4, 7))
    assert [len(rows) for rows in made] == [4, 4, 2, 4, 4, 2, 4]
    first, second = (np.concatenate(made[at : at + 3]) for at in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10)) and (first != second).any()
    assert (np.concatenate(list(iterate_batches(4, 10, 4, 3))) != first).any()


@pytest.mark.parametrize(("examples", "epochs", "steps"), [(67_349, 1, 1000), (956, 1, 30), (33, 1, 2), (33, 0.5, 1), (33, 3, 6)])
def test_steps_are_an_epoch_or_a_thousand(examples, epochs, steps):
    assert count_training_steps(FinetuneConfig(epochs=epochs), examples) == steps


def test_deterministic_kernels_do_not_fill_new_tensors(monkeypatch):
    """Torch fills every uninitialized tensor in this mode unless told otherwise."""
    from megaenc.finetune.train import make_deterministic

    fill, memory_efficient = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cuda.mem_efficient_sdp_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        make_deterministic(torch.get_num_threads())
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cuda.enable_mem_efficient_sdp(memory_efficient)
