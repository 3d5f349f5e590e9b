"""Untrusted text in Markdown, and tables as CSV, Markdown and on the terminal."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megaenc.console import build_rich_console, escape_unprintable

_WWW = re.compile(r"(?i)\b(www)\.")
_SPECIAL = re.compile(r"[\\`|\[\]]")


def escape_markdown(value: object) -> str:
    r"""Return `value` as one line of Markdown without links, code, HTML or cells.

    Escaped are the backslash, the backtick, `[`, `]`, `|`, `<`, `://` and `www.`. White space
    becomes single spaces, without any at the ends; other control characters become Python escapes
    such as `\x1b`. `&` and the marks of emphasis and blocks stay.
    """
    escaped = (
        _SPECIAL.sub(r"\\\g<0>", _one_line(value)).replace("<", "&lt;").replace("://", "&#58;//")
    )
    return _WWW.sub(r"\1&#46;", escaped)


def inline_code(value: object, *, cell: bool = False) -> str:
    r"""Return `value` as one line of inline Markdown code, backticks as apostrophes.

    White space becomes single spaces, without any at the ends; other control characters become
    Python escapes such as `\x1b`. An empty value becomes a space.

    Args:
        cell: Escape `|` too.
    """
    content = _one_line(value).replace("`", "'") or " "
    return f"`{content.replace('|', chr(92) + '|') if cell else content}`"


def format_facts(facts: Mapping[str, object]) -> str:
    """Return a Markdown table of names and their values, one row each.

    It has two columns without heading: the names as they are, and the values as `inline_code` in
    one line, `|` escaped and backticks as apostrophes. There is no line feed at the end.
    """
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            *(f"| {name} | {inline_code(value, cell=True)} |" for name, value in facts.items()),
        ]
    )


def _one_line(value: object) -> str:
    """Return `value` as one line of text without control characters."""
    return escape_unprintable(" ".join(str(value).split()))


def format_csv(lines: Iterable[Iterable[object]]) -> str:
    """Return rows of cells as CSV text; None becomes an empty cell.

    Each row, the last one too, ends with a line feed.
    """
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()


def format_markdown(
    text_columns: Sequence[str], number_columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """Return a Markdown table of text columns, then number columns.

    Text columns are left-aligned, with cells by `escape_markdown`; number columns are
    right-aligned, with cells as they are. No heading is escaped. The text ends with a line feed.

    Args:
        text_columns: Headings of the first columns.
        number_columns: Headings of the columns after them.
        rows: Cells of all columns of each row, as text.
    """
    lines = [
        f"| {' | '.join([*text_columns, *number_columns])} |",
        "|---" * len(text_columns) + "|---:" * len(number_columns) + "|",
    ]
    for row in rows:
        cells = [*map(escape_markdown, row[: len(text_columns)]), *row[len(text_columns) :]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def build_rich_table(title: str, text_columns: Sequence[str], number_columns: Sequence[str]) -> Any:
    """Return a `rich.table.Table` of text columns, then number columns, without rows.

    Text columns are left-aligned and wrap, number columns are right-aligned.

    Args:
        text_columns: Headings of the first columns.
        number_columns: Headings of the columns after them.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in text_columns:
        table.add_column(name, overflow="fold")
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_tables(tables: Iterable[Any], width: int) -> None:
    """Print rich's tables to standard output.

    On a terminal they have its width, else they are `width` characters wide. Text that looks like
    rich's markup is printed as it is.
    """
    # Names may look like rich's markup.
    console = build_rich_console(
        markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else width
    )
    for table in tables:
        console.print(table)
