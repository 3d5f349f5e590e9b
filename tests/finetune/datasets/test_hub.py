"""Data sets of the Hub without network: `load_dataset` gives small ones like them."""

import importlib

import datasets
import pytest
from datasets import ClassLabel, Features, Sequence, Value
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from megaenc.errors import InputError
from megaenc.finetune.datasets import hub
from megaenc.finetune.datasets.registry import DATASETS, find_dataset
from megaenc.finetune.examples import (
    STUDY_FAMILIES,
    Answer,
    DataUnavailable,
    LabelledText,
    Pair,
    Question,
    TaggedWords,
    TaskFamily,
)

ROWS = 40
# Whichever of its versions the Hub's client uses
httpx = importlib.import_module(HfHubHTTPError.__mro__[1].__module__)


@pytest.fixture
def on_hub(monkeypatch):
    """Give {(repository, config, split): Dataset or an error}; returns the calls."""
    calls = []

    def give(content):
        def load_dataset(repository, config=None, *, split, revision=None):
            calls.append((repository, config, split, revision))
            found = content[(repository, config, split)]
            if isinstance(found, Exception):
                raise found
            return found(revision) if callable(found) else found

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return give


def table(columns, count=ROWS):
    """`count` rows; of each column its value for a row number."""
    return datasets.Dataset.from_dict(
        {name: [value(row) for row in range(count)] for name, value in columns.items()}
    )


@pytest.mark.parametrize("name, config, columns, text, test, count", [
    ("sst2", "sst2", ["sentence"], "{sentence}", "validation", 2),
    ("qqp", "qqp", ["question1", "question2"], "Question 1: {question1}\nQuestion 2: {question2}",
     "validation", 2),
    ("mnli_m", "mnli", ["premise", "hypothesis"], "Premise: {premise}\nHypothesis: {hypothesis}",
     "validation_matched", 3),
])  # fmt: skip
def test_classification(on_hub, name, config, columns, text, test, count):
    values = {column: (lambda row, column=column: f"{column} {row} {{}}") for column in columns}
    data = table({**values, "label": lambda row: row % count, "idx": lambda row: row})
    calls = on_hub(
        {
            ("nyu-mll/glue", config, "train"): data,
            ("nyu-mll/glue", config, test): data.select(range(3)),
        }
    )
    found = find_dataset(name)
    assert not calls  # finding reads nothing
    assert (found.name, found.family, len(found.labels), found.train_on) == (
        name,
        TaskFamily.SC,
        count,
        name,
    )
    cut = data.train_test_split(train_size=0.95, seed=42)
    for split, rows in (("train", cut["train"]), ("validation", cut["test"])):
        expected = [
            LabelledText(f"train-{row['idx']}", text.format(**row), row["label"]) for row in rows
        ]
        assert found.load_split(split) == expected and len(expected) == (
            38 if split == "train" else 2
        )
    assert [example.id for example in found.load_split("test")] == [
        f"{test}-{row}" for row in range(3)
    ]


@pytest.mark.parametrize("name, repository, tokens, tags, count, person", [
    ("conll2003_en", "hgissbkh/conll2003-en", "words", "ner", 9, "I-PER"),
    ("ontonotes", "hgissbkh/ontonotes5", "tokens", "tags", 37, "I-PERSON"),
    ("uner_en", "hgissbkh/uner_en", "tokens", "ner_tags", 7, "I-PER"),
])  # fmt: skip
def test_tagging(on_hub, name, repository, tokens, tags, count, person):
    """Tags are names of another order, positions in the study's order, or text."""
    found = find_dataset(name)
    assert (found.family, len(found.labels), found.labels[0]) == (TaskFamily.TC, count, "O")
    names = ["B-ORG", "O", person]
    expected = tuple(found.labels.index(tag) for tag in names)
    for values, kind in (
        ((0, 1, 2), ClassLabel(names=names)),
        (expected, Value("int64")),
        (names, Value("string")),
    ):
        features = Features({tokens: Sequence(Value("string")), tags: Sequence(kind)})
        data = datasets.Dataset.from_dict(
            {tokens: [["a", "b", "c"], []], tags: [values, []]}, features=features
        )
        on_hub({(repository, None, "test"): data})
        # Without the empty sentence
        assert found.load_split("test") == [TaggedWords("test-0", ("a", "b", "c"), expected)]


def test_tags_that_the_study_does_not_have_are_refused(on_hub):
    data = datasets.Dataset.from_dict(
        {"tokens": [["a"]], "ner_tags": [[1]]},
        features=Features(
            {
                "tokens": Sequence(Value("string")),
                "ner_tags": Sequence(ClassLabel(names=["O", "B-OTH"])),
            }
        ),
    )
    on_hub({("hgissbkh/uner_en", None, "test"): data})
    with pytest.raises(
        InputError,
        match=(
            r"uner_en: test row 1: label 'B-OTH': outside the label set, expected one of O, B-PER"
        ),
    ):
        find_dataset("uner_en").load_split("test")


