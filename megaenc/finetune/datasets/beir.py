"""Folders in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/{train,dev,test}.tsv."""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megaenc.data.outputs import sha256_of
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats, rows
from megaenc.finetune.datasets.base import (
    DOCUMENT,
    QUERY,
    Dataset,
    digest,
    say_once,
    too_few,
    validation_half,
    validation_share,
)
from megaenc.finetune.examples import Examples, Family, Pair, Retrieval, SplitName

Judgements = dict[str, dict[str, int]]
"""Grades by query and document; 0 is looked at and found irrelevant."""
_GRADE = re.compile(r"-?\d{1,9}")
_QRELS = {"train": ("train",), "validation": ("dev", "validation", "valid", "val"), "test": ("test",)}


def is_beir(folder: Path) -> bool:
    """Whether a folder has BEIR's files."""
    return _data_file(folder, "corpus") is not None and _data_file(folder, "queries") is not None


def load(name: str, folder: Path, whole_corpus: bool) -> Dataset:
    """The data set in `folder`, searched among the documents that validation and test judge, or among all."""
    files = _Folder(name, folder, whole_corpus)
    paths = {"corpus": files.corpus, "queries": files.queries, **files.qrels}
    fingerprint = digest({"files": {key: sha256_of(path) for key, path in paths.items()}, "rules": ["BEIR", whole_corpus]})
    return Dataset(name, Family.IR, (), name, fingerprint, fingerprint, files.split)


def titled(title: str | None, text: str) -> str:
    """A document with its title in front, where it has one."""
    return text if not title else f"{title}. {text}" if text else title


class _Folder:
    """The files, and what is read of them."""

    def __init__(self, name: str, folder: Path, whole_corpus: bool) -> None:
        self.name, self.folder, self.whole_corpus = name, folder, whole_corpus
        self.corpus, self.queries = _data_file(folder, "corpus"), _data_file(folder, "queries")
        self.qrels = {
            split: path
            for split, words in _QRELS.items()
            for path in [_first(folder / "qrels" / f"{word}.tsv{end}" for word in words for end in ("", ".gz"))]
            if path is not None
        }
        if not self.qrels:
            raise InputError(f"{folder / 'qrels'}: found no train.tsv, dev.tsv or test.tsv, expected BEIR's layout")

    def split(self, split: SplitName) -> Examples:
        """Pairs to train on, or what is searched for in what."""
        judged = self._judged
        if split not in judged:
            raise InputError(
                f"{self.folder / 'qrels'}: no {split} split, expected {_QRELS[split][0]}.tsv"
                + ("; --train-on names another data set to train on" if split == "train" else "")
            )
        if split == "train":
            return [
                Pair(f"{query}/{document}", QUERY + self._queries[query], DOCUMENT + self._documents[document])
                for query, documents in judged["train"].items()
                for document, grade in documents.items()
                if grade > 0
            ]
        evaluated = [judged[name] for name in ("validation", "test") if name in judged]
        labelled = {document for queries in evaluated for documents in queries.values() for document in documents}
        kept = {key: text for key, text in self._documents.items() if self.whole_corpus or key in labelled}
        return retrieval(judged[split], self._queries, kept)

    @functools.cached_property
    def _documents(self) -> dict[str, str]:
        """Those that are judged in any split, of the corpus, which is often much larger; or all."""

        def text(row: dict[str, Any], place: str) -> str:
            return titled(row.get("title") and rows.value_of(row, "title", place, str), rows.value_of(row, "text", place, str))

        return self._judged_texts(1, "document", self.corpus, text, everything=self.whole_corpus)

    @functools.cached_property
    def _queries(self) -> dict[str, str]:
        return self._judged_texts(0, "query", self.queries, lambda row, place: rows.value_of(row, "text", place, str))

    def _judged_texts(
        self, column: int, kind: str, path: Path, text: Callable[[dict[str, Any], str], str], *, everything: bool = False
    ) -> dict[str, str]:
        """Return the texts of a file that a column of the judgements names, or all. Raises InputError if one is missing."""
        wanted = {cells[column] for lines in self._lines.values() for _, cells in lines}
        found: dict[str, str] = {}
        seen: dict[str, str] = {}
        for place, row in formats.objects(path):
            key = f"{rows.value_of(row, '_id', place)}"
            if everything or key in wanted:
                rows.check_new(seen, key, place, "_id")
                found[key] = text(row, place)
        for place, cells in (line for lines in self._lines.values() for line in lines):
            if cells[column] not in found:
                raise InputError(f"{place}: {kind} {cells[column]!r}: not in {path.name}, expected the _id of a {kind}")
        return found

    @functools.cached_property
    def _lines(self) -> dict[SplitName, list[tuple[str, list[str]]]]:
        """The place, and query, document and grade of each line of each file of judgements."""
        return {split: list(_cells(path)) for split, path in self.qrels.items()}

    @functools.cached_property
    def _judged(self) -> dict[str, Judgements]:
        """The judgements of each split; where none are for validation, part of the others by the study's rules."""
        judged = {split: _judgements(lines) for split, lines in self._lines.items()}
        if "test" not in judged and "validation" in judged:
            say_once(f"{self.name}: no test judgements: those of {self.qrels['validation'].name} are the test split")
            judged["test"] = judged.pop("validation")
        if "validation" in judged or "test" not in judged:
            return judged
        source = "train" if "train" in judged else "test"
        queries = list(judged[source])
        part = "5 % of the training queries validate" if source == "train" else "half of the test queries validate"
        say_once(f"{self.name}: no validation judgements: {part} (seed 42)")
        if len(queries) < 2:
            raise InputError(f"{self.qrels[source]}: {too_few(len(queries), 'queries', 'qrels/dev.tsv')}")
        if source == "train":
            give_to_validation(judged, "train", {queries[at] for at in validation_share(len(queries))[1]})
        else:
            give_to_validation(judged, "test", validation_half(queries))
        return judged


