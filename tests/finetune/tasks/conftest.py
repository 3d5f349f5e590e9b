"""A small tokenizer and encoder, batches computed the plain way, and a model that is told the answers."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from text_helpers import text_encoder
from torch import nn

from megaenc.data.tokenizer.tokenizer import train_tokenizer

TEXT = (
    "The small garden behind the house was full of yellow flowers in the early summer. Nobody came. "
    "The old man walked slowly down to the river with his dog, a heavy book and 1,024 letters from Lyon and Paris. "
    "Question: where did Marie Curie live?\nContext: "
)
HIDDEN = 16


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([TEXT] * 40, 360)


@pytest.fixture
def encoder(tokenizer):
    return text_encoder(tokenizer, 64)


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    from transformers import EuroBertConfig, EuroBertModel

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = EuroBertConfig(vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=64, **sizes, **ids)
    EuroBertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_model(folder) -> Callable:
    """The model of a task, with a head that is not all but 0."""
    from megaenc.finetune.model.load import load_backbone
    from megaenc.finetune.tasks import TaskModel

    def make(task):
        torch.manual_seed(1)
        head = task.build_head(HIDDEN)
        with torch.no_grad():
            for weights in head.parameters():
                weights.normal_()
        return TaskModel(load_backbone(str(folder), "bidirectional", device="cpu", dtype=torch.float32), head)

    return make


@pytest.fixture
def plain_states(folder) -> Callable:
    """Padded batches through transformers' own model: `states, mask = forward(model, texts)`, and that model."""
    from transformers import EuroBertModel

    model = EuroBertModel.from_pretrained(folder, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # the token that pads also ends texts, and has a gradient there

    def forward(texts):
        ids, mask = torch.zeros((2, len(texts), max(map(len, texts))), dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
            mask[row, : len(text)] = 1
        return model(input_ids=ids, attention_mask=mask).last_hidden_state, mask

    return SimpleNamespace(model=model, forward=forward)


@pytest.fixture
def same_gradients() -> Callable:
    """Compare the gradients of a task's model with those of transformers' model and a copy of its head; both are cleared."""

    def compare(model, plain, head=None):
        pairs = list(zip(model.backbone.model.named_parameters(), plain.named_parameters(), strict=True))
        pairs += list(zip(model.head.named_parameters(), [] if head is None else head.named_parameters(), strict=True))
        for (name, own), (other_name, expected) in pairs:
            assert name == other_name
            largest = expected.grad.abs().max().item()
            apart = (own.grad - expected.grad).abs().max().item()
            assert largest > 0 and apart <= 4e-6 * max(1, largest), (name, apart, largest)  # processors round sums differently
        model.zero_grad()
        plain.zero_grad()
        if head is not None:
            head.zero_grad()

    return compare


class Oracle(nn.Module):
    """A backbone that knows the states of every text: `told` maps its tokens to [tokens, hidden]."""

    def __init__(self, told: dict):
        super().__init__()
        self.told = {tuple(text.tolist()): states for text, states in told}
        self.seen = 0

    def compute_states(self, packed):
        self.seen += len(packed.lengths)
        texts = packed.tokens.split(packed.lengths)
        return torch.cat([torch.as_tensor(self.told[tuple(text.tolist())], dtype=torch.float32) for text in texts])


@pytest.fixture
def oracle() -> Callable:
    """A model whose head passes on what the states say: `oracle(task, [(tokens, states), ...])`."""
    from megaenc.finetune.tasks import TaskModel

    def make(task, told):
        told = list(told)
        size = np.asarray(told[0][1]).shape[1]
        head = task.build_head(size)
        with torch.no_grad():
            for weights in head.parameters():
                weights.copy_(torch.eye(size)) if weights.ndim == 2 else weights.zero_()
        model = TaskModel(Oracle(told), head)
        model.register_parameter("device_of", nn.Parameter(torch.zeros(1)))
        return model

    return make


@pytest.fixture
def dataset() -> Callable:
    """Labels and splits, as a registered data set has them."""

    def make(labels=(), **splits):
        return SimpleNamespace(labels=tuple(labels), load_split=splits.__getitem__)

    return make


@pytest.fixture
def refuses_nan() -> Callable:
    """Evaluating with weights of which one became NaN in the last update is no score, but NotFinite."""
    from megaenc.finetune.tasks import NonFinitePredictionError

    def check(task, model, data, examples):
        task.evaluate(model, data, examples)
        with torch.no_grad():
            list(model.parameters())[-1].view(-1)[0] = torch.nan
        with pytest.raises(NonFinitePredictionError, match="a prediction of the model is NaN or inf"):
            task.evaluate(model, data, examples)

    return check
