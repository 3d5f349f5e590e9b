"""Console output of rank 0: messages, live progress lines, and number formatting."""

import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

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
    """Silence warnings, logs and progress bars of libraries.

    Sets environment variables, log levels and filters. Call it before importing torch or
    transformers. Warnings of this package stay. `python -W` and PYTHONWARNINGS turn the warnings
    back on; environment variables that are set keep their values. USE_HUB_KERNELS keeps
    transformers from replacing layers by kernels of the Hub (`megaenc.hf.model` ignores attention
    kernels that a config names).
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


@contextmanager
def silenced_libraries() -> Iterator[None]:
    """Silence libraries as `silence_libraries` does, for the `with` block.

    Log levels and warning filters are restored after it; environment variables stay.
    """
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    with warnings.catch_warnings():
        silence_libraries()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


# C0 and C1 control characters, bidirectional marks and overrides, line separators, lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""Return `text` with control and bidirectional characters as Python escapes.

    They become escapes such as `\x1b`, newlines and lone surrogates too; characters in `keep` and
    backslashes stay. Text from files is printed this way, so that it cannot move the cursor or fake
    output.
    """
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text
    )


def truncate_text(text: str, max_length: int = 200) -> str:
    """Return `text`, cut to `max_length` characters, of which the last are then `...`.

    `max_length` must be 3 or more.
    """
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def build_rich_console(**options: Any) -> Any:
    """Return a new rich console on standard output, which escapes control characters.

    Newlines and tabs stay.

    Args:
        options: Options of `rich.console.Console` other than `file`.
    """
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                text, style, control = segment
                yield segment if control else Segment(escape_unprintable(text, keep="\n\t"), style)

    return EscapingConsole(file=sys.stdout, **options)


def print_rank_0(text: str) -> None:
    """Print `text` as a line on rank 0; other ranks do nothing.

    RANK in the environment decides, so that no process group is needed. Control characters other
    than newline and tab are escaped. Listeners of `capture_messages` get the escaped text, on rank
    0 too.
    """
    if not get_rank():
        text = escape_unprintable(text, keep="\n\t")
        print(text, flush=True)
        for listener in _LISTENERS:
            listener(text)


