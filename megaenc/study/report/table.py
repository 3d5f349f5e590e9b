"""A table as a value, and its three written forms: CSV, Markdown, LaTeX with booktabs."""

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megaenc import markdown

CellValue = str | int | None
"""A cell: text as it is shown, a count, or nothing, which stays empty."""


@dataclass(frozen=True)
class Column:
    """A column; neighbours of one `group` stand under it."""

    name: str
    group: str = ""
    number: bool = True
    """Whether its cells are aligned to the right."""


@dataclass(frozen=True)
class TableRow:
    """A line of cells, as many as there are columns."""

    cells: tuple[CellValue, ...]
    light: bool = False
    """A row of other people's numbers, to be laid beside the one before it."""
    rule: bool = False
    """Whether a thin line above parts it from the rows before it."""
    name: str = ""
    """What the row is in one short text, for screens that have no room for the columns that say so."""


@dataclass(frozen=True)
class Table:
    """What is written to `key`.csv, .md and .tex, and shown on the page."""

    key: str
    title: str
    note: str
    """What the cells are, in a sentence or two."""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{self.key}: a row of {len(row.cells)} cells under {len(self.columns)} columns")

    @property
    def named(self) -> bool:
        """Whether rows have short names, for a phone."""
        return any(row.name for row in self.rows)

    @property
    def groups(self) -> dict[str, int]:
        """The groups in order, each with the number of its columns."""
        return dict(Counter(column.group for column in self.columns if column.group))


def format_score(mean: float | None, half: float | None = None) -> CellValue:
    """Return fractions as `91.65 (0.45)`, percent with two digits as the study prints them; None where there is none."""
    if mean is None or mean != mean:
        return None
    return f"{100 * mean:.2f}" + ("" if half is None or half != half else f" ({100 * half:.2f})")


def format_cell(value: CellValue) -> str:
    """Return a cell for the eye: counts with commas."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


def format_csv(lines: Iterable[Iterable[object]]) -> str:
    """Return lines of cells as CSV; None is an empty cell."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()


def table_to_csv(table: Table) -> str:
    """Return a line of names, `group name` where there are groups, and the rows; counts as plain digits."""
    return format_csv([_full_column_names(table), *(row.cells for row in table.rows)])


def _full_column_names(table: Table) -> list[str]:
    return [f"{column.group} {column.name}".strip() for column in table.columns]


def table_to_markdown(table: Table) -> str:
    """Return title, note and a table in GitHub's Markdown, padded so that it can be read as it is."""
    names = [markdown.escape(name) for name in _full_column_names(table)]
    rows = [[markdown.escape(format_cell(cell)) for cell in row.cells] for row in table.rows]
    widths = [max(3, *(len(line[at]) for line in (names, *rows))) for at in range(len(names))]
    fitted = list(zip(table.columns, widths, strict=True))
    rule = ["-" * (width - 1) + ":" if column.number else "-" * width for column, width in fitted]

    def line(cells: Iterable[str]) -> str:
        pairs = zip(cells, fitted, strict=True)
        padded = (cell.rjust(width) if column.number else cell.ljust(width) for cell, (column, width) in pairs)
        return "| " + " | ".join(padded) + " |"

    lines = [f"### {markdown.escape(table.title)}", "", table.note, "", line(names), line(rule), *map(line, rows)]
    return "\n".join(lines) + "\n"


_WIDE = 9
"""Columns that a page of print holds; a table with more has a block for each group."""


def table_to_latex(table: Table) -> str:
    """Return a `table` environment for booktabs. Tables too wide for a page have their groups below each other."""
    groups = list(table.groups)
    parts = [[group] for group in groups] if len(table.columns) > _WIDE and groups else [groups]
    body = "\n\n\\medskip\n".join(_block(table, part) for part in parts)
    caption = _escape_latex(f"{table.title}. {table.note}")
    return (
        "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\\small\n"
        f"\\caption{{{caption}}}\n\\label{{tab:{table.key}}}\n{body}\n\\end{{table}}\n"
    )


def _block(table: Table, groups: list[str]) -> str:
    kept = [(at, column) for at, column in enumerate(table.columns) if not column.group or column.group in groups]

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cells) + r" \\"

    lines = [f"\\begin{{tabular}}{{{''.join('r' if column.number else 'l' for _, column in kept)}}}", "\\toprule"]
    if groups:
        heads = sum(not column.group for column in table.columns)
        ends = list(itertools.accumulate((table.groups[group] for group in groups), initial=heads))
        named = [f"\\multicolumn{{{table.groups[group]}}}{{c}}{{{_escape_latex(group)}}}" for group in groups]
        rules = [f"\\cmidrule(lr){{{start + 1}-{end}}}" for start, end in itertools.pairwise(ends)]
        lines += [line([""] * heads + named), " ".join(rules)]
    lines += [line(_escape_latex(column.name) for _, column in kept), "\\midrule"]
    for at, row in enumerate(table.rows):
        if row.rule and at:
            lines.append("\\addlinespace")
        cells = [_escape_latex(format_cell(row.cells[number])) for number, _ in kept]
        lines.append(line(f"\\textit{{{cell}}}" if row.light and cell else cell for cell in cells))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "<": "$<$",
    ">": "$>$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$", "→": r"$\to$", "†": r"$\dagger$", "\u202f": r"\,",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.splitlines()).replace(" %", "\u202f%"))


WRITERS = {"csv": table_to_csv, "md": table_to_markdown, "tex": table_to_latex}
