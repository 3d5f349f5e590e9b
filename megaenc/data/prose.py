"""English paragraphs out of docstrings, comments and documentation: no code, tables, headings or signatures."""

import ast
import inspect
import re
from collections.abc import Iterator

_MOST_FREQUENT_WORDS = """
    a about after all also an and any are as at be been before but by can do does each for from has have how if in into is it its
    like made may more most must no not of on once one only or other over same set should since so some such than that the their
    them then there these they this to under up use used using was we when where which while will with you
"""
_STOP_WORDS = frozenset(_MOST_FREQUENT_WORDS.split())
_NEVER_IN_PROSE = re.compile(r"://|www\.|\\|>>>|==|[=-]>|[{}$|@`]|__|&&|<<|--|\.\.\.|\[~|%[rsd]|TODO|FIXME|XXX")
# Examples with their output, and a directive or two colons with the deeper lines that follow.
_EXAMPLE = re.compile(r"^ *(?:>>>|In \[|\$ |```).*(?:\n *\S.*)*", re.MULTILINE)
_LITERAL = re.compile(r"^( *)(\.\. .*|.*:):.*\n(?:\1 +.*\n|[ \t]*\n)*", re.MULTILINE)
# Underlines and tables, headings, and numpy's `name : type`.
_LAYOUT = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}|[|┌└│├╭╰]|\+[-=]|#+ |[A-Z][\w ]{2,30}:$|\.\. |[\w*, ]{1,60} : ")
# A bullet, a field of reST, or Google's `name (type): ` before what is said of it.
_START = re.compile(
    r"(?:[-*+•]|\(?(?:\d+|\w)[.)]) +|[:@](?:param|arg|key|return|raise|throw|type|ivar|cvar|var)[^:]*:?\s*"
    r"|[`*]*[\w.*\[\]]+[`*]*(?: \(.*?\)(?=:))?: +(?=\S)"
)
_MARKUP = (
    (re.compile(r"!?\[([^\]\[]*)\]\([^()\s]*\)"), r"\1"),  # Markdown links
    (re.compile(r"(?::[\w:+-]+:)?`+~?[.!]?([^`<>]+?)\s*(<[^`]*>)?`+_*"), r"\1"),  # code, reST roles and links
    (re.compile(r"\s?\[(\d+|#\w*|[A-Z]\w+\d{2,4}\w?)\]_"), ""),  # citations
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"<(https?|mailto):[^>\s]*>|</?\w+[^<>]*>|\[\[(?=\w)|\]\]"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ([.,;:!?)])(?=\s|$)"), r"\1"),
)


def long_strings(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of the strings of Python source that may be documentation, which is parsed and never run.

    Documentation of compiled functions is passed to a call or kept in a dictionary, so every long string counts.
    """
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    strings = ((node.lineno, node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return sorted((line, text) for line, text in strings if len(text) >= 60)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, reST or Markdown text that read as English sentences, without markup, in one line."""
    text = _EXAMPLE.sub("", inspect.cleandoc(text.expandtabs(4)))
    text = _LITERAL.sub(lambda found: "\n" if found[2].startswith("..") else f"{found[1]}{found[2]}\n\n", text + "\n")
    block: list[str] = []
    indent = 0
    for line in [*text.splitlines(), ""]:
        bare, depth = line.strip(), len(line) - len(line.lstrip())
        is_layout, start = not bare or _LAYOUT.match(bare), None
        if not block or depth <= indent:
            start = _START.match(bare)
        continues = abs(depth - indent) <= 1 or (len(block) == 1 and depth > indent and len(block[0].split()) > 3)
        if block and (is_layout or start or not continues):
            joined = plain(" ".join(block))
            joined += "." * joined[-1:].isalpha()  # short descriptions often go without
            if reads_as_english(joined):
                yield joined
            block = []
        if not is_layout:
            block.append(bare[start.end() :] if start else bare)
        indent = depth


def plain(text: str) -> str:
    """Return `text` on one line, without the markup of docstrings, reST and Markdown."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def reads_as_english(text: str) -> bool:
    """Return whether `text` looks like whole sentences of English rather than names, formulas or lists."""
    words = [word.strip(".,;:!?()\"'[]") for word in text.split()]
    count, letters = len(words), sum(char.isalpha() or char.isspace() for char in text)
    return (
        count >= 8
        and text.lstrip("\"'")[:1].isupper()
        and text[-1] in ".!?:)\"'"
        and not _NEVER_IN_PROSE.search(text)
        and sum(word.replace("-", "").replace("'", "").isalpha() for word in words) >= 0.85 * count
        and sum(word.lower() in _STOP_WORDS for word in words) >= 0.25 * count
        and sum(word[:1].isupper() for word in words) <= 0.35 * count
        and 0.9 * len(text) <= letters
        and text.count("(") == text.count(")")
    )


def likeness(paragraph: str) -> str:
    """Return a text that is equal for paragraphs which differ only in names, numbers and punctuation."""
    words = (word.strip(".,;:!?()\"'[]") for word in paragraph.split())
    return " ".join(word.lower() if word.isalpha() and word[1:] == word[1:].lower() else "_" for word in words)
