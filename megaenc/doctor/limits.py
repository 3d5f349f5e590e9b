"""What the system grants a process: shared memory, open files, locked memory."""

import os
import resource

from megaenc.doctor.findings import Asked, Finding, note, ok, problem, problem_between_nodes
from megaenc.ranks import world_size

_MIB, _GIB = 2**20, 2**30
ENOUGH_SHARED = _GIB
"""Bytes of /dev/shm: RCCL and NCCL take up to about 10 MB there for each pair of a node's processes that speak through it, and
workers of loaders pass batches through it. Docker gives 64 MB."""
_FILES_A_RANK, _OTHER_FILES = 8, 512  # connections to each other rank in its groups; a process's own
_LOCKED = 16 * _GIB


def shared_memory(asked: Asked) -> list[Finding]:
    """/dev/shm: its size and what is free of it."""
    place = asked.root / "dev/shm"
    try:
        about = os.statvfs(place)
        writable = os.access(place, os.W_OK)
    except OSError as error:
        advice = "mount a tmpfs there: NCCL and processes that share tensors need it"
        return [problem("/dev/shm", error.strerror or str(error), advice)]
    return shared_memory_of(about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail, writable, accelerated(asked))


def shared_memory_of(size: int, free: int, writable: bool, needed: bool) -> list[Finding]:
    """The finding for a /dev/shm of `size` bytes; `needed`: whether accelerators speak through it."""
    text = f"{_bytes(size)}, {_bytes(free)} free"
    if not writable:
        return [problem("/dev/shm", f"{text}, and may not be written to", "chmod 1777 /dev/shm")]
    if size < ENOUGH_SHARED or free < ENOUGH_SHARED // 2:
        more = f"{'docker run --ipc host, or' if size == 64 * _MIB else 'give it more:'} --shm-size {ENOUGH_SHARED // _GIB}g"
        advice = more if size < ENOUGH_SHARED else "it is nearly full: remove what processes that are gone have left there"
        if needed:
            return [problem("/dev/shm", text, f"NCCL ends with a bus error where it is too small; {advice}")]
        return [note("/dev/shm", text, f"enough to train on processors, too little for accelerators; {advice}")]
    return [ok("/dev/shm", text)]


def limits(asked: Asked) -> list[Finding]:
    """Open files and locked memory, as this process has them."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = list((asked.root / "sys/class/infiniband").glob("*"))
    return [open_files(files, most, world_size()), locked_memory(locked, bool(cards))]


def open_files(files: int, most: int, ranks: int) -> Finding:
    """The finding for a limit of `files`, which a process may raise to `most` itself."""
    needed = _OTHER_FILES + _FILES_A_RANK * ranks
    if files == resource.RLIM_INFINITY or files >= needed:
        return ok("open files", "without limit" if files == resource.RLIM_INFINITY else f"{files:,}")
    raised = f"ulimit -n {needed if most == resource.RLIM_INFINITY else min(most, max(needed, 65536))}"
    return problem(
        "open files", f"{files:,} for a process, of {ranks} about {needed:,} may be needed", f"{raised} before the start"
    )


def locked_memory(locked: int, cards: bool) -> Finding:
    """The finding for a limit of `locked` bytes; `cards`: whether there are InfiniBand cards, which read locked memory."""
    text = "without limit" if locked == resource.RLIM_INFINITY else _bytes(locked)
    if cards and locked != resource.RLIM_INFINITY and locked < _LOCKED:
        advice = (
            "InfiniBand registers memory between nodes: "
            "ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of slurmd"
        )
        return problem_between_nodes("locked memory", text, advice)
    return ok("locked memory", text)


def accelerated(asked: Asked) -> bool:
    """Whether the machine has accelerators, asked without a driver."""
    return any(asked.root.joinpath("dev").glob("nvidia[0-9]*")) or (asked.root / "dev/kfd").exists()


def _bytes(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
