"""Child process for checks, which is replaced after a check that hangs, ends it or raises an exception.

Checks import modules that may be broken, call drivers that may hang and run kernels that may lose a device; the parent process
does none of this.
"""

import os
import pkgutil
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

from megaenc.console import silence_libraries
from megaenc.errors import InputError
from megaenc.processes import KILL_TIMEOUT, ChildProcess, describe_exit_code, python_command, python_environment, set_up_child

_MAX_TAIL_BYTES = 4096  # bytes searched for the last line of output


class CheckRunner:
    """Context manager that calls functions in a child process, started when it is needed and killed at the end."""

    def __init__(self, environment: dict[str, str]):
        self._environment = environment
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def call(self, function: str, *arguments: Any, seconds: float) -> tuple[Any, str]:
        """Call `function`, "module:name", in the child; return (its result, ""), or (None, the failure) and kill the child.

        It fails if it does not return within `seconds`, raises an exception or ends its process.
        """
        if self._child is None:
            self._start()
        printed_before = os.fstat(self._output).st_size
        result = None
        failure = ""
        try:
            self._connection.send((function, arguments))
            if self._connection.poll(seconds):
                result, failure = self._connection.recv()
            else:
                failure = f"no answer in {seconds:.3g} s (see --timeout){self._read_last_line(printed_before)}"
        except (EOFError, OSError):  # the process ended
            code = self._child.wait(KILL_TIMEOUT)
            end = "closed its connection" if code is None else describe_exit_code(code)
            failure = f"its process {end}{self._read_last_line(printed_before)}"
        if failure:
            self.kill()
        return result, failure

    def _start(self) -> None:
        """Start the child, which has the environment of the command before megaenc changed it."""
        self._connection, child_connection = Pipe()
        descriptor = child_connection.fileno()
        program = "from megaenc.doctor.runner import serve_calls; serve_calls()"
        command = python_command("-c", program, str(os.getpid()), str(descriptor))
        self._output = os.memfd_create("megaenc-doctor")  # every disk may be full
        self._child = ChildProcess(command, python_environment(self._environment), self._output, [descriptor])
        child_connection.close()  # so that the connection closes when the child ends

    def kill(self) -> None:
        """Kill the child and its children, so that the next call has a new one."""
        if self._child is not None:
            self._child.kill()
            self._child = None
            self._connection.close()
            os.close(self._output)

    def _read_last_line(self, start: int) -> str:
        """Return the last line that the child printed after byte `start`, as the end of an error message."""
        size = os.fstat(self._output).st_size
        start = max(start, size - _MAX_TAIL_BYTES)
        lines = os.pread(self._output, size - start, start).decode(errors="replace").strip().splitlines()
        return f"; its last output: {lines[-1].strip()[:160]}" if lines else ""


def serve_calls() -> None:
    """Run the main loop of the child: receive a function and its arguments, and send back what `CheckRunner.call` returns.

    `sys.argv` holds the parent's process id and the file descriptor of the connection.
    """
    set_up_child(int(sys.argv[1]))
    silence_libraries()
    connection = Connection(int(sys.argv[2]))
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            function, arguments = connection.recv()
            try:
                answer = pkgutil.resolve_name(function)(*arguments), ""
            except Exception as error:  # a broken machine may raise anything
                answer = None, _describe_exception(error)
            connection.send(answer)


def _describe_exception(error: Exception) -> str:
    """Return an exception as one line: class name, unless it is an InputError, message, and package to reinstall."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, InputError):
        return message
    if isinstance(error, ImportError) and error.name:
        message += f"; reinstall {error.name.partition('.')[0]}"
    return f"{type(error).__name__}: {message}"
