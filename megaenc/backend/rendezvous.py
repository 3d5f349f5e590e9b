"""How the processes of a run find each other, again and again where torchrun restarts them."""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.05


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store with nothing but the keys of this attempt, the rank, and the number of processes.

    torchrun lends its workers one store for as long as it lives, with addresses of processes from before a restart: so the
    attempt puts a name of its own in front of every key. RuntimeError if not all processes are there after `timeout`.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"megaenc/{_agree(store, rank, size, timeout)}", store)
    return store, rank, size


def _agree(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name for this attempt, chosen by rank 0.

    Torchrun's own count of restarts will not do: it may differ from node to node. Each process shows a name that nobody had
    before, and rank 0 answers by that name, so that no process can read an answer meant for one before it. A name that a process
    of an earlier attempt has left is answered too, until the new one replaces it.
    """
    mine = uuid.uuid4().hex
    store.set(f"megaenc/process {rank}", mine)
    if rank:
        attempt = _name(store.get(f"{mine}/attempt"))  # waits for it
        store.add(f"{attempt}/present", 1)
        return attempt
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{mine}/present", 0) < size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {size} processes were there after {timeout.total_seconds():.0f} s")
        for other in range(1, size):
            key = f"megaenc/process {other}"
            if store.check([key]) and (name := _name(store.get(key))) not in answered:
                store.set(f"{name}/attempt", mine)
                answered.add(name)
        time.sleep(_POLL_SECONDS)
    return mine


def _name(value: bytes) -> str:
    """Return a name out of the store; anybody who reaches its port can have put anything there."""
    return value[:100].decode(errors="replace")
