"""Waiting for what other processes do."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def wait_until(
    found: Callable[[], Any], seconds: float = 60, *, log: Path | None = None, pause: float = 0.02
) -> Any:
    """Return what `found` finds as soon as it finds something; AssertionError after `seconds`, with the end of `log`."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, (
            log.read_text()[-3000:] if log and log.exists() else "waited in vain"
        )
        time.sleep(pause)
    return result


def is_running(number: int) -> bool:
    """Whether a process lives; one that has ended and that nobody reaps does not."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(numbers: Iterable[int]) -> None:
    """Wait until no process of these ids runs; kill those that do after 30 seconds, and fail."""
    try:
        wait_until(lambda: not any(map(is_running, numbers)), 30)
    finally:
        for number in filter(is_running, numbers):
            psutil.Process(number).kill()
