"""Folders in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/{train,dev,test}.tsv."""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats
from megaenc.finetune.examples import (
    DOCUMENT,
    QUERY,
    Dataset,
    Examples,
    Pair,
    RetrievalExamples,
    SplitName,
    TaskFamily,
    choose_validation_queries,
    format_too_few_error,
    hash_json,
    print_once,
    split_validation_rows,
)

Qrels = dict[str, dict[str, int]]
"""Grades by query and document; 0 is looked at and found irrelevant."""
QrelLine = tuple[str, str, str, int]
"""Place, query, document and grade of a line of a file of judgements."""
_GRADE = re.compile(r"-?\d{1,9}")
_QRELS_FILES = {"train": ("train",), "validation": ("dev", "validation", "valid", "val"), "test": ("test",)}


def is_beir_folder(folder: Path) -> bool:
    """Return whether a folder has BEIR's files."""
    return _find_data_file(folder, "corpus") is not None and _find_data_file(folder, "queries") is not None


def load_beir(name: str, folder: Path, whole_corpus: bool) -> Dataset:
    """Return the data set in `folder`, searched among the documents that validation and test judge, or among all."""
    qrels = {
        split: path
        for split, words in _QRELS_FILES.items()
        if (path := _find_first_file(folder / "qrels" / f"{word}.tsv{end}" for word in words for end in ("", ".gz"))) is not None
    }
    if not qrels:
        raise InputError(f"{folder / 'qrels'}: found no train.tsv, dev.tsv or test.tsv, expected BEIR's layout")
    texts = {name: _find_data_file(folder, name) for name in ("corpus", "queries")}
    content = {key: compute_sha256(path) for key, path in (texts | qrels).items()}
    fingerprint = hash_json({"files": content, "rules": ["BEIR", whole_corpus]})

    @functools.cache
    def judged() -> tuple[list[QrelLine], dict[SplitName, Qrels]]:
        lines = {split: _read_qrels(path) for split, path in qrels.items()}
        of_splits: dict[SplitName, Qrels] = {split: {} for split in lines}
        for split, some in lines.items():
            for _, query, document, grade in some:
                of_splits[split].setdefault(query, {})[document] = grade
        return [line for some in lines.values() for line in some], _add_validation_split(name, qrels, of_splits)

    @functools.cache
    def read() -> tuple[dict[str, str], dict[str, str]]:
        lines, _ = judged()
        queries = _read_judged_texts("query", texts["queries"], {line[1]: line[0] for line in reversed(lines)})
        named = {line[2]: line[0] for line in reversed(lines)}
        return queries, _read_judged_texts("document", texts["corpus"], named, titles=True, everything=whole_corpus)

    def split_of(split: SplitName) -> Examples:
        _, of_splits = judged()
        if split not in of_splits:
            raise InputError(
                f"{folder / 'qrels'}: no {split} split, expected {_QRELS_FILES[split][0]}.tsv"
                + ("; --train-on names another data set to train on" if split == "train" else "")
            )
        queries, documents = read()
        if split == "train":
            return [
                Pair(f"{query}/{document}", QUERY + queries[query], DOCUMENT + documents[document])
                for query, grades in of_splits["train"].items()
                for document, grade in grades.items()
                if grade > 0
            ]
        evaluated = [of_splits[name] for name in ("validation", "test") if name in of_splits]
        labelled = {document for judgements in evaluated for grades in judgements.values() for document in grades}
        kept = {key: text for key, text in documents.items() if whole_corpus or key in labelled}
        return build_retrieval_examples(of_splits[split], queries, kept)

    return Dataset(name, TaskFamily.IR, (), name, fingerprint, fingerprint, split_of)


def _read_judged_texts(
    kind: str, path: Path, judged: dict[str, str], *, titles: bool = False, everything: bool = False
) -> dict[str, str]:
    """Return the texts of a file whose ids are `judged`, each at a place, or all. Raises InputError if one is missing."""
    found: dict[str, str] = {}
    seen: dict[str, str] = {}
    for place, row in formats.read_jsonl(path):
        key = f"{formats.get_value(row, '_id', place)}"
        if everything or key in judged:
            formats.register_id(seen, key, place, "_id")
            title = formats.get_value(row, "title", place, str) if titles and row.get("title") else ""
            text = formats.get_value(row, "text", place, str)
            found[key] = f"{title}. {text}" if title and text else title or text
    for key, place in judged.items():
        if key not in found:
            raise InputError(f"{place}: {kind} {key!r}: not in {path.name}, expected the _id of a {kind}")
    return found


def _add_validation_split(name: str, qrels: Mapping[SplitName, Path], judged: dict[SplitName, Qrels]) -> dict[SplitName, Qrels]:
    """Return the judgements of each split; where none are for validation, part of the others is, by the study's rules."""
    if "test" not in judged and "validation" in judged:
        print_once(f"{name}: no test judgements: those of {qrels['validation'].name} are the test split")
        judged["test"] = judged.pop("validation")
    if "validation" in judged or "test" not in judged:
        return judged
    source = "train" if "train" in judged else "test"
    queries = list(judged[source])
    part = "5 % of the training queries validate" if source == "train" else "half of the test queries validate"
    print_once(f"{name}: no validation judgements: {part} (seed 42)")
    if len(queries) < 2:
        raise InputError(f"{qrels[source]}: {format_too_few_error(len(queries), 'queries', 'qrels/dev.tsv')}")
    share = (
        choose_validation_queries(queries) if source == "test" else {queries[at] for at in split_validation_rows(len(queries))[1]}
    )
    move_to_validation(judged, source, share)
    return judged


def move_to_validation(judged: dict[SplitName, Qrels], source: SplitName, queries: Collection[str]) -> None:
    """Move the judgements of some queries from the split `source` to `validation`."""
    judged["validation"] = {query: found for query, found in judged[source].items() if query in queries}
    judged[source] = {query: found for query, found in judged[source].items() if query not in queries}


def _read_qrels(path: Path) -> list[QrelLine]:
    lines: dict[tuple[str, str], QrelLine] = {}
    for number, line in formats.read_lines(path):
        cells = line.split("\t")
        if not line.strip() or (number == 1 and cells[-1].strip() == "score"):
            continue
        place = f"{path}:{number}"
        if len(cells) != 3 or not _GRADE.fullmatch(cells[2].strip()):
            raise InputError(f"{place}: found {line[:40]!r}, expected query-id, corpus-id, score (tabs between)")
        query, document, grade = cells
        if (query, document) in lines:
            raise InputError(f"{place}: query {query!r} and document {document!r}: judged twice, expected once")
        lines[query, document] = (place, query, document, int(grade))
    return list(lines.values())


def build_retrieval_examples(judged: Qrels, queries: Mapping[str, str], documents: Mapping[str, str]) -> RetrievalExamples:
    """Return the queries that a document is relevant to, and all documents to be searched, with their prefixes."""
    positive = {query: {key: grade for key, grade in grades.items() if grade > 0} for query, grades in judged.items()}
    relevant = {query: grades for query, grades in positive.items() if grades}
    return RetrievalExamples(
        {query: QUERY + queries[query] for query in relevant},
        {key: DOCUMENT + text for key, text in documents.items()},
        relevant,
    )


def _find_data_file(folder: Path, name: str) -> Path | None:
    return _find_first_file(folder / f"{name}.jsonl{end}" for end in ("", ".gz", ".zst"))


def _find_first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)
