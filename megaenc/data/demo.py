"""A corpus of English prose without any download: the documentation of Python and of the packages installed beside this one."""

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import stat
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megaenc
from megaenc import flags
from megaenc.console import ProgressLine, quiet, say
from megaenc.data import prose
from megaenc.errors import InputError, one_line_errors
from megaenc.files import stopped_by_sigterm, wait_for_lock, whole_files
from megaenc.json_files import read_json_object
from megaenc.output_paths import make_parent
from megaenc.processes import Workers, usable_cores
from megaenc.ranks import local_rank

# What this package needs, and what that needs: installed wherever this runs.
_INSTALLED = """
    PIL awkward fontTools fsspec huggingface_hub jinja2 matplotlib megatron mpmath networkx numpy psutil pydantic pygments rich
    sympy tokenizers torch torchgen transformers typer tyro yaml
"""
_PACKAGES = _INSTALLED.split()
_STANDARD_LIBRARY = "python"
_CODE = (".py", ".pyi", ".h", ".cuh", ".hpp")
_TEXT = (".rst", ".md", ".txt")
# Tests say little in sentences; vendored copies belong to somebody else.
_LEFT_OUT = frozenset(
    ("test", "tests", "testing", "idle_test", "site-packages", "__pycache__", "_vendor", "node_modules", "lib2to3", "third_party")
)
_SMALLEST_DOCUMENT = 200  # characters
_HELD_OUT_PERCENT = 2
VOCAB_SIZE = 8192
CORPUS, HELDOUT, RECORD, LOCK = "corpus.jsonl", "heldout.jsonl", "demo.json", ".demo.lock"
_GENERATOR = "megaenc demo"


@dataclass(frozen=True)
class DemoCorpus:
    """Two JSONL files of {"id", "text"}; no paragraph is in both."""

    corpus: Path
    heldout: Path


@dataclass(frozen=True)
class Demo:
    """Everything that pretraining without any data of one's own needs."""

    corpus: Path
    heldout: Path
    tokenizer: Path
    """Hugging Face tokenizer folder."""
    data_prefix: Path
    """The preprocessed corpus, for --data-path."""


@dataclass(frozen=True)
class DemoFlags:
    """What `megaenc demo` takes."""

    output: str = "demo"
    """Folder of corpus.jsonl and heldout.jsonl. A demo corpus in it is kept; other files of these names are refused."""


def build_demo_corpus(folder: str | Path, flag: str = "demo folder") -> DemoCorpus:
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
        return _build(folder)


def find_demo_corpus(folder: Path) -> DemoCorpus | None:
    """Return the demo corpus in `folder`, or None if there is none or only the part that an interrupted build left.

    Raises InputError for files of these names that differ from the record, or have none.
    """
    return DemoCorpus(folder / CORPUS, folder / HELDOUT) if len(_recorded_files(folder)) == 2 else None


def write_record(path: Path, files: Mapping[str, Path]) -> None:
    """Write the record of a demo corpus to `path`: size and sha256 of each of `files`, by its final name."""
    facts = {name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for name, file in files.items()}
    record = {"generator": _GENERATOR, "version": megaenc.__version__, "files": facts}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def corpus_documents() -> Iterator[tuple[str, str]]:
    """Yield (id, text) of every document of the demo corpus that is not held out, in order, without writing a file."""
    return ((name, text) for name, text in _documents(sorted(_sources())) if not is_held_out(name))


def _build(folder: Path) -> DemoCorpus:
    """Do the work of `build_demo_corpus` under its lock."""
    if built := find_demo_corpus(folder):  # another process may have built it meanwhile
        return built
    sources = sorted(_sources())
    size, count, by_package = 0, 0, Counter()

    def remove_leftovers() -> None:
        for path in _recorded_files(folder):  # refuses files that have come meanwhile
            path.unlink()

    # Renamed in this order: no file is there without its record, and the corpus is there only if the held-out documents are.
    targets = [folder / name for name in (RECORD, HELDOUT, CORPUS)]
    with whole_files(*targets, last_look=remove_leftovers) as (record_path, heldout_path, corpus_path):
        with open(heldout_path, "w", encoding="utf-8") as heldout, open(corpus_path, "w", encoding="utf-8") as rest:
            for name, text in _documents(sources):
                stream = heldout if is_held_out(name) else rest
                stream.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
                length = len(text.encode())
                size, count = size + length, count + 1
                by_package[name.split("/")[0]] += length
        write_record(record_path, {HELDOUT: heldout_path, CORPUS: corpus_path})
    shares = ", ".join(f"{name} {length / 1e6:.1f}" for name, length in by_package.most_common(8))
    corpus = folder / CORPUS
    say(f"{corpus}: {size / 1e6:.1f} MB of English in {count:,} documents, from what is installed here (MB: {shares}, ...)")
    return DemoCorpus(corpus, folder / HELDOUT)


def _recorded_files(folder: Path) -> list[Path]:
    """Return those of the two corpus files that are in `folder`. Raises InputError unless each is as the record says."""
    # Listed before the record is read: a process that builds the corpus now writes the record first.
    present = [path for path in (folder / HELDOUT, folder / CORPUS) if os.path.lexists(path)]
    record, facts = folder / RECORD, {}
    expected = "the record of a demo corpus; move the file or name another folder"
    if os.path.lexists(record):
        content = read_json_object(record, expected)
        facts = content.get("files")
        if content.get("generator") != _GENERATOR or not isinstance(facts, dict):
            raise InputError(f"{record}: found a file that `megaenc demo` did not write; expected {expected}")
    for path in present:
        if not _is_unchanged(path, facts.get(path.name)):
            reason = f"has changed since `megaenc demo` wrote it ({RECORD})"
            if path.name not in facts:
                reason = f"is not of `megaenc demo`, which would have recorded it in {RECORD}"
            raise InputError(
                f"{path}: found a file that {reason}; expected no file, or the demo's own; move the file or name another folder"
            )
    return present


