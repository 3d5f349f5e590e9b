"""Accelerators: what the driver's own programs say, what torch sees, and how they are linked."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence

from megaenc.doctor.findings import GIB, MIB, Asked, Finding, accelerated, note, ok, problem, text_of
from megaenc.ranks import local_world_size

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


class ToolError(Exception):
    """A program did not tell what it was asked, in one line; `told` is what it printed before it failed."""

    def __init__(self, why: str, told: str = ""):
        super().__init__(why)
        self.told = told


def installed(program: str) -> str:
    """Return where the program is, on the PATH or where ROCm puts its own; empty where it is not."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_BESIDES}") or ""


def told_by(command: Sequence[str], seconds: float) -> str:
    """Return what `command` prints. ToolError where it fails or has not ended after `seconds`.

    It is killed then and not waited for: what hangs in a driver does not even die.
    """
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True)
    try:
        told, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise ToolError(f"no answer in {seconds:.3g} s") from None
    if process.returncode:
        last = (told.strip().splitlines() or ["without a word"])[-1]
        raise ToolError(f"exit code {process.returncode}: {last[:200]}", told)
    return told


def driver(asked: Asked) -> list[Finding]:
    """Tell what nvidia-smi or rocm-smi says, and how the devices are linked."""
    seconds = 0.4 * asked.seconds
    nvidia, rocm = installed("nvidia-smi"), installed("rocm-smi")
    if rocm and (not nvidia or (asked.root / "dev/kfd").exists()):
        return [*_rocm(rocm, seconds), *_linked([rocm, "--showtopotype"], seconds, rocm_links)]
    if nvidia:
        return [*_nvidia(nvidia, seconds), *_linked([nvidia, "topo", "-m"], seconds, nvidia_links)]
    if not accelerated(asked):
        return [ok("driver", "none: neither nvidia-smi nor rocm-smi is here")]
    loaded = {name: text_of(asked.root / f"sys/module/{name}/version") for name in ("amdgpu", "nvidia")}
    text = ", ".join(f"{name} {version}" for name, version in loaded.items() if version) or "devices are there"
    advice = "install the driver's programs (in a container: the runtime of the maker) to see memory, errors and links"
    return [note("driver", f"{text}; neither nvidia-smi nor rocm-smi is here", advice, alike="note")]


def _nvidia(program: str, seconds: float) -> list[Finding]:
    try:
        told = told_by([program, f"--query-gpu={','.join(_TOLD)}", "--format=csv,noheader,nounits"], seconds)
    except ToolError as error:
        advice = "the driver does not answer: look at `dmesg` for Xid errors; a restart of the machine may be needed"
        return [problem("nvidia-smi", str(error), advice)]
    return nvidia_devices(told)


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


def _in_use(used: list[tuple[str, int]], program: str) -> list[Finding]:
    """A finding for (device, bytes that are taken of it), before this command has taken any."""
    busy = [f"{device}: {taken / GIB:.1f} GiB" for device, taken in used if taken > _BUSY]
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
    """Return the findings for the lines of rocm-smi; none where it names no device."""
    patterns = (("devices", "Card [Ss]eries"), ("architecture", "GFX Version"), ("driver", "Driver version"))
    said = {what: re.findall(rf"{name}:\s*(.+?)\s*$", told, re.MULTILINE) for what, name in patterns}
    if not said["devices"]:
        return []
    said["driver"] = dict.fromkeys(said["driver"])
    found = [
        ok(what, _counted(values) if what != "driver" else ", ".join(values), alike="note")
        for what, values in said.items()
        if values
    ]
    used = re.findall(r"GPU\[(\d+)\].*VRAM Total Used Memory \(B\):\s*(\d+)", told)
    return found + _in_use([(device, int(taken)) for device, taken in used], "rocm-smi --showpids")


def _counted(names: list[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _linked(command, seconds, read) -> list[Finding]:
    try:
        return links(read(told_by(command, seconds)))
    except ToolError as error:
        advice = "see what it says by hand: how devices are linked decides the layout"
        return [note("links", f"`{' '.join(command)}`: {error}", advice)]


def nvidia_links(told: str) -> dict[tuple[int, int], str]:
    """Read from `nvidia-smi topo -m` the link of each pair of devices, the lower one first."""
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
    """Read the same from `rocm-smi --showtopotype`."""
    pairs = {}
    for line in told.splitlines():
        words = line.split()
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU"):
            own = int(words[0][3:])
            pairs |= {(own, other): link for other, link in enumerate(words[1:]) if own < other}
    return pairs


def links(pairs: dict[tuple[int, int], str]) -> list[Finding]:
    """Tell what the links of the pairs of devices mean for a layout."""
    if not pairs:
        return []
    kinds = Counter(pairs.values())
    if len(kinds) == 1:
        return [ok("links", f"all {next(iter(kinds))}", alike="note")]
    text = ", ".join(f"{count} pairs {kind}" for kind, count in kinds.most_common())
    ways = ", ".join(f"{kind} goes over {_WEAK[kind]}" for kind in kinds if kind in _WEAK)
    if not ways:
        return [ok("links", text, alike="note")]
    return [note("links", text, f"{ways}: keep tensor parallelism among devices that are linked better", alike="note")]


def seen_by_torch(asked: Asked) -> list[Finding]:
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
