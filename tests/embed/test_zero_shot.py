"""Rankings against trec_eval, BM25 against its formula, the random ranking against counting, intervals against scipy."""

import math
from itertools import permutations

import ir_measures
import numpy as np
import pytest
import scipy.stats
import torch
from ir_measures import R, nDCG
from torch.nn.functional import normalize

from megaenc.embed import evaluate
from megaenc.embed.evaluate import RetrievalSet, bootstrap_mean, build_rows, rank_by_bm25, rank_by_cosine
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import load_beir_test
from megaenc.finetune.tasks import retrieval


def silent(done):
    pass


def test_a_folder_is_read_whole_and_without_prefixes(beir):
    data = RetrievalSet.load("x", beir())
    assert data.queries == ["who walks to a river?", "letters from LYON", "yellow flowers in the garden"]
    assert data.relevant == [{"d1": 1}, {"d3": 2, "d6": 1}, {"d5": 1, "d2": 1}]
    assert data.document_ids == ["d6", "d5", "d4", "d3", "d2", "d1"]  # as trec_eval orders equal scores
    assert data.documents[2] == "" and data.documents[1] == "Flowers Yellow flowers behind the house."


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corpus": None}, r"no corpus.jsonl, expected BEIR's corpus.jsonl, queries.jsonl and qrels/test.tsv"),
        ({"queries": None}, r"no queries.jsonl, expected BEIR's"),
        ({"qrels": None}, r"no qrels/test.tsv, expected BEIR's"),
        ({"qrels": "query-id\tcorpus-id\tscore\n"}, r"test.tsv: found no score above 0, expected a relevant document"),
        ({"qrels": "q1\td1\t0\n"}, r"test.tsv: found no score above 0"),
        ({"qrels": "q1\td9\t1\n"}, r"test.tsv: found none of the 1 relevant documents in corpus.jsonl, expected"),
        ({"qrels": "q1\td1\t1\nq9\td1\t1\n"}, r"test.tsv:2: query 'q9': not in queries.jsonl"),
        ({"queries": ""}, r"test.tsv:\d+: query 'q\d': not in queries.jsonl"),
        ({"queries": "".join(f'{{"_id": "q{n}", "text": " "}}\n' for n in range(5))}, r"query 'q1': found an empty text"),
    ],
)
def test_unusable_folders(beir, changed, message):
    with pytest.raises(InputError, match=message):
        load_beir_test(beir(**changed))


@pytest.mark.parametrize("block", [1, 700, 1 << 24])
def test_cosines_are_ranked_as_by_trec_eval(monkeypatch, block):
    """Graded judgements, ties, several blocks of queries."""
    monkeypatch.setattr(retrieval, "_MAX_COSINES", block)
    random = np.random.default_rng(2)
    ids = sorted((f"d{n}" for n in range(300)), reverse=True)
    # Few different vectors: many documents have the same cosine.
    queries, documents = (
        normalize(torch.from_numpy(random.integers(-1, 2, (count, 5)).astype(np.float32)), dim=1) for count in (20, 300)
    )
    relevant = [{ids[at]: int(random.integers(1, 4)) for at in random.choice(300, random.integers(1, 9))} for _ in range(20)]
    data = RetrievalSet("x", [""] * 20, [""] * 300, ids, relevant)
    values = data.score(rank_by_cosine(queries, documents, silent))
    cosines = (queries @ documents.T).numpy()
    run = {f"{n}": dict(zip(ids, row.tolist(), strict=True)) for n, row in enumerate(cosines)}
    qrels = {f"{n}": grades for n, grades in enumerate(relevant)}
    expected = {nDCG @ 10: values["ndcg@10"], R @ 100: values["recall@100"]}
    count = 0
    for value in ir_measures.pytrec_eval.iter_calc(list(expected), qrels, run):
        assert expected[value.measure][int(value.query_id)] == pytest.approx(value.value, abs=1e-9)
        count += 1
    assert count == 40 and 0 < values["ndcg@10"].mean() < 1


def test_progress_counts_the_queries():
    done = []
    vectors = normalize(torch.randn(4, 3), dim=1)
    list(rank_by_cosine(vectors, vectors, done.append))
    assert done == [1, 2, 3, 4]


