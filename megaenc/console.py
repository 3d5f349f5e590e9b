"""What the user sees while something runs: one quiet, live line, printed by rank 0 alone."""

import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

from megaenc.dist_env import get_rank

_NOISY_LOGGERS = (
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "torch",
    "megatron",
    "matplotlib",
    "datasets",
    "sentence_transformers",
)


def silence_libraries() -> None:
    """Silence third-party warnings and log lines that a user cannot act on; call it before importing torch or transformers.

    Warnings of this package stay. `python -W` and PYTHONWARNINGS turn the warnings back on, an environment variable that is
    already set keeps its value. One of the variables keeps transformers from
    replacing layers by kernels of the Hub; `megaenc.convert.hf_model` ignores attention kernels that a config names.
    """
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "USE_HUB_KERNELS": "NO",
    }.items():
        os.environ.setdefault(name, value)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("default", module=r"megaenc(\.|$)")


# Control characters of both sets, marks and overrides of the writing direction, separators of lines, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escape_unprintable(text: str, keep: str = "") -> str:
    """Return `text` with each character that a terminal acts on, other than those of `keep`, spelled as Python does: `\\x1b`.

    Names and messages from files are printed so: they can neither move the cursor nor show what they do not hold.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def truncate_text(text: str, most: int = 200) -> str:
    """Return `text`, its end replaced by three dots if it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def build_rich_console(**options: Any) -> Any:
    """Build a Console of rich on standard output that prints text as `escape_unprintable` returns it. `options` are those of Console."""
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *given: Any, **named: Any) -> Iterator[Segment]:
            for segment in super().render(*given, **named):
                text, style, control = segment
                yield segment if control else Segment(escape_unprintable(text, keep="\n\t"), style)

    return Printable(file=sys.stdout, **options)


def print_rank_0(text: str) -> None:
    """Print one line on standard output, from rank 0 only."""
    if not get_rank():
        text = escape_unprintable(text, keep="\n\t")
        print(text, flush=True)
        for listener in _LISTENERS:
            listener(text)


_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def capture_messages(listener: Callable[[str], None]) -> Iterator[None]:
    """Give `listener` each line that `print_rank_0` prints in this process meanwhile, lines of progress aside."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


class ProgressRow(NamedTuple):
    """A row of a live display: text, how much of what is done, and what stands behind the bar and before it."""

    text: str
    done: float
    total: float | None
    tail: str
    stage: str = ""


class ProgressLine:
    """One line that tells how far something is: description, bar, percent, fields, time left.

    On a terminal the line is live; elsewhere (a file, a pipe) it is a plain line at most each `every` seconds and one at the
    end, which an exception or `closing=False` leaves out. Other ranks than 0 stay silent. `total` may be None when it is not
    known; its unit is that of `done`. `rows`: on a terminal there are the rows that `update` is given instead, over the whole
    width, whose stages and bars are so wide (0: no stages).

        with ProgressLine("tokenising", total=size_in_bytes) as progress:
            progress.update(done, **{"MB/s": 12.5}, documents=1204)
    """

    def __init__(
        self,
        description: str,
        total: float | None,
        every: float = 10.0,
        *,
        closing: bool = True,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.description, self.total, self.every, self.closing = escape_unprintable(description), total, every, closing
        self._widths = rows
        self._done = 0.0
        self._fields: dict[str, Any] = {}
        self._first: tuple[float, float] | None = None  # time and `done` of the first update: a resumed run does not start at 0
        self._printed_at = time.monotonic()
        self._printed: tuple | None = None
        self._live: Any = None
        self._tasks: dict[Any, Any] = {}  # of rich, by the key of their row

    def __enter__(self) -> Self:
        if not get_rank() and sys.stdout.isatty():
            self._live = self._rich_progress()
            self._live.start()
            if self._widths is None:
                self._draw({None: ProgressRow(self.description, 0, self.total, "")})
        return self

    def _rich_progress(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        def text(field: str, **layout: Any) -> TextColumn:
            column = Column(no_wrap=True, overflow="ellipsis", **layout) if self._widths else None
            return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

        stage_width, bar_width = self._widths or (0, 24)
        columns = [text("description", ratio=3)]
        columns += [text("fields[stage]", min_width=stage_width)] if stage_width else []
        columns += [BarColumn(bar_width=bar_width)] if self._widths or self.total is not None else []
        columns += [text("fields[tail]", ratio=2)]
        return Progress(*columns, console=build_rich_console(), expand=bool(self._widths))

    def is_due(self, pause: float) -> bool:
        """Return whether it is time for an `update`: `pause` seconds after the last on a terminal, `every` after it elsewhere."""
        return time.monotonic() - self._printed_at >= (self.every if self._live is None else pause)

    def update(
        self, done: float, *, description: str | None = None, rows: Mapping[Any, ProgressRow] | None = None, **fields: Any
    ) -> None:
        """Say that `done` of `total` is done. `fields` (numbers or text) stay until given again, like `description`.

        `rows`, by a key that each keeps, are shown on a terminal instead.
        """
        now = time.monotonic()
        self._done = done
        self._fields.update(fields)
        self.description = self.description if description is None else escape_unprintable(description)
        if self._first is None:
            self._first = (now, done)
        if self._live is not None:
            self._printed_at = now
            self._draw(rows or {None: ProgressRow(self.description, done, self.total, self._tail(now))})
        elif not get_rank() and now - self._printed_at >= self.every:
            self._print(now)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print_rank_0(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.closing and kind is None and not get_rank() and self._printed != self._state():
            self._print(time.monotonic())

    def _draw(self, rows: Mapping[Any, ProgressRow]) -> None:
        for key in self._tasks.keys() - rows.keys():
            self._live.remove_task(self._tasks.pop(key))
        for key, row in rows.items():
            shown = {"description": row.text, "completed": row.done, "total": row.total, "tail": row.tail, "stage": row.stage}
            if key in self._tasks:
                self._live.update(self._tasks[key], **shown)
            else:
                self._tasks[key] = self._live.add_task(**shown)

    def _state(self) -> tuple:
        return (self.description, self._done, tuple(self._fields.items()))

    def _print(self, now: float) -> None:
        self._printed_at, self._printed = now, self._state()
        print(f"{self.description}  {self._tail(now)}".rstrip(), flush=True)

    def _tail(self, now: float) -> str:
        parts = [] if not self.total else [f"{100 * self._done / self.total:.0f} %"]
        parts += [f"{name} {format_number(value)}" for name, value in self._fields.items()]
        return escape_unprintable("  ".join([*parts, *self.time_left(now)]))

    def time_left(self, now: float) -> list[str]:
        """Return `0:42 left`, in a list, if that can be told."""
        if not self.total or self._first is None or not self._first[1] < self._done < self.total:
            return []
        rate = (self._done - self._first[1]) / max(now - self._first[0], 1e-9)
        return [f"{format_duration((self.total - self._done) / rate)} left"]


def format_number(value: Any) -> str:
    """A field for the eye: 1,204 documents, 3.1M tokens, loss 3.214."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value / 1e9:.2f}G" if abs(value) >= 1e9 else f"{value / 1e6:.2f}M"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """A time for the eye: 0:42, 7:05, 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
