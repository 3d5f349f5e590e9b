"""Checks of accelerators: driver tools, and devices visible to torch."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

from megaenc.dist_env import get_local_world_size
from megaenc.doctor.checks import ADVICE
from megaenc.doctor.result import (
    GIB,
    MIB,
    CheckContext,
    Finding,
    has_accelerators,
    note,
    ok,
    problem,
    read_kernel_file,
)

_BUSY_BYTES = GIB  # device memory in use before this command allocates any
_NVIDIA_QUERY = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
)
_ROCM_BIN = "/opt/rocm/bin"  # rarely on the PATH
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def find_program(program: str) -> str:
    """Return the path of a program on the PATH or in /opt/rocm/bin, else ""."""
    return (
        shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_ROCM_BIN}")
        or ""
    )


def run_program(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run `command` for at most `seconds`; return (stdout and stderr, error text).

    Both streams are one text. The error text is "" after exit code 0, else `exit code N: LAST
    LINE`, with N negative after a signal. At the time limit the program is killed, the output is ""
    and the error text `no answer in N s`.

    Raises:
        OSError: The program cannot be started.
    """
    try:
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {seconds:.3g} s"
    last_line = result.stdout.strip().rpartition("\n")[2] or "no output"
    return (
        result.stdout,
        f"exit code {result.returncode}: {last_line[:200]}" if result.returncode else "",
    )


def check_driver(context: CheckContext) -> list[Finding]:
    """Check devices, driver, memory use and errors by nvidia-smi or rocm-smi.

    Only one is run: nvidia-smi, unless it is missing or rocm-smi and /dev/kfd exist. Problems are a
    program that fails, no device in nvidia-smi, and uncorrected memory errors. Notes are a rocm-smi
    that lists no device, over 1 GiB of a device's memory in use, and device files without either
    program. Without program and device files there is one ok finding. A program gets 0.4 x
    `context.timeout` seconds.
    """
    seconds = 0.4 * context.timeout  # the other ranks wait for this one
    nvidia = find_program("nvidia-smi")
    rocm = find_program("rocm-smi")
    if rocm and (not nvidia or (context.root / "dev/kfd").exists()):
        output, failure = run_program(
            [rocm, "--showproductname", "--showdriverversion", "--showmeminfo", "vram"], seconds
        )
        findings = parse_rocm_smi(output)
        if findings:  # rocm-smi fails if any one property of any device is unavailable
            return findings
        if failure:
            return [problem("rocm-smi", failure, ADVICE["accelerators"])]
        advice = (
            "run `rocm-smi`: check the driver, or start the container with --device /dev/kfd "
            "--device /dev/dri"
        )
        return [note("rocm-smi", "lists no device", advice)]
    if nvidia:
        query = f"--query-gpu={','.join(_NVIDIA_QUERY)}"
        output, failure = run_program([nvidia, query, "--format=csv,noheader,nounits"], seconds)
        return (
            [problem("nvidia-smi", failure, ADVICE["accelerators"])]
            if failure
            else parse_nvidia_smi(output)
        )
    if not has_accelerators(context):
        return [ok("driver", "none: neither nvidia-smi nor rocm-smi is installed")]
    versions = []
    for name in ("amdgpu", "nvidia"):
        version = read_kernel_file(context.root / f"sys/module/{name}/version")
        if version:
            versions.append(f"{name} {version}")
    text = ", ".join(versions) or "device files exist"
    advice = (
        "install the driver's tools (in a container: the vendor's runtime) to see memory and errors"
    )
    return [
        note(
            "driver",
            f"{text}; neither nvidia-smi nor rocm-smi is installed",
            advice,
            mismatch_level="note",
        )
    ]