@pytest.mark.parametrize("name, repository", [
    ("squad", "rajpurkar/squad"), ("squad_v2", "rajpurkar/squad_v2"), ("record", "hgissbkh/record"),
])  # fmt: skip
def test_answering(on_hub, capsys, name, repository):
    starts = [[], [5], [4]]
    columns = {
        "question": lambda row: f"Who {row}?",
        "context": lambda row: "Yes Ada did.",
        "answers": lambda row: {"text": ["Ada"] * len(starts[row]), "answer_start": starts[row]},
    }
    if name != "record":
        columns["id"] = lambda row: f"id{row}"
    on_hub({(repository, None, "validation"): table(columns, 3)})
    ids = ["validation-0", "validation-2"] if name == "record" else ["id0", "id2"]
    assert find_dataset(name).load_split("test") == [
        Question(ids[0], "Who 0?", "Yes Ada did.", ()),
        Question(ids[1], "Who 2?", "Yes Ada did.", (Answer("Ada", 4),)),
    ]
    said = (
        f"{name}: 1 of 3 questions of validation are left out, the first because of {name}: "
        "validation row 2: answer_start 5"
    )
    assert said in capsys.readouterr().out


def beir(name, judged):
    corpus = table(
        {
            "_id": lambda row: f"d{row}",
            "title": lambda row: f"T{row}",
            "text": lambda row: f"text {row}",
        }
    )
    queries = table(
        {"_id": lambda row: f"test{row}", "title": lambda row: "", "text": lambda row: f"ask {row}"}
    )
    content = {
        (f"BeIR/{name}", "corpus", "corpus"): corpus,
        (f"BeIR/{name}", "queries", "queries"): queries,
    }
    for split, rows in judged.items():
        columns = dict(
            zip(("query-id", "corpus-id", "score"), zip(*rows, strict=True), strict=True)
        )
        content[(f"BeIR/{name}-qrels", None, split)] = datasets.Dataset.from_dict(columns)
    return content


def test_ms_marco_is_searched_among_the_labelled_documents(on_hub):
    judged = {
        "validation": [("test1", "d1", 1), ("test1", "d2", 0)],
        "test": [("test2", "d3", 2), ("test2", "d4", 1)],
    }
    calls = on_hub(beir("msmarco", judged))
    found = find_dataset("msmarco")
    assert (found.family, found.train_on, found.labels) == (TaskFamily.IR, "msmarco_pairs", ())
    test = found.load_split("test")
    assert test.queries == {"test2": "Query: ask 2"} and test.relevant == {
        "test2": {"d3": 2, "d4": 1}
    }
    assert test.documents == {f"d{n}": f"Document: text {n}" for n in (1, 2, 3, 4)}
    assert found.load_split("validation").relevant == {"test1": {"d1": 1}}
    assert found.load_split("validation").documents == test.documents
    # The judgements of both splits, queries, documents: once for both splits
    assert len(calls) == 4


def test_ids_may_be_numbers_and_some_way_down(on_hub, monkeypatch):
    monkeypatch.setattr(hub, "_ROWS_AT_ONCE", 7)
    content = beir("msmarco", {split: [("test1", "33", 1)] for split in ("validation", "test")})
    content["BeIR/msmarco", "corpus", "corpus"] = table(
        {"_id": lambda row: row, "text": lambda row: f"text {row}"}
    )
    on_hub(content)
    assert find_dataset("msmarco").load_split("test").documents == {"33": "Document: text 33"}


def test_half_of_natural_questions_validates_and_documents_have_titles(on_hub):
    content = beir("nq", {"test": [(f"test{row}", f"d{row}", 1) for row in range(25)]})
    on_hub(content)
    found = find_dataset("nq")
    validation = found.load_split("validation")
    test = found.load_split("test")
    assert (len(validation.queries), len(test.queries)) == (12, 13)
    assert not validation.queries.keys() & test.queries.keys()
    assert found.load_split("test") == test  # drawn with a seed
    assert test.documents["d7"] == "Document: T7. text 7" and len(test.documents) == 25
    content["BeIR/nq", "corpus", "corpus"] = table(
        {"_id": lambda row: f"d{row}", "title": lambda row: "", "text": str}
    )
    # As the study has it
    assert find_dataset("nq").load_split("test").documents["d7"] == "Document: . 7"


@pytest.mark.parametrize("layout", ["list", "columns"])
def test_long_documents(on_hub, layout):
    def passages(row):
        found = [f"d{row}", f"d{row + 1}"]
        return (
            [{"docid": name, "text": "t"} for name in found]
            if layout == "list"
            else {"docid": found, "text": ["t", "t"]}
        )

    asked = {
        "query_id": lambda row: f"q-{row}",
        "query": lambda row: f"ask {row}",
        "positive_passages": passages,
    }
    corpus = table({"docid": lambda row: f"d{row}", "text": lambda row: f"text {row}"})
    name = "hgissbkh/mldr-en"
    content = {
        (name, "default", "dev"): table(asked, 2),
        (name, "default", "test"): table(asked, 5).select([4]),
    }
    on_hub(content | {(name, "corpus", "corpus"): corpus})
    test = find_dataset("mldr_en").load_split("test")
    assert test.relevant == {"q-4": {"d4": 1, "d5": 1}} and test.queries == {"q-4": "Query: ask 4"}
    assert (
        sorted(test.documents) == ["d0", "d1", "d2", "d4", "d5"]
        and test.documents["d1"] == "Document: text 1"
    )


