"""Properties of kernels beyond the check at the start: slices, rounding, memory."""

import os

import pytest
import torch

from megaenc.model.functional import Rotation
from megaenc.model.kernels import FusedKernels
from megaenc.model.kernels.glu import glu
from megaenc.model.kernels.norm import layer_norm, rms_norm
from megaenc.model.linear_cross_entropy import Predictions, linear_cross_entropy

assert os.environ.get("TRITON_INTERPRET") == "1", "expected to be started by test_interpreted.py"
both = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
norms = pytest.mark.parametrize("norm", [rms_norm, layer_norm])


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def rotation(tokens, dim):
    angles = torch.rand(tokens, 1, 1, dim // 2) * 2000
    return Rotation(angles.cos(), angles.sin(), fused=True)


@both
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "glu", "rotation", "split"])
def test_slices_of_odd_alignment_are_as_good_as_whole_tensors(name, dtype):
    """Inputs and gradients are exactly equal."""
    weight = draw(24, dtype=dtype)
    turn = rotation(5, 24)
    function, width = {
        "rms_norm": (lambda x: rms_norm(x, weight, 1e-5), 24),
        "layer_norm": (lambda x: layer_norm(x, weight, 1e-5), 24),
        "glu": (lambda x: glu(x, "silu"), 48),
        "rotation": (turn, 24),
        "split": (lambda x: torch.cat([part.flatten(1) for part in turn.split(x, 24)], 1), 96),
    }[name]
    whole = draw(5, 1, 3, width + 3, dtype=dtype)
    part = whole[..., 1:-2]
    copy = part.detach().clone().requires_grad_()
    found = function(part)
    expected = function(copy)
    gradient = torch.randn(*found.shape[:-1], found.size(-1) + 3).to(dtype)[..., 1:-2]
    assert torch.equal(found, expected) and found.is_contiguous()
    [here] = torch.autograd.grad(found, whole, gradient)
    [there] = torch.autograd.grad(expected, copy, gradient.contiguous())
    assert torch.equal(here[..., 1:-2], there)


@norms
def test_norm_of_a_rounded_sum_is_that_of_what_is_passed_on(norm):
    x = draw(40, 64, dtype=torch.bfloat16)
    residual = draw(40, 64, dtype=torch.bfloat16)
    weight = draw(64, dtype=torch.bfloat16)
    total, out = norm(x, weight, 1e-5, residual)
    assert torch.equal(out, norm(total, weight, 1e-5))


@norms
def test_norm_of_zeros(norm):
    zeros = torch.zeros(2, 96, requires_grad=True)
    out = norm(zeros, draw(96), 1e-5)
    assert not out.any() and torch.autograd.grad(out.sum(), zeros)[0].isfinite().all()


def test_layer_norm_far_from_0():
    """Subtract the mean before squaring; the mean square would lose four digits."""
    x = draw(9, 171) + 100
    weight = draw(171)
    exact = torch.nn.functional.layer_norm(x.double(), (171,), weight.double(), None, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, 1e-5).double(), exact, rtol=0, atol=1e-4)


@both
@pytest.mark.parametrize("predictions", [0, 140])
def test_the_loss_is_that_of_torchs_operations(predictions, dtype, one_process):
    """The loss is computed in one part and in several."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    hidden = draw(predictions, 24, dtype=dtype)
    weight = draw(1000, 24, dtype=dtype)
    labels = torch.randint(0, 937, (predictions,))

    def outcome(**how):
        loss, correct = linear_cross_entropy(
            hidden, weight, Predictions(None, labels), 937, group, **how
        )
        return (
            loss,
            correct,
            torch.autograd.grad(loss * 0.5, (hidden, weight)),
        )  # as the schedules scale it

    plain, plain_correct, expected = outcome()
    off = 1e-6 if dtype == torch.float32 else 2**-7
    for at_once in (2**30, 130 * 1000 * dtype.itemsize):
        loss, correct, gradients = outcome(fused=FusedKernels(loss=True), chunk_size=at_once)
        assert loss.dtype == torch.float32 and int(correct) == int(plain_correct)
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-4)
        for here, there in zip(gradients, expected, strict=True):
            assert here.dtype == dtype and (here - there).norm() <= off * there.norm()
        assert not gradients[1][937:].any()


def test_nothing_is_kept_but_what_came():
    """So recomputed layers free their activations."""
    kept = []
    x = draw(5, 1, 64)
    weight = draw(64)
    cos = torch.ones(5, 1, 1, 32)
    turn = Rotation(cos, cos, fused=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        rms_norm(x, weight, 1e-5)
        glu(x, "silu")
        turn(x[:, :, None])
        turn.split(draw(5, 1, 1, 192), 64)
        total, _ = layer_norm(x, weight, 1e-5, x)
    given = {tensor.data_ptr() for tensor in (x, weight, cos, total)}
    assert len(kept) == 9 and {tensor.data_ptr() for tensor in kept} == given
