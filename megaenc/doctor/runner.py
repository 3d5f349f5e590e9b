"""Execution of probes in a subprocess, which is replaced after a probe that hangs, crashes or finds a problem.

Probes import modules that may be broken, call drivers that may hang and run kernels that may lose a device; the parent process
does none of this.
"""

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from megaenc.doctor.result import Finding, Probe, ProbeAborted, ProbeContext, problem
from megaenc.errors import InputError
from megaenc.processes import Worker, WorkerDied, python_environment

_MAX_TAIL_BYTES = 4096  # bytes searched for the last line of output


class ProbeFailure(Exception):
    """Error for a probe that hung or whose process died; `is_timeout` if a larger --timeout might help."""

    def __init__(self, reason: str, is_timeout: bool = False):
        super().__init__(reason)
        self.is_timeout = is_timeout


class ProbeRunner:
    """Context manager that runs probes in a subprocess, replaced after a hang, crash or problem, and killed at the end."""

    def __init__(self, context: ProbeContext):
        self._context = context
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def run(self, probe: Probe) -> tuple[list[Finding | Probe], bool]:
        """Run `probe`; return (findings and follow-up probes, whether it completed); a hang or crash is a problem."""
        try:
            results, is_complete = self.call(
                probe.function, *probe.arguments, seconds=probe.timeout_factor * self._context.timeout
            )
        except ProbeFailure as error:
            advice = f"{probe.advice}; --timeout gives a slow one longer" if error.is_timeout else probe.advice
            return [problem(probe.name, str(error), advice)], False
        if not is_complete:
            results = [replace(results[0], name=probe.name)]
        has_problem = any(isinstance(each, Finding) and each.level == "problem" for each in results)
        if not is_complete or (has_problem and probe.scope != "ranks"):  # cross-rank probes share a process group
            self._kill()  # the process may be damaged: a half-imported module, a lost device
        return results, is_complete

    def call(self, function: str, *arguments: Any, seconds: float) -> tuple[Any, bool]:
        """Call `function`, "module:name", in the subprocess; return (its result, True), or ([finding on its error], False).

        Raises ProbeFailure after `seconds`, or if the subprocess dies.
        """
        if self._worker is None:
            self._output = os.fdopen(os.memfd_create("megaenc-doctor"), "w+b")  # every disk may be full
            self._worker = Worker(_run_probe, python_environment(self._context.environment), self._output)
        before = os.fstat(self._output.fileno()).st_size
        try:
            self._worker.send((function, self._context, arguments))
            [outcome] = self._worker.results(time.monotonic() + seconds)
            return outcome
        except TimeoutError:
            reason, is_timeout = f"no answer in {seconds:.3g} s", True
        except WorkerDied as error:
            reason, is_timeout = f"its process {error}", False
        last_line = self._read_last_line(before)
        self._kill()
        raise ProbeFailure(reason + last_line, is_timeout)

    def _kill(self) -> None:
        """Kill the subprocess and its children."""
        if self._worker is not None:
            self._worker.kill()
            self._output.close()
            self._worker = None

    def _read_last_line(self, before: int) -> str:
        """Return the last line that the subprocess printed after byte `before`, as the end of an error message."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(before, size - _MAX_TAIL_BYTES)
        lines = os.pread(self._output.fileno(), size - start, start).decode(errors="replace").strip().splitlines()
        return f"; its last output: {lines[-1].strip()[:160]}" if lines else ""


def _run_probe(call: tuple[str, ProbeContext, Sequence[Any]]) -> tuple[Any, bool]:
    """Call a probe function in the subprocess; return its result and True, or the findings of an error and False."""
    function, context, arguments = call
    module, name = function.split(":")
    try:
        return getattr(importlib.import_module(module), name)(context, *arguments), True
    except ProbeAborted as error:
        return [error.finding], False
    except Exception as error:  # a broken machine may raise anything
        return [problem(name, format_exception(error), _exception_advice(error))], False


def format_exception(error: BaseException) -> str:
    """Return an exception as one line, its class name and message; an InputError without its class name."""
    message = " ".join(str(error).split())[:300]
    return message if isinstance(error, InputError) and message else f"{type(error).__name__}: {message}".rstrip(": ")


def _exception_advice(error: Exception) -> str:
    """Return advice for an exception that a probe raised."""
    if isinstance(error, ImportError):
        missing = (error.name or "").partition(".")[0]
        return f"reinstall {missing or 'the missing package'}; the installed versions are listed above"
    return "docs/doctor.md describes this probe; report it with this output"
