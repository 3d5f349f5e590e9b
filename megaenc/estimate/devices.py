"""Devices, and the share of their peak that pretraining has reached on them."""

import math
from dataclasses import dataclass

from megaenc.errors import InputError, closest_match

GIB = 2**30
BASE_BYTES = 2 * GIB
"""Context of a device, its libraries and the buffers of collectives."""
USABLE_MEMORY = 0.94
"""Share of a device's memory for tensors; the allocator loses the rest to fragmentation."""


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization of pretraining on a device, measured or assumed.

    `Device.utilization` returns it. `share` is the fraction of the device's dense bfloat16 peak,
    from 0 to 1. `parameters` is the size of the trained model, 0 if there was none; `source` is
    text for the report.
    """

    parameters: float
    share: float
    source: str


@dataclass(frozen=True)
class Device:
    """Device type, with figures of the maker's data sheet.

    `get_device` returns it. `name` is the maker's, for the report; `peak` FLOP/s, dense in
    bfloat16; `gib` the memory in GiB; `per_node` the usual number of devices in a node.
    `utilizations` are measurements of models of several sizes, () without any.
    """

    name: str
    peak: float
    gib: float
    per_node: int
    utilizations: tuple[Utilization, ...] = ()

    @property
    def memory(self) -> float:
        """Return the bytes of a device that a run can take: 0.94 of its memory.

        They include `BASE_BYTES`, those of libraries and of the device's context.
        """
        return USABLE_MEMORY * self.gib * GIB

    def utilization(self, parameters: int) -> Utilization:
        """Return the utilization of the measured model nearest in size, by ratio.

        It is `ASSUMED`, 0.35, if nothing has been measured on the device.

        Args:
            parameters: Parameters of the model to estimate, at least 1.
        """
        return min(
            self.utilizations,
            key=lambda row: abs(math.log(row.parameters / parameters)),
            default=ASSUMED,
        )


ASSUMED = Utilization(0.0, 0.35, "assumed: nothing has been measured on this device")
_STUDY = Utilization(610e6, 0.11, "the study's trainer (arXiv 2507.00994), 10 to 12 %")
_H100 = (
    Utilization(150e6, 0.317, "measured: ModernBERT-base, torch's attention"),
    Utilization(310e6, 0.441, "measured: 210m, flash-attn 4"),
    Utilization(756e6, 0.478, "measured: 610m, flash-attn 4"),
    Utilization(1409e6, 0.512, "measured: 1b, flash-attn 4"),
)
_H200 = (
    Utilization(310e6, 0.426, "measured: 210m, torch's attention"),
    Utilization(756e6, 0.464, "measured: 610m, torch's attention"),
    Utilization(1409e6, 0.501, "measured: 1b, torch's attention"),
)
_A100 = (
    Utilization(760e6, 0.57, "published: MPT-760M (MosaicML)"),
    Utilization(1300e6, 0.599, "published: MPT-1.3B (MosaicML)"),
)

# Peaks as in megaenc.backend.device: dense, not sparse. A die of an MI250 or MI250X is a device.
DEVICES = {
    "a100": Device("NVIDIA A100 SXM 80 GB", 312e12, 80, 8, _A100),
    "a100-40gb": Device("NVIDIA A100 SXM 40 GB", 312e12, 40, 8, _A100),
    "h100": Device("NVIDIA H100 SXM", 989e12, 80, 8, _H100),
    "h100-pcie": Device("NVIDIA H100 PCIe", 756e12, 80, 8),
    "h200": Device("NVIDIA H200 SXM", 989e12, 141, 8, _H200),
    "gh200": Device("NVIDIA GH200", 989e12, 96, 4),
    "b200": Device("NVIDIA B200", 2250e12, 180, 8),
    "l40s": Device("NVIDIA L40S", 362e12, 48, 8),
    "mi210": Device("AMD MI210", 181e12, 64, 4),
    "mi250": Device("AMD MI250, one die", 181e12, 64, 8),
    "mi250x": Device("AMD MI250X, one die", 191.5e12, 64, 8, (_STUDY,)),
    "mi300a": Device("AMD MI300A", 980e12, 128, 4),
    "mi300x": Device("AMD MI300X", 1307e12, 192, 8),
    "mi325x": Device("AMD MI325X", 1307e12, 256, 8),
    "mi355x": Device("AMD MI355X", 2500e12, 288, 8),
}


def get_device(name: str) -> Device:
    """Return the device of `DEVICES` by name, such as h100, in any case.

    Raises:
        InputError: The name is unknown.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        near = closest_match(name.lower(), DEVICES)
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(DEVICES)}"
        raise InputError(f"--gpu: unknown device {name!r}, {hint}")
    return device
