"""Every kernel becomes machine code for NVIDIA's and AMD's devices, as it is launched; no device is needed for that."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="no triton here: kernels cannot be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton interprets here and does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megaenc.model.kernels import cross_entropy, launch, norm, rotary, swiglu  # noqa: E402

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx90a", 64), GPUTarget("hip", "gfx942", 64)]
TURNED = {"SIGN": -1, "ROWS": 16, "COLUMNS": 64, "num_warps": 4}
BLOCK = {"COLUMNS": 4096, "num_warps": 8}
KERNELS = {
    "norm": [(norm.forward_kernel, launch.tile(1728)), (norm.backward_kernel, launch.tile(1728))],
    "norm of heads": [(norm.forward_kernel, launch.tile(96)), (norm.backward_kernel, launch.tile(96))],
    "rotary": [(rotary.turn_kernel, TURNED)],
    "swiglu": [(swiglu.forward_kernel, launch.strip(5120)), (swiglu.backward_kernel, launch.strip(5120))],
    "loss": [(cross_entropy.statistics_kernel, BLOCK), (cross_entropy.gradient_kernel, launch.strip(128_256))],
}
IN_FLOAT32 = {"to_weight", "cos", "sin", "top", "total"}
IN_ITS_OWN = {"x", "weight", "out", "gradient", "to_x", "logits"}


def source(kernel, dtype: str, constants: dict) -> ASTSource:
    own = IN_ITS_OWN - ({"out"} if kernel is cross_entropy.statistics_kernel else set())
    types = dict.fromkeys(IN_FLOAT32 | {"out"}, "*fp32") | dict.fromkeys(own, f"*{dtype}")
    types |= {"labels": "*i64", "epsilon": "fp32"} | dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.backend}-{target.arch}")
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name, target, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, launched in KERNELS[name]:
        constants = dict(launched)
        options = {"num_warps": constants.pop("num_warps")}
        compiled = triton.compile(source(kernel, dtype, constants), target=target, options=options)
        assert len(compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]) > 1000


def test_tiles_are_what_the_kernels_want():
    assert launch.tile(1728) == {"ROWS": 1, "COLUMNS": 2048, "num_warps": 8}
    assert launch.tile(96) == {"ROWS": 16, "COLUMNS": 128, "num_warps": 8}
    assert launch.tile(1) == {"ROWS": 2048, "COLUMNS": 1, "num_warps": 8}
    assert launch.tile(40_000)["num_warps"] == 16  # 1,024 threads, which is what a program of AMD's can have
    assert launch.strip(3) == {"COLUMNS": 4, "num_warps": 1}
    assert launch.rows_of(torch.empty(5, 1, 3, 8).transpose(0, 2)).shape == (15, 8)
