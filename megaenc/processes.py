"""Starting of Python and of child processes that end with their parent, and the ends of processes."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from types import GeneratorType
from typing import IO, Any

import megaenc
from megaenc.console import silence_libraries
from megaenc.errors import InputError
from megaenc.torchelastic import die_with_parent

KILL_TIMEOUT = 5.0
"""Seconds to wait for a process to end after it was killed or closed its connection."""


def python_command(*words: str) -> list[str]:
    """Return the command of this Python interpreter with arguments `words`, without the current folder on its path."""
    return [sys.executable, "-P", *words]


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of `environment` in which Python programs import this very package, and nothing from the current folder.

    It also applies to the programs that they start: torchrun's workers, fork servers, compilers. Empty entries of PYTHONPATH,
    which mean the current folder, are removed.
    """
    folders = [str(Path(megaenc.__file__).parents[1]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders))), "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def set_child_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of `environment` in `os.environ` for the block, for libraries that start processes."""
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
    """Return a Python command line that runs `command` so that the kernel kills it when this process ends.

    Start it in this process's main thread, with a `python_environment`.
    """
    return python_command(
        "-c", "from megaenc.processes import exec_with_pdeathsig; exec_with_pdeathsig()", str(os.getpid()), *command
    )


def exec_with_pdeathsig() -> None:
    """Replace this process by the command `sys.argv[2:]`, to be killed when its parent, process id `sys.argv[1]`, ends."""
    set_up_child(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def set_up_child(parent: int) -> None:
    """Make the kernel kill this process when its parent, process id `parent`, ends, and ignore SIGUSR2 from a cluster."""
    die_with_parent(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def describe_exit_code(code: int) -> str:
    """Return a process's exit code in words: `ended with exit code 1` or, for a negative one, `was killed by SIGTERM`."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM (code 143) and SIGHUP (129) exit through `finally` clauses during the block; only in the main thread.

    SIGHUP is sent when a terminal closes, and stays ignored if it is, as under nohup. Shell and kernel both send it: the second
    one is ignored.
    """

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ChildProcess:
    """A child process in its own session, started at once: Ctrl-C does not reach it, and `kill` reaches all its processes.

    `command` must end with this process (see `with_pdeathsig`). `output` receives stdout and stderr, which are inherited without
    it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO | None = None, pass_fds: Sequence[int] = ()
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
        """Return the exit code without waiting: a negative signal number if the process was killed, None while it runs."""
        if self.process.returncode is None:
            # Not reaped yet, so that its id, which is also its session's, cannot be reused before `kill`.
            try:
                ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped elsewhere in this process
                return self.process.poll()
            return None if ended is None else ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.process.returncode

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the process to end; return its exit code (negative if killed), None if it still runs."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended, but not to its children; do not wait."""
        if self.exit_code() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and everything in its session by SIGKILL, and wait up to `KILL_TIMEOUT` seconds for its end."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_TIMEOUT)


class WorkerDied(Exception):
    """Error that the process of `worker` ended before its work was done; the message describes its exit code."""

    def __init__(self, worker: "Worker", description: str) -> None:
        super().__init__(description)
        self.worker = worker


class Worker(ChildProcess):
    """A child process, a new Python interpreter, that calls `work(item)` for each item sent to it and sends back results.

    `work`, items and results must pickle. Not a fork, which threads of tokenizers or torch do not survive, and without importing
    the caller's `__main__`.
    """

    def __init__(self, work: Callable[[Any], Any], environment: Mapping[str, str], output: IO | None = None) -> None:
        # `work` must not be defined in `__main__`: the worker imports it by its module.
        self._work: bytes | None = pickle.dumps(work)
        self.connection, child_connection = Pipe()
        words = (
            "-c",
            "from megaenc.processes import serve_worker; serve_worker()",
            str(os.getpid()),
            str(child_connection.fileno()),
        )
        super().__init__(python_command(*words), environment, output, [child_connection.fileno()])
        child_connection.close()  # so that the connection closes when the process ends

    def send(self, item: Any) -> None:
        """Send one more item to the worker, without waiting for its result; WorkerDied if the process has ended."""
        try:
            if self._work is not None:
                self.connection.send_bytes(self._work)
                self._work = None
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._describe_end() from None

    def results(self, deadline: float | None = None) -> Iterator[Any]:
        """Yield the result of `work` for one sent item, or a generator's values as they come; TimeoutError at `deadline`.

        Raises the exception of `work`, or WorkerDied if the process ends first. `deadline`: of `time.monotonic`.
        """
        last = False
        while not last:
            try:
                ready = self.connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic()))
                last, result, error, trace = self.connection.recv() if ready else (False, [], TimeoutError(), "")
            except (EOFError, OSError):  # the connection closed before or within an answer
                raise self._describe_end() from None
            if error is not None:
                if trace and not isinstance(error, InputError):
                    error.add_note(f"in process {self.process.pid}:\n{trace}")
                raise error
            yield from result

    def _describe_end(self) -> WorkerDied:
        """Return the WorkerDied error for this worker, which has closed its connection."""
        code = self.wait(KILL_TIMEOUT)
        return WorkerDied(self, "closed its connection" if code is None else describe_exit_code(code))

    def kill(self) -> None:
        """Kill the worker process and everything that it has started, and close the connection to it."""
        super().kill()
        self.connection.close()


def serve_worker() -> None:
    """Run the main loop of a worker process: receive `work` and then items from the parent, and send back each result.

    `sys.argv` holds the parent's process id and the file descriptor of the connection.
    """
    set_up_child(int(sys.argv[1]))
    silence_libraries()
    connection, messages = Connection(int(sys.argv[2])), SimpleQueue()
    # A thread receives the next item during the work on this one: otherwise parent and worker could both block in send.
    threading.Thread(target=_receive_messages, args=(connection, messages), daemon=True).start()
    if not (first := messages.get()):
        return
    work = pickle.loads(first)
    with contextlib.suppress(OSError):  # the parent is exiting and reports the reason itself
        while message := messages.get():
            connection.send(_process_item(connection, work, message))


def _process_item(connection: Connection, work: Callable[[Any], Any], message: bytes) -> tuple:
    """Call `work` on a pickled item, send the values of a generator, and return the last answer.

    An answer is (is it the last, list of results, exception or None, traceback).
    """
    try:
        result = work(pickle.loads(message))
        if not isinstance(result, GeneratorType):
            return True, [result], None, ""
        for value in result:
            connection.send((False, [value], None, ""))  # blocks until the parent reads
        return True, [], None, ""
    except Exception as error:
        return True, [], error, traceback.format_exc()


def _receive_messages(connection: Connection, messages: SimpleQueue) -> None:
    """Put each message of the connection into the queue, and an empty one when it closes."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            messages.put(connection.recv_bytes())
    messages.put(b"")
