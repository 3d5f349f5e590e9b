"""Accelerators: what the driver's own programs say, what torch sees, and how they are linked."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence

from megaenc.dist_env import local_world_size
from megaenc.doctor.result import GIB, MIB, Finding, ProbeContext, accelerated, note, ok, problem, text_of

_BUSY = GIB  # that another process has
_TOLD = ("index", "name", "memory.total", "memory.used", "driver_version", "ecc.errors.uncorrected.volatile.total")
_WEAK = {
    "PHB": "the processor's PCIe bridge",
    "NODE": "PCIe bridges of a processor",
    "SYS": "the link between processors",
    "PCIE": "PCIe",
}
_BESIDES = "/opt/rocm/bin"  # which is rarely on the PATH
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_RESTART = "the driver does not answer: look at `dmesg` for {}; a restart of the machine may be needed"


def installed(program: str) -> str:
    """Return where the program is, on the PATH or where ROCm puts its own; empty where it is not."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_BESIDES}") or ""


def told_by(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return what `command` prints, and in one line why that is not all: it failed, or has not ended after `seconds`.

    It is killed then and not waited for: what hangs in a driver does not even die.
    """
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True)
    try:
        told, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return "", f"no answer in {seconds:.3g} s"
    last = (told.strip().splitlines() or ["without a word"])[-1]
    return told, f"exit code {process.returncode}: {last[:200]}" if process.returncode else ""


def driver(asked: ProbeContext) -> list[Finding]:
    """Tell what nvidia-smi or rocm-smi says, and how the devices are linked."""
    seconds = 0.4 * asked.seconds
    nvidia, rocm = installed("nvidia-smi"), installed("rocm-smi")
    if rocm and (not nvidia or (asked.root / "dev/kfd").exists()):
        told, why = told_by([rocm, "--showproductname", "--showdriverversion", "--showmeminfo", "vram"], seconds)
        advice = "look at `rocm-smi` itself: driver, or a container without --device /dev/kfd --device /dev/dri"
        nothing = problem("rocm-smi", why, _RESTART.format("amdgpu")) if why else note("rocm-smi", "names no device", advice)
        # It fails where any single thing of any device cannot be had.
        return [*(rocm_devices(told) or [nothing]), *links([rocm, "--showtopotype"], seconds)]
    if nvidia:
        told, why = told_by([nvidia, f"--query-gpu={','.join(_TOLD)}", "--format=csv,noheader,nounits"], seconds)
        found = [problem("nvidia-smi", why, _RESTART.format("Xid errors"))] if why else nvidia_devices(told)
        return [*found, *links([nvidia, "topo", "-m"], seconds)]
    if not accelerated(asked):
        return [ok("driver", "none: neither nvidia-smi nor rocm-smi is here")]
    loaded = {name: text_of(asked.root / f"sys/module/{name}/version") for name in ("amdgpu", "nvidia")}
    text = ", ".join(f"{name} {version}" for name, version in loaded.items() if version) or "devices are there"
    advice = "install the driver's programs (in a container: the runtime of the maker) to see memory, errors and links"
    return [note("driver", f"{text}; neither nvidia-smi nor rocm-smi is here", advice, alike="note")]


def nvidia_devices(told: str) -> list[Finding]:
    """Return the findings for the lines of nvidia-smi's CSV, in the order of _TOLD."""
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.count(",") == len(_TOLD) - 1]
    if not rows:
        return [problem("nvidia-smi", "names no device", "look at `nvidia-smi` itself: driver, or a container without --gpus")]
    names = [f"{name}, {int(memory) / 1024:.0f} GiB" if memory.isdigit() else name for _, name, memory, *_ in rows]
    found = [ok("devices", _counted(names), alike="note")]
    found.append(ok("driver", ", ".join(sorted({row[4] for row in rows})), alike="note"))
    found += _in_use([(row[0], int(row[3]) * MIB) for row in rows if row[3].isdigit()], "nvidia-smi")
    wrong = [f"{row[0]}: {row[5]}" for row in rows if row[5].isdigit() and int(row[5])]
    if wrong:
        advice = "memory of the device fails: reset or replace it before a run is trusted to it"
        found.append(problem("memory errors", f"uncorrected, {', '.join(wrong)}", advice))
    return found


