"""`megaenc embed eval` from folders to files, and its refusals, which leave nothing on the disk."""

import csv
import json
import random
import shutil
import sys

import ir_measures
import pytest
import torch
from ir_measures import R, nDCG
from transformers import AutoTokenizer

from megaenc.embed.command import eval_main
from megaenc.embed.embedder import Embedder
from megaenc.embed.evaluate import RetrievalSet, rank_by_bm25
from megaenc.finetune.datasets.beir import compute_test_fingerprint, load_beir_test
from megaenc.finetune.model.fingerprint import compute_model_fingerprints, compute_tokenizer_fingerprint


def test_scores_are_trec_evals_of_sentence_transformers_embeddings(models, beir, tmp_path, capsys):
    from sentence_transformers import SentenceTransformer

    folder, flags = beir(), ["--query-prefix", "Ask: ", "--document-prefix", "Read: ", "--precision", "fp32", "--batch-size", "2"]
    written = {}
    for suffix in ("json", "csv", "md"):
        output = tmp_path / "new" / f"scores.{suffix}"
        eval_main(["--model", f"tiny={models['encoder']}", "--data", str(folder), *flags, "--output", str(output)])
        written[suffix] = output.read_text()
    printed = capsys.readouterr().out
    assert "tiny: mean pooling, bidirectional attention, at most 64 tokens, fp32, query prefix 'Ask: ', document" in printed

    data = load_beir_test(folder)
    reference = SentenceTransformer(str(models["encoder"]), device="cpu")
    queries = reference.encode(["Ask: " + text for text in data.queries.values()], normalize_embeddings=True)
    documents = reference.encode(["Read: " + text for text in data.documents.values()], normalize_embeddings=True)
    cosines = (queries @ documents.T).tolist()
    run = {query: dict(zip(data.documents, row, strict=True)) for query, row in zip(data.queries, cosines, strict=True)}
    expected = ir_measures.pytrec_eval.calc_aggregate([nDCG @ 10, R @ 100], data.relevant, run)

    results = json.loads(written["json"])
    rows = {(row["model"], row["metric"]): row for row in results["rows"]}
    assert list(rows) == [(model, metric) for model in ("random", "BM25", "tiny") for metric in ("ndcg@10", "recall@100")]
    assert rows["tiny", "ndcg@10"]["mean"] == pytest.approx(100 * expected[nDCG @ 10], abs=1e-6)
    assert rows["tiny", "recall@100"]["mean"] == 100 * expected[R @ 100] == 100
    assert rows["tiny", "ndcg@10"]["low"] < rows["tiny", "ndcg@10"]["mean"] < rows["tiny", "ndcg@10"]["high"]
    assert rows["BM25", "ndcg@10"]["mean"] == pytest.approx(100)
    assert rows["random", "recall@100"]["mean"] == 100 and rows["random", "ndcg@10"]["low"] is None
    assert {(row["dataset"], row["queries"], row["documents"]) for row in rows.values()} == {("letters", 3, 6)}
    assert results["models"]["tiny"]["max_length"] == 64 and results["models"]["tiny"]["query_prefix"] == "Ask: "
    scores, ids = results["scores"], results["queries"]["letters"]
    assert ids == ["q1", "q2", "q3"] and list(scores) == ["random", "BM25", "tiny"]
    single = {(str(each.query_id), str(each.measure)): each.value for each in ir_measures.pytrec_eval.iter_calc(
        [nDCG @ 10, R @ 100], data.relevant, run)}  # fmt: skip
    for name, measure in (("ndcg@10", "nDCG@10"), ("recall@100", "R@100")):
        assert scores["tiny"]["letters"][name] == pytest.approx([single[query, measure] for query in ids], abs=1e-6)
    fingerprints = results["fingerprints"]["tiny"]
    assert fingerprints["model"] == compute_model_fingerprints([str(models["encoder"])], str(tmp_path))[0]
    assert fingerprints["tokenizer"] == compute_tokenizer_fingerprint(str(models["encoder"]))
    assert results["settings"]["query_prefix"] == "Ask: " and results["settings"]["precision"] == "fp32"
    assert results["data"] == {"letters": compute_test_fingerprint(folder)}
    (folder / "qrels" / "test.tsv").write_text("q1\td1\t1\n")
    assert results["data"] != {"letters": compute_test_fingerprint(folder)}
    assert [float(row["mean"]) for row in csv.DictReader(written["csv"].splitlines())] == [row["mean"] for row in rows.values()]
    lines = written["md"].splitlines()
    assert lines[0] == "| data set | model | NDCG@10 | Recall@100 | queries | documents |" and len(lines) == 5
    mean, low, high = (rows["tiny", "ndcg@10"][name] for name in ("mean", "low", "high"))
    assert lines[4].startswith(f"| letters | tiny | {mean:.2f} [{low:.1f}, {high:.1f}] | 100.00 [100.0, 100.0] | 3 | 6 |")


