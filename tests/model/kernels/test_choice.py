"""The choice of kernels: none without an accelerator, none that fails on any rank."""

import sys
from dataclasses import fields
from types import SimpleNamespace

import torch

from megaenc.model.kernels import selftest
from megaenc.model.kernels.selftest import CHECKS, LayerWidths, SelfTestResult

WIDTHS = LayerWidths(hidden=48, head=12, ffn=80, vocabulary=128)
NAMES = tuple(CHECKS)


def test_the_host_and_who_wants_none_compute_by_torchs_own_operations(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selftest, "check_kernel", None)  # nor is anything tried
    for is_wanted, device in ((True, torch.device("cpu")), (False, torch.device("cuda", 0))):
        found = selftest.select_fused_kernels(is_wanted, device, torch.float32, WIDTHS, NAMES)
        assert found == selftest.NO_FUSED_KERNELS


def test_each_check_is_a_choice():
    assert [field.name for field in fields(selftest.FusedKernels)] == list(CHECKS)


def test_all_ranks_use_what_is_right_on_all(monkeypatch, capsys):
    def gather(own):
        there = next(reasons)
        found = [{rank: reason} for rank, reason in enumerate((own, there)) if reason]
        return (found[0] if found else {}), len(found)

    reasons = iter(
        [
            "the gradient of x is off by 0.5 (tolerance 0.0078)" if name == "rotary" else None
            for name in CHECKS
        ]
    )
    monkeypatch.setattr(selftest, "dist", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(selftest, "gather_lowest", gather)
    wrong = {"loss": "CompilationError: at 3:1"}
    verdicts = [
        SelfTestResult(name, name not in wrong, 0.0, 1.0, wrong.get(name, "")) for name in CHECKS
    ]
    assert selftest._agree_across_ranks(verdicts) == {
        name: name not in ("rotary", "loss") for name in CHECKS
    }
    assert capsys.readouterr().out.splitlines() == [
        "fused kernels: torch's own rotary instead "
        "(the gradient of x is off by 0.5 (tolerance 0.0078))",
        "fused kernels: torch's own loss instead (CompilationError: at 3:1)",
    ]


def test_without_triton_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("norm", "rotary", "glu", "dropout", "cross_entropy"):
        monkeypatch.delitem(sys.modules, f"megaenc.model.kernels.{name}", raising=False)
    selftest._test_kernels.cache_clear()
    found = selftest.select_fused_kernels(True, torch.device("cpu"), torch.float32, WIDTHS, NAMES)
    selftest._test_kernels.cache_clear()
    assert found in (selftest.NO_FUSED_KERNELS, selftest.FusedKernels(sum=True))
    (line,) = capsys.readouterr().out.splitlines()
    names = "norm, layer_norm, rotary, swiglu, geglu, dropout, loss"
    assert line.startswith(
        f"fused kernels: torch's own {names} instead (ModuleNotFoundError: import of triton"
    )
