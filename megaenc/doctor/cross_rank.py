"""What is between processes: whether they meet, their clocks, what they share, and what each of them has found."""

import fcntl
import functools
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megaenc.dist_env import rank, world_size
from megaenc.doctor.disk import existing
from megaenc.doctor.result import Finding, ProbeAborted, ProbeContext, note, ok, problem

PINGS = 50
_APART, _FAR_APART = 1.0, 60.0  # seconds
_SEEN = 10.0  # a network file system may show a new file some seconds late
_POLL = 0.05
_SHARED = 1 << 16  # numbers
_HOSTS = 4  # that are named


def join_ranks(asked: ProbeContext) -> list[Finding]:
    """Join all processes in one group over gloo, which the probes after this one use."""
    begin = time.perf_counter()
    try:
        join_group(asked.seconds)
    except RuntimeError as error:
        advice = "a rank is late or cannot be reached: set GLOO_SOCKET_IFNAME to the nodes' network, look for a firewall"
        found = f"{world_size()} ranks: {' '.join(str(error).split())[:200]}"
        raise ProbeAborted(problem("meeting", found, advice)) from None
    seconds = time.perf_counter() - begin
    if world_size() == 1:
        return [ok("ranks", "1; torchrun --nproc-per-node N -m megaenc doctor tries what is between several")]
    hosts = len(set(_gather(socket.gethostname())))
    text = f"{world_size()} on {hosts} node{'s' if hosts > 1 else ''}, together after {seconds:.1f} s"
    return [] if rank() else [ok("ranks", text)]


@functools.cache
def join_group(seconds: float) -> None:
    """Join the group of all processes, or make one of this process alone. RuntimeError where not all are there in time."""
    import torch.distributed as dist

    from megaenc.backend.initialize import rendezvous

    timeout = timedelta(seconds=seconds)
    store, own, size = rendezvous(timeout) if "RANK" in os.environ else (dist.HashStore(), 0, 1)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size, timeout=timeout)
    dist.barrier()


def _gather(mine: Any) -> list[Any]:
    import torch.distributed as dist

    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return answers


def clocks(asked: ProbeContext) -> list[Finding]:
    """Tell how far the clocks of the ranks are apart; rank 0 measures and tells."""
    if world_size() == 1:
        return []
    hosts, offsets = _gather(socket.gethostname()), measured_offsets()
    return [] if rank() else [clock_skew(offsets, hosts)]


def measured_offsets(clock: Callable[[], float] = time.time) -> list[tuple[float, float]]:
    """Return on rank 0 the seconds that each rank's clock is ahead and how wrong that may be; elsewhere an empty list.

    As NTP does it (RFC 5905, section 8): of some messages there and back, whose times both ends note, the quickest is right to
    half of its way.
    """
    import torch
    import torch.distributed as dist

    ping, pong = torch.zeros(1), torch.zeros(2, dtype=torch.float64)
    if rank():
        for _ in range(PINGS):
            dist.recv(ping, 0)
            received = clock()
            pong[0], pong[1] = received, clock()
            dist.send(pong, 0)
        return []

    def way(other: int) -> tuple[float, float]:
        sent = clock()
        dist.send(ping, other)
        dist.recv(pong, other)
        back, (there, away) = clock(), pong.tolist()
        return back - sent - (away - there), ((there - sent) + (away - back)) / 2

    shortest = [min(way(other) for _ in range(PINGS)) for other in range(1, dist.get_world_size())]
    return [(0.0, 0.0), *((offset, max(seconds, 0.0) / 2) for seconds, offset in shortest)]


def clock_skew(offsets: list[tuple[float, float]], hosts: list[str]) -> Finding:
    """Judge the `measured_offsets` of ranks on `hosts`."""

    def seconds(value: float) -> str:
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"

    first, *_, last = sorted(range(len(offsets)), key=lambda at: offsets[at])
    difference, error = offsets[last][0] - offsets[first][0], offsets[last][1] + offsets[first][1]
    text = f"at most {seconds(difference)} apart, to {seconds(error)}"
    if difference - error < _APART:
        return ok("clocks", text)
    odd = last if abs(offsets[last][0]) > abs(offsets[first][0]) else first  # rank 0 is right, for somebody has to be
    text += f": rank {odd} ({hosts[odd]}) is {'ahead' if odd == last else 'behind'}"
    advice = "logs of nodes cannot be laid side by side: start the time service there (chronyc tracking, timedatectl)"
    if difference - error < _FAR_APART:
        return note("clocks", text, advice)
    return problem("clocks", text, f"{advice}; file times, certificates and Slurm's own keys are refused at minutes")


