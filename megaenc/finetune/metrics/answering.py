"""Question answering: the study's overlap of sub-token positions, and the exact match and F1 of SQuAD's official script."""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def position_f1(gold: Collection[int], predicted: Collection[int]) -> float:
    """The study's score: F1 of two sets of sub-token positions, where an empty set stands as {0}.

    So a question without an answer scores 1 when none is predicted, and 0 when one is (position 0 is part of the question).
    """
    right, found = set(gold) or {0}, set(predicted) or {0}
    return 2 * len(right & found) / (len(right) + len(found))


def normalised(answer: str) -> str:
    """As SQuAD's script compares answers: lower case, no ASCII punctuation, no articles, words joined by single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(golds: Sequence[str], predicted: str) -> float:
    """1 if `predicted` is one of `golds` once both are normalised; without golds, 1 if it is empty. SQuAD v2's rules."""
    return float(normalised(predicted) in [normalised(gold) for gold in _comparable(golds)])


def token_f1(golds: Sequence[str], predicted: str) -> float:
    """F1 of the words that `predicted` shares with a gold answer, the best of all golds. SQuAD v2's rules.

    Where either has no words, 1 if both have none, else 0.
    """
    return max(_token_f1(normalised(gold).split(), normalised(predicted).split()) for gold in _comparable(golds))


def _comparable(golds: Sequence[str]) -> Sequence[str]:
    return [gold for gold in golds if normalised(gold)] or [""]


def _token_f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    shared = (Counter(gold) & Counter(predicted)).total()
    return 2 * shared / (len(gold) + len(predicted))


def best_span(log_odds: np.ndarray) -> tuple[int, int] | None:
    """(first, one past the last) of the run of sub-tokens that are inside with the largest mean log-odds; None if none is inside.

    `log_odds` is float[sub-tokens of the context]: the score of inside less that of outside, so inside is above 0. Of equals the
    first counts.
    """
    inside = np.concatenate([[False], log_odds > 0, [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1]).reshape(-1, 2)
    if not len(edges):
        return None
    best = max(range(len(edges)), key=lambda run: (log_odds[edges[run, 0] : edges[run, 1]].mean(), -run))
    return int(edges[best, 0]), int(edges[best, 1])
