"""Token classification: the study's F1 of tags, sentence by sentence, and the field's F1 of spans."""

from collections.abc import Sequence

import numpy as np


def majority_vote(words: np.ndarray, tags: np.ndarray, count: int, absent: int) -> np.ndarray:
    """int64[count]: the tag of each word, which most of its sub-tokens have; of equals, the one that comes first.

    `words` is int[sub-tokens], ascending, the word of each; `tags` is int[sub-tokens]. Words without a sub-token get `absent`.
    """
    voted = np.full(count, absent, dtype=np.int64)
    if len(words):
        votes = np.zeros((count, int(tags.max()) + 1), dtype=np.int64)
        np.add.at(votes, (words, tags), 1)
        winners = np.flatnonzero(votes[words, tags] == votes.max(axis=1)[words])
        with_one, first = np.unique(words[winners], return_index=True)
        voted[with_one] = tags[winners][first]
    return voted


def tag_f1(gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray]) -> np.ndarray:
    """float64[sentences], the study's score: F1 of each tag, O included, averaged over the tags that gold or prediction has.

    The same as scikit-learn's `f1_score(gold, predicted, average="macro", zero_division=0)` on the words of one sentence.
    """
    scores = np.zeros(len(gold))
    for at, (right, found) in enumerate(zip(gold, predicted, strict=True)):
        size = int(max(right.max(), found.max())) + 1
        in_gold, in_found = np.bincount(right, minlength=size), np.bincount(found, minlength=size)
        hits = np.bincount(right[right == found], minlength=size)
        present = in_gold + in_found > 0
        scores[at] = (2 * hits[present] / (in_gold + in_found)[present]).mean()
    return scores


def spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of each span of IOB2 tags, as seqeval and conlleval read them.

    A span starts at a B, and also at an I whose word before is outside or of another type.
    """
    found, open_type, start = set(), None, 0
    for at, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        goes_on = prefix == "I" and kind == open_type
        if open_type is not None and not goes_on:
            found.add((open_type, start, at - 1))
            open_type = None
        if prefix in ("B", "I") and not goes_on:
            open_type, start = kind, at
    return found


def span_counts(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> np.ndarray:
    """int64[sentences, 3]: spans that are right in type and both ends, spans predicted, spans there are."""
    rows = []
    for right, found in zip(gold, predicted, strict=True):
        in_gold, in_found = spans(right), spans(found)
        rows.append((len(in_gold & in_found), len(in_found), len(in_gold)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def span_f1(counts: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 over the spans of all sentences together, as seqeval's micro average; 0 for a division by 0.

    `counts` is what span_counts returned.
    """
    right, found, there = (int(number) for number in counts.sum(axis=0))
    return {
        "span_f1": 2 * right / (found + there) if found + there else 0.0,
        "span_precision": right / found if found else 0.0,
        "span_recall": right / there if there else 0.0,
    }
