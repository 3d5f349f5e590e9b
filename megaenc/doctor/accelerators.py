"""Accelerators: what the driver's own programs say, what torch sees, and how they are linked."""

import re
from collections import Counter

from megaenc.doctor.findings import Asked, Finding, note, ok, problem
from megaenc.doctor.limits import accelerated
from megaenc.doctor.tools import ToolError, installed, told_by
from megaenc.ranks import local_world_size

_GIB = 2**30
_BUSY = 1024  # MiB that another process has
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
    if installed("nvidia-smi"):
        return [*_nvidia(seconds), *_linked("links", ["nvidia-smi", "topo", "-m"], seconds, nvidia_links)]
    if installed("rocm-smi"):
        return [*_rocm(seconds), *_linked("links", ["rocm-smi", "--showtopotype"], seconds, rocm_links)]
    if accelerated(asked):
        advice = "install the driver's programs (in a container: the runtime of the maker) to see memory, errors and links"
        return [note("driver", "devices are there, neither nvidia-smi nor rocm-smi is", advice)]
    return [ok("driver", "none: neither nvidia-smi nor rocm-smi is here")]


def _nvidia(seconds: float) -> list[Finding]:
    try:
        told = told_by(["nvidia-smi", f"--query-gpu={','.join(_TOLD)}", "--format=csv,noheader,nounits"], seconds)
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
    busy = [f"{row[0]}: {int(row[3]) / 1024:.1f} GiB" for row in rows if row[3].isdigit() and int(row[3]) > _BUSY]
    if busy:
        advice = "another process is there: `nvidia-smi` names it; two runs on a device end out of memory or at half speed"
        found.append(note("memory in use", ", ".join(busy), advice))
    wrong = [f"{row[0]}: {row[5]}" for row in rows if row[5].isdigit() and int(row[5])]
    if wrong:
        advice = "memory of the device fails: reset or replace it before a run is trusted to it"
        found.append(problem("memory errors", f"uncorrected, {', '.join(wrong)}", advice))
    return found


def _rocm(seconds: float) -> list[Finding]:
    found = []
    for what, flag, pattern in (
        ("devices", "--showproductname", r"Card [Ss]eries:\s*(.+)"),
        ("architecture", "--showproductname", r"GFX Version:\s*(.+)"),
        ("driver", "--showdriverversion", r"Driver version:\s*(.+)"),
    ):
        try:
            counted = Counter(text.strip() for text in re.findall(pattern, told_by(["rocm-smi", flag], seconds)))
        except ToolError as error:
            advice = "the driver does not answer: look at `dmesg` for amdgpu; a restart of the machine may be needed"
            return [*found, problem("rocm-smi", str(error), advice)]
        if counted and what == "driver":
            found.append(ok(what, ", ".join(counted), alike="note"))
        elif counted:
            found.append(ok(what, "; ".join(f"{count} x {name}" for name, count in counted.items()), alike="note"))
    return found


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
    if weak and len(pairs) > len(weak):
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
