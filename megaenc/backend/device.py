"""Detection of the device, its process-group backend, bfloat16 and peak FLOP/s."""

import functools
import os
import re
from dataclasses import dataclass

import torch

from megaenc.dist_env import get_local_rank, get_local_world_size
from megaenc.errors import InputError

# Dense bf16 peak of one device in FLOP/s, from data sheets (which often print twice as much: with
# sparsity). The first name that matches counts, so that specific names come first. An MI250X or
# MI250 is two devices, each with half the card's peak.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H20": 148e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI210": 181e12,
    "MI250X": 191.5e12,
    "MI250": 181e12,
    "MI300A": 980e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI350X": 2300e12,
    "MI355X": 2500e12,
}


_WITHOUT_FLOAT8 = ("A100", "A800", "A30", "MI210", "MI250X", "MI250")


def peak_bf16_flops(name: str) -> float:
    """Return the dense peak bf16 FLOP/s of an accelerator, 0.0 if it is unknown.

    It is the value of the first key of PEAK_BF16_FLOPS that `name` contains as a word.

    Args:
        name: Name in any case, such as h100 or torch.cuda.get_device_name's.
    """
    return PEAK_BF16_FLOPS.get(_find_model(name), 0.0)


def has_float8(name: str) -> bool:
    """Return whether an accelerator has float8 matrix products.

    True for any name that PEAK_BF16_FLOPS lacks.

    Args:
        name: Name in any case, such as h100 or torch.cuda.get_device_name's.
    """
    return _find_model(name) not in _WITHOUT_FLOAT8


def _find_model(name: str) -> str:
    """Return the key of PEAK_BF16_FLOPS that `name` contains, in any case.

    It is empty if there is none.
    """
    for model in PEAK_BF16_FLOPS:
        pattern = model.replace(" ", "[ -]")
        if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", name, re.IGNORECASE):
            return model
    return ""


@dataclass(frozen=True)
class Backend:
    """Hardware of this process; `detect_backend` returns it.

    `name` is cuda, rocm or cpu; `device` is this process's torch.device, such as cuda:3;
    `process_group` is torch.distributed's backend, nccl or gloo; `has_bf16` tells whether the
    device has bfloat16 instructions.
    """

    name: str
    device: torch.device
    process_group: str
    has_bf16: bool

    @property
    def is_cpu(self) -> bool:
        """Return whether this process computes on the CPU.

        It does so if no accelerator is available.
        """
        return self.name == "cpu"

    @property
    def description(self) -> str:
        """Return the accelerator's name, or `cpu, N threads`, for the console."""
        return (
            f"cpu, {torch.get_num_threads()} threads"
            if self.is_cpu
            else torch.cuda.get_device_name(self.device)
        )

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s of this process's device in `dtype`; 0.0 if unknown.

        On an accelerator only that of bfloat16 is known, by PEAK_BF16_FLOPS. On a CPU it is
        measured, once per data type, by matrix products with torch's threads.
        """
        if self.is_cpu:
            return measure_cpu_flops(dtype)
        return (
            peak_bf16_flops(torch.cuda.get_device_name(self.device))
            if dtype == torch.bfloat16
            else 0.0
        )


@functools.cache
def detect_backend() -> Backend:
    """Return this process's Backend: accelerator LOCAL_RANK, or the CPU without any.

    LOCAL_RANK is 0 if it is not set. No process group is needed, and torch's current device stays.
    Later calls return the same object. CUDA_DEVICE_MAX_CONNECTIONS is set to 1 in the environment
    if it is not set.

    Raises:
        InputError: There are more processes than accelerators on this machine.
    """
    # Keeps the order of kernel launches, by which megatron-core overlaps communication. CUDA reads
    # it when it starts, in the next line.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        if get_local_rank() >= torch.cuda.device_count():
            raise InputError(
                f"{get_local_world_size()} processes on a machine with "
                f"{torch.cuda.device_count()} accelerators: "
                "expected one process each (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", get_local_rank())
        name = "rocm" if torch.version.hip else "cuda"
        return Backend(
            name, device, "nccl", torch.cuda.is_bf16_supported(including_emulation=False)
        )
    return Backend("cpu", torch.device("cpu"), "gloo", cpu_has_bf16())


def read_cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the instruction sets of the first processor, such as avx512_bf16.

    Args:
        cpuinfo: Path of a file in the format of /proc/cpuinfo; the set is empty if it cannot be
            read.
    """
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            return frozenset(
                next((line for line in file if line.startswith(("flags", "Features"))), "").split()
            )
    except OSError:
        return frozenset()


def cpu_has_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Return whether this CPU has bfloat16 instructions: AVX512-BF16, AMX or Arm's.

    Args:
        cpuinfo: Path of a file in the format of /proc/cpuinfo; False if it cannot be read.
    """
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & read_cpu_flags(cpuinfo))


def uses_tf32(device: torch.device) -> bool:
    """Return whether float32 matrix products on `device` use TensorFloat-32.

    Either torch's float32 matmul precision or NVIDIA_TF32_OVERRIDE enables it; whether the
    accelerator has TensorFloat-32 is not checked. False on a CPU.
    """
    if device.type != "cuda":
        return False
    return torch.get_float32_matmul_precision() != "highest" or os.environ.get(
        "NVIDIA_TF32_OVERRIDE", ""
    ) not in ("", "0")


@functools.cache
def measure_cpu_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product on the CPU, the best of 20.

    It is measured once per data type, with torch's threads. The size is 1024, or smaller if a
    product takes too long: a CPU without bfloat16 instructions reaches less than 1 GFLOP/s with it.
    """
    from time import perf_counter

    for size in (128, 256, 512, 1024):
        a = torch.ones(size, size, dtype=dtype)
        b = torch.ones(size, size, dtype=dtype)
        best = float("inf")
        for _ in range(20):  # so many that other processes slow down only some of them
            start = perf_counter()
            a @ b
            best = min(best, perf_counter() - start)
        if 8 * best > 0.05:  # the next size
            break
    return 2 * size**3 / best
