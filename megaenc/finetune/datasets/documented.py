"""What installed packages document of their functions, and the labelled examples that can be had of it."""

import ast
import gc
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megaenc.console import ProgressLine
from megaenc.data import demo, prose
from megaenc.processes import Workers, usable_cores

_SECTION = re.compile(r"^\s*(Parameters\n\s*-{3,}|(Args|Arguments|Params|Parameters):|:param )", re.MULTILINE)
_SIGNATURE = re.compile(r"\A\s*[\w.]+\(.*\)( *->.*)?\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LINK = re.compile(r"!?\[([^\]\[]*)\](\([^()\s]*\))?")
# Names and values as documentation marks them: `x`, ``x``, :attr:`~x`, and, where it is a parameter, *x*.
_MARKED = re.compile(r"(?::[\w:+-]+:)?(`{1,2})[~.!]?([^`<>]{1,60})\1|(?<![\w*])\*{1,2}(\w+)\*{1,2}(?![\w*])")
_WORD = re.compile(r"[A-Za-z_]\w*(?:[.'-]\w+)*|\d+(?:\.\d+)?|\S")
_ODD = re.compile(r"[\\{}|`~$^<>#@]|\.\.|::|__|https?")
_QUESTIONS = (
    "What is the parameter {}?",
    "What does {} do?",
    "What is {} for?",
    "What does the argument {} stand for?",
    "How is {} described?",
    "What should be known about {}?",
)
_LONGEST_CONTEXT, _LONGEST_DOCUMENT = 120, 140  # words

PARAMETER, CODE = "PARAM", "CODE"


@dataclass(frozen=True)
class Parameter:
    """A parameter's name and what is written about it, with markup."""

    name: str
    description: str


@dataclass(frozen=True)
class Documented:
    """The documentation of a function or class."""

    id: str
    """`package/path:line`."""
    description: str
    """All but its sections, with markup."""
    parameters: tuple[Parameter, ...]


def read_documentation() -> list[Documented]:
    """What the packages of the demo corpus document with parameters, in the order of the sources; nothing is imported or run."""
    sources = sorted(source for source in demo._sources() if source[1].endswith(".py"))
    batches = list(demo._batches(sources))
    found: list[Documented] = []
    with Workers(_read, usable_cores()) as workers, ProgressLine("reading what parameters are", len(batches)) as progress:
        for done, batch in enumerate(workers.map(batches), 1):
            found += batch
            progress.update(done, documented=len(found))
    return found


def tagged_sentences(documented: Iterable[Documented]) -> Iterator[dict]:
    """Sentences in which a parameter of the function is marked: {"function", "id", "tokens", "tags"}.

    Tags are PARAM and CODE in IOB2. The marks are gone; sentences that differ from an earlier one in names alone are left out.
    """
    seen: set[str] = set()
    for entry in documented:
        names = {parameter.name for parameter in entry.parameters}
        texts = [entry.description, *(parameter.description for parameter in entry.parameters)]
        number = 0
        for text in (text for whole in texts for text in re.split(r"\n\s*\n", whole)):
            for words, tags in _sentences(text, names):
                if f"B-{PARAMETER}" in tags and _is_new(" ".join(words), seen):
                    yield {"function": entry.id, "id": f"{entry.id}-{number}", "tokens": words, "tags": tags}
                    number += 1


def questions(documented: Iterable[Documented]) -> Iterator[dict]:
    """{"function", "id", "question", "context", "answer", "start"}: the sentence that describes a parameter.

    It stands among those of the function's other parameters. Functions with a single one are there too: they are what a small
    model learns first. A description that differs from an earlier one in names alone is in no context.
    """
    seen: set[str] = set()
    for entry in documented:
        described, length = [], 0
        for parameter in entry.parameters:
            sentences = _plain_sentences(parameter.description)
            if not sentences or not _reads_well(sentences[0], 4, 40) or not _is_new(sentences[0], seen):
                continue
            text = f"{parameter.name}: {' '.join(sentences[:3])}"
            if length + len(text.split()) <= _LONGEST_CONTEXT and parameter.name not in {name for name, _, _ in described}:
                length += len(text.split())
                described.append((parameter.name, sentences[0], text))
        context = "\n".join(text for _, _, text in described)
        start = 0
        for name, answer, text in described:
            wording = _QUESTIONS[number_of(f"{entry.id} {name}") % len(_QUESTIONS)]
            at = start + len(name) + 2
            asked = {"id": f"{entry.id}-{name}", "question": wording.format(name), "context": context}
            yield {"function": entry.id, **asked, "answer": answer, "start": at}
            start += len(text) + 1


def summaries(documented: Iterable[Documented]) -> Iterator[dict]:
    """{"function", "id", "query", "document"}: the line that sums a function up, and the rest of what is written about it.

    Summaries and paragraphs that differ from earlier ones in names alone are left out.
    """
    seen: set[str] = set()
    for entry in documented:
        first, *rest = re.split(r"\n\s*\n", entry.description.strip())
        sentences = _plain_sentences(first)
        if not sentences or not _reads_well(sentences[0], 4, 30) or not _is_new(sentences[0], seen):
            continue
        paragraphs = [" ".join(sentences[1:]), *(text for part in rest for text in prose.paragraphs(part))]
        paragraphs += [" ".join(_plain_sentences(parameter.description)) for parameter in entry.parameters]
        body: list[str] = []
        for text in paragraphs:
            fits = len(" ".join([*body, text]).split()) <= _LONGEST_DOCUMENT
            if fits and _reads_well(text, 4, _LONGEST_DOCUMENT) and sentences[0] not in text and _is_new(text, seen):
                body.append(text)
        document = " ".join(body)
        if len(document.split()) >= 12:
            yield {"function": entry.id, "id": entry.id, "query": sentences[0], "document": document}


def number_of(text: str) -> int:
    """A number that the text alone decides, for choices that are to look random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _read(sources: Sequence[tuple[str, str]]) -> list[Documented]:
    gc.disable()  # as in megaenc.data.demo: a syntax tree has no cycles worth looking for
    return [entry for name, path in sources for entry in _documented(name, path)]


def _documented(name: str, path: str) -> Iterator[Documented]:
    import docstring_parser

    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source) if _SECTION.search(source) else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    # Documentation of compiled functions is passed to a call, so every long string counts.
    strings = [
        (node.lineno, node.col_offset, node.value)
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 100
    ]
    for line, _, text in sorted(strings):
        if not _SECTION.search(text):
            continue
        try:
            parsed = docstring_parser.parse(_SIGNATURE.sub("", text))
        except docstring_parser.ParseError:
            continue
        parameters = [
            Parameter(single, given.description.strip())
            for given in parsed.params
            if given.description and given.args[:1] not in (["attribute"], ["raises"])
            for single in [given.arg_name.strip("*- ")]
            if single.isidentifier()
        ]
        if parameters and parsed.description:
            yield Documented(f"{name}:{line}", parsed.description, tuple(parameters))


def _sentences(text: str, names: set[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The words and tags of each sentence of a paragraph."""
    text = _LINK.sub(r"\1", " ".join(text.split()))
    words, tags, at = [], [], 0
    for found in _MARKED.finditer(text):
        content = (found[2] or found[3]).strip()
        if found[3] and content not in names:
            continue
        plain = _WORD.findall(prose.plain(text[at : found.start()]))
        inside = _WORD.findall(content)
        kind = PARAMETER if content in names else CODE
        words += plain + inside
        tags += ["O"] * len(plain) + [f"{'I' if later else 'B'}-{kind}" for later in range(len(inside))]
        at = found.end()
    plain = _WORD.findall(prose.plain(text[at:]))
    words, tags = words + plain, tags + ["O"] * len(plain)
    following = [*words[1:], "A"]
    ends = [
        at
        for at, word in enumerate(words, 1)
        if word in (".", "!", "?") and tags[at - 1] == "O" and following[at - 1][0].isupper()
    ]
    for start, end in pairwise([0, *ends]):
        sentence = words[start:end]
        if 6 <= len(sentence) <= 50 and sentence[0][0].isalpha() and not _ODD.search(" ".join(sentence)):
            yield sentence, tags[start:end]


def _plain_sentences(text: str) -> list[str]:
    """The sentences of the first paragraph, without markup; the last ends with a full stop."""
    first = re.split(r"\n\s*\n|\n\s*[-*] |::\s", text.strip())[0]
    joined = prose.plain(_LINK.sub(r"\1", " ".join(first.split())))
    if joined[-1:].isalnum():
        joined += "."
    return [sentence for sentence in _SENTENCE_END.split(joined) if sentence]


def _reads_well(text: str, fewest: int, most: int) -> bool:
    words = text.split()
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return (
        fewest <= len(words) <= most
        and text[0].isalpha()
        and text[-1] in ".!?"
        and text.isascii()
        and letters >= 0.85 * len(text)
        and not _ODD.search(text)
    )


def _is_new(text: str, seen: set[str]) -> bool:
    """Whether no text that differs in names and numbers alone was seen; it counts as seen from now on."""
    key = prose.likeness(text)
    if key in seen:
        return False
    seen.add(key)
    return True
