"""Claims on shared work: files with which processes on any number of nodes divide work without a coordinator or locks.

The claim on `NAME` is the file NAME.claim-1, created exclusively, which is atomic on local disks, NFS (version 3 and later)
and Lustre. Its owner rewrites it every few seconds. If the owner is dead, another process creates NAME.claim-2, and so on. No
claim is removed before the folder is, so that no two processes can create the same one.

An owner is dead if it is a process of this machine that has ended, or if its file did not change for DEAD_SECONDS. Each reader
measures that time by its own clock: on Lustre, modification times come from the clients, whose clocks differ.
"""

import contextlib
import json
import os
import re
import secrets
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from megaenc.atomic_io import remove_path
from megaenc.json_files import parse_json, read_regular_file

BEAT_SECONDS = 10.0
"""Seconds between two rewrites of a claim by its owner."""
DEAD_SECONDS = 150.0
"""Seconds without a rewrite after which an owner on another machine counts as dead; NFS may show changes a minute late."""
CLAIM_NAME = re.compile(r"(.+)\.claim-(\d+)")
_CLAIM_BYTES = 256  # constant, so that a rewrite never leaves a part of the previous content


class ClaimState(NamedTuple):
    """Live claim as others see it: generation and amount of work done, in the unit of the work."""

    generation: int
    done: float


class Claim:
    """Context manager of a claim of this process: a thread rewrites its file, with the amount `done`, until the block ends."""

    def __init__(self, path: Path, generation: int) -> None:
        self.path, self.generation, self.done = path, generation, 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def _beat(self) -> None:
        """Rewrite the file every BEAT_SECONDS until the block ends; its content differs each time."""
        beats = 0
        while not self._ended.wait(BEAT_SECONDS):
            beats += 1
            self.write({**_identify_process(), "done": round(self.done), "beats": beats})

    def write(self, content: dict[str, Any]) -> None:
        """Overwrite the file with `content`; do nothing if it is gone or cannot be written."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY)  # does not create it in a folder that has been made anew
            try:
                os.pwrite(descriptor, json.dumps(content).ljust(_CLAIM_BYTES).encode(), 0)
            finally:
                os.close(descriptor)  # which sends it to the server of a network file system

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.write({"released": True})


class ClaimFolder:
    """Claims in a shared folder, with a memory of when this process saw each of them change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_changes: dict[Path, tuple[bytes, float]] = {}

    def acquire(self, name: str) -> Claim | None:
        """Return a new claim on `name`, or None if a live process holds it. Raises FileNotFoundError if the folder is gone."""
        generation = 1
        while True:
            path = self._folder / f"{name}.claim-{generation}"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                if self._is_live(path):
                    return None
                self._remove_temporary_files(path, name)
                generation += 1
                continue
            claim = Claim(path, generation)
            claim.write({**_identify_process(), "done": 0, "beats": 0})
            return claim

    def read_live(self, names: list[str]) -> dict[str, ClaimState]:
        """Return the newest live claim by name, of the file names `names` of the folder that are claims."""
        states: dict[str, ClaimState] = {}
        for name in names:
            if not (match := CLAIM_NAME.fullmatch(name)):
                continue
            path, generation = self._folder / name, int(match[2])
            newest = states.get(match[1])
            with contextlib.suppress(OSError):
                if (newest is None or newest.generation < generation) and self._is_live(path):
                    done = _parse_claim(self._last_changes[path][0]).get("done", 0)
                    states[match[1]] = ClaimState(generation, done if type(done) is int else 0)
        return states

    def _is_live(self, path: Path) -> bool:
        """Return whether the owner of a claim has neither released it nor died."""
        content, now = read_regular_file(path), time.monotonic()
        if path not in self._last_changes or self._last_changes[path][0] != content:
            self._last_changes[path] = (content, now)
        owner = _parse_claim(content)  # empty just after its creation
        if owner.get("released") or _has_ended(owner):
            return False
        return now - self._last_changes[path][1] < DEAD_SECONDS

    def _remove_temporary_files(self, path: Path, name: str) -> None:
        """Remove the temporary files for `name` of a claim's owner if it is a process of this machine that has ended.

        They are left if another process has its id now, which is in their names.
        """
        owner = _parse_claim(self._last_changes[path][0])
        if _has_ended(owner) and _read_start_time(owner["pid"]) is None:
            for temporary in self._folder.glob(f".{name}*.{owner['pid']}-*.tmp"):
                remove_path(temporary)


def _parse_claim(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a claim; {} if it is empty or damaged."""
    try:
        value = parse_json(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _identify_process() -> dict[str, Any]:
    """Return machine, process id and start time of this process; no other process has the same three."""
    return {"machine": _identify_machine(), "pid": os.getpid(), "start": _read_start_time(os.getpid())}


@cache
def _identify_machine() -> str:
    """Return the id of the kernel's boot and of the process id namespace, in which a process id is unique."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)  # equals that of no other process, so that only time decides


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether a claim's owner is a process of this machine that has ended."""
    pid = owner.get("pid")
    return type(pid) is int and owner.get("machine") == _identify_machine() and _read_start_time(pid) != owner.get("start")


def _read_start_time(pid: int) -> str | None:
    """Return the start time of a process of this machine in clock ticks since the boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a process name may hold anything
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
