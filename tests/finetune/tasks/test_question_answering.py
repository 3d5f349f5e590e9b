"""Question answering: spans, answers as text, and scores worked out by hand."""

import numpy as np
import pytest
from text_helpers import text_encoder

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import Answer, Question
from megaenc.finetune.tasks.question_answering import QuestionAnswering

CONTEXT = "Marie Curie lived in Paris, and the old man lived in Lyon with his dog."


def question(number, text, *answers, context=CONTEXT):
    return Question(
        str(number),
        text,
        context,
        tuple(Answer(answer, context.index(answer)) for answer in answers),
    )


EXAMPLES = [
    question(0, "Where did Marie Curie live?", "Paris", "in Paris"),
    question(1, "Who lived in Lyon?", "the old man"),
    question(2, "Who walked?"),
    question(3, "What is big in Japan?", "\u65e5\u672c", context="A \U0001f44d for \u65e5\u672c."),
]


@pytest.fixture
def task(dataset):
    return QuestionAnswering(dataset(), FinetuneConfig(tokens_per_forward=100))


def test_rows_are_question_and_context(task, encoder, tokenizer):
    data = task.encode(EXAMPLES, encoder)
    for row, example in enumerate(EXAMPLES):
        tokens = data.gather_rows([row])[0]
        first, past = data.columns["context"][row]
        ids = [
            tokenizer.encode(half, add_special_tokens=False)
            for half in (f"Question: {example.question}\nContext: ", example.context)
        ]
        assert tokens.tolist() == [*ids[0], *ids[1], tokenizer.eos_token_id]
        assert (first, past) == (len(ids[0]), len(tokens) - 1)
        inside = data.columns["inside"][data.starts[row] : data.starts[row + 1]]
        spelled = tokenizer.decode(tokens[inside == 1])
        assert spelled.strip() == (example.answers[0].text if example.answers else "")
        assert np.flatnonzero(inside).tolist() == list(range(*data.columns["gold"][row]))


def told(data, inside_of=None):
    """Return states [outside, inside], inside at the labels or at given positions.

    The positions are given for each row with their log-odds.
    """
    found = []
    for row, labels in enumerate(np.split(data.columns["inside"], data.starts[1:-1])):
        states = np.tile([1.0, 0.0], (len(labels), 1))
        if inside_of is None:
            states[labels == 1, 1] = 2
        else:
            for at, log_odds in inside_of[row].items():
                states[at, 1] = 1 + log_odds
        found.append(states)
    return data, found


def test_scores_by_hand(task, encoder, oracle):
    data = task.encode(EXAMPLES, encoder)
    gold = [list(range(*bounds)) for bounds in data.columns["gold"]]
    first, past = data.columns["context"][0]
    tower = {at: 1.0 for at in range(first, past)}  # the whole context is inside
    # Its first token is surer than the answer
    marie = {at: 1.0 for at in gold[1]} | {data.columns["context"][1][0]: 5.0}
    late = {0: 3.0, 1: 1.0}  # in the question alone: no answer, but positions
    scores = task.evaluate(oracle(task, told(data, [tower, marie, late, {}])), data, EXAMPLES)
    overlap = [
        2 * len(gold[0]) / (len(gold[0]) + past - first),
        2 * len(gold[1]) / (2 * len(gold[1]) + 1),
        2 / 3,
        0,
    ]
    assert scores.scores_i == pytest.approx(overlap) and scores.score == pytest.approx(
        np.mean(overlap)
    )
    assert scores.metrics_i["exact_match"] == [0, 0, 1, 0]
    # "in Paris" shares two of its two words, Paris one of its one; the context has 14 without the
    # article
    assert scores.metrics_i["f1"] == pytest.approx(
        [max(2 * 1 / (1 + 14), 2 * 2 / (2 + 14)), 0, 1, 0]
    )


def test_never_answering_is_a_collapse(task, encoder, oracle):
    data = task.encode(EXAMPLES, encoder)
    scores = task.evaluate(oracle(task, told(data, [{}] * 4)), data, EXAMPLES)
    assert scores.collapsed == "never answers" and scores.score == scores.baseline["score"] == 0.25
    assert {"score": scores.score, **scores.metrics} == scores.baseline
    unanswerable = EXAMPLES[2:3]
    data = task.encode(unanswerable, encoder)
    assert task.evaluate(oracle(task, told(data, [{}])), data, unanswerable).collapsed is None


def test_long_contexts_lose_their_ends_and_answers_there_are_missed(
    task, encoder, tokenizer, oracle
):
    whole = task.encode(EXAMPLES, encoder)
    # Row 0 keeps the first half of its answer, and row 1 nothing of it.
    start, end = whole.columns["gold"][0]
    assert end - start >= 2
    data = task.encode(EXAMPLES[:3], text_encoder(tokenizer, int(start) + 2))
    assert data.truncated_count == 3 and data.lengths.tolist() == [start + 2] * 3
    assert np.array_equal(data.columns["gold"], whole.columns["gold"][:3])
    inside = np.split(data.columns["inside"], data.starts[1:-1])
    assert [part.sum() for part in inside] == [1, 0, 0]
    assert all(text[-1] == tokenizer.eos_token_id for text in data.gather_rows(range(3)))
    scores = task.evaluate(oracle(task, told(data)), data, EXAMPLES[:3])
    assert scores.scores_i == pytest.approx([2 / (1 + end - start), 0, 1])
    assert scores.metrics_i["exact_match"] == [0, 0, 1]


def test_questions_that_are_too_long_are_said(task, tokenizer, oracle, capsys):
    data = task.encode(EXAMPLES, text_encoder(tokenizer, 6))
    assert "4 questions are longer than 6 tokens" in capsys.readouterr().out
    assert data.lengths.tolist() == [6] * 4 and data.truncated_count == 4
    assert not data.columns["inside"].any() and (data.columns["context"] == 5).all()
    assert task.evaluate(oracle(task, told(data)), data, EXAMPLES).scores_i == [0, 0, 1, 0]


def test_half_surrogates_shift_no_answer(task, encoder, oracle):
    # As JSON may spell it: one character in two halves, and a half
    context = "\ud83d\udc4d and \ud83d say Lyon."
    examples = [question(0, "What?", "Lyon", context=context)]
    data = task.encode(examples, encoder)
    assert task.evaluate(oracle(task, told(data)), data, examples).metrics == {
        "exact_match": 1.0,
        "f1": 1.0,
    }
