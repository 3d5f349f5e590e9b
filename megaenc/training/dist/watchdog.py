"""A run that stands still ends, and leaves the Python stack of every thread of every rank behind."""

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
from megaenc.json_files import parse_json
from megaenc.dist_env import get_rank, get_world_size
from megaenc.training.skip_ranges import SkippedPacks

EXIT_HUNG = 70  # sysexits.h: EX_SOFTWARE
STACKS_DIR = "stacks"
_KEY = "megaenc/hang"
_LIBRARY = Path(threading.__file__).parent
_LONGEST = 1 << 16  # bytes of what a rank tells
_FIRST_SECONDS = 600.0  # what the first step may take at least: kernels are compiled, files read for the first time
_ANSWER_SECONDS = 10.0  # for ranks that can still answer to say where they stand; half a margin where that is less


def fallback_delay(limit: float) -> float:
    """Return the seconds after `limit` (seconds) at which slower ways to speak than the watchdog may speak."""
    return min(30.0, max(5.0, limit / 2))


def startup_timeout(limit: float) -> float:
    """Return the seconds of the first step, validation, save or load of a process, where later ones may take `limit`."""
    return max(3 * limit, _FIRST_SECONDS)


def process_group_timeout(minutes: float) -> timedelta:
    """Return how long collectives may wait: long enough for a watchdog of `minutes`, and its fallback, to be first."""
    return timedelta(seconds=startup_timeout(60 * minutes) + 2 * fallback_delay(60 * minutes))