def write_arguments(folder):
    """A set like ArguAna: queries are documents, texts have several ids, and some judged documents are missing."""
    draw = random.Random(3)
    words = ["river", "garden", "letters", "Lyon", "Paris", "flowers", "summer", "old", "walked", "slowly", "heavy", "yellow"]
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 20))) for _ in range(60)]
    ids = [f"d{number}" for number in range(180)]
    draw.shuffle(ids)
    corpus = {document: texts[at % 60] for at, document in enumerate(ids)}
    queries = draw.sample(ids, 40)
    copies = [[other for other in ids if corpus[other] == corpus[query] and other != query] for query in queries]
    qrels = [(query, draw.choice(same), draw.randint(1, 2)) for query, same in zip(queries, copies, strict=True)]
    qrels += [(query, draw.choice(ids), 1) for query in queries[20:]]
    qrels += [(query, f"gone{at}", 1) for at, query in enumerate(queries[:5])]
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", {query: corpus[query] for query in queries})):
        lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    lines = [f"{query}\t{document}\t{grade}\n" for query, document, grade in qrels]
    (folder / "qrels" / "test.tsv").write_text("".join(lines))
    return folder


def test_queries_in_the_corpus_missing_documents_and_equal_texts_score_as_in_mteb(models, tmp_path, monkeypatch, capsys):
    from mteb._evaluators.retrieval_evaluator import RetrievalEvaluator
    from sentence_transformers import SentenceTransformer

    embed = Embedder.embed

    def embed_with_rounding(self, rows, *arguments):
        """Round embeddings differently in each row, as other batches may."""
        return embed(self, rows, *arguments) * (1 + 1e-7 * torch.arange(len(rows)))[:, None]

    monkeypatch.setattr(Embedder, "embed", embed_with_rounding)
    folder = write_arguments(tmp_path / "arguments")
    flags = ["--precision", "fp32", "--batch-size", "7", "--output", str(tmp_path / "x.json")]
    eval_main(["--model", f"tiny={models['encoder']}", "--data", str(folder), *flags])
    missing = "test.tsv: 5 of 61 relevant documents are not in corpus.jsonl and count as misses"
    assert [line for line in capsys.readouterr().out.splitlines() if "misses" in line] == [f"{folder}/qrels/{missing}"]

    data = load_beir_test(folder)
    texts = sorted({*data.documents.values()})
    reference = SentenceTransformer(str(models["encoder"]), device="cpu")
    vectors = dict(zip(texts, reference.encode(texts, normalize_embeddings=True), strict=True))
    runs = {"tiny": {}, "BM25": {}}
    for query, text in data.queries.items():
        cosines = {other: float(vectors[text] @ vectors[other]) for other in texts}
        runs["tiny"][query] = {document: cosines[other] for document, other in data.documents.items()}
    ids = sorted(data.documents, reverse=True)  # trec_eval's order of equal scores
    rankings = rank_by_bm25(list(data.queries.values()), [data.documents[document] for document in ids], lambda done: None)
    for query, best in zip(data.queries, rankings, strict=True):
        runs["BM25"][query] = {ids[at]: float(-rank) for rank, at in enumerate(best)}

    results = json.loads((tmp_path / "x.json").read_text())
    assert len(data.queries) == 40 and len(data.documents) == 180
    for model, run in runs.items():
        scores = RetrievalEvaluator.evaluate(None, data.relevant, run, [10, 100], ignore_identical_ids=True).all_scores
        for name, measure in (("ndcg@10", "ndcg_cut_10"), ("recall@100", "recall_100")):
            expected = [scores[query][measure] for query in results["queries"]["arguments"]]
            assert results["scores"][model]["arguments"][name] == pytest.approx(expected, abs=1e-6), (model, name)
    assert max(results["scores"]["random"]["arguments"]["recall@100"]) == pytest.approx(100 / 179)


