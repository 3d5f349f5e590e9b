"""What a stage has said, how each try at it went, and how long the rest will take: STUDY/logs/STAGE.log.

Tries are appended. Each begins with the line `==> TIME $ COMMAND` and ends with `<== TIME HOW`. One without an end was killed
with whoever started it, or is under way: then its lock is held.
"""

import contextlib
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megaenc import atomic_io
from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.json_files import read_regular_file
from megaenc.study.run.stage import StageRunner

_MAX_BYTES = 1 << 30  # of a log
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
FINISHED, STOPPED = "finished", "stopped"

_BEGIN, _END = re.compile(r"==> (\S+) \$ (.*)"), re.compile(r"<== (\S+) (.+)")
_TOLD = re.compile(r"step \d+ of \d+: .*; stopped by SIG[A-Z0-9]+, the same command goes on")  # as pretraining says it
_ERROR = re.compile(r"error: .+|without result: \D.+|[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*")
_FRAME = re.compile(r"\s|[-=|^~]+$|Traceback |Root Cause|Failures:|\[\d+\]:")  # of a traceback or of torchrun's own summary


@dataclass(frozen=True)
class Attempt:
    """One command of a stage, from its log. Times are in seconds since 1970."""

    start_time: float
    end_time: float | None
    outcome: str
    """finished, stopped, `exit code 1`, `killed by SIGKILL`; "" where there is no end"""
    message: str
    """the line that says best why it failed: the last error, otherwise the last line"""
    told: bool = False
    """whether it said that it was told to stop, and has saved: torchrun makes a 1 of every exit code"""

    @property
    def is_failed(self) -> bool:
        """Return whether it ended otherwise than well or as it was told to."""
        return bool(self.outcome) and self.outcome not in (FINISHED, STOPPED)


def log_path(study: Path, stage: str) -> Path:
    return study / "logs" / f"{stage}.log"


def lock_stage(study: Path, stage: str) -> contextlib.AbstractContextManager[bool]:
    """Try to have a stage to oneself (see `megaenc.atomic_io.try_lock`)."""
    return atomic_io.try_lock(study / ".locks" / stage)


def is_locked(study: Path, stage: str) -> bool:
    return atomic_io.is_locked(study / ".locks" / stage)


def log_start(log: Path, command: Sequence[str]) -> None:
    """Write that a try begins. Raises InputError if no file can be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        _append(log, "==>", f"$ {shlex.join(command)}")
    except OSError as error:
        raise InputError(f"{log}: cannot be written to: {error.strerror}") from None


def log_end(log: Path, how: str) -> None:
    """Write how a try ended."""
    with contextlib.suppress(OSError):  # a full disk: then there is no end
        _append(log, "<==", how)


def _append(log: Path, mark: str, text: str) -> None:
    """Add a line with the time, after an end for one that was cut off."""
    line = f"{mark} {datetime.now(UTC).strftime(_TIME_FORMAT)} {text}\n"
    with open(log, "ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read() == b"\n" else "\n" + line
        stream.write(line.encode("utf-8", "surrogateescape"))


def read_attempts(log: Path) -> list[Attempt]:
    """Return every try of a stage, in their order; none if there is no log."""
    try:
        lines = read_regular_file(log, _MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Attempt] = []
    began, said = None, []
    for line in [*lines, "==> end $ "]:
        begin, end = _BEGIN.fullmatch(line), _END.fullmatch(line)
        if not begin and (not end or began is None):
            said.append(line)
            continue
        if began is not None:
            ended, how = (_parse_time(end[1]), end[2]) if end else (None, "")
            told = any(_TOLD.fullmatch(text.strip()) for text in said)
            found.append(Attempt(began, ended, how, find_error_line(said), told))
        began, said = (_parse_time(begin[1]), []) if begin else (None, said)
    return found


def find_error_line(said: Sequence[str]) -> str:
    """Return the line of what a command has said that tells most of why it ended."""
    errors = [line.strip() for line in said if _ERROR.fullmatch(line.strip())]
    plain = [line.strip() for line in said if line.strip() and not _FRAME.match(line)]
    wrong = [line for line in errors if line.startswith("error: ")]
    return truncate_text((wrong or errors or plain or [""])[-1], 400)


def _parse_time(text: str) -> float:
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return time.time()


def total_seconds(tries: Iterable[Attempt]) -> float:
    """Return the seconds of those that have ended."""
    return sum(one.end_time - one.start_time for one in tries if one.end_time is not None)


class EtaEstimator:
    """Seconds of what is left of some stages, each after what it needs."""

    def __init__(self, stages: Iterable[StageRunner], study: Path) -> None:
        """Reads the logs of what is done."""
        self._nodes = {stage.id: stage for stage in stages}
        self._share: dict[str, float] = {}
        self._measured: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by kind: seconds, work
        for stage in self._nodes.values():
            self._share[stage.id] = float(stage.is_done())
            tried = read_attempts(log_path(study, stage.id)) if self._share[stage.id] else []
            killed = any(one.end_time is None for one in tried)  # how long that took nobody knows
            if not killed and (seconds := total_seconds(tried)):
                self.measured(stage, seconds)

    def measured(self, stage: StageRunner, seconds: float, share: float = 1.0) -> None:
        """Note that a stage is done, of which so much, from 0 to 1, took so long."""
        self._share[stage.id] = 1.0
        sums = self._measured[_stage_kind(stage)]
        sums[0] += seconds
        sums[1] += share * stage.work

    def under_way(self, stage: StageRunner, share: float) -> None:
        """Note that so much of a stage is done, from 0 to 1."""
        self._share[stage.id] = share

    def _left(self, stage: StageRunner) -> float | None:
        """Return seconds of one stage by what others of its kind took, otherwise the plan's; None where neither is known."""
        seconds, work = self._measured[_stage_kind(stage)]
        whole = seconds * stage.work / work if work else stage.planned_seconds
        return None if whole is None else whole * (1 - self._share[stage.id])

    def seconds(self, places: int) -> float | None:
        """Of all, `places` at a time: the sum of them, or the longest chain, whichever is more; None where one is not known."""
        left = [(stage.processes, self._left(stage)) for id, stage in self._nodes.items() if self._share[id] < 1]
        if any(seconds is None for _, seconds in left):
            return None
        return max([sum(processes * seconds for processes, seconds in left) / places, *self.chains().values()])

    def chains(self) -> dict[str, float]:
        """Return, by id, seconds from a stage's beginning to the end of the longest chain that needs it; unknown ones are 0."""
        found: dict[str, float] = {}
        behind: dict[str, float] = defaultdict(float)
        for id, stage in reversed(self._nodes.items()):
            found[id] = behind[id] + (self._left(stage) or 0.0)
            for need in stage.needs:
                behind[need] = max(behind[need], found[id])
        return found


def _stage_kind(stage: StageRunner) -> str:
    return stage.id.partition("/")[0]
