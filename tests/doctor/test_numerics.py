"""Matrix products, right and wrong."""

import pytest
import torch

from megaenc.backend import device
from megaenc.backend.device import uses_tf32
from megaenc.doctor import numerics
from megaenc.doctor.result import ProbeContext

CPU = torch.device("cpu")


def test_this_machine_multiplies_right():
    findings = {each.name: each for each in numerics.check_matmul(ProbeContext())}
    assert [findings[name].level for name in ("products in float32", "products in bfloat16")] == ["ok", "ok"]
    assert "FLOP/s" in findings["products in float32"].result and "bfloat16" in findings


def test_products_of_fewer_bits_than_promised_are_a_problem(monkeypatch):
    product = torch.Tensor.__matmul__
    halved = lambda a, b: product(a.half(), b.half()).to(a.dtype) if a.dtype == torch.float32 else product(a, b)  # noqa: E731
    assert numerics.matmul_error(CPU, torch.float32) < 1e-6
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch.Tensor, "__matmul__", halved)
    findings = {each.name: each for each in numerics.check_matmul(ProbeContext())}
    assert findings["products in float32"].level == "problem" and findings["products in bfloat16"].level == "ok"


@pytest.mark.parametrize(("value", "level"), [("0", "problem"), ("1", "ok")])
def test_products_in_tensorfloat_are_right_for_whom_has_asked_for_them(value, level, monkeypatch):
    """A host that rounds as an accelerator of NVIDIA does, to 10 bits."""
    product = torch.Tensor.__matmul__
    rounded = lambda a, b: product(a.half().float(), b.half().float()) if a.dtype == torch.float32 else product(a, b)  # noqa: E731
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    monkeypatch.setattr(device, "uses_tf32", lambda _: uses_tf32(torch.device("cuda")))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    findings = {each.name: each for each in numerics.check_matmul(ProbeContext())}
    assert findings["products in float32"].level == level


def test_a_bfloat16_that_does_not_keep_what_the_processor_promises_is_a_note(monkeypatch):
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: True)
    monkeypatch.setattr(numerics, "measure_matmul_flops", lambda device, dtype: 1e9 if dtype == torch.float32 else 1e8)
    finding = {each.name: each for each in numerics.check_matmul(ProbeContext())}["bfloat16"]
    assert finding.level == "note" and "--no-bf16" in finding.advice
    monkeypatch.setattr("megaenc.backend.device.cpu_has_bf16", lambda: False)
    assert {each.name: each for each in numerics.check_matmul(ProbeContext())}["bfloat16"].level == "ok"