def parse_nvidia_smi(output: str) -> list[Finding]:
    """Return findings on devices, driver, memory and errors from nvidia-smi's CSV.

    Over 1 GiB of a device's memory in use is a note, an uncorrected memory error a problem. Lines
    without the six fields are skipped; if no other is left, the only finding is a problem.

    Args:
        output: Lines of `--format=csv,noheader,nounits` with the fields `_NVIDIA_QUERY`: index,
            name, total and used MiB, driver version, uncorrected errors.
    """
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in output.splitlines()
        if line.count(",") == len(_NVIDIA_QUERY) - 1
    ]
    if not rows:
        return [
            problem(
                "nvidia-smi",
                "lists no device",
                "run `nvidia-smi`: check the driver, or start the container with --gpus all",
            )
        ]
    names = [
        f"{name}, {int(memory) / 1024:.0f} GiB" if memory.isdigit() else name
        for _, name, memory, *_ in rows
    ]
    findings = [ok("devices", _format_counts(names), mismatch_level="note")]
    findings.append(
        ok("driver", ", ".join(sorted({row[4] for row in rows})), mismatch_level="note")
    )
    findings += _memory_in_use(
        [(row[0], int(row[3]) * MIB) for row in rows if row[3].isdigit()], "nvidia-smi"
    )
    errors = [f"{row[0]}: {row[5]}" for row in rows if row[5].isdigit() and int(row[5])]
    if errors:
        advice = "device memory fails: reset or replace the device before training on it"
        findings.append(problem("memory errors", f"uncorrected, {', '.join(errors)}", advice))
    return findings


def parse_rocm_smi(output: str) -> list[Finding]:
    """Return findings on devices, architecture, driver and memory from rocm-smi.

    Over 1 GiB of a device's memory in use is a note. The list is empty if no device is listed.

    Args:
        output: Text by `rocm-smi --showproductname --showdriverversion --showmeminfo vram`.
    """

    def values(name: str) -> list[str]:
        return re.findall(rf"{name}:\s*(.+?)\s*$", output, re.MULTILINE)

    devices = values("Card [Ss]eries")
    if not devices:
        return []
    driver = ", ".join(dict.fromkeys(values("Driver version")))
    texts = {
        "devices": _format_counts(devices),
        "architecture": _format_counts(values("GFX Version")),
        "driver": driver,
    }
    used = re.findall(r"GPU\[(\d+)\].*VRAM Total Used Memory \(B\):\s*(\d+)", output)
    return [
        *(ok(label, text, mismatch_level="note") for label, text in texts.items() if text),
        *_memory_in_use([(device, int(size)) for device, size in used], "rocm-smi --showpids"),
    ]


def _memory_in_use(used: list[tuple[str, int]], program: str) -> list[Finding]:
    """Return a note on devices with memory in use; no finding if all are free.

    Args:
        used: (Device, bytes) of each device.
        program: Command that shows which processes use the devices.
    """
    busy = [f"{device}: {size / GIB:.1f} GiB" for device, size in used if size > _BUSY_BYTES]
    advice = (
        f"another process uses them, see `{program}`: two runs on a device run out of memory or at "
        "half speed"
    )
    return [note("memory in use", ", ".join(busy), advice)] if busy else []


def _format_counts(names: list[str]) -> str:
    """Return names with their counts as text: "8 x NAME; 1 x OTHER"."""
    return "; ".join(f"{count} x {name}" for name, count in Counter(names).items())


def check_torch_devices(context: CheckContext) -> list[Finding]:
    """Check that torch can use an accelerator for each process of this node.

    Returns:
        One finding: a problem if devices are unusable or fewer than the processes, a note if an
        environment variable hides them, else ok, also on a machine without accelerators.
    """
    import torch

    label = "seen by torch"
    is_gpu_build = torch.version.hip or torch.version.cuda
    processes = get_local_world_size()
    count = torch.cuda.device_count()
    if count and torch.cuda.is_available():
        sizes = [
            torch.cuda.get_device_properties(index).total_memory / GIB for index in range(count)
        ]
        text = f"{count} x {torch.cuda.get_device_name(0)}, {min(sizes):.0f} GiB"
        if processes > count:
            return [
                problem(
                    label,
                    f"{text}, for {processes} processes",
                    f"one process each: --nproc-per-node {count}",
                )
            ]
        if processes < count:
            text += f"; {processes} checked here, check all with torchrun --nproc-per-node {count}"
        return [ok(label, text, mismatch_level="note")]
    if not has_accelerators(context):
        return [ok(label, "none: runs use the CPU", mismatch_level="note")]
    hidden = ", ".join(
        f"{name}={context.environment[name]}" for name in _VISIBLE if name in context.environment
    )
    if is_gpu_build and hidden:
        return [
            note(
                label,
                f"none, by {hidden}",
                "unset it to use the accelerators",
                mismatch_level="note",
            )
        ]
    advice = (
        "driver and torch do not match, or this user lacks permission: groups video and render, "
        "--gpus all"
    )
    if not is_gpu_build:
        advice = (
            "this torch is a CPU build: install one for CUDA or ROCm (TORCH_INDEX=... ./install.sh)"
        )
    return [problem(label, "none, though the machine has accelerators", advice)]
