"""Retrieval data in BEIR's layout.

A directory has corpus.jsonl, queries.jsonl and qrels/{train,dev,test}.tsv.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

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
"""Relevance grades by query id, then by document id; a document of grade 0 is judged irrelevant."""
_GRADE = re.compile(r"-?\d{1,9}")
_QRELS_FILES = {
    "train": ("train",),
    "validation": ("dev", "validation", "valid", "val"),
    "test": ("test",),
}


class QrelLine(NamedTuple):
    """Line of a qrels file: its location, query id, document id and grade.

    `location` is file:line, `query` and `document` are ids. A `grade` of 0 or less means that the
    document is irrelevant.
    """

    location: str
    query: str
    document: str
    grade: int


def is_beir_directory(directory: Path) -> bool:
    """Return whether `directory` has the files corpus.jsonl and queries.jsonl.

    Both may be compressed as .gz or .zst. Qrels are not looked for. A missing directory has no
    files.
    """
    return (
        _find_data_file(directory, "corpus") is not None
        and _find_data_file(directory, "queries") is not None
    )


def load_beir(name: str, directory: Path, whole_corpus: bool) -> Dataset:
    """Return the Dataset `name` of a directory in BEIR's layout (IR).

    Files are hashed now and parsed by `load_split`. Without qrels of test, those of validation are
    the test split. Then validation without qrels takes 5 % of the queries of train or, without
    train, half of those of test.

    Args:
        directory: Directory of which `is_beir_directory` is True.
        whole_corpus: Search all documents; False: in both splits, those judged in either.

    Raises:
        InputError: There are no qrels at all. Malformed files are an error of `load_split`.
    """
    qrels = {}
    for split, words in _QRELS_FILES.items():
        path = _find_first_file(
            directory / "qrels" / f"{word}.tsv{end}" for word in words for end in ("", ".gz")
        )
        if path is not None:
            qrels[split] = path
    if not qrels:
        raise InputError(
            f"{directory / 'qrels'}: found no train.tsv, dev.tsv or test.tsv, expected BEIR's "
            "layout"
        )
    texts = {name: _find_data_file(directory, name) for name in ("corpus", "queries")}
    content = {key: compute_sha256(path) for key, path in (texts | qrels).items()}
    fingerprint = hash_json({"files": content, "rules": ["BEIR", whole_corpus]})
    reader = _SplitReader(name, texts, qrels, whole_corpus)
    return Dataset(name, TaskFamily.IR, (), name, fingerprint, fingerprint, reader.read_split)


@dataclass(frozen=True)
class _SplitReader:
    """Reader of the splits of a BEIR directory for fine-tuning.

    `texts` has the paths of "corpus" and "queries", `qrels` those of the splits that have a file.
    """

    name: str
    texts: Mapping[str, Path]
    qrels: Mapping[SplitName, Path]
    whole_corpus: bool

    @functools.cached_property
    def content(self) -> tuple[dict[SplitName, Qrels], dict[str, str], dict[str, str]]:
        """Return the grades of each split, the queries and the documents, cached.

        Queries and documents are texts by id, without prefixes: those in qrels, or with
        `whole_corpus` all documents.

        Raises:
            InputError: A file is malformed, or a query or a training document is missing.
        """
        lines = {split: _read_qrels(path) for split, path in self.qrels.items()}
        grades = {split: _group_grades(of_split) for split, of_split in lines.items()}
        grades = _add_validation_split(self.name, self.qrels, grades)
        all_lines = [line for of_split in lines.values() for line in of_split]
        queries = _read_texts("query", self.texts["queries"], all_lines)
        documents = _read_texts(
            "document",
            self.texts["corpus"],
            lines.get("train", []),
            optional={line.document for line in all_lines},
            titles=". ",
            everything=self.whole_corpus,
        )
        return grades, queries, documents

    def read_split(self, split: SplitName) -> Examples:
        """Return a list of Pair for "train", else RetrievalExamples, with prefixes.

        A Pair has a grade above 0. Without `whole_corpus` the documents are those judged for
        validation or test. `ignore_identical_ids` is True. A message counts relevant documents that
        are missing.

        Raises:
            InputError: There are no qrels of train for "train", or neither of validation nor of
                test for one of these two (see `load_beir`); a file is malformed; or a query, a
                training document or every relevant document is missing.
        """
        # Without a file of its own, each of these two is drawn from the other or from training.
        sources = ("train",) if split == "train" else ("validation", "test")
        if not self.qrels.keys() & sources:
            place = next(iter(self.qrels.values())).parent
            advice = "; or train on another data set with --train-on" if split == "train" else ""
            raise InputError(
                f"{place}: no {split} split, expected {_QRELS_FILES[split][0]}.tsv{advice}"
            )
        grades, queries, documents = self.content
        if split == "train":
            return [
                Pair(f"{query}/{document}", QUERY + queries[query], DOCUMENT + documents[document])
                for query, judgements in grades["train"].items()
                for document, grade in judgements.items()
                if grade > 0
            ]
        searched = documents
        if not self.whole_corpus:
            judged = {
                document
                for name in sources
                for judgements in grades[name].values()
                for document in judgements
            }
            searched = {key: text for key, text in documents.items() if key in judged}
        examples = build_retrieval_examples(grades[split], queries, searched)
        _report_misses(
            f"{self.name}: {split} split", examples.relevant, documents, self.texts["corpus"]
        )
        return dataclasses.replace(examples, ignore_identical_ids=True)


def load_beir_test(directory: Path) -> RetrievalExamples:
    """Return the test queries and grades of a BEIR directory and its whole corpus.

    Queries without a grade above 0 are left out; `ignore_identical_ids` is True. Texts have no
    prefix, as BEIR evaluates models without training. A document is its title, a space and its
    text, or one of the two if the other is empty. Relevant documents that the corpus lacks keep
    their grades; a message counts them.

    Raises:
        InputError: A file or a judged query is missing, a line is malformed, a returned query is
            empty, or the corpus has no relevant document.
    """
    paths, lines = _read_beir_split(directory, "test")
    relevant = _group_grades(line for line in lines if line.grade > 0)
    queries = _read_texts("query", paths["queries"], lines)
    if empty := [query for query in relevant if not queries[query].strip()]:
        raise InputError(
            f"{paths['queries']}: query {empty[0]!r}: found an empty text, "
            "expected words to search for"
        )
    documents = _read_texts("document", paths["corpus"], (), titles=" ", everything=True)
    _report_misses(str(paths["qrels"]), relevant, documents, paths["corpus"])
    judged_queries = {query: queries[query] for query in relevant}
    return RetrievalExamples(judged_queries, documents, relevant, ignore_identical_ids=True)


def load_beir_pairs(directory: Path) -> list[tuple[str, str, str]]:
    """Return (location, query, document) of each relevant pair of qrels/train.tsv.

    Pairs are those with a grade above 0, in the order of the file; the location is file:line. Texts
    are built as by `load_beir_test`, and may be empty.

    Raises:
        InputError: A file or text is missing, a line is malformed, or no grade is above 0.
    """
    paths, lines = _read_beir_split(directory, "train")
    lines = [line for line in lines if line.grade > 0]
    queries = _read_texts("query", paths["queries"], lines)
    documents = _read_texts("document", paths["corpus"], lines, titles=" ")
    return [(line.location, queries[line.query], documents[line.document]) for line in lines]


def load_beir_corpus(directory: Path) -> list[str]:
    """Return the texts of all documents of BEIR `directory`, without prefixes.

    Each is title, space and text, as in `load_beir_test`, and may be empty. They are in the order
    of corpus.jsonl, which may be compressed as .gz or .zst.

    Raises:
        InputError: There is no corpus.jsonl, or a line is malformed.
    """
    if (path := _find_data_file(directory, "corpus")) is None:
        raise InputError(f"{directory}: no corpus.jsonl, expected BEIR's layout")
    return list(_read_texts("document", path, (), titles=" ", everything=True).values())


def compute_test_fingerprint(directory: Path) -> str:
    """Return a SHA-256 (hex) of the corpus, queries and qrels/test.tsv of a directory.

    These are the files that `load_beir_test` reads. A compressed file has another fingerprint than
    its text.

    Raises:
        InputError: A file is missing.
    """
    return hash_json(
        {name: compute_sha256(path) for name, path in _find_beir_files(directory, "test").items()}
    )


def _find_beir_files(directory: Path, split: str) -> dict[str, Path]:
    """Return the paths of a BEIR directory's corpus, queries and qrels of a split.

    Raises:
        InputError: A file is missing.
    """
    expected = f"expected BEIR's corpus.jsonl, queries.jsonl and qrels/{split}.tsv"
    if not os.path.isdir(directory):  # False for a name that is too long
        raise InputError(f"{directory}: no such directory, {expected}")
    paths = {name: _find_data_file(directory, name) for name in ("corpus", "queries")}
    paths["qrels"] = _find_first_file(
        directory / "qrels" / f"{split}.tsv{end}" for end in ("", ".gz")
    )
    for name, path in paths.items():
        if path is None:
            raise InputError(
                f"{directory}: no {f'qrels/{split}.tsv' if name == 'qrels' else f'{name}.jsonl'}, "
                f"{expected}"
            )
    return paths


def _read_beir_split(directory: Path, split: str) -> tuple[dict[str, Path], list[QrelLine]]:
    """Read qrels/SPLIT.tsv, and find the files of corpus, queries and qrels.

    Returns:
        The paths by name, and the lines of the qrels.

    Raises:
        InputError: A file is missing, or no grade is above 0.
    """
    paths = _find_beir_files(directory, split)
    lines = _read_qrels(paths["qrels"])
    if not any(line.grade > 0 for line in lines):
        raise InputError(
            f"{paths['qrels']}: found no score above 0, "
            "expected a relevant document for at least one query"
        )
    return paths, lines


def _group_grades(lines: Iterable[QrelLine]) -> Qrels:
    """Return the grades of `lines` by query and document."""
    grades: Qrels = {}
    for line in lines:
        grades.setdefault(line.query, {})[line.document] = line.grade
    return grades


def _read_texts(
    kind: Literal["query", "document"],
    path: Path,
    lines: Sequence[QrelLine],
    *,
    optional: Collection[str] = (),
    titles: str = "",
    everything: bool = False,
) -> dict[str, str]:
    """Read the queries or documents of `lines` from a BEIR file.

    Args:
        optional: Ids of further texts, which may be missing.
        titles: Characters between title and text; empty: without titles.
        everything: Read all texts.

    Raises:
        InputError: A text of `lines` is missing.
    """
    judged_ids = {getattr(line, kind): line.location for line in reversed(lines)}
    texts: dict[str, str] = {}
    places: dict[str, str] = {}
    for location, row in formats.read_jsonl(path):
        key = f"{formats.get_value(row, '_id', location)}"
        if everything or key in judged_ids or key in optional:
            formats.register_id(places, key, location, "_id")
            title = (
                formats.get_value(row, "title", location, str)
                if titles and row.get("title")
                else ""
            )
            text = formats.get_value(row, "text", location, str)
            texts[key] = f"{title}{titles}{text}" if title and text else title or text
    for key, location in judged_ids.items():
        if key not in texts:
            raise InputError(
                f"{location}: {kind} {key!r}: not in {path.name}, expected the _id of a {kind}"
            )
    return texts


def _report_misses(place: str, relevant: Qrels, documents: Collection[str], corpus: Path) -> None:
    """Print how many relevant documents are not in the corpus.

    Raises:
        InputError: None is in the corpus.
    """
    judged = {document for grades in relevant.values() for document in grades}
    missing = sum(document not in documents for document in judged)
    if not missing:
        return
    if missing == len(judged):
        complaint = f"found none of the {missing:,} relevant documents in {corpus.name}"
        raise InputError(
            f"{place}: {complaint}, expected the _id of a document; "
            "give the corpus of these judgements"
        )
    print_once(
        f"{place}: {missing:,} of {len(judged):,} relevant documents are not in {corpus.name} "
        "and count as misses"
    )


def _add_validation_split(
    name: str, qrels: Mapping[SplitName, Path], qrels_by_split: dict[SplitName, Qrels]
) -> dict[SplitName, Qrels]:
    """Return the qrels of each split, with those of validation.

    A directory without validation qrels gets those of queries of train or test, drawn by the
    study's rules.
    """
    if "test" not in qrels_by_split and "validation" in qrels_by_split:
        print_once(
            f"{name}: no test judgements: those of {qrels['validation'].name} are the test split"
        )
        qrels_by_split["test"] = qrels_by_split.pop("validation")
    if "validation" in qrels_by_split or "test" not in qrels_by_split:
        return qrels_by_split
    source = "train" if "train" in qrels_by_split else "test"
    queries = list(qrels_by_split[source])
    part = (
        "5 % of the training queries validate"
        if source == "train"
        else "half of the test queries validate"
    )
    print_once(f"{name}: no validation judgements: {part} (seed 42)")
    if len(queries) < 2:
        raise InputError(
            f"{qrels[source]}: {format_too_few_error(len(queries), 'queries', 'qrels/dev.tsv')}"
        )
    validation_queries = (
        choose_validation_queries(queries)
        if source == "test"
        else {queries[index] for index in split_validation_rows(len(queries))[1]}
    )
    move_to_validation(qrels_by_split, source, validation_queries)
    return qrels_by_split


def move_to_validation(
    qrels_by_split: dict[SplitName, Qrels], source: SplitName, queries: Collection[str]
) -> None:
    """Move the grades of `queries` from the split `source` to the split "validation".

    `qrels_by_split` is changed in place. Earlier grades of validation are dropped. Queries that are
    not in `source` are ignored.

    Args:
        queries: Ids of queries.
    """
    qrels_by_split["validation"] = {
        query: grades for query, grades in qrels_by_split[source].items() if query in queries
    }
    qrels_by_split[source] = {
        query: grades for query, grades in qrels_by_split[source].items() if query not in queries
    }


def _read_qrels(path: Path) -> list[QrelLine]:
    """Read a qrels file.

    Raises:
        InputError: A line is malformed or repeated.
    """
    lines: dict[tuple[str, str], QrelLine] = {}
    for line_number, line in formats.read_lines(path):
        cells = line.split("\t")
        if not line.strip() or (line_number == 1 and cells[-1].strip() == "score"):
            continue
        place = f"{path}:{line_number}"
        if len(cells) != 3 or not _GRADE.fullmatch(cells[2].strip()):
            raise InputError(
                f"{place}: found {line[:40]!r}, expected query-id, corpus-id, score (tabs between)"
            )
        query, document, grade = cells
        if (query, document) in lines:
            raise InputError(
                f"{place}: query {query!r} and document {document!r}: judged twice, expected once"
            )
        lines[query, document] = QrelLine(place, query, document, int(grade))
    return list(lines.values())


def build_retrieval_examples(
    qrels: Qrels, queries: Mapping[str, str], documents: Mapping[str, str]
) -> RetrievalExamples:
    """Return RetrievalExamples of the queries with a grade above 0, and all documents.

    The prefixes QUERY and DOCUMENT are added to texts. `ignore_identical_ids` stays False.

    Args:
        qrels: Grades by query id, then by document id.
        queries: Texts by id; those of all returned queries must be there.
        documents: Texts by id; relevant ones may be missing: they keep their grades, as misses.
    """
    positive = {
        query: {key: grade for key, grade in grades.items() if grade > 0}
        for query, grades in qrels.items()
    }
    relevant = {query: grades for query, grades in positive.items() if grades}
    return RetrievalExamples(
        {query: QUERY + queries[query] for query in relevant},
        {key: DOCUMENT + text for key, text in documents.items()},
        relevant,
    )


def _find_data_file(directory: Path, name: str) -> Path | None:
    """Return the path of NAME.jsonl, possibly compressed, in `directory`, or None."""
    return _find_first_file(directory / f"{name}.jsonl{end}" for end in ("", ".gz", ".zst"))


def _find_first_file(paths: Iterable[Path]) -> Path | None:
    """Return the first path that is a file, or None.

    Suffixes may be in capitals.
    """
    for path in paths:
        name, dot, suffixes = path.name.partition(".")
        for spelling in (path, path.with_name(name + dot + suffixes.upper())):
            if spelling.is_file():
                return spelling
    return None
