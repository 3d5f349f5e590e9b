"""Retrieval measures against scikit-learn, published values and trec_eval.

Chance is checked by counting.
"""

from itertools import permutations

import ir_measures
import numpy as np
import pytest
from ir_measures import RR, R, nDCG
from sklearn.metrics import ndcg_score

from megaenc.finetune.tasks.retrieval import (
    compute_query_baseline,
    compute_random_baseline,
    compute_trec_order,
    ndcg,
    rank_top_documents,
    recall,
    reciprocal_rank,
    retrieved_ndcg,
)


def positives(*ranks: int) -> np.ndarray:
    return np.isin(np.arange(1, 11), ranks)


def test_values_that_the_study_published():
    """Found among the `scores_i` of its results for MS MARCO and NQ."""
    falling = -np.arange(10.0)
    for ranks, value in [
        ((2,), 0.6309297535714573),
        ((1, 3), 0.9197207891481877),
        ((5, 6, 8), 0.49674320298648783),
    ]:
        assert retrieved_ndcg(positives(*ranks), falling) == pytest.approx(value, rel=1e-12)
    assert retrieved_ndcg(positives(), falling) == 0
    assert retrieved_ndcg(positives(1), falling) == 1  # whatever else there is to find


@pytest.mark.parametrize("different", [2, 1000])
def test_ndcg_of_the_study_as_scikit_learn_has_it(different):
    """Few different scores: many ties."""
    random = np.random.default_rng(5)
    for length in [2, 3, 7, 10] * 20:
        scores = np.sort(random.integers(0, different, length))[::-1] / different
        relevant = random.random(length) < 0.3
        assert retrieved_ndcg(relevant, scores) == pytest.approx(
            ndcg_score([relevant], [scores]), abs=1e-12
        )
    scores = -np.arange(30.0)
    relevant = random.random(30) < 0.3
    assert retrieved_ndcg(relevant, scores) == pytest.approx(
        ndcg_score([relevant[:10]], [scores[:10]])
    )


@pytest.mark.parametrize("different", [3, 10**6])
def test_as_trec_eval_has_it(different):
    """Graded judgements, ties, relevant documents outside the corpus, empty results."""
    random = np.random.default_rng(6)
    names = [f"{'dD'[n % 2]}{n}{'é' * (n % 3)}" for n in range(250)]
    in_order = [names[at] for at in compute_trec_order(names)]
    qrels = {}
    run = {}
    found = {}
    for query in map(str, range(40)):
        # Single precision, as trec_eval has it.
        scores = dict(
            zip(
                names,
                (random.integers(0, different, 250) / np.float32(different)).tolist(),
                strict=True,
            )
        )
        judged = random.choice([*names, "elsewhere"], random.integers(1, 20), replace=False)
        qrels[query] = {str(name): int(random.integers(1, 4)) for name in judged}
        run[query] = scores
        best = rank_top_documents(
            np.array([scores[name] for name in in_order], dtype=np.float32), 100
        )
        assert len(best) == 100
        grades = np.array([qrels[query].get(in_order[at], 0) for at in best])
        all_grades = list(qrels[query].values())
        found[query] = (
            ndcg(grades, all_grades),
            reciprocal_rank(grades),
            recall(grades, len(all_grades)),
        )
    measures = [nDCG @ 10, RR, R @ 100]
    for value in ir_measures.pytrec_eval.iter_calc(measures, qrels, run):
        # trec_eval's goes on after the tenth
        expected = 0 if value.measure == RR and value.value < 1 / 10 else value.value
        assert found[value.query_id][measures.index(value.measure)] == pytest.approx(
            expected, abs=1e-9
        ), value


def count_every_order(documents, present, all_grades):
    """Return the mean of each measure over all rankings of a corpus.

    Only the documents of `present` are relevant.
    """
    found = []
    for order in permutations([*present, *[0] * (documents - len(present))]):
        grades = np.array(order)
        study = retrieved_ndcg(grades > 0, -np.arange(documents))
        found.append(
            [
                study,
                ndcg(grades, all_grades),
                reciprocal_rank(grades),
                recall(grades, len(all_grades)),
            ]
        )
    return pytest.approx(
        dict(zip(("score", "ndcg@10", "mrr@10", "recall@100"), np.mean(found, axis=0), strict=True))
    )


@pytest.mark.parametrize(("documents", "grades"), [(6, (1, 1, 3)), (5, (2, 1)), (4, (1, 1, 1, 1))])
def test_chance_by_counting_every_order(documents, grades):
    assert compute_random_baseline(documents, grades) == count_every_order(
        documents, grades, grades
    )


def test_chance_with_relevant_documents_that_are_not_in_the_corpus():
    expected = count_every_order(5, (1, 2), (1, 2, 3))
    grade_of = {"a": 1, "b": 2, "gone": 3}
    assert compute_query_baseline(grade_of, set("abcde"), None) == expected
    assert compute_query_baseline(grade_of, {*"abcde", "query"}, "query") == expected
    assert set(compute_query_baseline({"gone": 1}, {"query"}, "query").values()) == {0}


def test_chance_in_a_corpus_that_is_longer_than_what_is_looked_at():
    random = np.random.default_rng(8)
    relevant = np.arange(300) < 7
    drawn = []
    for _ in range(5_000):
        order = random.permutation(relevant)
        drawn.append(
            [
                retrieved_ndcg(order, -np.arange(300)),
                ndcg(order, [1] * 7),
                reciprocal_rank(order),
                recall(order, 7),
            ]
        )
    drawn = np.array(drawn)
    expected = list(compute_random_baseline(300, (1,) * 7).values())
    assert (
        np.abs(drawn.mean(axis=0) - expected).max()
        < 4 * (drawn.std(axis=0) / np.sqrt(len(drawn))).max()
    )


def test_the_example_of_the_documentation():
    grades = np.array([0, 3, 0, 1, 0, 0, 0, 0, 0, 0])
    all_grades = (3, 1, 2)
    assert retrieved_ndcg(grades > 0, -np.arange(10.0)) == pytest.approx(0.651, abs=5e-4)
    assert ndcg(grades, all_grades) == pytest.approx(0.488, abs=5e-4)
    assert reciprocal_rank(grades) == 1 / 2 and recall(grades, 3) == 2 / 3
    chance = compute_random_baseline(1000, all_grades)
    assert [round(value, 3) for value in chance.values()] == [0.014, 0.006, 0.009, 0.1]
