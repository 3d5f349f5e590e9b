"""Token classification: every sub-token says the tag of its word, and a word's sub-tokens vote."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megaenc.data.encoding import well_formed
from megaenc.finetune.encoded import Encoded, TextEncoder, flat
from megaenc.finetune.examples import Family, TaggedWords
from megaenc.finetune.metrics.tagging import majority_vote, span_counts, span_f1, tag_f1
from megaenc.finetune.tasks.base import Model, Scores, Task, backward_in_parts, column, evaluating, finite, linear_head

_NO_TAG = -100


class Tagging(Task):
    """Cross-entropy of the tags, the mean over the batch's sub-tokens; those of BOS and EOS have none.

    Words are joined by single spaces and tokenised together. A sub-token belongs to the first word that ends after its first
    character, so that a space counts with the word behind it. Words that were cut off, or left no sub-token, are predicted O.
    """

    family: ClassVar[Family] = Family.TC

    def encode(self, examples: list[TaggedWords], encoder: TextEncoder) -> Encoded:
        """Rows of the sentences; by token: `words`, int32[N], place in its sentence or -1, and `tags`, int64[N], or -100."""
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
            words.append(encoder.beside(owners, -1, -1))
            tags.append(np.where(words[-1] < 0, _NO_TAG, np.asarray(example.tags)[words[-1]]))
        return Encoded.of(rows, truncated, words=flat(words, np.int32), tags=flat(tags, np.int64))

    def head(self, hidden_size: int) -> nn.Module:
        """One linear layer."""
        return linear_head(hidden_size, len(self.dataset.labels))

    def backward(self, model: Model, data: Encoded, rows: np.ndarray) -> float:
        """See Task."""

        def loss_sum(packed, states, some):
            tags = torch.from_numpy(data.by_token("tags", some)).to(states.device)
            return cross_entropy(model.logits(states), tags, ignore_index=_NO_TAG, reduction="sum")

        count = int((data.by_token("tags", rows) != _NO_TAG).sum())
        return backward_in_parts(self, model, data, rows, loss_sum, count)

    def evaluate(self, model: Model, data: Encoded, examples: list[TaggedWords]) -> Scores:
        """See Task."""
        predicted: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(data)
        with evaluating(model):
            for rows, _, states in self.predictions(model, data):
                tags = finite(model.logits(states)).argmax(1).cpu().numpy()
                for row, found in zip(rows, np.split(tags, np.cumsum(data.lengths[rows])[:-1]), strict=True):
                    words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
                    known = words >= 0
                    predicted[row] = majority_vote(words[known], found[known], len(examples[row].words), self._outside)
        gold = [np.array(example.tags) for example in examples]
        score, scores_i, metrics, counts = self._scores(gold, predicted)
        every, given = np.concatenate(predicted), np.concatenate(gold)
        collapsed = None
        if (every == every[0]).all() and not (given == given[0]).all():
            collapsed = f"constant prediction {self.dataset.labels[every[0]]}"
        by_word, otherwise = self._most_frequent
        constant = [np.array([by_word.get(word, otherwise) for word in example.words]) for example in examples]
        constant_score, _, constant_metrics, _ = self._scores(gold, constant)
        names = ("spans_right", "spans_predicted", "spans_there")
        return Scores(
            score=score,
            scores_i=column(scores_i),
            metrics=metrics,
            metrics_i={name: column(counts[:, at]) for at, name in enumerate(names)},
            collapsed=collapsed,
            baseline={"score": constant_score, **constant_metrics},
        )

    def _scores(self, gold: Sequence[np.ndarray], predicted: Sequence[np.ndarray]):
        scores_i = tag_f1(gold, predicted)
        labels = self.dataset.labels
        names = [[[labels[tag] for tag in sentence] for sentence in side] for side in (gold, predicted)]
        counts = span_counts(*names)
        return float(scores_i.mean()), scores_i, span_f1(counts), counts

    @property
    def _outside(self) -> int:
        return self.dataset.labels.index("O") if "O" in self.dataset.labels else 0

    @cached_property
    def _most_frequent(self) -> tuple[dict[str, int], int]:
        """The tag that each word of the training set has most often (of equals, the first met), and the one of all words."""
        tags_of, all_tags = defaultdict(Counter), Counter()
        for example in self.dataset.split("train"):
            for word, tag in zip(example.words, example.tags, strict=True):
                tags_of[word][tag] += 1
                all_tags[tag] += 1
        return {word: tags.most_common(1)[0][0] for word, tags in tags_of.items()}, all_tags.most_common(1)[0][0]
