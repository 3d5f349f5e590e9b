"""English demo corpus from docstrings of Python and of the installed packages."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import megaenc
from megaenc import flags
from megaenc.atomic_io import atomic_files, wait_for_lock
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.data.worker_pool import start_pool
from megaenc.dist_env import get_local_rank
from megaenc.errors import InputError, handle_command_errors
from megaenc.json_files import read_json_object
from megaenc.machine import usable_core_count
from megaenc.output_paths import create_parent_dir
from megaenc.processes import exit_on_sigterm

# Dependencies of this package, which are installed wherever it runs.
_PACKAGE_NAMES = """
    PIL awkward fontTools fsspec huggingface_hub jinja2 matplotlib megatron mpmath networkx numpy
    psutil pydantic pygments rich sympy tokenizers torch torchgen transformers typer tyro yaml
"""
_PACKAGES = _PACKAGE_NAMES.split()
# Tests hold little prose; vendored copies belong to other packages.
_EXCLUDED_DIRECTORIES = {
    "test",
    "tests",
    "testing",
    "idle_test",
    "site-packages",
    "_vendor",
    "lib2to3",
    "third_party",
}
_HELD_OUT_PERCENT = 2
CORPUS = "corpus.jsonl"
HELDOUT = "heldout.jsonl"
RECORD = "demo.json"
LOCK = ".demo.lock"
PARTS = ("python", "packages")
"""Parts of the corpus for blends: the documentation of Python's own library, and that of the
installed packages."""

_MOST_FREQUENT_WORDS = """
    a about after all also an and any are as at be been before but by can do does each for from has
    have how if in into is it its like made may more most must no not of on once one only or other
    over same set should since so some such than that the their them then there these they this to
    under up use used using was we when where which while will with you
"""
_STOP_WORDS = frozenset(_MOST_FREQUENT_WORDS.split())
_NEVER_IN_PROSE = re.compile(
    r"://|www\.|\\|>>>|==|[=-]>|[{}$|@`]|__|&&|<<|--|\.\.\.|\[~|%[rsd]|TODO|FIXME|XXX"
)
# Examples with their output, and a directive or two colons with the deeper lines that follow.
_EXAMPLE = re.compile(r"^ *(?:>>>|In \[|\$ |```).*(?:\n *\S.*)*", re.MULTILINE)
_LITERAL = re.compile(r"^( *)(\.\. .*|.*:):.*\n(?:\1 +.*\n|[ \t]*\n)*", re.MULTILINE)
# Underlines and tables, headings, and numpy's `name : type`.
_LAYOUT = re.compile(
    r"([=\-~^\"'`#*+.:_])\1{2,}|[|┌└│├╭╰]|\+[-=]|#+ |[A-Z][\w ]{2,30}:$|\.\. |[\w*, ]{1,60} : "
)
# A bullet, a field of reST, or Google's `name (type): ` before its description.
_START = re.compile(
    r"(?:[-*+•]|\(?(?:\d+|\w)[.)]) +"
    r"|[:@](?:param|arg|key|return|raise|throw|type|ivar|cvar|var)[^:]*:?\s*"
    r"|[`*]*[\w.*\[\]]+[`*]*(?: \(.*?\)(?=:))?: +(?=\S)"
)
_MARKUP = (
    (re.compile(r"!?\[([^\]\[]*)\]\([^()\s]*\)"), r"\1"),  # Markdown links
    # Code, reST roles and links.
    (re.compile(r"(?::[\w:+-]+:)?`+~?[.!]?([^`<>]+?)\s*(<[^`]*>)?`+_*"), r"\1"),
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"<(https?|mailto):[^>\s]*>|</?\w+[^<>]*>|\[\[(?=\w)|\]\]"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ([.,;:!?)])(?=\s|$)"), r"\1"),
)


@dataclass(frozen=True)
class DemoPaths:
    """Paths of a demo, whose files may be missing: text, tokenizer and corpus.

    `corpus` (for training) and `heldout` are JSONL files that share no paragraph, `tokenizer` is a
    directory, and `data_prefix` is the prefix of the preprocessed corpus, for --data-path.
    """

    corpus: Path
    heldout: Path
    tokenizer: Path
    data_prefix: Path
    """Prefix of the preprocessed corpus, for --data-path; written, like the tokenizer, only by
    `ensure_demo`."""

    @classmethod
    def in_directory(cls, directory: Path) -> "DemoPaths":
        """Return the fixed paths of a demo in `directory`, without looking for the files."""
        return cls(
            directory / CORPUS,
            directory / HELDOUT,
            directory / "tokenizer",
            directory / "corpus_text_document",
        )

    def part_prefix(self, part: str) -> Path:
        """Return the prefix of the preprocessed corpus of `part`, one of PARTS.

        These are "python" and "packages"; others are not refused. Only `ensure_demo` with that part
        in `parts` writes this corpus.
        """
        return self.corpus.parent / f"{part}_text_document"


@dataclass(frozen=True)
class DemoConfig:
    """Flag of `megaenc demo`: `output`, the corpus's directory, by default demo."""

    output: str = "demo"
    """Directory for corpus.jsonl and heldout.jsonl. An existing demo corpus is kept; other files of
    these names are refused."""


