"""Processes below this one: none outlives it, and all that one has started ends with it."""

import contextlib
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from types import GeneratorType
from typing import IO, Any, Self

import megaenc
from megaenc.console import silence_libraries
from megaenc.errors import InputError
from megaenc.torchelastic import die_with_parent

_MOST_PROCESSES, _MOST_PER_CORE = 64, 8
KILL_TIMEOUT = 5.0
"""Seconds that a process is given to end in when it is killed or has closed its connection."""


def usable_core_count() -> int:
    """The processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def read_processor_name(root: Path = Path("/")) -> str:
    """Return the name of the processor as Linux has it in `root`, else what Python knows of it."""
    with contextlib.suppress(OSError):
        text = (root / "proc/cpuinfo").read_text(errors="replace")
        if name := re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.MULTILINE):
            return name[1]
    return platform.processor() or platform.machine()


def check_process_count(flag: str, count: int) -> None:
    """Raise InputError if `count` processes or threads, given by `flag`, are far more than the usable cores can run."""
    cores = usable_core_count()
    most = max(_MOST_PROCESSES, _MOST_PER_CORE * cores)
    if count > most:
        raise InputError(f"{flag}: found {count:,}, expected at most {most:,} with {cores:,} usable cores; give a smaller number")


@cache
def accelerator_names() -> list[str]:
    """Return the name of each that this process may use; without a device file none, which is known without loading torch.

    Raises InputError where they cannot be asked.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(Path("/dev", name).exists() for name in ("kfd", "dxg")):
        return []
    ask = "import torch; [print(torch.cuda.get_device_name(each)) for each in range(torch.cuda.device_count())]"
    asked = subprocess.run(with_pdeathsig(python_command("-c", ask)), env=python_environment(), capture_output=True, text=True)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        raise InputError(f"the accelerators could not be counted: {said[-1] if said else 'torch said nothing'}")
    return asked.stdout.splitlines()


def select_visible_devices(count: int) -> tuple[str, list[str]]:
    """Return the variable that says which accelerators a process sees, and its words for the first `count`."""
    variable = "HIP_VISIBLE_DEVICES" if os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    chosen = os.environ.get(variable, "")
    return variable, (chosen.split(",") if chosen else [str(number) for number in range(count)])[:count]


def peak_resident_bytes() -> float:
    """The most bytes that this process has had resident since it began to run its program.

    What getrusage says would be its parent's, if that had more when it started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024.0 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def python_command(*words: str) -> list[str]:
    """Return the command that starts this interpreter on `words`, without the current folder on its module path."""
    return [sys.executable, "-P", *words]


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environment` for a Python program that imports this very package, and nothing from the current folder.

    The same holds for the programs that it starts: torchrun's workers, fork servers, compilers. An empty entry of PYTHONPATH,
    which stands for the current folder, is left out.
    """
    folders = [str(Path(megaenc.__file__).parents[1]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders))), "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def set_child_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Make `environment` this process's own for the block, for libraries that start processes without taking one."""
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
    """`command` as words that, started in this process's main thread, have the kernel kill it when this process ends.

    They are to be started in a `python_environment`.
    """
    return python_command(
        "-c", "from megaenc.processes import exec_with_pdeathsig; exec_with_pdeathsig()", str(os.getpid()), *command
    )


