"""The study's twelve data sets, read from the Hugging Face Hub: fields, splits and texts as in the study's own evaluation.

Source of names, splits and rules: github.com/hgissbkh/EncodEval, encodeval/datasets.py.
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
_VALIDATION_RULE = "test is the Hub's validation split; validation is 5 % of train, datasets' train_test_split with seed 42"
_ROWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class HubDatasetSpec:
    """How one data set of the Hub is read."""

    family: TaskFamily
    repository: str
    config: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """The Hub's name of a column, by ours."""
    template: str = "{text}"
    """The text of a classified example, from those columns."""
    labels: tuple[str, ...] = ()
    test: str = "test"
    """The Hub's split that is the test set. Where it is not called `test`, part of train validates."""
    rule: str = "the Hub's own splits"
    """How splits come about; part of the fingerprint."""


_NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
# The order of tner/ontonotes5, of which the study's set is a copy: there tags are integers without names.
_ONTONOTES = """
    O B-CARDINAL B-DATE I-DATE B-PERSON I-PERSON B-NORP B-GPE I-GPE B-LAW I-LAW B-ORG I-ORG B-PERCENT I-PERCENT B-ORDINAL B-MONEY
    I-MONEY B-WORK_OF_ART I-WORK_OF_ART B-FAC B-TIME I-CARDINAL B-LOC B-QUANTITY I-QUANTITY I-NORP I-LOC B-PRODUCT I-TIME B-EVENT
    I-EVENT I-FAC B-LANGUAGE I-PRODUCT I-ORDINAL I-LANGUAGE
"""
_MNLI_FIELDS = {"text": "premise", "text_pair": "hypothesis", "label": "label"}
_QQP_FIELDS = {"text": "question1", "text_pair": "question2", "label": "label"}
_QA_FIELDS = {"question": "question", "context": "context", "answers": "answers"}
_GLUE = "nyu-mll/glue"

