"""`megaenc embed train`: loss, gradients, masks, resuming, ranks and export.

Losses and gradients are compared with those of sentence-transformers.
"""

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from embed.conftest import load_embedder
from safetensors.torch import load_file
from small_data import read_json, write_file
from torch.nn.functional import cross_entropy

from megaenc.backend.device import cpu_has_bf16
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_template
from megaenc.embed.config import ContrastiveConfig
from megaenc.embed.contrastive import ContrastiveData, divide_texts
from megaenc.embed.embedder import EmbeddingConfig, read_embedding_config
from megaenc.embed.pairs import TrainingPair, load_pairs
from megaenc.embed.train import (
    ContrastiveTrainer,
    compute_batch_boundaries,
    iterate_contrastive_batches,
)
from megaenc.embed.train_command import train_main
from megaenc.errors import InputError

WORDS = [
    *"abcdefgh",
    "walked",
    "slowly",
    "river",
    "garden",
    "summer",
    "letters",
    "Lyon",
    "Paris",
    "heavy",
    "flowers",
]
FAST = ["--batch-size", 8, "--epochs", 3, "--learning-rate", "3e-3", "--precision", "fp32"]


def write_pairs(path: Path, count: int = 32) -> Path:
    """Write pairs of a document and its first words, with another text as a negative.

    Documents have 5 to 31 words.
    """
    draw = random.Random(0)
    rows = []
    for number in range(count):
        words = [f"{number}", *draw.choices(WORDS, k=draw.randint(4, 30))]
        texts = {"query": words[:4], "document": words, "negative": draw.choices(WORDS, k=9)}
        rows.append({name: " ".join(text) for name, text in texts.items()})
    write_file(path, rows)
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def dropping(models, tmp_path_factory) -> Path:
    """Copy the encoder with attention dropout, so that steps depend on random numbers."""
    directory = shutil.copytree(models["encoder"], tmp_path_factory.mktemp("dropping") / "model")
    config = read_json(directory / "config.json")
    write_file(directory / "config.json", config | {"attention_dropout": 0.2})
    return directory


def call(model, data, output, *flags) -> None:
    train_main(
        [
            str(word)
            for word in ("--model", model, "--data", data, "--output", output, *FAST, *flags)
        ]
    )


def read_rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]


def make_trainer(model, pairs, embedding=EmbeddingConfig(), **options) -> ContrastiveTrainer:  # noqa: B008
    embedder = load_embedder(model, embedding)
    config = ContrastiveConfig(**{"precision": "fp32", "warmup": 0.0, **options})
    prefixes = (embedding.query_prefix, embedding.document_prefix)
    data = ContrastiveData.build(
        pairs, embedder.tokenize, prefixes=prefixes, negatives=config.negatives
    )
    return ContrastiveTrainer(embedder, data, config)


def gradients(trainer: ContrastiveTrainer) -> list[torch.Tensor]:
    return [
        parameter.grad
        for parameter in trainer.embedder.backbone.parameters()
        if parameter.grad is not None
    ]


