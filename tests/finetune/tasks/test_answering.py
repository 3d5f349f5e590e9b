"""SQuAD's rules and the study's overlap on cases worked out by hand."""

import numpy as np
import pytest

from megaenc.finetune.tasks.question_answering import (
    exact_match,
    find_best_span,
    normalize_answer,
    position_f1,
    token_f1,
)


@pytest.mark.parametrize(
    ("gold", "predicted", "score"),
    [
        ({3, 4, 5}, {3, 4, 5}, 1.0),
        ({3, 4, 5}, {5, 6}, 0.4),  # precision 1/2, recall 1/3
        ({3, 4, 5}, {6}, 0.0),
        (set(), set(), 1.0),
        (set(), {0, 1}, 2 / 3),  # the empty set stands as {0}
    ],
)
def test_overlap_of_positions(gold, predicted, score):
    assert position_f1(gold, predicted) == pytest.approx(score)


def test_never_answering_on_the_published_balance_of_squad_v2():
    golds = [set()] * 5945 + [{9, 10}] * (11873 - 5945)
    score = np.mean([position_f1(gold, set()) for gold in golds])
    assert score == 5945 / 11873 and f"{100 * score:.2f}" == "50.07"


@pytest.mark.parametrize(
    ("golds", "predicted", "exact", "f1"),
    [
        (["the Eiffel Tower"], "Eiffel tower.", 1, 1),
        (["Paris", "the city of Paris"], "City of Paris", 1, 1),  # the best of all golds
        (["to be or not to be"], "to to to", 0, 4 / 9),  # two of its three are in the gold
        ([], "", 1, 1),
        ([], "the", 1, 1),  # nothing is left of it
        (["the"], "", 1, 1),  # a gold of which nothing is left is none
        (["the", "x"], "", 0, 0),  # unless there is another
        (["e-mail"], "e mail", 0, 0),  # punctuation is removed, not replaced
        (["  a  man "], "an\tman", 1, 1),
        (["¿qué?"], "qué", 0, 0),  # only ASCII punctuation
    ],
)
def test_squad_by_hand(golds, predicted, exact, f1):
    assert exact_match(golds, predicted) == exact
    assert token_f1(golds, predicted) == pytest.approx(f1)


def test_the_best_span_is_the_surest_run():
    assert find_best_span(np.array([-1.0, 0.5, 0.7, -3, 2.0, -1])) == (4, 5)
    assert find_best_span(np.array([1.0, -1, 1.0])) == (0, 1)
    assert find_best_span(np.array([3.0, 1.0])) == (0, 2)
    assert find_best_span(np.array([-1.0, 0.0])) is None


def test_the_example_of_the_documentation():
    assert position_f1({12, 13}, {11, 12, 13}) == pytest.approx(0.8) and position_f1((), {7}) == 0
    golds = ["Paris", "in Paris"]
    predicted = "the city Paris"
    assert normalize_answer(predicted) == "city paris"
    assert exact_match(golds, predicted) == 0 and token_f1(golds, predicted) == pytest.approx(2 / 3)
