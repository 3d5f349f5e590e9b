"""Extractive question answering: every sub-token says whether it is inside the answer."""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from megaenc.console import print_rank_0
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.finetune.examples import Answer, Question, TaskFamily
from megaenc.finetune.tasks.base import FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts, concatenate_rows

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class QuestionAnswering(FinetuneTask):
    """Cross-entropy of inside and outside the answer, the mean over all sub-tokens of the batch, BOS, EOS and questions included.

    The text is "Question: {question}\\nContext: {context}", its two halves tokenised apart. If it is too long it loses the end of
    its context, then that of its question. Only the first answer is learned: every sub-token that touches a character of it is
    inside. An answer that was cut off is missed.

    The predicted positions are all that are inside. The predicted answer is the text of the run of them within the context that
    has the largest mean log-odds, so a long run of doubt does not win over a short one of certainty; else it is empty.
    """

    family: ClassVar[TaskFamily] = TaskFamily.QA
    output_count = 2

    def encode(self, examples: list[Question], encoder: TextEncoder) -> TokenizedTexts:
        """Return rows of the texts.

        By row: `context`, int32[n, 2], the first token of the context and one past its last; `gold`, int32[n, 2], the same of the
        first answer before the text was cut, 0, 0 without one. By token: `offsets`, int32[N, 2], its characters of the context,
        0, 0 outside it; `inside`, int64[N], 1 within the first answer, else 0.
        """
        prefixes = [f"Question: {example.question}\nContext: " for example in examples]
        contexts = dict.fromkeys(example.context for example in examples)  # a paragraph has several questions
        contexts = dict(zip(contexts, encoder.encode_with_offsets(list(contexts)), strict=True))
        rows, bounds, golds, offsets, inside, truncated, questions_cut = [], [], [], [], [], 0, 0
        for example, (prefix, _) in zip(examples, encoder.encode_with_offsets(prefixes), strict=True):
            tokens, characters = contexts[example.context]
            first = encoder.add_bos + min(len(prefix), encoder.max_text_tokens)
            past = encoder.add_bos + min(len(prefix) + len(tokens), encoder.max_text_tokens)
            gold = first + _find_answer_tokens(example, characters) if example.answers else np.zeros(2, np.int64)
            truncated += len(prefix) + len(tokens) > encoder.max_text_tokens
            questions_cut += len(prefix) > encoder.max_text_tokens
            row = encoder.add_special_tokens(np.concatenate([prefix, tokens]))
            places, where = np.zeros((len(row), 2), dtype=np.int32), np.arange(len(row))
            places[first:past] = characters[: past - first]
            rows.append(row)
            bounds.append((first, past))
            golds.append(gold)
            offsets.append(places)
            inside.append((where >= gold[0]) & (where < min(gold[1], past)))
        if questions_cut:
            longer = f"{questions_cut:,} questions are longer than {encoder.max_length:,} tokens"
            print_rank_0(f"{longer}: their ends and contexts are left out")
        return TokenizedTexts.from_rows(
            rows,
            truncated,
            context=np.array(bounds, dtype=np.int32).reshape(-1, 2),
            gold=np.array(golds, dtype=np.int32).reshape(-1, 2),
            offsets=concatenate_rows(offsets, np.int32, 2),
            inside=concatenate_rows(inside, np.int64),
        )

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return 1 for what is inside, 0 for what is outside."""
        return data.gather_token_column("inside", rows)

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[Question]) -> Scores:
        """See Task."""
        # Sub-tokens of the first answer that were cut off stand behind all that is left of the row.
        bounds = zip(data.columns["gold"].tolist(), data.columns["context"][:, 1].tolist(), strict=True)
        positions = [{at if at < past else at + 1 for at in range(*gold)} for gold, past in bounds]
        overlap, answers = np.zeros(len(data)), [""] * len(data)
        for row, logits in self.predict_texts(model, data):
            log_odds = logits[:, 1] - logits[:, 0]
            overlap[row] = position_f1(positions[row], np.flatnonzero(log_odds > 0).tolist())
            answers[row] = _extract_answer(examples[row].context, log_odds, data, row)
        golds = [[answer.text for answer in example.answers] for example in examples]
        found, never = (
            {name: list(map(metric, golds, given)) for name, metric in (("exact_match", exact_match), ("f1", token_f1))}
            for given in (answers, [""] * len(golds))
        )
        baseline = {"score": float(np.mean([position_f1(gold, ()) for gold in positions]))}
        baseline |= {name: float(np.mean(values)) for name, values in never.items()}
        collapsed = "never answers" if not any(answers) and any(golds) else None
        return Scores.from_examples(overlap, found, collapsed=collapsed, baseline=baseline)


def _find_answer_tokens(example: Question, characters: np.ndarray) -> np.ndarray:
    """Return int64[2]: the first token of the context that has a character of the first answer, and one past the last."""
    answer: Answer = example.answers[0]
    start = len(replace_surrogates(example.context[: answer.start]))
    end = start + len(replace_surrogates(answer.text))
    touched = np.flatnonzero((characters[:, 0] < end) & (characters[:, 1] > start))
    return np.array([touched[0], touched[-1] + 1]) if len(touched) else np.zeros(2, np.int64)


def _extract_answer(context: str, log_odds: np.ndarray, data: TokenizedTexts, row: int) -> str:
    first, past = data.columns["context"][row]
    span = find_best_span(log_odds[first:past])
    if span is None:
        return ""
    offsets = data.columns["offsets"][data.starts[row] + first : data.starts[row] + past]
    return replace_surrogates(context)[offsets[span[0], 0] : offsets[span[1] - 1, 1]].strip()


def position_f1(gold: Collection[int], predicted: Collection[int]) -> float:
    """The study's score: F1 of two sets of sub-token positions, where an empty set stands as {0}.

    So a question without an answer scores 1 when none is predicted, and 0 when one is (position 0 is part of the question).
    """
    right, found = set(gold) or {0}, set(predicted) or {0}
    return 2 * len(right & found) / (len(right) + len(found))


def normalize_answer(answer: str) -> str:
    """As SQuAD's script compares answers: lower case, no ASCII punctuation, no articles, words joined by single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(golds: Sequence[str], predicted: str) -> float:
    """1 if `predicted` is one of `golds` once both are normalised; without golds, 1 if it is empty. SQuAD v2's rules."""
    return float(normalize_answer(predicted) in [normalize_answer(gold) for gold in _filter_gold_answers(golds)])


def token_f1(golds: Sequence[str], predicted: str) -> float:
    """F1 of the words that `predicted` shares with a gold answer, the best of all golds. SQuAD v2's rules.

    Where either has no words, 1 if both have none, else 0.
    """
    return max(
        _compute_word_f1(normalize_answer(gold).split(), normalize_answer(predicted).split())
        for gold in _filter_gold_answers(golds)
    )


def _filter_gold_answers(golds: Sequence[str]) -> Sequence[str]:
    return [gold for gold in golds if normalize_answer(gold)] or [""]


def _compute_word_f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    shared = (Counter(gold) & Counter(predicted)).total()
    return 2 * shared / (len(gold) + len(predicted))


def find_best_span(log_odds: np.ndarray) -> tuple[int, int] | None:
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