@pytest.mark.parametrize(
    ("options", "kind", "settings"),
    [
        ({"negatives": 0}, "MultipleNegativesRankingLoss", {}),
        ({"negatives": 1, "temperature": 0.2}, "MultipleNegativesRankingLoss", {"scale": 5.0}),
        ({"negatives": 0, "symmetric": True}, "MultipleNegativesSymmetricRankingLoss", {}),
        ({"negatives": 1, "matryoshka_dims": (8, 16)}, "MultipleNegativesRankingLoss", {}),
    ],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(
    models, pairs, options, kind, settings
):
    from sentence_transformers import SentenceTransformer, losses

    some = load_pairs([str(pairs)]).pairs[:12]
    trainer = make_trainer(models["encoder"], some, **options)
    actual = trainer.backward(trainer.data.build_batch(np.arange(12)))
    reference = SentenceTransformer(str(models["encoder"]), device="cpu").train()
    backbone = reference[0].auto_model
    backbone.get_input_embeddings().padding_idx = (
        None  # pad is eos, which ends each text and is trained
    )
    loss = getattr(losses, kind)(reference, **settings)
    if "matryoshka_dims" in options:
        loss = losses.MatryoshkaLoss(reference, loss, [32, 16, 8])
    columns = [[pair.query for pair in some], [pair.document for pair in some]]
    columns += [[pair.negatives[0] for pair in some]] * options["negatives"]
    expected = loss([reference.preprocess(column) for column in columns], None)
    expected.backward()
    assert actual == pytest.approx(expected.item(), rel=1e-5)
    own = dict(trainer.embedder.backbone.model.named_parameters())
    theirs = dict(backbone.named_parameters())
    assert own.keys() == {name.removeprefix("model.") for name in theirs}
    for name, weight in theirs.items():
        close = {"rtol": 1e-3, "atol": 1e-4 * float(weight.grad.abs().max())}
        torch.testing.assert_close(own[name.removeprefix("model.")].grad, weight.grad, **close)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_cached_gradients_are_those_of_one_pass(models, pairs, kind):
    some = load_pairs([str(pairs)]).pairs
    results = []
    for tokens in (100_000, 100, 1):
        trainer = make_trainer(
            models[kind], some, tokens_per_forward=tokens, symmetric=True, matryoshka_dims=(4,)
        )
        results.append(
            (trainer.backward(trainer.data.build_batch(np.arange(32))), gradients(trainer))
        )
    expected_loss, expected = results[0]
    for loss, found in results[1:]:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


SHARED = [
    # `two` is a positive of `b` only, so it stays a negative here; `ten` is one more than are used.
    TrainingPair("a", "one", ("two", "nine", "ten")),
    TrainingPair("b", "two", ("one",)),
    TrainingPair(
        "a", "three", ("one", "four")
    ),  # `one` is a positive of `a` elsewhere; `four` is one outside of the batch
    TrainingPair("c", "one"),
    TrainingPair("a", "four"),
]
MIRRORED = [
    TrainingPair("one", "two"),
    TrainingPair("two", "one"),
    TrainingPair("three", "four", ("three", "two")),
    TrainingPair("four", "one"),
]


@pytest.mark.parametrize(
    ("pairs", "prefixes", "options"),
    [
        (SHARED, ("", ""), {}),
        (SHARED, ("", ""), {"symmetric": True}),
        (MIRRORED, ("Ask: ", "Read: "), {"symmetric": True, "tokens_per_forward": 1}),
        (MIRRORED, ("", ""), {"symmetric": True}),
    ],
)
def test_answers_and_the_query_itself_are_no_negatives(models, pairs, prefixes, options):
    """The reference is a loop over all scores of the batch that skips them."""
    embedding = EmbeddingConfig(query_prefix=prefixes[0], document_prefix=prefixes[1])
    trainer = make_trainer(
        models["encoder"], pairs, embedding, negatives=2, temperature=0.1, **options
    )
    batch = trainer.data.build_batch(np.arange(4))
    queries = [pair.query for pair in pairs[:4]]
    candidates = [pair.document for pair in pairs[:4]]
    candidates += [text for pair in pairs[:4] for text in pair.negatives[:2]]
    vectors = trainer.embedder.embed(
        trainer.embedder.tokenize(
            [prefixes[0] + text for text in queries] + [prefixes[1] + text for text in candidates]
        )
    )
    scores = vectors[:4] @ vectors[4:].T / 0.1
    for row, query in enumerate(queries):
        answers = {query} | {pair.document for pair in pairs if pair.query == query}
        for column, text in enumerate(candidates):
            if text in answers and column != row:
                scores[row, column] = -torch.inf
    assert len(batch.masked_rows) == int(scores.isinf().sum()) > 3
    own = torch.arange(4)
    expected = cross_entropy(scores, own)
    if "symmetric" in options:
        expected = (expected + cross_entropy(scores[:, :4].T, own)) / 2
    assert trainer.backward(batch) == pytest.approx(expected.item(), rel=1e-5)


def test_no_batch_is_without_a_negative(models):
    for pairs, boundaries in (
        (2, [0, 2]),
        (5, [0, 5]),
        (8, [0, 4, 8]),
        (9, [0, 4, 9]),
        (10, [0, 4, 8, 10]),
    ):
        assert compute_batch_boundaries(pairs, 4) == boundaries
    # Shuffled in many ways, both directions of a pair often share a batch of two.
    both = [TrainingPair(*texts) for texts in ("ab", "ba", "cd", "dc", "ef")]
    trainer = make_trainer(models["encoder"], both, batch_size=2, epochs=20)
    batches = list(iterate_contrastive_batches(trainer.data, trainer.config))
    assert len(batches) == trainer.steps == 40 and all(batch.has_negatives for batch in batches)
    assert {len(batch.queries) for batch in batches} == {2, 3, 5}
    resumed = list(iterate_contrastive_batches(trainer.data, trainer.config, 7))
    assert [batch.texts.tolist() for batch in resumed] == [
        batch.texts.tolist() for batch in batches[7:]
    ]
    for pairs in (both[:2], [TrainingPair("a", text) for text in "bcdef"]):
        with pytest.raises(
            InputError,
            match="--data: found no negative, "
            "as every document answers every query or is the query",
        ):
            make_trainer(models["encoder"], pairs, batch_size=2)


def interrupt(monkeypatch, at: int) -> None:
    """Stop the training before step `at`, as Ctrl-C does."""
    step = ContrastiveTrainer.step

    def stopping(self, number, batch):
        if number == at:
            raise KeyboardInterrupt
        return step(self, number, batch)

    monkeypatch.setattr(ContrastiveTrainer, "step", stopping)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_training_gives_the_same_bits(
    dropping, pairs, tmp_path, monkeypatch, capfd, precision
):
    if precision == "bf16" and not cpu_has_bf16():
        pytest.skip("this processor has no bfloat16")
    flags = ["--precision", precision, "--save-interval", 3, "--tokens-per-forward", 200]
    whole = Path("whole")
    output = Path("resumed")
    call(dropping, pairs, whole, *flags)
    with monkeypatch.context() as context:
        interrupt(context, 9)
        with pytest.raises(SystemExit) as stop:
            call(dropping, pairs, output, *flags)
    assert stop.value.code == 130 and not output.exists()
    assert len(read_rows(Path("resumed.state"))) == 8  # two steps more than the state has
    Path(".resumed.123-0123abcd.tmp").mkdir()  # as a kill during the export leaves it
    call(dropping, pairs, output, *flags)
    assert "resuming after step 6 of 12" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]
    assert read_rows(output) == read_rows(whole) and [
        row["step"] for row in read_rows(output)
    ] == list(range(1, 13))
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    details = [
        read_json(directory / "training.json") | {"seconds": 0} for directory in (whole, output)
    ]
    assert details[0] == details[1] and details[0]["steps"] == 12
    weights = load_file(output / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}
    assert any(
        not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights
    )  # the master weights
    call(dropping, pairs, output, *flags)
    assert "finished before, 12 steps" in capfd.readouterr().out


