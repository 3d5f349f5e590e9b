from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megaenc.finetune.model.backbone import _ACTIVE_PACK, pack_texts, packed_attention_forward

_LENGTHS = (2, 5, 5, 9)


def _states(heads, groups):
    torch.manual_seed(0)
    return [
        torch.randn(1, count, sum(_LENGTHS), 8, dtype=torch.float64, requires_grad=True)
        for count in (heads, groups, groups)
    ]


def _attend(query, key, value, causal, **asked):
    packed = pack_texts([np.ones(length, dtype=np.int64) for length in _LENGTHS], "cpu")
    reader = SimpleNamespace(
        attention="causal" if causal else "bidirectional",
        has_wide_window=False,
        sliding_windows=set(),
        use_varlen_kernel=True,
    )
    _ACTIVE_PACK.set((reader, packed))
    return packed_attention_forward(nn.Module(), query, key, value, None, scaling=0.3, **asked)[0]


def _by_the_definition(query, key, value, causal, window):
    """softmax(0.3 q k^T) v over a mask of the whole row."""
    text = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    place = torch.arange(sum(_LENGTHS))
    distance = place[:, None] - place
    sees = (text[:, None] == text) & (distance.abs() < window)
    if causal:
        sees &= distance >= 0
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = (0.3 * query @ key.transpose(-1, -2)).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_states_and_gradients_are_those_of_the_definition(causal, window):
    states = _states(4, 2)
    found = _attend(*states, causal, sliding_window=window)
    expected = _by_the_definition(*states, causal, window or 100)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, states, weights)
    others = torch.autograd.grad(expected, states, weights)
    torch.testing.assert_close(gradients, others)


def test_dropout_leaves_the_mean_as_it_is():
    states = _states(4, 4)
    whole = _attend(*states, causal=False)
    torch.manual_seed(1)
    dropped = torch.stack([_attend(*states, causal=False, dropout=0.5) for _ in range(400)])
    assert (dropped[0] != whole).any()
    assert (dropped.mean(0) - whole).abs().max() < 0.3


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_what_it_does_not_compute_is_refused(asked):
    with pytest.raises(NotImplementedError, match="expected plain self-attention"):
        _attend(*_states(4, 4), causal=False, **asked)
