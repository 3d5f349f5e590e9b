"""A process that carries probes out one by one, and is given up for a new one where a probe hangs, dies or finds a problem.

Probes import what may be broken, call drivers that may never answer and run kernels that may take a device with them; whoever
waits for them imports none of it.
"""

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from megaenc.doctor.result import Finding, Probe, ProbeAborted, ProbeContext, problem
from megaenc.errors import InputError
from megaenc.processes import Worker, WorkerEnded, python_environment

_LAST = 4096  # bytes in which its last words are looked for


class ProbeTimeout(Exception):
    """A probe has hung or has taken its process with it; the message says which, and `late` whether more time might help."""

    def __init__(self, why: str, late: bool = False):
        super().__init__(why)
        self.late = late


class ProbeRunner:
    """Carries out probes as `asked`, in a process below this one. Use as a context manager."""

    def __init__(self, asked: ProbeContext):
        self._asked = asked
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._give_up()

    def findings(self, probe: Probe) -> tuple[list[Finding | Probe], bool]:
        """What comes of `probe`, and whether it came to its end; where it did not, a finding says so."""
        try:
            found, ended = self.call(probe.function, *probe.arguments, seconds=probe.patience * self._asked.seconds)
        except ProbeTimeout as error:
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
        if self._worker is None:
            self._said = os.fdopen(os.memfd_create("megaenc-doctor"), "w+b")  # there may be no room on any disk
            self._worker = Worker(_outcome, python_environment(self._asked.environment), self._said)
        before = os.fstat(self._said.fileno()).st_size
        try:
            self._worker.send((function, self._asked, arguments))
            [outcome] = self._worker.results(time.monotonic() + seconds)
            return outcome
        except TimeoutError:
            why, late = f"no answer in {seconds:.3g} s", True
        except WorkerEnded as error:
            why, late = f"its process {error}", False
        last = self._last_words(before)
        self._give_up()
        raise ProbeTimeout(why + last, late)

    def _give_up(self) -> None:
        """Kill the process and all that it has started."""
        if self._worker is not None:
            self._worker.kill()
            self._said.close()
            self._worker = None

    def _last_words(self, before: int) -> str:
        """What the process has printed last, beyond the first bytes, if anything."""
        size = os.fstat(self._said.fileno()).st_size
        start = max(before, size - _LAST)
        lines = os.pread(self._said.fileno(), size - start, start).decode(errors="replace").strip().splitlines()
        return f"; it said last: {lines[-1].strip()[:160]}" if lines else ""


def _outcome(call: tuple[str, ProbeContext, Sequence[Any]]) -> tuple[Any, bool]:
    function, asked, arguments = call
    module, name = function.split(":")
    try:
        return getattr(importlib.import_module(module), name)(asked, *arguments), True
    except ProbeAborted as error:
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
