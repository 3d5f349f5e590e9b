"""Checks across ranks (rendezvous, shared directory) and the exchange of findings."""

import fcntl
import functools
import os
import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from megaenc.dist_env import get_rank, get_world_size
from megaenc.doctor.disk import nearest_existing_dir
from megaenc.doctor.result import CheckContext, Finding, note, ok, problem

_VISIBILITY_SECONDS = 10.0  # a network file system may show a new file some seconds late
_POLL = 0.05


def join_ranks(context: CheckContext) -> list[Finding]:
    """Join all ranks in a gloo process group; return a finding on rank 0 only.

    All ranks call it together. The finding, always ok, has the numbers of ranks and nodes.

    Raises:
        RuntimeError: A rank is missing after `context.timeout` seconds.
    """
    begin = time.perf_counter()
    join_group(context.timeout)
    seconds = time.perf_counter() - begin
    if get_world_size() == 1:
        return [
            ok(
                "ranks",
                "1; torchrun --nproc-per-node N -m megaenc doctor checks the connections of "
                "several",
            )
        ]
    hosts = len(set(_all_gather(socket.gethostname())))
    if get_rank():
        return []
    return [
        ok(
            "ranks",
            f"{get_world_size()} on {hosts} node{'s' if hosts > 1 else ''}, together after "
            f"{seconds:.1f} s",
        )
    ]


@functools.cache
def join_group(seconds: float) -> None:
    """Join the gloo group of all ranks once; it is torch's default process group.

    All ranks call it together; further calls with the same `seconds` do nothing, calls with others
    fail. Without a launcher the group has a single process.

    Args:
        seconds: Time limit of joining and of the group's collectives.

    Raises:
        RuntimeError: Ranks miss the time limit.
    """
    import torch.distributed as dist

    from megaenc.backend.initialize import rendezvous

    timeout = timedelta(seconds=seconds)
    store, rank, size = rendezvous(timeout) if "RANK" in os.environ else (dist.HashStore(), 0, 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    dist.barrier()


def _all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    import torch.distributed as dist

    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_shared_directory(context: CheckContext) -> list[Finding]:
    """Check that all ranks see a file of rank 0 in `context.save`, and its lock.

    All ranks call it together; it calls `join_group`. Rank 0 creates a temporary file in the
    directory or its nearest existing parent, locks it, and removes it at the end.

    Returns:
        On rank 0 the finding of `assess_sharing`; [] on other ranks, with one rank, or if rank 0
        cannot create the file.
    """
    if get_world_size() == 1:
        return []
    join_group(context.timeout)
    directory = nearest_existing_dir(Path(context.save))
    with ExitStack() as stack:
        name = ""
        if not get_rank():
            with suppress(OSError):  # another check reports a directory that is not writable
                file = stack.enter_context(
                    NamedTemporaryFile(prefix=".megaenc-doctor-", dir=directory)
                )
                name = Path(file.name).name
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        name = _all_gather(name)[0]
        is_observer = get_rank() and name
        # Rank 0 holds the lock until all have answered.
        observations = _all_gather(observe_lock_file(directory / name) if is_observer else "")
    return [] if get_rank() or not name else [assess_sharing(observations)]


def observe_lock_file(path: Path) -> str:
    """Return how this rank sees a file that rank 0 created and holds a lock on.

    Returns:
        "missing" if it does not appear within 10 s, "" if this rank's flock of it is refused,
        "unlocked" if it succeeds or there is another error.
    """
    deadline = time.monotonic() + _VISIBILITY_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return "missing"
        with suppress(OSError):
            os.listdir(path.parent)  # makes some network file systems refresh the directory
        time.sleep(_POLL)
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError:
        pass
    return "unlocked"


def assess_sharing(observations: list[str]) -> Finding:
    """Return a finding on the ranks' observations of rank 0's locked file.

    It is a problem if one is "missing", a note if one is "unlocked", else ok.

    Args:
        observations: Result of `observe_lock_file` by rank; "" for rank 0.
    """
    missing = [rank for rank, observation in enumerate(observations) if observation == "missing"]
    unlocked = [rank for rank, observation in enumerate(observations) if observation == "unlocked"]
    if missing:
        advice = (
            "checkpoints are written by all ranks into one directory: give --save one that all "
            "nodes see"
        )
        return problem(
            "shared by ranks",
            f"a file of rank 0 is missing on rank {format_ranks(missing)}",
            advice,
        )
    if unlocked:
        advice = (
            "two commands on different nodes could train in one directory: start one only, or "
            "mount it with locks across nodes"
        )
        return note(
            "shared by ranks",
            f"a lock of rank 0 does not hold on rank {format_ranks(unlocked)}",
            advice,
        )
    return ok("shared by ranks", "one directory for all ranks, with locks across ranks")


def format_ranks(ranks: list[int]) -> str:
    """Return distinct ranks as text in ascending order, "0-3, 7", or "" for none."""
    starts = [rank for rank in sorted(ranks) if rank - 1 not in ranks]
    stops = [rank for rank in sorted(ranks) if rank + 1 not in ranks]
    return ", ".join(
        f"{first}-{last}" if first < last else str(first)
        for first, last in zip(starts, stops, strict=True)
    )


def gather_findings(local_findings: str, timeout: float) -> dict[int, bytes]:
    """Send this rank's findings, as JSON, to rank 0; return the others' on rank 0.

    All ranks call it, each in a launcher's environment. The findings pass through the launcher's
    store: no process group is needed, but anyone who reaches its port can write to it. Each rank
    waits up to `timeout` seconds for the store, and rank 0 then as long for the findings.

    Returns:
        On rank 0 the JSON by rank, without its own and that of late ranks; {} on others.

    Raises:
        ValueError: A variable of the launcher is missing.
        RuntimeError: The store cannot be reached.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store = dist.PrefixStore("megaenc/doctor", store)
    contents: dict[int, bytes] = {}
    if rank:
        store.set(str(rank), local_findings)
        return contents
    deadline = time.monotonic() + timeout
    missing = set(range(1, size))
    while missing and time.monotonic() < deadline:
        time.sleep(_POLL)
        for other_rank in sorted(missing):
            if store.check([str(other_rank)]):
                contents[other_rank] = store.get(str(other_rank))
        missing -= contents.keys()
    return contents
