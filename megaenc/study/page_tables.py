"""Tables of the page: text that is safe in HTML, tables that move sideways by themselves, on a phone with one column of heads."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from megaenc.study.table import Column, Row, Table, shown


def text(words: str) -> str:
    """Words escaped, with percent signs beside their numbers."""
    return escape(words).replace(" %", "\u00a0%")


def classes(**on: bool) -> str:
    """The attribute that names those that are on, or nothing."""
    names = " ".join(name for name, is_on in on.items() if is_on)
    return f' class="{names}"' if names else ""


def scroll(table: str, label: str) -> str:
    """A table wider than the page moves by itself; a keyboard can do that too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}">{table}</div>'


def table_card(table: Table) -> str:
    """A table with its title and note, folded where it holds the standard metrics."""
    opened = "" if table.key.endswith("-standard") else " open"
    return (
        f'<details class="card" id="table-{escape(table.key)}"{opened}><summary><h3>{text(table.title)}</h3></summary>\n'
        f'<p class="muted">{text(table.note)}</p>\n{scroll(_grid(table), table.title)}</details>'
    )


def _grid(table: Table) -> str:
    """The table itself: one row of heads, or two where columns stand in groups.

    Where rows have names, a phone shows those in place of the columns that say what a row is (class `head`).
    """
    named, starts = any(row.name for row in table.rows), _starts(table.columns)
    heads = []
    for at, column in enumerate(table.columns):
        kinds = classes(number=column.number, head=named and at > 0 and not column.group, first=at in starts)
        name = _both(column.name, "Model") if named and at == 0 else text(column.name)
        heads.append(f'<th scope="col"{kinds}>{name}</th>')
    rows = "".join(_row(table.columns, row, starts, named) for row in table.rows)
    return f"<table><thead>{_groups(table, named)}<tr>{''.join(heads)}</tr></thead><tbody>{rows}</tbody></table>"


def _groups(table: Table, named: bool) -> str:
    """The row above the heads that says what columns belong together, if any do."""
    if not any(column.group for column in table.columns):
        return ""
    cells = []
    for group, members in groupby(table.columns, key=lambda column: column.group):
        width = len(list(members))
        if group:
            cells.append(f'<th colspan="{width}" scope="colgroup" class="first">{text(group)}</th>')
        else:
            cells.append("<td></td>" + (f'<td colspan="{width - 1}"{classes(head=named)}></td>' if width > 1 else ""))
    return f'<tr class="groups">{"".join(cells)}</tr>'


def _starts(columns: Sequence[Column]) -> set[int]:
    """Where a group begins."""
    return {at for at, column in enumerate(columns) if column.group and (at == 0 or columns[at - 1].group != column.group)}


def _row(columns: Sequence[Column], row: Row, starts: set[int], named: bool) -> str:
    cells = []
    for at, (column, cell) in enumerate(zip(columns, row.cells, strict=True)):
        kinds = classes(number=column.number, head=named and at > 0 and not column.group, first=at in starts)
        if at == 0:
            cells.append(f'<th scope="row"{kinds}>{_both(shown(cell), row.name) if named else text(shown(cell))}</th>')
        else:
            cells.append(f"<td{kinds}>{text(shown(cell))}</td>")
    return f"<tr{classes(rule=row.rule, light=row.light)}>{''.join(cells)}</tr>"


def _both(wide: str, narrow: str) -> str:
    """One text for a page and another one for a phone."""
    return f'<span class="wide">{text(wide)}</span><span class="narrow">{text(narrow)}</span>'