def exec_with_pdeathsig() -> None:
    """Replace this process, started by `with_pdeathsig`, by the command in `argv`, after the parent's process id."""
    set_up_child(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def set_up_child(parent: int) -> None:
    """Have this process end with process `parent`, and leave it SIGUSR2, by which a cluster tells a job that its time is over."""
    die_with_parent(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def describe_exit_code(code: int) -> str:
    """Describe an exit code: `ended with exit code 1`, `was killed by SIGKILL, as the kernel does when memory runs out`."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class ChildProcess:
    """A process in a session of its own, so that Ctrl-C reaches its parent alone and `kill` everything that it has started.

    `command` is to be one that ends with this process, as of `with_pdeathsig`, started in the main thread. `output` takes both of
    its streams; without it they are this process's own.
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

    def code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.process.returncode is None:
            # Not yet reaped: its number, which is its session's too, stays its own until `kill`.
            try:
                ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped by somebody else in this process
                return self.process.poll()
            return None if ended is None else ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.process.returncode

    def wait(self, seconds: float) -> int | None:
        """Return the exit code once there is one, None after `seconds`."""
        deadline = time.monotonic() + seconds
        while (code := self.code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        """Tell the process itself to end."""
        if self.code() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all that it has started; one that hangs in a driver is not waited for for ever."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_TIMEOUT)


class WorkerDied(Exception):
    """`worker` has ended before it was done; the message says how."""

    def __init__(self, worker: "Worker", how: str) -> None:
        super().__init__(how)
        self.worker = worker


class Worker(ChildProcess):
    """A fresh interpreter that calls `work(item)` for each item that it is sent. `work`, items and results must pickle.

    It is no fork: threads of a tokenizer or of torch do not survive a fork, and nothing re-runs the caller's `__main__`.
    """

    def __init__(self, work: Callable[[Any], Any], environment: Mapping[str, str], output: IO | None = None) -> None:
        # The name must not be `__main__`'s: the worker imports the callable by its module.
        self._work: bytes | None = pickle.dumps(work)
        self.connection, there = Pipe()
        words = ("-c", "from megaenc.processes import serve_worker; serve_worker()", str(os.getpid()), str(there.fileno()))
        super().__init__(python_command(*words), environment, output, [there.fileno()])
        there.close()  # so that the end of the process is the end of the connection

    def send(self, item: Any) -> None:
        """Give the worker one more item. Raises WorkerEnded if it is gone."""
        try:
            if self._work is not None:
                self.connection.send_bytes(self._work)
                self._work = None
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def results(self, deadline: float | None = None) -> Iterator[Any]:
        """Yield what `work` makes of the next item; if it is a generator, what it yields, and it goes on only as that is taken.

        Raises the exception of `work`, WorkerEnded if the process ends before, TimeoutError at `deadline` of the monotonic clock.
        """
        last = False
        while not last:
            try:
                ready = self.connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic()))
                last, result, error, trace = self.connection.recv() if ready else (False, [], TimeoutError(), "")
            except (EOFError, OSError):  # the end of the connection, before an answer or in the middle of one
                raise self._ended() from None
            if error is not None:
                if trace and not isinstance(error, InputError):
                    error.add_note(f"in process {self.process.pid}:\n{trace}")
                raise error
            yield from result

    def _ended(self) -> WorkerDied:
        code = self.wait(KILL_TIMEOUT)
        return WorkerDied(self, "closed its connection" if code is None else describe_exit_code(code))

    def kill(self) -> None:
        """End the worker at once, with all that it has started."""
        super().kill()
        self.connection.close()


class _Pool:
    """`count` places at which `work(item)` is done. Use as a context manager.

    `_begin(number, item)` has it done and returns what waits for its results.
    """

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self._work, self._count = work, count

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `work(item)` for each item, in order; at most two items a place are under way. To be taken to its end.

        Where `work` is a generator, what it yields is yielded one by one. An exception of `work` is raised here, in its place in
        the order.
        """
        pending: deque[Callable[[], Iterable[Any]]] = deque()
        for number, item in enumerate(items):
            if len(pending) == 2 * self._count:
                yield from pending.popleft()()
            pending.append(self._begin(number, item))
        while pending:
            yield from pending.popleft()()


class ProcessPool(_Pool):
    """As many processes that each run `work(item)`; both must pickle. A generator goes on only as what it yields is taken."""

    def __enter__(self) -> Self:
        environment = python_environment() | {"TOKENIZERS_PARALLELISM": "false"}  # one core each
        self._workers = [Worker(self._work, environment) for _ in range(self._count)]
        return self

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """As _Pool.map. Raises InputError, naming the worker, when one dies."""
        try:
            yield from super().map(items)
        except WorkerDied as error:
            number, pid = self._workers.index(error.worker) + 1, error.worker.process.pid
            hint = "; is there memory enough for so many --workers?" if "memory" in str(error) else ""
            raise InputError(f"worker {number} of {self._count} (process {pid}) {error}, before it was done{hint}") from None

    def _begin(self, number: int, item: Any) -> Callable[[], Iterable[Any]]:
        worker = self._workers[number % self._count]
        worker.send(item)
        return worker.results

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()  # by now it waits for work or its work is not wanted any more


class ThreadPool(_Pool):
    """As Workers, in threads of this process: nothing to start and nothing to send.

    For work that leaves the interpreter's lock alone most of the time, and whose results for an item fit into memory together.
    """

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(max(1, self._count))
        return self

    def _begin(self, number: int, item: Any) -> Callable[[], Iterable[Any]]:
        return self._pool.submit(self._results, item).result

    def _results(self, item: Any) -> list[Any]:
        made = self._work(item)
        return list(made) if isinstance(made, GeneratorType) else [made]

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def serve_worker() -> None:
    """What a worker runs: `argv` holds its parent's process id and the file descriptor of its connection."""
    set_up_child(int(sys.argv[1]))
    silence_libraries()
    connection, messages = Connection(int(sys.argv[2])), SimpleQueue()
    # A thread takes the next item off the connection while this one is worked on: otherwise parent and worker could both wait
    # to send.
    threading.Thread(target=_take, args=(connection, messages), daemon=True).start()
    if not (first := messages.get()):
        return
    work = pickle.loads(first)
    with contextlib.suppress(OSError):  # the parent is gone or going, and says why itself
        while message := messages.get():
            connection.send(_last_answer(connection, work, message))


def _last_answer(connection: Connection, work: Callable[[Any], Any], message: bytes) -> tuple:
    """Return whether the answer is the last for the item, the results in it, an exception, its traceback; send those before."""
    try:
        made = work(pickle.loads(message))
        if not isinstance(made, GeneratorType):
            return True, [made], None, ""
        for result in made:
            connection.send((False, [result], None, ""))  # which waits where the parent is not yet there
        return True, [], None, ""
    except Exception as error:
        return True, [], error, traceback.format_exc()


def _take(connection: Connection, messages: SimpleQueue) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            messages.put(connection.recv_bytes())
    messages.put(b"")
