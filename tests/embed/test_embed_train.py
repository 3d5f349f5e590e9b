"""`megaenc embed train`: loss and gradients next to sentence-transformers', masks, resuming, two processes, and the export."""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from megaenc.backend.device import cpu_has_bf16
from megaenc.console import silence_libraries
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_template
from megaenc.embed.command import eval_main
from megaenc.embed.config import ContrastiveConfig
from megaenc.embed.contrastive import ContrastiveData, divide_texts
from megaenc.embed.embedder import Embedder, EmbeddingConfig, read_embedding_config
from megaenc.embed.pairs import TrainingPair, load_pairs
from megaenc.embed.train import (
    ContrastiveTrainer,
    StateFolder,
    compute_batch_edges,
    count_steps,
    iterate_contrastive_batches,
)
from megaenc.embed.train_command import train_main
from megaenc.errors import InputError

silence_libraries()

WORDS = [*"abcdefgh", "walked", "slowly", "river", "garden", "summer", "letters", "Lyon", "Paris", "heavy", "flowers"]
FAST = ["--batch-size", 8, "--epochs", 3, "--learning-rate", "3e-3", "--precision", "fp32"]


def write_pairs(path: Path, count: int = 32) -> Path:
    """Pairs of a document, its first words, and another text as a negative; lengths from 5 to 31 words."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        words = [f"{number}", *draw.choices(WORDS, k=draw.randint(4, 30))]
        rows.append(
            {"query": " ".join(words[:4]), "document": " ".join(words), "negatives": [" ".join(draw.choices(WORDS, k=9))]}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def dropping(models, tmp_path_factory) -> Path:
    """The encoder with attention dropout, so that a step depends on random numbers."""
    folder = shutil.copytree(models["encoder"], tmp_path_factory.mktemp("dropping") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    return folder


def call(model, data, output, *flags) -> None:
    train_main([str(word) for word in ("--model", model, "--data", data, "--output", output, *FAST, *flags)])


def read_rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]


def make_trainer(model, pairs, embedding=EmbeddingConfig(), **options) -> ContrastiveTrainer:  # noqa: B008
    embedder = Embedder(str(model), embedding, device=torch.device("cpu"), dtype=torch.float32)
    config = ContrastiveConfig(**{"precision": "fp32", "warmup": 0.0, **options})
    prefixes = (embedding.query_prefix, embedding.document_prefix)
    data = ContrastiveData.build(pairs, embedder.tokenize, prefixes=prefixes, negatives=config.negatives)
    return ContrastiveTrainer(embedder, data, config)


def gradients(trainer: ContrastiveTrainer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in trainer.embedder.backbone.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"negatives": 0}, lambda losses, model: losses.MultipleNegativesRankingLoss(model)),
        ({"negatives": 1}, lambda losses, model: losses.MultipleNegativesRankingLoss(model)),
        ({"negatives": 1, "temperature": 0.2}, lambda losses, model: losses.MultipleNegativesRankingLoss(model, scale=5.0)),
        ({"negatives": 0, "symmetric": True}, lambda losses, model: losses.MultipleNegativesSymmetricRankingLoss(model)),
        (
            {"negatives": 1, "matryoshka_dims": (8, 16)},
            lambda losses, model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 16, 8]),
        ),
    ],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(models, pairs, options, loss):
    from sentence_transformers import SentenceTransformer, losses

    some = load_pairs([str(pairs)]).pairs[:12]
    trainer = make_trainer(models["encoder"], some, **options)
    actual = trainer.backward(trainer.data.build_batch(np.arange(12)))
    reference = SentenceTransformer(str(models["encoder"]), device="cpu").train()
    reference[0].auto_model.get_input_embeddings().padding_idx = None  # pad is eos, which ends each text and is trained
    columns = [[pair.query for pair in some], [pair.document for pair in some]]
    columns += [[pair.negatives[0] for pair in some]] * options["negatives"]
    expected = loss(losses, reference)([reference.preprocess(column) for column in columns], None)
    expected.backward()
    assert actual == pytest.approx(expected.item(), rel=1e-5)
    theirs = {name.rpartition("auto_model.")[2]: weight.grad for name, weight in reference[0].named_parameters()}
    own = dict(trainer.embedder.backbone.model.named_parameters())
    compared = 0
    for name, gradient in theirs.items():
        name = name.removeprefix("model.")
        torch.testing.assert_close(own[name].grad, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
        compared += 1
    assert compared == len(own)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_cached_gradients_are_those_of_one_pass(models, pairs, kind):
    some = load_pairs([str(pairs)]).pairs
    results = []
    for tokens in (100_000, 100, 1):
        trainer = make_trainer(models[kind], some, tokens_per_forward=tokens, symmetric=True, matryoshka_dims=(4,))
        results.append((trainer.backward(trainer.data.build_batch(np.arange(32))), gradients(trainer)))
    (expected_loss, expected), *others = results
    for loss, found in others:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


MASKED = [
    TrainingPair("a", "one", ("two", "nine")),  # `two` is a positive of `b` only, so that it stays a negative here
    TrainingPair("b", "two", ("one",)),
    TrainingPair("a", "three", ("one", "four")),  # `one` is a positive of `a` elsewhere; `four` is one outside of the batch
    TrainingPair("c", "one"),
    TrainingPair("a", "four"),
]


@pytest.mark.parametrize("symmetric", [False, True])
def test_false_negatives_are_masked(models, symmetric):
    trainer = make_trainer(models["encoder"], MASKED, negatives=2, symmetric=symmetric, temperature=0.1)
    batch = trainer.data.build_batch(np.arange(4))
    queries, candidates = ["a", "b", "a", "c"], ["one", "two", "three", "one", "two", "nine", "one", "one", "four"]
    positives = {"a": {"one", "three", "four"}, "b": {"two"}, "c": {"one"}}
    allowed = np.array([[j == i or text not in positives[q] for j, text in enumerate(candidates)] for i, q in enumerate(queries)])
    assert len(batch.masked_rows) == (~allowed).sum() == 14
    assert len(batch.texts) == 8  # a b c, one two three four nine: each is embedded once
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(batch.texts), 6, generator=generator)
    actual = batch.compute_loss(vectors, trainer.config).item()
    unit = normalize(vectors, dim=1)
    names = [trainer.data.texts[at] for at in batch.texts]
    score = {(q, text): float(unit[names.index(q)] @ unit[names.index(text)]) / 0.1 for q in queries for text in candidates}
    rows = []
    for i, query in enumerate(queries):
        denominator = sum(np.exp(score[query, text]) for text, ok in zip(candidates, allowed[i], strict=True) if ok)
        rows.append(np.log(denominator) - score[query, candidates[i]])
    expected = np.mean(rows)
    if symmetric:
        columns = []
        for j in range(4):
            denominator = sum(np.exp(score[queries[i], candidates[j]]) for i in range(4) if allowed[i, j])
            columns.append(np.log(denominator) - score[queries[j], candidates[j]])
        expected = (expected + np.mean(columns)) / 2
    assert actual == pytest.approx(expected, rel=1e-5)


MIRRORED = [
    TrainingPair("one", "two"),
    TrainingPair("two", "one"),
    TrainingPair("three", "four", ("three", "two")),
    TrainingPair("four", "one"),
]


@pytest.mark.parametrize("prefixes", [("", ""), ("Ask: ", "Read: ")])
@pytest.mark.parametrize("tokens", [100_000, 1])
def test_a_text_is_no_negative_of_itself(models, prefixes, tokens):
    embedding = EmbeddingConfig(query_prefix=prefixes[0], document_prefix=prefixes[1])
    trainer = make_trainer(
        models["encoder"], MIRRORED, embedding, negatives=2, symmetric=True, temperature=0.1, tokens_per_forward=tokens
    )
    batch = trainer.data.build_batch(np.arange(4))
    queries, candidates = ["one", "two", "three", "four"], ["two", "one", "four", "one", "three", "two"]
    equal = {(row, column) for row, query in enumerate(queries) for column, text in enumerate(candidates) if query == text}
    answers = {(0, 5), (1, 3), (3, 1)}  # other copies of the pair's document
    assert set(zip(batch.masked_rows.tolist(), batch.masked_columns.tolist(), strict=True)) == equal | answers
    unit = trainer.embedder.embed(trainer.embedder.tokenize([prefixes[0] + text for text in queries]))
    scores = unit @ trainer.embedder.embed(trainer.embedder.tokenize([prefixes[1] + text for text in candidates])).T / 0.1
    for place in equal | answers:
        scores[place] = -torch.inf
    own = torch.arange(4)
    expected = (torch.nn.functional.cross_entropy(scores, own) + torch.nn.functional.cross_entropy(scores[:, :4].T, own)) / 2
    assert trainer.backward(batch) == pytest.approx(expected.item(), rel=1e-5)


def test_no_batch_is_without_a_negative(models):
    assert [compute_batch_edges(pairs, 4) for pairs in (2, 4, 5, 8, 9, 10)] == [
        [0, 2], [0, 4], [0, 5], [0, 4, 8], [0, 4, 9], [0, 4, 8, 10]
    ]  # fmt: skip
    assert compute_batch_edges(3, 2) == [0, 3] and count_steps(ContrastiveConfig(batch_size=4, epochs=2), 9) == 4
    # Shuffled in many ways, both directions of a pair often share a batch of two.
    both = [
        TrainingPair("a", "b"),
        TrainingPair("b", "a"),
        TrainingPair("c", "d"),
        TrainingPair("d", "c"),
        TrainingPair("e", "f"),
    ]
    trainer = make_trainer(models["encoder"], both, batch_size=2, epochs=20)
    batches = list(iterate_contrastive_batches(trainer.data, trainer.config))
    assert len(batches) == trainer.steps == 40 and all(batch.has_negatives for batch in batches)
    assert {len(batch.queries) for batch in batches} == {2, 3, 5}
    resumed = list(iterate_contrastive_batches(trainer.data, trainer.config, 7))
    assert [batch.texts.tolist() for batch in resumed] == [batch.texts.tolist() for batch in batches[7:]]
    for pairs in (both[:2], [TrainingPair("a", text) for text in "bcdef"]):
        with pytest.raises(InputError, match="--data: found no negative, as every document answers every query or is the query"):
            make_trainer(models["encoder"], pairs, batch_size=2)


def test_negatives_of_a_number_and_prefixes(models):
    some = [TrainingPair("q", "d", ("x", "y", "z")), TrainingPair("r", "e")]
    embedding = EmbeddingConfig(query_prefix="Ask: ", document_prefix="Read: ")
    data = make_trainer(models["encoder"], some, embedding, negatives=2).data
    batch = data.build_batch(np.array([1, 0]))
    named = [data.texts[at] for at in batch.texts]
    assert [named[at] for at in batch.queries] == ["Ask: r", "Ask: q"]
    assert [named[at] for at in batch.documents] == ["Read: e", "Read: d", "Read: x", "Read: y"]
    [row] = Embedder(str(models["encoder"]), embedding, device=torch.device("cpu"), dtype=torch.float32).tokenize(["Ask: q"])
    assert np.array_equal(row, data.rows[data.texts.index("Ask: q")])


def test_texts_are_divided_by_tokens():
    lengths = np.array([9, 1, 5, 5, 4, 2, 2])
    parts = divide_texts(lengths, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(7))
    assert [int(lengths[part].sum()) for part in parts] == [10, 9, 9]
    assert [len(part) for part in divide_texts(np.array([3, 2]), 4)] == [1, 1, 0, 0]


def interrupt(monkeypatch, at: int) -> None:
    """Stop the training before its step `at`, as Ctrl-C does."""
    step = ContrastiveTrainer.step

    def stopping(self, number, batch):
        if number == at:
            raise KeyboardInterrupt
        return step(self, number, batch)

    monkeypatch.setattr(ContrastiveTrainer, "step", stopping)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_training_gives_the_same_bits(dropping, pairs, tmp_path, monkeypatch, capfd, precision):
    if precision == "bf16" and not cpu_has_bf16():
        pytest.skip("this processor has no bfloat16")
    flags = ["--precision", precision, "--save-interval", 3, "--tokens-per-forward", 200]
    whole, output = tmp_path / "whole", tmp_path / "resumed"
    call(dropping, pairs, whole, *flags)
    with monkeypatch.context() as context:
        interrupt(context, 9)
        with pytest.raises(SystemExit) as stop:
            call(dropping, pairs, output, *flags)
    assert stop.value.code == 130 and not output.exists()
    assert len(read_rows(tmp_path / "resumed.state")) == 8  # two steps more than the state has
    capfd.readouterr()
    call(dropping, pairs, output, *flags)
    assert "resuming after step 6 of 12" in capfd.readouterr().out
    assert read_rows(output) == read_rows(whole) and [row["step"] for row in read_rows(output)] == list(range(1, 13))
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]
    details = [json.loads((folder / "training.json").read_text()) for folder in (whole, output)]
    assert details[0] | {"seconds": 0} == details[1] | {"seconds": 0} and details[0]["steps"] == 12
    weights = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    is_rounded = all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())
    assert not is_rounded  # the master weights are exported
    call(dropping, pairs, output, *flags)
    assert "finished before, 12 steps" in capfd.readouterr().out


def test_other_settings_than_the_recorded_are_refused(models, pairs, tmp_path, monkeypatch, capfd, refusal):
    output, other = tmp_path / "out", write_pairs(tmp_path / "other.jsonl", 31)
    flags = ["--save-interval", 2, *FAST]
    with monkeypatch.context() as context:
        interrupt(context, 4)
        with pytest.raises(SystemExit):
            call(models["encoder"], pairs, output, *flags)
    capfd.readouterr()
    changes = [
        (["--learning-rate", "1e-4"], "--learning-rate: found 0.0001, but 0.003 in"),
        (["--query-prefix", "q"], "--query-prefix: found 'q', but '' in"),
        (["--data", str(other)], "--data: the content of its pairs"),
        (["--model", str(models["decoder"])], "--model: the content of its weights"),
    ]
    command = ["--model", models["encoder"], "--data", pairs, "--output", output, *flags]
    for change, message in changes:
        assert message in refusal(train_main, [*command, *change])
    call(models["encoder"], pairs, output, *flags)
    for change, message in changes:
        line = refusal(train_main, [*command, *change])
        assert message in line and "training.json" in line
    for place in (tmp_path / "mine", tmp_path / "new.state"):
        place.mkdir()
        (place / "notes").write_text("mine")
    assert "mine: exists already" in refusal(train_main, [*command, "--output", tmp_path / "mine"])
    assert "new.state: no settings.json" in refusal(train_main, [*command, "--output", tmp_path / "new"])


def test_a_damaged_state_is_refused(models, pairs, tmp_path, monkeypatch, capfd, refusal):
    with monkeypatch.context() as context:
        interrupt(context, 4)
        with pytest.raises(SystemExit):
            call(models["encoder"], pairs, tmp_path / "out", "--save-interval", 2)
    capfd.readouterr()
    command = ["--model", models["encoder"], "--data", pairs, "--output", tmp_path / "out", *FAST]
    os.truncate(tmp_path / "out.state/state.pt", 1000)
    line = refusal(train_main, command)
    assert "out.state/state.pt: cannot be read" in line and "to start over" in line


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_nan_ends_the_training(models, pairs, tmp_path, monkeypatch, capfd, what):
    step = ContrastiveTrainer.step

    def failing(self, number, batch):
        loss, norm = step(self, number, batch)
        return (float("nan"), norm) if number == 3 and what == "loss" else (loss, float("inf") if number == 3 else norm)

    monkeypatch.setattr(ContrastiveTrainer, "step", failing)
    with pytest.raises(SystemExit) as stop:
        call(models["encoder"], pairs, tmp_path / "new" / "out")
    assert stop.value.code == 1
    lines = capfd.readouterr().err.splitlines()
    value = "nan in step 3" if what == "loss" else "inf in step 3"
    assert lines == [f"error: the {what} is {value}; choose a smaller --learning-rate or --precision fp32"]
    assert not any((tmp_path / "new").iterdir()) if (tmp_path / "new").exists() else True


def test_a_loss_that_is_nan_changes_no_weight(models, pairs):
    trainer = make_trainer(models["encoder"], load_pairs([str(pairs)]).pairs)
    weight = next(trainer.embedder.backbone.parameters())
    with torch.no_grad():
        weight[:, 0] = torch.nan
    before = weight.clone()
    loss, norm = trainer.step(1, trainer.data.build_batch(np.arange(8)))
    assert np.isnan(loss) and np.isnan(norm) and torch.equal(weight[:, 1:], before[:, 1:])


RELOAD = """
import functools, json, sys
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(1)
results = {}
for folder, size in json.loads(sys.argv[1]):
    model = SentenceTransformer(folder, device="cpu", truncate_dim=size)
    encode = functools.partial(model.encode, json.loads(sys.argv[2]), normalize_embeddings=True)
    results[folder] = [encode(prompt_name=name).tolist() for name in ("query", "document")]
