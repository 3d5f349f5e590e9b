"""The documents of this repository, and the blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE_BY_REPORTS = ("docs/study/small-two-cores", "docs/study/objectives")
LANGUAGES = {
    "bash": "commands, run by `make test-docs`",
    "text": "what commands print, formulas, pictures made of letters",
    "python": "code to be put into a file or a notebook",
    "yaml": "parts of files",
    "toml": "parts of files",
    "json": "parts of files",
}
LINK = re.compile(
    r"!?\[(?P<text>(?:[^\]\[]|\[[^\]]*\])*)\]"
    r"\((?P<target>[^()\s]*(?:\([^()]*\)[^()\s]*)*)(?: \"[^\"]*\")?\)"
)
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its fence from 1, its language and its lines.

    The lines lack the indentation of the fence.
    """

    line: int
    language: str
    lines: tuple[str, ...]


def documents() -> list[str]:
    """Return the README, docs and examples in reading order, relative to the root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    names = (str(path.relative_to(ROOT)) for path in found)
    return sorted(
        (name for name in names if not name.startswith(MADE_BY_REPORTS)),
        key=lambda name: (name.count("/"), name),
    )


def read(name: str) -> list[str]:
    """Return the lines of a document."""
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def blocks(lines: list[str]) -> list[Block]:
    """Return the fenced blocks of a document; ValueError if one does not end."""
    found = []
    opening = None
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if opening is None and fence:
            opening = fence
            begin = number
        elif opening and fence and fence[2].startswith(opening[2]) and not fence[3].strip():
            inside = lines[begin : number - 1]
            indented = re.compile(rf" {{0,{len(opening[1])}}}")
            found.append(
                Block(
                    begin,
                    opening[3].strip(),
                    tuple(indented.sub("", each, count=1) for each in inside),
                )
            )
            opening = None
    if opening:
        raise ValueError(f"line {begin}: a fence that nothing closes")
    return found


def without_blocks(lines: list[str]) -> list[str]:
    """Return the lines with those of fenced blocks empty, under the same numbers."""
    prose = list(lines)
    for block in blocks(lines):
        first = block.line - 1
        count = len(block.lines) + 2
        prose[first : first + count] = [""] * count
    return prose


def mask_code(text: str) -> str:
    """Return a document's text with code that cannot be read as links.

    Fenced blocks are blanked and brackets of code spans replaced; offsets stay.
    """
    lines = text.split("\n")
    prose = without_blocks(lines)
    kept = [new or " " * len(old) for old, new in zip(lines, prose, strict=True)]
    return CODE.sub(lambda code: re.sub(r"[\[\]()]", "x", code[0]), "\n".join(kept))
