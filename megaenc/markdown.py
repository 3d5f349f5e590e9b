"""Text from files and command lines as Markdown that shows it and does nothing else."""

import re

from megaenc.console import escape_unprintable

_WWW = re.compile(r"(?i)\b(www)\.")
_ACTS = re.compile(r"[\\`|\[\]]")


def escape(value: object) -> str:
    """Return `value` on one line, without links, code, HTML or the end of a table's cell in it."""
    escaped = _ACTS.sub(r"\\\g<0>", _one_line(value)).replace("<", "&lt;").replace("://", "&#58;//")
    return _WWW.sub(r"\1&#46;", escaped)


def inline_code(value: object, *, cell: bool = False) -> str:
    """Return `value` as code within a line, where HTML is text; `cell`: within a cell of a table."""
    shown = _one_line(value).replace("`", "'") or " "
    return f"`{shown.replace('|', chr(92) + '|') if cell else shown}`"


def _one_line(value: object) -> str:
    return escape_unprintable(" ".join(str(value).split()))
