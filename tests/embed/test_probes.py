"""Similarity and probes, against scipy, scikit-learn and mteb.

mteb uses sentence-transformers' own model.
"""

import csv
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from embed.conftest import evaluate, load_embedder, write_sentence_model
from scipy.stats import bootstrap, spearmanr, t
from sklearn.linear_model import LogisticRegression
from small_data import write_file, write_files

from megaenc.embed import probes
from megaenc.embed.command import eval_main
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import load_beir_test

WORDS = [
    "river",
    "garden",
    "summer",
    "letters",
    "Lyon",
    "Paris",
    "book",
    "flowers",
    "house",
    "dog",
    "man",
    "walked",
    "yellow",
]


def sentence(draw):
    return " ".join(draw.choices(WORDS, k=draw.randrange(2, 9)))


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Write scored pairs and texts of three classes; return directories and rows.

    Keys are `pairs` and `classes`; the rows come by split.
    """
    root = tmp_path_factory.mktemp("sets")
    draw = random.Random(0)
    pairs = []
    for _ in range(60):
        text = sentence(draw)
        more = sentence(draw)
        pairs.append(
            {
                "text": text,
                "text_pair": f"{text} {more}",
                "label": 5 / len(f"{text} {more}".split()),
            }
        )
    rows = {"pairs": {"test": pairs}, "classes": {"train": [], "test": []}}
    for split, count in (("train", 120), ("test", 50)):
        for _ in range(count):
            name = draw.choice(["plant", "animal", "city"])
            rows["classes"][split].append({"text": f"{sentence(draw)} {name[:3]}", "label": name})
    for name, splits in rows.items():
        for split, of_split in splits.items():
            write_file(root / name / f"{split}.jsonl", of_split)
    return {name: root / name for name in rows}, rows


def test_similarity_is_scipys_correlation_of_the_cosines(models, sets):
    directories, rows = sets
    embedder = load_embedder(models["encoder"])
    pairs = rows["pairs"]["test"]
    first = embedder.embed(embedder.tokenize([row["text"] for row in pairs]))
    second = embedder.embed(embedder.tokenize([row["text_pair"] for row in pairs]))
    cosines = (first * second).sum(dim=1).numpy()
    scores = np.array([row["label"] for row in pairs])
    row = probes.load_labelled_set("pairs", directories["pairs"]).evaluate("tiny", embedder)
    assert (row.dataset, row.model, row.metric, row.examples) == ("pairs", "tiny", "spearman", 60)
    assert row.mean == pytest.approx(100 * spearmanr(scores, cosines).statistic, abs=1e-4)
    assert abs(row.mean) > 5
    statistic = lambda x, y: spearmanr(x, y).statistic  # noqa: E731
    drawn = bootstrap(
        (scores, cosines),
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=200,
        method="percentile",
        rng=0,
    )
    assert (row.low, row.high) == pytest.approx(
        [100 * end for end in drawn.confidence_interval], abs=8
    )


def test_a_probe_is_sklearns_regression_on_mtebs_samples(models, sets):
    directories, rows = sets
    embedder = load_embedder(models["encoder"])
    vectors = {}
    labels = {}
    for split, of_split in rows["classes"].items():
        tokens = embedder.tokenize([row["text"] for row in of_split])
        vectors[split] = embedder.embed(tokens, unit_length=False).numpy()
        labels[split] = np.array([row["label"] for row in of_split])
    assert np.linalg.norm(vectors["test"], axis=1).std() > 0.1
    order = list(range(120))
    accuracies = []
    for _ in range(10):
        np.random.RandomState(42).shuffle(order)
        chosen = []
        for name in ("plant", "animal", "city"):
            chosen += [at for at in order if labels["train"][at] == name][:8]
        chosen.sort(key=order.index)
        probe = LogisticRegression(max_iter=100, random_state=42).fit(
            vectors["train"][chosen], labels["train"][chosen]
        )
        accuracies.append(100 * probe.score(vectors["test"], labels["test"]))
    row = probes.load_labelled_set("classes", directories["classes"]).evaluate("tiny", embedder)
    mean = np.mean(accuracies)
    half = t.ppf(0.975, 9) * np.std(accuracies, ddof=1) / np.sqrt(10)
    assert len(set(accuracies)) > 3
    assert (row.mean, row.low, row.high) == pytest.approx(
        (mean, mean - half, mean + half), abs=1e-4
    )
    assert row.metric == "accuracy" and row.examples == 50


@pytest.mark.parametrize("norm", [False, True])
def test_scores_are_mtebs_own_of_the_same_directory(models, sets, norm):
    import mteb

    prompts = {"query": "Lyon Paris: "}
    reference = write_sentence_model(
        models["encoder"], "st", prompts=prompts, norm=norm, default="query"
    )
    embedder = load_embedder(Path("st"))
    assert (embedder.config.default_prefix, embedder.config.normalize) == ("Lyon Paris: ", norm)
    for name, path in sets[0].items():
        task = probes.load_labelled_set(name, path)
        found = mteb.evaluate(
            reference, task.task, cache=None, show_progress_bar=False, co2_tracker=False
        )
        score = found.task_results[0].get_score()
        assert task.evaluate("tiny", embedder).mean == pytest.approx(
            100 * score, abs=1e-2
        )  # 1e-4 of a fraction


def test_tables_and_files(models, sets, beir):
    command = [
        "--model",
        f"tiny={models['encoder']}",
        "--data",
        beir(),
        sets[0]["pairs"],
        f"kinds={sets[0]['classes']}",
    ]
    results = evaluate(*command)
    for file in ("scores.md", "scores.csv"):
        eval_main([str(word) for word in (*command, "--precision", "fp32", "--output", file)])
    rows = {(row["dataset"], row["model"], row["metric"]): row for row in results["rows"]}
    retrieval = [
        ("letters", model, metric)
        for model in ("random", "BM25", "tiny")
        for metric in ("ndcg@10", "recall@100")
    ]
    probed = [("pairs", "random", "spearman"), ("pairs", "tiny", "spearman")]
    probed += [("kinds", "random", "accuracy"), ("kinds", "tiny", "accuracy")]
    assert list(rows) == retrieval + probed
    assert results["queries"]["letters"] == ["q1", "q2", "q3"]
    for dataset, model, metric in retrieval:
        row = rows[dataset, model, metric]
        assert row["mean"] == pytest.approx(
            100 * np.mean(results["scores"][model][dataset][metric])
        )
        assert (row["queries"], row["documents"], row["examples"]) == (3, 6, None)
        assert row["low"] is None if model == "random" else row["low"] <= row["mean"] <= row["high"]
    assert rows[retrieval[2]]["mean"] == pytest.approx(100), "BM25"
    assert [rows[key]["mean"] for key in probed[::2]] == [0, pytest.approx(100 / 3)]
    assert [rows[key]["examples"] for key in probed] == [60, 60, 50, 50]
    table = csv.DictReader(Path("scores.csv").read_text().splitlines())
    assert [float(row["mean"]) for row in table] == [row["mean"] for row in results["rows"]]
    first, second = Path("scores.md").read_text().split("\n\n")
    assert (
        first.splitlines()[0] == "| data set | model | NDCG@10 | Recall@100 | queries | documents |"
    )
    assert second.splitlines()[0] == "| data set | model | measure | score | examples |"
    row = rows["pairs", "tiny", "spearman"]
    score = "{mean:.2f} [{low:.1f}, {high:.1f}]".format(**row)
    assert second.splitlines()[3] == f"| pairs | tiny | Spearman | {score} | 60 |"


def test_retrieval_needs_no_mteb(models, beir, sets, monkeypatch, refusal, capfd):
    monkeypatch.setitem(sys.modules, "mteb", None)
    eval_main(["--data", str(beir())])
    capfd.readouterr()
    flags = ["--model", models["encoder"], "--data", sets[0]["pairs"]]
    assert "need the package mteb: `pip install 'mteb>=2.26,<3'`" in refusal(eval_main, flags)


def test_tasks_by_name(models, sets, monkeypatch):
    """Two languages of the same data have the mean of one, without an interval."""
    import mteb

    directories, _ = sets
    local = {name: probes.load_labelled_set(name, path).task for name, path in directories.items()}
    for task in local.values():
        both = dict.fromkeys(("en", "de"), task.dataset["default"])
        task.dataset = None
        task.data_loaded = False
        task.hf_subsets = list(both)

        def load_data(task=task, both=both, **options):
            task.dataset = both
            task.data_loaded = True

        task.load_data = load_data
    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: [local[name] for name in tasks])
    flags = ["--model", models["encoder"], "--tasks", "classes", "pairs", "--no-bm25"]
    rows = evaluate(*flags)["rows"]
    chance = {"classes": 100 / 3, "pairs": 0}
    expected = []
    for name, examples in (("classes", 100), ("pairs", 120)):
        single = probes.load_labelled_set("x", directories[name]).evaluate(
            "tiny", load_embedder(models["encoder"])
        )
        expected.append((name, "random", examples, pytest.approx(chance[name])))
        expected.append((name, "encoder", examples, pytest.approx(single.mean, abs=1e-4)))
    assert [
        (row["dataset"], row["model"], row["examples"], row["mean"]) for row in rows
    ] == expected
    assert {row["low"] for row in rows} == {None}


def test_retrieval_by_name_has_the_scores_of_the_directory(models, beir):
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    model = Path("st")
    directory = beir()
    write_sentence_model(
        models["encoder"], model, prompts={"query": "Ask: ", "document": "Lyon Paris: "}
    )
    rows = evaluate("--model", model, "--data", directory, "--no-bm25")["rows"]
    [expected] = [
        row["mean"] for row in rows if row["model"] == "st" and row["metric"] == "ndcg@10"
    ]

    values = {
        "name": "letters",
        "description": "-",
        "type": "Retrieval",
        "eval_langs": ["eng-Latn"],
        "main_score": "ndcg_at_10",
    }
    metadata = TaskMetadata(**values, dataset={"path": "local", "revision": "1"})
    task = type("Letters", (AbsTaskRetrieval,), {"metadata": metadata})()
    data = load_beir_test(directory)
    split = {"relevant_docs": data.relevant, "top_ranked": None}
    for name, texts in (("corpus", data.documents), ("queries", data.queries)):
        split[name] = Dataset.from_list([{"id": key, "text": text} for key, text in texts.items()])
    task.dataset = {"default": {"test": split}}
    task.data_loaded = True
    row = probes.ProbeTask.from_loaded("letters", task).evaluate("tiny", load_embedder(model))
    assert row.mean == pytest.approx(expected, abs=1e-2) and 10 < row.mean < 99
    assert (row.metric, row.low, row.examples) == ("ndcg_at_10", None, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("STSBenchmrk", r"not found. Did you mean: 'STSBenchmark'\?; see https"),
        ("12345678", "not found"),
        ("CIFAR10", "found a task of image, expected text"),
        ("CQADupstackRetrieval", r"found a group, expected its tasks: CQADupstack\w+ "),
        ("STSBenchmark", r"the data set is neither .* downloaded \(.*no route to host"),
    ],
)
def test_unusable_tasks(name, message, monkeypatch):
    import mteb

    def fail(task, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(mteb.get_task("STSBenchmark")), "load_data", fail)
    with pytest.raises(InputError, match=f"--tasks {name}: {message}"):
        list(probes.load_tasks([name]))


SCORED = '{"text": "one", "text_pair": "two", "label": 1.5}\n'
CLASS = '{"text": "one", "label": 1}\n'


@pytest.mark.parametrize(
    ("test", "train", "message"),
    [
        (
            SCORED.replace("1.5", "1"),
            None,
            r"test.jsonl: found pairs with classes as labels, expected scores such as 3.5",
        ),
        (
            SCORED + SCORED.replace("1.5", '"good"'),
            None,
            r"test.jsonl:2: label 'good': expected a number",
        ),
        (SCORED + SCORED.replace("1.5", "NaN"), None, r"test.jsonl:2: .*(NaN|nan)"),
        (SCORED + CLASS, None, r"test.jsonl:2: no key `text_pair`"),
        (SCORED * 3, None, r"test.jsonl: found the score 1.5 in all rows"),
        (
            '{"tokens": ["a"], "tags": ["O"]}\n',
            None,
            r"test.jsonl: found rows with tokens, tags, expected text, label",
        ),
        (CLASS, "", r"train.jsonl: found no example, expected at least two"),
        (CLASS, CLASS * 9, r"train.jsonl: found the class 1 in all rows, expected at least two"),
    ],
)
def test_unusable_sets(test, train, message):
    directory = Path(write_files(Path("set"), {"test.jsonl": test, "train.jsonl": train}))
    assert probes.is_labelled_set(directory)
    with pytest.raises(InputError, match=message):
        probes.load_labelled_set("set", directory)


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_scores_of_a_table_and_equal_cosines(models):
    Path("pairs.tsv").write_text(
        "text\ttext_pair\tlabel\nLyon\tLyon\t4\nbook\tbook\t2.5\nman\tman\t3.0\n"
    )
    task = probes.load_labelled_set("pairs", Path("pairs.tsv"))
    assert (task.metric, task.examples, task.chance) == ("spearman", 3, 0)
    embedder = load_embedder(models["encoder"])
    embedder.embed = lambda rows, *args, **options: torch.ones(len(rows), 4)
    with pytest.raises(InputError, match=r"spearman of pairs is undefined"):
        task.evaluate("tiny", embedder)
