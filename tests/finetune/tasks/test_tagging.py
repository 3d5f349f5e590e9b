"""F1 of tags against scikit-learn, of spans against seqeval; votes against a loop."""

import numpy as np
import pytest
import seqeval.metrics
from sklearn.metrics import f1_score

from megaenc.finetune.tasks.token_classification import count_spans, majority_vote, span_f1, tag_f1

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-A-B", "I-A-B"]


def sentences(seed: int, *weights: float) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        random.choice(len(TAGS), length, p=weights or None)
        for length in random.integers(1, 30, 200)
    ]


def noisy(gold: list[np.ndarray], share: float) -> list[np.ndarray]:
    random = np.random.default_rng(9)
    return [
        np.where(random.random(len(row)) < share, random.integers(0, len(TAGS), len(row)), row)
        for row in gold
    ]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_tag_f1_as_scikit_learn_has_it(share):
    gold = sentences(1)
    predicted = noisy(gold, share)
    pairs = zip(gold, predicted, strict=True)
    assert tag_f1(gold, predicted) == pytest.approx(
        [f1_score(a, b, average="macro", zero_division=0) for a, b in pairs]
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_span_f1_as_seqeval_has_it(share):
    """Random tags break IOB2 everywhere: an I after O, an I of another type after a B."""
    gold = sentences(2, 0.5, 0.1, 0.15, 0.1, 0.1, 0.02, 0.03)
    predicted = noisy(gold, share)
    named = [[[TAGS[tag] for tag in row] for row in side] for side in (gold, predicted)]
    found = span_f1(count_spans(*named))
    assert found["span_f1"] == pytest.approx(
        seqeval.metrics.f1_score(*named, zero_division=0), abs=1e-12
    )
    assert found["span_precision"] == pytest.approx(
        seqeval.metrics.precision_score(*named, zero_division=0), abs=1e-12
    )
    assert found["span_recall"] == pytest.approx(
        seqeval.metrics.recall_score(*named, zero_division=0), abs=1e-12
    )


def test_without_a_span_there_is_no_f1():
    nothing = [["O", "O"]]
    assert span_f1(count_spans(nothing, nothing)) == {
        "span_f1": 0.0,
        "span_precision": 0.0,
        "span_recall": 0.0,
    }


def test_votes_against_a_loop():
    random = np.random.default_rng(3)
    for _ in range(50):
        words = np.sort(random.integers(0, 12, 40))
        tags = random.integers(0, 4, 40)
        expected = []
        for word in range(12):
            own = tags[words == word].tolist()
            expected.append(
                max(own, key=lambda tag: (own.count(tag), -own.index(tag))) if own else 9
            )
        assert majority_vote(words, tags, 12, 9).tolist() == expected


def test_the_example_of_the_documentation():
    gold = [["B-PER", "I-PER", "O", "O", "B-LOC", "O"], ["O", "O"]]
    predicted = [["B-PER", "O", "O", "O", "B-LOC", "O"], ["O", "O"]]
    numbers = [
        [np.array([TAGS.index(tag) for tag in row]) for row in side] for side in (gold, predicted)
    ]
    assert tag_f1(*numbers).mean() == pytest.approx(0.857, abs=5e-4)
    assert span_f1(count_spans(gold, predicted)) == {
        "span_f1": 0.5,
        "span_precision": 0.5,
        "span_recall": 0.5,
    }
