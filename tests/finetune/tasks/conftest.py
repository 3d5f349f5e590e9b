"""A small tokenizer and encoder, and models that are told what to answer."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import save_model
from text_helpers import text_encoder
from torch import nn

from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.finetune.model.load import load_backbone
from megaenc.finetune.tasks import TaskModel

TEXT = (
    "The small garden behind the house was full of yellow flowers in the early summer. Nobody "
    "came. "
    "The old man walked slowly down to the river with his dog, a heavy book and 1,024 letters from "
    "Lyon and Paris. "
    "Question: where did Marie Curie live?\nContext: "
)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([TEXT] * 40, 360)


@pytest.fixture
def encoder(tokenizer):
    return text_encoder(tokenizer, 128)


@pytest.fixture(scope="session")
def directory(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(
        directory,
        "eurobert",
        tokenizer,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    return directory


@pytest.fixture
def make_model(directory) -> Callable:
    """The model of a task, with a head that is not all but 0."""

    def make(task):
        torch.manual_seed(1)
        head = task.build_head(16)
        for weights in head.parameters():
            nn.init.normal_(weights)
        return TaskModel(
            load_backbone(str(directory), "bidirectional", device="cpu", dtype=torch.float32), head
        )

    return make


class Oracle(nn.Module):
    """Backbone that knows the states of every text.

    `told` maps a text's tokens to [tokens, hidden].
    """

    def __init__(self, told: dict):
        super().__init__()
        self.told = {tuple(text.tolist()): states for text, states in told}
        self.seen = 0
        self.weight = nn.Parameter(torch.zeros(1))

    def compute_states(self, packed):
        self.seen += len(packed.lengths)
        texts = packed.tokens.split(packed.lengths)
        return torch.cat(
            [torch.tensor(self.told[tuple(text.tolist())], dtype=torch.float32) for text in texts]
        )


@pytest.fixture
def oracle() -> Callable:
    """Return `oracle(task, (texts, states), ...)`: models whose heads pass states on."""

    def make(task, *sides):
        told = []
        for texts, states in sides:
            rows = texts.gather_rows(range(len(states)))
            for text, some in zip(rows, states, strict=True):
                told.append((text, np.broadcast_to(some, (len(text), np.shape(some)[-1]))))
        size = told[0][1].shape[1]
        head = task.build_head(size)
        if isinstance(head, nn.Linear):
            nn.init.eye_(head.weight)
        return TaskModel(Oracle(told), head)

    return make


@pytest.fixture
def dataset() -> Callable:
    """Labels and splits, as a registered data set has them."""

    def make(labels=(), **splits):
        return SimpleNamespace(labels=tuple(labels), load_split=splits.__getitem__)

    return make