def build_demo_corpus(directory: str | Path, flag: str = "demo directory") -> DemoPaths:
    """Write the demo corpus into `directory` unless it exists, and return its paths.

    Each source file of Python and of megaenc's dependencies gives at most one document, the prose
    of its docstrings, with the id `package/path`, in sorted order; one in fifty, by a hash of its
    id, goes into heldout.jsonl, not corpus.jsonl. The same packages give the same bytes. demo.json
    records the hashes of both files. Progress is printed. Concurrent processes wait for the first.

    Args:
        flag: Source of `directory`, which is created, for errors.

    Raises:
        InputError: A file of these names is not a demo's, and stays, or one cannot be written.
    """
    directory = Path(directory)
    if built := find_demo_corpus(directory):
        return built
    create_parent_dir(directory / CORPUS, flag)
    with wait_for_lock(directory / LOCK):
        if built := find_demo_corpus(directory):  # another process may have built it meanwhile
            return built
        # Renamed in this order: no file exists without its record, and the corpus only with the
        # held-out documents.
        targets = [directory / name for name in (RECORD, HELDOUT, CORPUS)]
        with atomic_files(*targets, before_rename=lambda: find_demo_corpus(directory)) as (
            record,
            heldout,
            corpus,
        ):
            with (
                open(heldout, "w", encoding="utf-8") as held_out,
                open(corpus, "w", encoding="utf-8") as rest,
            ):
                for name, text in _extract_documents(sorted(_find_source_files())):
                    stream = held_out if is_held_out(name) else rest
                    stream.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
            facts = {"generator": "megaenc demo", "version": megaenc.__version__}
            facts["sha256"] = {HELDOUT: compute_sha256(heldout), CORPUS: compute_sha256(corpus)}
            record.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    size = sum((directory / name).stat().st_size for name in (HELDOUT, CORPUS)) / 1e6
    print_rank_0(f"{directory / CORPUS}: {size:.1f} MB of English from the installed packages")
    return DemoPaths.in_directory(directory)


