"""Extractive question answering by a label of each sub-token.

The label is binary: inside or outside the answer.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from megaenc.console import print_rank_0
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.finetune.examples import Answer, Question, TaskFamily
from megaenc.finetune.model.task_class import QA_LABELS
from megaenc.finetune.tasks.base import FinetuneTask, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedTexts, concatenate_rows

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class QuestionAnswering(FinetuneTask):
    r"""Question answering (QA) by cross-entropy of inside or outside the answer.

    All sub-tokens, special tokens too, have a label. The score is position F1.

    The text is "Question: {question}\nContext: " and the context, tokenized separately. Too long a
    text loses the end of its context, then of its question. Only the first answer is learned:
    sub-tokens that overlap it are inside.

    The predicted positions are all sub-tokens labelled inside. The predicted answer is the text of
    their run in the context with the largest mean log-odds, so that a short certain run beats a
    long uncertain one; without a run it is empty.
    """

    family: ClassVar[TaskFamily] = TaskFamily.QA
    output_count = 2
    label_names = QA_LABELS

    def encode(self, examples: list[Question], encoder: TextEncoder) -> TokenizedTexts:
        """Return tokenized texts with columns of their contexts and answers.

        By row: `context`, int32[n, 2], token range of the context in the row; `gold`, int32[n, 2],
        that of the first answer before the text is cut, so perhaps past the row's end, (0, 0)
        without answer. By token: `offsets`, int32[N, 2], character range in the context, (0, 0)
        outside it; `inside`, int64[N], 1 within the first answer, else 0. The end of a range is
        excluded. The number of questions that are cut is printed.
        """
        prefixes = [f"Question: {example.question}\nContext: " for example in examples]
        # A paragraph has several questions.
        contexts = dict.fromkeys(example.context for example in examples)
        contexts = dict(zip(contexts, encoder.encode_with_offsets(list(contexts)), strict=True))
        first = len(encoder.special_tokens.before)
        rows = []
        bounds = []
        golds = []
        offsets = []
        inside = []
        truncated = 0
        questions_cut = 0
        for example, (prefix, _) in zip(
            examples, encoder.encode_with_offsets(prefixes), strict=True
        ):
            tokens, characters = contexts[example.context]
            start = first + min(len(prefix), encoder.max_text_tokens)
            end = first + min(len(prefix) + len(tokens), encoder.max_text_tokens)
            gold = (
                start + _find_answer_tokens(example, characters)
                if example.answers
                else np.zeros(2, np.int64)
            )
            truncated += len(prefix) + len(tokens) > encoder.max_text_tokens
            questions_cut += len(prefix) > encoder.max_text_tokens
            row = encoder.add_special_tokens(np.concatenate([prefix, tokens]))
            row_offsets = np.zeros((len(row), 2), dtype=np.int32)
            positions = np.arange(len(row))
            row_offsets[start:end] = characters[: end - start]
            rows.append(row)
            bounds.append((start, end))
            golds.append(gold)
            offsets.append(row_offsets)
            inside.append((positions >= gold[0]) & (positions < min(gold[1], end)))
        if questions_cut:
            longer = f"{questions_cut:,} questions are longer than {encoder.max_length:,} tokens"
            print_rank_0(f"{longer}: they are cut and lose their contexts")
        return TokenizedTexts.from_rows(
            rows,
            truncated,
            context=np.array(bounds, dtype=np.int32).reshape(-1, 2),
            gold=np.array(golds, dtype=np.int32).reshape(-1, 2),
            offsets=concatenate_rows(offsets, np.int32, 2),
            inside=concatenate_rows(inside, np.int64),
        )

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the label of each token of the texts `rows`, int64[tokens].

        Tokens inside the first answer have label 1, others 0.
        """
        return data.gather_token_column("inside", rows)

    def evaluate(self, model: TaskModel, data: TokenizedTexts, examples: list[Question]) -> Scores:
        """Return the Scores of the model on a split, each from 0 to 1.

        The score is position F1. The metrics `exact_match` and `f1` (of words) are those of
        extracted answers. The baseline never answers.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        # Answer sub-tokens that were cut off get positions after the row's end.
        bounds = zip(
            data.columns["gold"].tolist(), data.columns["context"][:, 1].tolist(), strict=True
        )
        positions = [
            {position if position < context_end else position + 1 for position in range(*gold)}
            for gold, context_end in bounds
        ]
        overlap = np.zeros(len(data))
        answers = [""] * len(data)
        for row, logits in self.predict_texts(model, data):
            log_odds = logits[:, 1] - logits[:, 0]
            overlap[row] = position_f1(positions[row], np.flatnonzero(log_odds > 0).tolist())
            answers[row] = extract_answer(examples[row].context, log_odds, data, row)
        golds = [[answer.text for answer in example.answers] for example in examples]
        metrics = {
            "exact_match": list(map(exact_match, golds, answers)),
            "f1": list(map(token_f1, golds, answers)),
        }
        baseline = {
            "score": float(np.mean([position_f1(gold, ()) for gold in positions])),
            "exact_match": float(np.mean([exact_match(gold, "") for gold in golds])),
            "f1": float(np.mean([token_f1(gold, "") for gold in golds])),
        }
        collapsed = "never answers" if not any(answers) and any(golds) else None
        return Scores.from_examples(overlap, metrics, collapsed=collapsed, baseline=baseline)


def _find_answer_tokens(example: Question, characters: np.ndarray) -> np.ndarray:
    """Return the token range that overlaps the first answer in the context, int64[2]."""
    answer: Answer = example.answers[0]
    start = len(replace_surrogates(example.context[: answer.start]))
    end = start + len(replace_surrogates(answer.text))
    touched = np.flatnonzero((characters[:, 0] < end) & (characters[:, 1] > start))
    return np.array([touched[0], touched[-1] + 1]) if len(touched) else np.zeros(2, np.int64)


def extract_answer(context: str, log_odds: np.ndarray, data: TokenizedTexts, row: int) -> str:
    """Return the text of the predicted answer of text `row`, empty without one.

    The answer is the part of the context whose sub-tokens are the run of positive log-odds with the
    largest mean, without spaces around it.

    Args:
        context: Text of the row's context.
        log_odds: float[sub-tokens of the row], the logit of inside minus that of outside the
            answer.
        data: Result of `QuestionAnswering.encode`.
        row: Index of the text in `data`.
    """
    start, end = data.columns["context"][row]
    span = find_best_span(log_odds[start:end])
    if span is None:
        return ""
    offsets = data.columns["offsets"][data.starts[row] + start : data.starts[row] + end]
    return replace_surrogates(context)[offsets[span[0], 0] : offsets[span[1] - 1, 1]].strip()


def position_f1(gold: Collection[int], predicted: Collection[int]) -> float:
    """Return the F1 of two sets of sub-token positions, from 0 to 1.

    It is the study's score. Positions are counted in a row. An empty set counts as {0}, a position
    of the question: an unanswerable question scores 1 without a predicted answer, else 0.
    """
    gold_positions = set(gold) or {0}
    predicted_positions = set(predicted) or {0}
    return (
        2
        * len(gold_positions & predicted_positions)
        / (len(gold_positions) + len(predicted_positions))
    )


def normalize_answer(answer: str) -> str:
    """Return an answer as SQuAD's script normalizes it.

    The result is in lower case without ASCII punctuation, a, an and the, and with single spaces.
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(golds: Sequence[str], predicted: str) -> float:
    """Return 1.0 if the normalized prediction equals a gold answer, else 0.0.

    Gold answers without words (`normalize_answer`) are left out. If none is left, as for an
    unanswerable question, a prediction without words is right, as in SQuAD v2.

    Args:
        golds: All accepted answers; empty: unanswerable.
    """
    return float(
        normalize_answer(predicted)
        in [normalize_answer(gold) for gold in _filter_gold_answers(golds)]
    )