assert not any(name.startswith("megaenc") for name in sys.modules)
print(json.dumps(results))
"""


CASES = {
    "mean": ("encoder", ["--matryoshka-dims", 8, 16, "--query-prefix", "Ask: ", "--document-prefix", "Read: "], 8),
    "cls": ("encoder", ["--pooling", "cls", "--max-length", 20], None),
    "last": ("decoder", ["--pooling", "lasttoken", "--symmetric"], None),
    "causal": ("decoder", ["--attention", "causal"], None),
}
TEXTS = ["Lyon", "who walks to a river with an old dog? " * 4, "yellow flowers"]


@pytest.fixture(scope="module")
def exports(models, pairs, tmp_path_factory) -> Path:
    """The models of CASES, and one that was trained from the first by its own rules."""
    root = tmp_path_factory.mktemp("exports")
    for name, (kind, flags, _) in CASES.items():
        call(models[kind], pairs, root / name, *flags)
    call(root / "mean", pairs, root / "again")
    return root


def check_embeddings(folder: Path, size: int | None, queries, documents) -> None:
    """Raise unless these are the embeddings of TEXTS by the folder's model, cut to `size`."""
    config = dataclasses.replace(read_embedding_config(str(folder)), truncate_dim=size or 0)
    embedder = Embedder(str(folder), config, device=torch.device("cpu"), dtype=torch.float32)
    for prefix, expected in ((config.query_prefix, queries), (config.document_prefix, documents)):
        actual = embedder.embed(embedder.tokenize([prefix + text for text in TEXTS]))
        assert actual.shape == (len(TEXTS), size or 32)
        torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [*CASES, "again"])
