"""BM25 against its formula, random rankings by counting, intervals against scipy."""

import math
from itertools import permutations

import numpy as np
import pytest
import scipy.stats

from megaenc.embed.evaluate import RetrievalSet, bootstrap_mean, rank_by_bm25
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import load_beir_test


def silent(done):
    pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"corpus.jsonl": None},
            r"no corpus.jsonl, expected BEIR's corpus.jsonl, queries.jsonl and qrels/test.tsv",
        ),
        ({"qrels/test.tsv": None}, r"no qrels/test.tsv, expected BEIR's"),
        (
            {"qrels/test.tsv": "query-id\tcorpus-id\tscore\n"},
            r"test.tsv: found no score above 0, expected a relevant document",
        ),
        (
            {"qrels/test.tsv": "q1\td9\t1\n"},
            r"test.tsv: found none of the 1 relevant documents in corpus.jsonl, expected",
        ),
        (
            {"qrels/test.tsv": "q1\td1\t1\nq9\td1\t1\nq9\td2\t1\n"},
            r"test.tsv:2: query 'q9': not in queries.jsonl",
        ),
        (
            {"queries.jsonl": "".join(f'{{"_id": "q{n}", "text": " "}}\n' for n in range(5))},
            r"query 'q1': found an empty text",
        ),
    ],
)
def test_unusable_directories(beir, changed, message):
    with pytest.raises(InputError, match=message):
        load_beir_test(beir(changed=changed))


def lucene_bm25(query: str, documents: list[str]) -> list[float]:
    """Compute Lucene's formula on words."""
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
    words = np.array(
        ["bad", "cat", "dog", "egg", "fig", "gum", "hat", "ink", "jug", "kid", "lid", "mud"]
    )  # their own stems
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
    found = [
        ranking.tolist()
        for ranking in rank_by_bm25(
            ["walking rivers!", "cats", "of the", "a DOG"], documents, silent
        )
    ]
    assert sorted(found[0]) == [0, 1] and found[1:] == [[], [], [2]]
    assert [ranking.tolist() for ranking in rank_by_bm25(["walks"], ["", "the"], silent)] == [[]]


def test_the_random_ranking_is_the_mean_over_all_orders():
    relevant = [{"a": 3, "b": 1}, {"c": 1}]
    data = RetrievalSet("x", ["", ""], [""] * 5, list("abcde"), relevant)
    orders = [np.array(order) for order in permutations(range(5))]
    counted = [
        RetrievalSet("x", [""] * 120, [""] * 5, list("abcde"), [grades] * 120).score(iter(orders))
        for grades in relevant
    ]
    for metric, values in data.score_random_ranking().items():
        assert values == pytest.approx([scores[metric].mean() for scores in counted])


def test_intervals_are_scipys():
    values = np.random.default_rng(8).random(80) ** 3
    low, high = bootstrap_mean(values)
    reference = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", rng=1
    ).confidence_interval
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.004)
    assert (low, high) == bootstrap_mean(values)
    assert high - low > 0.05
