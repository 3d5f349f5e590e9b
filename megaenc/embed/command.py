"""Evaluate the embeddings of models without fine-tuning, next to BM25 and chance.

Documents of BEIR directories are ranked; mteb scores similarity, classification by a logistic
probe, and its own tasks by name.

megaenc embed eval --model demo/hf --data scifact squad_ir stsb sst2
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc import flags, tables
from megaenc.atomic_io import atomic_write
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.embed.config import RULES, EmbeddingFlags
from megaenc.embed.evaluation_file import EvaluationRow, format_evaluation
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_output_file, create_parent_with_rollback

if TYPE_CHECKING:
    from megaenc.embed.embedder import EmbeddingConfig
    from megaenc.embed.evaluate import RetrievalSet

_HEADINGS = {"ndcg@10": "NDCG@10", "recall@100": "Recall@100"}
_MEASURES = {"spearman": "Spearman"}
_WIDTH = 100

_Table = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns of names, scores and counts, and lines of cells."""


@dataclass(frozen=True)
class EmbedEvalConfig:
    """Options of `megaenc embed eval`: models, data, embedding, baseline and output.

    Each field is a flag. `model`, `data` and `tasks` are tuples of texts: models and directories
    (of BEIR, similarity or classification), also as NAME=DIRECTORY, and names of mteb's tasks.
    `data` or `tasks` must be given, and `model` unless `bm25` is True (rank by BM25 too, the
    default) and has BEIR data to rank, which only `run_evaluation` checks. `config` is a YAML file
    of flags, `embedding` has the flags of EmbeddingFlags, `output` is a .json, .csv or .md file for
    all numbers, "" for none, and `overwrite` permits replacing it.
    """

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: tuple[str, ...] = ()
    """Hugging Face or sentence-transformers directories, or models of the Hub as ORG/NAME;
    NAME=DIRECTORY gives another name"""
    data: tuple[str, ...] = ()
    """BEIR directories (corpus.jsonl, queries.jsonl, qrels/test.tsv; also .gz), and directories of
    train.*, valid.* and test.* with text, text_pair and a score such as 3.5 as label (similarity),
    or text and a class as label (classification: mteb's logistic regression on 8 examples of each
    class, 10 times); NAME=DIRECTORY gives another name"""
    tasks: tuple[str, ...] = ()
    """tasks of mteb by name, such as STSBenchmark, in all their languages; their data come from the
    Hub"""
    embedding: EmbeddingFlags = field(default_factory=EmbeddingFlags)
    """how texts become embeddings"""
    bm25: bool = True
    """rank the documents of BEIR directories by BM25 too"""
    output: str = ""
    """file to write all numbers to as well; its suffix gives the format: .json, .csv or .md"""
    overwrite: bool = False
    """replace the file of --output if it exists"""


@handle_command_errors
def eval_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc embed eval`: score models on data sets and print the tables.

    With --output, the results are written to a file too: .json, .csv or .md. It may exist only with
    --overwrite. Wrong input exits with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse_with_config(
        EmbedEvalConfig, argv, prog="megaenc embed eval", description=__doc__
    )
    rows = run_evaluation(settings)
    tables.print_tables(build_tables(rows), _WIDTH)
    if settings.output:
        print_rank_0(f"written: {settings.output}")


def run_evaluation(settings: EmbedEvalConfig) -> list[EvaluationRow]:
    """Evaluate chance, BM25 and all models on all data sets.

    Only BEIR directories have rows of BM25, unless `settings.bm25` is False, and some tasks of mteb
    have none of chance. The results are written to `settings.output` too, if it is given.

    Returns:
        Rows by data set; in each, chance is first, then BM25, then the models.

    Raises:
        InputError: Settings, a model or a data set are unusable, or the file exists and
            `settings.overwrite` is False.
    """
    output = Path(settings.output)
    if not settings.data and not settings.tasks:
        raise InputError("--data: missing, and --tasks too; see `megaenc embed eval --help`")
    if not settings.model and not settings.bm25:
        raise InputError(
            "--model: missing, and --no-bm25 leaves nothing to evaluate; see `megaenc embed eval "
            "--help`"
        )
    if settings.output and output.suffix not in (".json", ".csv", ".md"):
        raise InputError(
            f"--output {output}: found the ending {output.suffix!r}, expected .json, .csv or .md"
        )
    if settings.output:
        models = _name_all("--model", settings.model)
        data = _name_all("--data", settings.data)
        inputs = (settings.config, *models.values(), *data.values())
        check_output_file(output, "--output", inputs=inputs, overwrite=settings.overwrite)
    with (
        create_parent_with_rollback(output, "--output")
        if settings.output
        else contextlib.nullcontext()
    ):
        rows, configs, origin = _evaluate(settings)
        if settings.output:
            atomic_write(output, format_results(rows, configs, output.suffix, origin))
    return rows


