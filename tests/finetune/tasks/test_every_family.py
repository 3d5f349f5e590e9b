"""Properties of all families: plain gradients, and NaN is no score."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from transformers import EuroBertModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import (
    SEQUENCE_FAMILIES,
    Answer,
    LabelledText,
    Pair,
    Question,
    RankingQuery,
    RetrievalExamples,
    TaggedWords,
    TaskFamily,
)
from megaenc.finetune.tasks import TASKS, NonFinitePredictionError

TEXTS = [
    "The garden.",
    "The old man walked down to the river with his dog.",
    "Nobody came, nobody.",
    "Lyon and Paris",
]
QUERIES = {f"q{at}": f"Query: {text.split()[-1]}" for at, text in enumerate(TEXTS)}
# Equal ones are negatives too
DOCUMENTS = {f"d{at}": f"Document: {text}" for at, text in enumerate([*TEXTS[:3], TEXTS[0]])}
EXAMPLES = {
    TaskFamily.SC: [LabelledText(f"{at}", text, at % 3) for at, text in enumerate(TEXTS)],
    TaskFamily.TC: [
        TaggedWords(f"{at}", tuple(text.split()), (at % 3,) * len(text.split()))
        for at, text in enumerate(TEXTS)
    ],
    TaskFamily.QA: [
        Question(f"{at}", "Who?", text, (Answer(text[4:7], 4),)) for at, text in enumerate(TEXTS)
    ],
    TaskFamily.IR: [Pair(f"{at}", QUERIES[f"q{at}"], DOCUMENTS[f"d{at}"]) for at in range(4)],
    # -100 is a number like others.
    TaskFamily.REGRESSION: [
        LabelledText(f"{at}", text, (4.5, -1.25, -100.0, 0.0)[at]) for at, text in enumerate(TEXTS)
    ],
    TaskFamily.MULTI_LABEL: [
        LabelledText(f"{at}", text, ((0, 2), (), (1,), (0, 1, 2))[at])
        for at, text in enumerate(TEXTS)
    ],
    TaskFamily.RERANKING: [
        RankingQuery(TEXTS[0], (TEXTS[1],), (TEXTS[2],)),
        RankingQuery(TEXTS[3], (TEXTS[0],), (TEXTS[1],)),
    ],
}
LABELS = {family: ["O", "B-X", "I-X"] for family in TaskFamily} | {
    TaskFamily.REGRESSION: ["score"],
    TaskFamily.RERANKING: ["score"],
}
PROBLEM_TYPES = {
    TaskFamily.SC: "single_label_classification",
    TaskFamily.REGRESSION: "regression",
    TaskFamily.MULTI_LABEL: "multi_label_classification",
}
SPLITS = EXAMPLES | {
    TaskFamily.IR: RetrievalExamples(
        QUERIES, DOCUMENTS, {f"q{at}": {f"d{at}": 1} for at in range(4)}
    )
}
ROWS = np.array([3, 1, 2])


@pytest.fixture
def plain(directory):
    """transformers' own model."""
    model = EuroBertModel.from_pretrained(directory, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = (
        None  # the token that pads also ends texts, and has a gradient there
    )
    return model


def read_padded(model, texts):
    """The states and the mask of a padded batch."""
    ids, mask = torch.zeros((2, len(texts), max(map(len, texts))), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
        mask[row, : len(text)] = 1
    return model(input_ids=ids, attention_mask=mask).last_hidden_state, mask


def read_means(model, texts):
    states, mask = read_padded(model, texts)
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def compute_plain_loss(family, data, model, head):
    if family is TaskFamily.IR:
        queries, documents = (
            normalize(read_means(model, data[side].gather_rows(ROWS)), dim=1) for side in data
        )
        return cross_entropy(queries @ documents.T * 3.0, torch.arange(len(ROWS)))
    texts = data.gather_rows(ROWS)
    if family is TaskFamily.RERANKING:
        labels = torch.tensor([[1.0], [0.0], [1.0], [0.0]])[ROWS]
        return nn.BCEWithLogitsLoss()(head(read_means(model, texts)), labels)
    if family in SEQUENCE_FAMILIES:
        logits = head(read_means(model, texts))
        labels = [EXAMPLES[family][row].label for row in ROWS]
        if family is TaskFamily.MULTI_LABEL:
            labels = [[float(label in given) for label in range(3)] for given in labels]
        config = SimpleNamespace(num_labels=logits.shape[1], problem_type=PROBLEM_TYPES[family])
        return ForSequenceClassificationLoss(torch.tensor(labels), logits, config)
    states, mask = read_padded(model, texts)
    targets = torch.full(mask.shape, -100)
    column = data.columns["tags" if family is TaskFamily.TC else "inside"]
    for at, row in enumerate(ROWS):
        targets[at, : data.lengths[row]] = torch.from_numpy(
            column[data.starts[row] : data.starts[row + 1]]
        )
    return cross_entropy(head(states).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("tokens_per_forward", [16384, 40, 1])
@pytest.mark.parametrize("family", TaskFamily)
def test_gradients_of_the_plain_way(
    family, tokens_per_forward, dataset, encoder, make_model, plain
):
    """Retrieval's with a scale of its own."""
    task = TASKS[family](
        dataset(LABELS[family]),
        FinetuneConfig(tokens_per_forward=tokens_per_forward, scale=3.0),
    )
    data = task.encode(EXAMPLES[family], encoder)
    model = make_model(task)
    assert task.count_examples(data) == 4
    head = task.build_head(16)
    head.load_state_dict(model.head.state_dict())
    expected = compute_plain_loss(family, data, plain, head)
    expected.backward()
    assert task.backward(model, data, ROWS) == pytest.approx(expected.item(), rel=1e-5)
    pairs = [(model.backbone.model, plain), (model.head, head)]
    for own, other in pairs:
        for weights, others in zip(own.parameters(), other.parameters(), strict=True):
            largest = others.grad.abs().max().item()
            apart = (weights.grad - others.grad).abs().max().item()
            # Processors round sums differently
            assert largest > 0 and apart <= 4e-6 * max(1, largest)


@pytest.mark.parametrize("family", TaskFamily)
def test_predictions_that_are_no_number_are_no_score(family, dataset, encoder, make_model):
    """With weights of which one became NaN in the last update."""
    task = TASKS[family](dataset(LABELS[family], train=EXAMPLES[family]), FinetuneConfig())
    data = task.encode(SPLITS[family], encoder)
    model = make_model(task)
    model.train()
    # Nothing is dropped
    assert task.evaluate(model, data, SPLITS[family]) == task.evaluate(model, data, SPLITS[family])
    assert all(weights.grad is None for weights in model.parameters())
    task.clear_cache()
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = torch.nan
    with pytest.raises(NonFinitePredictionError, match="a prediction of the model is NaN or inf"):
        task.evaluate(model, data, SPLITS[family])


def test_losses_are_float32_whatever_the_weights_are(dataset, encoder, make_model):
    task = TASKS[TaskFamily.SC](dataset("abc"), FinetuneConfig())
    data = task.encode(EXAMPLES[TaskFamily.SC], encoder)
    model = make_model(task)
    expected = task.backward(model, data, np.arange(4))
    model.backbone.to(torch.bfloat16)
    assert task.backward(model, data, np.arange(4)) == pytest.approx(expected, rel=0.02)
    assert model.head.weight.grad.dtype == torch.float32
    model.to(torch.bfloat16)
    loss = task.backward(model, data, np.arange(4))
    assert (
        loss == pytest.approx(expected, rel=0.02) and torch.tensor(loss).bfloat16().item() != loss
    )
