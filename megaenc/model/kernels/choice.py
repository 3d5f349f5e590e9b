"""Which kernels a model is computed by: those that every process has found right on its own device."""

import functools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaenc.console import say
from megaenc.model.kernels.check import CHECKS, Verdict, Widths, check_kernel


@dataclass(frozen=True)
class Fused:
    """Of each kernel whether it is used; a field for each of `CHECKS`."""

    norm: bool = False
    rotary: bool = False
    swiglu: bool = False
    loss: bool = False
    sum: bool = False


NONE = Fused()


def fused_kernels(wanted: bool, device: torch.device, dtype: torch.dtype, widths: Widths) -> Fused:
    """Return the kernels for a model of `widths`; all processes of a run call it together. Those left out are named.

    On the host there are none, except under triton's interpreter, as tests have it (TRITON_INTERPRET=1).
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not wanted or (device.type == "cpu" and not interpreted):
        return NONE
    return _chosen(device, dtype, widths)


@functools.cache  # parts of an interleaved pipeline are built one by one
def _chosen(device: torch.device, dtype: torch.dtype, widths: Widths) -> Fused:
    verdicts = [check_kernel(name, device, dtype, widths) for name in CHECKS]
    return Fused(**_agreed(verdicts))


def _agreed(verdicts: list[Verdict]) -> dict[str, bool]:
    """By name, whether a kernel is right on all ranks; says which are not."""
    here = {verdict.name: verdict.why for verdict in verdicts}
    everywhere = [here]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
    reasons = {name: next((why[name] for why in everywhere if why[name]), "") for name in here}
    for why in dict.fromkeys(reasons.values()):  # one line where all have the same, such as no triton
        if why:
            say(f"fused kernels: torch's own {', '.join(name for name in here if reasons[name] == why)} instead ({why})")
    return {name: not why for name, why in reasons.items()}
