"""Helpers that wait for other processes."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def wait_until(
    found: Callable[[], Any], seconds: float = 60, *, log: Path | None = None, pause: float = 0.02
) -> Any:
    """Return the result of `found` once it is true; AssertionError after `seconds`.

    The error has the end of `log`.
    """
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, (
            log.read_text()[-3000:] if log and log.exists() else "waited in vain"
        )
        time.sleep(pause)
    return result


def is_running(number: int) -> bool:
    """Return whether a process runs; an ended one that nobody reaps does not."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(numbers: Iterable[int]) -> None:
    """Wait until none of these processes runs; after 30 seconds kill them and fail."""
    try:
        wait_until(lambda: not any(map(is_running, numbers)), 30)
    finally:
        for number in filter(is_running, numbers):
            psutil.Process(number).kill()
