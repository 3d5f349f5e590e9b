"""What `megaenc study run` shows: a row for each stage under way and one for the whole, or plain lines where nobody watches.

Whoever reads may leave, as `| head` or a terminal does: the study goes on, and its logs are files.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from megaenc.console import ProgressLine, Row, clock


class StudyProgress(ProgressLine):
    """How far a study of some stages is."""

    def __init__(self, stages: int) -> None:
        super().__init__("study", total=None, every=30.0, closing=False, rows=(0, 20))
        self.stages = stages

    def __exit__(self, *error: object) -> None:
        with _for_whoever_reads():
            super().__exit__(*error)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        with _for_whoever_reads():
            super().say(text)

    def show(
        self, running: Mapping[str, tuple[float, float, str, float]], finished: int, failed: int, left: float | None
    ) -> None:
        """Say how far those under way are (done, of how much, unit, seconds), and the whole; `left` in seconds."""
        share = finished + sum(done / total for done, total, *_ in running.values() if total)
        words = f"study: {finished:,} of {self.stages:,} stages" + (f", {failed:,} failed" if failed else "")
        tail = "" if left is None else f"about {clock(left)} left"
        rows = {None: Row(words, share, self.stages, tail)}
        for id, (done, total, unit, seconds) in running.items():
            rows[id] = Row(id, done, total, f"{amount(done, total, unit)}  {clock(seconds)}")
        parts = [f"{id} {amount(*row[:3])}" for id, row in running.items()]
        with _for_whoever_reads():
            self.update(share, description="  ".join(filter(None, [words, tail, *parts])), rows=rows)


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