# fmt: off
HUB_DATASETS: dict[str, HubDatasetSpec] = {
    "sst2": HubDatasetSpec(TaskFamily.SC, _GLUE, "sst2", {"text": "sentence", "label": "label"},
                   "{text}", ("negative", "positive"), "validation", _VALIDATION_RULE),
    "qqp": HubDatasetSpec(TaskFamily.SC, _GLUE, "qqp", _QQP_FIELDS,
                  "Question 1: {text}\nQuestion 2: {text_pair}", ("not_duplicate", "duplicate"), "validation", _VALIDATION_RULE),
    "mnli_m": HubDatasetSpec(TaskFamily.SC, _GLUE, "mnli", _MNLI_FIELDS, "Premise: {text}\nHypothesis: {text_pair}",
                     ("entailment", "neutral", "contradiction"), "validation_matched", _VALIDATION_RULE),
    "conll2003_en": HubDatasetSpec(TaskFamily.TC, "hgissbkh/conll2003-en", fields={"tokens": "words", "tags": "ner"},
                           labels=(*_NER, "B-MISC", "I-MISC")),
    "ontonotes": HubDatasetSpec(TaskFamily.TC, "hgissbkh/ontonotes5", fields={"tokens": "tokens", "tags": "tags"},
                        labels=tuple(_ONTONOTES.split())),
    "uner_en": HubDatasetSpec(TaskFamily.TC, "hgissbkh/uner_en", fields={"tokens": "tokens", "tags": "ner_tags"}, labels=_NER),
    "squad": HubDatasetSpec(TaskFamily.QA, "rajpurkar/squad", fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "squad_v2": HubDatasetSpec(TaskFamily.QA, "rajpurkar/squad_v2", fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "record": HubDatasetSpec(TaskFamily.QA, "hgissbkh/record", fields=_QA_FIELDS, test="validation", rule=_VALIDATION_RULE),
    "msmarco": HubDatasetSpec(TaskFamily.IR, "BeIR/msmarco", rule="BeIR/msmarco-qrels validation and test"),
    "nq": HubDatasetSpec(TaskFamily.IR, "BeIR/nq", rule="BeIR/nq-qrels test, half of its queries (seed 42) validate; title. text"),
    "mldr_en": HubDatasetSpec(TaskFamily.IR, "hgissbkh/mldr-en", rule="dev and test, positive passages"),
    TRAINING_PAIRS: HubDatasetSpec(TaskFamily.IR, "hgissbkh/msmarco-pairs", fields={"query": "query", "positive": "positive"}),
}
# fmt: on


def load_hub(name: str, revision: str = "") -> Dataset:
    """Return the data set `name` of HUB_SETS, unread. `revision` is a commit, branch or tag of its repository."""
    known = HUB_DATASETS[name]
    searched = known.family is TaskFamily.IR and name != TRAINING_PAIRS
    if revision and searched:
        raise InputError(f"{name}@{revision}: is read from several repositories of the Hub, expected {name} without a revision")
    source = [known.repository, known.config, revision, known.rule, known.template, dict(known.fields), known.labels]
    fingerprint = hash_json({"hub": source})
    if searched:
        trained = load_hub(TRAINING_PAIRS).fingerprint
        return Dataset(name, TaskFamily.IR, (), TRAINING_PAIRS, fingerprint, trained, _build_retrieval_loader(name))
    reader = functools.partial(_load_training_pairs if name == TRAINING_PAIRS else _load_labelled_split, name, revision)
    return Dataset(name, known.family, known.labels, name, fingerprint, fingerprint, reader)


def _load_labelled_split(name: str, revision: str, split: SplitName) -> Examples:
    """Read a split of one of the nine sets that are no retrieval."""
    known = HUB_DATASETS[name]
    shared = known.test != "test"
    on_hub = known.test if split == "test" else "train" if shared else split
    data = _load_hub_split(name, on_hub, known.fields.values(), config=known.config, revision=revision)
    numbers = range(len(data))
    if shared and split != "test":
        train, validation = split_validation_rows(len(data))
        numbers = [int(at) for at in (train if split == "train" else validation)]
        data = data.select(numbers)
    labels = formats.LabelSet(known.labels, is_indexed=True)
    # What the Hub calls its tags, where they are integers with names.
    tags = getattr(data.features[known.fields["tags"]], "feature", None) if known.family is TaskFamily.TC else None
    names = getattr(tags, "names", None)
    examples, bad = [], []
    for number, found in zip(numbers, data.to_list(), strict=True):
        row = {ours: found[theirs] for ours, theirs in known.fields.items()}
        row["id"] = found["id"] if known.family is TaskFamily.QA and isinstance(found.get("id"), str) else f"{on_hub}-{number}"
        if known.family is TaskFamily.TC:
            if not row["tokens"]:
                continue
            row["tags"] = [names[tag] if names and isinstance(tag, int) else tag for tag in row["tags"]]
        try:
            place = f"{name}: {on_hub} row {number + 1}"
            examples.append(formats.build_example(known.family, row, place, "", labels, known.template))
        except InputError as error:
            if known.family is not TaskFamily.QA:
                raise
            bad.append(str(error))
    if bad:
        print_once(f"{name}: {len(bad):,} of {len(data):,} questions of {on_hub} are left out, the first because of {bad[0]}")
    return examples


def _load_training_pairs(name: str, revision: str, split: SplitName) -> Examples:
    if split != "train":
        raise InputError(f"{name}: is there to be trained on alone, expected msmarco, nq or mldr_en to evaluate on")
    data = _load_hub_split(name, "train", ("query", "positive"), revision=revision)
    pairs = []
    for number, row in enumerate(data.select_columns(["query", "positive"]).to_list()):
        query, document = (formats.get_value(row, key, f"{name}: train row {number + 1}", str) for key in ("query", "positive"))
        pairs.append(Pair(f"train-{number}", QUERY + query, DOCUMENT + document))
    return pairs


def _build_retrieval_loader(name: str) -> Callable[[SplitName], Examples]:
    """Return a reader of splits: queries of either split against the labelled documents of both, which are read once."""

    @functools.cache
    def read() -> tuple[dict[SplitName, Qrels], dict[str, str], dict[str, str]]:
        judged, queries = _load_mldr_qrels(name) if name == "mldr_en" else _load_beir_qrels(name)
        return judged, queries, _load_judged_texts(name, "corpus", [grades for of in judged.values() for grades in of.values()])

    def split_of(split: SplitName) -> Examples:
        if split == "train":
            return load_hub(TRAINING_PAIRS).load_split("train")
        judged, queries, corpus = read()
        return build_retrieval_examples(judged[split], queries, corpus)

    return split_of


def _load_beir_qrels(name: str) -> tuple[dict[SplitName, Qrels], dict[str, str]]:
    judged: dict[SplitName, Qrels] = {}
    for split in ("test",) if name == "nq" else ("validation", "test"):
        columns = ("query-id", "corpus-id", "score")
        judged[split] = {}
        for row in _load_hub_split(name, split, columns, repository=f"{HUB_DATASETS[name].repository}-qrels").to_list():
            judged[split].setdefault(str(row["query-id"]), {})[str(row["corpus-id"])] = math.floor(row["score"])
    if name == "nq":
        move_to_validation(judged, "test", choose_validation_queries(list(judged["test"])))
    return judged, _load_judged_texts(name, "queries", judged.values())


def _load_mldr_qrels(name: str) -> tuple[dict[SplitName, Qrels], dict[str, str]]:
    judged: dict[SplitName, Qrels] = {"validation": {}, "test": {}}
    queries: dict[str, str] = {}
    columns = ["query_id", "query", "positive_passages"]
    for split, found in judged.items():
        data = _load_hub_split(name, "dev" if split == "validation" else "test", columns, config="default")
        for row in data.select_columns(columns).to_list():
            passages = row["positive_passages"]
            documents = passages["docid"] if isinstance(passages, Mapping) else [passage["docid"] for passage in passages]
            query = str(row["query_id"])
            queries[query] = row["query"]
            found.setdefault(query, {}).update({str(document): 1 for document in documents})
    return judged, queries


def _load_judged_texts(name: str, part: str, judged: Iterable[Collection[str]]) -> dict[str, str]:
    """Return only the texts of rows whose ids are `judged`: of MS MARCO some thousands of 8.8 million.

    The titles of NQ's documents stand before them with a full stop, as in the study also where they are empty. Raises InputError
    if a row is missing.
    """
    import pyarrow
    import pyarrow.compute

    wanted = {name for some in judged for name in some}
    key, title = "docid" if name == "mldr_en" else "_id", name == "nq" and part == "corpus"
    data = _load_hub_split(name, part, (key, "text", *(["title"] if title else [])), config=part)
    names, numbers, start = pyarrow.array(wanted, pyarrow.string()), [], 0
    for batch in data.select_columns([key]).with_format("arrow").iter(_ROWS_AT_ONCE):
        found = pyarrow.compute.is_in(batch[key].cast(pyarrow.string()), value_set=names)
        numbers += (start + np.flatnonzero(found.to_numpy())).tolist()
        start += len(batch)
    rows_found = data.select(numbers).to_list()
    texts = {str(row[key]): f"{row['title'] or ''}. {row['text']}" if title else row["text"] for row in rows_found}
    if missing := sorted(wanted - texts.keys()):
        kind, place = ("document", "in the corpus") if part == "corpus" else ("query", "among the queries")
        raise InputError(f"{name}: {kind} {missing[0]!r} is judged but not {place} ({len(missing):,} such)")
    return texts


def _load_hub_split(
    name: str, split: str, columns: Collection[str], *, repository: str = "", config: str | None = None, revision: str = ""
) -> Any:
    """Load a split of a repository, its own unless given, from the Hub or the cache of `datasets`, with at least these columns.

    Raises Unreachable where trying again later may help, InputError where it will not.
    """
    import datasets

    repository = repository or HUB_DATASETS[name].repository
    which = ", ".join(part for part in (config, split, revision) if part)
    print_once(f"{name}: reading {repository} ({which}), from the Hugging Face Hub unless it is in the cache")
    asked = functools.partial(datasets.load_dataset, repository, config, split=split)
    try:
        try:
            data = asked(revision=revision or None)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error) or revision:
                raise
            data = asked(revision=_PARQUET_REVISION)  # what the Hub itself has made of a data set that was a program
    except Exception as error:  # no network, no such revision, a damaged cache: as many types as reasons
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        kind = DataUnavailable if _is_temporary(error) else InputError
        if datasets.config.HF_HUB_OFFLINE:
            kind, reason = InputError, "not in the cache, and HF_DATASETS_OFFLINE or HF_HUB_OFFLINE forbids the network"
        raise kind(
            f"{name}: {repository} ({which}) of the Hugging Face Hub cannot be read: {reason}; "
            f"expected a network once, or local files: {name}=FOLDER"
        ) from None
    for column in columns:
        if column not in data.column_names:
            raise InputError(f"{name}: no column `{column}` on the Hub; found {format_names(data.column_names)}")
    return data


# Of Python, `requests`, `httpx` and `huggingface_hub`; which of them a version of `datasets` goes through differs.
_NETWORK_ERRORS = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "LocalEntryNotFoundError"}


def _is_temporary(error: BaseException | None) -> bool:
    """Return whether the network or the Hub's servers failed, as far as the error and those behind it tell."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (408, 429) or status >= 500 or _NETWORK_ERRORS.intersection(kind.__name__ for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False
