"""Small labelled data sets: files of every format, BEIR sets, task families."""

import csv
import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

QRELS_HEAD = "query-id\tcorpus-id\tscore\n"
WORDS = ["stan", "plark", "mill", "dove", "brack"]


def to_jsonl(rows: Iterable[Any]) -> str:
    """Return JSON with an object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def to_table(rows: list[dict[str, Any]], delimiter: str) -> str:
    """Return a table with the header of the first row."""
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def write_file(path: Path, content: Any) -> None:
    """Write bytes, text, rows in the format of the suffix, or an object as JSON.

    Files that end in `.gz` are compressed.
    """
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    suffixes = path.suffixes
    if isinstance(content, list):
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
            return
        if ".csv" in suffixes:
            content = to_table(content, ",")
        elif ".tsv" in suffixes:
            content = to_table(content, "\t")
        else:
            content = to_jsonl(content)
    elif not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    if isinstance(content, str):
        content = content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_files(directory: Path, files: dict[str, Any]) -> str:
    """Write the contents that are not None by name; return the directory."""
    for name, content in files.items():
        if content is not None:
            write_file(directory / name, content)
    return str(directory)


def write_splits(directory: Path, form: str, rows: list[dict[str, Any]], **others: Any) -> str:
    """Write train, valid and test, with `rows` except for `others`; return the path."""
    splits = {"train": rows, "valid": rows, "test": rows} | others
    return write_files(directory, {f"{split}.{form}": content for split, content in splits.items()})


def beir_files(
    documents: Iterable[tuple[str, str, str]],
    queries: Iterable[tuple[str, str]],
    **qrels: Iterable[tuple[str, str, int]],
) -> dict[str, str]:
    """Return the files of a BEIR directory by name.

    Documents are (id, title, text), queries (id, text), and qrels of each split (query, document,
    grade).
    """
    files = {
        "corpus.jsonl": to_jsonl(
            {"_id": key, "title": title, "text": text} for key, title, text in documents
        ),
        "queries.jsonl": to_jsonl({"_id": key, "text": text} for key, text in queries),
    }
    for split, rows in qrels.items():
        lines = (f"{query}\t{document}\t{grade}\n" for query, document, grade in rows)
        files[f"qrels/{split}.tsv"] = QRELS_HEAD + "".join(lines)
    return files


def squad(questions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return SQuAD's JSON of questions with a `context`, each in its own paragraph."""
    paragraphs = []
    for question in questions:
        asked = {key: value for key, value in question.items() if key != "context"}
        paragraphs.append({"context": question["context"], "qas": [asked]})
    return {"data": [{"title": "T", "paragraphs": paragraphs}]}


def write_families(root: Path) -> None:
    """Write a data set for each family: the label is which of two words occurs.

    That of regression counts a word, those of multi-label are three words. In reranking, a relevant
    text begins with the query's first word. Two are of retrieval: `ir` and `other`.
    """
    random = np.random.default_rng(0)
    texts = {}
    for split, count in (("train", 40), ("valid", 12), ("test", 12)):
        chosen = random.integers(0, len(WORDS), (count, 6))
        texts[split] = [" ".join(WORDS[at] for at in row) for row in chosen]
    for split, some in texts.items():
        classified = []
        tagged = []
        asked = []
        rated = []
        labelled = []
        ranked = []
        for at, text in enumerate(some):
            words = text.split()
            classified.append(
                {"id": at, "text": text, "label": "good" if words[0] in ("stan", "mill") else "bad"}
            )
            tagged.append(
                {
                    "id": at,
                    "tokens": words,
                    "tags": ["B-X" if word == "dove" else "O" for word in words],
                }
            )
            answers = [{"text": words[0], "answer_start": 0}]
            asked.append(
                {"id": f"{split}{at}", "question": "which?", "context": text, "answers": answers}
            )
            rated.append({"id": at, "text": text, "label": words.count("stan") - 0.5})
            labels = [word for word in ("dove", "mill", "stan") if word in words]
            labelled.append({"id": at, "text": text, "labels": labels})
            others = [other for other in some[at:] + some[:at] if other.split()[0] != words[0]]
            query = f"{words[0]} {words[-1]}"
            ranked.append({"query": query, "document": text, "negatives": others[:3]})
        write_file(root / "sc" / f"{split}.jsonl", classified)
        write_file(root / "regression" / f"{split}.jsonl", rated)
        write_file(root / "multi_label" / f"{split}.jsonl", labelled)
        write_file(root / "reranking" / f"{split}.jsonl", ranked)
        write_file(root / "tc" / f"{split}.jsonl", tagged)
        write_file(root / "qa" / f"{split}.json", squad(asked))
    for name, place in (("ir", 0), ("other", 1)):
        documents = []
        queries = []
        qrels = {}
        for split, some in texts.items():
            documents += [(f"d{split}{at}", "", text) for at, text in enumerate(some)]
            queries += [(f"q{split}{at}", text.split()[place]) for at, text in enumerate(some)]
            relevant = [(f"q{split}{at}", f"d{split}{at}", 1) for at in range(len(some))]
            qrels[{"valid": "dev"}.get(split, split)] = relevant
        write_files(root / name, beir_files(documents, queries, **qrels))