def test_texts_are_divided_by_tokens():
    lengths = np.array([9, 1, 5, 5, 4, 2, 2])
    parts = divide_texts(lengths, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(7))
    assert [int(lengths[part].sum()) for part in parts] == [10, 9, 9]
    assert [len(part) for part in divide_texts(np.array([3, 2]), 4)] == [1, 1, 0, 0]


def test_an_unfinished_training_refuses_other_settings_and_a_damaged_state(
    models, pairs, monkeypatch, capfd, refusal
):
    output = Path("out")
    other = write_pairs(Path("other.jsonl"), 31)
    flags = ["--save-interval", 2, *FAST]
    with monkeypatch.context() as context:
        interrupt(context, 4)
        with pytest.raises(SystemExit):
            call(models["encoder"], pairs, output, *flags)
    capfd.readouterr()
    command = ["--model", models["encoder"], "--data", pairs, "--output", output, *flags]
    for change, message in (
        (["--learning-rate", "1e-4"], "--learning-rate: found 0.0001, but 0.003 in"),
        (["--query-prefix", "q"], "--query-prefix: found 'q', but '' in"),
        (["--data", other], "--data: the content of its pairs"),
        (["--model", models["decoder"]], "--model: the content of its weights"),
    ):
        assert message in refusal(train_main, [*command, *change])
    os.truncate("out.state/state.pt", 1000)
    line = refusal(train_main, command)
    assert "out.state/state.pt: cannot be read" in line and "to start over" in line
    shutil.rmtree("out.state")
    call(models["encoder"], pairs, output, *flags)
    line = refusal(train_main, [*command, "--learning-rate", "1e-4"])
    assert "--learning-rate: found 0.0001, but 0.003 in" in line and "training.json" in line
    Path("new.state").mkdir()
    Path("new.state/notes").write_text("mine")
    assert "new.state: no settings.json" in refusal(train_main, [*command, "--output", "new"])


