"""Labelled data of all four families without any download: from the quickstart's corpus and the documentation it comes from."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_dir, atomic_write, exit_on_sigterm, wait_for_lock
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data import demo as corpus_demo
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.examples import SplitName
from megaenc.output_paths import create_parent_dir

DEMO_DATASETS = ("demo_sc", "demo_tc", "demo_qa", "demo_ir")
_SIZES: dict[SplitName, int] = {"train": 6000, "validation": 500, "test": 500}
_QUESTIONS = ("What is the parameter {}?", "What does {} do?", "What is {} for?", "How is {} described?")

_SECTION = re.compile(r"^\s*(Parameters\n\s*-{3,}|(Args|Arguments|Params|Parameters):|:param )", re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n\s*[-*] |::\s")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_MARKED_CODE = re.compile(r"(?::[\w:+-]+:)?`{1,2}[~.!]?([^`<>]{1,60})`{1,2}")  # as documentation marks names and values
_WORD = re.compile(r"[A-Za-z_]\w*(?:[.'-]\w+)*|\d+(?:\.\d+)?|\S")
_UNCLEAN = re.compile(r"[\\{}|`~$^<>#@]|\.\.|::|__|https?|[^ -~]")

DocumentedFunction = tuple[str, str, dict[str, str]]
"""A function's or class's id (`package/path:line`), its description, and that of each parameter, with their markup."""


@dataclass(frozen=True)
class DemoDatasetsConfig:
    """What `megaenc finetune demo` takes."""

    output: str = "demo/finetune"
    """folder of demo_sc, demo_tc, demo_qa and demo_ir; sets that it holds are kept. Nothing is written outside it; if the folder
    above it holds the quickstart's corpus, that is read instead of the installed packages"""


def ensure_demo_datasets(
    folder: str | Path = "demo/finetune", names: Sequence[str] = DEMO_DATASETS, flag: str = "demo folder"
) -> Path:
    """Make in `folder` what is missing of the sets `names`, in the formats that everybody's own data have; return the folder.

    The three of documentation come together. The same packages give the same bytes. Processes that call it together wait for the
    first. Raises InputError for a folder that cannot be written to, or a file in the place of a set.
    """
    folder = Path(folder)
    if all(os.path.isdir(folder / name) for name in names):
        return folder
    names = [name for name in DEMO_DATASETS if name in names or (name != "demo_sc" and {*names} != {"demo_sc"})]
    for path in (folder / name for name in names):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise InputError(f"{path}: found a file; expected the folder of a demo set; move it or name another folder")
    create_parent_dir(folder / "demo_sc", flag)
    with wait_for_lock(folder / corpus_demo.LOCK):
        missing = [name for name in names if not (folder / name).is_dir()]  # another process may have made them meanwhile
        if missing:
            print_rank_0(f"{folder}: {', '.join(missing)} will be made, once, of what is installed: some minutes")
        documentation = read_documentation() if {*missing} - {"demo_sc"} else []
        for name in missing:
            read, what = _BUILDERS[name]
            chosen = _sample_splits(read(corpus_demo.read_demo_documents(folder.parent) if name == "demo_sc" else documentation))
            with atomic_dir(folder / name) as made:
                _write_dataset(made, chosen)
            print_rank_0(f"{folder / name}: {what}: " + ", ".join(f"{len(rows):,} {split}" for split, rows in chosen.items()))
    return folder


def read_documentation() -> list[DocumentedFunction]:
    """Return what the packages of the demo corpus document with parameters, in order; nothing is imported or run."""
    files = corpus_demo.map_source_files(
        _parse_documented_functions, sorted(corpus_demo._find_source_files()), "reading what parameters are"
    )
    return [entry for entries in files for entry in entries]


def _parse_documented_functions(source: tuple[str, str]) -> list[DocumentedFunction]:
    """Return what a source file, (id, path), documents."""
    import docstring_parser

    code = Path(source[1]).read_text(encoding="utf-8", errors="replace")
    found = []
    for line, text in corpus_demo.find_long_strings(code) if _SECTION.search(code) else ():
        try:
            parsed = docstring_parser.parse(text) if _SECTION.search(text) else None
        except docstring_parser.ParseError:
            continue
        if parsed and parsed.description:
            given = {each.arg_name.strip("*- "): each.description.strip() for each in parsed.params if each.description}
            if given := {name: text for name, text in given.items() if name.isidentifier()}:
                found.append((f"{source[0]}:{line}", parsed.description, given))
    return found


def build_classification_rows(documents: Iterable[tuple[str, str]]) -> Iterator[dict]:
    """Yield the paragraphs of the demo corpus with their packages: {"source", "id", "text", "label"}."""
    for source, document in documents:
        for number, text in enumerate(document.split("\n\n")):
            if 10 <= len(text.split()) <= 100:
                yield {"source": source, "id": f"{source}-{number}", "text": text, "label": source.split("/")[0]}