def find_demo_corpus(directory: Path) -> DemoPaths | None:
    """Return the demo's paths in `directory`, or None if a JSONL file is missing.

    The tokenizer and the preprocessed corpus may be missing.

    Raises:
        InputError: `demo.json` is not of `megaenc demo`, or a JSONL file is there, even without the
            other one, that differs from it or is not listed there, as without `demo.json`.
    """
    # Listed before the record is read: a concurrent build writes the record first.
    present = [path for path in (directory / HELDOUT, directory / CORPUS) if os.path.lexists(path)]
    record = directory / RECORD
    hashes = {}
    if os.path.lexists(record):
        expected = "the record of a demo corpus; move the file or name another directory"
        content = read_json_object(record, expected)
        hashes = content.get("sha256")
        if content.get("generator") != "megaenc demo" or not isinstance(hashes, dict):
            raise InputError(
                f"{record}: found a file that `megaenc demo` did not write; expected {expected}"
            )
    for path in present:
        if (
            path.name not in hashes
            or path.is_symlink()
            or compute_sha256(path) != hashes[path.name]
        ):
            reason = "has changed since `megaenc demo` wrote it"
            if path.name not in hashes:
                reason = "is not of `megaenc demo` because it is not listed"
            reason = f"found a file that {reason} in {RECORD}"
            raise InputError(
                f"{path}: {reason}; expected no file, or the demo's own; "
                "move the file or name another directory"
            )
    return DemoPaths.in_directory(directory) if len(present) == 2 else None


def read_demo_documents(directory: Path) -> Iterable[tuple[str, str]]:
    """Return (id, text) of the demo documents that are not held out, in order.

    They are a list from `directory` or, if its corpus is missing or invalid (no error), an iterator
    that reads the installed packages with a progress line. Nothing is written.
    """
    with contextlib.suppress(InputError):  # foreign files
        if built := find_demo_corpus(directory):
            with open(built.corpus, encoding="utf-8") as stream:
                return [(record["id"], record["text"]) for record in map(json.loads, stream)]
    return (
        (name, text)
        for name, text in _extract_documents(sorted(_find_source_files()))
        if not is_held_out(name)
    )


