"""Similarity, classification by a logistic probe, and other tasks of mteb."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.console import ProgressLine
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.embed.evaluation_file import EvaluationRow
from megaenc.errors import InputError, first_error_line
from megaenc.finetune.datasets import formats
from megaenc.finetune.datasets.local import find_split_files
from megaenc.finetune.examples import SEQUENCE_FAMILIES, TaskFamily
from megaenc.finetune.results.aggregate import compute_interval

if TYPE_CHECKING:
    from mteb.abstasks.abstask import AbsTask
    from torch import Tensor

    from megaenc.embed.embedder import Embedder

_BEIR_FILES = ("corpus.jsonl*", "queries.jsonl*", "qrels")
_METRIC_NAMES = {"cosine_spearman": "spearman"}


def import_mteb() -> ModuleType:
    """Return the module mteb, an optional dependency that takes seconds to import.

    Raises:
        InputError: It is not installed or cannot make its cache.
    """
    try:
        import mteb
    except ImportError:
        raise InputError(
            "similarity, classification and --tasks need the package mteb: `pip install "
            "'mteb>=2.26,<3'`"
        ) from None
    except OSError as error:
        raise InputError(
            f"mteb cannot make its cache directory ({error}); set MTEB_CACHE to a directory that "
            "can be written"
        ) from None
    return mteb


@dataclass(frozen=True)
class ProbeTask:
    """Task of mteb with its data loaded, as tables show it, by `load_tasks`.

    `task` is mteb's object, `name` its name in tables. `examples` counts test examples, None if
    test data are no rows, such as a corpus. `chance` is the expected score of random embeddings, as
    a fraction: 0 for similarity, 1 / classes for a probe; None if unknown. `metric` is the name of
    the main score. `evaluate` scores a model.
    """

    name: str
    task: "AbsTask"
    metric: str
    examples: int | None
    """None if the task has test data of another kind than rows, such as a corpus."""
    chance: float | None
    """Expected score of random embeddings, as a fraction: 0 for similarity, 1 / classes for a
    probe; None if unknown."""

    @classmethod
    def from_loaded(cls, name: str, task: "AbsTask") -> "ProbeTask":
        """Return the ProbeTask of a task whose data are loaded.

        Args:
            name: Name of the task in tables.
        """
        from datasets import Dataset

        metric = task.metadata.main_score
        subsets = []
        for subset in task.hf_subsets:
            data: Any = task.dataset or {}
            # A task of one subset may hold its splits directly, as in mteb.
            subsets.append(
                data if subset == "default" and subset not in data else data.get(subset, {})
            )
        tests = [splits.get(split) for splits in subsets for split in task.eval_splits]
        examples = (
            sum(map(len, tests))
            if tests and all(isinstance(test, Dataset) for test in tests)
            else None
        )
        chance = None
        if task.metadata.type == "STS":
            chance = 0.0
        elif task.metadata.type == "Classification" and metric == "accuracy":
            labels = [set(splits[task.train_split][task.label_column_name]) for splits in subsets]
            chance = sum(1 / len(names) for names in labels) / len(labels)
        return cls(name, task, _METRIC_NAMES.get(metric, metric), examples, chance)

    def build_random_rows(self) -> list[EvaluationRow]:
        """Return a list with the row of model `random`, the chance; [] if it is unknown."""
        return [] if self.chance is None else [self._build_row("random", self.chance, None)]

    def evaluate(self, model: str, embedder: "Embedder") -> EvaluationRow:
        """Return the row of a model: mteb's main score and its 95 % interval, in percent.

        The interval of a probe is Student's t over its experiments, that of a Spearman correlation
        Fisher's with the variance of Bonett and Wright (2000). There is none for other measures,
        nor for a task of several splits or languages, whose mean score is returned.

        Args:
            model: Name of the model in the row.

        Raises:
            InputError: The score is undefined, or mteb is not installed.
        """
        encoder = _MTEBEncoder(embedder, f"{model} {self.name}: embedding")
        # The Embedder has its own batches
        options: dict[str, Any] = {
            "encode_kwargs": {"batch_size": 1024},
            "cache": None,
        }
        results = import_mteb().evaluate(
            encoder, self.task, **options, co2_tracker=False, show_progress_bar=False
        )
        parts = [part for of_split in results.task_results[0].scores.values() for part in of_split]
        score = float(np.mean([part["main_score"] for part in parts]))
        if not math.isfinite(score):
            raise InputError(
                f"--model {embedder.directory}: {self.metric} of {self.name} is undefined: all its "
                "scores are equal"
            )
        if len(parts) > 1:
            return self._build_row(model, score, None)
        ends = None
        experiments = parts[0].get("scores_per_experiment")
        if experiments:
            main_scores = [scores[self.task.metadata.main_score] for scores in experiments]
            half = compute_interval(main_scores, "t").half
            if not math.isnan(half):
                ends = (score - half, score + half)
        elif self.metric == "spearman" and self.examples and self.examples > 3 and abs(score) < 1:
            error = 1.96 * math.sqrt((1 + score**2 / 2) / (self.examples - 3))
            ends = (math.tanh(math.atanh(score) - error), math.tanh(math.atanh(score) + error))
        return self._build_row(model, score, ends)

    def _build_row(
        self, model: str, score: float, ends: tuple[float, float] | None
    ) -> EvaluationRow:
        """Return the row of a score and its interval, both fractions, in percent."""
        low, high = (100 * end for end in ends) if ends else (None, None)
        return EvaluationRow(
            self.name, model, self.metric, 100 * score, low, high, None, None, self.examples
        )


class _MTEBEncoder:
    """mteb's EncoderProtocol of an Embedder: prompts by type, and cosine similarity.

    Texts that are neither query nor document get the model's default prompt. Embeddings have length
    1 only if the model's directory says so, as in sentence-transformers, because the logistic probe
    depends on it.
    """

    def __init__(self, embedder: "Embedder", description: str) -> None:
        from mteb.models import ModelMeta

        self.embedder = embedder
        self.description = description
        self.mteb_model_meta = ModelMeta.create_empty()

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **options: Any
    ) -> np.ndarray:
        """Return the embeddings of batches of texts, float32[texts, size], in order.

        The prefix of `prompt_type` is added. Embeddings have length 1 only if `config.normalize` is
        True.

        Args:
            inputs: Batches, whose texts are under the key `text`.
            prompt_type: mteb's PromptType, query or document; None: neither, and
                `config.default_prefix` is added.
            options: Ignored.
        """
        config = self.embedder.config
        prefixes = {"query": config.query_prefix, "document": config.document_prefix}
        prefix = prefixes[prompt_type.value] if prompt_type else config.default_prefix
        tokens = self.embedder.tokenize(
            [prefix + text for batch in inputs for text in batch["text"]]
        )
        with ProgressLine(self.description, total=sum(map(len, tokens)), closing=False) as line:
            return (
                self.embedder.embed(tokens, line.update, unit_length=config.normalize).cpu().numpy()
            )

    def similarity(self, embeddings1: Any, embeddings2: Any) -> "Tensor":
        """Return the cosines of all pairs, float32[texts1, texts2].

        The embeddings, arrays or tensors [texts, size], need not have length 1.
        """
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> "Tensor":
        """Return the cosine of each text with that at the same place, float32[texts].

        The embeddings, arrays or tensors [texts, size], need not have length 1.
        """
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)


def is_labelled_set(path: Path) -> bool:
    """Return whether `path` is a file, or a directory without any of `_BEIR_FILES`.

    If so, `load_labelled_set` is to read it, else `RetrievalSet.load`; both check the content. It
    is False for a missing path.
    """
    return os.path.isfile(path) or (
        os.path.isdir(path) and not any(any(path.glob(name)) for name in _BEIR_FILES)
    )


def load_labelled_set(name: str, path: Path) -> ProbeTask:
    """Return the ProbeTask of labelled data: similarity of pairs, or a logistic probe.

    Rows have `text`, `label` and, in pairs, `text_pair`. Labels of pairs must be scores, with a
    decimal point; those of single texts are classes, and need a train split. The test split is
    evaluated, or the validation split if there is none.

    Args:
        name: Name of the task in tables.
        path: Directory with a file per split, or a file, which is the test split.

    Raises:
        InputError: Data are invalid or of another kind, labels are all equal, or mteb is missing.
    """
    files = find_split_files(path)
    file = files.get("test") or files.get("validation")
    if file is None:
        raise InputError(f"{path}: no test split, expected a file test.*")
    rows = list(formats.read_rows(file))
    if not rows:
        raise InputError(f"{file}: holds no example, expected {formats.EXPECTED_FORMATS}")
    if formats.infer_family(file, rows[0][1]) not in SEQUENCE_FAMILIES:
        raise InputError(
            f"{file}: found rows with {', '.join(rows[0][1])}, expected text, label and, for "
            "similarity, text_pair"
        )
    has_scores = any(_is_score(row.get("label")) for _, row in rows)
    if any(row.get("text_pair") is not None for _, row in rows):
        if has_scores:
            return _build_similarity(name, file, rows)
        raise InputError(
            f"{file}: found pairs with classes as labels, expected scores such as 3.5 "
            "(similarity), or texts without text_pair; "
            "pairs of classes need `megaenc finetune run`"
        )
    if has_scores:
        raise InputError(
            f"{file}: found scores without text_pair, expected pairs of texts, or classes as labels"
        )
    if "train" not in files:
        raise InputError(f"{path}: no train split, expected a file train.*")
    train_rows = list(formats.read_rows(files["train"]))
    columns = {}
    labels = formats.collect_labels(TaskFamily.SC, train_rows)
    if len(labels.labels) < 2:
        contents = f"the class {labels.labels[0]} in all rows" if labels.labels else "no example"
        raise InputError(f"{files['train']}: found {contents}, expected at least two classes")
    for split, of_split in (("train", train_rows), ("test", rows)):
        examples = [
            (formats.get_value(row, "text", location, str), location, row)
            for location, row in of_split
        ]
        indices = [
            labels.index(formats.get_value(row, "label", location), location)
            for _, location, row in examples
        ]
        columns[split] = {
            "text": [replace_surrogates(text) for text, _, _ in examples],
            "label": indices,
        }
    return _build_local_task(name, "Classification", "accuracy", columns)


def _is_score(label: Any) -> bool:
    """Return whether a label is a number with a point, in JSON or as text of a table."""
    try:
        return isinstance(label, float) or (
            isinstance(label, str) and "." in label and math.isfinite(float(label))
        )
    except ValueError:
        return False


def _build_similarity(name: str, file: Path, rows: Sequence[formats.Row]) -> ProbeTask:
    """Return the ProbeTask of pairs with scores.

    Raises:
        InputError: A row is invalid, or all scores are equal.
    """
    columns: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "score": []}
    for location, row in rows:
        for column, key in (("sentence1", "text"), ("sentence2", "text_pair")):
            columns[column].append(replace_surrogates(formats.get_value(row, key, location, str)))
        label = formats.get_value(row, "label", location)
        try:
            score = math.nan if isinstance(label, bool) else float(label)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise InputError(
                f"{location}: label {str(label)[:40]!r}: expected a number, as in the other pairs"
            )
        columns["score"].append(score)
    if len(set(columns["score"])) < 2:
        raise InputError(
            f"{file}: found the score {columns['score'][0]} in all rows, expected at least two "
            "different ones"
        )
    return _build_local_task(name, "STS", "cosine_spearman", {"test": columns})


def _build_local_task(
    name: str, kind: str, main_score: str, columns: Mapping[str, Mapping[str, list[Any]]]
) -> ProbeTask:
    """Return the ProbeTask of mteb's class for `kind`, with its defaults.

    `columns` are the data, in memory, by split.
    """
    mteb = import_mteb()
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskClassification, AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    base: Any = AbsTaskSTS if kind == "STS" else AbsTaskClassification
    values = {
        "name": name,
        "description": "a local data set",
        "type": kind,
        "main_score": main_score,
    }
    source = {"path": "local", "revision": mteb.__version__}
    # mteb demands a language, which has no effect
    metadata = TaskMetadata(**values, dataset=source, eval_langs=["eng-Latn"])
    task = type("LocalTask", (base,), {"metadata": metadata})()
    task.dataset = {
        "default": DatasetDict(
            {split: Dataset.from_dict(dict(of_split)) for split, of_split in columns.items()}
        )
    }
    task.data_loaded = True
    return ProbeTask.from_loaded(name, task)


def load_tasks(names: Sequence[str]) -> Iterator[ProbeTask]:
    """Yield mteb's tasks of these names, with data from the Hub or its cache.

    They are in the order of `names`; a task is loaded, and its errors raised, only when it is
    reached.

    Raises:
        InputError: A task is unknown, a group or not of text only, its data cannot be loaded, or
            mteb is not installed.
    """
    for name in names:
        try:
            (task,) = import_mteb().get_tasks(tasks=[name])
        except KeyError as error:  # names the nearest task
            reason = str(error.args[0]).removeprefix(f"KeyError: '{name}' ")
            raise InputError(
                f"--tasks {name}: {reason}; see https://embeddings-benchmark.github.io/mteb"
            ) from None
        if task.metadata.modalities != ["text"]:
            raise InputError(
                f"--tasks {name}: found a task of {', '.join(task.metadata.modalities)}, expected "
                "text"
            )
        if members := getattr(task.metadata, "tasks", ()):
            raise InputError(
                f"--tasks {name}: found a group, expected its tasks: "
                f"{' '.join(member.metadata.name for member in members)}"
            )
        try:
            task.load_data()
        except Exception as error:  # HTTP, file system and the Hub's own errors
            raise InputError(
                f"--tasks {name}: the data set is neither in the Hub's cache nor can it be "
                "downloaded "
                f"({first_error_line(error, 120)}); local directories go to --data"
            ) from None
        yield ProbeTask.from_loaded(name, task)
