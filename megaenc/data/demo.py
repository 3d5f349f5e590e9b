"""A corpus of English prose without any download: the documentation of Python and of the packages installed beside this one."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megaenc
from megaenc import flags
from megaenc.atomic_io import atomic_files, stopped_by_sigterm, wait_for_lock
from megaenc.console import ProgressLine, print_rank_0, quiet
from megaenc.data.preprocess.outputs import sha256_of
from megaenc.dist_env import local_rank
from megaenc.errors import InputError, one_line_errors
from megaenc.json_files import read_json_object
from megaenc.output_paths import make_parent
from megaenc.processes import Workers, usable_cores

# What this package needs, and what that needs: installed wherever this runs.
_INSTALLED = """
    PIL awkward fontTools fsspec huggingface_hub jinja2 matplotlib megatron mpmath networkx numpy psutil pydantic pygments rich
    sympy tokenizers torch torchgen transformers typer tyro yaml
"""
_PACKAGES = _INSTALLED.split()
# Tests say little in sentences; vendored copies belong to somebody else.
_LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "_vendor", "lib2to3", "third_party"}
_HELD_OUT_PERCENT = 2
CORPUS, HELDOUT, RECORD, LOCK = "corpus.jsonl", "heldout.jsonl", "demo.json", ".demo.lock"

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
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"<(https?|mailto):[^>\s]*>|</?\w+[^<>]*>|\[\[(?=\w)|\]\]"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ([.,;:!?)])(?=\s|$)"), r"\1"),
)


@dataclass(frozen=True)
class Demo:
    """Everything that pretraining without any data of one's own needs; no paragraph is in both JSONL files of {"id", "text"}."""

    corpus: Path
    heldout: Path
    tokenizer: Path
    data_prefix: Path
    """The preprocessed corpus, for --data-path; made, like the tokenizer, by `ensure_demo` only."""

    @classmethod
    def of(cls, folder: Path) -> "Demo":
        """Return the paths of the demo in `folder`."""
        return cls(folder / CORPUS, folder / HELDOUT, folder / "tokenizer", folder / "corpus_text_document")


@dataclass(frozen=True)
class DemoConfig:
    """What `megaenc demo` takes."""

    output: str = "demo"
    """Folder of corpus.jsonl and heldout.jsonl. A demo corpus in it is kept; other files of these names are refused."""


def build_demo_corpus(folder: str | Path, flag: str = "demo folder") -> Demo:
    """Write `corpus.jsonl`, `heldout.jsonl` and their record into `folder`, unless it holds a demo corpus.

    One document a source file, sorted by id (`package/path`); one in fifty, chosen by a hash of its id, is held out. The same
    packages give the same bytes. Processes that call it together wait for the first. Raises InputError, before anything is
    written, for files of these names that no call of this function wrote; `flag` names the source of `folder`.
    """
    folder = Path(folder)
    if built := find_demo_corpus(folder):
        return built
    make_parent(folder / CORPUS, flag)
    with wait_for_lock(folder / LOCK):
        if built := find_demo_corpus(folder):  # another process may have built it meanwhile
            return built
        # Renamed in this order: no file is there without its record, and the corpus is there only if the held-out documents are.
        targets = [folder / name for name in (RECORD, HELDOUT, CORPUS)]
        with atomic_files(*targets, last_look=lambda: find_demo_corpus(folder)) as (record, heldout, corpus):
            with open(heldout, "w", encoding="utf-8") as held_out, open(corpus, "w", encoding="utf-8") as rest:
                for name, text in _documents(sorted(_sources())):
                    stream = held_out if is_held_out(name) else rest
                    stream.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
            facts = {"generator": "megaenc demo", "version": megaenc.__version__}
            facts["sha256"] = {HELDOUT: sha256_of(heldout), CORPUS: sha256_of(corpus)}
            record.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    size = sum((folder / name).stat().st_size for name in (HELDOUT, CORPUS)) / 1e6
    print_rank_0(f"{folder / CORPUS}: {size:.1f} MB of English, from what is installed here")
    return Demo.of(folder)


def find_demo_corpus(folder: Path) -> Demo | None:
    """Return the demo corpus in `folder`, or None if there is none or only the part that an interrupted build left.

    Raises InputError for files of these names that differ from the record, or have none.
    """
    # Listed before the record is read: a process that builds the corpus now writes the record first.
    present = [path for path in (folder / HELDOUT, folder / CORPUS) if os.path.lexists(path)]
    record, hashes = folder / RECORD, {}
    if os.path.lexists(record):
        expected = "the record of a demo corpus; move the file or name another folder"
        content = read_json_object(record, expected)
        hashes = content.get("sha256")
        if isinstance(files := content.get("files"), dict):  # as earlier versions recorded it
            hashes = {name: entry.get("sha256") for name, entry in files.items() if isinstance(entry, dict)}
        if content.get("generator") != "megaenc demo" or not isinstance(hashes, dict):
            raise InputError(f"{record}: found a file that `megaenc demo` did not write; expected {expected}")
    for path in present:
        if path.name not in hashes or path.is_symlink() or sha256_of(path) != hashes[path.name]:
            foreign = "is not of `megaenc demo`, which would have recorded it"
            changed = "has changed since `megaenc demo` wrote it" if path.name in hashes else foreign
            found = f"found a file that {changed} in {RECORD}"
            raise InputError(f"{path}: {found}; expected no file, or the demo's own; move the file or name another folder")
    return Demo.of(folder) if len(present) == 2 else None