def is_held_out(document_id: str) -> bool:
    """Return whether a demo document belongs to heldout.jsonl, by a hash of its id.

    These are 2 documents in 100.
    """
    digest = hashlib.sha256(document_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def find_demo_parts(
    prefixes: Iterable[str], directory: str | Path = "demo"
) -> tuple[str, ...] | None:
    """Return the parts of the demo (PARTS) that `prefixes`, or patterns of them, name.

    They are sorted; the prefix of the whole corpus adds none. None if one of `prefixes` names no
    corpus of the demo in `directory`, which must be spelled as in `prefixes`. The files may be
    missing.
    """
    demo = DemoPaths.in_directory(Path(directory))
    parts = {demo.data_prefix: "", **{demo.part_prefix(part): part for part in PARTS}}
    named: set[str] = set()
    for prefix in prefixes:
        word = Path(prefix)
        matches = [
            part
            for path, part in parts.items()
            if word.parent == path.parent and fnmatch(path.name, word.name)
        ]
        if not matches:
            return None
        named |= {part for part in matches if part}
    return tuple(sorted(named))


def ensure_demo(
    directory: str | Path = "demo", vocab_size: int = 8192, parts: Sequence[str] = ()
) -> DemoPaths:
    """Build what a demo lacks of text, tokenizer and corpora, and return its paths.

    Every rank may call it: the first of each machine builds, and the others wait for its corpora
    without a time limit, even if it fails. Other concurrent processes wait for the first.

    Args:
        vocab_size: Number of token ids, special tokens included.
        parts: Those of PARTS for which a corpus of their own is built too.

    Raises:
        InputError: The demo has another vocabulary size, or files of its names are not a demo's.
    """
    from megaenc.data.indexed.metadata import read_corpus_metadata
    from megaenc.data.preprocess.command import PreprocessConfig, preprocess
    from megaenc.data.tokenizer.train_command import TrainTokenizerConfig, train_and_save_tokenizer

    directory = Path(directory)
    demo = DemoPaths.in_directory(directory)
    last_file = Path(f"{demo.data_prefix}.idx")  # renamed last of the three files
    if find_demo_corpus(directory) is None:  # refuses foreign files before anything is written
        for path in (demo.tokenizer, last_file):
            if os.path.lexists(path):
                raise InputError(
                    f"{path}: found a file that `megaenc demo` did not make, "
                    "for its corpus is missing; expected no file; "
                    "move the file or name another directory"
                )
    if get_local_rank():  # only the first process of each machine builds
        while not all(
            Path(f"{prefix}.idx").exists()
            for prefix in (demo.data_prefix, *map(demo.part_prefix, parts))
        ):
            time.sleep(0.2)
    build_demo_corpus(directory)
    with wait_for_lock(directory / LOCK):
        if not demo.tokenizer.exists():
            train_and_save_tokenizer(
                TrainTokenizerConfig(
                    input=(str(demo.corpus),), output=str(demo.tokenizer), vocab_size=vocab_size
                )
            )
        if not last_file.exists():
            preprocess(
                PreprocessConfig(
                    (str(demo.corpus),),
                    str(directory / "corpus"),
                    str(demo.tokenizer),
                    append_eod=True,
                )
            )
        for part in parts:
            if not Path(f"{demo.part_prefix(part)}.idx").exists():
                with tempfile.TemporaryDirectory(prefix=".", dir=directory) as temporary:
                    text = Path(temporary) / f"{part}.jsonl"
                    with (
                        open(demo.corpus, encoding="utf-8") as lines,
                        open(text, "w", encoding="utf-8") as of_part,
                    ):
                        for line in lines:
                            if json.loads(line)["id"].startswith("python/") == (part == "python"):
                                of_part.write(line)
                    preprocess(
                        PreprocessConfig(
                            (str(text),),
                            str(directory / part),
                            str(demo.tokenizer),
                            append_eod=True,
                        )
                    )
        vocabulary_size = read_corpus_metadata(demo.data_prefix).vocab_size
        if vocabulary_size != vocab_size:
            raise InputError(
                f"{directory}: holds a demo of {vocabulary_size} token ids, expected {vocab_size}; "
                "remove it or name another directory"
            )
    return demo


def _find_source_files() -> Iterator[tuple[str, str]]:
    """Yield (document id, path) of the Python files of the library and the packages."""
    roots = [("python", sysconfig.get_path("stdlib"))]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += [
            (package, directory) for directory in (spec and spec.submodule_search_locations) or ()
        ]
    for package, directory in roots:
        for path in Path(directory).rglob("*.py"):
            inner = path.relative_to(directory)
            if (
                not _EXCLUDED_DIRECTORIES.intersection(inner.parts)
                and path.is_file()
                and os.access(path, os.R_OK)
            ):
                yield f"{package}/{inner.as_posix()}", str(path)


def _extract_documents(sources: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (id, text) in the order of `sources`, each paragraph only once.

    A paragraph with the similarity key of an earlier one is left out.
    """
    known_keys: set[str] = set()
    for (name, _), paragraphs in zip(
        sources, map_source_files(_read_paragraphs, sources, "reading documentation"), strict=True
    ):
        fresh: dict[str, str] = {}
        for paragraph, key in paragraphs:
            if key not in known_keys:
                fresh.setdefault(key, paragraph)
        known_keys.update(fresh)
        text = "\n\n".join(fresh.values())
        if len(text) >= 200:
            yield name, text


def map_source_files(
    read: Callable[[Any], Any], sources: Sequence[tuple[str, str]], label: str
) -> Iterator[Any]:
    """Yield `read(source)` for each of `sources`, in order, with a progress line.

    Exceptions of `read` are raised here.

    Args:
        read: Function that pickles, called in one process per core.
        sources: (document id, path) of each file.
        label: Name of the progress line.
    """
    with (
        start_pool(read, usable_core_count()) as read_all,
        ProgressLine(label, len(sources)) as progress,
    ):
        for count, result in enumerate(read_all(sources), 1):
            yield result
            progress.update(count)


def _read_paragraphs(source: tuple[str, str]) -> list[tuple[str, str]]:
    """Return (English paragraph, similarity key) of the strings in a source file.

    `source` is (document id, path).
    """
    code = Path(source[1]).read_text(encoding="utf-8", errors="replace")
    return [
        (paragraph, similarity_key(paragraph))
        for _, text in find_long_strings(code)
        for paragraph in extract_paragraphs(text)
    ]


def find_long_strings(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of each string literal of 60 characters or more, sorted.

    `source` is Python code, and lines count from 1. `text` is the value of the literal; the pieces
    of an f-string around its fields are literals of their own. The list is empty if `source` is not
    valid code.
    """
    try:
        constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return sorted(
        (node.lineno, node.value)
        for node in constants
        if isinstance(node.value, str) and len(node.value) >= 60
    )


def extract_paragraphs(text: str) -> Iterator[str]:
    """Yield the English paragraphs of a docstring, reST or Markdown text.

    Each is one line without markup that `is_english_prose`; a missing full stop is added. A list
    item or the description of a parameter is a paragraph, without its bullet or name. Code,
    headings and tables are left out.
    """
    text = _EXAMPLE.sub("", inspect.cleandoc(text.expandtabs(4)))
    text = _LITERAL.sub(
        lambda match: "\n" if match[2].startswith("..") else f"{match[1]}{match[2]}\n\n",
        text + "\n",
    )
    block = []
    indent = 0
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        depth = len(line) - len(line.lstrip())
        is_layout = not bare or _LAYOUT.match(bare)
        start = None
        if not block or depth <= indent:
            start = _START.match(bare)
        continues = abs(depth - indent) <= 1 or (
            len(block) == 1 and depth > indent and len(block[0].split()) > 3
        )
        if block and (is_layout or start or not continues):
            joined = strip_markup(" ".join(block))
            joined += "." * joined[-1:].isalpha()  # short descriptions often lack a full stop
            if is_english_prose(joined):
                yield joined
            block = []
        if not is_layout:
            block.append(bare[start.end() :] if start else bare)
        indent = depth


def strip_markup(text: str) -> str:
    """Return `text` on one line without reST, Markdown and HTML markup.

    The words of links, code and emphasis stay.
    """
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def is_english_prose(text: str) -> bool:
    """Return whether `text` looks like English prose and not like code.

    `text` is one paragraph without markup. It is judged by length (8 words or more), case, final
    sign, letters and stop words.
    """
    words = [word.strip(".,;:!?()\"'[]") for word in text.split()]
    count = len(words)
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return (
        count >= 8
        and text.lstrip("\"'")[:1].isupper()
        and text[-1] in ".!?:)\"'"
        and not _NEVER_IN_PROSE.search(text)
        and sum(word.replace("-", "").replace("'", "").isalpha() for word in words) >= 0.85 * count
        and sum(word.lower() in _STOP_WORDS for word in words) >= 0.25 * count
        and 0.9 * len(text) <= letters
    )


def similarity_key(paragraph: str) -> str:
    """Return a key that is equal for near-duplicate paragraphs.

    It has the words in lower case, without punctuation around them, and `_` for each word that has
    other characters than letters or a capital after the first: numbers, identifiers, acronyms,
    hyphens, apostrophes, and punctuation on its own.
    """
    words = (word.strip(".,;:!?()\"'[]") for word in paragraph.split())
    return " ".join(
        word.lower() if word.isalpha() and word[1:] == word[1:].lower() else "_" for word in words
    )


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc demo`: write the demo corpus into --output unless it exists.

    No tokenizer is trained, see `ensure_demo`. `argv` are the flags; None: those of this process.
    Wrong input exits with 2.
    """
    silence_libraries()
    settings = flags.parse(DemoConfig, argv, prog="megaenc demo", description=__doc__)
    with exit_on_sigterm():
        build_demo_corpus(settings.output, "--output")
