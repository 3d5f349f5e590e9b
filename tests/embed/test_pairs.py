"""Training pairs from files, BEIR directories and the Hub, and refused rows."""

import gzip
from pathlib import Path

import datasets
import pytest
from backports import zstd
from embed.conftest import DOCUMENTS, QRELS, QUERIES

from megaenc.embed.pairs import TrainingPair, load_pairs
from megaenc.errors import InputError

PAIRS = [
    TrainingPair("who?", "The man, with a dog."),
    TrainingPair("where?", 'In "Lyon".'),
    TrainingPair("when?", "In summer."),
]
ROWS = r"""
{"query": "who?", "document": "The man, with a dog."}
{"query": "where?", "document": "In \"Lyon\"."}
{"query": "when?", "document": "In summer."}
""".lstrip()
CSV = 'query,document\nwho?,"The man, with a dog."\nwhere?,"In ""Lyon""."\nwhen?,In summer.\n'
TSV = 'anchor\tpositive\nwho?\tThe man, with a dog.\nwhere?\tIn "Lyon".\nwhen?\tIn summer.\n'


def write(name: str, text: str) -> str:
    """Write a file, compressed if its name says so; return the name."""
    packers = {".gz": gzip.compress, ".zst": zstd.compress}
    Path(name).write_bytes(packers.get(Path(name).suffix, bytes)(text.encode()))
    return name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", ROWS),
        (
            "a.jsonl.gz",
            ROWS.replace('"query"', '"id": 3, "anchor"').replace("document", "positive"),
        ),
        ("a.jsonl.zst", ROWS.replace("}", ', "negatives": []}')),
        ("a.csv", CSV),
        ("a.tsv.gz", TSV),
    ],
)
def test_formats_and_names_of_columns_give_the_same_pairs(name, text):
    data = load_pairs([write(name, text)])
    assert data.pairs == PAIRS
    assert data.digest == load_pairs([write("reference.jsonl", ROWS)]).digest


LISTED = '{"query": "a", "document": "b", "negatives": ["c", "d"]}\n'
NUMBERED = (
    '{"anchor": "e", "positive": "f", "negative_10": "i", "negative_2": "h", "negative": "g", '
    '"negative_3": null}\n'
)


def test_hard_negatives_of_lists_and_of_numbered_columns():
    expected = [TrainingPair("a", "b", ("c", "d")), TrainingPair("e", "f", ("g", "h", "i"))]
    assert load_pairs([write("a.jsonl", LISTED + NUMBERED)]).pairs == expected
    table = "query,document,negative_1,negative_2\na,b,c,d\ne,f,,g\n"
    assert load_pairs([write("a.csv", table)]).pairs == [
        TrainingPair("a", "b", ("c", "d")),
        TrainingPair("e", "f", ("g",)),
    ]


def test_the_digest_is_of_all_fields_in_order():
    digests = set()
    for first in (LISTED, LISTED.replace('["c"', '["x"'), LISTED.replace("negatives", "other")):
        digests.add(load_pairs([write("a.jsonl", first + NUMBERED)]).digest)
    digests.add(load_pairs([write("a.jsonl", NUMBERED + LISTED)]).digest)
    assert len(digests) == 4


def test_exact_duplicates_are_kept_once_over_all_sources_and_counted(capsys):
    again = '{"query": "who?", "document": "Nobody."}\n'
    # No exact duplicate.
    negatives = '{"query": "when?", "document": "In summer.", "negatives": ["Never."]}\n'
    other = '{"query": "which?", "document": "In summer."}\n'
    data = load_pairs(
        [write("a.jsonl", ROWS), write("b.jsonl", ROWS + again + negatives + other * 2)]
    )
    assert [pair.query for pair in data.pairs] == [
        "who?",
        "where?",
        "when?",
        "who?",
        "when?",
        "which?",
    ]
    assert capsys.readouterr().out == (
        "6 pairs of 4 queries and 4 documents; 1 queries with several documents; "
        "1 documents with several queries; 1 pairs with hard negatives; "
        "4 duplicate pairs left out\n"
    )


SQUAD = """
{"data": [{"title": "x", "paragraphs": [{"context": "A dog.", "qas": [
    {"id": "1", "question": "Which animal?", "answers": [{"text": "dog", "answer_start": 2}]},
    {"id": "2", "question": "Which colour?", "answers": [], "is_impossible": true},
    {"id": "3", "question": "Who?", "answers": [{"text": "dog", "answer_start": 2}]}
]}]}]}
"""


