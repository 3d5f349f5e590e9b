"""Each fused kernel on this process's device, forward and gradients, against its formula."""

import os

from megaenc.doctor.findings import Asked, Finding, Probe, note, ok, problem

_HIDDEN, _HEAD, _FFN, _VOCABULARY = 768, 64, 3072, 32_768
"""Widths to try, those of the 210M model among others that fill no block."""

_ADVICE = "runs find that too and leave it to torch, which is slower: install the triton that is made for this torch"


def kernels(asked: Asked) -> list[Finding | Probe]:
    """A probe for each kernel there is, where runs would use them."""
    from megaenc.backend.device import detect

    if detect().is_host and os.environ.get("TRITON_INTERPRET") != "1":
        return [ok("fused kernels", "for accelerators; on processors torch's operations take their place")]
    from megaenc.model.kernels.check import CHECKS

    return [Probe("kernels", name, f"{__name__}:kernel", arguments=(name,), patience=3) for name in CHECKS]


def kernel(asked: Asked, name: str) -> list[Finding]:
    """One of them, in both kinds of numbers that a run may be made in."""
    import torch

    from megaenc.backend.device import detect
    from megaenc.model.kernels.check import Widths, check_kernel

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