def _evaluate(
    settings: EmbedEvalConfig,
) -> tuple[list[EvaluationRow], dict[str, "EmbeddingConfig"], dict[str, Any]]:
    """Evaluate chance, BM25 and all models on all data sets.

    Returns:
        Rows by data set, the config of each model as used, and the origin for a JSON file.
    """
    print_rank_0("importing torch and transformers")
    from megaenc.embed import evaluate, probes
    from megaenc.embed.embedder import (
        build_embedder,
        fetch_model,
        override_config,
        read_embedding_config,
    )

    named_data = _name_all("--data", settings.data)
    counts = Counter([*named_data, *settings.tasks])
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            f"--tasks: found {repeated[0]} twice, here or in --data, expected each name once"
        )
    labelled = {
        name: Path(directory)
        for name, directory in named_data.items()
        if probes.is_labelled_set(Path(directory))
    }
    if not settings.model and len(labelled) == len(named_data):
        raise InputError(
            "--model: missing, and BM25 ranks only documents of BEIR directories; see `megaenc "
            "embed eval --help`"
        )
    named_data = {name: directory for name, directory in named_data.items() if name not in labelled}
    if settings.bm25 and named_data:
        evaluate.import_bm25s()
    named_models = _name_all("--model", settings.model)
    if "BM25" in named_models or "random" in named_models:
        raise InputError(
            "--model: found the name of a baseline, expected another; say NAME=DIRECTORY"
        )
    directories = {name: fetch_model(source) for name, source in named_models.items()}
    configs = {
        name: override_config(read_embedding_config(directory), settings.embedding)
        for name, directory in directories.items()
    }
    sets = [
        evaluate.RetrievalSet.load(name, Path(directory)) for name, directory in named_data.items()
    ]
    tasks = [
        *itertools.starmap(probes.load_labelled_set, labelled.items()),
        *probes.load_tasks(settings.tasks),
    ]
    rows = {
        data.name: evaluate.build_rows(data, "random", data.score_random_ranking(), interval=False)
        for data in sets
    }
    rows |= {task.name: task.build_random_rows() for task in tasks}
    for data in sets if settings.bm25 else ():
        with ProgressLine(
            f"BM25 {data.name}: ranking", total=len(data.queries), closing=False
        ) as line:
            rows[data.name] += evaluate.build_rows(
                data,
                "BM25",
                data.score(evaluate.rank_by_bm25(data.queries, data.documents, line.update)),
            )
    for name, directory in directories.items():
        embedder = build_embedder(name, directory, configs[name], settings.embedding)
        configs[name] = embedder.config  # with the attention and length in effect
        for data in sets:
            place = f"{name} {data.name}: "
            row_of = {document: row for row, document in enumerate(dict.fromkeys(data.documents))}
            queries, documents = embedder.embed_queries_and_documents(
                data.queries, list(row_of), place
            )
            with ProgressLine(f"{place}ranking", total=len(queries), closing=False) as line:
                text_of = np.array([row_of[document] for document in data.documents])
                scores = data.score(
                    evaluate.rank_by_cosine(queries, documents, line.update, text_of)
                )
            rows[data.name] += evaluate.build_rows(data, name, scores)
        for task in tasks:
            rows[task.name].append(task.evaluate(name, embedder))
        del embedder  # frees memory for the next model
    origin = (
        _describe_origin(settings, directories, named_data, sets)
        if settings.output.endswith(".json")
        else {}
    )
    return [row for dataset_rows in rows.values() for row in dataset_rows], configs, origin


def _describe_origin(
    settings: EmbedEvalConfig,
    models: dict[str, str],
    data: dict[str, str],
    sets: Sequence["RetrievalSet"],
) -> dict[str, Any]:
    """Return the settings and fingerprints that an evaluation's file records.

    They are the flags that change embeddings, the fingerprints of models and data by name, and the
    query ids of each data set.
    """
    from megaenc.finetune.datasets.beir import compute_test_fingerprint
    from megaenc.finetune.model import fingerprint

    weights = fingerprint.compute_model_fingerprints(
        list(models.values()), str(Path(settings.output).parent)
    )
    fingerprints = {}
    for (name, directory), digest in zip(models.items(), weights, strict=True):
        tokenizer = fingerprint.compute_tokenizer_fingerprint(directory)
        stamp = fingerprint.compute_model_stamp(directory)
        fingerprints[name] = {"model": digest, "tokenizer": tokenizer, "stamp": stamp}
    return {
        "settings": {name: getattr(settings.embedding, name) for name in RULES},
        "data": {
            name: compute_test_fingerprint(Path(directory)) for name, directory in data.items()
        },
        "fingerprints": fingerprints,
        "queries": {dataset.name: dataset.query_ids for dataset in sets},
    }