def test_pairs_to_train_on(on_hub):
    on_hub(
        {
            ("hgissbkh/msmarco-pairs", None, "train"): table(
                {"query": str, "positive": lambda row: f"p{row}"}
            )
        }
    )
    pairs = find_dataset("msmarco_pairs").load_split("train")
    assert pairs[:2] == [
        Pair("train-0", "Query: 0", "Document: p0"),
        Pair("train-1", "Query: 1", "Document: p1"),
    ]
    assert find_dataset("nq").load_split("train") == pairs
    assert find_dataset("nq").train_fingerprint == find_dataset("msmarco_pairs").fingerprint
    with pytest.raises(InputError, match="msmarco_pairs: has training data only"):
        find_dataset("msmarco_pairs").load_split("test")


@pytest.mark.parametrize("query, document, message", [
    ("test1", "d99", r"msmarco: document 'd99' is judged but not in the corpus \(1 such\)"),
    ("other", "d1", "msmarco: query 'other' is judged but not among the queries"),
])  # fmt: skip
def test_judged_documents_and_queries_have_to_be_there(on_hub, query, document, message):
    on_hub(beir("msmarco", {split: [(query, document, 1)] for split in ("validation", "test")}))
    with pytest.raises(InputError, match=message):
        find_dataset("msmarco").load_split("test")


def test_revisions_are_asked_for_and_part_of_the_fingerprint(on_hub):
    calls = on_hub(
        {("nyu-mll/glue", "sst2", "validation"): table({"sentence": str, "label": lambda row: 1})}
    )
    assert len(find_dataset("sst2@abc").load_split("test")) == ROWS and calls[-1][3] == "abc"
    assert (
        find_dataset("sst2@abc").name == "sst2"
        and find_dataset("sst2@abc").fingerprint != find_dataset("sst2").fingerprint
    )
    with pytest.raises(InputError, match="nq@abc: is read from several repositories"):
        find_dataset("nq@abc")


def test_data_sets_that_are_programs_are_read_as_the_hub_converted_them(on_hub):
    data = datasets.Dataset.from_dict({"tokens": [["a"]], "tags": [[4]]})

    def found(revision):
        if revision != "refs/convert/parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found ontonotes5.py")
        return data

    on_hub({("hgissbkh/ontonotes5", None, "test"): found})
    [example] = find_dataset("ontonotes").load_split("test")
    assert find_dataset("ontonotes").labels[example.tags[0]] == "B-PERSON"


def test_a_column_that_the_hub_does_not_give_is_named(on_hub):
    on_hub({("nyu-mll/glue", "sst2", "train"): table({"text": str, "label": lambda row: 0})})
    with pytest.raises(
        InputError, match="sst2: no column `sentence` on the Hub; found `text`, `label`"
    ):
        find_dataset("sst2").load_split("train")


def answered(status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return HfHubHTTPError(f"answer {status}", response=response)


def behind(error):
    """The error of reading a file that `datasets` puts in front of what happened."""
    outer = DatasetGenerationError("An error occurred while generating the dataset")
    outer.__cause__ = error
    return outer


CANNOT = r"sst2: nyu-mll/glue \(sst2, validation\) .* cannot be read: .*"
LATER = [
    (ConnectionError("Couldn't reach it"), True),
    (httpx.ReadTimeout("slow"), True),
    (answered(503), True),
    (answered(429), True),
    (behind(answered(502)), True),
    (LocalEntryNotFoundError("Cannot find an appropriate cached snapshot directory"), True),
    (answered(404), False),
    (DatasetNotFoundError("no such"), False),
    (ValueError("no\nsuch split"), False),
    (behind(ValueError("damaged")), False),
]


@pytest.mark.parametrize("error, may_be_there_later", LATER)
def test_what_may_be_there_later_is_no_wrong_input(on_hub, monkeypatch, error, may_be_there_later):
    on_hub({("nyu-mll/glue", "sst2", "validation"): error})
    with pytest.raises((InputError, DataUnavailable), match=CANNOT) as found:
        find_dataset("sst2").load_split("test")
    assert isinstance(found.value, DataUnavailable) == may_be_there_later and "\n" not in str(
        found.value
    )
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match="HF_DATASETS_OFFLINE or HF_HUB_OFFLINE forbids the network"
    ):
        find_dataset("sst2").load_split("test")


def test_all_twelve_are_there_and_differ():
    assert (
        len(hub.HUB_DATASETS) == 13
        and len({find_dataset(name).fingerprint for name in hub.HUB_DATASETS}) == 13
    )
    families = [find_dataset(name).family for name in DATASETS if name in hub.HUB_DATASETS]
    assert families == [family for family in STUDY_FAMILIES for _ in range(3)]
