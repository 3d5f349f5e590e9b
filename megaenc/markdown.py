"""Escaping of untrusted text for Markdown."""

import re
from collections.abc import Mapping

from megaenc.console import escape_unprintable

_WWW = re.compile(r"(?i)\b(www)\.")
_SPECIAL = re.compile(r"[\\`|\[\]]")


def escape(value: object) -> str:
    """Return `value` as one line of Markdown text in which links, code, HTML and table separators are escaped."""
    escaped = _SPECIAL.sub(r"\\\g<0>", _one_line(value)).replace("<", "&lt;").replace("://", "&#58;//")
    return _WWW.sub(r"\1&#46;", escaped)


def inline_code(value: object, *, cell: bool = False) -> str:
    """Return `value` as one line of inline Markdown code, backticks as apostrophes; with `cell`, `|` is escaped too."""
    content = _one_line(value).replace("`", "'") or " "
    return f"`{content.replace('|', chr(92) + '|') if cell else content}`"


def format_facts(facts: Mapping[str, object]) -> str:
    """Return a table of two columns, without heading: names as they are, and their values as code."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {inline_code(value, cell=True)} |" for name, value in facts.items())])


def _one_line(value: object) -> str:
    """Return `value` as one line of text without control characters."""
    return escape_unprintable(" ".join(str(value).split()))
