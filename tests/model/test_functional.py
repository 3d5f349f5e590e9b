"""SwiGLU, GeGLU and RMSNorm against autograd, and dropout against its hash."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from megaenc.model.config import ModelConfig

TOKENS = 7
HEADS = 3
DIM = 8
pytestmark = pytest.mark.usefixtures("one_process")


def slice_of_more(*shape):
    """Return a view without memory of its own, as the parts of a joint projection are."""
    return torch.randn(*shape[:-1], shape[-1] + 3, dtype=torch.float64)[..., 1:-2]


def test_rotations_are_computed_in_the_numbers_that_come():
    """Values and gradients are checked by tests/convert/test_continued_training.py."""
    from megaenc.model.functional import Rotation

    turn = Rotation.from_angles(torch.rand(TOKENS, 1, 1, DIM) * 6)
    x = torch.randn(TOKENS, 1, HEADS, DIM)
    rounded = turn(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), turn(x), rtol=0, atol=2**-5)


@pytest.fixture(params=[1, 2**18], ids=["row after row", "all at once"])
def in_parts(request, monkeypatch):
    from megaenc.model import functional

    monkeypatch.setattr(functional, "_CACHE_ELEMENTS", request.param)


def normed(x, weight, residual=None):
    from megaenc.model.functional import rms_norm

    return rms_norm(x, weight, 1e-5, residual)


def outcome(function, inputs, upstream):
    """Return the output and the gradients of all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def of_sum(x, weight, residual):
    return torch.stack(normed(x, weight, residual))


def formula(x, weight, residual=None):
    if residual is None:
        return F.rms_norm(x, (DIM,), weight, 1e-5)
    return torch.stack([x + residual, F.rms_norm(x + residual, (DIM,), weight, 1e-5)])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_norm_of_numbers_and_of_sums_is_that_of_torch_with_its_gradients(dtype):
    """The sum is an output too, so gradients reach it directly and through the norm."""
    x = slice_of_more(TOKENS, 1, HEADS, DIM).to(dtype)
    weight = torch.randn(DIM, dtype=dtype)
    residual = torch.randn_like(x)
    upstream = torch.randn(2, *x.shape, dtype=dtype)
    torch.testing.assert_close(
        outcome(normed, (x, weight), upstream[0]), outcome(formula, (x, weight), upstream[0])
    )
    inputs = (x, weight, residual)
    torch.testing.assert_close(
        outcome(of_sum, inputs, upstream), outcome(formula, inputs, upstream)
    )


@pytest.mark.usefixtures("in_parts")
def test_a_norm_of_bfloat16_is_rounded_once():
    x = torch.randn(500, 1, 64).bfloat16()
    weight = torch.randn(64).bfloat16()
    upstream = torch.randn(500, 1, 64).bfloat16()
    found = outcome(normed, (x, weight), upstream)
    exact = outcome(normed, (x.double(), weight.double()), upstream.double())
    for here, there in zip(found, exact, strict=True):
        assert here.dtype == torch.bfloat16
        torch.testing.assert_close(here.double(), there, rtol=2**-8, atol=1e-5)


def test_a_norm_keeps_its_input_and_a_number_a_row_and_swiglu_its_input():
    from megaenc.model.functional import GatedActivation

    kept = []
    x = torch.randn(5, 1, DIM).bfloat16().requires_grad_()
    weight = torch.ones(DIM).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        normed(x, weight)
        GatedActivation(None, "silu")(x)
    assert sorted(tensor.numel() for tensor in kept) == [5, DIM, 5 * DIM, 5 * DIM]


def test_nothing_has_no_norm():
    assert normed(torch.empty(0, 1, DIM), torch.ones(DIM)).shape == (0, 1, DIM)


@pytest.mark.parametrize("name", get_args(ModelConfig.__annotations__["activation"]))
def test_gated_activations_are_transformers_with_their_gradients(name):
    from transformers.activations import ACT2FN

    from megaenc.model.functional import GatedActivation

    def gated(x):
        gate, up = x.chunk(2, -1)
        return ACT2FN[name](gate) * up

    x = torch.randn(5, 2, 6)
    upstream = torch.randn(5, 2, 3)
    found = outcome(GatedActivation(None, name), [x], upstream)
    torch.testing.assert_close(found, outcome(gated, [x], upstream))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_drops_its_share_of_numbers_and_gradients(probability):
    from megaenc.model import functional

    keys = torch.randint(-(2**63), 2**63 - 1, (2048,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(2048, 1, 768, requires_grad=True)
    out = functional.dropout(x, keys, 3, probability)
    dropped = out == 0
    assert dropped.double().mean() == pytest.approx(
        probability, abs=4 * (probability / x.numel()) ** 0.5
    )
    torch.testing.assert_close(out, x.masked_fill(dropped, 0) / (1 - probability))
    gradient = torch.randn_like(x)
    (found,) = torch.autograd.grad(out, x, gradient)
    torch.testing.assert_close(found, gradient.masked_fill(dropped, 0) / (1 - probability))
    rows = torch.tensor([5, 1999, 7])
    assert torch.equal(functional.dropout(x[rows], keys[rows], 3, probability), out[rows])


def test_dropout_is_decided_by_this_hash():
    """The hash is written out as integers: later versions must resume runs unchanged."""
    from megaenc.model import functional

    keys = torch.tensor([0, -1, 0x123456789ABCDEF0, -(2**63)])
    kept = functional.dropout(torch.ones(4, 1, 12), keys, 2, 0.3).squeeze(1) > 0
    for row, key in enumerate(keys.tolist()):
        for channel in range(12):
            number = (0x9E3779B1 * channel + 0x85EBCA77 * 2 + key) % 2**32
            number = (number ^ number >> 16) * 0x7FEB352D % 2**32
            number = (number ^ number >> 15) * 0x846CA68B % 2**32
            number = (number ^ number >> 16) * (key % 2**64 >> 32 | 1) % 2**32
            assert kept[row, channel] == (number >= 0.3 * 2**32)
