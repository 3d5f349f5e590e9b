"""Helper processes: as many as asked for, results in the order of the work, and none that outlives or outwaits its parent."""

import contextlib
import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Queue
from types import GeneratorType
from typing import Any, Self

import megaenc
from megaenc.errors import InputError

_PR_SET_PDEATHSIG = 1
_MOST_PROCESSES, _MOST_PER_CORE = 64, 8


def usable_cores() -> int:
    """The processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def check_process_count(flag: str, count: int) -> None:
    """Raise InputError if `count` processes or threads, given by `flag`, are far more than the usable cores can run."""
    cores = usable_cores()
    most = max(_MOST_PROCESSES, _MOST_PER_CORE * cores)
    if count > most:
        raise InputError(f"{flag}: found {count:,}, expected at most {most:,} with {cores:,} usable cores; give a smaller number")


def highest_resident() -> float:
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
def environment_for_children(environment: Mapping[str, str]) -> Iterator[None]:
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


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def below(command: Sequence[str]) -> list[str]:
    """`command` as words that, started in this process's main thread, have the kernel kill it when this process ends.

    They are to be started in a `python_environment`.
    """
    return python_command("-c", "from megaenc.processes import become; become()", str(os.getpid()), *command)


def become() -> None:
    """What `below` starts: `argv` holds the parent's process id and the words of the command that takes this process over.

    SIGUSR2, with which a cluster says to every process of a job that its time is over, is left to the parent.
    """
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which stays so in what takes over
    os.execvp(sys.argv[2], sys.argv[2:])


def die_with_launcher() -> None:
    """Under torchrun, be killed when it dies: its workers lead their own sessions and would otherwise go on writing.

    A launcher that died before this call is noticed too, unless a Python program adopts its orphans.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
        if not _is_below_python():
            os._exit(1)


def _is_below_python() -> bool:
    """Whether a program above this process is Python, as torchrun is and the likes of init are not; True if it cannot be told."""
    try:
        own, process = os.readlink("/proc/self/exe"), os.getppid()
        while process:
            folder = Path("/proc", str(process))
            try:
                program = os.readlink(folder / "exe")
            except PermissionError:  # of another user, or one that lets nobody look
                program = (folder / "cmdline").read_text(errors="replace").partition("\0")[0]
            if program == own or os.path.basename(program).startswith("python"):
                return True
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # hidden, or just ended: then the kernel ends this process too
        return True
    return False


class Workers:
    """`count` processes that each run `work(item)`; both must pickle. Use as a context manager.

    They are fresh interpreters, not forks: threads of a tokenizer or of torch do not survive a fork, and nothing re-runs the
    caller's `__main__`.
    """

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        # The name must not be `__main__`'s: the helper imports the callable by its module.
        self._work, self._count = pickle.dumps(work), count
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        environment = python_environment() | {"TOKENIZERS_PARALLELISM": "false"}  # one core each
        for _ in range(self._count):
            here, there = Pipe()
            words = ("-c", "from megaenc.processes import serve; serve()", str(there.fileno()), str(os.getpid()))
            self._processes.append(
                subprocess.Popen(python_command(*words), pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL)
            )
            self._connections.append(here)
            there.close()  # so that the end of the process is the end of the connection
        with contextlib.suppress(BrokenPipeError):  # `map` says which worker is gone
            for connection in self._connections:
                connection.send_bytes(self._work)
        return self

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `work(item)` for each item, in order; at most two items a worker are under way. To be taken to its end.

        Where `work` is a generator, what it yields is yielded one by one; it goes on only as that is taken. An exception of
        `work` is raised here, in its place in the order. Raises InputError, naming the worker, when one dies.
        """
        pending: deque[int] = deque()
        for number, item in enumerate(items):
            if len(pending) == 2 * self._count:
                yield from self._receive(pending.popleft())
            worker = number % self._count
            try:
                self._connections[worker].send(item)
            except (BrokenPipeError, ConnectionResetError):
                raise self._death(worker) from None
            pending.append(worker)
        while pending:
            yield from self._receive(pending.popleft())

    def _receive(self, worker: int) -> Iterator[Any]:
        """What the worker makes of its next item."""
        while True:
            try:
                last, result, error, trace = self._connections[worker].recv()
            except (EOFError, OSError):  # the end of the connection, before an answer or in the middle of one
                raise self._death(worker) from None
            if error is not None:
                if not isinstance(error, InputError):
                    error.add_note(f"in worker {worker + 1}:\n{trace}")
                raise error
            yield from result
            if last:
                return

    def _death(self, worker: int) -> InputError:
        code = self._processes[worker].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "; is there memory enough for so many --workers?" if code == -signal.SIGKILL else ""
        return InputError(
            f"worker {worker + 1} of {self._count} (process {self._processes[worker].pid}) {how} before it was done{hint}"
        )

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()  # by now it waits for work or its work is not wanted any more
            process.wait()
        for connection in self._connections:
            connection.close()


class Threads:
    """As Workers, in threads of this process: nothing to start and nothing to send.

    For work that leaves the interpreter's lock alone most of the time, and whose results for an item fit into memory together.
    """

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self._work, self._count = work, count

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(max(1, self._count))
        return self

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """As Workers.map."""
        pending: deque[Future] = deque()
        for item in items:
            if len(pending) == 2 * self._count:
                yield from pending.popleft().result()
            pending.append(self._pool.submit(self._results, item))
        while pending:
            yield from pending.popleft().result()

    def _results(self, item: Any) -> list[Any]:
        made = self._work(item)
        return list(made) if isinstance(made, GeneratorType) else [made]

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def serve() -> None:
    """What a helper process runs: `argv` holds the file descriptor of its connection and its parent's process id."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    with contextlib.suppress(EOFError, OSError):  # the parent is gone or going, and says why itself
        _serve(connection)


def _serve(connection: Connection) -> None:
    work = pickle.loads(connection.recv_bytes())
    # A thread takes the next item off the connection while this one is worked on: otherwise parent and helper could both wait
    # to send.
    items: Queue = Queue()
    threading.Thread(target=_take, args=(connection, items), daemon=True).start()
    while (item := items.get()) is not None:
        # An answer: whether it is the last for the item, the results in it, an exception, its traceback.
        try:
            made = work(item)
            if isinstance(made, GeneratorType):
                for result in made:
                    connection.send((False, [result], None, ""))  # which waits where the parent is not yet there
                made = []
            else:
                made = [made]
            answer = (True, made, None, "")
        except Exception as error:
            answer = (True, [], error, traceback.format_exc())
        connection.send(answer)


def _take(connection: Connection, items: Queue) -> None:
    while True:
        try:
            items.put(connection.recv())
        except (EOFError, OSError):
            items.put(None)
            return
