"""Checks of processors, memory and the limits of containers, jobs and the system."""

import os
import resource
import shutil
from pathlib import Path

import psutil

from megaenc.dist_env import get_local_world_size, get_world_size
from megaenc.doctor.result import (
    GIB,
    MIB,
    CheckContext,
    Finding,
    has_accelerators,
    multi_node_problem,
    note,
    ok,
    problem,
    read_kernel_file,
)
from megaenc.machine import read_processor_name, usable_core_count

MIN_SHM_BYTES = GIB
"""Minimum size of /dev/shm: RCCL and NCCL take up to about 10 MB for each pair of communicating
processes of a node, and loader workers pass batches through it. Docker's default is 64 MB."""
_FILES_PER_RANK = 8  # connections to each other rank
_BASE_FILES = 512  # all other files of a process
_MIN_LOCKED_BYTES = 16 * GIB


def check_processors(context: CheckContext) -> list[Finding]:
    """Check the processor's model, usable cores and threads.

    A CPU quota of less than 0.9 of the cores is a note; other notes are those of `check_threads`.
    """
    cores = usable_core_count()
    quota = cpu_quota(context.root)
    findings = [
        ok("processor", read_processor_name(context.root), mismatch_level="note"),
        ok("cores", f"{cores} of {os.cpu_count()} usable, load {os.getloadavg()[0]:.1f}"),
        check_threads(context, cores),
    ]
    if quota and quota < 0.9 * cores:
        advice = (
            "one thread is started per core: limit the container's cores (--cpuset-cpus) instead "
            "of its CPU time (--cpus)"
        )
        findings.insert(2, note("CPU quota", f"limited to the time of {quota:.3g} cores", advice))
    return findings


