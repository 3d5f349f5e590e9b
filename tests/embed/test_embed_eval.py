"""`megaenc embed eval`: results, and refusals that leave no files."""

import random
import sys
from pathlib import Path

import pytest
import torch
from embed.conftest import DOCUMENTS, QUERIES, evaluate
from small_data import beir_files, write_files
from transformers import AutoTokenizer

from megaenc.embed.command import eval_main
from megaenc.embed.embedder import Embedder
from megaenc.embed.evaluate import rank_by_bm25
from megaenc.finetune.datasets.beir import compute_test_fingerprint, load_beir_test
from megaenc.finetune.model.fingerprint import (
    compute_model_fingerprints,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.tasks import retrieval


def test_results_identify_the_model_and_the_data(models, beir):
    directory = beir()
    results = evaluate(
        "--model", models["encoder"], "--data", directory, "--no-bm25", "--query-prefix", "Ask: "
    )
    assert (
        results["settings"]["query_prefix"]
        == results["models"]["encoder"]["query_prefix"]
        == "Ask: "
    )
    assert (
        results["fingerprints"]["encoder"]["model"]
        == compute_model_fingerprints([str(models["encoder"])], "")[0]
    )
    assert results["fingerprints"]["encoder"]["tokenizer"] == compute_tokenizer_fingerprint(
        str(models["encoder"])
    )
    assert results["data"] == {"letters": compute_test_fingerprint(directory)}
    (directory / "qrels" / "test.tsv").write_text("q1\td1\t1\n")
    assert results["data"] != {"letters": compute_test_fingerprint(directory)}


def write_arguments(directory: Path) -> None:
    """Write a set like ArguAna, whose queries are documents.

    Texts have several ids, and some judged documents are missing.
    """
    draw = random.Random(3)
    words = [
        "river",
        "garden",
        "letters",
        "Lyon",
        "Paris",
        "flowers",
        "summer",
        "old",
        "walked",
        "slowly",
        "heavy",
        "yellow",
    ]
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 20))) for _ in range(60)]
    ids = [f"d{number}" for number in range(180)]
    draw.shuffle(ids)
    corpus = {key: texts[at % 60] for at, key in enumerate(ids)}
    queries = draw.sample(ids, 40)
    judged = [(query, draw.choice(ids), 1) for query in queries[20:]]
    judged += [(query, f"gone{at}", 1) for at, query in enumerate(queries[:5])]
    for query in queries:
        copies = [key for key in ids if corpus[key] == corpus[query] and key != query]
        judged.append((query, draw.choice(copies), draw.randint(1, 2)))
    documents = [(key, "", text) for key, text in corpus.items()]
    write_files(
        directory, beir_files(documents, [(key, corpus[key]) for key in queries], test=judged)
    )


def test_queries_in_the_corpus_missing_documents_and_equal_texts_score_as_in_mteb(
    models, monkeypatch, capsys
):
    """Cosines come in several blocks, and rows of embeddings differ in their rounding."""
    from mteb._evaluators.retrieval_evaluator import RetrievalEvaluator
    from sentence_transformers import SentenceTransformer

    embed = Embedder.embed

    def embed_with_rounding(self, rows, *arguments):
        return embed(self, rows, *arguments) * (1 + 1e-7 * torch.arange(len(rows)))[:, None]

    monkeypatch.setattr(Embedder, "embed", embed_with_rounding)
    monkeypatch.setattr(retrieval, "_MAX_COSINES", 700)
    directory = Path("arguments")
    write_arguments(directory)
    flags = ["--model", f"tiny={models['encoder']}", "--data", directory, "--batch-size", "7"]
    flags += ["--query-prefix", "Ask: ", "--document-prefix", "Read: "]
    results = evaluate(*flags)
    [missing] = [
        line for line in capsys.readouterr().out.splitlines() if line.endswith("count as misses")
    ]
    assert missing.startswith(f"{directory}/qrels/test.tsv: 5 of 56 relevant documents")

    data = load_beir_test(directory)
    texts = sorted({*data.documents.values()})
    reference = SentenceTransformer(str(models["encoder"]), device="cpu")
    vectors = {}
    for prefix in ("Ask: ", "Read: "):
        of_all = reference.encode([prefix + text for text in texts], normalize_embeddings=True)
        vectors[prefix] = dict(zip(texts, of_all, strict=True))
    runs = {"tiny": {}, "BM25": {}}
    ids = sorted(data.documents, reverse=True)  # trec_eval's order of equal scores
    rankings = rank_by_bm25(
        list(data.queries.values()), [data.documents[key] for key in ids], lambda done: None
    )
    for (query, text), best in zip(data.queries.items(), rankings, strict=True):
        cosines = {
            other: float(vectors["Ask: "][text] @ vectors["Read: "][other]) for other in texts
        }
        runs["tiny"][query] = {key: cosines[other] for key, other in data.documents.items()}
        runs["BM25"][query] = {ids[at]: float(-rank) for rank, at in enumerate(best)}
    for model, run in runs.items():
        scores = RetrievalEvaluator.evaluate(
            None, data.relevant, run, [10, 100], ignore_identical_ids=True
        ).all_scores
        for name, measure in (("ndcg@10", "ndcg_cut_10"), ("recall@100", "recall_100")):
            expected = [scores[query][measure] for query in results["queries"]["arguments"]]
            assert results["scores"][model]["arguments"][name] == pytest.approx(
                expected, abs=1e-6
            ), (model, name)
    assert max(results["scores"]["random"]["arguments"]["recall@100"]) == pytest.approx(100 / 179)


