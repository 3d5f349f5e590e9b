"""Kernels of our own and float8 products on this process's device, forward and gradients, against their formulas."""

import os

from megaenc.doctor.findings import Asked, Finding, Probe, note, ok, problem

_HIDDEN, _HEAD, _FFN, _VOCABULARY = 768, 64, 3072, 32_768
"""Widths to try, those of the 210M model among others that fill no block."""
_FORMATS = ("hybrid", "e4m3")

_ADVICE = "runs find that too and leave it to torch, which is slower: install the triton that is made for this torch"


def kernels(asked: Asked) -> list[Finding | Probe]:
    """A probe for each kernel there is, where runs would use them."""
    from megaenc.backend.device import detect

    if detect().is_host and os.environ.get("TRITON_INTERPRET") != "1":
        return [ok("fused kernels", "for accelerators; on processors torch's operations take their place")]
    from megaenc.model.kernels.check import CHECKS

    return [
        Probe("kernels", name, f"{__name__}:kernel", arguments=(name,), patience=3, advice="--no-fused-kernels goes without")
        for name in CHECKS
    ]


def kernel(asked: Asked, name: str) -> list[Finding]:
    """One of them, in both kinds of numbers that a run may be made in."""
    import torch

    from megaenc.backend.device import detect
    from megaenc.backend.megatron import prepare_megatron
    from megaenc.backend.process import share_cores
    from megaenc.model.kernels.check import Widths, check_kernel

    prepare_megatron()
    share_cores()
    widths, worst = Widths(_HIDDEN, _HEAD, _FFN, _VOCABULARY), 0.0
    for dtype in (torch.bfloat16, torch.float32):
        verdict = check_kernel(name, detect().device, dtype, widths)
        said = f"{verdict.why}, in {str(dtype).removeprefix('torch.')}"
        if not verdict.available:
            return [note(name, f"cannot be run: {said}", _ADVICE, alike="note")]
        if not verdict.right:
            return [problem(name, said, _ADVICE, alike="note")]
        worst = max(worst, verdict.error / verdict.allowed)
    return [ok(name, f"right: output and gradients, bfloat16 and float32; {100 * worst:.0f} % of the error allowed")]


def float8_products(asked: Asked) -> list[Finding]:
    """What `--fp8-format` computes by, in both its formats: a note where runs with that flag would refuse to start."""
    import torch

    from megaenc.backend.device import detect
    from megaenc.backend.megatron import prepare_megatron
    from megaenc.backend.process import share_cores
    from megaenc.errors import InputError

    prepare_megatron()
    share_cores()
    from megaenc.model.float8 import float8
    from megaenc.model.linear import check_products

    what, backend = "float8 products", detect()
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
