"""Starting of Python and of child processes, and the ends of processes.

Child processes end with their parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import megaenc
from megaenc.dist_env import die_with_parent

KILL_TIMEOUT = 5.0
"""Seconds to wait for a process to end after it was killed or closed its connection."""


def python_command(*words: str) -> list[str]:
    """Return the command of this Python interpreter with arguments `words`.

    It is a list for `subprocess`. By -P the current directory is not on the module path; run it
    with a `python_environment` if it imports this package.
    """
    return [sys.executable, "-P", *words]


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of `environment` in which Python imports this very package.

    Give it to child processes; os.environ is not changed. Nothing is imported from the current
    directory. Both also hold for the programs that Python starts: torchrun's workers, fork servers,
    compilers. Empty entries of PYTHONPATH, which mean the current directory, are removed.
    """
    directories = [
        str(Path(megaenc.__file__).parents[1]),
        *environment.get("PYTHONPATH", "").split(os.pathsep),
    ]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, directories))),
        "PYTHONSAFEPATH": "1",
    }


@contextlib.contextmanager
def set_child_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables in `os.environ` for the `with` block.

    It is for libraries that start processes. After the block the variables have their values from
    before; those that had none are removed.
    """
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value


def with_pdeathsig(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` so that it ends with this process.

    When this process ends, the kernel sends it SIGKILL. It starts with SIGUSR2 ignored. Start it in
    this process's main thread, with a `python_environment`.
    """
    return python_command(
        "-c",
        "from megaenc.processes import exec_with_pdeathsig; exec_with_pdeathsig()",
        str(os.getpid()),
        *command,
    )


def exec_with_pdeathsig() -> None:
    """Replace this process by the command `sys.argv[2:]`, killed when its parent ends.

    `with_pdeathsig` builds the command line that calls it. The parent has the process id
    `sys.argv[1]`; the kernel sends SIGKILL. If it has ended already, this process exits with code 1
    and without cleanup. The command starts with SIGUSR2 ignored.

    Raises:
        OSError: The command cannot be started.
    """
    set_up_child(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def set_up_child(parent: int) -> None:
    """Make this process end with its parent, and ignore SIGUSR2 from a cluster.

    The parent has the process id `parent`; the kernel sends SIGKILL. If it has ended already, this
    process exits with code 1, without cleanup.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def describe_exit_code(code: int) -> str:
    """Return a process's exit code as a phrase that follows the process's name.

    It is `ended with exit code 1` or, for a negative one, `was killed by SIGTERM`; that of SIGKILL
    adds a hint at the memory.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM (code 143) and SIGHUP (129) exit through `finally` clauses.

    This holds during the `with` block; then the handlers are those from before. SIGHUP is sent when
    a terminal closes, and stays ignored if it is, as under nohup. A second SIGHUP is ignored,
    because shell and kernel both send one.

    Raises:
        ValueError: This is not the main thread.
    """

    def stop(signum: int, frame: object) -> None:
        if signum == signal.SIGHUP:
            signal.signal(signum, signal.SIG_IGN)
        sys.exit(128 + signum)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ChildProcess:
    """Child process in its own session, started at once with an empty standard input.

    Ctrl-C does not reach it, `terminate` reaches only it, and `kill` all processes of the session.

    Args:
        command: Command by `with_pdeathsig`, so that it ends with this process.
        environment: All environment variables of the process.
        output: Open file, or its descriptor, for stdout and stderr; None: those of this process.
        pass_fds: File descriptors that stay open in the process.

    Raises:
        OSError: The command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO | int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        """Return the exit code without waiting, None while the process runs.

        It is a negative signal number if the process was killed.
        """
        if self.process.returncode is None:
            # Not reaped yet, so that its id, which is also its session's, cannot be reused before
            # `kill`.
            try:
                ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped elsewhere in this process
                return self.process.poll()
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.process.returncode

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the process to end, and return its `exit_code`.

        None if it has not ended by then.
        """
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended, and do not wait.

        Its children do not get it.
        """
        if self.exit_code() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and everything in its session by SIGKILL.

        Waits up to `KILL_TIMEOUT` seconds for its end, and then returns without an error. Does
        nothing if the process was reaped already.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_TIMEOUT)