def test_several_models_and_data_sets_without_bm25(models, beir, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # is not needed then
    config = Path("eval.yaml")
    config.write_text(f"model: [{models['encoder']}, causal={models['decoder']}]\nbm25: false\n")
    rows = evaluate("--config", config, "--data", beir("one"), f"again={beir('two')}")["rows"]
    means = {(row["dataset"], row["model"]): row["mean"] for row in rows[::2]}
    assert list(means) == [
        (data, model) for data in ("one", "again") for model in ("random", "encoder", "causal")
    ]
    assert means["one", "encoder"] == means["again", "encoder"] != means["one", "causal"]


def test_lengths_attention_and_dimensions_are_those_of_the_flags(models, beir, capsys):
    flags = ["--model", models["decoder"], "--data", beir(), "--no-bm25"]
    changes = {"max_length": 4, "attention": "causal", "truncate_dim": 2}
    for name, value in changes.items():
        flags += [f"--{name.replace('_', '-')}", value]
    found = evaluate(*flags)["models"]["decoder"]
    assert {name: found[name] for name in changes} == changes
    tokenizer = AutoTokenizer.from_pretrained(models["decoder"])
    texts = [text for _, text in QUERIES[:3]] + [
        f"{title} {text}".strip() for _, title, text in DOCUMENTS
    ]
    longer = sum(len(tokenizer(text)["input_ids"]) > 4 for text in texts)
    assert f"{longer} of 9 texts are longer than 4 tokens and are cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data letters --no-bm25", "--model: missing, and --no-bm25 leaves nothing to evaluate"),
        ("--data a\x1bb", "--data: found the name 'a\\x1bb', expected printable characters"),
        ("--data letters x/letters", "--data: found letters twice, expected each once"),
        (
            "--data letters --model {model} {model}",
            "--model: found encoder twice, expected each once",
        ),
        ("--data letters --model BM25={model}", "--model: found the name of a baseline"),
        (
            "--data letters --model {model} --max-length 65",
            "--max-length: found 65, expected at most the 64 tokens",
        ),
        (
            "--data letters --model {model} --truncate-dim 33",
            "--truncate-dim: found 33, expected at most 32",
        ),
        ("--data letters --batch-size 0", "--batch-size: found 0, expected 1 or more"),
        (
            "--data letters --output new/x.txt",
            "--output new/x.txt: found the ending '.txt', expected .json, .csv or .md",
        ),
    ],
)
def test_mistakes_leave_nothing(models, beir, tmp_path, refusal, flags, message):
    beir()
    words = flags.format(model=models["encoder"]).split()
    output = [] if "--output" in words else ["--output", "new/x.json"]
    assert message in refusal(eval_main, words + output)
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]


def test_without_bm25s_nothing_is_loaded(beir, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert "BM25 needs the package bm25s: `pip install bm25s`" in refusal(
        eval_main, ["--data", beir()]
    )
