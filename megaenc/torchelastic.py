"""Processes that torchrun has started: their end with it, and what they leave for those that it starts in their place."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_FILE = "megaenc_exit_code"
_PR_SET_PDEATHSIG = 1


def exit_without_restart(code: int) -> None:
    """Have every process that this torchrun starts from now on, on this machine, end at once with `code`.

    torchrun takes whatever is not 0 for a failure and, given `--max-restarts`, would go on with a run that was asked to stop.
    Does nothing without torchrun, or where it has no folder of its own.
    """
    if file := _memory():
        with contextlib.suppress(OSError):  # then the run is merely started again
            file.write_text(f"{code}\n", encoding="ascii")


def exit_if_restart_forbidden() -> None:
    """Exit with the code that an earlier process gave `exit_without_restart`, if one did. Call it first."""
    file = _memory()
    if file and file.exists():
        with contextlib.suppress(OSError, ValueError):
            sys.exit(int(file.read_text(encoding="ascii")))


def is_torchrun_worker() -> bool:
    """Whether this process is a worker of torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _memory() -> Path | None:
    """A file in the folder that torchrun makes for its logs: one a launch and node, which no other launch can take for its own.

    The folder is known by what torchrun tells each worker: the path LAUNCH/attempt_N/LOCAL_RANK/error.json.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if len(error_file.parents) < 3 or not error_file.parents[1].name.startswith("attempt_"):
        return None
    return error_file.parents[2] / _FILE


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def die_with_launcher() -> None:
    """Under torchrun, be killed when it dies: its workers lead their own sessions and would otherwise go on writing.

    A launcher that died before this call is noticed too, unless a Python program adopts its orphans.
    """
    if is_torchrun_worker():
        die_with_parent(os.getppid())
        if not _is_below_python():
            os._exit(1)


def _is_below_python() -> bool:
    """Whether a program above this process is Python, as torchrun is and the likes of init are not; True if it cannot be told."""
    import psutil

    def program_of(process: psutil.Process) -> str:
        try:
            return process.exe()  # the program itself: a process may give itself another title
        except psutil.AccessDenied:
            return next(iter(process.cmdline()), "")

    try:
        own = psutil.Process().exe()
        programs = [program_of(parent) for parent in psutil.Process().parents()]
    except psutil.Error:  # hidden, or just ended: then the kernel ends this process too
        return True
    return any(program == own or os.path.basename(program).startswith("python") for program in programs)
