"""Processors, memory and what a container leaves of them."""

import os
import platform
import re
from pathlib import Path

import psutil

from megaenc.doctor.findings import Asked, Finding, note, ok
from megaenc.doctor.tools import text_of
from megaenc.processes import usable_cores
from megaenc.ranks import local_world_size, world_size

GIB = 2**30
_SWAPPED, _RESERVED = 0.1, 0.1  # of memory


def processors(asked: Asked) -> list[Finding]:
    """Which they are, how many this process may use, and threads that would be too many or too few."""
    cores, share = usable_cores(), quota(asked.root)
    name = _processor(asked.root)
    found = [
        ok("processor", name, alike="note"),
        ok("cores", f"{cores} of {os.cpu_count()} usable, load {os.getloadavg()[0]:.1f}"),
    ]
    if share and share < 0.9 * cores:
        advice = "threads are made for cores: give the container cores (--cpuset-cpus) rather than time (--cpus)"
        found.append(note("time on them", f"limited to that of {share:.3g} cores", advice))
    return found + threads(asked, cores)


def threads(asked: Asked, cores: int) -> list[Finding]:
    """OMP_NUM_THREADS against the cores."""
    given = asked.environment.get("OMP_NUM_THREADS", "")
    alone = world_size() == 1 and "RANK" not in asked.environment
    if local_world_size() > cores:
        advice = "start at most a process a core: --nproc-per-node"
        return [note("threads", f"{local_world_size()} processes on {cores} cores", advice)]
    if alone and given.isdigit() and int(given) < cores:
        advice = f"take OMP_NUM_THREADS out, or start {cores} processes, if training here shall use all cores"
        return [note("threads", f"{given} (OMP_NUM_THREADS) of {cores} cores", advice)]
    if alone and given.isdigit() and int(given) > cores:
        return [note("threads", f"{given} (OMP_NUM_THREADS) on {cores} cores", f"OMP_NUM_THREADS={cores} or less is faster")]
    return [ok("threads", f"{given if alone and given else max(1, cores // local_world_size())} for each process")]


def quota(root: Path = Path("/")) -> float | None:
    """The cores' worth of time that the container or job has; None without a limit."""
    limits = []
    for folder in _groups(root):
        first, _, period = text_of(folder / "cpu.max").partition(" ")
        if first.isdigit() and period.isdigit():
            limits.append(int(first) / int(period))
    old = root / "sys/fs/cgroup/cpu"
    share, period = text_of(old / "cpu.cfs_quota_us"), text_of(old / "cpu.cfs_period_us")
    if share.isdigit() and period.isdigit():
        limits.append(int(share) / int(period))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The bytes that the container or job may use; None without a limit."""
    texts = [text_of(folder / "memory.max") for folder in _groups(root)]
    texts.append(text_of(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < 2**60), default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group and of those above it, as version 2 has them."""
    line = next((line for line in text_of(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "0::/")
    top = root / "sys/fs/cgroup"
    own = top / line[3:].strip("/")
    return [top, *(folder for folder in (own, *own.parents) if top in folder.parents)]


def memory(asked: Asked) -> list[Finding]:
    """How much there is, and what of it is somebody else's, swapped out or set apart for huge pages."""
    there = psutil.virtual_memory()
    limit = memory_limit(asked.root)
    text = f"{there.total / GIB:.1f} GiB, {there.available / GIB:.1f} free"
    found = [ok("memory", text + (f"; this container or job may use {limit / GIB:.1f}" if limit and limit < there.total else ""))]
    swap = psutil.swap_memory()
    if swap.used > _SWAPPED * there.total:
        advice = "something is short of memory here: see what takes it before a run is started"
        found.append(note("swap", f"{swap.used / GIB:.1f} GiB are swapped out", advice))
    about = text_of(asked.root / "proc/meminfo")
    pages, size = (re.search(rf"{name}:\s+(\d+)", about) for name in ("HugePages_Total", "Hugepagesize"))
    reserved = int(pages[1]) * int(size[1]) * 1024 if pages and size else 0
    if reserved > _RESERVED * there.total:
        advice = "set apart for programs that ask for them, which no run does: vm.nr_hugepages=0"
        found.append(note("huge pages", f"{reserved / GIB:.1f} GiB reserved", advice))
    return found


def _processor(root: Path) -> str:
    lines = text_of(root / "proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
