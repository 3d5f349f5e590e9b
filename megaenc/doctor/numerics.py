"""Checks of matrix products, attention, fused kernels and float8 on this device."""

import importlib
import itertools
import os

import torch
from torch.utils.benchmark import Timer

from megaenc.backend import device as devices
from megaenc.backend.device import Backend, detect_backend
from megaenc.backend.initialize import divide_cores_among_ranks
from megaenc.backend.megatron import prepare_megatron
from megaenc.doctor.result import CheckContext, Finding, note, ok, problem
from megaenc.errors import InputError

_MIN_PEAK_FRACTION = 0.4  # of the accelerator's data sheet peak
# Of the attention checks
_HEADS = 4
_QUERY_GROUPS = 2
_SEQ_LENGTH = 1024
_HEAD_DIMS = (64, 96)  # 210M and 610M models, 1B model
# Of the kernel checks: the 210M model
_HIDDEN = 768
_HEAD_DIM = 64
_FFN = 3072
_VOCABULARY = 32_768
_FORMATS = ("hybrid", "e4m3")
_ADVICE_SDPA = "torch's own attention is broken here and trains wrongly: reinstall torch"
_ADVICE_BACKEND = (
    "--attention-backend auto detects this too and uses a slower one: install a version built for "
    "this torch"
)
_ADVICE_FLASH = (
    "EXTRAS=flash ./install.sh (CUDA 13): 8 % more tokens/s at 1b under MLM, measured on an H200"
)
_ADVICE_KERNEL = (
    "runs detect this too and use torch instead, which is slower: install the triton built for "
    "this torch"
)


def _init_backend() -> Backend:
    """Initialize megatron-core and threads as a run does and return the backend."""
    prepare_megatron()
    divide_cores_among_ranks()
    return detect_backend()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_matmul(context: CheckContext) -> list[Finding]:
    """Compare matrix products in float32 and bfloat16 with float64 on this device.

    Findings are on errors, speed and bfloat16 support. Wrong products are a problem. Notes are an
    accelerator without bfloat16, one below 0.4 of its bfloat16 peak, if that is known, and a CPU's
    default dtype that is not the faster one. An accelerator becomes the current CUDA device.
    """
    backend = detect_backend()
    divide_cores_among_ranks()
    findings = []
    rates = {}
    in_float32 = 2.0**-10 if devices.uses_tf32(backend.device) else 1e-5
    for dtype, allowed in ((torch.float32, in_float32), (torch.bfloat16, 2.0**-7)):
        name = f"products in {_dtype_name(dtype)}"
        error = matmul_error(backend.device, dtype)
        speed = rates[dtype] = measure_matmul_flops(backend.device, dtype)
        if error <= allowed:
            rate = f"{speed / 1e12:.3g} TFLOP/s" if speed > 1e12 else f"{speed / 1e9:.3g} GFLOP/s"
            findings.append(ok(name, f"right, {rate}"))
        else:
            advice = (
                "this device's results cannot be trusted: try another device or another build of "
                "torch"
            )
            findings.append(problem(name, f"error {error:.2g}, allowed {allowed:.2g}", advice))
    has_bf16 = devices.cpu_has_bf16() if backend.is_cpu else backend.has_bf16
    text = f"{'has' if has_bf16 else 'no'} instructions for it"
    advice = "" if has_bf16 else "runs use float32 by default"
    if backend.is_cpu:
        faster = rates[torch.bfloat16] > rates[torch.float32]
        text += f"; it is {'faster' if faster else 'slower'} than float32 here"
        default, flag = ("bfloat16", "--no-bf16") if has_bf16 else ("float32", "--bf16")
        advice = (
            ""
            if has_bf16 == faster
            else f"runs use {default} by default: try {flag} in a short run"
        )
    findings.append(note("bfloat16", text, advice, "note"))
    peak = 0.0 if backend.is_cpu else backend.peak_flops(torch.bfloat16)
    if peak and rates[torch.bfloat16] < _MIN_PEAK_FRACTION * peak:
        advice = "another process uses it, or it is throttled: check clocks, power and temperature"
        findings.append(
            note(
                "speed",
                f"{100 * rates[torch.bfloat16] / peak:.0f} % of the data sheet's bfloat16",
                advice,
            )
        )
    return findings


