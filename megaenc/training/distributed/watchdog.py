"""The watchdog that ends a hanging run and writes stack traces of all threads.

Each rank writes its own.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch.distributed.distributed_c10d import _get_default_store

from megaenc.console import escape_unprintable
from megaenc.dist_env import get_rank, get_world_size, store_poll_interval
from megaenc.json_files import parse_json
from megaenc.training.callbacks.base import Callback
from megaenc.training.skip_ranges import SkippedPacks

EXIT_HUNG = 70  # sysexits.h: EX_SOFTWARE
_KEY = "megaenc/hang"
_LIBRARY = Path(threading.__file__).parent
_MAX_REPORT_BYTES = 1 << 16
_MAX_PLACES = 4  # in the line about a hang, and stacks on standard error
_MIN_STARTUP_SECONDS = 600.0  # the first step compiles kernels and reads files for the first time
# To wait for the reports of other ranks; half of `fallback_delay` if that is less.
_REPORT_SECONDS = 10.0


def fallback_delay(limit: float) -> float:
    """Return the seconds after `limit` at which `faulthandler` ends a hanging process.

    It does so if the watchdog's thread cannot run.

    Args:
        limit: Time limit of the watchdog in seconds.

    Returns:
        Half of `limit`, but from 5 to 30.
    """
    return min(30.0, max(5.0, limit / 2))


def startup_timeout(limit: float) -> float:
    """Return the seconds allowed for the first step, validation, save or load.

    Args:
        limit: Seconds allowed for later ones.

    Returns:
        Three times `limit`, at least 600.
    """
    return max(3 * limit, _MIN_STARTUP_SECONDS)


def process_group_timeout(minutes: float) -> timedelta:
    """Return the timeout of collectives under a watchdog of `minutes`.

    It is longer than the watchdog takes, even at startup, to report a hang and exit.
    """
    return timedelta(seconds=startup_timeout(60 * minutes) + 2 * fallback_delay(60 * minutes))


class Watchdog:
    """Context that ends the run `minutes` after the last `beat`, with stack traces.

    Each rank enters one, in its main thread, when the process group exists; this is the first beat.
    The stacks of each rank go to `directory`/rank_00003.txt, created or appended to; without a
    directory (None) those of one rank at each position (line of code and activity) go to standard
    error. There one rank also prints a line with each rank's position. The exit code is 70. A
    thread makes the other ranks do the same and waits for them, because a launcher kills all ranks
    when the first exits. If the hanging thread holds the GIL, `faulthandler` writes the stacks to
    standard error `fallback_delay` later and exits with code 1.
    """

    def __init__(self, minutes: float, directory: Path | None) -> None:
        self._limit = 60 * minutes
        self._directory = directory
        self._margin = fallback_delay(self._limit)
        self._poll = store_poll_interval(min(1.0, self._limit / 10))
        self._earlier_kinds: set[str] = set()
        self._ending = False
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # A separate connection, because the main thread may hang in a call to the store.
        self._store = _get_default_store().clone()

    def __enter__(self) -> Self:
        self.beat("start", 0)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_left.set()
        if self._ending:  # finish the report, although a launcher may already be killing the ranks
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._thread.join()
        self._thread.join(self._margin)  # with a limit, as the store may be gone
        faulthandler.cancel_dump_traceback_later()

    def beat(self, kind: str, step: int) -> None:
        """Restart the time limit, as an activity begins.

        Only call it inside the context, whose end also ends the time limit.

        Args:
            kind: Kind of activity, any text such as "save"; the first of a kind gets the
                `startup_timeout`.
            step: Step of the activity, for messages.
        """
        limit = self._limit if kind in self._earlier_kinds else startup_timeout(self._limit)
        self._earlier_kinds.add(kind)
        now = time.monotonic()
        self._activity = (kind, step, now, now + limit)  # one assignment, atomic for the thread
        faulthandler.dump_traceback_later(limit + self._margin, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        """Poll for a timeout of this or another rank until the context ends."""
        while not self._has_left.wait(self._poll):
            has_peer_timed_out = False
            # If the store's process is gone, collectives fail.
            with contextlib.suppress(RuntimeError):
                has_peer_timed_out = self._store.check([_KEY])
            if has_peer_timed_out or time.monotonic() > self._activity[3]:
                self._terminate()

    def _terminate(self) -> None:
        """Write and exchange reports about a hang, and end this process."""
        self._ending = True
        faulthandler.cancel_dump_traceback_later()
        seconds = _REPORT_SECONDS + 5 * self._margin
        # Store or file system may hang, too.
        force_exit = threading.Timer(seconds, os._exit, (EXIT_HUNG,))
        force_exit.daemon = True
        force_exit.start()
        kind, step, since, _ = self._activity
        activity = format_activity(kind, step)
        head = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}  rank {get_rank()} of {get_world_size()}, "
            f"process {os.getpid()} on {socket.gethostname()}, {activity}"
        )
        directory = self._write_stacks(head)
        report = {
            "doing": activity,
            "at": _main_thread_location(),
            "quiet": time.monotonic() - since,
        }
        is_reporter = False
        with contextlib.suppress(RuntimeError):
            self._store.set(
                f"{_KEY}/{get_rank()}",
                json.dumps(report | {"stacks": directory or "standard error"}),
            )
            self._store.set(_KEY, "")
            # One rank reads the others' reports.
            is_reporter = self._store.add(f"{_KEY}/reports", 1) == 1
            if is_reporter:
                self._await_reports(min(_REPORT_SECONDS, self._margin / 2))
                reports = {}
                for rank in range(get_world_size()):
                    if self._store.check([f"{_KEY}/{rank}"]):
                        reports[rank] = _parse_report(self._store.get(f"{_KEY}/{rank}"))
                print(_format_hang(reports), file=sys.stderr, flush=True)
                self._store.set(
                    f"{_KEY}/examples",
                    json.dumps([ranks[0] for _, ranks in _group_by_place(reports)[:_MAX_PLACES]]),
                )
        if not directory:
            self._print_stacks_if_example(head)
        with contextlib.suppress(RuntimeError):
            if is_reporter:
                # Silent ranks get time for the fallback's stack traces.
                self._await_reports(2 * self._margin)
                self._store.set(f"{_KEY}/end", "")
            self._store.wait([f"{_KEY}/end"], timedelta(seconds=4 * self._margin))
        os._exit(EXIT_HUNG)

    def _print_stacks_if_example(self, head: str) -> None:
        """Print this rank's stack traces if it stands for those at its position.

        They go to standard error, below `head`.
        """
        examples = [get_rank()]  # if nobody says so in time
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.wait([f"{_KEY}/examples"], timedelta(seconds=2 * self._margin))
            parsed = parse_json(self._store.get(f"{_KEY}/examples")[:_MAX_REPORT_BYTES])
            examples = parsed if isinstance(parsed, list) else examples
        if get_rank() in examples:
            # In one write, as the other examples print at the same time and `faulthandler` writes
            # word by word. Every disk may be full.
            with open(
                os.memfd_create("megaenc-stacks"), "w+", encoding="utf-8", errors="replace"
            ) as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                print(f"{head}\n{file.read()}", file=sys.__stderr__, end="", flush=True)

    def _write_stacks(self, head: str) -> str:
        """Write the stack traces of this process below `head`; return the directory.

        The directory is an empty text if there is none or if writing hangs.
        """
        written_to = []

        def write_file() -> None:
            with contextlib.suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True)
                # Each attempt appends an entry.
                with open(
                    self._directory / f"rank_{get_rank():05d}.txt", "a", encoding="utf-8"
                ) as file:
                    print(head, file=file, flush=True)
                    faulthandler.dump_traceback(file)
                    print(file=file)
                written_to.append(str(self._directory))

        if self._directory:
            writer = threading.Thread(target=write_file, daemon=True)
            writer.start()
            writer.join(self._margin)
        return written_to[0] if written_to else ""

    def _await_reports(self, seconds: float) -> None:
        """Wait until all ranks have sent a report, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (
            self._store.add(f"{_KEY}/reports", 0) < get_world_size()
            and time.monotonic() <= deadline
        ):
            time.sleep(self._poll / 4)


