"""Matrix products, right and wrong."""

import pytest
import torch

from megaenc.backend import device
from megaenc.backend.device import uses_tf32
from megaenc.doctor import numerics
from megaenc.doctor.result import ProbeContext


def test_this_machine_multiplies_right():
    findings = {each.name: each for each in numerics.check_matmul(ProbeContext())}
    assert [findings[name].level for name in ("products in float32", "products in bfloat16")] == ["ok", "ok"]
    assert "FLOP/s" in findings["products in float32"].result and "bfloat16" in findings


def in_half(product):
    """Products of float32 as an accelerator rounds them, to 10 bits."""

    def multiply(a, b):
        return product(a.half().float(), b.half().float()) if a.dtype == torch.float32 else product(a, b)

    return multiply


@pytest.mark.parametrize(("allowed", "level"), [(None, "problem"), ("0", "problem"), ("1", "ok")])
def test_products_of_fewer_bits_are_right_for_whom_has_asked_for_them(allowed, level, monkeypatch):
    """As an accelerator of NVIDIA does where TensorFloat is allowed; `allowed` is None on a host, which has none."""
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch.Tensor, "__matmul__", in_half(torch.Tensor.__matmul__))
    if allowed:
        monkeypatch.setattr(device, "uses_tf32", lambda _: uses_tf32(torch.device("cuda")))
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", allowed)
    findings = {each.name: each for each in numerics.check_matmul(ProbeContext())}
    assert findings["products in float32"].level == level
    assert findings["products in bfloat16"].level == "ok"


def test_a_bfloat16_that_does_not_keep_what_the_processor_promises_is_a_note(monkeypatch):
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: True)
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9 if dtype == torch.float32 else 1e8)
    finding = {each.name: each for each in numerics.check_matmul(ProbeContext())}["bfloat16"]
    assert finding.level == "note" and "--no-bf16" in finding.advice
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: False)
    assert {each.name: each for each in numerics.check_matmul(ProbeContext())}["bfloat16"].level == "ok"