_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def capture_messages(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` in the `with` block with each text that `print_rank_0` prints.

    The text is printed too. Progress lines, and texts above a live one, are not passed on. Other
    ranks than 0 print nothing. Blocks can be nested; errors of `listener` pass to the code that
    prints.
    """
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def discard_output(stream: TextIO | None = None) -> None:
    """Redirect `stream`, by default standard output, to /dev/null.

    Call it after writing has failed; otherwise Python would fail to flush the output at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextmanager
def _ignore_closed_output() -> Iterator[None]:
    """Discard standard output if writing to it fails inside."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            discard_output()


_NOTEBOOK_INTERVAL = 0.5
"""Seconds between two updates of a notebook's line."""


class ProgressRow(NamedTuple):
    """Row of `ProgressLine.update`: `text`, `done`, `total`, `tail` and `stage`.

    It is a named tuple in this order, with no stage by default, and displays text, stage, a bar for
    `done` of `total`, in any unit, and the tail behind the bar. A `total` of None is unknown.
    """

    text: str
    done: float
    total: float | None
    tail: str
    stage: str = ""


class ProgressLine:
    """Context manager of rank 0's progress line, live on a terminal or in a notebook.

    The line has `description`, bar (on a terminal), percentage, fields and time left; other ranks
    show nothing. In a file or pipe it is a plain line at most every `interval` seconds (10 by
    default), and one at the end unless an exception occurred.

    Args:
        total: In the unit of `done` of `update`; None: unknown.
        closing: False: nothing stays at the end, neither the last line nor a live one.
        row_widths: Widths of stage (0: none) and bar in characters. A terminal then shows the rows
            given to `update` over its full width instead of the line.
        outlives_reader: Go on if the reader leaves (`| head`, a closed terminal); else OSError.
    """

    def __init__(
        self,
        description: str,
        total: float | None,
        interval: float = 10.0,
        *,
        closing: bool = True,
        row_widths: tuple[int, int] | None = None,
        outlives_reader: bool = False,
    ) -> None:
        self.description = escape_unprintable(description)
        self.total = total
        self.interval = interval
        self.closing = closing
        self._widths = row_widths
        self._guard_output = _ignore_closed_output if outlives_reader else nullcontext
        self._done = 0.0
        self._fields: dict[str, Any] = {}
        # Time and `done` of the first update: a resumed run does not start at 0.
        self._first: tuple[float, float] | None = None
        self._print_time = time.monotonic()
        self._printed_state: tuple | None = None
        self._live: Any = None
        self._output_area: Any = None  # of a notebook, which shows the last line printed to it
        self._tasks: dict[Any, Any] = {}  # rich's task ids by row key

    def __enter__(self) -> Self:
        if get_rank():
            return self
        if type(sys.stdout).__module__ == "ipykernel.iostream":
            from IPython.display import display

            self.interval = _NOTEBOOK_INTERVAL
            self._output_area = display({"text/plain": ""}, raw=True, display_id=True)
        elif sys.stdout.isatty():
            self._live = self._build_rich_progress()
            self._live.start()
            if self._widths is None:
                self._draw({None: ProgressRow(self.description, 0, self.total, "")})
        return self

    def _build_rich_progress(self) -> Any:
        """Build the `rich.progress.Progress` for one line or for rows."""
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        def text(field: str, **layout: Any) -> TextColumn:
            column = Column(no_wrap=True, overflow="ellipsis", **layout) if self._widths else None
            return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

        stage_width, bar_width = self._widths or (0, 24)
        columns = [text("description", ratio=3)]
        columns += [text("fields[stage]", min_width=stage_width)] if stage_width else []
        columns += (
            [BarColumn(bar_width=bar_width)] if self._widths or self.total is not None else []
        )
        columns += [text("fields[tail]", ratio=2)]
        return Progress(
            *columns,
            console=build_rich_console(),
            expand=bool(self._widths),
            transient=not self.closing,
        )

    def is_due(self, live_interval: float) -> bool:
        """Return whether it is time to compute and display progress again.

        It is `live_interval` seconds after the last display on a terminal, else `self.interval`;
        without a display yet, as always on other ranks than 0, after the construction.
        """
        return time.monotonic() - self._print_time >= (
            self.interval if self._live is None else live_interval
        )

    def update(
        self,
        done: float,
        *,
        description: str | None = None,
        rows: Mapping[Any, ProgressRow] | None = None,
        **fields: Any,
    ) -> None:
        """Set progress, `description` and `fields`, and display them.

        They are displayed at once on a terminal, else every `interval` seconds. `description` and
        `fields` (numbers or text, displayed as `name value`) stay until they are replaced. On other
        ranks than 0 nothing is displayed.

        Args:
            done: Progress since the beginning, in the unit of `total`.
            description: Text before the bar; None: unchanged.
            rows: Rows by a stable key each, which a terminal displays instead of the line and of
                earlier rows; None: the line.
        """
        now = time.monotonic()
        self._done = done
        self._fields.update(fields)
        self.description = (
            self.description if description is None else escape_unprintable(description)
        )
        if self._first is None:
            self._first = (now, done)
        with self._guard_output():
            if self._live is not None:
                self._print_time = now
                self._draw(
                    rows or {None: ProgressRow(self.description, done, self.total, self._tail(now))}
                )
            elif not get_rank() and now - self._print_time >= self.interval:
                self._print(now)

    def print_line(self, text: str) -> None:
        """Print `text` as a line of its own on rank 0, above a live progress line.

        It is escaped as by `print_rank_0`, which prints it if no line is live.
        """
        with self._guard_output():
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print_rank_0(text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard_output():
            if self._live is not None:
                self._live.stop()
            elif self._output_area is not None and not self.closing:
                self._show("")
            elif (
                self.closing
                and kind is None
                and not get_rank()
                and self._printed_state != self._state()
            ):
                self._print(time.monotonic())

    def _draw(self, rows: Mapping[Any, ProgressRow]) -> None:
        """Update the live display to exactly `rows`."""
        for key in self._tasks.keys() - rows.keys():
            self._live.remove_task(self._tasks.pop(key))
        for key, row in rows.items():
            fields = {
                "description": row.text,
                "completed": row.done,
                "total": row.total,
                "tail": row.tail,
                "stage": row.stage,
            }
            if key in self._tasks:
                self._live.update(self._tasks[key], **fields)
            else:
                self._tasks[key] = self._live.add_task(**fields)

    def _state(self) -> tuple:
        """Return the displayed values, for comparison with those printed last."""
        return (self.description, self._done, tuple(self._fields.items()))

    def _print(self, now: float) -> None:
        self._print_time = now
        self._printed_state = self._state()
        self._show(f"{self.description}  {self._tail(now)}".rstrip())

    def _show(self, text: str) -> None:
        if self._output_area is None:
            print(text, flush=True)
        else:
            self._output_area.update({"text/plain": text}, raw=True)

    def _tail(self, now: float) -> str:
        """Return percentage, fields and time left as text."""
        parts = [] if not self.total else [f"{100 * self._done / self.total:.0f} %"]
        parts += [f"{name} {format_number(value)}" for name, value in self._fields.items()]
        return escape_unprintable("  ".join([*parts, *self.time_left(now)]))

    def time_left(self, now: float) -> list[str]:
        """Return `["0:42 left"]`, estimated at the time `now` of `time.monotonic`.

        The list is empty if the time left cannot be estimated.
        """
        if not self.total or self._first is None or not self._first[1] < self._done < self.total:
            return []
        rate = (self._done - self._first[1]) / max(now - self._first[0], 1e-9)
        return [f"{format_duration((self.total - self._done) / rate)} left"]


def format_paths(paths: Sequence[str]) -> str:
    """Return the first three paths, joined by commas, and the number of others.

    An example is `a, b, c and 1,204 more`; the text is empty without paths. Bytes that are not
    UTF-8 are replaced, control characters stay.
    """
    names = ", ".join(os.fsencode(path).decode("utf-8", "replace") for path in paths[:3])
    return f"{names} and {len(paths) - 3:,} more" if len(paths) > 3 else names


def format_count(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 model` or `1,204 models`.

    Args:
        noun: Singular, whose plural ends in -s.
    """
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def format_number(value: Any) -> str:
    """Return a number as short text, such as 1,204, 3.10M, 2.50G or 3.214.

    M stands for millions, G for billions. Smaller floats have 4 significant digits, but no fraction
    from 1,000 on. Bools and values of other types are returned as `str(value)`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value / 1e9:.2f}G" if abs(value) >= 1e9 else f"{value / 1e6:.2f}M"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Return seconds, rounded, as text: 0:42 or 1:02:03, from two days on 2.5 days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
