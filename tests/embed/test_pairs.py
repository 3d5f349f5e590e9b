"""Training pairs from files, BEIR folders and the Hub, and the refusals of bad rows."""

import gzip
import json

import datasets
import pytest
from backports import zstd
from embed.conftest import QRELS

from megaenc.embed.pairs import TrainingPair, load_pairs
from megaenc.errors import InputError

PAIRS = [TrainingPair("who?", "The man, with a dog."), TrainingPair("where?", 'In "Lyon".'), TrainingPair("when?", "In summer.")]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in the working folder: text, or rows as JSONL; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | list) -> str:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        pack = gzip.compress if name.endswith(".gz") else zstd.compress if name.endswith(".zst") else bytes
        (tmp_path / name).write_bytes(pack(text.encode()))
        return name

    return write


def rows(query="query", document="document", **others):
    return [{query: pair.query, document: pair.document, **others} for pair in PAIRS]


CSV = 'query,document\nwho?,"The man, with a dog."\nwhere?,"In ""Lyon""."\nwhen?,In summer.\n'
TSV = 'anchor\tpositive\nwho?\tThe man, with a dog.\nwhere?\tIn "Lyon".\nwhen?\tIn summer.\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", rows()),
        ("a.jsonl.gz", rows("anchor", "positive", id=3)),
        ("a.jsonl.zst", rows("query", "positive", negatives=[])),
        ("a.json", rows("question", "context")),
        ("a.csv", CSV),
        ("a.tsv.gz", TSV),
    ],
)
def test_formats_and_names_of_columns_give_the_same_pairs(write, name, content):
    data = load_pairs([write(name, content)])
    assert data.pairs == PAIRS
    assert data.digest == load_pairs([write("reference.jsonl", rows())]).digest


def test_hard_negatives_of_lists_and_of_numbered_columns(write):
    first = {"query": "a", "document": "b", "negatives": ["c", "d"]}
    second = {"anchor": "e", "positive": "f", "negative_10": "i", "negative_2": "h", "negative": "g", "negative_3": None}
    expected = [TrainingPair("a", "b", ("c", "d")), TrainingPair("e", "f", ("g", "h", "i"))]
    assert load_pairs([write("a.jsonl", [first, second])]).pairs == expected
    table = "query,document,negative_1,negative_2\na,b,c,d\ne,f,,g\n"
    assert load_pairs([write("a.csv", table)]).pairs == [TrainingPair("a", "b", ("c", "d")), TrainingPair("e", "f", ("g",))]


def test_the_digest_is_of_all_fields_in_order(write):
    base = [{"query": "a", "document": "b", "negatives": ["c"]}, {"query": "d", "document": "e"}]
    variants = [base, base[::-1], [{**base[0], "negatives": ["x"]}, base[1]], [{"query": "a", "document": "b"}, base[1]]]
    digests = [load_pairs([write(f"{at}.jsonl", content)]).digest for at, content in enumerate(variants)]
    assert len(set(digests)) == 4 and all(len(digest) == 64 for digest in digests)


def test_exact_duplicates_are_kept_once_over_all_sources_and_counted(write, capsys):
    again = {"query": "who?", "document": "Nobody."}
    negatives = {"query": "when?", "document": "In summer.", "negatives": ["Never."]}  # no exact duplicate
    other = {"query": "which?", "document": "In summer."}
    data = load_pairs([write("a.jsonl", rows()), write("b.jsonl", [*rows(), again, negatives, other, other])])
    assert [(pair.query, pair.document) for pair in data.pairs[3:]] == [
        ("who?", "Nobody."), ("when?", "In summer."), ("which?", "In summer."),
    ]  # fmt: skip
    assert capsys.readouterr().out == (
        "6 pairs of 4 queries and 4 documents; 1 queries with several documents; 1 documents with several queries; "
        "1 pairs with hard negatives; 4 duplicate pairs left out\n"
    )


def test_answerable_questions_of_squad_with_their_context(write, capsys):
    answer = {"text": "dog", "answer_start": 2}
    questions = [
        {"id": "1", "question": "Which animal?", "answers": [answer]},
        {"id": "2", "question": "Which colour?", "answers": [], "is_impossible": True},
        {"id": "3", "question": "Who?", "answers": [answer]},
    ]
    squad = {"data": [{"title": "x", "paragraphs": [{"context": "A dog.", "qas": questions}]}]}
    pairs = load_pairs([write("train.json.gz", json.dumps(squad))]).pairs
    assert pairs == [TrainingPair("Which animal?", "A dog."), TrainingPair("Who?", "A dog.")]
    assert "1 unanswerable questions left out" in capsys.readouterr().out


