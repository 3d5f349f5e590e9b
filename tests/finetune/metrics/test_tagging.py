"""F1 of tags against scikit-learn, F1 of spans against seqeval, and votes by hand."""

import numpy as np
import pytest
import seqeval.metrics
from sklearn.metrics import f1_score

from megaenc.finetune.tasks.token_classification import count_spans, majority_vote, parse_spans, span_f1, tag_f1

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-A-B", "I-A-B"]


def sentences(seed: int, *weights: float) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.choice(len(TAGS), length, p=weights or None) for length in random.integers(1, 30, 200)]


def noisy(gold: list[np.ndarray], share: float) -> list[np.ndarray]:
    random = np.random.default_rng(9)
    return [np.where(random.random(len(row)) < share, random.integers(0, len(TAGS), len(row)), row) for row in gold]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_tag_f1_as_scikit_learn_has_it(share):
    gold = sentences(1)
    predicted = noisy(gold, share)
    pairs = zip(gold, predicted, strict=True)
    assert tag_f1(gold, predicted) == pytest.approx([f1_score(a, b, average="macro", zero_division=0) for a, b in pairs])


def test_tag_f1_by_hand():
    # O: 2 of 2 found with 1 too many, F1 4/5; tag 1: 1 of 2, F1 2/3; tag 2 is in neither.
    assert tag_f1([np.array([0, 1, 1, 0])], [np.array([0, 0, 1, 0])]).tolist() == [pytest.approx((4 / 5 + 2 / 3) / 2)]
    assert tag_f1([np.array([0, 0])], [np.array([0, 0])]).tolist() == [1.0]
    assert tag_f1([np.array([0])], [np.array([3])]).tolist() == [0.0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_span_f1_as_seqeval_has_it(share):
    """Random tags break IOB2 everywhere: an I after O, an I of another type after a B."""
    gold = sentences(2, 0.5, 0.1, 0.15, 0.1, 0.1, 0.02, 0.03)
    predicted = noisy(gold, share)
    named = [[[TAGS[tag] for tag in row] for row in side] for side in (gold, predicted)]
    found = span_f1(count_spans(*named))
    assert found["span_f1"] == pytest.approx(seqeval.metrics.f1_score(*named, zero_division=0), abs=1e-12)
    assert found["span_precision"] == pytest.approx(seqeval.metrics.precision_score(*named, zero_division=0), abs=1e-12)
    assert found["span_recall"] == pytest.approx(seqeval.metrics.recall_score(*named, zero_division=0), abs=1e-12)


def test_spans_by_hand():
    assert parse_spans(["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER", "I-PER"]) == {
        ("PER", 0, 1),
        ("LOC", 3, 3),
        ("LOC", 4, 4),
        ("PER", 5, 6),
    }
    nothing = [["O", "O"]]
    assert span_f1(count_spans(nothing, nothing)) == {"span_f1": 0.0, "span_precision": 0.0, "span_recall": 0.0}


def test_sub_tokens_vote():
    #                word 0        word 1   word 2 none  word 3: a tie of 5 and 1, 5 comes first
    words = np.array([0, 0, 0, 1, 3, 3, 3, 3])
    tags = np.array([2, 1, 1, 4, 5, 1, 1, 5])
    assert majority_vote(words, tags, count=5, absent=7).tolist() == [1, 4, 7, 5, 7]
    assert majority_vote(words[:0], tags[:0], count=2, absent=0).tolist() == [0, 0]


def test_votes_against_a_loop():
    random = np.random.default_rng(3)
    for _ in range(50):
        words = np.sort(random.integers(0, 12, 40))
        tags = random.integers(0, 4, 40)
        expected = []
        for word in range(12):
            own = tags[words == word].tolist()
            expected.append(max(own, key=lambda tag: (own.count(tag), -own.index(tag))) if own else 9)
        assert majority_vote(words, tags, 12, 9).tolist() == expected


def test_the_example_of_the_documentation():
    gold = [["B-PER", "I-PER", "O", "O", "B-LOC", "O"], ["O", "O"]]
    predicted = [["B-PER", "O", "O", "O", "B-LOC", "O"], ["O", "O"]]
    numbers = [[np.array([TAGS.index(tag) for tag in row]) for row in side] for side in (gold, predicted)]
    assert tag_f1(*numbers).mean() == pytest.approx(0.857, abs=5e-4)
    assert span_f1(count_spans(gold, predicted)) == {"span_f1": 0.5, "span_precision": 0.5, "span_recall": 0.5}