class Watchdog:
    """A context that ends this process, with exit code HUNG, when `minutes` have passed since the last `beat`.

    Before, a thread writes all stacks to `folder`/rank_00003.txt (standard error without a folder), tells the other ranks to do
    the same, and waits until they have: a launcher ends all when the first has gone. One rank prints which rank stands where, in
    one line. Where no thread can run, because the one that hangs holds the interpreter's lock, `faulthandler` writes the
    stacks to standard error a margin later and ends the process with 1. For the main thread, and one process group in all.
    """

    def __init__(self, minutes: float, folder: Path | None) -> None:
        self._limit, self._folder = 60 * minutes, folder
        self._margin = fallback_delay(self._limit)
        self._poll = min(1.0, self._limit / 10)
        self._known: set[str] = set()
        self._ending = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # A connection of its own: the main thread may hang in a call to the store, and holds it then.
        self._store = _get_default_store().clone()

    def __enter__(self) -> Self:
        self.beat("start", 0)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        if self._ending:  # and another rank has gone already: what is left to say and write here is not to be cut off
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._thread.join()
        self._thread.join(self._margin)  # it may wait for a store that is gone
        faulthandler.cancel_dump_traceback_later()

    def beat(self, kind: str, step: int) -> None:
        """Say that what was done before is done, and what begins: `step`, `validation`, `save` or `load`, and of which step."""
        limit = self._limit if kind in self._known else startup_timeout(self._limit)
        self._known.add(kind)
        now = time.monotonic()
        self._now = (kind, step, now, now + limit)  # one assignment: the thread sees all of it or nothing
        faulthandler.dump_traceback_later(limit + self._margin, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        while not self._left.wait(self._poll):
            told = False
            with contextlib.suppress(RuntimeError):  # the store's process may be gone: the collectives will notice
                told = self._store.check([_KEY])
            if told or time.monotonic() > self._now[3]:
                self._terminate()

    def _terminate(self) -> None:
        """Write the stacks, exchange with the other ranks where each stands, say it, and end this process."""
        self._ending = True
        faulthandler.cancel_dump_traceback_later()
        at_last = threading.Timer(_ANSWER_SECONDS + 5 * self._margin, os._exit, (EXIT_HUNG,))  # if store or file system are silent too
        at_last.daemon = True
        at_last.start()
        kind, step, since, _ = self._now
        here = {"doing": format_activity(kind, step), "at": _main_thread_location(), "quiet": time.monotonic() - since, "stacks": self._write_stacks()}
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_KEY}/{get_rank()}", json.dumps(here))
            self._store.set(_KEY, "")
            found = self._collect_reports(min(_ANSWER_SECONDS, self._margin / 2))
            if self._store.add(f"{_KEY}/chosen", 1) == 1:
                print(_format_hang(found), file=sys.stderr, flush=True)
                self._store.set(f"{_KEY}/said", "")
            self._store.wait([f"{_KEY}/said"], timedelta(seconds=self._margin))
            self._collect_reports(2 * self._margin)  # who is silent holds the interpreter's lock: its own stacks come a margin later
        os._exit(EXIT_HUNG)

    def _write_stacks(self) -> str:
        """Write the stacks of this process and return where to: standard error, if the file system hangs itself."""
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  rank {get_rank()} of {get_world_size()}, process {os.getpid()} on "
        head += f"{socket.gethostname()}, {format_activity(*self._now[:2])}"
        written = []

        def write_file() -> None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                with open(self._folder / f"rank_{get_rank():05d}.txt", "a", encoding="utf-8") as file:  # of each attempt
                    print(head, file=file, flush=True)
                    faulthandler.dump_traceback(file)
                    print(file=file)
                written.append(str(self._folder))

        if self._folder:
            writer = threading.Thread(target=write_file, daemon=True)
            writer.start()
            writer.join(self._margin)
        if not written:
            print(head, file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__)
        return written[0] if written else "standard error"

    def _collect_reports(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return what each rank says of itself, as soon as all have; after `seconds`, of those that have."""
        deadline, found = time.monotonic() + seconds, {}
        while len(found) < get_world_size() and time.monotonic() <= deadline:
            for other in set(range(get_world_size())) - set(found):
                if self._store.check([f"{_KEY}/{other}"]):
                    found[other] = _parse_report(self._store.get(f"{_KEY}/{other}"))
            time.sleep(self._poll / 4)
        return found


def _parse_report(value: bytes) -> dict[str, Any]:
    """Return where a rank stands, out of the store, to which anybody who reaches its port can write: printable, or "unknown"."""
    told: Any = None
    with contextlib.suppress(ValueError):
        told = parse_json(value[:_LONGEST])
    said = {"doing": None, "at": None, "stacks": None, "quiet": None} | (told if isinstance(told, dict) else {})
    texts = {name: escape_unprintable(said[name]) if isinstance(said[name], str) else "unknown" for name in ("doing", "at", "stacks")}
    quiet = said["quiet"] if isinstance(said["quiet"], (int, float)) and 0 <= said["quiet"] < 1e9 else 0.0
    return {**texts, "quiet": float(quiet)}


def _format_hang(found: dict[int, dict[str, Any]]) -> str:
    """Name ranks by the place they stand at: the odd ones, who are likely the reason, first."""
    places: dict[str, list[int]] = {}
    for number, there in sorted(found.items()):
        places.setdefault(f"{there['at']}, {there['doing']}", []).append(number)
    parts = [f"{_format_ranks(numbers)} in {place}" for place, numbers in sorted(places.items(), key=lambda item: len(item[1]))]
    parts = parts[:4] + [f"others in {len(parts) - 4} more places"] * (len(parts) > 4)
    if silent := sorted(set(range(get_world_size())) - set(found)):
        parts.insert(0, f"{_format_ranks(silent)} silent (stacks follow on standard error, unless the process is gone)")
    quiet = max(there["quiet"] for there in found.values())
    where = ", ".join(sorted({there["stacks"] for there in found.values()}))
    time_text = f"{quiet / 60:.3g} minutes" if quiet >= 60 else f"{quiet:.0f} seconds"
    return f"error: no progress for {time_text}: {'; '.join(parts)}; stacks of all threads in {where}"


_JOINTS = {"step": "", "save": "save of ", "load": "load of ", "diagnosis": "diagnosis of ", "rewind": "rewind at "}
_JOINTS["validation"] = "validation after "


def format_activity(kind: str, step: int) -> str:
    """Return `step 5`, `save of step 5`, `validation after step 5`, `start`."""
    return f"{_JOINTS[kind]}step {step}" if kind in _JOINTS else kind


def _main_thread_location() -> str:
    """Return where the main thread stands, beneath Python's own library: `all_reduce (distributed_c10d.py:2810)`."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame.f_back and Path(frame.f_code.co_filename).parent == _LIBRARY:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _format_ranks(numbers: list[int]) -> str:
    """Return `rank 1`, `ranks 0, 2-191`: the end of a long list left out."""
    return f"rank{'s' if len(numbers) > 1 else ''} {SkippedPacks.from_numbers(numbers).format_short(', ')}"