def lucene_bm25(query: str, documents: list[str]) -> list[float]:
    """Lucene's formula on words."""
    words = [document.split() for document in documents]
    mean = sum(map(len, words)) / len(words)
    scores = [0.0] * len(words)
    for word in query.split():
        frequency = sum(word in of_document for of_document in words)
        idf = math.log(1 + (len(words) - frequency + 0.5) / (frequency + 0.5))
        for at, of_document in enumerate(words):
            count = of_document.count(word)
            scores[at] += idf * count / (count + 1.2 * (1 - 0.75 + 0.75 * len(of_document) / mean))
    return scores


def test_bm25_is_lucenes():
    random = np.random.default_rng(4)
    words = np.array(["bad", "cat", "dog", "egg", "fig", "gum", "hat", "ink", "jug", "kid", "lid", "mud"])  # their own stems
    documents = [" ".join(random.choice(words, random.integers(1, 30))) for _ in range(120)]
    queries = [" ".join(random.choice(words, 3, replace=False)) for _ in range(20)]
    done = []
    for query, best in zip(queries, rank_by_bm25(queries, documents, done.append), strict=True):
        scores = np.array(lucene_bm25(query, documents))
        assert len(best) == min(101, np.count_nonzero(scores))  # one may be the query itself
        np.testing.assert_allclose(scores[best], np.sort(scores)[::-1][: len(best)], rtol=1e-5)
    assert done == [*range(1, 21)]


def test_bm25_knows_english_and_retrieves_nothing_without_a_common_word():
    documents = ["The river walked", "rivers and walks", "dogs", "", "of the"]
    found = [ranking.tolist() for ranking in rank_by_bm25(["walking rivers!", "cats", "of the", "a DOG"], documents, silent)]
    assert sorted(found[0]) == [0, 1] and found[1:] == [[], [], [2]]
    assert [ranking.tolist() for ranking in rank_by_bm25(["walks"], ["", "the"], silent)] == [[]]


def test_the_random_ranking_is_the_mean_over_all_orders():
    relevant = [{"a": 3, "b": 1}, {"c": 1}]
    data = RetrievalSet("x", ["", ""], [""] * 5, list("abcde"), relevant)
    orders = [np.array(order) for order in permutations(range(5))]
    counted = [RetrievalSet("x", [""] * 120, [""] * 5, list("abcde"), [grades] * 120).score(iter(orders)) for grades in relevant]
    for metric, values in data.score_random_ranking().items():
        assert values == pytest.approx([scores[metric].mean() for scores in counted])


def test_a_document_with_the_id_of_the_query_is_left_out_unless_it_is_relevant():
    data = RetrievalSet("x", ["", ""], [""] * 3, list("cba"), [{"b": 1}, {"b": 1}], ["a", "b"])
    rankings = [np.array([2, 1, 0]), np.array([2, 1, 0])]
    assert data.score(iter(rankings))["ndcg@10"] == pytest.approx([1, 1 / math.log2(3)])
    assert data.score_random_ranking()["ndcg@10"] == pytest.approx([
        (1 + 1 / math.log2(3)) / 2, (1 + 1 / math.log2(3) + 1 / 2) / 3
    ])  # fmt: skip


def test_intervals_are_scipys():
    values = np.random.default_rng(8).random(80) ** 3
    low, high = bootstrap_mean(values)
    reference = scipy.stats.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.004)
    assert (low, high) == bootstrap_mean(values)
    assert high - low > 0.05


def test_rows_are_percent_and_one_query_has_no_interval():
    data = RetrievalSet("x", ["", ""], [""] * 5, list("abcde"), [{"a": 1}, {"b": 1}])
    [row] = build_rows(data, "m", {"ndcg@10": np.array([0.0, 1.0])})
    assert (row.dataset, row.model, row.metric, row.mean, row.low, row.high) == ("x", "m", "ndcg@10", 50, 0, 100)
    assert (row.queries, row.documents) == (2, 5)
    for values, interval in ((np.array([0.5]), True), (np.array([0.5, 0.7]), False)):
        [row] = build_rows(data, "m", {"ndcg@10": values}, interval=interval)
        assert row.low is None and row.high is None


def test_without_bm25s_one_line_says_how_to_go_on(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(InputError, match=r"BM25 needs the package bm25s: `pip install bm25s`, or .* --no-bm25"):
        evaluate.import_bm25s()
