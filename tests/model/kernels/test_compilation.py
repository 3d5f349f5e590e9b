"""Every kernel compiles for NVIDIA and AMD devices, without a device."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="no triton here: kernels cannot be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton interprets here and does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from megaenc.model.functional import ACTIVATIONS  # noqa: E402
from megaenc.model.kernels import cross_entropy, dropout, glu, launch, norm, rotary  # noqa: E402

TARGETS = [
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("hip", "gfx90a", 64),
    GPUTarget("hip", "gfx942", 64),
]
TURNED = {"SIGN": -1, "ROWS": 16, "COLUMNS": 64, "num_warps": 4}
SPLIT = {"ROWS": 32, "COLUMNS": 64, "num_warps": 8}
BLOCK = {"COLUMNS": 4096, "num_warps": 8}
KERNELS = {}
for is_centered, prefix in ((False, ""), (True, "layer ")):
    for is_sum, width, name in (
        (False, 1728, "norm"),
        (True, 1728, "norm of a sum"),
        (False, 96, "norm of heads"),
    ):
        constants = {"CENTERED": is_centered, "RESIDUAL": is_sum} | launch.row_tile_constants(width)
        KERNELS[prefix + name] = [
            (norm.norm_forward_kernel, constants),
            (norm.norm_backward_kernel, constants),
        ]
for activation in ACTIVATIONS:
    constants = {"ACTIVATION": activation} | launch.column_block_constants(5120)
    KERNELS[activation] = [
        (glu.glu_forward_kernel, constants),
        (glu.glu_backward_kernel, constants),
    ]
KERNELS |= {
    "rotary": [(rotary.rotary_kernel, TURNED)],
    "split": [
        (rotary.qkv_rotary_kernel, {"BACKWARD": False} | SPLIT),
        (rotary.qkv_rotary_kernel, {"BACKWARD": True} | SPLIT),
    ],
    "dropout": [(dropout.dropout_kernel, launch.column_block_constants(768))],
    "loss": [
        (cross_entropy.cross_entropy_statistics_kernel, BLOCK),
        (cross_entropy.cross_entropy_gradient_kernel, launch.column_block_constants(128_256)),
    ],
}
NUMBERS = {"epsilon": 1e-5, "scale": 1.1}
COUNTS = ("rows", "heads", "groups", "per_group", "first", "columns")
IN_FLOAT32 = {"to_weight", "cos", "sin", "highest", "total"}
ROUND = {"logits", "stride", "width"}  # of the loss's arguments: multiples of 16 in every run
IN_ITS_OWN = {
    "x",
    "residual",
    "weight",
    "sum_out",
    "to_sum",
    "out",
    "gradient",
    "to_x",
    "logits",
    "mixed",
    "q",
    "k",
    "v",
}


def source(kernel, dtype: str, constants: dict) -> ASTSource:
    own = IN_ITS_OWN - (
        {"out"} if kernel is cross_entropy.cross_entropy_statistics_kernel else set()
    )
    types = dict.fromkeys(IN_FLOAT32 | {"out"}, "*fp32") | dict.fromkeys(own, f"*{dtype}")
    types |= {"labels": "*i64", "low": "*i32", "high": "*i32"} | dict.fromkeys(NUMBERS, "fp32")
    types |= dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)


@pytest.mark.slow
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


@pytest.mark.parametrize("name", KERNELS)
def test_what_differs_between_micro_batches_and_ranks_makes_no_other_variant(name):
    """Compare Triton's launch keys: training runs variants that the check compiled."""
    for kernel, launched in KERNELS[name]:
        key_of = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(TARGETS[1])
        )
        tensors = IN_FLOAT32 | IN_ITS_OWN | {"labels", "low", "high"}

        def key(
            number: int,
            place: int,
            kernel=kernel,
            launched=launched,
            key_of=key_of,
            tensors=tensors,
        ) -> list:
            arguments = {
                name: torch.zeros(8) if name in tensors else 64 for name in kernel.arg_names
            } | NUMBERS
            arguments |= {name: number for name in COUNTS if name in arguments}
            arguments |= {
                name: torch.zeros(8)[place:]
                for name in ("labels", "highest", "total")
                if name in arguments
            }
            return key_of(**{name: arguments[name] for name in kernel.arg_names} | launched)[1]

        assert key(1, 0) == key(16, 0) == key(17, 0) == key(17, 1)
        assert any(
            "D" in str(kind) for _, kind in key(17, 1)
        )  # rows that lie at round addresses are still known to


@pytest.mark.parametrize(
    "kernel",
    [cross_entropy.cross_entropy_statistics_kernel, cross_entropy.cross_entropy_gradient_kernel],
)
def test_logits_are_read_many_at_a_time_whatever_the_size_of_the_vocabulary(
    kernel, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    [constants] = [dict(launched) for known, launched in KERNELS["loss"] if known is kernel]
    options = {"num_warps": constants.pop("num_warps")}
    whole = source(kernel, "bf16", constants)
    round_ones = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in ROUND
    }
    known = ASTSource(kernel, whole.signature, constants, round_ones)
    assert "ld.global.v4" in triton.compile(known, target=TARGETS[1], options=options).asm["ptx"]
    assert (
        "ld.global.v4" not in triton.compile(whole, target=TARGETS[1], options=options).asm["ptx"]
    )
