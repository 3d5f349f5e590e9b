"""Processors, memory, and what containers, jobs and the system's limits leave of them to a process."""

import os
import re
import resource
from pathlib import Path

import psutil

from megaenc.dist_env import local_world_size, world_size
from megaenc.doctor.result import GIB, MIB, Finding, ProbeContext, accelerated, note, ok, problem, problem_between_nodes, text_of
from megaenc.processes import processor_name, usable_cores

_MUCH = 0.1  # of the memory
ENOUGH_SHARED = GIB
"""Bytes of /dev/shm: RCCL and NCCL take up to about 10 MB there for each pair of a node's processes that speak through it, and
workers of loaders pass batches through it. Docker gives 64 MB."""
_FILES_A_RANK, _OTHER_FILES = 8, 512  # connections to each other rank in its groups; a process's own
_LOCKED = 16 * GIB


def processors(asked: ProbeContext) -> list[Finding]:
    """Tell which they are, how many this process may use, and whether threads are too many or too few."""
    cores, share = usable_cores(), quota(asked.root)
    found = [
        ok("processor", processor_name(asked.root), alike="note"),
        ok("cores", f"{cores} of {os.cpu_count()} usable, load {os.getloadavg()[0]:.1f}"),
        threads(asked, cores),
    ]
    if share and share < 0.9 * cores:
        advice = "threads are made for cores: give the container cores (--cpuset-cpus) rather than time (--cpus)"
        found.insert(2, note("time on them", f"limited to that of {share:.3g} cores", advice))
    return found


def threads(asked: ProbeContext, cores: int) -> Finding:
    """Compare OMP_NUM_THREADS, which counts for one process alone, with the cores."""
    what, processes = "threads", local_world_size()
    given = asked.environment.get("OMP_NUM_THREADS", "")
    if processes > cores:
        return note(what, f"{processes} processes on {cores} cores", "start at most a process a core: --nproc-per-node")
    if world_size() > 1 or "RANK" in asked.environment or not given:
        return ok(what, f"{max(1, cores // processes)} for each process")
    if given.isdigit() and int(given) < cores:
        advice = f"take OMP_NUM_THREADS out, or start {cores} processes, if training here shall use all cores"
        return note(what, f"{given} (OMP_NUM_THREADS) of {cores} cores", advice)
    if given.isdigit() and int(given) > cores:
        return note(what, f"{given} (OMP_NUM_THREADS) on {cores} cores", f"OMP_NUM_THREADS={cores} or less is faster")
    return ok(what, f"{given} for each process")


def quota(root: Path = Path("/")) -> float | None:
    """Return the cores' worth of time that the container or job has; None without a limit."""
    pairs = [text.split() for text in _limits(root, "cpu.max")]
    pairs.append([text_of(root / "sys/fs/cgroup/cpu" / file) for file in ("cpu.cfs_quota_us", "cpu.cfs_period_us")])
    return min((int(pair[0]) / int(pair[1]) for pair in pairs if pair and all(word.isdigit() for word in pair)), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the container or job may use; None without a limit."""
    texts = [*_limits(root, "memory.max"), text_of(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    return min((int(text) for text in texts if text.isdigit() and int(text) < 2**60), default=None)


def _limits(root: Path, file: str) -> list[str]:
    """Return what `file` says in this process's control group and in those above it, as version 2 has them."""
    line = next((line for line in text_of(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "0::/")
    top = root / "sys/fs/cgroup"
    own = top / line[3:].strip("/")
    return [text_of(folder / file) for folder in (top, *(folder for folder in (own, *own.parents) if top in folder.parents))]


def memory(asked: ProbeContext) -> list[Finding]:
    """Tell how much there is, and what of it is somebody else's, swapped out or set apart for huge pages."""
    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    limit, about = memory_limit(asked.root), text_of(asked.root / "proc/meminfo")
    text = f"{total / GIB:.1f} GiB, {available / GIB:.1f} free"
    found = [ok("memory", text + (f"; this container or job may use {limit / GIB:.1f}" if limit and limit < total else ""))]
    swapped = psutil.swap_memory().used
    if swapped > _MUCH * total:
        advice = "something is short of memory here: see what takes it before a run is started"
        found.append(note("swap", f"{swapped / GIB:.1f} GiB are swapped out", advice))
    pages, size = (re.search(rf"{name}:\s+(\d+)", about) for name in ("HugePages_Total", "Hugepagesize"))
    reserved = int(pages[1]) * int(size[1]) * 1024 if pages and size else 0
    if reserved > _MUCH * total:
        advice = "set apart for programs that ask for them, which no run does: vm.nr_hugepages=0"
        found.append(note("huge pages", f"{reserved / GIB:.1f} GiB reserved", advice))
    return found


def shared_memory(asked: ProbeContext) -> list[Finding]:
    """Judge the size of /dev/shm, what is free of it, and whether it can be written to."""
    place, what = asked.root / "dev/shm", "/dev/shm"
    try:
        about = os.statvfs(place)
    except OSError as error:
        advice = "mount a tmpfs there: NCCL and processes that share tensors need it"
        return [problem(what, error.strerror or str(error), advice)]
    size, free = about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail
    text = f"{_bytes(size)}, {_bytes(free)} free"
    if not os.access(place, os.W_OK):
        return [problem(what, f"{text}, and may not be written to", "chmod 1777 /dev/shm")]
    if size >= ENOUGH_SHARED and free >= ENOUGH_SHARED // 2:
        return [ok(what, text)]
    more = f"{'docker run --ipc host, or' if size == 64 * MIB else 'give it more:'} --shm-size {ENOUGH_SHARED // GIB}g"
    advice = more if size < ENOUGH_SHARED else "it is nearly full: remove what processes that are gone have left there"
    if accelerated(asked):
        return [problem(what, text, f"NCCL ends with a bus error where it is too small; {advice}")]
    return [note(what, text, f"enough to train on processors, too little for accelerators; {advice}")]


def limits(asked: ProbeContext) -> list[Finding]:
    """Judge how many open files and how much locked memory, which InfiniBand cards read, this process may have."""
    endless, ranks = resource.RLIM_INFINITY, world_size()
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the first may be raised to the second by the process itself
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = _OTHER_FILES + _FILES_A_RANK * ranks
    if files == endless or files >= needed:
        found = [ok("open files", "without limit" if files == endless else f"{files:,}")]
    else:
        text = f"{files:,} for a process, of {ranks} about {needed:,} may be needed"
        raised = needed if most == endless else min(most, max(needed, 65536))
        found = [problem("open files", text, f"ulimit -n {raised} before the start")]
    text = "without limit" if locked == endless else _bytes(locked)
    if locked == endless or locked >= _LOCKED or not any((asked.root / "sys/class/infiniband").glob("*")):
        return [*found, ok("locked memory", text)]
    ways = "ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of slurmd"
    return [*found, problem_between_nodes("locked memory", text, f"InfiniBand registers memory between nodes: {ways}")]


def _bytes(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