def test_exports_are_read_by_sentence_transformers(exports, name):
    from sentence_transformers import SentenceTransformer

    size = CASES[name][2] if name in CASES else None
    model = SentenceTransformer(str(exports / name), device="cpu", truncate_dim=size)
    vectors = [model.encode(TEXTS, prompt_name=role, normalize_embeddings=True) for role in ("query", "document")]
    check_embeddings(exports / name, size, *vectors)
    assert np.array_equal(*vectors) == (name not in ("mean", "again"))  # the others have no prompts
    rows = read_rows(exports / name)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    config = read_embedding_config(str(exports / name))
    assert config.pooling == {"cls": "cls", "last": "lasttoken"}.get(name, "mean")
    assert config.max_length == (20 if name == "cls" else 64)
    embedder = Embedder(str(exports / name), config, device=torch.device("cpu"), dtype=torch.float32)
    assert embedder.backbone.attention == ("causal" if name == "causal" else "bidirectional")
    if name == "mean":
        card = (exports / name / "README.md").read_text()
        assert 'SentenceTransformer("FOLDER", truncate_dim=8)' in card and "| learning rate | `0.003` |" in card


@pytest.mark.slow
def test_exports_are_read_in_a_fresh_process(exports):
    folders = [(str(exports / name), size) for name, (_, _, size) in CASES.items()]
    done = runs.run([sys.executable, "-P", "-c", RELOAD, json.dumps(folders), json.dumps(TEXTS)])
    for (folder, size), vectors in zip(folders, json.loads(done.stdout).values(), strict=True):
        check_embeddings(Path(folder), size, *vectors)


