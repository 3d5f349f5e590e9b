"""What `megaenc study run` shows: a row for each stage under way and one for the whole, or plain lines where nobody watches.

Whoever reads may leave, as `| head` or a terminal does: the study goes on, and its logs are files.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from megaenc.console import clock, rich_console, say

_LOOK = 1.0  # seconds between two pictures of a terminal
_LINE = 30.0  # and between two plain lines


class Screen:
    """How far a study of some stages is."""

    def __init__(self, stages: int, every: float = _LINE) -> None:
        self.stages, self.every = stages, every
        self._live = None
        self._rows: dict[str, int] = {}
        self._shown = 0.0 if sys.stdout.isatty() else time.monotonic()

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            self._live = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[tail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
                console=rich_console(),
                expand=True,
            )
            self._whole = self._live.add_task("study", total=self.stages, tail="")
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            with _for_whoever_reads():
                self._live.stop()

    def due(self) -> bool:
        """Whether it is time for `show`."""
        return time.monotonic() - self._shown >= (_LOOK if self._live is not None else self.every)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        with _for_whoever_reads():
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                say(text)

    def show(
        self, running: Mapping[str, tuple[float, float, str, float]], finished: int, failed: int, left: float | None
    ) -> None:
        """Say how far those under way are (done, of how much, unit, seconds), and the whole; `left` in seconds."""
        self._shown = time.monotonic()
        share = finished + sum(done / total for done, total, *_ in running.values() if total)
        words = f"study: {finished:,} of {self.stages:,} stages" + (f", {failed:,} failed" if failed else "")
        tail = "" if left is None else f"about {clock(left)} left"
        if self._live is None:
            parts = [f"{id} {amount(*row[:3])}" for id, row in running.items()]
            self.say("  ".join(filter(None, [words, tail, *parts])))
            return
        with _for_whoever_reads():
            self._draw(running, words, tail, share)

    def _draw(self, running: Mapping[str, tuple[float, float, str, float]], words: str, tail: str, share: float) -> None:
        self._live.update(self._whole, description=words, completed=share, tail=tail)
        for id in [id for id in self._rows if id not in running]:
            self._live.remove_task(self._rows.pop(id))
        for id, (done, total, unit, seconds) in running.items():
            if id not in self._rows:
                self._rows[id] = self._live.add_task(id, total=total, tail="")
            self._live.update(self._rows[id], completed=done, total=total, tail=f"{amount(done, total, unit)}  {clock(seconds)}")


@contextlib.contextmanager
def _for_whoever_reads() -> Iterator[None]:
    """Nobody does any more: what is still said goes nowhere."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def amount(done: float, total: float, unit: str) -> str:
    """`120 of 300 steps`."""
    return f"{done:,.0f} of {total:,.0f} {unit}"
