"""Logs of stages, STUDY/logs/STAGE.log: output and outcome of each attempt.

Attempts are appended. Each starts with the line `==> TIME $ COMMAND` and ends with `<== TIME
OUTCOME`. An attempt without an end was killed together with its parent, or is running: then its
lock is held.
"""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megaenc.atomic_io import is_locked, try_lock
from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.json_files import read_regular_file

_MAX_BYTES = 1 << 30  # of a log
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
FINISHED = "finished"
STOPPED = "stopped"

_BEGIN = re.compile(r"==> (\S+) \$ (.*)")
_END = re.compile(r"<== (\S+) (.+)")
_ERROR = re.compile(
    r"error: .+|without result: \D.+|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*"
)
# Lines of a traceback or of torchrun's own summary.
_FRAME = re.compile(r"\s|[-=|^~]+$|Traceback |Root Cause|Failures:|\[\d+\]:")


@dataclass(frozen=True)
class Attempt:
    """One execution of a stage's command, as recorded in its log.

    Times are in seconds since 1970. `outcome` is such as `finished`, `stopped`, `exit code 1` or,
    after a signal, `killed by SIGKILL`. If the command is running, or the study's run was killed
    with it, `end_time` is None and `outcome` "". `message` is the last error in the output,
    otherwise its last line; "" without output.
    """

    start_time: float
    end_time: float | None
    """None for an attempt that is running, or was killed with the run of the study"""
    outcome: str
    """finished, stopped, `exit code 1`, `killed by SIGKILL`; "" without an end"""
    message: str
    """line of the output that explains the outcome: the last error, otherwise the last line"""

    @property
    def is_failed(self) -> bool:
        """Return whether the outcome is neither finished nor stopped.

        An attempt without an end is not failed.
        """
        return bool(self.outcome) and self.outcome not in (FINISHED, STOPPED)


def log_path(study: Path, stage: str) -> Path:
    """Return the path of a stage's log, STUDY/logs/STAGE.log; `stage` is its id."""
    return study / "logs" / f"{stage}.log"


def lock_stage(study: Path, stage: str) -> contextlib.AbstractContextManager[bool]:
    """Return a context manager that tries to lock a stage without waiting.

    It yields True if it has got the lock, which is released at the end; False if another process
    has it.

    Args:
        study: Study directory.
        stage: Id of the stage.

    Raises:
        InputError: On entry, the lock's file cannot be created.
    """
    return try_lock(study / ".locks" / stage)


def is_stage_locked(study: Path, stage: str) -> bool:
    """Return whether a process holds the lock of a stage, as while it runs the stage.

    `stage` is its id.
    """
    return is_locked(study / ".locks" / stage)


def log_start(log: Path, command: Sequence[str]) -> None:
    """Append `==> TIME $ COMMAND` to the file `log`, creating it and its directory.

    TIME is in UTC.

    Args:
        command: Program and arguments, without quotes.

    Raises:
        InputError: The log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        _append(log, "==>", f"$ {shlex.join(command)}")
    except OSError as error:
        raise InputError(f"{log}: cannot be written to: {error.strerror}") from None


def log_end(log: Path, outcome: str) -> None:
    """Append `<== TIME OUTCOME` to the file `log`.

    An error of writing, such as a full disk, is ignored.

    Args:
        outcome: Text as in `Attempt.outcome`.
    """
    with contextlib.suppress(OSError):  # a full disk: then there is no end
        _append(log, "<==", outcome)


def exit_code_file(log: Path) -> Path:
    """Return the path to which the stage's command writes its exit code.

    It is `log` with .exit_code in place of .log.
    """
    return log.with_suffix(".exit_code")


def pop_exit_code(log: Path) -> int | None:
    """Return the exit code in the .exit_code file of `log`, and delete that file.

    It is None if there is no file or no integer in it.
    """
    file = exit_code_file(log)
    try:
        code = int(read_regular_file(file, _MAX_BYTES))
    except (OSError, ValueError):
        code = None
    with contextlib.suppress(OSError):
        file.unlink()
    return code


def _append(log: Path, mark: str, text: str) -> None:
    """Append a line with the time, after a line break if the last line is incomplete."""
    line = f"{mark} {datetime.now(UTC).strftime(_TIME_FORMAT)} {text}\n"
    with open(log, "ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read() == b"\n" else "\n" + line
        stream.write(line.encode("utf-8", "surrogateescape"))


def read_attempts(log: Path) -> list[Attempt]:
    """Return the Attempts of a log, the oldest first; empty if it cannot be read."""
    try:
        lines = read_regular_file(log, _MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    attempts: list[Attempt] = []
    start_time = None
    output = []
    for line in [*lines, "==> end $ "]:
        start = _BEGIN.fullmatch(line)
        end = _END.fullmatch(line)
        if not start and (not end or start_time is None):
            output.append(line)
            continue
        if start_time is not None:
            end_time = _parse_time(end[1]) if end else None
            outcome = end[2] if end else ""
            attempts.append(Attempt(start_time, end_time, outcome, find_error_line(output)))
        start_time = None
        if start:
            start_time = _parse_time(start[1])
            output = []
    return attempts


def find_error_line(output: Sequence[str]) -> str:
    """Return the line of a command's output that explains its failure.

    It is the last `error:` line, else the last other error, else the last line, cut to 400
    characters; "" if there is none.

    Args:
        output: Lines of the output.
    """
    errors = [line.strip() for line in output if _ERROR.fullmatch(line.strip())]
    other_lines = [line.strip() for line in output if line.strip() and not _FRAME.match(line)]
    input_errors = [line for line in errors if line.startswith("error: ")]
    return truncate_text((input_errors or errors or other_lines or [""])[-1], 400)


def _parse_time(text: str) -> float:
    """Return the seconds since 1970 of a time in a log; now if it is damaged."""
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return time.time()


def total_seconds(attempts: Iterable[Attempt]) -> float:
    """Return the sum of the durations, in seconds, of the attempts that have ended."""
    return sum(
        attempt.end_time - attempt.start_time
        for attempt in attempts
        if attempt.end_time is not None
    )