def give_to_validation(judged: dict[SplitName, Judgements], source: SplitName, queries: Collection[str]) -> None:
    """Move the judgements of some queries from the split `source` to `validation`."""
    judged["validation"] = {query: found for query, found in judged[source].items() if query in queries}
    judged[source] = {query: found for query, found in judged[source].items() if query not in queries}


def _judgements(lines: Iterable[tuple[str, list[str]]]) -> Judgements:
    judged: Judgements = {}
    for place, (query, document, grade) in lines:
        if document in judged.setdefault(query, {}):
            raise InputError(f"{place}: query {query!r} and document {document!r}: judged twice, expected once")
        judged[query][document] = int(grade)
    return judged


def _cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    for number, line in formats.lines(path):
        cells = line.split("\t")
        if not line.strip() or (number == 1 and cells[-1].strip() == "score"):
            continue
        place = f"{path}:{number}"
        if len(cells) != 3 or not _GRADE.fullmatch(cells[2].strip()):
            raise InputError(f"{place}: found {line[:40]!r}, expected query-id, corpus-id, score (tabs between)")
        yield place, cells


def retrieval(judged: Judgements, queries: Mapping[str, str], documents: Mapping[str, str]) -> Retrieval:
    """The queries that a document is relevant to, and all documents to be searched, with their prefixes."""
    relevant = {
        query: found for query, grades in judged.items() if (found := {key: grade for key, grade in grades.items() if grade > 0})
    }
    return Retrieval(
        {query: QUERY + queries[query] for query in relevant},
        {key: DOCUMENT + text for key, text in documents.items()},
        relevant,
    )


def _data_file(folder: Path, name: str) -> Path | None:
    return _first(folder / f"{name}.jsonl{end}" for end in ("", ".gz", ".zst"))


def _first(paths) -> Path | None:
    return next((path for path in paths if path.is_file()), None)
