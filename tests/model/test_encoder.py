"""The packed encoder against the same thing done slowly: attention, loss and initial weights in one process."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megaenc.backend import Layout
from megaenc.model import ModelConfig
from megaenc.objectives import Attention

TINY = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2)
EDGES = [0, 5, 6, 20, 32]
pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def build(vocab_size=100, seed=3):
    from megaenc.model.encoder import build_encoder

    return build_encoder(TINY, vocab_size, 32, Layout(), torch.float32, seed=seed)


def forward(encoder, tokens, attention, edges=EDGES, predict_at=None):
    from megaenc.model.attention import Packing

    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(edges)])
    return encoder(tokens[None], positions, Packing.of(edges, attention, torch.device("cpu")), predict_at)


@pytest.mark.parametrize("attention", Attention)
def test_attention_is_softmax_inside_documents(attention):
    from megaenc.model.attention import PackedAttention, Packing
    from megaenc.model.layers import transformer_config

    core = PackedAttention(transformer_config(TINY, Layout(), torch.float32), 1, None, "self")
    query, key, value = torch.randn(32, 1, 4, 8), torch.randn(32, 1, 2, 8), torch.randn(32, 1, 2, 8)
    packing = Packing.of(EDGES, attention, torch.device("cpu"))
    found = core(query, key, value, None, packed_seq_params=packing).view(32, 4, 8)
    for at in range(32):
        start = max(edge for edge in EDGES if edge <= at)
        stop = at + 1 if attention == Attention.CAUSAL else min(edge for edge in EDGES if edge > at)
        for head in range(4):
            scores = key[start:stop, 0, head // 2] @ query[at, 0, head] / math.sqrt(8)
            torch.testing.assert_close(found[at, head], scores.softmax(0) @ value[start:stop, 0, head // 2])


@pytest.mark.parametrize("attention", Attention)
def test_outputs_depend_on_what_the_mask_allows_and_on_nothing_else(attention):
    """Change one token at a time and see which outputs move: causal, only later ones; bidirectional, all of its document."""
    encoder = build().eval()
    tokens = torch.arange(32) + 2
    with torch.no_grad():
        before = forward(encoder, tokens, attention)
        for changed in range(32):
            other = tokens.clone()
            other[changed] = 99
            moved = (forward(encoder, other, attention) != before).any(dim=1).nonzero().flatten().tolist()
            start = max(edge for edge in EDGES if edge <= changed)
            stop = min(edge for edge in EDGES if edge > changed)
            assert moved == list(range(changed if attention == Attention.CAUSAL else start, stop))


def test_sparse_head_gives_the_rows_of_the_full_one():
    encoder, tokens, at = build(), torch.arange(32), torch.tensor([0, 7, 31])
    torch.testing.assert_close(
        forward(encoder, tokens, Attention.CAUSAL, predict_at=at), forward(encoder, tokens, Attention.CAUSAL)[at]
    )
    assert forward(encoder, tokens, Attention.CAUSAL, predict_at=torch.tensor([], dtype=torch.long)).shape == (0, 128)


def test_padded_vocabulary_takes_no_part():
    from megaenc.model.loss import summed_loss

    encoder, tokens = build(vocab_size=100), torch.arange(32)
    assert encoder.output_layer.weight.shape[0] == 128
    logits = forward(encoder, tokens, Attention.BIDIRECTIONAL)
    assert (logits[:, 100:] == float("-inf")).all()
    expected = F.cross_entropy(logits[:, :100], tokens, reduction="sum")
    loss, _ = summed_loss(logits, tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (encoder.output_layer.weight.grad[100:] == 0).all()


def test_loss_is_cross_entropy_with_its_gradient_and_accuracy():
    from megaenc.model.loss import summed_loss

    scores = torch.randn(50, 64)
    labels = torch.randint(0, 64, (50,))
    labels[:10] = scores[:10].argmax(1)
    here, there = (scores.clone().requires_grad_() for _ in range(2))
    loss, correct = summed_loss(here * 1.0, labels)
    expected = F.cross_entropy(there, labels, reduction="sum")
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(here.grad, there.grad)
    assert int(correct) == int((scores.argmax(1) == labels).sum()) >= 10


def test_loss_of_no_target_is_zero_and_can_go_backward():
    from megaenc.model.loss import summed_loss

    encoder = build()
    logits = forward(encoder, torch.arange(32), Attention.BIDIRECTIONAL, predict_at=torch.tensor([], dtype=torch.long))
    loss, correct = summed_loss(logits, torch.tensor([], dtype=torch.long))
    loss.backward()
    assert (loss.item(), int(correct)) == (0.0, 0)
    assert all((p.grad == 0).all() for p in encoder.parameters())


def test_initial_weights_are_normal_and_follow_from_the_seed():
    encoder, again, other = build(seed=3), build(seed=3), build(seed=4)
    weights = dict(encoder.named_parameters())
    for name, parameter in weights.items():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])
    values = np.concatenate([p.detach().numpy()[:100].ravel() for p in weights.values() if p.dim() == 2])
    assert abs(values.mean()) < 4 * 0.02 / math.sqrt(values.size)
    assert values.std() == pytest.approx(0.02, rel=4 / math.sqrt(2 * values.size))
    assert (weights["embedding.word_embeddings.weight"][100:] == 0).all()