def matmul_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative Frobenius error of a matrix product on `device` in `dtype`.

    The factors are normal, 384 x 384, the same in every call and already rounded to `dtype`; the
    reference is their product in float64 on the host.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(384, 384, generator=generator).to(dtype)
    b = torch.randn(384, 384, generator=generator).to(dtype)
    exact = a.double() @ b.double()
    product = (a.to(device) @ b.to(device)).double().cpu()
    return float((product - exact).norm() / exact.norm())


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product on `device` in `dtype`.

    On an accelerator it is the fastest of six products of size 8192, on the CPU
    `measure_cpu_flops`. An accelerator becomes the current CUDA device.
    """
    if device.type == "cpu":
        return devices.measure_cpu_flops(dtype)
    size = 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.ones(size, size, device=device, dtype=dtype)
    torch.cuda.set_device(device)  # the device that the timer synchronizes
    timer = Timer("a @ b", globals={"a": a, "b": b})
    return 2 * size**3 / min(timer.timeit(1).median for _ in range(6))


def prepare_attention(context: CheckContext) -> list[Finding]:
    """Import the modules of all attention checks, which takes time; return [].

    The time limits of `check_attention_backend` in the same process then do not include it.
    """
    _init_backend()
    importlib.import_module("megaenc.model.attention.selftest")
    return []


def check_attention_backend(context: CheckContext, name: str) -> list[Finding]:
    """Compare an attention backend with the reference in all masks, in bfloat16.

    sdpa is compared in float32 too. An exception of the backend counts as a wrong result.

    Args:
        name: One of `ATTENTION_BACKENDS`.

    Returns:
        One finding: a problem if a result is wrong, a note if `name` is flash and a Hopper device
        lacks flash-attn 4, else ok, also if the backend cannot be used.
    """
    device = _init_backend().device
    from megaenc.model.attention.backends import flash_attn_versions, is_hopper
    from megaenc.model.attention.selftest import check_backend
    from megaenc.objectives import Attention

    is_slower = name == "flash" and is_hopper(device) and 4 not in flash_attn_versions(device)
    dtypes = (torch.float32, torch.bfloat16) if name == "sdpa" else (torch.bfloat16,)
    sizes = dict(heads=_HEADS, groups=_QUERY_GROUPS, seq_length=_SEQ_LENGTH)
    worst = 0.0
    for dtype, width in itertools.product(dtypes, _HEAD_DIMS):
        verdict = check_backend(name, **sizes, head_dim=width, dtype=dtype, device=device)
        if not verdict.available:
            text = f"cannot be used: {verdict.reason}"
            return [note(name, text, _ADVICE_FLASH) if is_slower else ok(name, text)]
        if not verdict.passed:
            advice = _ADVICE_SDPA if name == "sdpa" else _ADVICE_BACKEND
            return [
                problem(
                    name,
                    f"{verdict.reason}, in {_dtype_name(dtype)}",
                    advice,
                    mismatch_level="note",
                )
            ]
        worst = max(worst, verdict.error / verdict.tolerance)
    masks = ", ".join(Attention)
    widths = " and ".join(map(str, _HEAD_DIMS))
    kinds = " and ".join(map(_dtype_name, dtypes))
    text = f"right: {masks}; heads {widths} wide; {kinds}; {100 * worst:.0f} % of the error allowed"
    return [
        note(name, f"{text}; version 4 is not installed", _ADVICE_FLASH)
        if is_slower
        else ok(name, text)
    ]


def prepare_fused_kernels(context: CheckContext) -> list[Finding]:
    """Import the modules of all kernel checks, which takes time; return [].

    The time limits of `check_fused_kernel` in the same process then do not include it. On a CPU
    without Triton's interpreter, which has no fused kernels, nothing is imported and one ok finding
    returned.
    """
    if _has_no_fused_kernels():
        return [ok("fused kernels", "accelerators only; CPUs use torch's operations")]
    importlib.import_module("megaenc.model.kernels.selftest")
    return []


def _has_no_fused_kernels() -> bool:
    """Return whether this is a CPU without Triton's interpreter."""
    return detect_backend().is_cpu and os.environ.get("TRITON_INTERPRET") != "1"


def check_fused_kernel(context: CheckContext, name: str) -> list[Finding]:
    """Compare a fused kernel's output and gradients with a reference.

    They are computed in bfloat16 and float32. The finding is ok, a problem if a result is wrong, or
    a note if the kernel raises an exception. There is none on a CPU without Triton's interpreter.

    Args:
        name: Field of `FusedKernels`.
    """
    if _has_no_fused_kernels():
        return []
    device = _init_backend().device
    from megaenc.model.kernels.selftest import LayerWidths, check_kernel

    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        verdict = check_kernel(
            name, device, dtype, LayerWidths(_HIDDEN, _HEAD_DIM, _FFN, _VOCABULARY)
        )
        failure = f"{verdict.reason}, in {_dtype_name(dtype)}"
        if not verdict.available:
            return [note(name, f"cannot be run: {failure}", _ADVICE_KERNEL, mismatch_level="note")]
        if not verdict.passed:
            return [problem(name, failure, _ADVICE_KERNEL, mismatch_level="note")]
        worst = max(worst, verdict.error / verdict.tolerance)
    return [
        ok(
            name,
            f"right: output and gradients, bfloat16 and float32; {100 * worst:.0f} % of the error "
            "allowed",
        )
    ]


def check_fp8_products(context: CheckContext) -> list[Finding]:
    """Compare the float8 products of both values of --fp8-format with a reference.

    There is one finding: ok if they are right or unsupported by this device, a note if they are
    wrong or, on an accelerator, computed by torch's kernels instead of Triton's.
    """
    backend = _init_backend()
    label = "float8 products"
    from megaenc.model.fp8.linear import check_float8_linear
    from megaenc.model.fp8.tensor import select_float8_recipe

    try:
        kinds = [select_float8_recipe(name, backend) for name in _FORMATS]
    except InputError:
        return [ok(label, "unavailable: the device does not support them", mismatch_level="note")]
    layers = (
        [(_HIDDEN, _HIDDEN)]
        if backend.is_cpu
        else [(_HIDDEN, _HIDDEN), (2 * _FFN, _HIDDEN), (_HIDDEN, _FFN)]
    )
    try:
        for name in _FORMATS:
            check_float8_linear(name, backend, layers, torch.bfloat16)
    except InputError as error:
        return [note(label, str(error), "other runs do not use them", mismatch_level="note")]
    if not backend.is_cpu and not all(kind.triton for kind in kinds):
        advice = (
            "torch's kernels scale matrices more slowly: install the triton built for this torch"
        )
        return [
            note(
                label,
                "right, but Triton's kernels deviate from torch's and are not used",
                advice,
                mismatch_level="note",
            )
        ]
    return [
        ok(label, f"right: output and gradients, {' and '.join(_FORMATS)}", mismatch_level="note")
    ]
