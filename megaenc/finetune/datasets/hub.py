"""The study's twelve data sets on the Hugging Face Hub.

Names, splits and rules follow the study's evaluation: github.com/hgissbkh/EncodEval,
encodeval/datasets.py.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaenc.data.sources.text_files import format_names
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats
from megaenc.finetune.datasets.beir import Qrels, build_retrieval_examples, move_to_validation
from megaenc.finetune.examples import (
    DOCUMENT,
    QUERY,
    Dataset,
    DataUnavailable,
    Examples,
    Pair,
    SplitName,
    TaskFamily,
    choose_validation_queries,
    hash_json,
    print_once,
    split_validation_rows,
)

TRAINING_PAIRS = "msmarco_pairs"
_PARQUET_REVISION = "refs/convert/parquet"
_VALIDATION_RULE = (
    "test is the Hub's validation split; validation is 5 % of train, "
    "datasets' train_test_split with seed 42"
)
_ROWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class HubSpec:
    """Description of a Hub data set: family, repository, columns, labels, splits.

    HUB_DATASETS has them by name. `config` is the configuration on the Hub, None for the default.
    `fields` has the column on the Hub by our field name; retrieval sets in BEIR's layout have none.
    `template` joins the texts of an example of SC; `labels`, of SC and TC, are in the order of
    their indices. If `test`, the Hub's split for test, is not "test", validation is drawn from
    train. `rule` only describes the splits, for the fingerprint.
    """

    family: TaskFamily
    repository: str
    config: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """Column on the Hub by our field name."""
    template: str = "{text}"
    """Template of a classification example's text."""
    labels: tuple[str, ...] = ()
    test: str = "test"
    """Split on the Hub used for test. If it is not `test`, validation is drawn from train."""
    rule: str = "the Hub's own splits"
    """Rule of the splits; part of the fingerprint."""


_NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
# The order of tner/ontonotes5: the study's copy of it has integer tags without names.
_ONTONOTES = """
    O B-CARDINAL B-DATE I-DATE B-PERSON I-PERSON B-NORP B-GPE I-GPE B-LAW I-LAW B-ORG I-ORG
    B-PERCENT I-PERCENT B-ORDINAL B-MONEY I-MONEY B-WORK_OF_ART I-WORK_OF_ART B-FAC B-TIME
    I-CARDINAL B-LOC B-QUANTITY I-QUANTITY I-NORP I-LOC B-PRODUCT I-TIME B-EVENT I-EVENT I-FAC
    B-LANGUAGE I-PRODUCT I-ORDINAL I-LANGUAGE
"""
_MNLI_FIELDS = {"text": "premise", "text_pair": "hypothesis", "label": "label"}
_QQP_FIELDS = {"text": "question1", "text_pair": "question2", "label": "label"}
_QA_FIELDS = {"question": "question", "context": "context", "answers": "answers"}
_GLUE = "nyu-mll/glue"

