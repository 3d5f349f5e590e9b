"""What this process's device computes, against the formulas: matrix products, attention backends, fused kernels, float8."""

import itertools
import os

import torch
from torch.utils.benchmark import Timer

from megaenc.backend import device as devices
from megaenc.backend.device import Backend, detect
from megaenc.backend.initialize import share_cores
from megaenc.backend.megatron import prepare_megatron
from megaenc.doctor.result import Finding, Probe, ProbeContext, note, ok, problem
from megaenc.errors import InputError

_SLOW = 0.4  # of an accelerator's peak in its data sheet
_HEADS, _GROUPS, _LONGEST = 4, 2, 1024  # of attention; tokens of a document, on an accelerator
_HEAD_WIDTHS = (64, 96)  # those of the 210M and 610M models, and of the 1B model
_HIDDEN, _HEAD, _FFN, _VOCABULARY = 768, 64, 3072, 32_768  # of kernels: those of the 210M model among others that fill no block
_FORMATS = ("hybrid", "e4m3")
_NOTHING_LEFT = "torch's own attention is broken here, and nothing trains right by it: install torch anew"
_NEXT_BACKEND = "--attention-backend auto finds that too and takes the next, a slower one: install one made for this torch"
_TO_TORCH = "runs find that too and leave it to torch, which is slower: install the triton that is made for this torch"


def _begin() -> Backend:
    """Set this process up as a run is, and return its backend."""
    prepare_megatron()
    share_cores()
    return detect()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def products(asked: ProbeContext) -> list[Finding]:
    """Compare matrix products in float32 and bfloat16 with float64 on the host, and tell how fast they are."""
    backend = detect()
    share_cores()
    found, rates = [], {}
    in_float32 = 2.0**-10 if devices.rounds_to_tf32(backend.device) else 1e-5
    for dtype, allowed in ((torch.float32, in_float32), (torch.bfloat16, 2.0**-7)):
        what, error = f"products in {_short(dtype)}", product_error(backend.device, dtype)
        speed = rates[dtype] = rate(backend.device, dtype)
        if error <= allowed:
            found.append(ok(what, f"right, {speed / 1e12:.3g} TFLOP/s" if speed > 1e12 else f"right, {speed / 1e9:.3g} GFLOP/s"))
        else:
            advice = "nothing that this device computes can be trusted: try another one, or another build of torch"
            found.append(problem(what, f"off by {error:.2g}, where {allowed:.2g} is allowed", advice))
    has = devices.host_has_bf16() if backend.is_host else backend.has_bf16
    text, advice = f"{'has' if has else 'no'} instructions for it", "" if has else "runs take float32 by default"
    if backend.is_host:
        faster = rates[torch.bfloat16] > rates[torch.float32]
        text += f"; it is {'faster' if faster else 'slower'} than float32 here"
        default, other = ("bfloat16", "--no-bf16") if has else ("float32", "--bf16")
        advice = "" if has == faster else f"runs take {default} by default: try {other} on a short one"
    found.append(note("bfloat16", text, advice, "note"))
    peak = 0.0 if backend.is_host else backend.peak_flops(torch.bfloat16)
    if peak and rates[torch.bfloat16] < _SLOW * peak:
        advice = "somebody else computes on it, or it is throttled: look at clocks, power and temperature"
        found.append(note("speed", f"{100 * rates[torch.bfloat16] / peak:.0f} % of the data sheet's bfloat16", advice))
    return found


def product_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return |found - exact| / |exact| of a product of two 384 x 384 matrices of normal numbers, as lengths of all numbers."""
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(384, 384, generator=drawn).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).double().cpu()
    return float((found - exact).norm() / exact.norm())


def rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a square matrix product, the best of six: of 8192 on an accelerator, on a host of what takes a moment."""
    if device.type == "cpu":
        return detect().peak_flops(dtype)
    size = 8192
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.cuda.set_device(device)  # which the timer waits for
    timer = Timer("a @ b", globals={"a": a, "b": b})
    return 2 * size**3 / min(timer.timeit(1).median for _ in range(6))


