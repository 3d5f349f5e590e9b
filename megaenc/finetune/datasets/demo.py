"""Labelled data of all four families without any download: from the quickstart's corpus and the documentation it comes from."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.console import quiet, say
from megaenc.data.demo import LOCK, corpus_documents, find_demo_corpus
from megaenc.errors import InputError, one_line_errors
from megaenc.files import stopped_by_sigterm, wait_for_lock, whole_folder, write_whole
from megaenc.finetune.datasets import documented
from megaenc.finetune.datasets.documented import CODE, PARAMETER, number_of
from megaenc.finetune.examples import SplitName
from megaenc.output_paths import make_parent

NAMES = ("demo_sc", "demo_tc", "demo_qa", "demo_ir")
_OF_DOCUMENTATION = NAMES[1:]
"""Made together: reading the documentation takes most of the time."""
_CLASSES = 8
_SIZES: dict[SplitName, int] = {"train": 6000, "validation": 500, "test": 500}
_FILES = {"train": "train", "validation": "valid", "test": "test"}


@dataclass(frozen=True)
class DemoSetFlags:
    """What `megaenc finetune demo` takes."""

    output: str = "demo/finetune"
    """folder of demo_sc, demo_tc, demo_qa and demo_ir; sets that it holds are kept. Nothing is written outside it; if the folder
    above it holds the quickstart's corpus, that is read instead of the installed packages"""


def ensure_demo_sets(folder: str | Path = "demo/finetune", names: Sequence[str] = NAMES, flag: str = "demo folder") -> Path:
    """Make in `folder` what is missing of the sets `names`, in the formats that everybody's own data have; return the folder.

    The three that are made of documentation come together. The same packages give the same bytes. Processes that call it together
    wait for the first. Raises InputError for a folder that cannot be written to, or a file in the place of a set.
    """
    folder = Path(folder)
    if all(os.path.isdir(folder / name) for name in names):
        return folder
    if set(names).intersection(_OF_DOCUMENTATION):
        names = (*names, *_OF_DOCUMENTATION)
    for name in names:
        if os.path.lexists(folder / name) and not os.path.isdir(folder / name):
            raise InputError(f"{folder / name}: found a file; expected the folder of a demo set; move it or name another folder")
    make_parent(folder / "demo_sc", flag)
    with wait_for_lock(folder / LOCK):
        missing = [name for name in NAMES if name in names and not (folder / name).is_dir()]
        if missing:  # another process may have made them meanwhile
            say(f"{folder}: {', '.join(missing)} will be made, once, of what is installed: some minutes")
        if "demo_sc" in missing:
            _write_packages(folder / "demo_sc", _corpus(folder.parent))
        if set(missing) - {"demo_sc"}:
            found = documented.read_documentation()
            for name, write in (("demo_tc", _write_tags), ("demo_qa", _write_questions), ("demo_ir", _write_summaries)):
                if name in missing:
                    write(folder / name, found)
    return folder