def check_threads(context: CheckContext, cores: int) -> Finding:
    """Check the number of processes and threads against the usable `cores`.

    The finding is ok, or a note if this node has more processes than cores or, without torchrun, if
    OMP_NUM_THREADS is set to another number than `cores`.
    """
    name = "threads"
    processes = get_local_world_size()
    value = context.environment.get("OMP_NUM_THREADS", "")
    if processes > cores:
        return note(
            name,
            f"{processes} processes on {cores} cores",
            "start at most one process per core: --nproc-per-node",
        )
    if get_world_size() > 1 or "RANK" in context.environment or not value:
        return ok(name, f"{max(1, cores // processes)} for each process")
    if value.isdigit() and int(value) < cores:
        advice = f"unset OMP_NUM_THREADS, or start {cores} processes, to train on all cores"
        return note(name, f"{value} (OMP_NUM_THREADS) of {cores} cores", advice)
    if value.isdigit() and int(value) > cores:
        return note(
            name,
            f"{value} (OMP_NUM_THREADS) on {cores} cores",
            f"OMP_NUM_THREADS={cores} or less is faster",
        )
    return ok(name, f"{value} for each process")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the lowest CPU quota of this process's control groups in cores.

    The groups are those of the container or job (cgroup v1 or v2). It is None without a quota.

    Args:
        root: Directory that contains /sys and /proc.
    """
    pairs = [text.split() for text in _read_cgroup(root, "cpu.max")]
    pairs.append(
        [
            read_kernel_file(root / "sys/fs/cgroup/cpu" / file)
            for file in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
    )
    return min(
        (
            int(pair[0]) / int(pair[1])
            for pair in pairs
            if pair and all(word.isdigit() for word in pair)
        ),
        default=None,
    )


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the lowest memory limit of this process's control groups in bytes.

    The groups are those of the container or job (cgroup v1 or v2). It is None without a limit.

    Args:
        root: Directory that contains /sys and /proc.
    """
    texts = [
        *_read_cgroup(root, "memory.max"),
        read_kernel_file(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ]
    return min((int(text) for text in texts if text.isdigit() and int(text) < 2**60), default=None)


def _read_cgroup(root: Path, file: str) -> list[str]:
    """Return the contents of `file` in this process's control group and its parents.

    Control groups are those of cgroup v2.
    """
    line = next(
        (
            line
            for line in read_kernel_file(root / "proc/self/cgroup").splitlines()
            if line.startswith("0::")
        ),
        "0::/",
    )
    cgroup_root = root / "sys/fs/cgroup"
    cgroup = cgroup_root / line[3:].strip("/")
    return [
        read_kernel_file(directory / file)
        for directory in (
            cgroup_root,
            *(
                directory
                for directory in (cgroup, *cgroup.parents)
                if cgroup_root in directory.parents
            ),
        )
    ]


def check_memory(context: CheckContext) -> list[Finding]:
    """Return one ok finding on total and available memory and a container's limit."""
    memory = psutil.virtual_memory()
    limit = memory_limit(context.root)
    text = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free"
    if limit and limit < memory.total:
        text += f"; this container or job may use {limit / GIB:.1f}"
    return [ok("memory", text)]


def check_dev_shm(context: CheckContext) -> list[Finding]:
    """Check that /dev/shm exists, is writable, and has 1 GiB, 512 MiB of it free.

    Returns:
        One finding: ok, or a problem. Too small or too full is only a note on a machine without
        accelerators.
    """
    path = context.root / "dev/shm"
    name = "/dev/shm"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        advice = "mount a tmpfs there: NCCL and processes that share tensors need it"
        return [problem(name, error.strerror or str(error), advice)]
    size = usage.total
    text = f"{_format_bytes(size)}, {_format_bytes(usage.free)} free"
    if not os.access(path, os.W_OK):
        return [problem(name, f"{text}, not writable", "chmod 1777 /dev/shm")]
    if size >= MIN_SHM_BYTES and usage.free >= MIN_SHM_BYTES // 2:
        return [ok(name, text)]
    more = (
        f"{'docker run --ipc host, or' if size == 64 * MIB else 'give it more:'} --shm-size "
        f"{MIN_SHM_BYTES // GIB}g"
    )
    advice = (
        more if size < MIN_SHM_BYTES else "it is nearly full: remove leftovers of ended processes"
    )
    if has_accelerators(context):
        return [problem(name, text, f"NCCL crashes with a bus error if it is too small; {advice}")]
    return [note(name, text, f"enough to train on CPUs, too little for accelerators; {advice}")]


def check_resource_limits(context: CheckContext) -> list[Finding]:
    """Check this process's soft limits of open files and locked memory.

    Returns:
        Two findings. Fewer open files than 512 + 8 per rank of the run are a problem. Less than 16
        GiB of locked memory on a machine with InfiniBand is a problem in a job on several nodes,
        else a note.
    """
    unlimited = resource.RLIM_INFINITY
    ranks = get_world_size()
    # A process may raise its soft limit to the hard one
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = _BASE_FILES + _FILES_PER_RANK * ranks
    if soft_limit == unlimited or soft_limit >= needed:
        findings = [
            ok("open files", "without limit" if soft_limit == unlimited else f"{soft_limit:,}")
        ]
    else:
        text = f"{soft_limit:,} for a process, of {ranks} about {needed:,} may be needed"
        raised = needed if hard_limit == unlimited else min(hard_limit, max(needed, 65536))
        findings = [problem("open files", text, f"ulimit -n {raised} before the start")]
    text = "without limit" if locked == unlimited else _format_bytes(locked)
    if (
        locked == unlimited
        or locked >= _MIN_LOCKED_BYTES
        or not any((context.root / "sys/class/infiniband").glob("*"))
    ):
        return [*findings, ok("locked memory", text)]
    ways = "ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of slurmd"
    return [
        *findings,
        multi_node_problem(
            "locked memory", text, f"InfiniBand registers memory between nodes: {ways}"
        ),
    ]


def _format_bytes(size: float) -> str:
    """Return bytes as text in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