def test_answerable_questions_of_squad_with_their_context(capsys):
    pairs = load_pairs([write("train.json.gz", SQUAD)]).pairs
    assert pairs == [TrainingPair("Which animal?", "A dog."), TrainingPair("Who?", "A dog.")]
    assert "1 unanswerable questions left out" in capsys.readouterr().out


def test_relevant_documents_of_a_beir_directory_with_their_titles(beir):
    directory = beir()
    (directory / "qrels/test.tsv").rename(directory / "qrels/train.tsv")
    texts = dict(QUERIES)
    documents = {key: f"{title} {text}".strip() for key, title, text in DOCUMENTS}
    expected = [
        TrainingPair(texts[query], documents[document]) for query, document, grade in QRELS if grade
    ]
    assert load_pairs([str(directory)]).pairs == expected
    assert (
        TrainingPair("yellow flowers in the garden", "Flowers Yellow flowers behind the house.")
        in expected
    )


def test_pairs_of_the_hub_are_its_split_train(monkeypatch, capsys):
    calls = []

    def load_dataset(repository, config=None, *, split, revision=None):
        calls.append((repository, config, split, revision))
        return datasets.Dataset.from_list(
            [{"anchor": "a", "positive": "b", "negative": text} for text in "cd"]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("owner/pairs", "owner/pairs:triplet", "owner/pairs@v1"):
        assert load_pairs([name]).pairs == [
            TrainingPair("a", "b", ("c",)),
            TrainingPair("a", "b", ("d",)),
        ]
    assert calls == [
        ("owner/pairs", None, "train", None),
        ("owner/pairs", "triplet", "train", None),
        ("owner/pairs", None, "train", "v1"),
    ]
    assert (
        "owner/pairs: reading owner/pairs (train), from the Hugging Face Hub"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"query": " ", "document": "b"}',
            "a.jsonl:1: key `query`: found an empty text, expected words",
        ),
        (ROWS + '{"query": "a", "document": ""}', "a.jsonl:4: key `document`: found an empty text"),
        (
            '{"query": "a"}',
            "a.jsonl:1: found `query`, expected one column of document, positive, context",
        ),
        (
            '{"query": "a", "anchor": "c", "document": "b"}',
            "a.jsonl:1: found `query`, `anchor`, expected one column",
        ),
        ('{"query": "a", "document": 3}', "a.jsonl:1: key `document`: found 3, expected text"),
        ('{"query": "a", "document": "a "}', "a.jsonl:1: query and document are the same text"),
        (
            '{"query": "a", "document": "b", "negatives": "c"}',
            "a.jsonl:1: key `negatives`: expected a list of texts",
        ),
        (
            '{"query": "a", "document": "b", "negatives": ["c", ""]}',
            'a.jsonl:1: negative 2: found "", expected words',
        ),
        (
            '{"query": "a", "document": "b", "negatives": ["c", "b"]}',
            "a.jsonl:1: negative 2 is the document itself",
        ),
        (
            '{"query": "a", "document": "b", "negatives": [], "negative": "c"}',
            "a.jsonl:1: found `negatives` and `negative`",
        ),
        (
            '{"query": "a", "document": "b", "label": 1}\n'
            '{"query": "a", "document": "c", "label": 0}',
            "a.jsonl:2: label 0: found a document that is not relevant, expected it among",
        ),
        ('{"query": "a", "document": "b", "label": 0.7}', "a.jsonl:1: label 0.7: expected 1"),
    ],
)
def test_bad_rows_are_one_line_with_their_place(text, message):
    with pytest.raises(InputError) as error:
        load_pairs([write("a.jsonl", text)])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file or directory; expected pairs in .jsonl"),
        ("x" * 300, "no such file or directory"),
        (
            "letters/nothing",
            "letters/nothing: no such file or directory",
        ),  # no name of the Hub: the directory exists
        ("a.conll", "a.conll: found the ending '.conll'"),
        ("letters", "letters/qrels/train.tsv:3: key `document`: found an empty text"),
        (
            "owner/pairs",
            "owner/pairs: owner/pairs (train) of the Hugging Face Hub cannot be read: "
            "no route; expected",
        ),
    ],
)
def test_unusable_sources_are_one_line(source, message, beir, monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    write("a.conll", "a O\n")
    beir()
    write("letters/qrels/train.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td4\t1\n")
    with pytest.raises(InputError) as error:
        load_pairs([source])
    assert message in str(error.value)
