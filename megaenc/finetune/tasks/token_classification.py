"""Token classification by a tag of each sub-token, with a majority vote per word."""

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
    """FinetuneTask of token classification (TC) with a majority vote per word.

    The score is the mean over sentences of macro tag F1. Words are joined by single spaces and
    tokenized together. A sub-token belongs to the first word that ends after its first character,
    so a space belongs to the following word. Words that were cut off or have no sub-token are
    predicted O, or the first label if O is none; BOS and EOS have no loss.
    """

    family: ClassVar[TaskFamily] = TaskFamily.TC

    def encode(self, examples: list[TaggedWords], encoder: TextEncoder) -> TokenizedTexts:
        """Return tokenized sentences, with the word and tag of each token.

        Columns by token: `words`, int32[N], the index of its word in the sentence or -1; `tags`,
        int64[N], the tag index of its word (as in `examples`) or -100.
        """
        rows = []
        words = []
        tags = []
        truncated = 0
        sentences = [[replace_surrogates(word) for word in example.words] for example in examples]
        encoded = encoder.encode_with_offsets([" ".join(sentence) for sentence in sentences])
        for example, sentence, (tokens, offsets) in zip(examples, sentences, encoded, strict=True):
            ends = np.cumsum([len(word) + 1 for word in sentence]) - 1
            # A token of only trailing white space starts after all words.
            owners = np.searchsorted(ends, offsets[:, 0], side="right")
            owners = np.where(owners < len(sentence), owners, -1)
            truncated += len(tokens) > encoder.max_text_tokens
            rows.append(encoder.add_special_tokens(tokens))
            row_words = encoder.align_to_row(owners, -1)
            is_word = row_words >= 0
            row_tags = np.full(len(row_words), IGNORE_INDEX)
            row_tags[is_word] = np.array(example.tags)[row_words[is_word]]
            words.append(row_words)
            tags.append(row_tags)
        return TokenizedTexts.from_rows(
            rows,
            truncated,
            words=concatenate_rows(words, np.int32),
            tags=concatenate_rows(tags, np.int64),
        )

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the tag index of each token of the sentences `rows`, int64[tokens].

        Tokens of no word have -100.
        """
        return data.gather_token_column("tags", rows)

    def count_labels(self, data: TokenizedTexts) -> np.ndarray:
        """Return the number of words of each tag, int64[labels].

        Words that were cut off or have no sub-token do not count.
        """
        words = data.columns["words"]
        rows = np.repeat(np.arange(len(data)), data.lengths)
        known = np.flatnonzero(words >= 0)
        _, first = np.unique(np.stack([rows[known], words[known]]), axis=1, return_index=True)
        return np.bincount(data.columns["tags"][known[first]], minlength=self.output_count)

    def evaluate(
        self, model: TaskModel, data: TokenizedTexts, examples: list[TaggedWords]
    ) -> Scores:
        """Return the Scores of the model on a split, each from 0 to 1.

        The score is the mean tag F1 by sentence (`scores_i`), the metrics are those of `span_f1`;
        `metrics_i` has the counts of `count_spans`. The baseline, of score and metrics, is each
        word's most frequent tag in training, for other words the most frequent of all; the first
        call reads the training split. The model is left in eval mode.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
            InputError: The training split is invalid.
            DataUnavailable: A download of it failed for a temporary reason.
        """
        gold = [np.array(example.tags) for example in examples]
        predicted: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(data)
        for row, logits in self.predict_texts(model, data):
            predicted[row] = self.tag_words(logits, data, row, len(examples[row].words))
        counts = count_spans(self._name_tags(gold), self._name_tags(predicted))
        return Scores.from_examples(
            tag_f1(gold, predicted),
            dict(zip(_SPAN_COUNTS, counts.T, strict=True)),
            collapsed=self.describe_constant_prediction(
                np.concatenate(predicted), np.concatenate(gold)
            ),
            baseline=self._score_baseline(examples, gold),
            metrics=span_f1(counts),
        )

    def _score_baseline(
        self, examples: list[TaggedWords], gold: list[np.ndarray]
    ) -> dict[str, float]:
        """Return score and metrics of each word's most frequent training tag."""
        frequent_tag, default_tag = self._most_frequent_tags
        baseline_tags = [
            np.array([frequent_tag.get(word, default_tag) for word in example.words])
            for example in examples
        ]
        counts = count_spans(self._name_tags(gold), self._name_tags(baseline_tags))
        return {"score": float(tag_f1(gold, baseline_tags).mean()), **span_f1(counts)}

    def tag_words(
        self, logits: np.ndarray, data: TokenizedTexts, row: int, count: int
    ) -> np.ndarray:
        """Return the predicted tag index of each word of a sentence, int64[count].

        Args:
            logits: float[tokens, labels] of the sentence, special tokens included.
            row: Index of the sentence in `data`.
            count: Number of its words.
        """
        labels = self.dataset.labels
        # Data sets have the tag O; the labels in the config.json of another model may lack it.
        outside = labels.index("O") if "O" in labels else 0
        words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
        known = words >= 0
        return majority_vote(words[known], logits.argmax(1)[known], count, outside)

    def _name_tags(self, sentences: Sequence[np.ndarray]) -> list[list[str]]:
        return [[self.dataset.labels[tag] for tag in tags] for tags in sentences]

    @cached_property
    def _most_frequent_tags(self) -> tuple[dict[str, int], int]:
        """Return the most frequent tag of each training word, and that of all words.

        The first of equally frequent tags is returned.
        """
        tag_counts = defaultdict(Counter)
        all_tags = Counter()
        for example in self.dataset.load_split("train"):
            for word, tag in zip(example.words, example.tags, strict=True):
                tag_counts[word][tag] += 1
                all_tags[tag] += 1
        frequent_tag = {word: tags.most_common(1)[0][0] for word, tags in tag_counts.items()}
        default_tag = all_tags.most_common(1)[0][0]
        return frequent_tag, default_tag


