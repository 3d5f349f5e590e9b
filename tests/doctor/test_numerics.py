"""Findings about matrix products, attention and fused kernels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from findings import by_name

from megaenc.backend import device
from megaenc.backend.device import uses_tf32
from megaenc.backend.megatron import prepare_megatron
from megaenc.doctor import numerics
from megaenc.doctor.checks import ATTENTION_BACKENDS
from megaenc.doctor.result import CheckContext

prepare_megatron()


def test_this_machine_multiplies_right():
    findings = by_name(numerics.check_matmul(CheckContext()))
    assert [findings[name].level for name in ("products in float32", "products in bfloat16")] == [
        "ok",
        "ok",
    ]
    assert "FLOP/s" in findings["products in float32"].result and "bfloat16" in findings


def in_half(product):
    """Return a product that rounds float32 to 10 bits, as an accelerator does."""

    def multiply(a, b):
        return (
            product(a.half().float(), b.half().float())
            if a.dtype == torch.float32
            else product(a, b)
        )

    return multiply


@pytest.mark.parametrize(("allowed", "level"), [(None, "problem"), ("0", "problem"), ("1", "ok")])
def test_products_of_fewer_bits_are_right_for_whom_has_asked_for_them(allowed, level, monkeypatch):
    """NVIDIA's accelerators do this with TF32; `allowed` is None on a host."""
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch.Tensor, "__matmul__", in_half(torch.Tensor.__matmul__))
    if allowed:
        monkeypatch.setattr(device, "uses_tf32", lambda _: uses_tf32(torch.device("cuda")))
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", allowed)
    findings = by_name(numerics.check_matmul(CheckContext()))
    assert findings["products in float32"].level == level
    assert findings["products in bfloat16"].level == "ok"


def test_a_bfloat16_that_does_not_keep_what_the_processor_promises_is_a_note(monkeypatch):
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: True)
    monkeypatch.setattr(
        numerics,
        "measure_matmul_flops",
        lambda device, dtype: 1e9 if dtype == torch.float32 else 1e8,
    )
    finding = by_name(numerics.check_matmul(CheckContext()))["bfloat16"]
    assert finding.level == "note" and "--no-bf16" in finding.advice
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: False)
    assert by_name(numerics.check_matmul(CheckContext()))["bfloat16"].level == "ok"


def test_the_cpu_is_measured_also_on_a_machine_with_accelerators(monkeypatch):
    monkeypatch.setattr(device.Backend, "is_cpu", False)
    monkeypatch.setattr(device, "measure_cpu_flops", lambda dtype: 1e9)
    assert numerics.measure_matmul_flops(torch.device("cpu"), torch.float32) == 1e9


def test_each_backend_has_a_check():
    from megaenc.model.attention.backends import BACKENDS

    assert ATTENTION_BACKENDS == BACKENDS


def test_no_backend_is_wrong_here():
    findings = {
        name: numerics.check_attention_backend(CheckContext(), name)[0]
        for name in ATTENTION_BACKENDS
    }
    assert {each.level for each in findings.values()} == {"ok"}
    assert (
        findings["sdpa"].result.startswith("right: ")
        and "heads 64 and 96 wide" in findings["sdpa"].result
    )
    if not torch.cuda.is_available():
        assert findings["varlen"].result == "cannot be used: needs an accelerator"


def ignores_causal(right, q, *tensors, is_causal=False, **others):
    return right(q, *tensors, **others)


def refuses(right, *_, **__):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ignores_causal, "under causal attention"),
        (refuses, "no kernel image"),
    ],
)
def test_a_backend_with_a_fault_is_named(fault, words, monkeypatch):
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", partial(fault, F.scaled_dot_product_attention)
    )
    [finding] = numerics.check_attention_backend(CheckContext(), "sdpa")
    assert (finding.name, finding.level) == ("sdpa", "problem")
    assert words in finding.result
    assert finding.advice


def test_a_wrong_kernel_is_a_problem_and_one_that_cannot_be_compiled_a_note(monkeypatch):
    from megaenc.model.kernels import selftest

    def wrong(draw, widths):
        yield "the output", torch.ones(3), torch.zeros(3, dtype=torch.float64)

    def right(draw, widths):
        yield "the output", torch.ones(3), torch.ones(3, dtype=torch.float64)

    def fails(draw, widths):
        raise RuntimeError("triton: no")
        yield

    monkeypatch.setattr(selftest, "CHECKS", {"wrong": wrong, "right": right, "fails": fails})
    context = CheckContext()
    assert numerics.prepare_fused_kernels(context)[0].level == "ok", "on processors there are none"
    assert numerics.check_fused_kernel(context, "wrong") == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert numerics.prepare_fused_kernels(context) == []
    findings = {name: numerics.check_fused_kernel(context, name)[0] for name in selftest.CHECKS}
    assert {name: each.level for name, each in findings.items()} == {
        "wrong": "problem",
        "right": "ok",
        "fails": "note",
    }
    assert "the output" in findings["wrong"].result
    assert "triton: no" in findings["fails"].result
    assert findings["wrong"].advice
    assert findings["fails"].advice


def test_float8_is_tried_in_both_formats_and_wrong_products_are_named(monkeypatch):
    from megaenc.model.fp8.tensor import Float8Recipe

    [finding] = numerics.check_fp8_products(CheckContext())
    if not torch.cuda.is_available():
        assert (finding.level, finding.result) == (
            "ok",
            "right: output and gradients, hybrid and e4m3",
        )
    right = Float8Recipe.matmul
    monkeypatch.setattr(
        Float8Recipe, "matmul", staticmethod(lambda *of, **others: 1.1 * right(*of, **others))
    )
    [finding] = numerics.check_fp8_products(CheckContext())
    assert (
        finding.level == "note"
        and "--fp8-format hybrid: the output of a 768 x 768 layer is" in finding.result
    )
    assert finding.advice


def test_a_device_without_float8_is_no_matter(monkeypatch):
    from megaenc.errors import InputError
    from megaenc.model.fp8 import tensor

    def refuses(*_):
        raise InputError("no float8 matrix products")

    monkeypatch.setattr(tensor, "select_float8_recipe", refuses)
    [finding] = numerics.check_fp8_products(CheckContext())
    assert (finding.level, finding.result) == (
        "ok",
        "unavailable: the device does not support them",
    )
