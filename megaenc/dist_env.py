"""Environment of torchrun, without importing torch.

It tells the ranks. Workers end with the launcher, and can forbid it to restart them.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""Environment variables of torchrun that hold whole numbers."""

EXIT_CODE_FILE = "MEGAENC_EXIT_CODE_FILE"
"""Environment variable with a file to record the exit code in, because torchrun turns every code
but 0 into 1."""

_FILE = "megaenc_exit_code"
_PR_SET_PDEATHSIG = 1


def _read_number(name: str, default: int) -> int:
    """Return the number in an environment variable.

    It is `default` if the variable is unset, empty or no number.
    """
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has given this process a RANK."""
    return bool(os.environ.get("RANK"))


def get_rank() -> int:
    """Return this process's rank in the run (RANK); 0 if unset or no number."""
    return _read_number("RANK", 0)


def get_local_rank() -> int:
    """Return this process's rank on its node (LOCAL_RANK); 0 if unset or no number."""
    return _read_number("LOCAL_RANK", 0)


def get_world_size() -> int:
    """Return the number of the run's processes (WORLD_SIZE); 1 if unset or no number."""
    return _read_number("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of processes on this node (LOCAL_WORLD_SIZE).

    It is 1 if that is unset or no number.
    """
    return _read_number("LOCAL_WORLD_SIZE", 1)


def store_poll_interval(seconds: float) -> float:
    """Return the seconds to wait between two requests of a rank to torch's store.

    They are `seconds`, or ranks / 2048 if that is more, as one process answers all.
    """
    return max(seconds, get_world_size() / 2048)


def is_multi_node() -> bool:
    """Return whether the run has processes on other nodes; False without torchrun."""
    return get_world_size() > get_local_world_size()


def build_rank_variables(count: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for `count` ranks on this machine.

    There is a dictionary for each rank, in order, of LAUNCHER_VARIABLES and MASTER_ADDR; all name
    the same port, which is free now. For a single rank the dictionary is empty. `os.environ` is not
    changed.
    """
    if count == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def forbid_restart(code: int) -> None:
    """Record the exit code for workers that torchrun restarts after a failure.

    They exit with `code` in `exit_if_restart_forbidden`; this process does not exit. Without this
    call on one rank of each node, torchrun with `--max-restarts` would restart a run that was asked
    to stop, because its exit code is not 0, and a complete one of which a process dies as it ends.
    The last call counts. The file that the environment variable MEGAENC_EXIT_CODE_FILE names, if it
    is set, gets the code too, also without torchrun. Errors of writing are ignored.

    The restart after a node has joined is not forbidden: torchrun stops the workers itself then,
    counts no attempt, and removes the present one's directory with the recorded code.
    """
    attempt = _attempt_directory()
    recorded = os.environ.get(EXIT_CODE_FILE)
    for file in filter(None, (attempt and attempt / _FILE, Path(recorded) if recorded else None)):
        with contextlib.suppress(OSError):  # then torchrun restarts the run
            file.write_text(f"{code}\n", encoding="ascii")


def exit_if_restart_forbidden() -> None:
    """Exit with the code that `forbid_restart` recorded in an earlier attempt, if any.

    An attempt is one start of the workers by torchrun. Call it first in a run, on each rank. It
    removes the code of this attempt, which a program that makes several runs has recorded in an
    earlier one. Does nothing without torchrun.
    """
    attempt = _attempt_directory()
    if attempt:
        (attempt / _FILE).unlink(missing_ok=True)
    for file in attempt.parent.glob(f"attempt_*/{_FILE}") if attempt else ():
        with contextlib.suppress(OSError, ValueError):
            sys.exit(int(file.read_text(encoding="ascii")))


def is_torchrun_worker() -> bool:
    """Return whether torchrun started this process, or an ancestor, as a worker.

    It looks for a variable that children inherit.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def _attempt_directory() -> Path | None:
    """Return the directory of this attempt in torchrun's log directory.

    It follows from TORCHELASTIC_ERROR_FILE: LAUNCH/attempt_N/LOCAL_RANK/error.json. LAUNCH is the
    directory of this launch and node. None without torchrun.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if len(error_file.parents) < 3 or not error_file.parents[1].name.startswith("attempt_"):
        return None
    return error_file.parents[1]


def die_with_parent(parent: int) -> None:
    """Make Linux kill this process (SIGKILL) when its parent ends.

    If `parent`, a process id, is not or no longer its parent's, exits at once with code 1, without
    any cleanup.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(1)


def die_with_launcher() -> None:
    """Make the kernel kill this worker when torchrun dies.

    If no ancestor is a Python program, torchrun is dead already, and the worker exits as in
    `die_with_parent`. Does nothing without torchrun. Workers lead their own sessions and would
    otherwise keep writing.
    """
    if is_torchrun_worker():
        die_with_parent(os.getppid())
        if not _has_python_ancestor():
            os._exit(1)


def _has_python_ancestor() -> bool:
    """Return whether an ancestor of this process is a Python program such as torchrun.

    True if it is unknown.
    """
    import psutil

    def read_program(process: psutil.Process) -> str:
        try:
            return process.exe()  # not its title, which a process can change
        except psutil.AccessDenied:
            return next(iter(process.cmdline()), "")

    try:
        interpreter = psutil.Process().exe()
        programs = [read_program(parent) for parent in psutil.Process().parents()]
    except psutil.Error:  # hidden, or just ended, so that the kernel kills this process too
        return True
    return any(
        program == interpreter or os.path.basename(program).startswith("python")
        for program in programs
    )
