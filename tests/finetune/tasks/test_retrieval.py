"""Retrieval: gradients in parts with dropout, and rankings of planted embeddings."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import Pair, RetrievalExamples
from megaenc.finetune.model.backbone import pack_texts
from megaenc.finetune.tasks import TaskModel
from megaenc.finetune.tasks.base import mean_pool
from megaenc.finetune.tasks.retrieval import RetrievalTask

PAIRS = [
    Pair(
        "0", "Query: a garden", "Document: The small garden behind the house was full of flowers."
    ),
    Pair("1", "Query: who came?", "Document: Nobody came."),
    Pair("2", "Query: where did the old man walk with his dog?", "Document: down to the river"),
    Pair("3", "Query: Lyon", "Document: Paris and Lyon"),
    # The same document: a negative all the same
    Pair("4", "Query: Paris", "Document: Paris and Lyon"),
]


def plain_loss(queries, documents, scale):
    scores = normalize(queries, dim=1) @ normalize(documents, dim=1).T * scale
    return cross_entropy(scores, torch.arange(len(queries)))


class Words(nn.Module):
    """A backbone with dropout that keeps the order of what it read."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(400, 8)
        self.dropout = nn.Dropout(dropout)
        self.read: list[int] = []

    def compute_states(self, packed):
        self.read.append(len(packed.lengths))
        return self.dropout(self.table(packed.tokens))


def test_parts_drop_the_same_both_times(dataset, encoder):
    task = RetrievalTask(dataset(), FinetuneConfig(tokens_per_forward=25))
    data = task.encode(PAIRS, encoder)
    rows = np.arange(5)
    model = TaskModel(Words(dropout=0.5), nn.Identity())
    torch.manual_seed(7)
    loss = task.backward(model, data, rows)
    after = torch.get_rng_state()
    found = model.backbone.table.weight.grad.clone()
    read = model.backbone.read
    parts = (len(read) + 1) // 2  # all but the first are read twice
    assert parts > 2 and read[parts:] == read[1:parts] and sum(read[:parts]) == 10

    # The same parts with one graph over all of them.
    model.zero_grad()
    texts = data["queries"].gather_rows(rows) + data["documents"].gather_rows(rows)
    vectors: list[torch.Tensor] = [torch.empty(0)] * 10
    torch.manual_seed(7)
    for part in task.split_into_forwards(np.array([len(text) for text in texts])):
        packed = pack_texts([texts[at] for at in part], "cpu")
        for at, vector in zip(
            part, mean_pool(model.backbone.compute_states(packed), packed), strict=True
        ):
            vectors[at] = vector
    expected = plain_loss(torch.stack(vectors[:5]), torch.stack(vectors[5:]), 20.0)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(found, model.backbone.table.weight.grad, rtol=1e-5, atol=1e-6)
    # What is drawn next does not depend on the second pass
    assert torch.equal(after, torch.get_rng_state())


DOCUMENTS = {
    name: f"Document: {text}"
    for name, text in [("a", "garden"), ("b", "river"), ("c", "dog"), ("d", "letters")]
}
SPLIT = RetrievalExamples(
    queries={
        "q1": "Query: flowers",
        "q2": "Query: a walk",
        "q3": "Query: without an answer",
        "q4": "Query: walks",
    },
    documents=DOCUMENTS,
    relevant={"q1": {"a": 1}, "q2": {"b": 1, "c": 3}, "q4": {"a": 1, "d": 2}},
)


def planted(task, data, oracle, queries, documents):
    """Return a model that gives these embeddings, in the order of SPLIT."""
    return oracle(task, (data["queries"], queries), (data["documents"], documents))


@pytest.fixture
def task(dataset):
    return RetrievalTask(dataset(), FinetuneConfig(tokens_per_forward=30))


