"""Accelerators: what the driver's own programs say, what torch sees, and how they are linked."""

import contextlib
import re
from collections import Counter
from pathlib import Path

from megaenc.doctor.findings import Asked, Finding, note, ok, problem
from megaenc.doctor.limits import accelerated
from megaenc.doctor.tools import ToolError, installed, told_by
from megaenc.ranks import local_world_size

_MIB, _GIB = 2**20, 2**30
_BUSY = _GIB  # that another process has
_TOLD = ("index", "name", "memory.total", "memory.used", "driver_version", "ecc.errors.uncorrected.volatile.total")
_WEAK = {
    "PHB": "the processor's PCIe bridge",
    "NODE": "PCIe bridges of a processor",
    "SYS": "the link between processors",
    "PCIE": "PCIe",
}


def driver(asked: Asked) -> list[Finding]:
    """What nvidia-smi or rocm-smi says, and how the devices are linked."""
    seconds = 0.4 * asked.seconds
    of_nvidia, of_rocm = installed("nvidia-smi"), installed("rocm-smi")
    if of_rocm and (not of_nvidia or (asked.root / "dev/kfd").exists()):
        return [*_rocm(of_rocm, seconds), *_linked("links", [of_rocm, "--showtopotype"], seconds, rocm_links)]
    if of_nvidia:
        return [*_nvidia(of_nvidia, seconds), *_linked("links", [of_nvidia, "topo", "-m"], seconds, nvidia_links)]
    if accelerated(asked):
        found = ", ".join(_of_kernel(asked.root)) or "devices are there"
        advice = "install the driver's programs (in a container: the runtime of the maker) to see memory, errors and links"
        return [note("driver", f"{found}; neither nvidia-smi nor rocm-smi is here", advice, alike="note")]
    return [ok("driver", "none: neither nvidia-smi nor rocm-smi is here")]


def _of_kernel(root: Path) -> list[str]:
    """The drivers that the kernel has loaded, with their versions."""
    found = []
    for name, file in (("amdgpu", "sys/module/amdgpu/version"), ("nvidia", "sys/module/nvidia/version")):
        with contextlib.suppress(OSError):
            found.append(f"{name} {(root / file).read_text(encoding='utf-8', errors='replace').strip()}")
    return found


def _nvidia(program: str, seconds: float) -> list[Finding]:
    try:
        told = told_by([program, f"--query-gpu={','.join(_TOLD)}", "--format=csv,noheader,nounits"], seconds)
    except ToolError as error:
        advice = "the driver does not answer: look at `dmesg` for Xid errors; a restart of the machine may be needed"
        return [problem("nvidia-smi", str(error), advice)]
    return nvidia_devices(told)


def nvidia_devices(told: str) -> list[Finding]:
    """From the lines of nvidia-smi's CSV, in the order of _TOLD."""
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.count(",") == len(_TOLD) - 1]
    if not rows:
        return [problem("nvidia-smi", "names no device", "look at `nvidia-smi` itself: driver, or a container without --gpus")]
    names = Counter(f"{name}, {int(memory) / 1024:.0f} GiB" if memory.isdigit() else name for _, name, memory, *_ in rows)
    found = [ok("devices", "; ".join(f"{count} x {name}" for name, count in names.items()), alike="note")]
    found.append(ok("driver", ", ".join(sorted({row[4] for row in rows})), alike="note"))
    found += _in_use([(row[0], int(row[3]) * _MIB) for row in rows if row[3].isdigit()], "nvidia-smi")
    wrong = [f"{row[0]}: {row[5]}" for row in rows if row[5].isdigit() and int(row[5])]
    if wrong:
        advice = "memory of the device fails: reset or replace it before a run is trusted to it"
        found.append(problem("memory errors", f"uncorrected, {', '.join(wrong)}", advice))
    return found


def _in_use(used: list[tuple[str, int]], program: str) -> list[Finding]:
    """A finding for (device, bytes that are taken of it), before this command has taken any."""
    busy = [f"{device}: {taken / _GIB:.1f} GiB" for device, taken in used if taken > _BUSY]
    if not busy:
        return []
    advice = f"another process is there, see `{program}`: two runs on a device end out of memory or at half speed"
    return [note("memory in use", ", ".join(busy), advice)]


def _rocm(program: str, seconds: float) -> list[Finding]:
    try:
        told = told_by([program, "--showproductname", "--showdriverversion", "--showmeminfo", "vram"], seconds)
    except ToolError as error:
        told = error.told  # it fails where any single thing of any device cannot be had
        if not rocm_devices(told):
            advice = "the driver does not answer: look at `dmesg` for amdgpu; a restart of the machine may be needed"
            return [problem("rocm-smi", str(error), advice)]
    advice = "look at `rocm-smi` itself: driver, or a container without --device /dev/kfd --device /dev/dri"
    return rocm_devices(told) or [note("rocm-smi", "names no device", advice)]


