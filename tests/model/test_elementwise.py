"""Rotations and SwiGLU against the same formulas under autograd, and against complex numbers."""

import pytest
import torch
import torch.nn.functional as F

TOKENS, HEADS, DIM = 7, 3, 8
pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def angles():
    return torch.rand(TOKENS, 1, 1, DIM // 2, dtype=torch.float64).repeat(1, 1, 1, 2) * 6


def slice_of_more(*shape):
    """As the parts of a joint projection are: no memory of their own."""
    return torch.randn(*shape[:-1], shape[-1] + 3, dtype=torch.float64)[..., 1:-2]


def rotation(angles):
    from megaenc.model.elementwise import Rotation

    return Rotation.by(angles)


def swiglu(x):
    from megaenc.model.elementwise import SwiGLU

    return SwiGLU(None)(x)


def test_a_rotation_turns_points_of_the_plane(angles):
    x = slice_of_more(TOKENS, 1, HEADS, DIM)
    half = angles[..., : DIM // 2]
    turned = torch.complex(*(part.contiguous() for part in x.chunk(2, -1))) * torch.polar(torch.ones_like(half), half)
    torch.testing.assert_close(rotation(angles)(x), torch.cat([turned.real, turned.imag], -1))


def test_the_gradient_of_a_rotation_is_turned_back(angles):
    x = slice_of_more(TOKENS, 1, HEADS, DIM).requires_grad_()
    assert torch.autograd.gradcheck(rotation(angles), x)


def test_rotations_are_computed_in_the_numbers_that_come(angles):
    x = torch.randn(TOKENS, 1, HEADS, DIM)
    turn = rotation(angles.float())
    rounded, exact, again = turn(x.bfloat16()), turn(x), turn(x.bfloat16())
    assert torch.equal(rounded, again)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=2**-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_swiglu_is_its_formula_with_its_gradient(dtype):
    here = torch.randn(5, 2, 6, dtype=dtype, requires_grad=True)
    there = here.detach().clone().requires_grad_()
    gate, up = there.chunk(2, -1)
    found, expected = swiglu(here), F.silu(gate) * up
    weights = torch.randn_like(expected)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(here.grad, there.grad)


def test_swiglu_keeps_what_it_was_given_and_nothing_else():
    kept = []
    x = torch.randn(5, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
