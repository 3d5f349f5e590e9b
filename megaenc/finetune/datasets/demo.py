"""Write four small labelled data sets (`megaenc finetune demo`).

Installed packages are their source, so nothing is downloaded.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_dir, atomic_write, wait_for_lock
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data import demo as corpus_demo
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.examples import SplitName
from megaenc.output_paths import create_parent_dir
from megaenc.processes import exit_on_sigterm

DEMO_DATASETS = ("demo_sc", "demo_tc", "demo_qa", "demo_ir")
_SIZES: dict[SplitName, int] = {"train": 6000, "validation": 500, "test": 500}
_QUESTIONS = (
    "What is the parameter {}?",
    "What does {} do?",
    "What is {} for?",
    "How is {} described?",
)

_SECTION = re.compile(
    r"^\s*(Parameters\n\s*-{3,}|(Args|Arguments|Params|Parameters):|:param )", re.MULTILINE
)
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n\s*[-*] |::\s")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Code in reStructuredText or Markdown.
_MARKED_CODE = re.compile(r"(?::[\w:+-]+:)?`{1,2}[~.!]?([^`<>]{1,60})`{1,2}")
_WORD = re.compile(r"[A-Za-z_]\w*(?:[.'-]\w+)*|\d+(?:\.\d+)?|\S")
_UNCLEAN = re.compile(r"[\\{}|`~$^<>#@]|\.\.|::|__|https?|[^ -~]")

DocumentedFunction = tuple[str, str, dict[str, str]]
"""Id (`package/path:line`), description and parameter descriptions, with markup, of a documented
function or class."""


@dataclass(frozen=True)
class DemoDatasetsConfig:
    """Options of `megaenc finetune demo`: the directory of the four demo data sets.

    `output`, the only field, is a flag, by default demo/finetune. Sets that exist there are kept.
    demo_sc is built from the quickstart's corpus if the parent directory has it, otherwise from the
    installed packages, as the other three always are.
    """

    output: str = "demo/finetune"
    """directory for demo_sc, demo_tc, demo_qa and demo_ir; existing sets are kept. If its parent
    directory holds the quickstart's corpus, demo_sc is built from that, else from the installed
    packages"""


def ensure_demo_datasets(
    directory: str | Path = "demo/finetune",
    names: Sequence[str] = DEMO_DATASETS,
    flag: str = "demo directory",
) -> Path:
    """Write demo data sets that are missing in `directory`; return it as a Path.

    It takes minutes. If `names` has demo_tc, demo_qa or demo_ir, all three are written. demo_sc
    is built from a demo corpus in the parent directory, the others, and demo_sc without that
    corpus, from installed packages. Concurrent processes wait. Existing sets are not checked.

    Args:
        names: Names of DEMO_DATASETS to write.
        flag: Words before the path in the error that `directory` cannot be created.

    Raises:
        InputError: It cannot be created, a file is at the path of a set, or packages are too few.
    """
    directory = Path(directory)
    if all(os.path.isdir(directory / name) for name in names):
        return directory
    names = [
        name
        for name in DEMO_DATASETS
        if name in names or (name != "demo_sc" and {*names} != {"demo_sc"})
    ]
    for path in (directory / name for name in names):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise InputError(
                f"{path}: found a file; expected the directory of a demo set; "
                "move it or name another directory"
            )
    create_parent_dir(directory / "demo_sc", flag)
    with wait_for_lock(directory / corpus_demo.LOCK):
        # Another process may have written them meanwhile.
        missing = [name for name in names if not (directory / name).is_dir()]
        if missing:
            print_rank_0(
                f"{directory}: building {', '.join(missing)} from installed packages, once; "
                "takes some minutes"
            )
        documentation = read_documentation() if {*missing} - {"demo_sc"} else []
        for name in missing:
            read, description = _BUILDERS[name]
            splits = _sample_splits(
                read(
                    corpus_demo.read_demo_documents(directory.parent)
                    if name == "demo_sc"
                    else documentation
                )
            )
            with atomic_dir(directory / name) as temporary_directory:
                _write_dataset(temporary_directory, splits)
            print_rank_0(
                f"{directory / name}: {description}: "
                + ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
            )
    return directory


def read_documentation() -> list[DocumentedFunction]:
    """Return functions and classes of installed packages that describe parameters.

    The packages are those of the demo corpus. Entries are tuples (id, description, parameter
    descriptions by name), sorted by source file. A process per core reads the files; a progress
    line is shown.
    """
    files = corpus_demo.map_source_files(
        _parse_documented_functions,
        sorted(corpus_demo._find_source_files()),
        "reading what parameters are",
    )
    return [entry for entries in files for entry in entries]


def _parse_documented_functions(source: tuple[str, str]) -> list[DocumentedFunction]:
    """Parse the docstrings of a source file (id, path) that describe parameters."""
    import docstring_parser

    code = Path(source[1]).read_text(encoding="utf-8", errors="replace")
    functions = []
    for line, text in corpus_demo.find_long_strings(code) if _SECTION.search(code) else ():
        try:
            parsed = docstring_parser.parse(text) if _SECTION.search(text) else None
        except docstring_parser.ParseError:
            continue
        if parsed and parsed.description:
            descriptions = {
                parameter.arg_name.strip("*- "): parameter.description.strip()
                for parameter in parsed.params
                if parameter.description
            }
            if descriptions := {
                name: text for name, text in descriptions.items() if name.isidentifier()
            }:
                functions.append((f"{source[0]}:{line}", parsed.description, descriptions))
    return functions


def build_classification_rows(documents: Iterable[tuple[str, str]]) -> Iterator[dict]:
    """Yield a row per paragraph of 10 to 100 words of the documents.

    Paragraphs are separated by an empty line. A row has "source", "id", "text" and "label", which
    is the package, the part of the source before its first `/`.

    Args:
        documents: (source, text) pairs.
    """
    for source, document in documents:
        for paragraph_index, text in enumerate(document.split("\n\n")):
            if 10 <= len(text.split()) <= 100:
                yield {
                    "source": source,
                    "id": f"{source}-{paragraph_index}",
                    "text": text,
                    "label": source.split("/")[0],
                }


def build_tagging_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield a row per sentence of 6 to 50 tokens that names a parameter.

    Sentences are left out if they do not begin with a letter, have unusual characters, or differ
    from an earlier one only in numbers and identifiers. A row has "source", "id", "tokens" and
    "tags", which are IOB2 of PARAM and CODE.

    Args:
        documentation: Result of `read_documentation`.
    """
    seen_texts: set[str] = set()
    for source, description, parameters in documentation:
        paragraphs = (
            part
            for text in (description, *parameters.values())
            for part in _PARAGRAPH_END.split(text)
        )
        sentences = (
            part for text in paragraphs for part in _SENTENCE_END.split(" ".join(text.split()))
        )
        for sentence_index, sentence in enumerate(sentences):
            words = []
            tags = []
            for part_index, part in enumerate(_MARKED_CODE.split(sentence)):  # odd parts are code
                if part_index % 2:
                    kind = "PARAM" if part in parameters else "CODE"
                    inside = _WORD.findall(part)
                    tags += [f"{'I' if later else 'B'}-{kind}" for later in range(len(inside))]
                else:
                    inside = _WORD.findall(corpus_demo.strip_markup(part))
                    tags += ["O"] * len(inside)
                words += inside
            if (
                "B-PARAM" in tags
                and 6 <= len(words) <= 50
                and _register_new_text(" ".join(words), seen_texts)
            ):
                yield {
                    "source": source,
                    "id": f"{source}-{sentence_index}",
                    "tokens": words,
                    "tags": tags,
                }


