"""Rates of a layer's products on the CPU, and kernels in triton's interpreter."""

import json
import os
import sys

import gemm_shapes
import pytest
import runs


def test_each_product_has_a_row(tmp_path):
    output = tmp_path / "shapes.json"
    flags = [
        "--device",
        "cpu",
        "--models",
        "tiny",
        "--packs",
        "1",
        "--square",
        "64",
        "--seconds",
        "0.001",
    ]
    gemm_shapes.main([*flags, "--output", str(output)])
    results = json.loads(output.read_text())
    assert len(results["products"]) == 4 * 3
    assert {row["matrix"] for row in results["products"]} == {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }
    assert all(
        row["tokens"] == 2048 and row["tflops"]["default"] > 0 for row in results["products"]
    )


@pytest.mark.slow
def test_each_kernel_can_be_called():
    pytest.importorskip("triton")
    code = """
import torch, gemm_shapes
from megaenc.model.config import get_preset
kernels = gemm_shapes.build_kernels(get_preset("tiny"), 4, torch.device("cpu"))
for name, (call, size) in kernels.items():
    call()
    assert size > 0, name
print(len(kernels))
"""
    environment = runs.surroundings() | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(runs.ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    )
    ended = runs.run([sys.executable, "-c", code], environment=environment)
    assert ended.stdout == "13\n"
