"""What a stage has said, and how each try at it went: STUDY/logs/STAGE.log, which tries are appended to.

A try begins with the line `==> TIME $ COMMAND` and ends with `<== TIME HOW`. One without an end was killed with whoever started
it, or is under way: then its lock is held.
"""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megaenc import files
from megaenc.errors import InputError
from megaenc.json_files import read_regular

_MOST_BYTES = 1 << 30  # of a log
FINISHED, STOPPED = "finished", "stopped"

_BEGIN, _END = re.compile(r"==> (\S+) \$ (.*)"), re.compile(r"<== (\S+) (.+)")
_TOLD = re.compile(r"step \d+ of \d+: .*; stopped by SIG[A-Z0-9]+, the same command goes on")  # as pretraining says it
_ERROR = re.compile(r"error: .+|without result: \D.+|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*")
_FRAME = re.compile(r"\s|[-=|^~]+$|Traceback |Root Cause|Failures:|\[\d+\]:")  # of a traceback or of torchrun's own summary


@dataclass(frozen=True)
class Try:
    """One command of a stage, from its log. Times are in seconds since 1970."""

    began: float
    ended: float | None
    how: str
    """finished, stopped, `exit code 1`, `killed by SIGKILL`; "" where there is no end"""
    said: str
    """the line that says best why it failed: the last error, otherwise the last line"""
    told: bool = False
    """whether it said that it was told to stop, and has saved: torchrun makes a 1 of every exit code"""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than well or as it was told to."""
        return bool(self.how) and self.how not in (FINISHED, STOPPED)


def log_of(study: Path, stage: str) -> Path:
    """The log of a stage."""
    return study / "logs" / f"{stage}.log"


def lock(study: Path, stage: str) -> contextlib.AbstractContextManager[bool]:
    """Try to have a stage to oneself (see `megaenc.files.locked`)."""
    return files.locked(study / ".locks" / stage)


def is_locked(study: Path, stage: str) -> bool:
    """Whether somebody is at a stage."""
    return files.is_locked(study / ".locks" / stage)


def begin(log: Path, command: Sequence[str]) -> None:
    """Write that a try begins. Raises InputError if no file can be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        _append(log, f"==> {_now()} $ {shlex.join(command)}\n")
    except OSError as error:
        raise InputError(f"{log}: cannot be written to: {error.strerror}") from None


def end(log: Path, how: str) -> None:
    """Write how a try ended."""
    with contextlib.suppress(OSError):  # a full disk: then there is no end
        _append(log, f"<== {_now()} {how}\n")


def _append(log: Path, line: str) -> None:
    """Add a line, after an end for one that was cut off."""
    with open(log, "ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read() == b"\n" else "\n" + line
        stream.write(line.encode("utf-8", "surrogateescape"))


def tries(log: Path) -> list[Try]:
    """Return every try of a stage, in their order; none if there is no log."""
    try:
        lines = read_regular(log, _MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Try] = []
    began, said = None, []
    for line in [*lines, "==> end $ "]:
        begin, end = _BEGIN.fullmatch(line), _END.fullmatch(line)
        if not begin and (not end or began is None):
            said.append(line)
            continue
        if began is not None:
            ended, how = (_seconds(end[1]), end[2]) if end else (None, "")
            told = any(_TOLD.fullmatch(text.strip()) for text in said)
            found.append(Try(began, ended, how, best_line(said), told))
        began, said = (_seconds(begin[1]), []) if begin else (None, said)
    return found


def best_line(said: Sequence[str]) -> str:
    """Of what a command has said, the line that tells most of why it ended."""
    errors = [line.strip() for line in said if _ERROR.fullmatch(line.strip())]
    plain = [line.strip() for line in said if line.strip() and not _FRAME.match(line)]
    wrong = [line for line in errors if line.startswith("error: ")]
    chosen = (wrong or errors or plain or [""])[-1]
    return chosen if len(chosen) <= 400 else chosen[:397] + "..."


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return time.time()