def test_scores_by_hand(task, encoder, oracle):
    data = task.encode(SPLIT, encoder)
    queries = [[1, 0, 0, 0], [0, 0.5, 1, 0.7], [0, 0, 0, 1], [0, 0.2, 0.1, 0.3]]
    model = planted(task, data, oracle, queries, 2 * np.eye(4))
    scores = task.evaluate(model, data, SPLIT)
    assert model.backbone.seen == 3 + 4  # one pass, without the query that nothing answers
    # q1: a first. q2: c (grade 3), d, b (grade 1), a. q4: d (grade 2), b, c, a (grade 1).
    third = 1 / np.log2(4)
    fourth = 1 / np.log2(5)
    second = 1 / np.log2(3)
    assert scores.scores_i == pytest.approx(
        [1, (1 + third) / (1 + second), (1 + fourth) / (1 + second)]
    )
    assert scores.metrics_i["ndcg@10"] == pytest.approx(
        [1, (3 + third) / (3 + second), (2 + fourth) / (2 + second)]
    )
    assert scores.score == pytest.approx(np.mean(scores.scores_i)) and scores.collapsed is None
    assert scores.metrics == pytest.approx(
        {name: np.mean(some) for name, some in scores.metrics_i.items()}
    )
    assert set(scores.baseline) == {"score", *scores.metrics} and scores.baseline["recall@100"] == 1


def test_a_document_with_the_id_of_the_query_is_left_out_and_a_missing_one_is_a_miss(
    task, encoder, oracle
):
    split = RetrievalExamples(
        queries={"a": "Query: garden", "c": "Query: dogs"},
        documents=DOCUMENTS,
        relevant={"a": {"b": 1, "gone": 1}, "c": {"d": 1}},
        ignore_identical_ids=True,
    )
    data = task.encode(split, encoder)
    queries = [[1, 0.5, 0.2, 0.1], [0.1, 0.2, 1, 0.5]]
    scores = task.evaluate(planted(task, data, oracle, queries, np.eye(4)), data, split)
    assert scores.metrics_i["mrr@10"] == [1, 1]
    assert scores.metrics_i["recall@100"] == [0.5, 1] and scores.baseline["recall@100"] == 0.75
    kept = dataclasses.replace(split, ignore_identical_ids=False)
    scores = task.evaluate(planted(task, data, oracle, queries, np.eye(4)), data, kept)
    assert scores.metrics_i["mrr@10"] == [0.5, 0.5]


def test_documents_of_both_splits_are_embedded_once(task, encoder, dataset):
    data = task.encode(SPLIT, encoder)
    model = TaskModel(Words(), nn.Identity())
    told = []
    task.progress = lambda done, total: told.append((done, total))
    first = task.evaluate(model, data, SPLIT)
    assert told == sorted(told) and told[0][0] < 4 and told[-1] == (7, 7)
    test = RetrievalExamples({"q5": "Query: a dog"}, DOCUMENTS, {"q5": {"c": 1}})
    task.evaluate(model, task.encode(test, encoder), test)
    assert sum(model.backbone.read) == 4 + 3 + 1
    task.backward(model, task.encode(PAIRS, encoder), np.arange(5))
    with torch.no_grad():
        model.backbone.table.weight.normal_()
    fresh = RetrievalTask(dataset(), task.protocol)
    changed = task.evaluate(model, data, SPLIT)
    assert changed == fresh.evaluate(model, data, SPLIT) and changed.metrics != first.metrics


def test_documents_that_are_all_alike_are_a_collapse(task, encoder, oracle):
    data = task.encode(SPLIT, encoder)
    model = planted(task, data, oracle, np.eye(4), np.ones((4, 4)))
    scores = task.evaluate(model, data, SPLIT)
    assert scores.collapsed == "all documents are alike to every query"
    # d, c, b, a, as trec_eval orders equals; the study's score gives equals equal shares.
    assert scores.metrics_i["mrr@10"] == [1 / 4, 1 / 2, 1]
    assert scores.scores_i[0] == pytest.approx((1 + 1 / np.log2(3) + 0.5 + 1 / np.log2(5)) / 4)
