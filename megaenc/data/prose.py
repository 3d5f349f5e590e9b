"""English paragraphs out of docstrings, comments and documentation: no code, tables, headings or signatures."""

import ast
import inspect
import re
from collections.abc import Iterator

_MOST_FREQUENT_WORDS = """
    a about after all also an and any are as at be because been before being between both but by can cannot could do does each
    either every few first for from given had has have here how however if in instead into is it its just like made make many may
    more most must need never no not now of often on once one only or other otherwise our out over own same see set should since
    so some such than that the their them then there therefore these they this those through to too under until up upon used uses
    using very was we well were what when where whether which while who why will with within without would you your
"""
_STOP_WORDS = frozenset(_MOST_FREQUENT_WORDS.split())

# Never in prose.
_MARKS = ":// www. \\ >>> == -> => { } __ $ || && << @ | -- ... [~ ` %r %s %d TODO FIXME XXX"
_CODE_MARKS = tuple(_MARKS.split())

# A reST directive, target or comment; unless it is one of the second line, what is indented deeper belongs to it and is no prose.
_DIRECTIVE = re.compile(r"^(\s*)\.\. +([\w:+-]+::|\[|_|\|)")
_PROSE_DIRECTIVES = (
    *("note::", "warning::", "tip::", "important::", "attention::", "caution::", "hint::", "admonition::", "seealso::"),
)
_UNDERLINE = re.compile(r"^\s*([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_HEADING = re.compile(r"^\s*(#{1,6} .*|[A-Z][\w ]{2,30}:)\s*$")
_TABLE = re.compile(r"^\s*(\+[-=+]{3,}|\|.*\||={3,} +=|-{3,} +-|[─┌└│├╭╰])")
_BULLET = re.compile(r"^(\s*)([-*+•o]|\(?(\d{1,2}|[a-zA-Z]|[ivx]{1,4})[.)]) +(?=\S)")
_FIELD = re.compile(
    r"^\s*[:@](param|parameter|arg|argument|key|keyword|returns?|raises?|throws|rtype|type|ivar|cvar|var)\b[^:]*:?\s*"
)
# `name (type, *optional*, defaults to x): description` and `name: description`, as Google's style writes arguments.
_ARGUMENT = re.compile(r"^\s*[`*]*[\w.*\[\]]+[`*]*( \([^()]*(\([^()]*\)[^()]*)*\))? ?(:|--| - )\s+(?=\S)")
# numpy's `name : type`, and a name or type on a line of its own: the description is the deeper lines that follow.
_TYPED_NAME = re.compile(r"^[\w*, ]{1,60} : \S")
_BARE_NAME = re.compile(r"^[\w.*\[\], ]{1,50}$")
_COMMENT = re.compile(r"^[ \t]*#[#:!]?(?![#!:])[ \t]?(.*)$")
_HEADER_COMMENT = re.compile(r"/\*+!?(.*?)\*/|((?:^[ \t]*//[^\n]*\n)+)", re.DOTALL | re.MULTILINE)

_MARKUP = (
    (re.compile(r"!?\[([^\]\[]*)\]\([^()\s]*\)"), r"\1"),  # Markdown links
    (re.compile(r":[\w:+-]+:`~?[.!]?([^`<>]+?)\s*(<[^`]*>)?`"), r"\1"),  # reST roles
    (re.compile(r"`([^`<>]+?)\s*<[^`]*>`_{1,2}"), r"\1"),  # reST links
    (re.compile(r"\s?\[(\d+|#\w*|[A-Z]\w+\d{2,4}\w?)\]_"), ""),  # citations
    (re.compile(r"``([^`]*)``|`([^`]*)`_{0,2}"), lambda found: found[1] or found[2] or ""),
    (re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"<(https?|mailto):[^>\s]*>|</?\w+[^<>]*>|\[\[(?=\w)|\]\]"), ""),
    (re.compile(r"(?<=\w)(?<!\w\w_)_(?=[\s.,;:)])"), ""),  # reST reference marks
    (re.compile(r"([.!?:])\s*::?\s*$"), r"\1"),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ([.,;:!?)])(?=\s|$)"), r"\1"),
    (re.compile(r"\.\.$"), "."),
)