def test_relevant_documents_of_a_beir_folder_with_their_titles(beir):
    folder = beir()
    (folder / "qrels/test.tsv").rename(folder / "qrels/train.tsv")
    texts = {"q1": "who walks to a river?", "q2": "letters from LYON", "q3": "yellow flowers in the garden"}
    documents = {
        "d1": "Rivers The old man walked slowly down to the river with his dog.",
        "d2": "Nobody came to the garden in the early summer.",
        "d3": "Letters 1,024 letters from Lyon and Paris, and a heavy book.",
        "d5": "Flowers Yellow flowers behind the house.",
        "d6": "Lyon",
    }
    expected = [TrainingPair(texts[query], documents[document]) for query, document, grade in QRELS if grade]
    assert load_pairs([str(folder)]).pairs == expected


def test_pairs_of_the_hub_are_its_split_train(monkeypatch, capsys):
    calls = []

    def load_dataset(repository, config=None, *, split, revision=None):
        calls.append((repository, config, split, revision))
        return datasets.Dataset.from_list(rows("anchor", "positive", negative="Never."))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("owner/pairs", "owner/pairs:triplet", "owner/pairs@v1"):
        assert load_pairs([name]).pairs == [TrainingPair(pair.query, pair.document, ("Never.",)) for pair in PAIRS]
    assert calls == [
        ("owner/pairs", None, "train", None),
        ("owner/pairs", "triplet", "train", None),
        ("owner/pairs", None, "train", "v1"),
    ]
    assert "owner/pairs: reading owner/pairs (train), from the Hugging Face Hub" in capsys.readouterr().out


def test_a_hub_that_cannot_be_read_is_one_line(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    expected = (
        r"owner/pairs: owner/pairs \(train\) .* cannot be read: no route; expected a network once, or a local file of pairs"
    )
    with pytest.raises(InputError, match=expected):
        load_pairs(["owner/pairs"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"query": " ", "document": "b"}], "a.jsonl:1: key `query`: found an empty text, expected words"),
        ([*rows(), {"query": "a", "document": ""}], "a.jsonl:4: key `document`: found an empty text"),
        ([{"query": "a"}], "a.jsonl:1: found `query`, expected one column of document, positive, context"),
        ([{"text": "a"}], "a.jsonl:1: found `text`, expected one column of query, anchor, question"),
        ([{"query": "a", "anchor": "c", "document": "b"}], "a.jsonl:1: found `query`, `anchor`, expected one column"),
        ([{"query": "a", "document": 3}], "a.jsonl:1: key `document`: found 3, expected text"),
        ([{"query": "a", "document": "a "}], "a.jsonl:1: query and document are the same text"),
        ([{"query": "a", "document": "b", "negatives": "c"}], "a.jsonl:1: key `negatives`: expected a list of texts"),
        ([{"query": "a", "document": "b", "negatives": ["c", ""]}], 'a.jsonl:1: negative 2: found "", expected words'),
        ([{"query": "a", "document": "b", "negatives": ["c", "b"]}], "a.jsonl:1: negative 2 is the document itself"),
        ([{"query": "a", "document": "b", "negative_1": 7}], "a.jsonl:1: key `negative_1`: found 7, expected text"),
        ([{"query": "a", "document": "b", "negatives": [], "negative": "c"}], "a.jsonl:1: found `negatives` and `negative`"),
        ([{"query": "a", "document": "b"}] * 2, "a.jsonl: found 1 pair, expected at least 2"),
        ("", "a.jsonl: found no pair"),
        ("words\n", "a.jsonl:1: not JSON"),
    ],
)
def test_bad_rows_are_one_line_with_their_place(write, content, message):
    with pytest.raises(InputError) as error:
        load_pairs([write("a.jsonl", content)])
    assert str(error.value).startswith(message)


def test_unusable_sources(write, beir, tmp_path):
    (tmp_path / "qrels-only/qrels").mkdir(parents=True)
    (tmp_path / "qrels-only/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    folder = str(beir())
    for source, message in [
        ("", ": no such file or folder"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file or folder; expected pairs in .jsonl"),
        ("x" * 300, "no such file or folder"),
        ("letters/nothing", "letters/nothing: no such file or folder"),  # no name of the Hub: the folder exists
        (write("a.conll", "a O\n"), "a.conll: found the ending '.conll'"),
        ("qrels-only", "qrels-only: no corpus.jsonl, expected BEIR's corpus.jsonl, queries.jsonl and qrels/train.tsv"),
        (folder, f"{folder}: no qrels/train.tsv"),
    ]:
        with pytest.raises(InputError) as error:
            load_pairs([source])
        assert message in str(error.value)
    with pytest.raises(InputError, match="--data: missing"):
        load_pairs([])


def test_a_bad_text_of_a_beir_folder_has_the_line_of_its_judgement(beir):
    folder = beir(qrels=None)
    (folder / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td4\t1\n")
    with pytest.raises(InputError, match=r"qrels/train.tsv:3: key `document`: found an empty text"):
        load_pairs([str(folder)])
