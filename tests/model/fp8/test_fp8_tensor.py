"""float8 matrices against their values, and layers of them against float32."""

import math
import sys
from dataclasses import replace

import pytest
import runs
import torch

from megaenc.errors import InputError

pytestmark = pytest.mark.usefixtures("one_process")

OPEN = (torch.float8_e4m3fn, torch.float8_e5m2)
AMD = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
LAST_PLACE = dict.fromkeys((OPEN[0], AMD[0]), 2**-3) | dict.fromkeys((OPEN[1], AMD[1]), 2**-2)
TYPES = list(LAST_PLACE)
TOKENS = 52  # tokens are no multiple of 16
WIDTH = 48
OUT = 80


def kind(forward=OPEN[0], gradient=OPEN[1]):
    from megaenc.model.fp8.tensor import Float8Recipe

    return Float8Recipe(forward, gradient)


def scaled(x, dtype):
    """Return the float8 values of `x` and the scale that they are multiplied by."""
    numbers, inverse = kind().quantize(x, kind().amax_bits(x), dtype)
    return numbers.float(), float(inverse)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("largest", [3e-6, 448.0, 448.0001, 7e30])
def test_the_scale_is_the_largest_power_of_two_that_keeps_the_largest_number_in_range(
    largest, dtype
):
    x = torch.rand(7, 16) * largest
    x[3, 4] = -largest
    numbers, inverse = scaled(x, dtype)
    limit = torch.finfo(dtype).max
    assert math.frexp(inverse)[0] == 0.5
    assert largest / inverse <= limit < 2 * largest / inverse
    assert numbers.abs().max() <= limit


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_number_is_the_nearest_one(dtype):
    """Each error is at most half the last digit, or half the smallest normal number."""
    x = torch.randn(64, 64).exp() * torch.randn(64, 64).sign()
    numbers, inverse = scaled(x, dtype)
    half = LAST_PLACE[dtype] / 2
    assert (
        (numbers * inverse - x).abs()
        <= half * x.abs().clamp(min=torch.finfo(dtype).smallest_normal * inverse)
    ).all()


def test_parts_of_a_matrix_are_rounded_as_the_whole_is():
    """Slices round as in the whole matrix, so tensor parallelism changes nothing."""
    x = torch.randn(64, 64)
    x += 0.1 * x.sign()
    x[:, 32:] *= 37
    numbers, inverse = scaled(x, OPEN[0])
    part, of_part = scaled(x[:, :32].contiguous(), OPEN[0])
    assert of_part < inverse
    assert torch.equal(numbers[:, :32] * inverse, part * of_part)


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 16), torch.full((4, 16), 1e-38)], ids=["zero", "next to nothing"]
)
def test_a_matrix_of_nothing_is_no_fault(x):
    numbers, inverse = scaled(x, OPEN[0])
    assert (numbers * inverse - x).abs().max() <= 1e-38
    assert 0 < inverse < math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_makes_every_product_one(wrong):
    """NaN makes the step be skipped; float8 would turn infinity into a finite number."""
    x = torch.randn(32, 16)
    weight = torch.randn(16, 16)
    x[5, 6] = wrong
    f8 = kind()
    x8, x_inverse = f8.quantize(x, f8.amax_bits(x), f8.forward)
    w8, w_inverse = f8.quantize(weight, f8.amax_bits(weight), f8.forward)
    assert f8.matmul(x8, w8, x_inverse, w_inverse, torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [16, 17])
