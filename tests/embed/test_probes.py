"""Similarity and probes are those of scipy, scikit-learn, and of mteb with sentence-transformers' own model."""

import csv
import json
import random
import sys

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap, spearmanr, t
from sklearn.linear_model import LogisticRegression

from megaenc.console import silence_libraries
from megaenc.embed import probes
from megaenc.embed.command import eval_main
from megaenc.embed.embedder import Embedder, read_embedding_config
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import load_beir_test

silence_libraries()

WORDS = ["river", "garden", "summer", "letters", "Lyon", "Paris", "book", "flowers", "house", "dog", "man", "walked", "yellow"]


def sentence(draw):
    return " ".join(draw.choices(WORDS, k=draw.randrange(2, 9)))


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Folders of pairs with scores (`pairs`) and of texts of three classes (`classes`), and their rows by split."""
    root, draw = tmp_path_factory.mktemp("sets"), random.Random(0)
    pairs = [{"text": (text := sentence(draw)), "text_pair": text + " " + sentence(draw)} for _ in range(60)]
    rows = {"pairs": {"test": [row | {"label": 5 / len(row["text_pair"].split())} for row in pairs]}, "classes": {}}
    for split, count in (("train", 120), ("test", 50)):
        classes = [draw.choice(["plant", "animal", "city"]) for _ in range(count)]
        rows["classes"][split] = [{"text": f"{sentence(draw)} {name[:3]}", "label": name} for name in classes]
    for name, splits in rows.items():
        for split, of_split in splits.items():
            write_rows(root / name / f"{split}.jsonl", of_split)
    return {name: root / name for name in rows}, rows


def write_sentence_model(model, folder, *, norm, prompts=None, default=None):
    from sentence_transformers import SentenceTransformer, models

    modules = [models.Transformer(str(model)), models.Pooling(32, "mean"), *([models.Normalize()] if norm else [])]
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts, default_prompt_name=default).save(str(folder))
    return folder


def build_embedder(folder):
    return Embedder(str(folder), read_embedding_config(str(folder)), device=torch.device("cpu"), dtype=torch.float32)


def test_similarity_is_scipys_correlation_of_the_cosines(models, sets):
    folders, rows = sets
    task, embedder = probes.load_labelled_set("pairs", folders["pairs"]), build_embedder(models["encoder"])
    texts = [[row[key] for row in rows["pairs"]["test"]] for key in ("text", "text_pair")]
    first, second = (embedder.embed(embedder.tokenize(side)) for side in texts)
    cosines, scores = (first * second).sum(dim=1).numpy(), np.array([row["label"] for row in rows["pairs"]["test"]])
    row = task.evaluate("tiny", embedder)
    assert (row.dataset, row.model, row.metric, row.examples) == ("pairs", "tiny", "spearman", 60)
    assert row.mean == pytest.approx(100 * spearmanr(scores, cosines).statistic, abs=1e-4)
    assert abs(row.mean) > 5
    statistic = lambda x, y: spearmanr(x, y).statistic  # noqa: E731
    drawn = bootstrap((scores, cosines), statistic, paired=True, vectorized=False, n_resamples=200, method="percentile", rng=0)
    assert (row.low, row.high) == pytest.approx([100 * end for end in drawn.confidence_interval], abs=8)


def test_a_probe_is_sklearns_regression_on_mtebs_samples(models, sets):
    folders, rows = sets
    task, embedder = probes.load_labelled_set("classes", folders["classes"]), build_embedder(models["encoder"])
    vectors, labels = {}, {}
    for split in ("train", "test"):
        tokens = embedder.tokenize([row["text"] for row in rows["classes"][split]])
        vectors[split] = embedder.embed(tokens, unit_length=False).numpy()
        labels[split] = np.array([row["label"] for row in rows["classes"][split]])
    assert np.linalg.norm(vectors["test"], axis=1).std() > 0.1
    order, accuracies = list(range(len(labels["train"]))), []
    for _ in range(10):
        np.random.RandomState(42).shuffle(order)
        chosen = [at for name in ("plant", "animal", "city") for at in [i for i in order if labels["train"][i] == name][:8]]
        chosen.sort(key=order.index)
        probe = LogisticRegression(max_iter=100, random_state=42).fit(vectors["train"][chosen], labels["train"][chosen])
        accuracies.append((probe.predict(vectors["test"]) == labels["test"]).mean())
    row = task.evaluate("tiny", embedder)
    half = t.ppf(0.975, 9) * np.std(accuracies, ddof=1) / np.sqrt(10)
    assert len(set(accuracies)) > 3
    expected = [100 * value for value in (np.mean(accuracies), np.mean(accuracies) - half, np.mean(accuracies) + half)]
    assert (row.mean, row.low, row.high) == pytest.approx(expected, abs=1e-4)
    assert row.metric == "accuracy" and row.examples == 50


@pytest.mark.parametrize("norm", [False, True])
def test_scores_are_mtebs_own_of_the_same_folder(models, sets, tmp_path, norm):
    import mteb
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "Lyon Paris: "}
    folder = write_sentence_model(models["encoder"], tmp_path / "st", norm=norm, prompts=prompts, default="query")
    embedder = build_embedder(folder)
    assert (embedder.config.default_prefix, embedder.config.normalize) == ("Lyon Paris: ", norm)
    means = {}
    for name, path in sets[0].items():
        task = probes.load_labelled_set(name, path)
        how = {"cache": None, "show_progress_bar": False, "co2_tracker": False}
        reference = mteb.evaluate(SentenceTransformer(str(folder), device="cpu"), task.task, **how).task_results[0].get_score()
        means[name] = task.evaluate("tiny", embedder).mean
        assert means[name] == pytest.approx(100 * reference, abs=1e-2)  # 1e-4 of a fraction
    unprompted = build_embedder(write_sentence_model(models["encoder"], tmp_path / "plain", norm=norm))
    assert probes.load_labelled_set("pairs", sets[0]["pairs"]).evaluate("tiny", unprompted).mean != means["pairs"]


def test_tables_and_files_next_to_retrieval(models, sets, beir, tmp_path, capsys):
    written = {}
    sources = [str(beir()), str(sets[0]["pairs"]), f"kinds={sets[0]['classes']}"]
    for suffix in ("json", "csv", "md"):
        output = tmp_path / f"scores.{suffix}"
        eval_main(["--model", f"tiny={models['encoder']}", "--data", *sources, "--precision", "fp32", "--output", str(output)])
        written[suffix] = output.read_text()
    rows = json.loads(written["json"])["rows"]
    assert [(row["dataset"], row["model"], row["metric"]) for row in rows[-4:]] == [
        (data, model, metric) for data, metric in (("pairs", "spearman"), ("kinds", "accuracy")) for model in ("random", "tiny")
    ]
    assert [row["mean"] for row in rows if row["model"] == "random"][-2:] == [0, pytest.approx(100 / 3)]
    assert {(row["queries"], row["documents"], row["examples"]) for row in rows} == {
        (3, 6, None), (None, None, 60), (None, None, 50)
    }  # fmt: skip
    table = list(csv.DictReader(written["csv"].splitlines()))
    assert [float(row["mean"]) for row in table] == [row["mean"] for row in rows] and len(rows) == 10
    retrieval, others = written["md"].split("\n\n")
    assert retrieval.startswith("| data set | model | NDCG@10 |") and len(retrieval.splitlines()) == 5
    mean, low, high = (rows[-3][name] for name in ("mean", "low", "high"))
    assert others.splitlines()[:2] == ["| data set | model | measure | score | examples |", "|---|---|---|---:|---:|"]
    assert others.splitlines()[3] == f"| pairs | tiny | Spearman | {mean:.2f} [{low:.1f}, {high:.1f}] | 60 |"
    printed = capsys.readouterr().out
    assert "zero-shot retrieval, percent" in printed and f"{mean:.2f} [{low:.1f}, {high:.1f}]" in printed


def test_retrieval_needs_no_mteb(beir, sets, monkeypatch, refusal, capfd):
    monkeypatch.setitem(sys.modules, "mteb", None)
    eval_main(["--data", str(beir())])
    assert "tasks of mteb" not in capfd.readouterr().out
    flags = ["--model", "m", "--data", sets[0]["pairs"]]
    monkeypatch.setattr("megaenc.embed.embedder.fetch_model", lambda name: name)
    monkeypatch.setattr("megaenc.embed.embedder.read_embedding_config", lambda folder: None)
    monkeypatch.setattr("megaenc.embed.embedder.override_config", lambda config, settings: config)
    assert "need the package mteb: `pip install 'mteb>=2.26,<3'`" in refusal(eval_main, flags)


def test_tasks_by_name(models, sets, tmp_path, monkeypatch):
    import mteb

    local = {name: probes.load_labelled_set(name, path) for name, path in sets[0].items()}
    for task in local.values():
        data, task.task.dataset, task.task.data_loaded = task.task.dataset, None, False

        def load_data(self=task.task, data=data, **options):
            self.dataset, self.data_loaded = {"en": data["default"], "de": data["default"]}, True

        task.task.load_data = load_data
        task.task.hf_subsets = ["en", "de"]
    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: [local[name].task for name in tasks])
    flags = ["--precision", "fp32", "--no-bm25", "--output", str(tmp_path / "x.json")]
    eval_main(["--model", str(models["encoder"]), "--tasks", "classes", "pairs", *flags])
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["dataset"], row["model"], row["examples"]) for row in rows] == [
        (name, model, examples) for name, examples in (("classes", 100), ("pairs", 120)) for model in ("random", "encoder")
    ]
    embedder = build_embedder(models["encoder"])
    for row in rows:
        if row["model"] == "random":
            assert row["mean"] == pytest.approx({"classes": 100 / 3, "pairs": 0}[row["dataset"]])
        else:  # two languages of the same data have the mean of one, without an interval
            single = probes.load_labelled_set("x", sets[0][row["dataset"]]).evaluate("x", embedder)
            assert row["mean"] == pytest.approx(single.mean, abs=1e-4) and row["low"] is None


def test_retrieval_by_name_has_the_scores_of_the_folder(models, beir, tmp_path):
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    prompts = {"query": "Ask: ", "document": "Lyon Paris: "}
    model, folder = write_sentence_model(models["encoder"], tmp_path / "st", norm=False, prompts=prompts), beir()
    flags = ["--precision", "fp32", "--no-bm25", "--output", str(tmp_path / "x.json")]
    eval_main(["--model", str(model), "--data", str(folder), *flags])
    expected = {row["metric"]: row["mean"] for row in json.loads((tmp_path / "x.json").read_text())["rows"][-2:]}

    values = {"name": "letters", "description": "-", "type": "Retrieval", "eval_langs": ["eng-Latn"], "main_score": "ndcg_at_10"}
    metadata = TaskMetadata(**values, dataset={"path": "local", "revision": "1"})
    data, task = load_beir_test(folder), type("Letters", (AbsTaskRetrieval,), {"metadata": metadata})()
    rows = [[{"id": key, "text": text} for key, text in texts.items()] for texts in (data.documents, data.queries)]
    corpus, queries = map(Dataset.from_list, rows)
    split = {"corpus": corpus, "queries": queries, "relevant_docs": data.relevant, "top_ranked": None}
    task.dataset = {"default": {"test": split}}
    task.data_loaded = True
    row = probes.ProbeTask.from_loaded("letters", task).evaluate("st", build_embedder(model))
    assert row.mean == pytest.approx(expected["ndcg@10"], abs=1e-2) and 10 < row.mean < 99
    assert (row.metric, row.low, row.examples) == ("ndcg_at_10", None, None)


def test_unusable_tasks(monkeypatch):
    import mteb

    with pytest.raises(InputError, match=r"--tasks STSBenchmrk: not found. Did you mean: 'STSBenchmark'\?; see https"):
        list(probes.load_tasks(["STSBenchmrk"]))
    with pytest.raises(InputError, match=r"--tasks 12345678: not found"):
        list(probes.load_tasks(["12345678"]))
    with pytest.raises(InputError, match=r"--tasks CIFAR10: found a task of image, expected text"):
        list(probes.load_tasks(["CIFAR10"]))
    with pytest.raises(InputError, match=r"--tasks CQADupstackRetrieval: found a group, expected its tasks: CQADupstack\w+ "):
        list(probes.load_tasks(["CQADupstackRetrieval"]))
    (task,) = mteb.get_tasks(tasks=["STSBenchmark"])

    def fail(task, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(task), "load_data", fail)
    with pytest.raises(InputError, match=r"--tasks STSBenchmark: the data set is neither .* downloaded \(.*no route to host"):
        list(probes.load_tasks(["STSBenchmark"]))


PAIR = {"text": "one", "text_pair": "two"}


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": [PAIR | {"label": 1}]}, r"test.jsonl: found pairs with classes as labels, expected scores such as 3.5"),
        ({"test": [PAIR | {"label": 1.5}, PAIR | {"label": "good"}]}, r"test.jsonl:2: label 'good': expected a number"),
        ({"test": [PAIR | {"label": 1.5}, PAIR | {"label": float("nan")}]}, r"test.jsonl:2: .*(NaN|nan)"),
        ({"test": [PAIR | {"label": 1.5}, {"text": "one", "label": 2}]}, r"test.jsonl:2: no key `text_pair`"),
        ({"test": [PAIR | {"label": 1.5}] * 3}, r"test.jsonl: found the score 1.5 in all rows"),
        ({"test": [{"text": "one", "label": 1.5}]}, r"test.jsonl: found scores without text_pair, expected pairs"),
        ({"train": [PAIR | {"label": 1.5}]}, r"no test split, expected a file test"),
        ({"test": []}, r"test.jsonl: holds no example"),
        ({"test": [{"tokens": ["a"], "tags": ["O"]}]}, r"test.jsonl: found rows with tokens, tags, expected text, label"),
        ({"train": [], "test": [{"text": "one", "label": 1}]}, r"train.jsonl: found no example, expected at least two"),
        ({"test": [{"text": "one", "label": 1}]}, r"no train split, expected a file train"),
        (
            {"train": [{"text": "one", "label": 1}] * 9, "valid": [], "test": [{"text": "one", "label": 1}]},
            r"train.jsonl: found the class 1 in all rows, expected at least two",
        ),
    ],
)
def test_unusable_sets(tmp_path, splits, message):
    for split, rows in splits.items():
        write_rows(tmp_path / "set" / f"{split}.jsonl", rows)
    assert probes.is_labelled_set(tmp_path / "set")
    with pytest.raises(InputError, match=message):
        probes.load_labelled_set("set", tmp_path / "set")


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_scores_of_a_table_and_equal_cosines(models, tmp_path):
    (tmp_path / "pairs.tsv").write_text("text\ttext_pair\tlabel\nLyon\tLyon\t4\nbook\tbook\t2.5\nman\tman\t3.0\n")
    task = probes.load_labelled_set("pairs", tmp_path / "pairs.tsv")
    assert (task.metric, task.examples, task.chance) == ("spearman", 3, 0)
    embedder = build_embedder(models["encoder"])
    embedder.embed = lambda rows, *args, **options: torch.ones(len(rows), 4)
    with pytest.raises(InputError, match=r"spearman of pairs is undefined"):
        task.evaluate("tiny", embedder)
