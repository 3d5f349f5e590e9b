"""Token classification: every sub-token says the tag of its word, and a word's sub-tokens vote."""

from collections import Counter, defaultdict
from functools import cached_property
from typing import ClassVar

import numpy as np

from megaenc.data.encoding import well_formed
from megaenc.finetune.encoded import Encoded, TextEncoder, flat
from megaenc.finetune.examples import Family, TaggedWords
from megaenc.finetune.metrics.tagging import majority_vote, span_counts, span_f1, tag_f1
from megaenc.finetune.tasks.base import NO_LABEL, Model, Scores, Task


class Tagging(Task):
    """Cross-entropy of the tags, the mean over the batch's sub-tokens without BOS and EOS.

    Words are joined by single spaces and tokenised together. A sub-token belongs to the first word that ends after its first
    character, so that a space counts with the word behind it. Words that were cut off, or left no sub-token, are predicted O.
    """

    family: ClassVar[Family] = Family.TC

    def encode(self, examples: list[TaggedWords], encoder: TextEncoder) -> Encoded:
        """Return rows of the sentences; by token: `words`, int32[N], place in the sentence or -1; `tags`, int64[N], or -100."""
        rows, words, tags, truncated = [], [], [], 0
        sentences = [[well_formed(word) for word in example.words] for example in examples]
        encoded = encoder.with_offsets([" ".join(sentence) for sentence in sentences])
        for example, sentence, (tokens, offsets) in zip(examples, sentences, encoded, strict=True):
            ends = np.cumsum([len(word) + 1 for word in sentence]) - 1
            # A token of trailing white space alone is behind every word.
            owners = np.searchsorted(ends, offsets[:, 0], side="right")
            owners = np.where(owners < len(sentence), owners, -1)
            truncated += len(tokens) > encoder.room
            rows.append(encoder.row(tokens))
            words.append(encoder.beside(owners, -1))
            tags.append(np.where(words[-1] < 0, NO_LABEL, np.asarray(example.tags)[words[-1]]))
        return Encoded.of(rows, truncated, words=flat(words, np.int32), tags=flat(tags, np.int64))

    def targets(self, data: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return the tags."""
        return data.by_token("tags", rows)

    def evaluate(self, model: Model, data: Encoded, examples: list[TaggedWords]) -> Scores:
        """See Task. The baseline is the tag that each word has most often in the training set."""
        outside = self.dataset.labels.index("O") if "O" in self.dataset.labels else 0
        predicted: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(data)
        for row, logits in self.by_text(model, data):
            words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
            known = words >= 0
            tags = logits.argmax(1)[known]
            predicted[row] = majority_vote(words[known], tags, len(examples[row].words), outside)
        gold = [np.array(example.tags) for example in examples]
        by_word, otherwise = self._most_frequent
        usual = [np.array([by_word.get(word, otherwise) for word in example.words]) for example in examples]
        labels = self.dataset.labels
        gold_names, names, usual_names = ([[labels[tag] for tag in tags] for tags in side] for side in (gold, predicted, usual))
        counts = span_counts(gold_names, names)
        baseline = {"score": float(tag_f1(gold, usual).mean()), **span_f1(span_counts(gold_names, usual_names))}
        return Scores.of(
            tag_f1(gold, predicted),
            dict(zip(("spans_right", "spans_predicted", "spans_there"), counts.T, strict=True)),
            collapsed=self.constant(np.concatenate(predicted), np.concatenate(gold)),
            baseline=baseline,
            metrics=span_f1(counts),
        )

    @cached_property
    def _most_frequent(self) -> tuple[dict[str, int], int]:
        """The tag that each word of the training set has most often (of equals, the first met), and the one of all words."""
        tags_of, all_tags = defaultdict(Counter), Counter()
        for example in self.dataset.split("train"):
            for word, tag in zip(example.words, example.tags, strict=True):
                tags_of[word][tag] += 1
                all_tags[tag] += 1
        return {word: tags.most_common(1)[0][0] for word, tags in tags_of.items()}, all_tags.most_common(1)[0][0]