def test_a_turned_matrix_ends_in_zeros(rows, dtype):
    x = torch.randn(rows, 48).to(dtype)
    turned = kind().transpose(x)
    assert turned.shape == (48, -(-rows // 16) * 16)
    assert turned.is_contiguous()
    assert torch.equal(turned.float()[:, :rows], x.float().t())
    assert not turned.float()[:, rows:].any()


def layers(fp8_format, dtype):
    """Return a layer of each class, equal to megatron-core's except for the products."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megaenc.backend import ParallelConfig, detect_backend
    from megaenc.model import ModelConfig
    from megaenc.model.fp8.linear import Float8ColumnParallelLinear, Float8RowParallelLinear
    from megaenc.model.fp8.tensor import select_float8_recipe
    from megaenc.model.layer_spec import build_transformer_config

    config = build_transformer_config(ModelConfig(), ParallelConfig(), dtype)
    options = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": True,
        "skip_bias_add": False,
    }
    recipe = select_float8_recipe(fp8_format, detect_backend())
    for own, theirs, more in (
        (Float8ColumnParallelLinear, ColumnParallelLinear, {}),
        (Float8RowParallelLinear, RowParallelLinear, {"input_is_parallel": True}),
    ):
        layer = own(WIDTH, OUT, **options, **more, float8=recipe)
        assert (
            layer.state_dict().keys() == theirs(WIDTH, OUT, **options, **more).state_dict().keys()
        )
        yield layer


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str
)
@pytest.mark.parametrize(("fp8_format", "of_gradient"), [("hybrid", OPEN[1]), ("e4m3", OPEN[0])])
def test_layers_are_exactly_what_their_rounded_matrices_give(
    fp8_format, of_gradient, dtype, rounding
):
    """The products equal float32 products of the float8 values, in the input's type."""
    for layer in layers(fp8_format, dtype):
        torch.nn.init.normal_(layer.bias)
        x = torch.randn(TOKENS, 1, WIDTH).to(dtype).requires_grad_()
        gradient = torch.randn(TOKENS, 1, OUT).to(dtype)
        found, _ = layer(x)
        found.backward(gradient)
        x8, i = scaled(x.detach().flatten(0, 1), OPEN[0])
        w8, j = scaled(layer.weight.detach(), OPEN[0])
        g8, k = scaled(gradient.flatten(0, 1), of_gradient)
        x_TK = x8 * i
        w_NK = w8 * j
        g_TN = g8 * k
        for actual, expected in (
            (found, x_TK @ w_NK.t() + layer.bias.float()),
            (x.grad, g_TN @ w_NK),
            (layer.weight.grad, g_TN.t() @ x_TK),
            (layer.bias.grad, gradient.sum((0, 1)).float()),
        ):
            assert actual.dtype == dtype
            torch.testing.assert_close(
                actual.detach().float().view_as(expected),
                expected,
                rtol=rounding,
                atol=10 * rounding,
            )


def test_the_start_finds_what_computes_something_else(monkeypatch):
    """A kernel that forgets the scale is found, as a wrong build would be."""
    from megaenc.backend import detect_backend
    from megaenc.model.fp8 import linear as module

    widths = [(OUT, WIDTH), (WIDTH, OUT)]
    module.check_float8_linear("hybrid", detect_backend(), widths, torch.float32)
    product = module.Float8Recipe.matmul
    halved = staticmethod(
        lambda a, b, a_inverse, b_inverse, *how, **named: product(
            a, b, a_inverse, b_inverse / 2, *how, **named
        )
    )
    monkeypatch.setattr(module.Float8Recipe, "matmul", halved)
    with pytest.raises(
        InputError,
        match=r"--fp8-format hybrid: the output of a 48 x 80 layer is 50 % off .*; "
        "leave the flag out",
    ):
        module.check_float8_linear("hybrid", detect_backend(), widths, torch.float32)


@pytest.mark.parametrize("a", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_processor_computes_what_torch_s_kernel_does(a):
    from megaenc.model.fp8.tensor import Float8Recipe

    left = torch.randn(16, 32).to(a)
    right = torch.randn(48, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor(0.25), torch.tensor(8.0)
    found = Float8Recipe.matmul(left, right, *scales, torch.float32)
    expected = torch._scaled_mm(
        left, right.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_the_products_raise_is_one_line(monkeypatch):
    """`on_all` reports it on every rank, so none waits for one that left."""
    from megaenc.backend import detect_backend
    from megaenc.model.fp8 import linear as module

    def no_kernel(*_, **__):
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLtMatmulAlgoGetHeuristic"
        )

    monkeypatch.setattr(module.Float8Recipe, "matmul", staticmethod(no_kernel))
    with pytest.raises(InputError) as refused:
        module.check_float8_linear("hybrid", detect_backend(), [(OUT, WIDTH)], torch.float32)
    assert str(refused.value).startswith(
        f"--fp8-format hybrid: the products of a {OUT} x {WIDTH} layer fail on "
    )
    assert str(refused.value).endswith(
        "NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic; leave the flag out"
    )


def machine(monkeypatch, name, **has):
    """Stand in for the result of `detect_backend`."""
    from megaenc.backend import detect_backend

    properties = type("Properties", (), {"gcnArchName": has.get("architecture")})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: has["called"])
    return replace(detect_backend(), name=name, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "name, has, expected",
    [
        ("cuda", {"capability": (8, 9), "called": "L40S"}, OPEN),
        ("cuda", {"capability": (9, 0), "called": "H100"}, OPEN),
        ("rocm", {"architecture": "gfx942:sramecc+:xnack-", "called": "MI300X"}, AMD),
        ("rocm", {"architecture": "gfx950", "called": "MI355X"}, OPEN),
        ("cuda", {"capability": (8, 0), "called": "NVIDIA A100"}, None),
        ("rocm", {"architecture": "gfx90a", "called": "AMD Instinct MI250X"}, None),
    ],
    ids=lambda value: value.get("called") if isinstance(value, dict) else None,
)
def test_each_machine_has_its_types_or_one_line_says_that_it_has_none(
    name, has, expected, monkeypatch
):
    from megaenc.model.fp8.tensor import _select_types

    backend = machine(monkeypatch, name, **has)
    if expected:
        assert _select_types("hybrid", backend) == expected
    else:
        with pytest.raises(
            InputError, match=rf"--fp8-format e4m3: {has['called']} has no float8 matrix products"
        ):
            _select_types("e4m3", backend)


def test_kernels_that_round_otherwise_are_not_used_and_a_line_says_so(monkeypatch, capsys):
    """Triton's interpreter is one of them: it rounds fewer numbers to the nearest."""
    from megaenc.model.fp8 import tensor as module

    backend = machine(monkeypatch, "cuda", capability=(9, 0), called="H100")
    monkeypatch.setattr(
        module,
        "_find_difference",
        lambda own, plain, device: "it rounds otherwise" if own.triton else "",
    )
    module.select_float8_recipe.cache_clear()
    assert not module.select_float8_recipe("hybrid", backend).triton
    assert capsys.readouterr().out == (
        "--fp8-format hybrid: Triton kernels are not used to quantize (it rounds otherwise); "
        "torch's slower ones are\n"
    )
    module.select_float8_recipe.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["interpreted", "compiled"])
def test_kernels_of_triton(script):
    """Run in another process, since Triton reads its target at import."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1"} if script == "interpreted" else {}
    runs.run([sys.executable, str(runs.WORKERS / f"float8_{script}.py")], environment=environment)