def _corpus(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (id, text) of the demo corpus: of the one in `folder` if `megaenc demo` made it, else of the installed packages."""
    try:
        made = find_demo_corpus(folder)
    except InputError:  # somebody's own files
        made = None
    if made is None:
        yield from corpus_documents()
        return
    with open(made.corpus, encoding="utf-8") as stream:
        for record in map(json.loads, stream):
            yield record["id"], record["text"]


def _write_packages(folder: Path, documents: Iterable[tuple[str, str]]) -> None:
    """Write the set of paragraphs and their packages, as many of each; the paragraphs of one file are in one split."""
    by_package: dict[str, dict[SplitName, list[dict]]] = defaultdict(lambda: {split: [] for split in _SIZES})
    for source, document in documents:
        for number, text in enumerate(document.split("\n\n")):
            if 10 <= len(text.split()) <= 100:
                by_package[source.split("/")[0]][_split(source)].append({"id": f"{source}-{number}", "text": text})
    usable = [package for package, splits in by_package.items() if all(splits.values())]
    packages = sorted(usable, key=lambda package: (-len(by_package[package]["train"]), package))[:_CLASSES]
    if len(packages) < 2:
        raise InputError(f"{folder}: found paragraphs of {len(packages)} packages in the demo corpus; expected at least 2")
    chosen = {}
    for split, size in _SIZES.items():
        each = min(-(-size // len(packages)), *(len(by_package[package][split]) for package in packages))
        rows = [
            row | {"label": label}
            for label, package in enumerate(packages)
            for row in sorted(by_package[package][split], key=lambda row: number_of(row["id"]))[:each]
        ]
        chosen[split] = sorted(rows, key=lambda row: number_of(row["id"]))
    with whole_folder(folder) as made:
        _write_rows(made, chosen)
        write_whole(made / "meta.json", json.dumps({"labels": packages}, indent=1) + "\n")
    _tell(folder, chosen, "which package a paragraph comes from")


def _write_tags(folder: Path, found: Sequence[documented.Documented]) -> None:
    chosen = _choose(documented.tagged_sentences(found))
    tags = ["O", f"B-{PARAMETER}", f"B-{CODE}", f"I-{CODE}"]  # a parameter's name is one word
    with whole_folder(folder) as made:
        _write_rows(made, chosen)
        write_whole(made / "meta.json", json.dumps({"tags": tags}, indent=1) + "\n")
    _tell(folder, chosen, "names of parameters, and other code, in documentation")


def _write_questions(folder: Path, found: Sequence[documented.Documented]) -> None:
    chosen = _choose(documented.questions(found))
    with whole_folder(folder) as made:
        for split, rows in chosen.items():
            paragraphs: dict[str, list[dict]] = defaultdict(list)
            for row in rows:
                answers = [{"text": row["answer"], "answer_start": row["start"]}]
                paragraphs[row["context"]].append({"id": row["id"], "question": row["question"], "answers": answers})
            data = [{"title": "", "paragraphs": [{"context": context, "qas": qas} for context, qas in paragraphs.items()]}]
            write_whole(made / f"{_FILES[split]}.json", json.dumps({"version": "1.1", "data": data}, indent=1) + "\n")
    _tell(folder, chosen, "the sentence that describes a parameter")


def _write_summaries(folder: Path, found: Sequence[documented.Documented]) -> None:
    chosen = _choose(documented.summaries(found))
    with whole_folder(folder) as made:
        rows = [row for split in chosen.values() for row in split]
        for name, key in (("corpus", "document"), ("queries", "query")):
            _write_lines(made / f"{name}.jsonl", ({"_id": row["id"], "text": row[key]} for row in rows))
        (made / "qrels").mkdir()
        for split, found_rows in chosen.items():
            lines = "".join(f"{row['id']}\t{row['id']}\t1\n" for row in found_rows)
            name = "dev" if split == "validation" else split
            write_whole(made / "qrels" / f"{name}.tsv", "query-id\tcorpus-id\tscore\n" + lines)
    _tell(folder, chosen, "the description that belongs to a summary")


def _choose(examples: Iterable[dict]) -> dict[SplitName, list[dict]]:
    """The examples of each split in an order that looks random, as many as are wanted; a function's are in one split."""
    chosen: dict[SplitName, list[dict]] = {split: [] for split in _SIZES}
    for example in examples:
        chosen[_split(example.pop("function"))].append(example)
    return {split: sorted(rows, key=lambda row: number_of(row["id"]))[: _SIZES[split]] for split, rows in chosen.items()}


def _split(source: str) -> SplitName:
    """The split of all that comes from one file or function: a fixed choice, a tenth each to validation and test."""
    tenth = number_of(f"split {source}") % 10
    return "test" if tenth == 0 else "validation" if tenth == 1 else "train"


def _write_rows(folder: Path, chosen: dict[SplitName, list[dict]]) -> None:
    for split, rows in chosen.items():
        _write_lines(folder / f"{_FILES[split]}.jsonl", rows)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _tell(folder: Path, chosen: dict[SplitName, list[dict]], what: str) -> None:
    say(f"{folder}: {what}: " + ", ".join(f"{len(rows):,} {split}" for split, rows in chosen.items()))


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune demo`."""
    quiet()
    settings = flags.parse(DemoSetFlags, argv, prog="megaenc finetune demo", description=__doc__)
    with stopped_by_sigterm():
        ensure_demo_sets(settings.output, flag="--output")
