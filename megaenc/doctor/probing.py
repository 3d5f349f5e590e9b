"""A process that carries probes out one by one, and is given up for a new one where a probe hangs, dies or finds a problem.

Probes import what may be broken, call drivers that may never answer and run kernels that may take a device with them; whoever
waits for them imports none of it.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

from megaenc.doctor.findings import Asked, Broken, Finding, Probe, problem
from megaenc.errors import InputError
from megaenc.processes import die_with_parent, python_command, python_environment

_BYE = 5.0  # seconds to end in
_LAST = 4096  # bytes in which its last words are looked for


class NoAnswer(Exception):
    """A probe has hung or has taken its process with it; the message says which, and `late` whether more time might help."""

    def __init__(self, why: str, late: bool = False):
        super().__init__(why)
        self.late = late


class Prober:
    """Carries out probes as `asked`, in a process below this one. Use as a context manager."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._give_up()

    def findings(self, probe: Probe) -> tuple[list[Finding | Probe], bool]:
        """What comes of `probe`, and whether it came to its end; where it did not, a finding says so."""
        try:
            found, ended = self.call(probe.function, *probe.arguments, seconds=probe.patience * self._asked.seconds)
        except NoAnswer as error:
            advice = f"{probe.advice}; --timeout gives a slow one longer" if error.late else probe.advice
            return [problem(probe.name, str(error), advice)], False
        if not ended:
            found = [replace(found[0], what=probe.name)]
        wrong = any(isinstance(each, Finding) and each.level == "problem" for each in found)
        if not ended or (wrong and probe.where != "ranks"):  # there the others go on with this process
            self._give_up()  # which may be the worse for it: a module half imported, a device that is lost to it
        return found, ended

    def call(self, function: str, *arguments: Any, seconds: float) -> tuple[Any, bool]:
        """What `function`, "module:name", returns for Asked and `arguments`, and True; for an error a finding of it, and False.

        NoAnswer after `seconds`.
        """
        if self._process is None:
            self._begin()
        try:
            self._before = os.fstat(self._said.fileno()).st_size
            self._connection.send((function, self._asked, arguments))
            if not self._connection.poll(seconds):
                last = self._last_words()
                self._give_up()
                raise NoAnswer(f"no answer in {seconds:.3g} s{last}", late=True)
            return self._connection.recv()
        except (EOFError, OSError):
            raise NoAnswer(self._death()) from None

    def _begin(self) -> None:
        self._connection, there = Pipe()
        self._said = os.fdopen(os.memfd_create("megaenc-doctor"), "w+b")  # there may be no room on any disk
        self._process = subprocess.Popen(
            python_command("-c", f"from {__name__} import serve; serve()", str(there.fileno()), str(os.getpid())),
            pass_fds=[there.fileno()],
            env=python_environment(self._asked.environment),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
        )
        there.close()  # so that the end of the process is the end of the connection

    def _give_up(self) -> None:
        """Kill the process and all that it has started; one that hangs in a driver is not waited for for ever."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_BYE)
        self._connection.close()
        self._said.close()
        self._process = None

    def _death(self) -> str:
        """How the process has ended, with the last that it said."""
        try:
            code = self._process.wait(_BYE)
            how = f"killed its process: {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        last = self._last_words()
        self._give_up()
        return how + last

    def _last_words(self) -> str:
        """What the process has printed last since it was called, if anything."""
        size = os.fstat(self._said.fileno()).st_size
        start = max(self._before, size - _LAST)
        lines = os.pread(self._said.fileno(), size - start, start).decode(errors="replace").strip().splitlines()
        return f"; it said last: {lines[-1].strip()[:160]}" if lines else ""


def serve() -> None:
    """What the process runs: `argv` holds the file descriptor of its connection and its parent's process id."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent)
    from megaenc.console import quiet

    quiet()
    with contextlib.suppress(EOFError, OSError):  # the parent has seen enough
        while True:
            function, asked, arguments = connection.recv()
            connection.send(_outcome(function, asked, arguments))


def _outcome(function: str, asked: Asked, arguments: Sequence[Any]) -> tuple[Any, bool]:
    module, name = function.split(":")
    try:
        return getattr(importlib.import_module(module), name)(asked, *arguments), True
    except Broken as error:
        return [error.finding], False
    except Exception as error:  # whatever a broken machine may raise
        return [problem(name, complaint(error), _advice(error))], False


def complaint(error: BaseException) -> str:
    """An exception in one line."""
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, InputError) and said else f"{type(error).__name__}: {said}".rstrip(": ")


def _advice(error: Exception) -> str:
    if isinstance(error, ImportError):
        missing = (error.name or "").partition(".")[0]
        return f"install {missing or 'what is missing'} anew; the versions above say what is there"
    return "docs/doctor.md says what this probe does; report it with this output"