@pytest.mark.parametrize(
    ("what", "result"), [("loss", (float("nan"), 1.0)), ("gradient norm", (1.0, float("inf")))]
)
def test_a_number_that_is_none_ends_the_training(
    models, pairs, tmp_path, monkeypatch, capfd, what, result
):
    monkeypatch.setattr(ContrastiveTrainer, "step", lambda trainer, number, batch: result)
    with pytest.raises(SystemExit) as stop:
        call(models["encoder"], pairs, "new/out")
    assert stop.value.code == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: the {what} is ") and "in step 1" in line
    assert not list(tmp_path.rglob("out*"))


def test_a_loss_that_is_nan_changes_no_weight(models, pairs):
    trainer = make_trainer(models["encoder"], load_pairs([str(pairs)]).pairs)
    weight = next(trainer.embedder.backbone.parameters())
    weight.data[:, 0] = torch.nan
    before = weight.clone()
    loss, norm = trainer.step(1, trainer.data.build_batch(np.arange(8)))
    assert np.isnan(loss) and np.isnan(norm) and torch.equal(weight[:, 1:], before[:, 1:])


CASES = {
    "mean": (
        "encoder",
        ["--matryoshka-dims", 8, 16, "--query-prefix", "Ask: ", "--document-prefix", "Read: "],
        8,
    ),
    "cls": ("encoder", ["--pooling", "cls", "--max-length", 20], None),
    "last": ("decoder", ["--pooling", "lasttoken", "--symmetric"], None),
    "causal": ("decoder", ["--attention", "causal"], None),
}
TEXTS = ["Lyon", "who walks to a river with an old dog? " * 4, "yellow flowers"]


@pytest.fixture(scope="module")
def exports(models, pairs, tmp_path_factory) -> Path:
    """Train the models of CASES, and one from the first by its own rules."""
    root = tmp_path_factory.mktemp("exports")
    for name, (kind, flags, _) in CASES.items():
        call(models[kind], pairs, root / name, *flags)
    call(root / "mean", pairs, root / "again")
    return root


@pytest.mark.parametrize("name", [*CASES, "again"])
def test_exports_are_read_by_sentence_transformers(exports, name):
    from sentence_transformers import SentenceTransformer

    directory = exports / name
    size = CASES[name][2] if name in CASES else None
    model = SentenceTransformer(str(directory), device="cpu", truncate_dim=size)
    config = dataclasses.replace(read_embedding_config(str(directory)), truncate_dim=size or 0)
    embedder = load_embedder(directory, config)
    for role, prefix in (("query", config.query_prefix), ("document", config.document_prefix)):
        expected = model.encode(
            TEXTS, prompt_name=role, normalize_embeddings=True, convert_to_tensor=True
        )
        actual = embedder.embed(embedder.tokenize([prefix + text for text in TEXTS]))
        assert actual.shape == (len(TEXTS), size or 32)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    prefixes = ("Ask: ", "Read: ") if name in ("mean", "again") else ("", "")
    assert (config.query_prefix, config.document_prefix) == prefixes
    rows = read_rows(directory)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert config.pooling == {"cls": "cls", "last": "lasttoken"}.get(name, "mean")
    assert config.max_length == (20 if name == "cls" else 64)
    assert embedder.backbone.attention == ("causal" if name == "causal" else "bidirectional")
    if name == "mean":
        card = (directory / "README.md").read_text()
        assert (
            'SentenceTransformer("DIRECTORY", truncate_dim=8)' in card
            and "| learning rate | `0.003` |" in card
        )