def test_several_models_and_data_sets_without_bm25(models, beir, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # is not needed then
    one, two = beir("one"), beir("two")
    config = tmp_path / "eval.yaml"
    config.write_text(f"model: [{models['encoder']}, causal={models['decoder']}]\nbm25: false\nprecision: fp32\n")
    eval_main(["--config", str(config), "--data", str(one), f"again={two}", "--output", str(tmp_path / "x.json")])
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["dataset"], row["model"]) for row in rows[::2]] == [
        (data, model) for data in ("one", "again") for model in ("random", "encoder", "causal")
    ]
    by_set = [[row["mean"] for row in rows if row["dataset"] == name] for name in ("one", "again")]
    assert by_set[0] == by_set[1] and by_set[0][2] != by_set[0][4]
    assert "BM25" not in capsys.readouterr().out


def test_lengths_and_attention_are_those_of_the_flags(models, beir, tmp_path, capsys):
    means = []
    for flags in ([], ["--max-length", "4", "--overwrite"], ["--attention", "causal", "--overwrite"]):
        eval_main(["--model", str(models["decoder"]), "--data", str(beir(f"b{len(means)}")), "--precision", "fp32",
                   "--output", str(tmp_path / "x.json"), *flags])  # fmt: skip
        results = json.loads((tmp_path / "x.json").read_text())
        means.append(results["rows"][-2]["mean"])
        config = results["models"]["decoder"]
        assert (config["max_length"], config["attention"]) == (
            4 if "4" in flags else 64,
            "causal" if "causal" in flags else "bidirectional",
        )
    assert len(set(means)) == 3
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("are cut")]
    data = RetrievalSet.load("", tmp_path / "b1")
    texts = data.queries + list(dict.fromkeys(data.documents))
    longer = sum(len(ids) > 4 for ids in AutoTokenizer.from_pretrained(models["decoder"])(texts)["input_ids"])
    assert said == [f"{longer} of {len(texts)} texts are longer than 4 tokens and are cut"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--data: missing"),
        ("--data {beir} --no-bm25", "--model: missing, and --no-bm25 leaves nothing to evaluate"),
        ("--data nothing", "nothing: no such folder, expected BEIR's corpus.jsonl, queries.jsonl and qrels/test.tsv"),
        (f"--data {'x' * 300}", "no such folder, expected BEIR's"),
        ("--data a\x1bb", "--data: found the name 'a\\x1bb', expected printable characters"),
        ("--data {beir} x/{beir}", "--data: found letters twice, expected each once"),
        ("--data {beir} --model {model} {model}", "--model: found encoder twice, expected each once"),
        ("--data {beir} --model BM25={model}", "--model: found the name of a baseline"),
        ("--data {beir} --model nothing", "--model nothing: no such folder"),
        ("--data {beir} --model {beir}", "letters: no config.json"),
        ("--data {beir} --model {model} --max-length 65", "--max-length: found 65, expected at most the 64 tokens"),
        ("--data {beir} --model {model} --max-length -1", "--max-length: found -1, expected at least 0"),
        ("--data {beir} --batch-size 0", "--batch-size: found 0, expected at least 1"),
        ("--data {beir} --output new/x.txt", "--output new/x.txt: found the ending '.txt', expected .json, .csv or .md"),
        ("--data {beir} --output {beir}/corpus.jsonl/x.md", "cannot write to the folder"),
        ("--data {qrels}", "qrels-only: no corpus.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(models, beir, tmp_path, monkeypatch, refusal, flags, message):
    monkeypatch.chdir(tmp_path)
    folder = beir()
    (tmp_path / "qrels-only").mkdir()
    shutil.copytree(folder / "qrels", tmp_path / "qrels-only/qrels")
    before = sorted(tmp_path.rglob("*"))
    words = flags.format(beir=folder.name, model=models["encoder"], qrels="qrels-only").split()
    output = [] if "--output" in words else ["--output", "new/x.json"]
    assert message in refusal(eval_main, words + output)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_bm25s_nothing_is_loaded(beir, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert "BM25 needs the package bm25s: `pip install bm25s`" in refusal(eval_main, ["--data", beir()])