def build_tagging_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield sentences in which a parameter is marked, without the marks: {"source", "id", "tokens", "tags"}, in IOB2."""
    seen: set[str] = set()
    for source, description, parameters in documentation:
        paragraphs = (part for text in (description, *parameters.values()) for part in _PARAGRAPH_END.split(text))
        sentences = (part for text in paragraphs for part in _SENTENCE_END.split(" ".join(text.split())))
        for number, sentence in enumerate(sentences):
            words, tags = [], []
            for at, part in enumerate(_MARKED_CODE.split(sentence)):  # every second part is a marked one
                inside = _WORD.findall(part if at % 2 else corpus_demo.strip_markup(part))
                kind = "PARAM" if part in parameters else "CODE"
                words += inside
                tags += [f"{'I' if later else 'B'}-{kind}" if at % 2 else "O" for later in range(len(inside))]
            if "B-PARAM" in tags and 6 <= len(words) <= 50 and _register_new_text(" ".join(words), seen):
                yield {"source": source, "id": f"{source}-{number}", "tokens": words, "tags": tags}


def build_question_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield {"source", "id", "question", "context", "answers"}: the sentence that describes one of a function's parameters."""
    seen: set[str] = set()
    for source, _, parameters in documentation:
        described = {name: _split_clean_sentences(text)[:2] for name, text in list(parameters.items())[:5]}
        described = {name: found for name, found in described.items() if found and _register_new_text(found[0], seen)}
        context = "\n".join(f"{name}: {' '.join(found)}" for name, found in described.items())
        for name, (answer, *_) in described.items():
            start = f"\n{context}".index(f"\n{name}: ") + len(name) + 2
            question = _QUESTIONS[_hash_to_int(f"{source} {name}") % len(_QUESTIONS)].format(name)
            asked = {"question": question, "context": context, "answers": {"text": [answer], "answer_start": [start]}}
            yield {"source": source, "id": f"{source}-{name}", **asked}


def build_retrieval_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield {"source", "id", "query", "document"}: the sentence that sums a function up, and what else is written about it."""
    seen: set[str] = set()
    for source, description, parameters in documentation:
        paragraphs = [part for text in (description, *parameters.values()) for part in text.split("\n\n")]
        query, *rest = [
            part for text in paragraphs for part in _split_clean_sentences(text) if _register_new_text(part, seen)
        ] or [""]
        document = " ".join(rest[:6])
        if len(document.split()) >= 12:
            yield {"source": source, "id": source, "query": query, "document": document}


_BUILDERS = {
    "demo_sc": (build_classification_rows, "which package a paragraph comes from"),
    "demo_tc": (build_tagging_rows, "names of parameters, and other code, in documentation"),
    "demo_qa": (build_question_rows, "the sentence that describes a parameter"),
    "demo_ir": (build_retrieval_rows, "the description that belongs to a summary"),
}


def _split_clean_sentences(text: str) -> list[str]:
    """Return those sentences of the first paragraph that read well, without markup; the last one ends with a full stop."""
    joined = corpus_demo.strip_markup(" ".join(_PARAGRAPH_END.split(text.strip())[0].split()))
    joined += "." * joined[-1:].isalnum()
    found = [part for part in _SENTENCE_END.split(joined) if part[:1].isalpha() and part[-1] in ".!?"]
    return [part for part in found if 4 <= len(part.split()) <= 40 and not _UNCLEAN.search(part)]


def _register_new_text(text: str, seen: set[str]) -> bool:
    """Return whether `text` reads well and differs from all `seen` in more than names and numbers; it counts as seen then."""
    key = corpus_demo.similarity_key(text)
    is_new = key not in seen and text[:1].isalpha() and not _UNCLEAN.search(text)
    seen.add(key)
    return is_new


def _sample_splits(examples: Iterable[dict]) -> dict[SplitName, list[dict]]:
    """Return the examples of each split, a source's in one split; of the most frequent labels, as many of each."""
    chosen: dict[SplitName, list[dict]] = {split: [] for split in _SIZES}
    for example in sorted(examples, key=lambda row: _hash_to_int(row["id"])):
        tenth = _hash_to_int(f"split {example.pop('source')}") % 10  # a fixed choice
        chosen["test" if tenth == 0 else "validation" if tenth == 1 else "train"].append(example)
    labels = [label for label, _ in Counter(row.get("label") for row in chosen["test"]).most_common(8)]
    if len(labels) < 2 and labels != [None]:
        raise InputError(f"found paragraphs of {len(labels)} packages in the demo corpus; expected at least 2")
    for split, size in _SIZES.items():
        by_label = [[row for row in chosen[split] if row.get("label") == label] for label in labels]
        each = min(-(-size // len(labels)), *map(len, by_label))
        chosen[split] = sorted((row for rows in by_label for row in rows[:each]), key=lambda row: _hash_to_int(row["id"]))
    return chosen


def _hash_to_int(text: str) -> int:
    """Return a number that the text alone decides, for choices that are to look random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _write_dataset(folder: Path, chosen: dict[str, list[dict]]) -> None:
    """Write JSONL files, one for each of `chosen` by its name; queries with their documents in BEIR's layout."""
    files, rows = chosen, [row for rows in chosen.values() for row in rows]
    if "query" in rows[0]:
        texts = {"corpus": "document", "queries": "query"}
        files = {name: [{"_id": row["id"], "text": row[key]} for row in rows] for name, key in texts.items()}
        (folder / "qrels").mkdir()
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
            lines = "".join(f"{row['id']}\t{row['id']}\t1\n" for row in chosen[split])
            atomic_write(folder / "qrels" / f"{name}.tsv", "query-id\tcorpus-id\tscore\n" + lines)
    for name, rows in files.items():
        atomic_write(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune demo`."""
    silence_libraries()
    settings = flags.parse(DemoDatasetsConfig, argv, prog="megaenc finetune demo", description=__doc__)
    with exit_on_sigterm():
        ensure_demo_datasets(settings.output, flag="--output")
