"""Tables of the report and their output as CSV, Markdown and LaTeX (booktabs)."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megaenc.tables import escape_markdown, format_csv

CellValue = str | int | None
"""Value of a cell: formatted text, a count, or None for an empty cell."""


@dataclass(frozen=True)
class Column:
    """Column of a table, with its heading `name`.

    Neighbouring columns with the same `group` share a second heading; "" is no group. Cells of a
    `numeric` column are aligned to the right, others to the left.
    """

    name: str
    group: str = ""
    numeric: bool = True
    """whether its cells are aligned to the right"""


@dataclass(frozen=True)
class TableRow:
    """Row of a table, with one cell per column in the tuple `cells`.

    A cell is text, a count, or None if it is empty. A `light` row shows values for comparison with
    the row above, such as published ones; `rule` puts a thin line above a row. `name` is a short
    name that replaces the identifying columns on small screens, or "".
    """

    cells: tuple[CellValue, ...]
    light: bool = False
    """whether it shows published values for comparison with the row above"""
    rule: bool = False
    """whether a thin line separates it from the rows above"""
    name: str = ""
    """short name, which replaces the identifying columns on small screens"""


@dataclass(frozen=True)
class Table:
    """Table of the report, with as many cells in each row as columns.

    `key` is the name of its files and its id on the page, `title` its heading, `note` the meaning
    of the cells in one or two sentences. `columns` are Columns, `rows` TableRows; a row with
    another number of cells raises ValueError. The page shows a `folded` table as its title until it
    is opened.
    """

    key: str
    title: str
    note: str
    """meaning of the cells, in one or two sentences"""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    folded: bool = False
    """whether the page shows its title only until it is opened"""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"{self.key}: a row of {len(row.cells)} cells under {len(self.columns)} columns"
                )

    @property
    def named(self) -> bool:
        """Return whether any row has a short name, `TableRow.name`."""
        return any(row.name for row in self.rows)

    @property
    def groups(self) -> dict[str, int]:
        """Return the number of columns by group name, in column order.

        Columns without a group are left out.
        """
        return dict(Counter(column.group for column in self.columns if column.group))


def format_score(mean: float | None, half: float | None = None) -> str | None:
    """Format a mean and half interval, both fractions, in percent: `91.65 (0.45)`.

    Args:
        mean: Mean of scores; the result is None if it is None or NaN.
        half: Half width of its interval; left out if it is None or NaN.
    """
    if mean is None or mean != mean:
        return None
    return f"{100 * mean:.2f}" + ("" if half is None or half != half else f" ({100 * half:.2f})")


def format_cell(value: CellValue) -> str:
    """Return a cell's text: integers with thousands separators, empty for None.

    A text stays as it is, not escaped for Markdown or LaTeX.
    """
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else value


def table_to_csv(table: Table) -> str:
    """Return a table as CSV text, without title and note.

    The header line has `group name` of each column, such as `SC SST-2`. Counts are plain digits,
    empty cells empty.
    """
    return format_csv([_full_column_names(table), *(row.cells for row in table.rows)])


def _full_column_names(table: Table) -> list[str]:
    """Return the name of each column, after its group's name if it has one."""
    return [f"{column.group} {column.name}".strip() for column in table.columns]


def table_to_markdown(table: Table) -> str:
    """Return title, note and table as GitHub Markdown text, ending with a newline.

    The title is a ### heading; columns are padded, with the heading `group name`. Title and cells
    are escaped, the note is not.
    """
    names = [escape_markdown(name) for name in _full_column_names(table)]
    rows = [[escape_markdown(format_cell(cell)) for cell in row.cells] for row in table.rows]
    widths = [max(3, *(len(line[index]) for line in (names, *rows))) for index in range(len(names))]
    fitted = list(zip(table.columns, widths, strict=True))
    rule = ["-" * (width - 1) + ":" if column.numeric else "-" * width for column, width in fitted]

    def format_row(cells: Iterable[str]) -> str:
        """Format cells as a padded Markdown row."""
        pairs = zip(cells, fitted, strict=True)
        padded = (
            cell.rjust(width) if column.numeric else cell.ljust(width)
            for cell, (column, width) in pairs
        )
        return "| " + " | ".join(padded) + " |"

    lines = [
        f"### {escape_markdown(table.title)}",
        "",
        table.note,
        "",
        format_row(names),
        format_row(rule),
        *map(format_row, rows),
    ]
    return "\n".join(lines) + "\n"


_WIDE = 9
"""Columns that fit on a printed page; a wider table gets one block per group."""


def table_to_latex(table: Table) -> str:
    """Return a LaTeX `table` for booktabs, with title and note as caption.

    The label is tab:KEY. All texts are escaped. A table with more than 9 columns has a block per
    column group, if it has groups; columns without a group are in each block.
    """
    groups = list(table.groups)
    parts = [[group] for group in groups] if len(table.columns) > _WIDE and groups else [groups]
    body = "\n\n\\medskip\n".join(_format_latex_block(table, part) for part in parts)
    caption = _escape_latex(f"{table.title}. {table.note}")
    return (
        "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\\small\n"
        f"\\caption{{{caption}}}\n\\label{{tab:{table.key}}}\n{body}\n\\end{{table}}\n"
    )


def _format_latex_block(table: Table, groups: list[str]) -> str:
    """Format the ungrouped columns and those of `groups` as a LaTeX tabular."""
    indexed_columns = [
        (index, column)
        for index, column in enumerate(table.columns)
        if not column.group or column.group in groups
    ]

    def format_row(cells: Iterable[str]) -> str:
        """Format cells as a LaTeX row."""
        return " & ".join(cells) + r" \\"

    alignment = "".join("r" if column.numeric else "l" for _, column in indexed_columns)
    lines = [f"\\begin{{tabular}}{{{alignment}}}", "\\toprule"]
    if groups:
        heads = sum(not column.group for column in table.columns)
        ends = list(itertools.accumulate((table.groups[group] for group in groups), initial=heads))
        headings = [
            f"\\multicolumn{{{table.groups[group]}}}{{c}}{{{_escape_latex(group)}}}"
            for group in groups
        ]
        rules = [f"\\cmidrule(lr){{{start + 1}-{end}}}" for start, end in itertools.pairwise(ends)]
        lines += [format_row([""] * heads + headings), " ".join(rules)]
    lines += [format_row(_escape_latex(column.name) for _, column in indexed_columns), "\\midrule"]
    for index, row in enumerate(table.rows):
        if row.rule and index:
            lines.append("\\addlinespace")
        cells = [_escape_latex(format_cell(row.cells[index])) for index, _ in indexed_columns]
        lines.append(
            format_row(f"\\textit{{{cell}}}" if row.light and cell else cell for cell in cells)
        )
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "→": r"$\to$", "†": r"$\dagger$",
    "<": "$<$", ">": "$>$", "≥": r"$\geq$", "≤": r"$\leq$", "\u202f": r"\,",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def _escape_latex(text: str) -> str:
    """Escape text for LaTeX, as one line with thin spaces before percent signs."""
    return "".join(
        _LATEX.get(letter, letter)
        for letter in " ".join(text.splitlines()).replace(" %", "\u202f%")
    )


WRITERS = {"csv": table_to_csv, "md": table_to_markdown, "tex": table_to_latex}
