"""Token classification: words of sub-tokens, and scores worked out by hand."""

import numpy as np
import pytest
import tokenizer_shapes
from text_helpers import text_encoder

from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import TaggedWords
from megaenc.finetune.tasks.token_classification import TokenClassification

TAGS = ("O", "B-PER", "I-PER", "B-LOC")
EXAMPLES = [
    TaggedWords("0", ("Marie", "Curie", "walked", "to", "Paris", "."), (1, 2, 0, 0, 3, 0)),
    TaggedWords("1", ("Nobody", "came"), (0, 0)),
    TaggedWords("2", ("Lyon", ",", "\u65e5\u672c", "e\u0301t\u00e9", "Paris"), (3, 0, 3, 0, 3)),
]


@pytest.fixture
def task(dataset):
    return TokenClassification(dataset(TAGS, train=EXAMPLES), FinetuneConfig(tokens_per_forward=40))


def test_a_beginning_has_no_tag(task, tokenizer):
    tokenizer.bos_token = "<|mask|>"
    data = task.encode(EXAMPLES[:1], text_encoder(tokenizer, 64, add_bos=True))
    tokenizer.bos_token = None
    assert data.columns["tags"][0] == -100 and data.columns["tags"][1] == 1


def told(data, tags_of):
    """Return states with the tag of `tags_of` for each row and word."""
    words = np.split(data.columns["words"], data.starts[1:-1])
    tags = [
        [own[word] if word >= 0 else 1 for word in row]
        for row, own in zip(words, tags_of, strict=True)
    ]
    return data, [np.eye(len(TAGS))[some] for some in tags]


def test_scores(task, encoder, oracle):
    data = task.encode(EXAMPLES, encoder)
    # Curie is lost, and a comma is a place.
    scores = task.evaluate(
        oracle(task, told(data, [(1, 0, 0, 0, 3, 0), (0, 0), (3, 3, 3, 0, 3)])), data, EXAMPLES
    )
    first = (6 / 7 + 1 + 0 + 1) / 4  # O: 3 found of 3, 1 too many; B-PER; I-PER; B-LOC
    assert scores.scores_i == pytest.approx([first, 1, (2 / 3 + 6 / 7) / 2])
    assert scores.score == pytest.approx(np.mean(scores.scores_i))
    assert scores.metrics_i == {
        "spans_right": [1, 0, 3],
        "spans_predicted": [2, 0, 4],
        "spans_there": [2, 0, 3],
    }
    expected = {"span_f1": 8 / 11, "span_precision": 4 / 6, "span_recall": 4 / 5}
    assert scores.metrics == pytest.approx(expected) and scores.collapsed is None
    assert scores.baseline == dict.fromkeys(("score", *expected), 1)  # it has seen them


def test_the_baseline_knows_words_of_the_training_set_alone(dataset, encoder, oracle):
    train = [
        TaggedWords("0", ("Paris", "Paris", "is", "in", "Lyon"), (3, 1, 0, 0, 3)),
        TaggedWords("1", ("Paris", ".", "."), (3, 0, 0)),
    ]
    task = TokenClassification(dataset(TAGS, train=train), FinetuneConfig())
    split = [TaggedWords("0", ("Paris", ",", "Marie"), (3, 0, 1))]
    data = task.encode(split, encoder)
    scores = task.evaluate(oracle(task, told(data, [(3, 0, 1)])), data, split)
    assert scores.baseline["span_recall"] == 0.5 and scores.baseline["span_precision"] == 1
    assert scores.baseline["score"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_words_that_were_cut_off_are_outside(task, encoder, tokenizer, oracle):
    whole = task.encode(EXAMPLES, encoder)
    words = whole.columns["words"][: whole.lengths[0]]
    room = int(np.flatnonzero(words == 2)[0])  # Marie Curie, and nothing of what follows
    data = task.encode(EXAMPLES, text_encoder(tokenizer, room + 1))
    assert (
        data.lengths.max() == room + 1
        and data.truncated_count == int((whole.lengths > room + 1).sum()) > 0
    )
    scores = task.evaluate(
        oracle(task, told(data, [example.tags for example in EXAMPLES])), data, EXAMPLES
    )
    # Paris is lost.
    assert scores.metrics_i["spans_right"][0] == scores.metrics_i["spans_predicted"][0] == 1
    assert scores.metrics_i["spans_there"] == [2, 0, 3]
    assert scores.scores_i[0] == pytest.approx((6 / 7 + 1 + 1 + 0) / 4)


def test_a_constant_prediction_is_a_collapse(task, encoder, oracle):
    data = task.encode(EXAMPLES, encoder)
    nothing = [(0,) * len(example.words) for example in EXAMPLES]
    scores = task.evaluate(oracle(task, told(data, nothing)), data, EXAMPLES)
    assert scores.collapsed == "constant prediction O" and scores.metrics["span_f1"] == 0
    assert scores.scores_i[1] == 1  # a sentence of O alone


@pytest.mark.parametrize("kind", tokenizer_shapes.SHAPES)
def test_sub_tokens_belong_to_their_words(task, kind, tmp_path):
    """Tokenizers differ in which characters they say that a token is made of."""
    tokenizer = load_tokenizer(tokenizer_shapes.save(tokenizer_shapes.SHAPES[kind](), tmp_path))
    data = task.encode(EXAMPLES, text_encoder(tokenizer, 200))
    for row, example in enumerate(EXAMPLES):
        [tokens] = data.gather_rows([row])
        words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
        tags = data.columns["tags"][data.starts[row] : data.starts[row + 1]]
        assert words[-1] == -1 and tags[-1] == -100 and tokens[-1] in tokenizer.all_special_ids
        assert tags[:-1].tolist() == [example.tags[word] for word in words[:-1]]
        words = words[:-1]
        tokens = tokens[:-1]
        assert (
            np.array_equal(np.unique(words), np.arange(len(example.words)))
            and (np.diff(words) >= 0).all()
        )
        for word, text in enumerate(example.words):
            if text.isascii():
                assert tokenizer.decode(tokens[words == word]).strip().lower() == text.lower()