def _is_unchanged(path: Path, fact: Any) -> bool:
    """Return whether the regular file `path` has the size and the sha256 that the record's `fact` names."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not isinstance(fact, dict) or status.st_size != fact.get("bytes"):
            return False
        return _sha256(path) == fact.get("sha256")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_held_out(document_id: str) -> bool:
    """Whether the document goes to the held-out file: a fixed choice of 2 in 100."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100 < _HELD_OUT_PERCENT


def ensure_demo(folder: str | Path = "demo", vocab_size: int = VOCAB_SIZE) -> Demo:
    """Build in `folder` what is missing of corpus, tokenizer and preprocessed data, by the public commands' own functions.

    Processes that call it together wait for the first. Raises InputError if `folder` holds a demo of another vocabulary size, or
    a corpus that `megaenc demo` did not make.
    """
    from megaenc.data.preprocess import PreprocessFlags, preprocess
    from megaenc.data.sidecar import read_sidecar
    from megaenc.data.tokenizer_command import TokenizerFlags, make_tokenizer

    folder = Path(folder)
    demo = Demo(folder / CORPUS, folder / HELDOUT, folder / "tokenizer", folder / "corpus_text_document")
    if find_demo_corpus(folder) is None:  # refuses other files before the folder is made
        for path in (demo.tokenizer, Path(f"{demo.data_prefix}.idx")):
            if os.path.lexists(path):
                raise InputError(
                    f"{path}: found without the corpus of `megaenc demo`; expected no file; move it or name another folder"
                )
    make_parent(demo.corpus, "demo folder")
    last = Path(f"{demo.data_prefix}.idx")  # of the three files the last to get its name
    if local_rank():  # the first process of each machine builds, and says so
        while not last.exists():
            time.sleep(0.2)
    with wait_for_lock(folder / LOCK):
        _build(folder)
        if not demo.tokenizer.exists():
            make_tokenizer(TokenizerFlags(input=(str(demo.corpus),), output=str(demo.tokenizer), vocab_size=vocab_size))
        if not last.exists():
            preprocess(PreprocessFlags((str(demo.corpus),), str(folder / "corpus"), str(demo.tokenizer), append_eod=True))
        found = read_sidecar(demo.data_prefix).vocab_size
        if found != vocab_size:
            raise InputError(
                f"{folder}: holds a demo of {found} token ids, expected {vocab_size}; remove it or name another folder"
            )
    return demo


def _sources() -> Iterator[tuple[str, str]]:
    """(document id, path) of every file to read."""
    roots = {_STANDARD_LIBRARY: [Path(sysconfig.get_path("stdlib"))]}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots[package] = [Path(location) for location in spec.submodule_search_locations]
    for package, folders in roots.items():
        for folder in folders:
            for path in folder.rglob("*"):
                inner = path.relative_to(folder)
                if path.suffix in (*_CODE, *_TEXT) and not _LEFT_OUT.intersection(inner.parts) and path.is_file():
                    yield f"{package}/{inner.as_posix()}", str(path)
    # The long description and the licence of each distribution.
    distributions = importlib.metadata.packages_distributions()
    for name in sorted({name for package in roots for name in distributions.get(package, [])}):
        for file in importlib.metadata.files(name) or []:
            if ".dist-info/" in f"{file}" and (file.name == "METADATA" or "LICENSE" in file.name.upper()):
                yield f"{name}/{'/'.join(file.parts[1:])}", str(file.locate())


def _documents(sources: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(id, text) in the order of `sources`; paragraphs that differ from an earlier one in names or numbers alone are left out."""
    seen: set[str] = set()
    size = 0
    batches = list(_batches(sources))
    with Workers(_read, usable_cores()) as workers, ProgressLine("reading documentation", len(batches)) as progress:
        for done, (batch, files) in enumerate(zip(batches, workers.map(batches), strict=True), 1):
            for (name, _), found in zip(batch, files, strict=True):
                fresh = []
                for paragraph, key in found:
                    if key not in seen:
                        seen.add(key)
                        fresh.append(paragraph)
                text = "\n\n".join(fresh)
                if len(text) >= _SMALLEST_DOCUMENT:
                    size += len(text)
                    yield name, text
            progress.update(done, MB=round(size / 1e6, 1))


def _batches(sources: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The sources in runs of about a megabyte, so that the workers have alike to do."""
    batch, size = [], 0
    for source in sources:
        batch.append(source)
        size += os.path.getsize(source[1])
        if size > 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch


def _read(sources: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The paragraphs of each file with their likeness."""
    gc.disable()  # a syntax tree is a million objects and no cycle: looking for cycles costs a third of the time
    return [_read_file(path) for _, path in sources]


def _read_file(path: str) -> list[tuple[str, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    if path.endswith((".py", ".pyi")):
        found = prose.python_paragraphs(text)
    elif path.endswith(_CODE):
        found = prose.header_paragraphs(text)
    else:
        found = prose.paragraphs(text)
    return [(paragraph, prose.likeness(paragraph)) for paragraph in found]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc demo`."""
    quiet()
    settings = flags.parse(DemoFlags, argv, prog="megaenc demo", description=__doc__)
    with stopped_by_sigterm():
        build_demo_corpus(settings.output, "--output")