def majority_vote(words: np.ndarray, tags: np.ndarray, count: int, absent: int) -> np.ndarray:
    """Return each word's most frequent sub-token tag, int64[count].

    Of equally frequent tags it is the one that comes first in the word.

    Args:
        words: int[sub-tokens], the ascending word index of each sub-token, from 0; tokens of no
            word are left out.
        tags: int[sub-tokens], the tag index of each sub-token.
        count: Number of words.
        absent: Tag index of words without a sub-token.
    """
    voted = np.full(count, absent, dtype=np.int64)
    if len(words):
        votes = np.zeros((count, int(tags.max()) + 1), dtype=np.int64)
        np.add.at(votes, (words, tags), 1)
        winners = np.flatnonzero(votes[words, tags] == votes.max(axis=1)[words])
        voted_words, first = np.unique(words[winners], return_index=True)
        voted[voted_words] = tags[winners][first]
    return voted


def tag_f1(gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray]) -> np.ndarray:
    """Return each sentence's macro F1 over tags in gold or prediction, O included.

    It is scikit-learn's `f1_score(gold, predicted, average="macro", zero_division=0)` on the words
    of one sentence: the study's score.

    Args:
        gold: Tag indices, int[words], of each sentence, at least one word in each.
        predicted: Tag indices of the same words.

    Returns:
        float64[sentences], from 0 to 1.
    """
    scores = np.zeros(len(gold))
    for index, (gold_tags, predicted_tags) in enumerate(zip(gold, predicted, strict=True)):
        counts = np.bincount(np.concatenate([gold_tags, predicted_tags]))
        hits = np.bincount(gold_tags[gold_tags == predicted_tags], minlength=len(counts))
        present = counts > 0
        scores[index] = (2 * hits[present] / counts[present]).mean()
    return scores


def _parse_spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the spans in the IOB2 tags of a sentence, by the rules of seqeval.

    A span starts at a B, and at an I that follows O or another type.

    Returns:
        (type, index of its first word, index of its last word) of each span, from 0.
    """
    spans = set()
    open_type = None
    start = 0
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, entity_type = tag.partition("-")
        is_continued = prefix == "I" and entity_type == open_type
        if open_type is not None and not is_continued:
            spans.add((open_type, start, index - 1))
            open_type = None
        if prefix in ("B", "I") and not is_continued:
            open_type = entity_type
            start = index
    return spans


_SPAN_COUNTS = ("spans_right", "spans_predicted", "spans_there")
"""Names of the columns of `count_spans`."""


def count_spans(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the numbers of correct, predicted and gold spans of each sentence.

    Correct spans have the same type and words as a gold one. As in seqeval, an I that follows O or
    another type starts a span like a B.

    Args:
        gold: IOB2 tags of each sentence, as text.
        predicted: Predicted tags of the same words.

    Returns:
        int64[sentences, 3].
    """
    rows = []
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        gold_spans = _parse_spans(gold_tags)
        predicted_spans = _parse_spans(predicted_tags)
        rows.append((len(gold_spans & predicted_spans), len(predicted_spans), len(gold_spans)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def span_f1(counts: np.ndarray) -> dict[str, float]:
    """Return micro-averaged span_f1, span_precision and span_recall, from 0 to 1.

    The ratio 0/0 counts as 0.

    Args:
        counts: Result of `count_spans`, int64[sentences, 3].

    Returns:
        The three values by name.
    """
    right, predicted, gold = counts.sum(axis=0).tolist()
    return {
        "span_f1": 2 * right / (predicted + gold) if predicted + gold else 0.0,
        "span_precision": right / predicted if predicted else 0.0,
        "span_recall": right / gold if gold else 0.0,
    }