def python_paragraphs(source: str) -> Iterator[str]:
    """The prose of Python source: docstrings and other long strings, then blocks of comments. The source is parsed, never run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        # Documentation of compiled functions is passed to a call or kept in a dictionary, so every long string counts.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 60 and " " in node.value:
            yield from paragraphs(node.value)
    comment: list[str] = []
    for line in [*source.splitlines(), ""]:
        if found := _COMMENT.match(line):
            comment.append(found[1])
        elif comment:
            if len(comment) > 1:
                yield from paragraphs("\n".join(comment))
            comment = []


def header_paragraphs(source: str) -> Iterator[str]:
    """The prose of the comments of a C or C++ header."""
    for found in _HEADER_COMMENT.finditer(source):
        block = found[1] if found[1] is not None else found[2]
        lines = [re.sub(r"^\s*(//[/!]?|\*+)", "", line) for line in block.splitlines()]
        yield from paragraphs("\n".join(lines))


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring, reST or Markdown text that read as English sentences, markup removed, each on one line."""
    for lines in _blocks(inspect.cleandoc(text.expandtabs(4))):
        joined = plain(" ".join(lines))
        if joined[-1:].isalpha():
            joined += "."  # short descriptions often go without
        if reads_as_english(joined):
            yield joined


def plain(text: str) -> str:
    """`text` on one line, without the markup of docstrings, reST and Markdown."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def reads_as_english(text: str) -> bool:
    """Whether `text` looks like whole sentences of English rather than names, formulas or lists."""
    if len(text) < 50 or not text.lstrip("\"'")[:1].isupper() or text[-1] not in ".!?:)\"'":
        return False
    if any(mark in text for mark in _CODE_MARKS):
        return False
    words = text.split()
    if len(words) < 8:
        return False
    plain = [word.strip(".,;:!?()\"'[]").lower() for word in words]
    alphabetic = sum(word.replace("-", "").replace("'", "").replace("\u2019", "").isalpha() for word in plain)
    stops = sum(word in _STOP_WORDS for word in plain)
    letters = sum(char.isalpha() or char.isspace() for char in text)
    ascii_only = sum(char.isascii() for char in text)
    capitals = sum(word[:1].isupper() for word in words)
    odd = sum("_" in word or "=" in word or "/" in word or "." in word[:-1].strip(".,;:!?()\"'") for word in words)
    return (
        alphabetic >= 0.85 * len(words)
        and stops >= 0.25 * len(words)
        and letters >= 0.9 * len(text)
        and ascii_only >= 0.97 * len(text)
        and capitals <= 0.35 * len(words)
        and odd <= 0.06 * len(words)
        and len(text) <= 9 * len(words)
        and text.count("(") == text.count(")")
    )


def likeness(paragraph: str) -> str:
    """Equal for paragraphs that differ only in names, numbers and punctuation."""
    words = []
    for word in paragraph.split():
        bare = word.strip(".,;:!?()\"'[]")
        is_name = not bare.isalpha() or any(char.isupper() for char in bare[1:])
        words.append("_" if is_name else bare.lower())
    return " ".join(words)


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines that belong together, with everything cut out that layout alone shows to be no prose."""
    lines = text.splitlines()
    block: list[str] = []
    indent = 0
    skip_deeper: int | None = None  # leave out lines indented deeper than this
    fenced = doctest = False
    for at, line in enumerate(lines):
        bare = line.strip()
        depth = len(line) - len(line.lstrip())
        if bare.startswith(("```", "~~~")):
            fenced = not fenced
            yield block
            block = []
            continue
        if fenced:
            continue
        if not bare:
            yield block
            block, doctest = [], False
            continue
        if skip_deeper is not None:
            if depth > skip_deeper:
                continue
            skip_deeper = None
        if bare.startswith((">>>", "$ ", "In [")):
            doctest = True
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if doctest or _UNDERLINE.match(line) or _UNDERLINE.match(following) or _TABLE.match(line) or _HEADING.match(line):
            yield block
            block = []
            continue
        if found := _DIRECTIVE.match(line):
            yield block
            block = []
            if found[2] not in _PROSE_DIRECTIVES:
                skip_deeper = depth
            continue
        described = following[: depth + 1].isspace() and following.strip()
        if _TYPED_NAME.match(bare) or (described and _BARE_NAME.match(bare)):
            yield block
            block = []
            continue
        starts = _BULLET.match(line) or _FIELD.match(line) or (_ARGUMENT.match(line) if not block or depth < indent else None)
        if starts or (block and abs(depth - indent) > 1 and not (len(block) == 1 and depth > indent)):
            yield block
            block = []
        block.append(line[starts.end() :] if starts else bare)
        indent = depth
        if bare.endswith("::"):
            yield block
            block, skip_deeper = [], depth
    yield block
