"""Cooperation with torchrun: workers end with it, and may forbid it to restart them."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

EXIT_CODE_FILE = "MEGAENC_EXIT_CODE_FILE"
"""Environment variable with a file to record the exit code in, because torchrun turns every code but 0 into 1."""

_FILE = "megaenc_exit_code"
_PR_SET_PDEATHSIG = 1


def exit_without_restart(code: int) -> None:
    """Write `code` to a file, so that workers that torchrun starts after a failure exit at once; do not exit this process.

    With `--max-restarts`, torchrun would restart a run that was asked to stop, because its exit code is not 0, and a complete one
    of which a process dies as it ends. Needs torchrun and its log folder. The file named by EXIT_CODE_FILE, if any, gets the code
    as well.

    A node that joins forbids nothing: torchrun stops the workers itself then, does not count an attempt and removes the folder of
    the present one, and the file with it.
    """
    attempt = _attempt_folder()
    recorded = os.environ.get(EXIT_CODE_FILE)
    for file in filter(None, (attempt and attempt / _FILE, Path(recorded) if recorded else None)):
        with contextlib.suppress(OSError):  # then torchrun restarts the run
            file.write_text(f"{code}\n", encoding="ascii")


def exit_if_restart_forbidden() -> None:
    """Exit with the code that a worker of an earlier attempt passed to `exit_without_restart`; do nothing if there is none.

    Call it first in a run. It withdraws what an earlier run in this attempt, by the same program, has left.
    """
    attempt = _attempt_folder()
    if attempt:
        (attempt / _FILE).unlink(missing_ok=True)
    for file in attempt.parent.glob(f"attempt_*/{_FILE}") if attempt else ():
        with contextlib.suppress(OSError, ValueError):
            sys.exit(int(file.read_text(encoding="ascii")))


def is_torchrun_worker() -> bool:
    """Return whether this process was started by torchrun as a worker (TORCHELASTIC_RUN_ID is set)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _attempt_folder() -> Path | None:
    """Return the folder of this attempt in torchrun's log folder of this launch and node; None without torchrun.

    It follows from TORCHELASTIC_ERROR_FILE: LAUNCH/attempt_N/LOCAL_RANK/error.json.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if len(error_file.parents) < 3 or not error_file.parents[1].name.startswith("attempt_"):
        return None
    return error_file.parents[1]


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, process id `parent`, ends; exit at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(1)


def die_with_launcher() -> None:
    """Make the kernel kill this worker when torchrun dies; exit if torchrun is dead already, do nothing without torchrun.

    Workers lead their own sessions and would otherwise keep writing. A worker that a Python program has adopted does not exit.
    """
    if is_torchrun_worker():
        die_with_parent(os.getppid())
        if not _has_python_ancestor():
            os._exit(1)


def _has_python_ancestor() -> bool:
    """Return whether an ancestor of this process is a Python program such as torchrun; True if it is unknown."""
    import psutil

    def read_program(process: psutil.Process) -> str:
        try:
            return process.exe()  # not its title, which a process can change
        except psutil.AccessDenied:
            return next(iter(process.cmdline()), "")

    try:
        own = psutil.Process().exe()
        programs = [read_program(parent) for parent in psutil.Process().parents()]
    except psutil.Error:  # hidden, or just ended, so that the kernel kills this process too
        return True
    return any(program == own or os.path.basename(program).startswith("python") for program in programs)
