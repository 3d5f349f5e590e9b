"""Token classification: every sub-token says the tag of its word, and a word's sub-tokens vote."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.finetune.examples import TaggedWords, TaskFamily
from megaenc.finetune.tasks.base import IGNORE_INDEX, FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts, concatenate_rows


class TokenClassification(FinetuneTask):
    """Cross-entropy of the tags, the mean over the batch's sub-tokens without BOS and EOS.

    Words are joined by single spaces and tokenised together. A sub-token belongs to the first word that ends after its first
    character, so that a space counts with the word behind it. Words that were cut off, or left no sub-token, are predicted O.
    """

    family: ClassVar[TaskFamily] = TaskFamily.TC

    def encode(self, examples: list[TaggedWords], encoder: TextEncoder) -> TokenizedTexts:
        """Return rows of the sentences; by token: `words`, int32[N], place in the sentence or -1; `tags`, int64[N], or -100."""
        rows, words, tags, truncated = [], [], [], 0
        sentences = [[replace_surrogates(word) for word in example.words] for example in examples]
        encoded = encoder.encode_with_offsets([" ".join(sentence) for sentence in sentences])
        for example, sentence, (tokens, offsets) in zip(examples, sentences, encoded, strict=True):
            ends = np.cumsum([len(word) + 1 for word in sentence]) - 1
            # A token of trailing white space alone is behind every word.
            owners = np.searchsorted(ends, offsets[:, 0], side="right")
            owners = np.where(owners < len(sentence), owners, -1)
            truncated += len(tokens) > encoder.max_text_tokens
            rows.append(encoder.add_special_tokens(tokens))
            words.append(encoder.align_to_row(owners, -1))
            tags.append(np.where(words[-1] < 0, IGNORE_INDEX, np.asarray(example.tags)[words[-1]]))
        return TokenizedTexts.from_rows(
            rows, truncated, words=concatenate_rows(words, np.int32), tags=concatenate_rows(tags, np.int64)
        )

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the tags."""
        return data.gather_token_column("tags", rows)

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[TaggedWords]) -> Scores:
        """See Task. The baseline is the tag that each word has most often in the training set."""
        outside = self.dataset.labels.index("O") if "O" in self.dataset.labels else 0
        predicted: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(data)
        for row, logits in self.predict_texts(model, data):
            words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
            known = words >= 0
            tags = logits.argmax(1)[known]
            predicted[row] = majority_vote(words[known], tags, len(examples[row].words), outside)
        gold = [np.array(example.tags) for example in examples]
        by_word, otherwise = self._most_frequent
        usual = [np.array([by_word.get(word, otherwise) for word in example.words]) for example in examples]
        labels = self.dataset.labels
        gold_names, names, usual_names = ([[labels[tag] for tag in tags] for tags in side] for side in (gold, predicted, usual))
        counts = count_spans(gold_names, names)
        baseline = {"score": float(tag_f1(gold, usual).mean()), **span_f1(count_spans(gold_names, usual_names))}
        return Scores.from_examples(
            tag_f1(gold, predicted),
            dict(zip(("spans_right", "spans_predicted", "spans_there"), counts.T, strict=True)),
            collapsed=self.describe_constant_prediction(np.concatenate(predicted), np.concatenate(gold)),
            baseline=baseline,
            metrics=span_f1(counts),
        )

    @cached_property
    def _most_frequent(self) -> tuple[dict[str, int], int]:
        """The tag that each word of the training set has most often (of equals, the first met), and the one of all words."""
        tags_of, all_tags = defaultdict(Counter), Counter()
        for example in self.dataset.load_split("train"):
            for word, tag in zip(example.words, example.tags, strict=True):
                tags_of[word][tag] += 1
                all_tags[tag] += 1
        return {word: tags.most_common(1)[0][0] for word, tags in tags_of.items()}, all_tags.most_common(1)[0][0]


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


def parse_spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
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


def count_spans(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> np.ndarray:
    """int64[sentences, 3]: spans that are right in type and both ends, spans predicted, spans there are."""
    rows = []
    for right, found in zip(gold, predicted, strict=True):
        in_gold, in_found = parse_spans(right), parse_spans(found)
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
