"""The self-checks of attention and of fused kernels, as findings."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megaenc.backend.megatron import prepare_megatron
from megaenc.doctor import numerics
from megaenc.doctor.result import Probe, ProbeContext
from megaenc.doctor.runner import ProbeRunner

prepare_megatron()
PLANTED = Path(__file__).parent / "planted"


def test_every_backend_is_a_probe_and_none_is_wrong_here():
    probes = numerics.attention_probes(ProbeContext())
    assert "sdpa" in [probe.name for probe in probes]
    findings = {
        each.name: each for probe in probes for each in numerics.check_attention_backend(ProbeContext(), *probe.arguments)
    }
    assert set(findings) == {probe.name for probe in probes}
    assert {each.level for each in findings.values()} == {"ok"}
    assert findings["sdpa"].result.startswith("right: ") and "heads 64 and 96 wide" in findings["sdpa"].result
    if not torch.cuda.is_available():
        assert findings["varlen"].result == "cannot be used: needs an accelerator"


def test_what_makes_a_hopper_gpu_faster_is_said(monkeypatch):
    from megaenc.model.attention import backends

    monkeypatch.setattr(backends, "is_hopper", lambda device: True)
    [finding] = numerics.check_attention_backend(ProbeContext(), "flash")
    assert (finding.level, finding.result) == ("note", "cannot be used: needs an accelerator")
    assert finding.advice.startswith("EXTRAS=flash ./install.sh (CUDA 13): 8 % more tokens/s")


def test_a_backend_that_ignores_causal_is_named(monkeypatch):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *of, is_causal=False, **others: right(*of, **others))
    [finding] = numerics.check_attention_backend(ProbeContext(), "sdpa")
    assert (finding.name, finding.level) == ("sdpa", "problem")
    assert "under causal attention" in finding.result and finding.advice


def test_a_backend_with_wrong_gradients_is_named(monkeypatch):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *of, **others: right(2 * q - q.detach(), *of, **others)
    )  # the same values
    [finding] = numerics.check_attention_backend(ProbeContext(), "sdpa")
    assert finding.level == "problem" and finding.result.startswith("gradients of queries off by 1 (tolerance ")


@pytest.mark.slow
def test_a_backend_that_hangs_is_named_with_a_way_round_it():
    path = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    with ProbeRunner(
        ProbeContext(timeout=60, environment=os.environ | {"PYTHONPATH": path, "PLANTED": "attention hangs"})
    ) as runner:
        probes, _ = runner.run(
            Probe("attention", "attention backends", "megaenc.doctor.numerics:attention_probes", timeout_factor=2)
        )
        [last] = [probe for probe in probes if probe.name == "sdpa"]
        [finding], ended = runner.run(replace(last, timeout_factor=1 / 12))
    assert not ended and (finding.name, finding.level) == ("sdpa", "problem")
    assert finding.result == "no answer in 5 s; its last output: attention was called"
    assert finding.advice.startswith("torch's own attention is broken here")
    assert all(f"choose another backend than {probe.name}" in probe.advice for probe in probes if probe != last)


def test_a_backend_that_raises_is_named(monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuses)
    [finding] = numerics.check_attention_backend(ProbeContext(), "sdpa")
    assert finding.level == "problem" and "no kernel image" in finding.result


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
    assert numerics.kernel_probes(ProbeContext())[0].level == "ok", "on processors there are none"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    findings = {
        probe.name: numerics.check_fused_kernel(ProbeContext(), *probe.arguments)[0]
        for probe in numerics.kernel_probes(ProbeContext())
    }
    assert {name: each.level for name, each in findings.items()} == {"wrong": "problem", "right": "ok", "fails": "note"}
    assert "the output" in findings["wrong"].result and "triton: no" in findings["fails"].result
    assert all(each.advice for each in findings.values() if each.level != "ok")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the doctor itself is the test")
def test_the_kernels_there_are_can_be_asked_for(monkeypatch):
    from megaenc.model.kernels.selftest import CHECKS

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [probe.name for probe in numerics.kernel_probes(ProbeContext())] == list(CHECKS)


def test_float8_is_tried_in_both_formats_and_wrong_products_are_named(monkeypatch):
    from megaenc.model.fp8.tensor import Float8Recipe

    [finding] = numerics.check_fp8_products(ProbeContext())
    if not torch.cuda.is_available():
        assert (finding.level, finding.result) == ("ok", "right: output and gradients, hybrid and e4m3")
    right = Float8Recipe.matmul
    monkeypatch.setattr(Float8Recipe, "matmul", staticmethod(lambda *of, **others: 1.1 * right(*of, **others)))
    [finding] = numerics.check_fp8_products(ProbeContext())
    assert finding.level == "note" and "--fp8-format hybrid: the output of a 768 x 768 layer is" in finding.result
    assert finding.advice


def test_a_device_without_float8_is_no_matter(monkeypatch):
    from megaenc.errors import InputError
    from megaenc.model.fp8 import tensor

    def refuses(*_):
        raise InputError("no float8 matrix products")

    monkeypatch.setattr(tensor, "select_float8_recipe", refuses)
    [finding] = numerics.check_fp8_products(ProbeContext())
    assert (finding.level, finding.result) == ("ok", "unavailable: the device does not support them")