def build_question_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield a row per parameter, of the first 5 of each function.

    The answer is the first clean sentence (4 to 40 words, no URL and no characters of code) of the
    first paragraph of the parameter's description. A parameter is left out if it has none, or one
    that differs from an earlier one only in numbers and identifiers. A row has "source", "id",
    "question", "context" and "answers" (`text` and `answer_start`, as in SQuAD).

    Args:
        documentation: Result of `read_documentation`.
    """
    seen_texts: set[str] = set()
    for source, _, parameters in documentation:
        described = {
            name: _split_clean_sentences(text)[:2] for name, text in list(parameters.items())[:5]
        }
        described = {
            name: sentences
            for name, sentences in described.items()
            if sentences and _register_new_text(sentences[0], seen_texts)
        }
        context = "\n".join(
            f"{name}: {' '.join(sentences)}" for name, sentences in described.items()
        )
        for name, (answer, *_) in described.items():
            start = f"\n{context}".index(f"\n{name}: ") + len(name) + 2
            question = _QUESTIONS[_hash_to_int(f"{source} {name}") % len(_QUESTIONS)].format(name)
            row = {
                "question": question,
                "context": context,
                "answers": {"text": [answer], "answer_start": [start]},
            }
            yield {"source": source, "id": f"{source}-{name}", **row}


def build_retrieval_rows(documentation: Iterable[DocumentedFunction]) -> Iterator[dict]:
    """Yield a row per function: a sentence as query, up to 6 more as document.

    Sentences are the clean ones (see `build_question_rows`) of the description, then of the
    parameters; one that differs from an earlier one only in numbers and identifiers is skipped. A
    row has "source", "id", "query" and "document". A function whose document has fewer than 12
    words has no row.

    Args:
        documentation: Result of `read_documentation`.
    """
    seen_texts: set[str] = set()
    for source, description, parameters in documentation:
        paragraphs = [
            part for text in (description, *parameters.values()) for part in text.split("\n\n")
        ]
        query, *rest = [
            part
            for text in paragraphs
            for part in _split_clean_sentences(text)
            if _register_new_text(part, seen_texts)
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
    """Split the first paragraph of `text` into sentences without markup.

    Unclean, short and long ones are dropped.
    """
    joined = corpus_demo.strip_markup(" ".join(_PARAGRAPH_END.split(text.strip())[0].split()))
    joined += "." * joined[-1:].isalnum()
    sentences = [
        part for part in _SENTENCE_END.split(joined) if part[:1].isalpha() and part[-1] in ".!?"
    ]
    return [
        part for part in sentences if 4 <= len(part.split()) <= 40 and not _UNCLEAN.search(part)
    ]


def _register_new_text(text: str, seen_texts: set[str]) -> bool:
    """Add the normalized `text` to `seen_texts`; return whether it is new and clean.

    A new text differs from others in more than names and numbers.
    """
    key = corpus_demo.similarity_key(text)
    is_new = key not in seen_texts and text[:1].isalpha() and not _UNCLEAN.search(text)
    seen_texts.add(key)
    return is_new


def _sample_splits(examples: Iterable[dict]) -> dict[SplitName, list[dict]]:
    """Sample balanced rows of the most frequent labels for each split.

    All rows of a source are in one split.
    """
    splits: dict[SplitName, list[dict]] = {split: [] for split in _SIZES}
    for example in sorted(examples, key=lambda row: _hash_to_int(row["id"])):
        tenth = _hash_to_int(f"split {example.pop('source')}") % 10  # a fixed choice
        splits[{0: "test", 1: "validation"}.get(tenth, "train")].append(example)
    labels = [
        label for label, _ in Counter(row.get("label") for row in splits["test"]).most_common(8)
    ]
    if len(labels) < 2 and labels != [None]:
        raise InputError(
            f"found paragraphs of {len(labels)} packages in the demo corpus; expected at least 2"
        )
    for split, size in _SIZES.items():
        by_label = [[row for row in splits[split] if row.get("label") == label] for label in labels]
        label_size = min(-(-size // len(labels)), *map(len, by_label))
        splits[split] = sorted(
            (row for rows in by_label for row in rows[:label_size]),
            key=lambda row: _hash_to_int(row["id"]),
        )
    return splits


def _hash_to_int(text: str) -> int:
    """Hash `text` to a 64-bit integer, for pseudo-random choices."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _write_dataset(directory: Path, splits: dict[str, list[dict]]) -> None:
    """Write the rows of each split to a JSONL file; retrieval has BEIR's layout."""
    files = splits
    rows = [row for rows in splits.values() for row in rows]
    if "query" in rows[0]:
        texts = {"corpus": "document", "queries": "query"}
        files = {
            name: [{"_id": row["id"], "text": row[key]} for row in rows]
            for name, key in texts.items()
        }
        (directory / "qrels").mkdir()
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
            lines = "".join(f"{row['id']}\t{row['id']}\t1\n" for row in splits[split])
            atomic_write(
                directory / "qrels" / f"{name}.tsv", "query-id\tcorpus-id\tscore\n" + lines
            )
    for name, rows in files.items():
        atomic_write(
            directory / f"{name}.jsonl",
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune demo`: write the demo data sets that are missing.

    Wrong input exits with 2.

    Args:
        argv: Arguments after `megaenc finetune demo`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse(
        DemoDatasetsConfig, argv, prog="megaenc finetune demo", description=__doc__
    )
    with exit_on_sigterm():
        ensure_demo_datasets(settings.output, flag="--output")