def _parse_report(value: bytes) -> dict[str, Any]:
    """Return the report of a rank in `value`, with printable texts.

    Invalid fields are "unknown", as anybody can write to the store.
    """
    parsed: Any = None
    with contextlib.suppress(ValueError):
        parsed = parse_json(value[:_MAX_REPORT_BYTES])
    fields = parsed if isinstance(parsed, dict) else {}
    texts = {name: fields.get(name) for name in ("doing", "at", "stacks")}
    texts = {
        name: escape_unprintable(text) if isinstance(text, str) else "unknown"
        for name, text in texts.items()
    }
    quiet = fields.get("quiet")
    return {
        **texts,
        "quiet": float(quiet) if isinstance(quiet, (int, float)) and 0 <= quiet < 1e9 else 0.0,
    }


def _group_by_place(reports: dict[int, dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Return the ranks at each position, the rarest position first.

    The rarest is likely the cause.
    """
    places: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        places.setdefault(f"{report['at']}, {report['doing']}", []).append(rank)
    return sorted(places.items(), key=lambda item: len(item[1]))


def _format_hang(reports: dict[int, dict[str, Any]]) -> str:
    """Return the line that names the ranks at each position, the rarest first."""
    places = _group_by_place(reports)
    parts = [f"{_format_ranks(ranks)} in {place}" for place, ranks in places[:_MAX_PLACES]]
    parts += [f"others in {len(places) - _MAX_PLACES} more places"] * (len(places) > _MAX_PLACES)
    if silent := sorted(set(range(get_world_size())) - set(reports)):
        parts.insert(
            0,
            f"{_format_ranks(silent)} silent (stacks follow on standard error, unless the process "
            "is gone)",
        )
    quiet = max(report["quiet"] for report in reports.values())
    directories = ", ".join(sorted({report["stacks"] for report in reports.values()}))
    time_text = f"{quiet / 60:.3g} minutes" if quiet >= 60 else f"{quiet:.0f} seconds"
    return (
        f"error: no progress for {time_text}: {'; '.join(parts)}; stacks of all threads in "
        f"{directories}"
    )


_ACTIVITY_PREFIXES = {
    "step": "",
    "save": "save of ",
    "load": "load of ",
    "diagnosis": "diagnosis of ",
    "rewind": "rewind at ",
    "validation": "validation after ",
}


def format_activity(kind: str, step: int) -> str:
    """Return an activity as text such as `save of step 5`, `step 5` or `start`.

    Args:
        kind: Kind of `Watchdog.beat`. Only step, save, load, diagnosis, rewind and validation have
            a step; any other kind, such as start, is returned as it is.
    """
    return f"{_ACTIVITY_PREFIXES[kind]}step {step}" if kind in _ACTIVITY_PREFIXES else kind


def _main_thread_location() -> str:
    """Return the position of the main thread outside the standard library.

    It is text such as `all_reduce (distributed_c10d.py:2810)`.
    """
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame.f_back and Path(frame.f_code.co_filename).parent == _LIBRARY:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _format_ranks(ranks: list[int]) -> str:
    """Return text such as `rank 1` or `ranks 0, 2-191`, long lists shortened."""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {SkippedPacks.from_indices(ranks).format_short(', ')}"
    )


class ProgressBeats(Callback):
    """Callback that tells the watchdog what the run is doing.

    It beats before each step, validation and save. The trainer adds it to every run.
    """

    def before_step(self, step: int) -> None:
        self.trainer.watchdog.beat("step", step)

    def before_validation(self, step: int) -> None:
        self.trainer.watchdog.beat("validation", step)

    def before_save(self, step: int) -> None:
        self.trainer.watchdog.beat("save", step)
