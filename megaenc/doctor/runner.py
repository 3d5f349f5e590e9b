"""Child process for checks, replaced after a check that hangs, ends it or raises.

Checks import modules that may be broken, call drivers that may hang and run kernels that may lose a
device; the parent process does none of this.
"""

import os
import pkgutil
from collections.abc import Mapping
from typing import Any, Self

from megaenc.data.worker_pool import WorkerProcess, WorkerProcessDied
from megaenc.errors import InputError
from megaenc.processes import python_environment

_MAX_TAIL_BYTES = 4096  # bytes searched for the last line of output


class CheckRunner:
    """Context manager that calls functions in a child process, by `call`.

    The child is started when it is needed, keeps its state between calls and is killed at the end.
    Its output is not shown. Its environment is that of the command before megaenc changed it, the
    constructor's argument.
    """

    def __init__(self, environment: Mapping[str, str]):
        """Give the child the environment of the command before megaenc changed it."""
        self._environment = python_environment(environment)
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def call(self, function: str, *arguments: Any, seconds: float) -> tuple[Any, str]:
        """Call `function`, "module:name", in the child; return (its result, failure).

        `arguments` and result are pickled. The failure is text, "" if the call succeeds. It fails
        if it does not return within `seconds`, start of a new child included, raises an exception
        or ends its process; then the result is None and the child is killed, which loses its state.
        """
        if self._worker is None:
            self._output = os.memfd_create("megaenc-doctor")  # every disk may be full
            self._worker = WorkerProcess(_call_function, self._environment, self._output)
        printed_before = os.fstat(self._output).st_size
        answer = self._worker.submit((function, arguments))
        result = None
        failure = ""
        try:
            result, failure = answer.result(seconds)
        except TimeoutError:
            failure = (
                f"no answer in {seconds:.3g} s (see "
                f"--timeout){self._read_last_line(printed_before)}"
            )
        except WorkerProcessDied as error:
            failure = f"its process {error.end}{self._read_last_line(printed_before)}"
        if failure:
            self.kill()
        return result, failure

    def kill(self) -> None:
        """Kill the child, if any, and its children; the next call has a new one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
            os.close(self._output)

    def _read_last_line(self, start: int) -> str:
        """Return the last line that the child printed after byte `start`.

        It is the end of an error message, or "".
        """
        size = os.fstat(self._output).st_size
        start = max(start, size - _MAX_TAIL_BYTES)
        lines = (
            os.pread(self._output, size - start, start)
            .decode(errors="replace")
            .strip()
            .splitlines()
        )
        return f"; its last output: {lines[-1].strip()[:160]}" if lines else ""


def _call_function(function_and_arguments: tuple[str, tuple]) -> tuple[Any, str]:
    """Call a function in the child; return (result, failure) as `CheckRunner.call`."""
    function, arguments = function_and_arguments
    try:
        return pkgutil.resolve_name(function)(*arguments), ""
    except Exception as error:  # a broken machine may raise anything
        message = " ".join(str(error).split())[:300]
        if isinstance(error, InputError):
            return None, message
        if isinstance(error, ImportError) and error.name:
            message += f"; reinstall {error.name.partition('.')[0]}"
        return None, f"{type(error).__name__}: {message}"