def shared_folder(asked: ProbeContext) -> list[Finding]:
    """Tell whether the --save folder is the same one on all ranks, and a lock of rank 0 holds for all of them."""
    if world_size() == 1:
        return []
    path = existing(Path(asked.save)) / f".megaenc-doctor-{_gather(secrets.token_hex(8))[0]}"
    with ExitStack() as stack:
        made = False
        with suppress(OSError):  # a folder that cannot be written to is found by another probe
            if not rank():
                file = stack.enter_context(open(path, "x"))
                stack.callback(path.unlink, missing_ok=True)
                made = True
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = _gather(made)[0]
        everywhere = _gather(_shared(path) if rank() and there else "")  # until which the file is open, and so locked
    return [] if rank() or not there else [sharing(everywhere)]


def _shared(path: Path) -> str:
    """Return "missing" or "unlocked", or nothing, as this rank sees the file that rank 0 has made and locked."""
    deadline = time.monotonic() + _SEEN
    while not path.exists():
        if time.monotonic() > deadline:
            return "missing"
        with suppress(OSError):
            os.listdir(path.parent)  # which has some network file systems look anew
        time.sleep(_POLL)
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError:
        pass
    return "unlocked"


def sharing(everywhere: list[str]) -> Finding:
    """Judge what each rank saw of the file."""
    missing, unlocked = ([at for at, found in enumerate(everywhere) if found == word] for word in ("missing", "unlocked"))
    if missing:
        advice = "checkpoints are written by all ranks into one folder: give --save one that all nodes see"
        return problem("shared by ranks", f"a file of rank 0 is not there on rank {format_ranks(missing)}", advice)
    if unlocked:
        advice = "two commands on different nodes could train in one folder: start one, or mount it with locks across nodes"
        return note("shared by ranks", f"a lock of rank 0 does not hold on rank {format_ranks(unlocked)}", advice)
    return ok("shared by ranks", "one folder for all, and a lock of one holds for all")


def shared_arrays(asked: ProbeContext) -> list[Finding]:
    """Tell whether a node's processes have one copy of the arrays that a run keeps in memory for all of them (data.shared)."""
    if world_size() == 1:
        return []
    import numpy as np

    from megaenc.data.packing.shared_memory import shared

    made = []

    def make() -> tuple[np.ndarray]:
        made.append(True)
        return (np.arange(_SHARED),)

    [array] = shared(("megaenc doctor", _gather(secrets.token_hex(8))[0]), make)
    everywhere = _gather((socket.gethostname(), bool(made)))  # also keeps the arrays until all have seen them
    wrong = _gather(not np.array_equal(array, np.arange(_SHARED)))
    return [] if rank() else copies(everywhere, wrong)


def copies(everywhere: list[tuple[str, bool]], wrong: list[bool]) -> list[Finding]:
    """Judge, for each rank, (its host, whether it has made the array itself) and whether that is wrong."""
    what, hosts = "shared arrays", Counter(host for host, _ in everywhere)
    if any(wrong):
        text = f"other numbers than were written, on rank {format_ranks([at for at, bad in enumerate(wrong) if bad])}"
        return [problem(what, text, "memory that processes share is broken here: try another kernel or container")]
    own = {host: count for host, count in Counter(host for host, own in everywhere if own).items() if count > 1}
    if own:
        text = ", ".join(f"{count} of {hosts[host]} processes on {host}" for host, count in list(own.items())[:_HOSTS])
        more = f" and {len(own) - _HOSTS} other nodes" if len(own) > _HOSTS else ""
        advice = (
            "each keeps the order of the documents for itself, in more memory: they need one /proc in which they see each other "
            "(no hidepid, one container for all) and one folder for temporary files"
        )
        return [note(what, f"a copy each for {text}{more}", advice)]
    return [ok(what, "one copy for the processes of a node")] if max(hosts.values()) > 1 else []


def format_ranks(ranks: list[int]) -> str:
    """Write ranks for the eye: 0-3, 7."""
    starts = [each for each in sorted(ranks) if each - 1 not in ranks]
    stops = [each for each in sorted(ranks) if each + 1 not in ranks]
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in zip(starts, stops, strict=True))


def exchange(asked: ProbeContext, mine: str, patience: float) -> dict[int, bytes]:
    """Return on rank 0, by rank, the text of each rank, except those that are missing after `patience` seconds.

    It goes through the launcher's store, which is there without a group, and which anybody who reaches its port can write to.
    """
    import torch.distributed as dist

    store, own, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
    store = dist.PrefixStore("megaenc/doctor", store)
    if own:
        store.set(str(own), mine)
        return {}
    found, deadline = {0: mine.encode()}, time.monotonic() + patience
    while len(found) < size and time.monotonic() < deadline:
        time.sleep(_POLL)
        there = [other for other in range(1, size) if other not in found and store.check([str(other)])]
        found |= {other: store.get(str(other)) for other in there}
    return found