def token_f1(golds: Sequence[str], predicted: str) -> float:
    """Return the highest F1 of the prediction's words with those of a gold answer.

    It is from 0 to 1. Answers are normalized (`normalize_answer`), and words are counted with
    repetition, as in SQuAD v2. Gold answers without words are left out; if none is left, the result
    is 1 for a prediction without words, else 0.

    Args:
        golds: All accepted answers; empty: unanswerable.
    """
    predicted_words = normalize_answer(predicted).split()
    scores = []
    for gold in _filter_gold_answers(golds):
        gold_words = normalize_answer(gold).split()
        shared = (Counter(gold_words) & Counter(predicted_words)).total()
        count = len(gold_words) + len(predicted_words)
        scores.append(2 * shared / count if count else 1.0)
    return max(scores)


def _filter_gold_answers(golds: Sequence[str]) -> Sequence[str]:
    """Drop gold answers that normalize to nothing; return [""] if none is left."""
    return [gold for gold in golds if normalize_answer(gold)] or [""]


def find_best_span(log_odds: np.ndarray) -> tuple[int, int] | None:
    """Return the run of positive log-odds with the largest mean, the first of equals.

    A run is as long as possible: no positive log-odds are next to it.

    Args:
        log_odds: float[sub-tokens of the context], the logit of inside minus that of outside.

    Returns:
        Range (start, end) in `log_odds`, end excluded, or None if no log-odds are positive.
    """
    inside = np.concatenate([[False], log_odds > 0, [False]])
    boundaries = np.flatnonzero(inside[1:] != inside[:-1]).reshape(-1, 2)
    if not len(boundaries):
        return None
    best = max(
        range(len(boundaries)),
        key=lambda run: (log_odds[boundaries[run, 0] : boundaries[run, 1]].mean(), -run),
    )
    return int(boundaries[best, 0]), int(boundaries[best, 1])
