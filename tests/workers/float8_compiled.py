"""Triton kernels, compiled for the accelerators that have float8."""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from megaenc.model.fp8 import kernels as kernels
from megaenc.model.fp8.tensor import max_value_bits

MACHINES = {
    GPUTarget("cuda", 90, 32): {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2},
    GPUTarget("hip", "gfx942", 64): {
        "fp8e4b8": torch.float8_e4m3fnuz,
        "fp8e5b16": torch.float8_e5m2fnuz,
    },
    GPUTarget("hip", "gfx950", 64): {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2},
}


def becomes_a_program(kernel, target, signature, **constants):
    types = signature | dict.fromkeys(constants, "constexpr")
    made = compile(ASTSource(kernel, signature=types, constexprs=constants), target=target)
    assert made.asm["cubin" if target.backend == "cuda" else "hsaco"]


for machine, types in MACHINES.items():
    becomes_a_program(
        kernels._amax_kernel,
        machine,
        {"x": "*bf16", "amax_bits": "*i32", "elements": "i64"},
        BLOCK=kernels._BLOCK,
    )
    for name, dtype in types.items():
        signature = {
            "x": "*bf16",
            "amax_bits": "*i32",
            "out": f"*{name}",
            "inverse": "*fp32",
            "elements": "i64",
        }
        becomes_a_program(
            kernels._quantize_kernel,
            machine,
            signature,
            MAX_BITS=max_value_bits(dtype),
            BLOCK=kernels._BLOCK,
        )
    signature = {"x": "*u8", "out": "*u8", "rows": "i32", "columns": "i32", "width": "i32"}
    becomes_a_program(kernels._transpose_kernel, machine, signature, TILE=kernels._TILE)