def rocm_devices(told: str) -> list[Finding]:
    """From the lines of rocm-smi; nothing where it names no device."""
    said = {
        what: [text.strip() for text in re.findall(rf"{name}:\s*(.+)", told)]
        for what, name in (("devices", "Card [Ss]eries"), ("architecture", "GFX Version"), ("driver", "Driver version"))
    }
    if not said["devices"]:
        return []
    found = [
        ok(what, "; ".join(f"{count} x {name}" for name, count in Counter(said[what]).items()), alike="note")
        for what in ("devices", "architecture")
        if said[what]
    ]
    found += [ok("driver", ", ".join(dict.fromkeys(said["driver"])), alike="note")] if said["driver"] else []
    used = re.findall(r"GPU\[(\d+)\].*VRAM Total Used Memory \(B\):\s*(\d+)", told)
    return found + _in_use([(device, int(taken)) for device, taken in used], "rocm-smi --showpids")


def _linked(what, command, seconds, read) -> list[Finding]:
    try:
        return links(read(told_by(command, seconds)))
    except ToolError as error:
        return [
            note(what, f"`{' '.join(command)}`: {error}", "see what it says by hand: how devices are linked decides the layout")
        ]


def nvidia_links(told: str) -> dict[tuple[int, int], str]:
    """From `nvidia-smi topo -m`: the link of each pair of devices, the lower one first."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in told.splitlines()]
    header = next((row for row in rows if "GPU0" in row), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    pairs = {}
    for row in rows:
        if row is not header and row and re.fullmatch(r"GPU\d+", row[0]):
            own = int(row[0][3:])
            for other, link in zip(columns, row[1:], strict=False):
                if own < other:
                    pairs[own, other] = link
    return pairs


def rocm_links(told: str) -> dict[tuple[int, int], str]:
    """From `rocm-smi --showtopotype`: the same."""
    pairs = {}
    for line in told.splitlines():
        words = line.split()
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU"):
            own = int(words[0][3:])
            pairs |= {(own, other): link for other, link in enumerate(words[1:]) if own < other}
    return pairs


def links(pairs: dict[tuple[int, int], str]) -> list[Finding]:
    """What the links of the pairs of devices mean for a layout."""
    if not pairs:
        return []
    kinds = Counter(pairs.values())
    text = (
        ", ".join(f"{count} pairs {kind}" for kind, count in kinds.most_common())
        if len(kinds) > 1
        else f"all {next(iter(kinds))}"
    )
    weak = [kind for kind in kinds if kind in _WEAK]
    if weak and len(kinds) > 1:
        ways = ", ".join(f"{kind} goes over {_WEAK[kind]}" for kind in weak)
        advice = f"{ways}: keep tensor parallelism among devices that are linked better"
        return [note("links", text, advice, alike="note")]
    return [ok("links", text, alike="note")]


def seen_by_torch(asked: Asked) -> list[Finding]:
    """How many devices torch sees, their memory, and whether there is one for each process."""
    import torch

    built = torch.version.hip or torch.version.cuda
    count = torch.cuda.device_count() if built else 0
    if count and torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(number).total_memory / _GIB for number in range(count)]
        text = f"{count} x {torch.cuda.get_device_name(0)}, {min(sizes):.0f} GiB"
        if local_world_size() > count:
            advice = f"one process each: --nproc-per-node {count}"
            return [problem("seen by torch", f"{text}, for {local_world_size()} processes", advice)]
        if local_world_size() < count:
            text += f"; {local_world_size()} of them tried here, all of them by torchrun --nproc-per-node {count}"
        return [ok("seen by torch", text, alike="note")]
    hidden = [
        name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in asked.environment
    ]
    if not accelerated(asked):
        return [ok("seen by torch", "none: it computes on processors", alike="note")]
    if not built:
        advice = "this torch is built for processors alone: install one for CUDA or ROCm (TORCH_INDEX=... ./install.sh)"
    elif hidden:
        shown = ", ".join(f"{name}={asked.environment[name]}" for name in hidden)
        return [note("seen by torch", f"none, by {shown}", "take it out to compute on the accelerators", alike="note")]
    else:
        advice = "driver and torch do not fit, or this user may not open the devices: groups video and render, --gpus all"
    return [problem("seen by torch", "none, though the machine has accelerators", advice)]
