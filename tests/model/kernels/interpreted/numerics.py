"""Each kernel against its formula in float64 under autograd: forward and gradients, on shapes that fill no block."""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megaenc.model.functional import Rotation
from megaenc.model.kernels import FusedKernels
from megaenc.model.kernels.cross_entropy import logits_to_gradient_, softmax_statistics
from megaenc.model.kernels.glu import geglu, swiglu
from megaenc.model.kernels.norm import layer_norm, rms_norm
from megaenc.model.linear_cross_entropy import combine_statistics, linear_cross_entropy, rows_per_chunk

assert os.environ.get("TRITON_INTERPRET") == "1", "expected to be started by test_interpreted.py"
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def draw(*shape, dtype=torch.float32, size=1.0):
    return (torch.randn(shape) * size).to(dtype).requires_grad_()


def is_rounded(found, exact, slack=1):
    """Nothing but one rounding lies between: the last place of bfloat16 (the interpreter cuts off), some places of float32.

    `slack`: multiplies what is allowed in float32.
    """
    step = 2**-7 if found.dtype == torch.bfloat16 else slack * 2**-20
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * step, atol=slack * 2**-18)


def same(kernel, formula, *inputs, slack=1):
    """Output and gradients of both."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = kernel(*inputs), formula(*exact)
    assert found.dtype == inputs[0].dtype and found.is_contiguous()
    gradient = torch.randn(*found.shape[:-1], found.size(-1) + 3).to(found.dtype)[..., 1:-2]  # a slice, of odd alignment
    is_rounded(found, expected, slack)
    to_inputs = torch.autograd.grad(found, inputs, gradient)
    to_exact = torch.autograd.grad(expected, exact, gradient.double())
    for here, there in zip(to_inputs, to_exact, strict=True):
        is_rounded(here, there, slack)


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def centered(x, weight):
    return normed(x - x.mean(-1, keepdim=True), weight)


norms = pytest.mark.parametrize(("norm", "formula"), [(rms_norm, normed), (layer_norm, centered)], ids=["rms", "layer"])


@both
@norms
@pytest.mark.parametrize("shape", [(7, 1, 1728), (67, 1, 3, 96), (1, 1, 64), (200, 33), (3, 1, 1), (0, 1, 96)], ids=str)
def test_norm(shape, norm, formula, dtype):
    x, weight = draw(*shape, dtype=dtype, size=3), draw(shape[-1], dtype=dtype)
    same(lambda x, weight: norm(x, weight, 1e-5), formula, x, weight)


@both
@norms
@pytest.mark.parametrize("shape", [(7, 1, 1728), (67, 1, 96), (1, 1, 64), (200, 33), (3, 1, 1), (0, 1, 96)], ids=str)
def test_norm_of_a_sum(shape, norm, formula, dtype):
    """Both outputs and all gradients; of whole numbers, whose sums need no rounding."""
    x, residual = (draw(*shape, dtype=dtype, size=3).detach().round().requires_grad_() for _ in range(2))
    same(
        lambda x, residual, weight: torch.stack(norm(x, weight, 1e-5, residual)),
        lambda x, residual, weight: torch.stack([x + residual, formula(x + residual, weight)]),
        x,
        residual,
        draw(shape[-1], dtype=dtype),
    )


@norms
def test_norm_of_a_rounded_sum_is_that_of_what_is_passed_on(norm, formula):
    x, residual, weight = (draw(*shape, dtype=torch.bfloat16) for shape in ((40, 64), (40, 64), (64,)))
    total, out = norm(x, weight, 1e-5, residual)
    assert torch.equal(out, norm(total, weight, 1e-5))


@norms
def test_norm_of_a_slice_and_of_nothing(norm, formula):
    x, weight = draw(5, 1, 4, 100), draw(96)
    same(
        lambda x, weight: norm(x[:, :, 1:3, :96], weight, 1e-5),
        lambda x, weight: formula(x[:, :, 1:3, :96], weight),
        x,
        weight,
    )
    zeros = torch.zeros(2, 96, requires_grad=True)
    same(lambda x, weight: norm(x, weight, 1e-5), formula, zeros, weight)


def test_layer_norm_far_from_0():
    """The mean is subtracted before numbers are squared: their mean square would lose four digits of the spread."""
    x, weight = draw(9, 171) + 100, draw(171)
    exact = centered(x.double(), weight.double())
    torch.testing.assert_close(layer_norm(x, weight, 1e-5).double(), exact, rtol=0, atol=1e-4)


@both
@pytest.mark.parametrize("tokens, heads, dim", [(7, 3, 96), (5, 18, 64), (2, 40, 128), (1, 1, 10), (0, 2, 64)])
def test_rotary(tokens, heads, dim, dtype):
    angles = torch.rand(tokens, 1, 1, dim // 2) * 2000
    cos, sin = angles.cos(), angles.sin()

    def formula(x):
        first, second = x[..., 2:-3].chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    # A slice, as queries and keys are of the joint projection.
    same(lambda x: Rotation(cos, sin, fused=True)(x[..., 2:-3]), formula, draw(tokens, 1, heads, dim + 5, dtype=dtype))


@both
@pytest.mark.parametrize(
    "tokens, groups, per_group, dim", [(7, 3, 1, 96), (5, 6, 3, 64), (2, 5, 8, 128), (1, 1, 2, 10), (0, 2, 2, 64)]
)
def test_split(tokens, groups, per_group, dim, dtype):
    """Of a slice of rows too; values are copied to the last digit."""
    angles = torch.rand(tokens, 1, 1, dim // 2) * 2000
    cos, sin = angles.cos(), angles.sin()

    def turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def formula(mixed):
        blocks = mixed[..., 1:-2].unflatten(-1, (per_group + 2, dim)).squeeze(1)
        parts = turned(blocks[:, :, :-2]), turned(blocks[:, :, -2:-1]), blocks[:, :, -1:]
        return torch.cat([part.flatten(1) for part in parts], 1)

    rotation, mixed = Rotation(cos, sin, fused=True), draw(tokens, 1, groups, (per_group + 2) * dim + 3, dtype=dtype)
    same(lambda mixed: torch.cat([part.flatten(1) for part in rotation.split(mixed[..., 1:-2], dim)], 1), formula, mixed)
    q, k, v = rotation.split(mixed[..., 1:-2], dim)
    assert (q.shape, k.shape, v.shape) == ((tokens, groups * per_group, dim), *[(tokens, groups, dim)] * 2)
    assert torch.equal(v, mixed[:, 0, :, -dim - 2 : -2])


@both
@pytest.mark.parametrize("rows, width", [(9, 171), (3, 2500), (1, 1), (0, 8)])
@pytest.mark.parametrize(
    ("kernel", "activation"),
    [(swiglu, F.silu), (geglu, F.gelu), (partial(geglu, approximate="tanh"), partial(F.gelu, approximate="tanh"))],
    ids=["silu", "gelu", "tanh"],
)
def test_gated_activation(kernel, activation, rows, width, dtype):
    def formula(x):
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    slack = 1 if kernel is swiglu else 8  # far below 0, 1 + erf(x) and the exponential of a polynomial lose digits
    same(kernel, formula, draw(rows, 1, 2 * width, dtype=dtype), slack=slack)
    same(kernel, formula, draw(rows, 1, 2 * width, dtype=dtype, size=50), slack=slack)  # exp() is infinite


@both
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_logits_of_a_vocabulary_in_shares(rows, shares, dtype):
    """1,000 columns on each rank, of which the last has 937, or of three the last has padding alone."""
    real = [1000] * (shares - 1) + [937] if shares < 3 else [1000, 937, 0]
    whole = draw(rows, sum(real), dtype=dtype, size=4).detach()
    labels = torch.randint(0, whole.size(1), (rows,))
    labels[::3] = whole[::3].float().argmax(1)
    parts, firsts = whole.split(real, 1), [1000 * rank for rank in range(shares)]
    parts = [torch.cat([part, torch.full((rows, 1000 - part.size(1)), 1e4, dtype=dtype)], 1) for part in parts]
    how = list(zip(firsts, real, strict=True))
    own = torch.stack([softmax_statistics(part, labels, *which) for part, which in zip(parts, how, strict=True)])
    top, total, target, token = combine_statistics(own)
    exact = whole.double()
    is_rounded(total.log() + top - target, F.cross_entropy(exact, labels, reduction="none"))
    assert torch.equal(token.long(), (exact == exact.amax(1, keepdim=True)).int().argmax(1) if rows else labels)
    if shares == 3:
        assert (own[2, 1] == 0).all() and (own[2, 0] == torch.finfo(torch.float32).min).all()
    errors = [logits_to_gradient_(part, labels, top, total, *which) for part, which in zip(parts, how, strict=True)]
    expected = exact.softmax(1) - F.one_hot(labels, whole.size(1))
    is_rounded(torch.cat([error[:, :columns] for error, columns in zip(errors, real, strict=True)], 1), expected)
    assert all((error[:, columns:] == 0).all() for error, columns in zip(errors, real, strict=True))


@pytest.mark.parametrize("at", [0, 3, 4999])
def test_of_equals_the_lowest_id_is_the_guess(at):
    logits = torch.full((1, 5000), -2.0)
    logits[0, at:] = 7.0
    assert softmax_statistics(logits, torch.tensor([4]), 100, 5000)[3].tolist() == [100 + at]


@pytest.fixture
def group(one_process):
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


@both
@pytest.mark.parametrize("predictions", [0, 1, 140])
def test_the_loss_is_that_of_torchs_operations(predictions, dtype, group):
    """In one part and in several."""
    hidden, weight = draw(predictions, 24, dtype=dtype), draw(1000, 24, dtype=dtype)
    labels = torch.randint(0, 937, (predictions,))
    plain, plain_correct = linear_cross_entropy(hidden, weight, labels, 937, group)
    expected = torch.autograd.grad(plain * 0.5, (hidden, weight))
    off = 1e-6 if dtype == torch.float32 else 2**-7
    for at_once in (2**30, 130 * 1000 * dtype.itemsize):
        loss, correct = linear_cross_entropy(hidden, weight, labels, 937, group, FusedKernels(loss=True), at_once)
        assert loss.dtype == torch.float32 and int(correct) == int(plain_correct)
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-4)
        found = torch.autograd.grad(loss * 0.5, (hidden, weight))  # as the schedules scale it
        for here, there in zip(found, expected, strict=True):
            assert here.dtype == dtype and here.shape == there.shape
            assert (here - there).norm() <= off * there.norm()
        assert (found[1][937:] == 0).all()
    with torch.no_grad():
        assert float(linear_cross_entropy(hidden, weight, labels, 937, group, FusedKernels(loss=True))[0]) == float(loss)


def test_parts_are_few_and_even():
    gib = 2**30
    assert rows_per_chunk(10_000, 2 * 128_256, gib) == 3_456  # of 4,096: three parts
    assert rows_per_chunk(4_096, 2 * 128_256, gib) == 4_096
    assert rows_per_chunk(523, 2 * 128_256, gib) == 640
    assert rows_per_chunk(0, 2 * 128_256, gib) == 1
    assert rows_per_chunk(10, 2 * gib, gib) == 1
    assert rows_per_chunk(1_000, gib // 100, gib) == 100
    for predictions in (1, 127, 4_097, 50_000):
        rows = rows_per_chunk(predictions, 2 * 128_256, gib)
        assert rows * 2 * 128_256 <= gib
        assert -(-predictions // rows) == -(-predictions // 4_096)


def test_nothing_is_kept_but_what_came(group):
    """So that layers that are computed again free what they should."""
    kept = []
    x, weight = draw(5, 1, 64), draw(64)
    cos = torch.ones(5, 1, 1, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm(x, weight, 1e-5), layer_norm(x, weight, 1e-5), swiglu(x), geglu(x), Rotation(cos, cos, fused=True)(x[:, :, None])
        Rotation(cos, cos, fused=True).split(draw(5, 1, 1, 192), 64)
        total, _ = layer_norm(x, weight, 1e-5, x)
    given = {tensor.data_ptr() for tensor in (x, weight, cos, total)}
    assert len(kept) == 12 and {tensor.data_ptr() for tensor in kept} == given