def _name_all(flag: str, sources: Sequence[str]) -> dict[str, str]:
    """Return the sources of a flag by name.

    The name is NAME of NAME=SOURCE, else the last part of the path.

    Raises:
        InputError: Two sources have the same name.
    """
    named: dict[str, str] = {}
    for text in sources:
        name, equals, source = text.partition("=")
        if not equals or "/" in name:
            name = ""
            source = text
        name = name or Path(source).name or Path.cwd().name
        if not name.isprintable():
            raise InputError(
                f"{flag}: found the name {name!r}, expected printable characters; say "
                "NAME=DIRECTORY"
            )
        if name in named:
            raise InputError(
                f"{flag}: found {name} twice, expected each once; name one of them otherwise, "
                "NAME=DIRECTORY"
            )
        named[name] = source
    return named


def _format_score(row: EvaluationRow) -> str:
    """Return the mean with its interval, `67.72 [62.9, 72.5]`."""
    return f"{row.mean:.2f}" + (f" [{row.low:.1f}, {row.high:.1f}]" if row.low is not None else "")


def _iterate_tables(rows: Sequence[EvaluationRow]) -> Iterator[_Table]:
    """Yield the table of retrieval and that of other tasks, if they have rows."""
    if retrieval := [row for row in rows if row.queries is not None]:
        groups: dict[tuple[str, str], list[EvaluationRow]] = {}
        for row in retrieval:
            groups.setdefault((row.dataset, row.model), []).append(row)
        lines = [
            (
                *names,
                *map(_format_score, members),
                f"{members[0].queries:,}",
                f"{members[0].documents:,}",
            )
            for names, members in groups.items()
        ]
        title = "zero-shot retrieval, percent, [95 % interval over queries]"
        yield (
            title,
            ("data set", "model"),
            tuple(_HEADINGS.values()),
            ("queries", "documents"),
            lines,
        )
    if others := [row for row in rows if row.queries is None]:
        lines = [
            (
                row.dataset,
                row.model,
                _MEASURES.get(row.metric, row.metric),
                _format_score(row),
                f"{row.examples:,}" if row.examples else "",
            )
            for row in others
        ]
        title = "similarity, probes and tasks of mteb, percent, [95 % interval]"
        yield title, ("data set", "model", "measure"), ("score",), ("examples",), lines


def build_tables(rows: Sequence[EvaluationRow]) -> list[Any]:
    """Return `rich.table.Table`s: a line for each model on each data set.

    Retrieval has a table, and all other tasks have one; a table without rows is left out.

    Args:
        rows: Rows with those of a data set next to each other.
    """
    rich_tables = []
    for title, names, scores, counts, lines in _iterate_tables(rows):
        table = tables.build_rich_table(title, names, scores + counts)
        before = ""
        for dataset, *cells in lines:
            if dataset == before:
                cells[-len(counts) :] = ("",) * len(counts)
            table.add_row(dataset if dataset != before else "", *cells)
            before = dataset
        rich_tables.append(table)
    return rich_tables


def format_results(
    rows: Sequence[EvaluationRow],
    configs: dict[str, "EmbeddingConfig"],
    suffix: str,
    origin: dict[str, Any],
) -> str:
    """Return the results as the text of a file: JSON, CSV or Markdown tables.

    CSV has a line for each row. Only JSON has the scores of queries.

    Args:
        rows: Rows of results, at least one.
        configs: Config by name of the model; only in JSON.
        suffix: ".json" or ".csv"; Markdown for any other.
        origin: See `format_evaluation`; only in JSON.
    """
    if suffix == ".json":
        return format_evaluation(rows, configs, origin)
    if suffix == ".csv":
        values = [row.fields_without_scores for row in rows]
        return tables.format_csv([values[0], *(row_values.values() for row_values in values)])
    parts = []
    for _, names, scores, counts, lines in _iterate_tables(rows):
        parts.append(tables.format_markdown(names, scores + counts, lines))
    return "\n".join(parts)
