"""Sequence classification: scores of models that know and of one that does not look."""

import numpy as np
import pytest
import torch

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import LabelledText
from megaenc.finetune.tasks.classification import Classification

TEXTS = ["The garden.", "The old man walked down to the river with his dog.", "Nobody came, nobody.", "A book", "Lyon and Paris"]
EXAMPLES = [LabelledText(str(at), text, label) for at, (text, label) in enumerate(zip(TEXTS, [0, 2, 1, 2, 2], strict=True))]


def test_heads_are_drawn_by_the_seed(dataset):
    task = Classification(dataset("abc"), FinetuneConfig())
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        heads.append(task.build_head(512))
    assert torch.equal(heads[0].weight, heads[1].weight) and not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].weight.shape == (3, 512) and heads[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not heads[0].bias.any() and heads[0].weight.dtype == torch.float32


def told(data, predicted):
    return [
        (text, np.tile(np.eye(3)[label], (len(text), 1)))
        for text, label in zip(data.gather_rows(range(5)), predicted, strict=True)
    ]


def test_scores(dataset, encoder, oracle):
    task = Classification(dataset(["a", "b", "c"]), FinetuneConfig(tokens_per_forward=20))
    data = task.encode(EXAMPLES, encoder)
    perfect = oracle(task, told(data, [0, 2, 1, 2, 2]))
    heard: list[tuple[int, int]] = []
    task.progress = lambda done, total: heard.append((done, total))
    scores = task.evaluate(perfect, data, EXAMPLES)
    assert heard == sorted(heard) and heard[-1] == (5, 5)
    assert scores.score == 1 and scores.scores_i == [1.0] * 5 and scores.collapsed is None
    assert scores.metrics == {"accuracy": 1.0} and scores.metrics_i == {"accuracy": [1.0] * 5}
    assert scores.baseline == {"score": 0.6, "accuracy": 0.6}
    assert perfect.backbone.seen == 5  # one pass

    scores = task.evaluate(oracle(task, told(data, [0, 2, 1, 0, 1])), data, EXAMPLES)
    assert scores.score == 0.6 and scores.scores_i == [1, 1, 1, 0, 0] and scores.collapsed is None


def test_a_constant_prediction_is_a_collapse(dataset, encoder, oracle):
    task = Classification(dataset(["bad", "fair", "good"]), FinetuneConfig())
    data = task.encode(EXAMPLES, encoder)
    scores = task.evaluate(oracle(task, told(data, [1] * 5)), data, EXAMPLES)
    assert scores.score == 0.2 and scores.collapsed == "constant prediction fair"
    one = EXAMPLES[1:2]
    data = task.encode(one, encoder)
    assert task.evaluate(oracle(task, [(data.tokens, np.eye(3)[[2] * len(data.tokens)])]), data, one).collapsed is None