def backends(asked: ProbeContext) -> list[Probe]:
    """Return a probe for each attention backend."""
    _begin()
    from megaenc.model.attention.backends import ORDER

    # The check at the start of a run cannot find a backend that hangs or dies for that run.
    advice = "a run hangs or dies there too, by --attention-backend auto as well: name another one than "
    advices = {name: advice + name for name in ORDER} | {"sdpa": _NOTHING_LEFT}
    return [Probe("attention", name, f"{__name__}:backend", "rank", (name,), 3, advices[name]) for name in ORDER]


def backend(asked: ProbeContext, name: str) -> list[Finding]:
    """Compare an attention backend with the formula under every mask, in the numbers that a run here may be made in."""
    device = _begin().device
    from megaenc.model.attention.selftest import check_backend
    from megaenc.objectives import Attention

    dtypes = (torch.float32, torch.bfloat16) if name == "sdpa" else (torch.bfloat16,)
    sizes = dict(heads=_HEADS, groups=_GROUPS, seq_length=_LONGEST)
    worst = 0.0
    for dtype, width in itertools.product(dtypes, _HEAD_WIDTHS):
        verdict = check_backend(name, **sizes, head_dim=width, dtype=dtype, device=device)
        if not verdict.available:
            return [ok(name, f"cannot be used: {verdict.why}")]
        if not verdict.right:
            advice = _NOTHING_LEFT if name == "sdpa" else _NEXT_BACKEND
            return [problem(name, f"{verdict.why}, in {_short(dtype)}", advice, alike="note")]
        worst = max(worst, verdict.error / verdict.allowed)
    masks, widths, kinds = ", ".join(Attention), " and ".join(map(str, _HEAD_WIDTHS)), " and ".join(map(_short, dtypes))
    return [ok(name, f"right: {masks}; heads {widths} wide; {kinds}; {100 * worst:.0f} % of the error allowed")]


def kernels(asked: ProbeContext) -> list[Finding | Probe]:
    """Return a probe for each fused kernel, where runs would use them."""
    if detect().is_host and os.environ.get("TRITON_INTERPRET") != "1":
        return [ok("fused kernels", "for accelerators; on processors torch's operations take their place")]
    from megaenc.model.kernels.selftest import CHECKS

    return [
        Probe("kernels", name, f"{__name__}:kernel", "rank", (name,), 3, "--no-fused-kernels goes without") for name in CHECKS
    ]


def kernel(asked: ProbeContext, name: str) -> list[Finding]:
    """Compare a fused kernel with its formula, in both kinds of numbers that a run may be made in."""
    device = _begin().device
    from megaenc.model.kernels.selftest import Widths, check_kernel

    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        verdict = check_kernel(name, device, dtype, Widths(_HIDDEN, _HEAD, _FFN, _VOCABULARY))
        said = f"{verdict.why}, in {_short(dtype)}"
        if not verdict.available:
            return [note(name, f"cannot be run: {said}", _TO_TORCH, alike="note")]
        if not verdict.right:
            return [problem(name, said, _TO_TORCH, alike="note")]
        worst = max(worst, verdict.error / verdict.allowed)
    return [ok(name, f"right: output and gradients, bfloat16 and float32; {100 * worst:.0f} % of the error allowed")]


def float8_products(asked: ProbeContext) -> list[Finding]:
    """Try what `--fp8-format` computes by, in both its formats: a note where runs with that flag would refuse to start."""
    backend, what = _begin(), "float8 products"
    from megaenc.model.fp8.linear import check_products
    from megaenc.model.fp8.tensor import float8

    try:
        kinds = [float8(name, backend) for name in _FORMATS]
    except InputError:
        return [ok(what, "cannot be used: this device has none", alike="note")]
    layers = [(_HIDDEN, _HIDDEN)] if backend.is_host else [(_HIDDEN, _HIDDEN), (2 * _FFN, _HIDDEN), (_HIDDEN, _FFN)]
    try:
        for name in _FORMATS:
            check_products(name, backend, layers, torch.bfloat16)
    except InputError as error:
        return [note(what, str(error), "other runs do not use them", alike="note")]
    if not backend.is_host and not all(kind.triton for kind in kinds):
        advice = "torch's take longer to scale matrices: install the triton that is made for this torch"
        return [note(what, "right, but Triton's kernels do otherwise than torch's and are not used", advice, alike="note")]
    return [ok(what, f"right: output and gradients, {' and '.join(_FORMATS)}", alike="note")]