def test_an_export_that_reads_otherwise_is_not_written(
    models, pairs, tmp_path, monkeypatch, refusal
):
    monkeypatch.setattr("megaenc.embed.export._TOLERANCE", -1.0)
    line = refusal(
        train_main, ["--model", models["encoder"], "--data", pairs, "--output", "out", *FAST]
    )
    assert "nothing is written" in line and "embeddings differ" in line
    assert [path.name for path in tmp_path.iterdir()] == ["out.state"]


@pytest.mark.multiprocess
def test_two_processes_train_as_one(models, pairs, tmp_path):
    flags = ["--tokens-per-forward", 150, "--symmetric"]
    call(models["encoder"], pairs, "one", *flags)
    words = [
        "embed",
        "train",
        "--model",
        models["encoder"],
        "--data",
        pairs,
        "--output",
        tmp_path / "two",
        *FAST,
        *flags,
    ]
    runs.script(runs.ROOT / "megaenc/__main__.py", [str(word) for word in words], processes=2)
    one = read_rows(Path("one"))
    two = read_rows(Path("two"))
    assert len(two) == 12 and one[-1]["loss"] < one[0]["loss"]
    for ours, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)
    assert read_json(Path("two/training.json"))["processes"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--matryoshka-dims", 33, "--warmup", 0],
            "--matryoshka-dims: found 33, expected at most 32",
        ),
        (["--matryoshka-dims", 8, 8], "--matryoshka-dims: found 8, expected each size once"),
        (["--max-length", 65], "--max-length: found 65, expected at most the 64 tokens"),
        (["--max-steps", 1], "--warmup: found 0.1 and 1 step"),
        (
            ["--attention", "causal"],
            "--attention causal: transformers' EuroBertModel computes other outputs than the run",
        ),
        (["--log-interval", 0], "--log-interval: found 0, expected 1 or more"),
        (["--temperature", 0], "--temperature: found 0.0, expected more than 0"),
    ],
)
def test_mistakes_leave_nothing(models, pairs, tmp_path, refusal, flags, message):
    command = ["--model", models["encoder"], "--data", pairs, "--output", "new", *FAST]
    assert message in refusal(train_main, [*command, *flags])
    assert not list(tmp_path.iterdir())


def test_the_benchmark_does_the_same_work(models, pairs, monkeypatch):
    monkeypatch.syspath_prepend(runs.ROOT / "benchmarks")
    import embed_train as benchmark

    flags = [
        "--model",
        models["encoder"],
        "--pairs",
        pairs,
        "--batch-size",
        12,
        "--negatives",
        1,
        "--rounds",
        1,
    ]
    benchmark.main([str(word) for word in (*flags, "--mini-batch-sizes", 5, "--output", "x.json")])
    losses = read_json(Path("x.json"))["losses"]
    assert losses["megaenc"] == pytest.approx(losses["sentence-transformers"], rel=1e-4)


@pytest.fixture
def plain(models) -> Path:
    """Copy the encoder, with a tokenizer that adds no token to a text."""
    from transformers import AutoTokenizer

    directory = shutil.copytree(models["encoder"], Path("plain"))
    set_template(
        AutoTokenizer.from_pretrained(directory), SpecialTokens(), between=()
    ).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("adds", "flags", "before", "after"),
    [
        (True, [], ["<|mask|>"], ["<|eos|>"]),
        (True, ["--special-tokens", "none"], [], []),
        (False, [], [], ["<|eos|>"]),
    ],
)
def test_the_exported_tokenizer_adds_the_tokens_of_training(
    adds, flags, before, after, models, plain, pairs
):
    """A tokenizer that adds nothing gets an EOS: empty texts have an embedding."""
    from sentence_transformers import SentenceTransformer

    output = Path("out")
    call(models["encoder"] if adds else plain, pairs, output, *flags, "--max-steps", 2)
    model = SentenceTransformer(str(output), device="cpu")
    tokenizer = model.tokenizer
    words = tokenizer("walked slowly", add_special_tokens=False)["input_ids"]
    first = tokenizer.convert_tokens_to_ids(before)
    last = tokenizer.convert_tokens_to_ids(after)
    assert tokenizer("walked slowly")["input_ids"] == [*first, *words, *last]
    if after:
        assert np.isfinite(model.encode(["", "walked"])).all()