def test_an_export_that_reads_otherwise_is_not_written(models, pairs, tmp_path, monkeypatch, refusal):
    from megaenc.embed import export

    monkeypatch.setattr(export, "_TOLERANCE", -1.0)
    line = refusal(train_main, ["--model", models["encoder"], "--data", pairs, "--output", tmp_path / "out", *FAST])
    assert "--output" in line and "nothing is written" in line and "embeddings differ" in line
    assert [path.name for path in tmp_path.iterdir()] == ["out.state"]


@pytest.mark.multiprocess
def test_two_processes_train_as_one(models, pairs, tmp_path):
    flags = ["--epochs", 5, "--tokens-per-forward", 150, "--symmetric"]
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    rows += [{"query": row["document"], "document": row["query"]} for row in rows[:8]]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call(models["encoder"], pairs, tmp_path / "one", *flags)
    words = ["embed", "train", "--model", models["encoder"], "--data", pairs, "--output", tmp_path / "two", *FAST, *flags]
    runs.script(runs.ROOT / "megaenc/__main__.py", [str(word) for word in words], processes=2)
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert [row["step"] for row in two] == list(range(1, 26)) and one[-1]["loss"] < one[0]["loss"]
    for name in ("loss", "gradient_norm", "learning_rate"):
        np.testing.assert_allclose([row[name] for row in two], [row[name] for row in one], rtol=1e-4, err_msg=name)
    assert json.loads((tmp_path / "two/training.json").read_text())["processes"] == 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_training_is_resumed(dropping, pairs, tmp_path):
    flags = [*FAST, "--epochs", 50, "--save-interval", 20]
    command = [sys.executable, "-P", "-m", "megaenc", "embed", "train", "--model", dropping, "--data", pairs, *flags, "--output"]
    command = [str(word) for word in command]
    runs.run([*command, str(tmp_path / "whole")])
    process = subprocess.Popen([*command, str(tmp_path / "out")], env=runs.surroundings(), stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "out.state/training.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and (not log.exists() or log.read_bytes().count(b"\n") < 50):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()
    (tmp_path / ".out.123-0123abcd.tmp").mkdir()  # as a kill during the export leaves it
    runs.run([*command, str(tmp_path / "out")])
    assert not list(tmp_path.glob(".out.*"))
    digests = [hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() for name in ("whole", "out")]
    assert digests[0] == digests[1] and read_rows(tmp_path / "whole") == read_rows(tmp_path / "out")


def test_truncated_embeddings(models, beir, tmp_path, refusal):
    texts = ["Lyon", "letters from Paris"]
    whole, cut = (
        Embedder(str(models["encoder"]), EmbeddingConfig(truncate_dim=size), device=torch.device("cpu"), dtype=torch.float32)
        for size in (0, 8)
    )
    expected = normalize(whole.embed(whole.tokenize(texts))[:, :8], dim=1)
    torch.testing.assert_close(cut.embed(cut.tokenize(texts)), expected, rtol=0, atol=1e-6)
    flags = ["--model", models["encoder"], "--data", beir(), "--precision", "fp32", "--no-bm25"]
    assert "--truncate-dim: found 33, expected at most 32" in refusal(eval_main, [*flags, "--truncate-dim", 33])
    scores = []
    for size in (0, 2):
        eval_main([str(word) for word in (*flags, "--truncate-dim", size, "--output", tmp_path / "x.json", "--overwrite")])
        results = json.loads((tmp_path / "x.json").read_text())
        assert results["models"]["encoder"]["truncate_dim"] == size
        scores.append(results["rows"][-2]["mean"])
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data {pairs} --output new", "--model: missing"),
        ("--model {model} --output new", "--data: missing"),
        ("--model {model} --data {pairs}", "--output: missing"),
        (
            "--model {model} --data {pairs} --output new --warmup 0 --matryoshka-dims 64",
            "--matryoshka-dims: found 64, expected at most 32",
        ),
        ("--model {model} --data {pairs} --output new --max-length 65", "--max-length: found 65, expected at most the 64 tokens"),
        ("--model {model} --data {pairs} --output new --max-steps 1", "--warmup: found 0.1 and 1 step"),
        (
            "--model {model} --data {pairs} --output new --attention causal --warmup 0 --batch-size 8",
            "--attention causal: transformers' EuroBertModel computes other outputs than the run; expected an attention that",
        ),
        ("--model {model} --data {pairs} --output new --log-interval 0", "--log-interval: found 0, expected at least 1"),
        ("--model {model} --data {pairs} --output new --temperature 0", "--temperature: found 0.0, expected more than 0"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(models, pairs, tmp_path, monkeypatch, refusal, flags, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(train_main, flags.format(model=models["encoder"], pairs=pairs).split())
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_does_the_same_work(models, pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(runs.ROOT / "benchmarks")
    import embed_train as benchmark

    flags = ["--model", models["encoder"], "--pairs", pairs, "--batch-size", 12, "--negatives", 1, "--rounds", 2]
    benchmark.main([str(word) for word in (*flags, "--mini-batch-sizes", 5, "--output", tmp_path / "x.json")])
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["losses"]["megaenc"] == pytest.approx(result["losses"]["sentence-transformers"], rel=1e-4)
    assert all(one < padded for one, padded in zip(result["tokens"], result["padded_tokens"], strict=True))
    assert [len(result["turns"][name]) for name in ("megaenc", "sentence-transformers")] == [2, 2]
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "<|mask|> A <|eos|>"),
        (["--special-tokens", "eod"], "A <|eos|>"),
        (["--special-tokens", "none"], "A"),
    ],
)
def test_the_exported_tokenizer_adds_the_tokens_of_training(flags, expected, models, pairs, tmp_path):
    from transformers import AutoTokenizer

    output = tmp_path / "out"
    train_main([*map(str, ["--model", models["encoder"], "--data", pairs, "--output", output, *FAST, *flags, "--max-steps", 2])])
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("walked slowly", add_special_tokens=False)["input_ids"]
    words = {"<|mask|>": [tokenizer.mask_token_id], "<|eos|>": [tokenizer.eos_token_id], "A": ids}
    assert tokenizer("walked slowly")["input_ids"] == [token for word in expected.split() for token in words[word]]


def test_a_tokenizer_that_adds_nothing_gets_an_eos_and_an_empty_text_an_embedding(models, pairs, tmp_path):
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    plain = shutil.copytree(models["encoder"], tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    set_template(tokenizer, SpecialTokens(), between=()).save_pretrained(plain)
    output = tmp_path / "out"
    train_main([*map(str, ["--model", plain, "--data", pairs, "--output", output, *FAST, "--max-steps", 2])])
    model = SentenceTransformer(str(output))
    assert np.isfinite(model.encode(["", "walked"])).all()
    assert AutoTokenizer.from_pretrained(output)("")["input_ids"] == [tokenizer.eos_token_id]


def test_an_evaluation_adds_the_tokens_that_are_asked_for(models):
    embedder = Embedder(
        str(models["encoder"]), EmbeddingConfig(special_tokens="eod"), device=torch.device("cpu"), dtype=torch.float32
    )
    own = Embedder(str(models["encoder"]), EmbeddingConfig(), device=torch.device("cpu"), dtype=torch.float32)
    [ended], [whole] = embedder.tokenize(["walked slowly"]), own.tokenize(["walked slowly"])
    assert ended.tolist() == whole[1:].tolist()


def test_a_training_begun_by_an_earlier_version_goes_on_with_its_texts(models, pairs, tmp_path, monkeypatch):
    """Its state records no special tokens: they were the tokenizer's own, here none."""
    from transformers import AutoTokenizer

    plain = shutil.copytree(models["encoder"], tmp_path / "plain")
    set_template(AutoTokenizer.from_pretrained(plain), SpecialTokens(), between=()).save_pretrained(plain)
    argv = ["--model", plain, "--data", pairs, "--output", tmp_path / "out", *FAST, "--max-steps", 3, "--save-interval", 1]
    save = StateFolder.save

    def save_and_stop(*given):
        save(*given)
        raise ZeroDivisionError

    monkeypatch.setattr(StateFolder, "save", save_and_stop)
    with pytest.raises(ZeroDivisionError):
        train_main([*map(str, argv)])
    monkeypatch.setattr(StateFolder, "save", save)
    settings = tmp_path / "out.state" / "settings.json"
    recorded = json.loads(settings.read_text())
    del recorded["config"]["special_tokens"]
    settings.write_text(json.dumps(recorded))
    train_main([*map(str, argv)])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("")["input_ids"] == []