def corpus_documents(folder: Path) -> Iterable[tuple[str, str]]:
    """Return (id, text) of all documents in `folder`'s demo corpus or, if it holds none, of what would be one, in order."""
    with contextlib.suppress(InputError):  # somebody's own files
        if built := find_demo_corpus(folder):
            with open(built.corpus, encoding="utf-8") as stream:
                return [(record["id"], record["text"]) for record in map(json.loads, stream)]
    return ((name, text) for name, text in _documents(sorted(_sources())) if not is_held_out(name))


def is_held_out(document_id: str) -> bool:
    """Return whether the document goes to the held-out file: a fixed choice of 2 in 100."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100 < _HELD_OUT_PERCENT


def ensure_demo(folder: str | Path = "demo", vocab_size: int = 8192) -> Demo:
    """Build in `folder` what is missing of corpus, tokenizer and preprocessed data, by the public commands' own functions.

    Processes that call it together wait for the first. Raises InputError for a demo of another vocabulary size or foreign files.
    """
    from megaenc.data.indexed.metadata import read_sidecar
    from megaenc.data.preprocess.command import PreprocessConfig, preprocess
    from megaenc.data.tokenizer.train_command import TrainTokenizerConfig, make_tokenizer

    folder = Path(folder)
    demo = Demo.of(folder)
    last = Path(f"{demo.data_prefix}.idx")  # of the three files the last to get its name
    if find_demo_corpus(folder) is None:  # refuses other files before anything is made
        for path in (demo.tokenizer, last):
            if os.path.lexists(path):
                found = "found a file that `megaenc demo` did not make, for its corpus is missing"
                raise InputError(f"{path}: {found}; expected no file; move the file or name another folder")
    if local_rank():  # the first process of each machine builds, and says so
        while not last.exists():
            time.sleep(0.2)
    build_demo_corpus(folder)
    with wait_for_lock(folder / LOCK):
        if not demo.tokenizer.exists():
            make_tokenizer(TrainTokenizerConfig(input=(str(demo.corpus),), output=str(demo.tokenizer), vocab_size=vocab_size))
        if not last.exists():
            preprocess(PreprocessConfig((str(demo.corpus),), str(folder / "corpus"), str(demo.tokenizer), append_eod=True))
        found = read_sidecar(demo.data_prefix).vocab_size
        if found != vocab_size:
            hint = "remove it or name another folder"
            raise InputError(f"{folder}: holds a demo of {found} token ids, expected {vocab_size}; {hint}")
    return demo


def _sources() -> Iterator[tuple[str, str]]:
    """Yield (document id, path) of every file to read."""
    roots = [("python", sysconfig.get_path("stdlib"))]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += [(package, folder) for folder in (spec and spec.submodule_search_locations) or ()]
    for package, folder in roots:
        for path in Path(folder).rglob("*.py"):
            inner = path.relative_to(folder)
            if not _LEFT_OUT.intersection(inner.parts) and path.is_file() and os.access(path, os.R_OK):
                yield f"{package}/{inner.as_posix()}", str(path)


def _documents(sources: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (id, text) in the order of `sources`, without paragraphs that differ from an earlier one only in names or numbers."""
    seen: set[str] = set()
    for (name, _), found in zip(sources, read_sources(_paragraphs, sources, "reading documentation"), strict=True):
        fresh: dict[str, str] = {}
        for paragraph, key in found:
            if key not in seen:
                fresh.setdefault(key, paragraph)  # the first of those that are alike
        seen.update(fresh)
        text = "\n\n".join(fresh.values())
        if len(text) >= 200:
            yield name, text


def read_sources(read: Callable[[Any], Any], sources: Sequence[tuple[str, str]], label: str) -> Iterator[Any]:
    """Yield what `read` makes of each of `sources`, (id, path), in order, from as many processes as there are cores to use."""
    with Workers(read, usable_cores()) as workers, ProgressLine(label, len(sources)) as progress:
        for done, found in enumerate(workers.map(sources), 1):
            yield found
            progress.update(done)


def _paragraphs(source: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the paragraphs of a file with their likeness."""
    code = Path(source[1]).read_text(encoding="utf-8", errors="replace")
    return [(paragraph, likeness(paragraph)) for _, text in long_strings(code) for paragraph in paragraphs(text)]


def long_strings(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of the long strings of Python source, not only docstrings: compiled functions have theirs elsewhere."""
    try:
        constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return sorted((node.lineno, node.value) for node in constants if isinstance(node.value, str) and len(node.value) >= 60)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, reST or Markdown text that read as English sentences, without markup, in one line."""
    text = _EXAMPLE.sub("", inspect.cleandoc(text.expandtabs(4)))
    text = _LITERAL.sub(lambda found: "\n" if found[2].startswith("..") else f"{found[1]}{found[2]}\n\n", text + "\n")
    block, indent = [], 0
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
        and 0.9 * len(text) <= letters
    )


def likeness(paragraph: str) -> str:
    """Return a text that is equal for paragraphs which differ only in names, numbers and punctuation."""
    words = (word.strip(".,;:!?()\"'[]") for word in paragraph.split())
    return " ".join(word.lower() if word.isalpha() and word[1:] == word[1:].lower() else "_" for word in words)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc demo`."""
    quiet()
    settings = flags.parse(DemoConfig, argv, prog="megaenc demo", description=__doc__)
    with stopped_by_sigterm():
        build_demo_corpus(settings.output, "--output")
