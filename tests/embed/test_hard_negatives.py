"""`megaenc embed mine` against sentence-transformers and a loop, and its refusals."""

import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from embed.conftest import DOCUMENTS
from small_data import write_file

from megaenc.embed.hard_negatives import MineConfig, mine_main, mine_negatives
from megaenc.embed.pairs import TrainingPair, load_pairs

WORDS = [
    "river",
    "garden",
    "dog",
    "house",
    "summer",
    "letters",
    "Lyon",
    "Paris",
    "book",
    "flowers",
    "yellow",
    "old",
    "walked",
]


@pytest.fixture
def pair_file():
    """Write 24 pairs of 20 queries; three queries have several documents."""
    random = np.random.default_rng(5)
    texts = [" ".join(random.choice(WORDS, 5)) + f" {number}" for number in range(44)]
    queries = [*texts[:20], texts[0], texts[0], texts[7], texts[9]]
    return write_pairs(Path("pairs.jsonl"), zip(queries, texts[20:], strict=True))


def write_pairs(path, pairs):
    write_file(path, [{"query": query, "document": text} for query, text in pairs])
    return path


def mine(model, data, output, *flags):
    arguments = [
        "--model",
        model,
        "--data",
        data,
        "--output",
        output,
        "--precision",
        "fp32",
        *flags,
    ]
    mine_main([str(argument) for argument in arguments])
    return load_pairs([str(output)]).pairs


def test_negatives_are_sentence_transformers(models, pair_file, capsys):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    pairs = load_pairs([str(pair_file)]).pairs[
        :20
    ]  # a query each: there the margin is that of a query's best document
    single = write_pairs(Path("single.jsonl"), [(pair.query, pair.document) for pair in pairs])
    flags = [
        "--query-prefix",
        "Ask: ",
        "--document-prefix",
        "Read: ",
        "--margin",
        "0.99",
        "--negatives",
        "6",
    ]
    mined = mine(models["encoder"], single, "new/mined.jsonl", *flags)
    printed = capsys.readouterr().out

    table = datasets.Dataset.from_dict(
        {"a": [pair.query for pair in pairs], "p": [pair.document for pair in pairs]}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = mine_hard_negatives(
            table, SentenceTransformer(str(models["encoder"]), device="cpu"),
            query_prompt="Ask: ", corpus_prompt="Read: ", relative_margin=0.01, range_max=19,
            num_negatives=6, output_format="triplet", verbose=False,
        )  # fmt: skip
    expected: dict[str, list[str]] = {pair.query: [] for pair in pairs}
    for row in reference:
        expected[row["a"]].append(row["negative"])
    assert mined == [
        TrainingPair(pair.query, pair.document, tuple(expected[pair.query])) for pair in pairs
    ]
    counts = [len(pair.negatives) for pair in mined]
    full = counts.count(6)
    assert 0 < full < 20
    assert (
        f"new/mined.jsonl: {sum(counts)} hard negatives of 20 pairs; "
        f"{20 - full} pairs have fewer than 6, {counts.count(0)} none" in printed
    )


def plain_loop(pairs, documents, cosine, settings):
    """Mine in a plain loop: rank the others' documents, cut, compare with the pair."""
    results = []
    for pair in pairs:
        own = {other.document for other in pairs if other.query == pair.query} | {pair.query}
        ranked = sorted(
            (text for text in documents if text not in own),
            key=lambda text: -cosine(pair.query, text),
        )
        best = ranked[settings.skip : settings.depth]
        positive = cosine(pair.query, pair.document)
        limit = positive - (1 - settings.margin) * abs(positive)
        results.append(
            [text for text in best if cosine(pair.query, text) <= limit][: settings.negatives]
        )
    return results


@pytest.mark.parametrize(
    "rules", [{}, {"skip": 3, "depth": 9}, {"negatives": 50, "depth": 60, "margin": 0.7}]
)
def test_rules_are_those_of_a_plain_loop(rules):
    torch.manual_seed(3)
    queries = ["q0", "q1", "d2"]
    documents = [f"d{number}" for number in range(12)]  # one query is a document's text
    own = [("q0", "d0"), ("q1", "d1"), ("d2", "d3"), ("q0", "d4"), ("d2", "d0")]
    pairs = [TrainingPair(*texts) for texts in own]
    vectors = torch.nn.functional.normalize(torch.randn(15, 4), dim=1)
    vectors[5:8] = vectors[9:12]  # equal cosines
    rows = dict(zip([*queries, *(f"document {text}" for text in documents)], vectors, strict=True))
    settings = MineConfig(**rules)

    def cosine(query, document):
        return float(np.float32((rows[query] @ rows[f"document {document}"]).item()))

    progress = []
    mined = mine_negatives(
        pairs, queries, documents, vectors[:3], vectors[3:], settings, progress.append
    )
    for pair, texts, expected in zip(
        pairs, mined, plain_loop(pairs, documents, cosine, settings), strict=True
    ):
        found = [cosine(pair.query, text) for text in texts]
        assert found == pytest.approx([cosine(pair.query, text) for text in expected], abs=1e-5)
        assert not {pair.query, *(text for query, text in own if query == pair.query)} & {*texts}
    assert any(mined) and progress == [1, 2, 3]


def test_documents_of_the_corpus_are_searched_and_runs_are_equal(models, pair_file, beir, capsys):
    other = Path("other.csv")
    other.write_text("query,document\nx,Lyon and Paris\ny,old dog\n")
    corpus = ["--corpus", beir(changed={"queries.jsonl": None}), other]
    flags = ["--margin", "1", "--negatives", "60", "--depth", "60"]
    without = mine(models["encoder"], pair_file, "a.jsonl", *flags)
    line = capsys.readouterr().out.splitlines()[-2]
    assert "a.jsonl: " in line and line.endswith(
        "24 pairs have fewer than 60, 2 none; raise --margin or --depth for more"
    )
    mined = mine(models["encoder"], pair_file, "b.jsonl", *flags, *corpus)
    mine(models["encoder"], pair_file, "c.jsonl", *flags, *corpus)
    assert Path("b.jsonl").read_bytes() == Path("c.jsonl").read_bytes()
    added = {text for pair in mined for text in pair.negatives} - {
        text for pair in without for text in pair.negatives
    }
    texts = {f"{title} {text}".strip() for _, title, text in DOCUMENTS}
    assert added == texts - {""} | {"Lyon and Paris", "old dog"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--negatives 0", "--negatives: found 0, expected 1 or more"),
        ("--skip 10 --depth 13", "--depth: found 13, expected at least 14"),
        ("--margin 0", "--margin: found 0.0, expected more than 0 and at most 1"),
        ("--margin nan", "--margin: found nan"),
        ("--corpus nowhere.jsonl", "nowhere.jsonl: no such file or directory"),
    ],
)
def test_mistakes_leave_nothing(models, pair_file, tmp_path, refusal, flags, message):
    command = ["--model", models["encoder"], "--data", pair_file, "--output", "new/x.jsonl"]
    assert message in refusal(mine_main, [*command, *flags.split()])
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
