"""Pools of threads, or of child processes, that call a function on many items.

The child processes end with this process.
"""

import contextlib
import itertools
import os
import pickle
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from megaenc.console import silence_libraries
from megaenc.errors import InputError
from megaenc.processes import (
    KILL_TIMEOUT,
    ChildProcess,
    describe_exit_code,
    python_command,
    python_environment,
    set_up_child,
)


class WorkerProcessDied(InputError):
    """InputError that a worker process ended before its work was done.

    It takes the `process_id` and `end`, which tells how, as in `was killed by SIGSEGV`; only `end`
    is kept.
    """

    def __init__(self, process_id: int, end: str) -> None:
        super().__init__(f"worker process {process_id} {end}, before it was done")
        self.end = end


class WorkerProcess(ChildProcess):
    """Child process that calls `work(item)` for each submitted item, in order.

    `WorkerProcess(work, environment, output)` starts a new Python interpreter with these
    environment variables and no others; `output` is an open file for stdout and stderr, None for
    those of this process. `work`, items and results must pickle, and `work` must not be defined in
    `__main__`. `submit(item)` returns a Future of the result, of an exception that `work` raises,
    or of WorkerProcessDied. The process ends by `kill`, or else with this process.
    """

    # A fork would not survive threads of tokenizers or torch. A process of `multiprocessing`
    # imports the caller's `__main__` and so needs a guard there, and in its pools a process that is
    # killed while it sends a result blocks all others.

    def __init__(
        self,
        work: Callable[[Any], Any],
        environment: Mapping[str, str],
        output: IO | int | None = None,
    ) -> None:
        """Start the process.

        `work` must not be defined in `__main__`, because the process imports it by its module.

        Args:
            work: Function of one item, called in the process.
            environment: All environment variables of the process.
            output: File of stdout and stderr; None: those of this process.
        """
        pickled_work = pickle.dumps(work)
        self._connection, child_connection = Pipe()
        descriptor = child_connection.fileno()
        code = "from megaenc.data.worker_pool import serve_worker; serve_worker()"
        command = python_command("-c", code, str(os.getpid()), str(descriptor))
        super().__init__(command, environment, output, [descriptor])
        child_connection.close()  # so that the connection closes when the process ends
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._connection.send_bytes, pickled_work)

    def submit(self, item: Any) -> Future:
        """Return a future for `work(item)`; exceptions of the call are the future's.

        These include WorkerProcessDied. `submit` does not wait; items wait in a queue without
        limit. After `kill` it raises RuntimeError.
        """
        return self._thread.submit(self._call, item)

    def kill(self) -> None:
        """Kill the worker process and everything that it has started, and wait for it.

        The future of the present item ends with WorkerProcessDied, those of the queue are
        cancelled. It may be called only once.
        """
        super().kill()
        # Wakes the thread even if the process cannot be killed, as in a driver that hangs.
        with (
            socket.socket(fileno=os.dup(self._connection.fileno())) as connection,
            contextlib.suppress(OSError),
        ):
            connection.shutdown(socket.SHUT_RDWR)
        self._thread.shutdown(cancel_futures=True)
        self._connection.close()

    def _call(self, item: Any) -> Any:
        """Return the result of `work(item)`; runs in this worker's thread."""
        try:
            self._connection.send(item)
            result, error = self._connection.recv()
        except (EOFError, OSError):  # the connection closed before or within an answer
            code = self.wait(KILL_TIMEOUT)
            end = "closed its connection" if code is None else describe_exit_code(code)
            raise WorkerProcessDied(self.process.pid, end) from None
        if error is not None:
            raise error
        return result


def serve_worker() -> None:
    """Run the main loop of a worker process.

    It receives `work` and then items from the parent, and sends back the result or exception of
    each, until the connection closes. `sys.argv[1:]` is the parent's process id and the file
    descriptor of the connection.
    """
    set_up_child(int(sys.argv[1]))
    silence_libraries()
    connection = Connection(int(sys.argv[2]))
    # The parent is exiting and reports the reason itself.
    with contextlib.suppress(EOFError, OSError):
        work = pickle.loads(connection.recv_bytes())
        while True:
            connection.send(_process_item(work, connection.recv_bytes()))


def _process_item(work: Callable[[Any], Any], pickled_item: bytes) -> tuple[Any, Exception | None]:
    """Return (result of `work(item)`, None), or (None, exception).

    A note of the exception has its traceback.
    """
    try:
        return work(pickle.loads(pickled_item)), None
    except Exception as error:
        error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
        return None, error


@contextlib.contextmanager
def start_workers(
    work: Callable[[Any], Any],
    count: int,
    environment: Mapping[str, str],
    output: IO | int | None = None,
) -> Iterator[list[WorkerProcess]]:
    """Yield a list of `count` new worker processes, killed after the `with` block.

    The arguments are those of WorkerProcess.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(count):
            worker = WorkerProcess(work, environment, output)
            stack.callback(worker.kill)  # it is idle then, or its results are no longer needed
            workers.append(worker)
        yield workers


@contextlib.contextmanager
def start_pool(
    work: Callable[[Any], Any], count: int, *, threads: bool = False
) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Start `count` worker processes or threads that call `work` in the `with` block.

    Threads are for work that mostly releases the GIL. Functions and items for processes are
    restricted as in WorkerProcess. At the end of the block, processes are killed, while threads
    finish the items that they have begun.

    Yields:
        A function that takes an iterable of items and returns an iterator over `work(item)` in
        their order, which raises what `work` raises. At most two items per worker are in flight.

    Raises:
        WorkerProcessDied: From the iterator; a process ended before it was done.
    """
    with contextlib.ExitStack() as stack:
        if threads:
            executor = ThreadPoolExecutor(count)
            stack.callback(executor.shutdown, cancel_futures=True)
            submits = [partial(executor.submit, work)] * count
        else:
            # One core per worker.
            environment = python_environment() | {"TOKENIZERS_PARALLELISM": "false"}
            workers = stack.enter_context(start_workers(work, count, environment))
            submits = [worker.submit for worker in workers]
        yield partial(_map_in_order, submits)


def _map_in_order(
    submits: Sequence[Callable[[Any], Future]], items: Iterable[Any]
) -> Iterator[Any]:
    """Yield the results of `items`, submitted to the workers in turn.

    Two items are submitted to each at a time.
    """
    pending: deque[Future] = deque()
    for submit, item in zip(itertools.cycle(submits), items, strict=False):
        if len(pending) == 2 * len(submits):
            yield pending.popleft().result()
        pending.append(submit(item))
    while pending:
        yield pending.popleft().result()
