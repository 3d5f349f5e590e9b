"""Hard negatives of `megaenc embed mine` next to sentence-transformers' and a plain loop, and its refusals."""

import json
import warnings

import datasets
import numpy as np
import pytest
import torch
from embed.conftest import DOCUMENTS

from megaenc.embed.hard_negatives import MineConfig, mine_main, mine_negatives
from megaenc.embed.pairs import TrainingPair, load_pairs

WORDS = ["river", "garden", "dog", "house", "summer", "letters", "Lyon", "Paris", "book", "flowers", "yellow", "old", "walked"]


@pytest.fixture
def pair_file(tmp_path):
    """24 pairs of 20 queries; three queries have several documents."""
    random = np.random.default_rng(5)
    texts = [" ".join(random.choice(WORDS, 5)) + f" {number}" for number in range(44)]
    queries = [*texts[:20], texts[0], texts[0], texts[7], texts[9]]
    rows = [{"query": query, "document": text} for query, text in zip(queries, texts[20:], strict=True)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mine(model, data, output, *flags):
    arguments = ["--model", model, "--data", data, "--output", output, "--precision", "fp32", *flags]
    mine_main([str(argument) for argument in arguments])
    return load_pairs([str(output)]).pairs


def test_negatives_are_sentence_transformers(models, pair_file, tmp_path, capsys):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    pairs = load_pairs([str(pair_file)]).pairs[:20]  # a query each: there the margin is that of a query's best document
    single = tmp_path / "single.jsonl"
    single.write_text("".join(json.dumps({"anchor": pair.query, "positive": pair.document}) + "\n" for pair in pairs))
    flags = ["--query-prefix", "Ask: ", "--document-prefix", "Read: ", "--margin", "0.99", "--negatives", "6"]
    mined = mine(models["encoder"], single, tmp_path / "new/mined.jsonl", *flags)
    printed = capsys.readouterr().out

    table = datasets.Dataset.from_dict({"a": [pair.query for pair in pairs], "p": [pair.document for pair in pairs]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = mine_hard_negatives(
            table, SentenceTransformer(str(models["encoder"]), device="cpu"), query_prompt="Ask: ", corpus_prompt="Read: ",
            relative_margin=0.01, range_max=19, num_negatives=6, output_format="triplet", verbose=False,
        )  # fmt: skip
    expected: dict[str, list[str]] = {pair.query: [] for pair in pairs}
    for row in reference:
        expected[row["a"]].append(row["negative"])
    assert mined == [TrainingPair(pair.query, pair.document, tuple(expected[pair.query])) for pair in pairs]
    counts = [len(pair.negatives) for pair in mined]
    few = sum(count < 6 for count in counts)
    assert 0 < counts.count(6) < 20 and few > 0
    last = f"{sum(counts)} hard negatives of 20 pairs; {few} pairs have fewer than 6, {counts.count(0)} none"
    assert f"{tmp_path}/new/mined.jsonl: {last}" in printed
    assert "encoder: mean pooling, bidirectional attention, at most 64 tokens, fp32, query prefix 'Ask: '" in printed


def plain_loop(pairs, documents, cosine, settings):
    """The rules word by word: rank what is not the query's own, cut, then compare with the pair's own cosine."""
    results = []
    for pair in pairs:
        own = {other.document for other in pairs if other.query == pair.query} | {pair.query}
        ranked = sorted((text for text in documents if text not in own), key=lambda text: -cosine(pair.query, text))
        best = ranked[settings.skip : settings.depth]
        positive = cosine(pair.query, pair.document)
        limit = positive - (1 - settings.margin) * abs(positive)
        results.append([text for text in best if cosine(pair.query, text) <= limit][: settings.negatives])
    return results


@pytest.mark.parametrize(
    "rules", [{}, {"margin": 1.0}, {"skip": 3, "depth": 9}, {"negatives": 50, "depth": 60, "margin": 0.7}, {"depth": 5}]
)
def test_rules_are_those_of_a_plain_loop(rules):
    torch.manual_seed(3)
    queries, documents = ["q0", "q1", "d2"], [f"d{number}" for number in range(12)]  # one query is a document's text
    pairs = [TrainingPair("q0", "d0"), TrainingPair("q1", "d1"), TrainingPair("d2", "d3"), TrainingPair("q0", "d4"),
             TrainingPair("d2", "d0")]  # fmt: skip
    vectors = torch.nn.functional.normalize(torch.randn(15, 4), dim=1)
    vectors[5:8] = vectors[9:12]  # equal cosines
    rows = dict(zip([*queries, *(f"document {text}" for text in documents)], vectors, strict=True))
    settings = MineConfig(**rules)

    def cosine(query, document):
        return float(np.float32((rows[query] @ rows[f"document {document}"]).item()))

    progress = []
    mined = mine_negatives(pairs, queries, documents, vectors[:3], vectors[3:], settings, progress.append)
    for pair, texts, expected in zip(pairs, mined, plain_loop(pairs, documents, cosine, settings), strict=True):
        assert [round(cosine(pair.query, text), 5) for text in texts] == [round(cosine(pair.query, text), 5) for text in expected]
        assert not {pair.query, *(other.document for other in pairs if other.query == pair.query)} & {*texts}
    assert any(mined) and progress == [1, 2, 3]


def test_documents_of_the_corpus_are_searched_and_runs_are_equal(models, pair_file, beir, tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("query,document\nx,Lyon and Paris\ny,old dog\n")
    flags = ["--margin", "1", "--negatives", "60", "--depth", "60"]
    without = mine(models["encoder"], pair_file, tmp_path / "a.jsonl", *flags)
    line = capsys.readouterr().out.splitlines()[-2]
    mined = mine(models["encoder"], pair_file, tmp_path / "b.jsonl", *flags, "--corpus", beir(queries=None, qrels=None), other)
    again = mine(models["encoder"], pair_file, tmp_path / "c.jsonl", *flags, "--corpus", tmp_path / "letters", other)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes() and mined == again
    texts = {f"{title} {text}".strip() for _, title, text in DOCUMENTS} - {""} | {"Lyon and Paris", "old dog"}
    added = {text for pair in mined for text in pair.negatives} - {text for pair in without for text in pair.negatives}
    assert added == texts
    few = sum(len(pair.negatives) < 60 for pair in without)
    total, none = (sum(map(count, without)) for count in (lambda pair: len(pair.negatives), lambda pair: not pair.negatives))
    counted = f"a.jsonl: {total} hard negatives of 24 pairs; {few} pairs have fewer than 60, {none} none"
    assert few == 24 and line.endswith(f"{counted}; raise --margin or --depth for more")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data {data}", "--model: missing"),
        ("--model {model}", "--data: missing"),
        ("--model nothing --data {data}", "--model nothing: no such folder"),
        ("--model {model} --data nowhere.jsonl", "nowhere.jsonl: no such file or folder"),
        ("--model {model} --data {data} --corpus nowhere.jsonl", "nowhere.jsonl: no such file or folder"),
        ("--model {model} --data {data} --corpus empty", "empty: no corpus.jsonl"),
        ("--model {model} --data {data} --negatives 0", "--negatives: found 0, expected at least 1"),
        ("--model {model} --data {data} --skip -1", "--skip: found -1, expected at least 0"),
        ("--model {model} --data {data} --skip 10 --depth 13", "--depth: found 13, expected at least 14"),
        ("--model {model} --data {data} --margin 0", "--margin: found 0.0, expected more than 0 and at most 1"),
        ("--model {model} --data {data} --margin nan", "--margin: found nan"),
        ("--model {model} --data {data} --batch-size 0", "--batch-size: found 0, expected at least 1"),
        ("--model {model} --data {data} --max-length 65", "--max-length: found 65, expected at most the 64 tokens"),
        ("--model {model} --data {data} --output new/x.json", "--output new/x.json: found the ending '.json'"),
        ("--model {model} --data {data} --output {data}/x.jsonl", "cannot write to the folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(models, pair_file, tmp_path, monkeypatch, refusal, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words = flags.format(model=models["encoder"], data="pairs.jsonl").split()
    output = [] if "--output" in words else ["--output", "new/x.jsonl"]
    assert message in refusal(mine_main, words + output)
    assert sorted(tmp_path.rglob("*")) == before