# fmt: off
HUB_DATASETS: dict[str, HubSpec] = {
    "sst2": HubSpec(
        TaskFamily.SC, _GLUE, "sst2", {"text": "sentence", "label": "label"}, "{text}",
        ("negative", "positive"), "validation", _VALIDATION_RULE),
    "qqp": HubSpec(
        TaskFamily.SC, _GLUE, "qqp", _QQP_FIELDS, "Question 1: {text}\nQuestion 2: {text_pair}",
        ("not_duplicate", "duplicate"), "validation", _VALIDATION_RULE),
    "mnli_m": HubSpec(
        TaskFamily.SC, _GLUE, "mnli", _MNLI_FIELDS, "Premise: {text}\nHypothesis: {text_pair}",
        ("entailment", "neutral", "contradiction"), "validation_matched", _VALIDATION_RULE),
    "conll2003_en": HubSpec(
        TaskFamily.TC, "hgissbkh/conll2003-en", fields={"tokens": "words", "tags": "ner"},
        labels=(*_NER, "B-MISC", "I-MISC")),
    "ontonotes": HubSpec(
        TaskFamily.TC, "hgissbkh/ontonotes5", fields={"tokens": "tokens", "tags": "tags"},
        labels=tuple(_ONTONOTES.split())),
    "uner_en": HubSpec(
        TaskFamily.TC, "hgissbkh/uner_en", fields={"tokens": "tokens", "tags": "ner_tags"},
        labels=_NER),
    "squad": HubSpec(
        TaskFamily.QA, "rajpurkar/squad",
        fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "squad_v2": HubSpec(
        TaskFamily.QA, "rajpurkar/squad_v2",
        fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "record": HubSpec(
        TaskFamily.QA, "hgissbkh/record",
        fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "msmarco": HubSpec(
        TaskFamily.IR, "BeIR/msmarco", rule="BeIR/msmarco-qrels validation and test"),
    "nq": HubSpec(
        TaskFamily.IR, "BeIR/nq",
        rule="BeIR/nq-qrels test, half of its queries (seed 42) validate; title. text"),
    "mldr_en": HubSpec(
        TaskFamily.IR, "hgissbkh/mldr-en", rule="dev and test, positive passages"),
    TRAINING_PAIRS: HubSpec(
        TaskFamily.IR, "hgissbkh/msmarco-pairs",
        fields={"query": "query", "positive": "positive"}),
}
# fmt: on


def load_hub(name: str, revision: str = "") -> Dataset:
    """Return the Dataset of `name`, a key of HUB_DATASETS, without reading data.

    `load_split` downloads it. The fingerprint is that of the description and the revision, not of
    the data.

    Args:
        revision: Commit, branch or tag of the repository; empty: its default branch.

    Raises:
        InputError: A revision of a retrieval set, which has several repositories, is given.
    """
    spec = HUB_DATASETS[name]
    is_retrieval = spec.family is TaskFamily.IR and name != TRAINING_PAIRS
    if revision and is_retrieval:
        raise InputError(
            f"{name}@{revision}: is read from several repositories of the Hub, "
            f"expected {name} without a revision"
        )
    source = [
        spec.repository,
        spec.config,
        revision,
        spec.rule,
        spec.template,
        dict(spec.fields),
        spec.labels,
    ]
    fingerprint = hash_json({"hub": source})
    if is_retrieval:
        pairs_fingerprint = load_hub(TRAINING_PAIRS).fingerprint
        return Dataset(
            name,
            TaskFamily.IR,
            (),
            TRAINING_PAIRS,
            fingerprint,
            pairs_fingerprint,
            _build_retrieval_loader(name),
        )
    reader = functools.partial(
        _load_training_pairs if name == TRAINING_PAIRS else _load_labelled_split, name, revision
    )
    pair_template = spec.template if "text_pair" in spec.fields else ""
    return Dataset(
        name, spec.family, spec.labels, name, fingerprint, fingerprint, reader, pair_template
    )


def _load_labelled_split(name: str, revision: str, split: SplitName) -> Examples:
    """Load a split of a classification, tagging or question answering set.

    Invalid questions are skipped with a message.
    """
    spec = HUB_DATASETS[name]
    shared = spec.test != "test"
    on_hub = split
    if split == "test":
        on_hub = spec.test
    elif shared:
        on_hub = "train"
    data = _load_hub_split(
        name, on_hub, spec.fields.values(), config=spec.config, revision=revision
    )
    row_indices = range(len(data))
    if shared and split != "test":
        train, validation = split_validation_rows(len(data))
        row_indices = [int(index) for index in (train if split == "train" else validation)]
        data = data.select(row_indices)
    return build_hub_examples(
        name, on_hub, data, row_indices, spec, formats.LabelSet(spec.labels, is_indexed=True)
    )


def build_hub_examples(
    name: str,
    on_hub: str,
    data: Any,
    row_indices: Iterable[int],
    spec: HubSpec,
    labels: formats.LabelSet,
) -> Examples:
    """Return the examples of the rows of `data`, a `datasets.Dataset`, in order.

    Empty sentences are left out silently, invalid questions with a message.

    Args:
        name, on_hub: Data set, and split on the Hub, for messages and ids.
        row_indices: Index, from 0, of each row of `data` in the Hub's split.
        spec: Description whose `family`, `fields` and `template` are used.
        labels: All labels of the data set; another label is an error.

    Raises:
        InputError: A text or a sentence is wrong.
    """
    # Names of integer tags on the Hub, if it has them.
    tags = (
        getattr(data.features[spec.fields["tags"]], "feature", None)
        if spec.family is TaskFamily.TC
        else None
    )
    names = dict(enumerate(getattr(tags, "names", None) or ()))
    examples = []
    errors = []
    for row_index, hub_row in zip(row_indices, data.to_list(), strict=True):
        row = {ours: hub_row[theirs] for ours, theirs in spec.fields.items()}
        row["id"] = (
            hub_row["id"]
            if spec.family is TaskFamily.QA and isinstance(hub_row.get("id"), str)
            else f"{on_hub}-{row_index}"
        )
        if spec.family is TaskFamily.TC:
            if row["tokens"] == row["tags"] == []:
                continue
            if names and row["tags"] is not None:
                row["tags"] = [names.get(tag, tag) for tag in row["tags"]]
        if "is_impossible" in hub_row:
            row["is_impossible"] = hub_row["is_impossible"]
        try:
            place = f"{name}: {on_hub} row {row_index + 1}"
            examples.append(
                formats.build_example(spec.family, row, place, "", labels, spec.template)
            )
        except InputError as error:
            if spec.family is not TaskFamily.QA:
                raise
            errors.append(str(error))
    if errors:
        print_once(
            f"{name}: {len(errors):,} of {len(data):,} questions of {on_hub} are left out, "
            f"the first because of {errors[0]}"
        )
    return examples


def _load_training_pairs(name: str, revision: str, split: SplitName) -> Examples:
    """Load the training pairs `name`.

    Raises:
        InputError: The split is not train.
    """
    if split != "train":
        raise InputError(
            f"{name}: has training data only, expected msmarco, nq or mldr_en to evaluate on"
        )
    data = _load_hub_split(name, "train", ("query", "positive"), revision=revision)
    pairs = []
    for row_index, row in enumerate(data.select_columns(["query", "positive"]).to_list()):
        place = f"{name}: train row {row_index + 1}"
        query = formats.get_value(row, "query", place, str)
        document = formats.get_value(row, "positive", place, str)
        pairs.append(Pair(f"train-{row_index}", QUERY + query, DOCUMENT + document))
    return pairs


def _build_retrieval_loader(name: str) -> Callable[[SplitName], Examples]:
    """Return a function that loads a split of a retrieval set.

    Documents are those judged for validation or test.
    """

    @functools.cache
    def read() -> tuple[dict[SplitName, Qrels], dict[str, str], dict[str, str]]:
        qrels, queries = _load_mldr_qrels(name) if name == "mldr_en" else _load_beir_qrels(name)
        return (
            qrels,
            queries,
            _load_judged_texts(
                name,
                "corpus",
                [grades for split_qrels in qrels.values() for grades in split_qrels.values()],
            ),
        )

    def read_split(split: SplitName) -> Examples:
        if split == "train":
            return load_hub(TRAINING_PAIRS).load_split("train")
        qrels, queries, corpus = read()
        return build_retrieval_examples(qrels[split], queries, corpus)

    return read_split


def _load_beir_qrels(name: str) -> tuple[dict[SplitName, Qrels], dict[str, str]]:
    """Load the qrels of a BEIR set by split, and its judged queries by id."""
    qrels: dict[SplitName, Qrels] = {}
    for split in ("test",) if name == "nq" else ("validation", "test"):
        columns = ("query-id", "corpus-id", "score")
        qrels[split] = {}
        for row in _load_hub_split(
            name, split, columns, repository=f"{HUB_DATASETS[name].repository}-qrels"
        ).to_list():
            qrels[split].setdefault(str(row["query-id"]), {})[str(row["corpus-id"])] = math.floor(
                row["score"]
            )
    if name == "nq":
        move_to_validation(qrels, "test", choose_validation_queries(list(qrels["test"])))
    return qrels, _load_judged_texts(name, "queries", qrels.values())


def _load_mldr_qrels(name: str) -> tuple[dict[SplitName, Qrels], dict[str, str]]:
    """Load the positive passages of MLDR as qrels by split, and its queries by id."""
    qrels: dict[SplitName, Qrels] = {"validation": {}, "test": {}}
    queries: dict[str, str] = {}
    columns = ["query_id", "query", "positive_passages"]
    for split, grades in qrels.items():
        data = _load_hub_split(
            name, "dev" if split == "validation" else "test", columns, config="default"
        )
        for row in data.select_columns(columns).to_list():
            passages = row["positive_passages"]
            documents = (
                passages["docid"]
                if isinstance(passages, Mapping)
                else [passage["docid"] for passage in passages]
            )
            query = str(row["query_id"])
            queries[query] = row["query"]
            grades.setdefault(query, {}).update({str(document): 1 for document in documents})
    return qrels, queries


def _load_judged_texts(name: str, part: str, judged: Iterable[Collection[str]]) -> dict[str, str]:
    """Load the texts of `part` with ids in `judged`, by id.

    MS MARCO has 8.8 million others. NQ's documents begin with their title and a full stop, even if
    the title is empty, as in the study.

    Args:
        part: "queries" or "corpus".

    Raises:
        InputError: A row is missing.
    """
    import pyarrow
    import pyarrow.compute

    judged_ids = {name for ids in judged for name in ids}
    key = "docid" if name == "mldr_en" else "_id"
    title = name == "nq" and part == "corpus"
    data = _load_hub_split(name, part, (key, "text", *(["title"] if title else [])), config=part)
    names = pyarrow.array(judged_ids, pyarrow.string())
    row_indices = []
    start = 0
    for batch in data.select_columns([key]).with_format("arrow").iter(_ROWS_AT_ONCE):
        is_judged = pyarrow.compute.is_in(batch[key].cast(pyarrow.string()), value_set=names)
        row_indices += (start + np.flatnonzero(is_judged.to_numpy())).tolist()
        start += len(batch)
    rows_found = data.select(row_indices).to_list()
    texts = {
        str(row[key]): f"{row['title'] or ''}. {row['text']}" if title else row["text"]
        for row in rows_found
    }
    if missing := sorted(judged_ids - texts.keys()):
        kind = "query"
        place = "among the queries"
        if part == "corpus":
            kind = "document"
            place = "in the corpus"
        raise InputError(
            f"{name}: {kind} {missing[0]!r} is judged but not {place} ({len(missing):,} such)"
        )
    return texts


def _load_hub_split(
    name: str,
    split: str,
    columns: Collection[str],
    *,
    repository: str = "",
    config: str | None = None,
    revision: str = "",
) -> Any:
    """Return a split of a Hub repository, from the Hub or the cache of `datasets`.

    Args:
        columns: Columns that the split must have.
        repository: By default that of `name`.

    Raises:
        DataUnavailable: A failure is temporary.
        InputError: The split cannot be read, or lacks a column.
    """
    advice = f"expected a network once, or local files: {name}=DIRECTORY"
    repository = repository or HUB_DATASETS[name].repository
    data = load_from_hub(
        name, repository, config, revision, f"{name}: ", advice, is_retried=True, split=split
    )
    for column in columns:
        if column not in data.column_names:
            raise InputError(
                f"{name}: no column `{column}` on the Hub; found {format_names(data.column_names)}"
            )
    return data


def load_from_hub(
    name: str,
    repository: str,
    config: str | None,
    revision: str,
    start: str,
    advice: str,
    *,
    is_retried: bool = False,
    **options: Any,
) -> Any:
    """Return `datasets.load_dataset` of a repository: a Dataset or a DatasetDict.

    The result is a Dataset with the option `split`. A line that names the repository is printed
    once. A failure is a DataUnavailable if it is temporary and `is_retried`, else an InputError.

    Args:
        name: Name of the data set, for that line.
        config, revision: Configuration and revision on the Hub; None and "" stand for its defaults.
        start, advice: Start, with its `: `, and end of the error.
        is_retried: Whether the caller repeats temporary failures.
        options: Options of `load_dataset`, such as `split`.
    """
    import datasets

    source = ", ".join(part for part in (config, options.get("split"), revision) if part)
    described = f"{repository} ({source})" if source else repository
    print_once(f"{name}: reading {described}, from the Hugging Face Hub unless it is in the cache")
    load_dataset = functools.partial(datasets.load_dataset, repository, config, **options)
    try:
        try:
            return load_dataset(revision=revision or None)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error) or revision:
                raise
            # The Hub's conversion of a data set with a loading script.
            return load_dataset(revision=_PARQUET_REVISION)
    except Exception as error:  # no network, no such revision, a damaged cache: of many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            type(error).__name__
        ]
        reason = " ".join(lines[: 2 if "available configs" in "".join(lines[1:2]) else 1])[:200]
        kind = DataUnavailable if is_retried and _is_temporary(error) else InputError
        if datasets.config.HF_HUB_OFFLINE:
            kind = InputError
            reason = (
                "not in the cache, and HF_DATASETS_OFFLINE or HF_HUB_OFFLINE forbids the network"
            )
        raise kind(
            f"{start}{described} of the Hugging Face Hub cannot be read: {reason}; {advice}"
        ) from None


# Of Python, `requests`, `httpx` and `huggingface_hub`, depending on the version of `datasets`.
_NETWORK_ERRORS = {
    "ConnectionError",
    "TimeoutError",
    "Timeout",
    "TransportError",
    "LocalEntryNotFoundError",
}


def _is_temporary(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes is a failure of network or servers."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if (
            status in (408, 429)
            or status >= 500
            or _NETWORK_ERRORS.intersection(kind.__name__ for kind in type(error).__mro__)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
