"""Claims on shared work, with which processes divide it without a coordinator.

The processes may run on any number of nodes, and need no locks. The claim on `NAME` is the file
NAME.claim, created exclusively, which is atomic on local disks, NFS (version 3 and later) and
Lustre. Its owner renews its modification time every few seconds and removes it at the end.

An owner is dead if it is a process of this machine that has ended, or if its file did not change
for DEAD_SECONDS. Each reader measures that time by its own clock: on Lustre, modification times
come from the clients, whose clocks differ. Claims only save time. In rare races, and after a long
pause, two processes own the same work, which must then come out the same.
"""

import contextlib
import os
import secrets
import threading
import time
from functools import cache
from pathlib import Path
from typing import Self

from megaenc.json_files import read_regular_file

BEAT_SECONDS = 10.0
"""Seconds between two renewals of a claim by its owner."""
DEAD_SECONDS = 150.0
"""Seconds without a renewal after which an owner on another machine counts as dead; NFS may show
changes a minute late."""


class Claim:
    """Context manager of a claim, which reserves shared work for this process.

    `ClaimDirectory.acquire` returns it and has created its file. A thread renews the file until the
    block ends, also by an error; then the file is removed. A failure of either is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _renew(self) -> None:
        """Set the file's modification time every BEAT_SECONDS until the block ends."""
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path.unlink()


class ClaimDirectory:
    """Claims of processes on named work, as files in a shared `directory`.

    The constructor neither creates nor reads the directory. The processes may be on any number of
    nodes; a claim whose owner has died counts no more. An instance remembers when it saw each claim
    change, so keep it between calls.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last_changes: dict[Path, tuple[int, float]] = {}

    def acquire(self, name: str) -> Claim | None:
        """Return a new claim on the work `name`, or None if a live process holds it.

        It does not wait. The caller must enter the claim at once, as only an entered claim is
        renewed. A holder counts as dead if it is a process of this machine that has ended, or if
        calls over DEAD_SECONDS (150) see no renewal. `name` becomes part of a file name.

        Raises:
            FileNotFoundError: The directory is gone.
            OSError: The directory cannot be written to.
        """
        path = self._directory / f"{name}.claim"
        while True:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                if not self._is_abandoned(path):
                    return None
                path.unlink(missing_ok=True)
                continue
            # On a full disk only time tells that the owner has ended.
            with contextlib.suppress(OSError), open(descriptor, "w") as stream:
                stream.write(f"{_identify_machine()} {os.getpid()}")
            return Claim(path)

    def _is_abandoned(self, path: Path) -> bool:
        """Return whether the owner of a claim has died or removed it."""
        try:
            changed = path.stat().st_mtime_ns
            # Empty just after the creation of the file.
            owner = read_regular_file(path).decode("utf-8", "replace")
        except FileNotFoundError:
            return True
        now = time.monotonic()
        if path not in self._last_changes or self._last_changes[path][0] != changed:
            self._last_changes[path] = (changed, now)
        return _has_ended(owner) or now - self._last_changes[path][1] >= DEAD_SECONDS


def _has_ended(owner: str) -> bool:
    """Return whether a claim's owner is a process of this machine that has ended."""
    machine, _, pid = owner.rpartition(" ")
    if machine != _identify_machine():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        pass  # the process belongs to another user, or the file is damaged
    return False


@cache
def _identify_machine() -> str:
    """Return the ids of the kernel's boot and of the process id namespace.

    A process id is unique in these.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.stat('/proc/self/ns/pid').st_ino}"
        )
    except OSError:
        return secrets.token_hex(8)  # equals that of no other process, so that only time decides
