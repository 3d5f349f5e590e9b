"""The check at the start passes correct kernels and names each planted mistake."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from megaenc.model.kernels import cross_entropy, dropout, glu, norm, rotary, selftest
from megaenc.model.kernels.selftest import CHECKS, TOLERANCE, LayerWidths, check_kernel

assert os.environ.get("TRITON_INTERPRET") == "1", "expected to be started by test_interpreted.py"
HOST = torch.device("cpu")
WIDTHS = LayerWidths(hidden=48, head=12, ffn=80, vocabulary=128)
ODD_WIDTHS = LayerWidths(hidden=171, head=10, ffn=33, vocabulary=2500)


@pytest.mark.parametrize(
    ("dtype", "widths"), [(torch.bfloat16, WIDTHS), (torch.float32, ODD_WIDTHS)], ids=str
)
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "sum"])
def test_what_is_right_passes(name, dtype, widths):
    verdict = check_kernel(name, HOST, dtype, widths)
    assert (verdict.name, verdict.available, verdict.reason, verdict.passed) == (
        name,
        True,
        "",
        True,
    )
    assert 0 < verdict.error < verdict.tolerance in TOLERANCE.values()


PADDED = 'columns, scores, float("-inf"))\n        block_highest'

# The check, the module in which a mistake is planted, the right and the wrong text, the verdict.
MISTAKES = [
    ("layer_norm", norm, "inside, numbers - mean, 0.0)", "inside, numbers, 0.0)", "the output"),
    ("layer_norm", norm, "tl.where(inside, numbers - mean, 0.0)", "numbers - mean", "the output"),
    ("layer_norm", norm, "above = subtract_mean(above, inside, width)", "pass",
     "the gradient of x"),
    ("layer_norm", norm, "below += tl.load", "below -= tl.load", "the gradient of x"),
    ("norm", norm, "/ width + epsilon)\n    tl.store", "/ COLUMNS + epsilon)\n    tl.store",
     "the output"),
    ("norm", norm, "- normed * along", "+ normed * along", "the gradient of x"),
    ("norm", norm, "rows, tl.num_programs(0) * ROWS)", "rows, 2 * tl.num_programs(0) * ROWS)",
     "the gradient of"),
    ("norm", norm, "to_weight_PH.sum(0)", "to_weight_PH[0]", "the gradient of weight"),
    ("norm", norm, "below += tl.load", "below -= tl.load", "the gradient of x"),
    ("norm", norm, "numbers += tl.load(residual", "numbers -= tl.load(residual", "the output"),
    ("rotary", rotary, "SIGN=sign", "SIGN=1", "the gradient of x"),
    ("rotary", rotary, "across = -across", "across = across", "the gradient of mixed"),
    ("rotary", rotary, "inside & (place > per_group)", "inside & (place >= per_group)",
     "the output"),
    ("rotary", rotary, "tl.load(value + half, mask=is_value", "tl.load(value, mask=is_value",
     "the gradient of mixed"),
    ("rotary", rotary, "head * head_stride", "head * 2 * half", "the output"),
    ("swiglu", glu, "(factor + growth)", "factor", "the gradient of x"),
    ("swiglu", glu, "1.0 / (1.0 + tl.exp(-gate))", "tl.exp(gate) / (1.0 + tl.exp(gate))",
     "the gradient of x is off by nan"),
    ("geglu", glu, "0.5 * (1.0 + tl.erf(gate * ROOT_HALF))", "1.0 / (1.0 + tl.exp(-1.702 * gate))",
     "the output"),
    ("geglu", glu, "-0.5 * gate * gate", "-gate * gate", "the gradient of x"),
    ("geglu", glu, "(3.0 * TANH_CUBIC)", "TANH_CUBIC", "the gradient of x"),
    ("geglu", glu, "_TritonGLU.apply(x, activation)", '_TritonGLU.apply(x, "gelu")', "the output"),
    ("dropout", dropout, "number >> 15", "number >> 14", "the output"),
    ("loss", cross_entropy, PADDED, PADDED.replace("columns", "columns + 1"), "the loss"),
    ("loss", cross_entropy, "total * tl.exp(before - highest)", "total", "the loss"),
    ("loss", cross_entropy, "tl.min(tl.where(scores == block_highest, column, NO_TOKEN)",
     "tl.max(column * (scores == block_highest)", "the pred"),
    ("loss", cross_entropy, "probability - 1.0", "probability", "the gradient of logits"),
]  # fmt: skip


def plant(module, right, wrong, tmp_path, monkeypatch):
    """Replace `right` by `wrong` in the source of `module`."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(right) == 1
    file = tmp_path / "mistaken.py"
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mistaken", file)
    mistaken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mistaken)
    monkeypatch.setitem(sys.modules, module.__name__, mistaken)


@pytest.mark.parametrize(("name", "module", "right", "wrong", "said"), MISTAKES)
def test_a_planted_mistake_is_found(name, module, right, wrong, said, tmp_path, monkeypatch):
    plant(module, right, wrong, tmp_path, monkeypatch)
    verdict = check_kernel(name, HOST, torch.float32, WIDTHS)
    assert verdict.available and not verdict.passed and verdict.reason.startswith(said), verdict


def test_what_is_wrong_is_named_and_the_others_are_used(tmp_path, monkeypatch, capsys):
    plant(rotary, "SIGN=sign", "SIGN=1", tmp_path, monkeypatch)
    names = ("layer_norm", "rotary", "geglu", "loss", "sum")  # those that a model has
    found = selftest.select_fused_kernels(True, HOST, torch.float32, WIDTHS, names)
    selftest._test_kernels.cache_clear()
    assert found == selftest.FusedKernels(
        layer_norm=True, rotary=False, geglu=True, loss=True, sum=True
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fused kernels: torch's own rotary instead (the gradient of x is ")


def test_what_cannot_run_is_not_available(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no such device\nand much more")

    monkeypatch.setattr(glu, "_TritonGLU", type("Broken", (), {"apply": refuse}))
    verdict = check_kernel("swiglu", HOST, torch.float32, WIDTHS)
    assert (verdict.available, verdict.error, verdict.reason) == (
        False,
        None,
        "RuntimeError: no such device",
    )


def test_the_host_adds_no_bfloat16_products_up_in_float32():
    """torch has that product only on accelerators; the loss sums rounded products."""
    verdict = check_kernel("sum", HOST, torch.bfloat16, WIDTHS)
    assert not verdict.available and verdict.reason.startswith("NotImplementedError: ")