def rocm_devices(told: str) -> list[Finding]:
    """Return the findings for the lines of rocm-smi; none where it names no device."""

    def values(name: str) -> list[str]:
        return re.findall(rf"{name}:\s*(.+?)\s*$", told, re.MULTILINE)

    devices = values("Card [Ss]eries")
    if not devices:
        return []
    driver = ", ".join(dict.fromkeys(values("Driver version")))
    texts = {"devices": _counted(devices), "architecture": _counted(values("GFX Version")), "driver": driver}
    used = re.findall(r"GPU\[(\d+)\].*VRAM Total Used Memory \(B\):\s*(\d+)", told)
    return [
        *(ok(what, text, alike="note") for what, text in texts.items() if text),
        *_in_use([(device, int(taken)) for device, taken in used], "rocm-smi --showpids"),
    ]


def _in_use(used: list[tuple[str, int]], program: str) -> list[Finding]:
    """Return a finding for (device, bytes that are taken of it), before this command has taken any."""
    busy = [f"{device}: {taken / GIB:.1f} GiB" for device, taken in used if taken > _BUSY]
    advice = f"another process is there, see `{program}`: two runs on a device end out of memory or at half speed"
    return [note("memory in use", ", ".join(busy), advice)] if busy else []


def _counted(names: list[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in Counter(names).items())


def linked_pairs(told: str) -> dict[tuple[int, int], str]:
    """Read from `nvidia-smi topo -m` or `rocm-smi --showtopotype` the link of each pair of devices, the lower one first."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()]
    rows = {
        int(words[0][3:]): words[1:]
        for words in lines
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU")  # as the heading has it
    }
    return {(own, other): link for own, row in rows.items() for other, link in zip(rows, row, strict=False) if own < other}


def links(command: Sequence[str], seconds: float) -> list[Finding]:
    """Tell what the links of the pairs of devices, as `command` tells them, mean for a layout."""
    told, why = told_by(command, seconds)
    if why:
        advice = "see what it says by hand: how devices are linked decides the layout"
        return [note("links", f"`{' '.join(command)}`: {why}", advice)]
    kinds = Counter(linked_pairs(told).values())
    text = ", ".join(f"{count} pairs {kind}" if len(kinds) > 1 else f"all {kind}" for kind, count in kinds.most_common())
    ways = ", ".join(f"{kind} goes over {_WEAK[kind]}" for kind in kinds if kind in _WEAK and len(kinds) > 1)
    advice = f"{ways}: keep tensor parallelism among devices that are linked better" if ways else ""
    return [note("links", text, advice, alike="note")] if kinds else []


def seen_by_torch(asked: ProbeContext) -> list[Finding]:
    """Tell how many devices torch sees, their memory, and whether there is one for each process."""
    import torch

    what, built, processes = "seen by torch", torch.version.hip or torch.version.cuda, local_world_size()
    count = torch.cuda.device_count() if built else 0
    if count and torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(number).total_memory / GIB for number in range(count)]
        text = f"{count} x {torch.cuda.get_device_name(0)}, {min(sizes):.0f} GiB"
        if processes > count:
            return [problem(what, f"{text}, for {processes} processes", f"one process each: --nproc-per-node {count}")]
        if processes < count:
            text += f"; {processes} of them tried here, all of them by torchrun --nproc-per-node {count}"
        return [ok(what, text, alike="note")]
    if not accelerated(asked):
        return [ok(what, "none: it computes on processors", alike="note")]
    hidden = ", ".join(f"{name}={asked.environment[name]}" for name in _VISIBLE if name in asked.environment)
    if built and hidden:
        return [note(what, f"none, by {hidden}", "take it out to compute on the accelerators", alike="note")]
    advice = "driver and torch do not fit, or this user may not open the devices: groups video and render, --gpus all"
    if not built:
        advice = "this torch is built for processors alone: install one for CUDA or ROCm (TORCH_INDEX=... ./install.sh)"
    return [problem(what, "none, though the machine has accelerators", advice)]
