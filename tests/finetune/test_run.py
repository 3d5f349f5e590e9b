"""Whole runs of all four families: what the commands write, alone and in a grid, to the last byte."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from transformers import EuroBertConfig, EuroBertForMaskedLM

from megaenc.data.tokenizer import load_tokenizer
from megaenc.finetune.command import run_main
from megaenc.finetune.options import Protocol
from megaenc.finetune.run import batches, number_of_steps

FEW = ["--max-steps", "6", "--batch-size", "8", "--precision", "fp32", "--learning-rate", "1e-3", "--epochs", "9"]
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
        write(root / "sc" / f"{split}.jsonl", ({"id": at, "text": text, "label": at % 2} for at, text in enumerate(texts)))
        tags = [["B-X" if word == "dove" else "O" for word in text.split()] for text in texts]
        words = enumerate(zip(texts, tags, strict=True))
        write(root / "tc" / f"{split}.jsonl", ({"id": at, "tokens": text.split(), "tags": tag} for at, (text, tag) in words))
        write_squad(root / "qa" / f"{split}.json", split, texts)
        for name in ("ir", "other"):
            write_queries(root / name, {"valid": "dev"}.get(split, split), texts)
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


def write_queries(folder, split, texts):
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "a") as corpus, open(folder / "queries.jsonl", "a") as queries:
        for at, text in enumerate(texts):
            corpus.write(json.dumps({"_id": f"d{split}{at}", "title": "", "text": text}) + "\n")
            queries.write(json.dumps({"_id": f"q{split}{at}", "text": text.split()[0]}) + "\n")
    rows = "".join(f"q{split}{at}\td{split}{at}\t1\n" for at in range(len(texts)))
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


def commands(*arguments, **how):
    return runs.run([sys.executable, "-m", "megaenc", "finetune", *map(str, arguments)], timeout=300, **how)


def results(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("results.json"))}


@pytest.fixture(scope="module")
def grid(model, data, tmp_path_factory):
    """The results of a grid of all families, two rates and two seeds, two runs at a time."""
    output = tmp_path_factory.mktemp("grid")
    sets = [data / name for name in ("sc", "tc", "qa", "ir")]
    rates = ["--learning-rates", "1e-3", "1e-4"]
    commands(
        "grid", "--model", model, "--datasets", *sets, *FEW[:6], *FEW[8:], *rates, "--seeds", 2, "--jobs", 2, "--output", output
    )
    return output


@pytest.mark.parametrize("family", ["sc", "tc", "qa", "ir"])
def test_a_run_alone_gives_the_bytes_that_it_gives_in_a_grid(family, model, data, grid, tmp_path):
    commands("run", "--model", model, "--dataset", data / family, *FEW, "--seed", 1, "--output", tmp_path)
    [(name, alone)] = results(tmp_path).items()
    assert results(grid)[name] == alone
    other = name.replace("sd1", "sd0")
    assert results(grid)[other] != alone.replace(b'"seed": 1', b'"seed": 0'), "seeds change nothing"


def test_what_a_result_holds(grid):
    found = json.loads((grid / "little" / "SC" / "sc" / "lr1e-03_sd0" / "results.json").read_text())
    assert (found["steps"], found["protocol"]["max_length"], found["protocol"]["precision"]) == (6, 63, "fp32")
    for split in ("validation", "test"):
        assert len(found[split]["scores_i"]) == 12 and found[split]["score"] == np.mean(found[split]["scores_i"])
        assert found[split]["metrics"].keys() == {"accuracy"} and found[split]["baseline"]["accuracy"] == 0.5
    assert len(results(grid)) == 16


def test_the_parts_that_a_batch_is_read_in_change_nothing_but_rounding(model, data, grid, tmp_path):
    commands("run", "--model", model, "--dataset", data / "ir", *FEW, "--tokens-per-forward", 50, "--output", tmp_path)
    name = "little/IR/ir/ir_lr1e-03_sd0/results.json"
    here, there = (json.loads(results(folder)[name])["test"] for folder in (tmp_path, grid))
    np.testing.assert_allclose(here["scores_i"], there["scores_i"], atol=1e-6)


def test_sets_with_the_same_pairs_are_evaluated_after_one_training(model, data, grid, tmp_path):
    sets = [data / "ir", "--train-on", data / "ir"]
    both = [data / "ir", data / "other"]
    commands(
        "grid",
        "--model",
        model,
        "--datasets",
        *both,
        *sets[1:],
        *FEW[:6],
        *FEW[8:],
        "--learning-rates",
        "1e-3",
        "--seeds",
        1,
        "--output",
        tmp_path,
    )
    names = {"little/IR/ir/ir_lr1e-03_sd0/results.json", "little/IR/other/ir_lr1e-03_sd0/results.json"}
    assert results(tmp_path).keys() == names
    scores = [json.loads(content)["test"] for content in results(tmp_path).values()]
    assert scores[0] == scores[1] == json.loads(results(grid)["little/IR/ir/ir_lr1e-03_sd0/results.json"])["test"]


def test_a_rate_that_makes_the_loss_nan_is_a_failed_run_and_others_go_on(model, data, tmp_path):
    rates = ["--learning-rates", "1e-3", "1e30"]
    done = commands(
        "grid",
        "--model",
        model,
        "--datasets",
        data / "sc",
        *FEW[:6],
        *FEW[8:],
        *rates,
        "--seeds",
        1,
        "--output",
        tmp_path,
        expect=1,
    )
    assert len(results(tmp_path)) == 1
    failed = json.loads((tmp_path / "little" / "SC" / "sc" / "lr1e+30_sd0" / "failed.json").read_text())
    assert "is nan in step" in failed["reason"] or "is inf in step" in failed["reason"]
    assert "failed.json says why" in done.stdout
    again = commands(
        "run",
        "--model",
        model,
        "--dataset",
        data / "sc",
        *FEW[:6],
        *FEW[8:],
        "--learning-rate",
        "1e30",
        "--output",
        tmp_path,
        expect=1,
    )
    assert "failed before" in again.stdout and "choose a smaller --learning-rate" in again.stdout


def test_texts_longer_than_the_model_reads_are_counted_once(model, data, tmp_path, capfd):
    for seed in (0, 1):
        command = [
            "run",
            "--model",
            model,
            "--dataset",
            data / "sc",
            *FEW,
            "--max-length",
            10,
            "--seed",
            seed,
            "--output",
            tmp_path,
        ]
        lines = [line for line in commands(*command).stdout.splitlines() if "are cut" in line]
        assert len(lines) == (0 if seed else 3), lines
    assert lines == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-length", "65"], "--max-length: found 65, expected at most the 64 tokens that the model reads"),
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


def test_each_pass_reads_every_example_once_in_an_order_of_its_own():
    made = list(batches(3, 10, 4, 7))
    assert [len(rows) for rows in made] == [4, 4, 2, 4, 4, 2, 4]
    first, second = (np.concatenate(made[at : at + 3]) for at in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10)) and (first != second).any()
    assert (np.concatenate(list(batches(4, 10, 4, 3))) != first).any()


@pytest.mark.parametrize(("examples", "epochs", "steps"), [(67_349, 1, 1000), (956, 1, 30), (33, 1, 2), (33, 0.5, 1), (33, 3, 6)])
def test_steps_are_an_epoch_or_a_thousand(examples, epochs, steps):
    assert number_of_steps(Protocol(epochs=epochs), examples) == steps
