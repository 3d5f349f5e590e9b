"""Local labelled data: all formats, missing splits, and refusals."""

import contextlib
import gzip
import os
import re
import time
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from small_data import beir_files, squad, write_file, write_files, write_splits

from megaenc.errors import InputError
from megaenc.finetune.datasets import parquet
from megaenc.finetune.datasets.local import PAIR_TEMPLATE
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.examples import (
    Answer,
    LabelledText,
    Pair,
    Question,
    RankingQuery,
    RetrievalExamples,
    TaggedWords,
    TaskFamily,
    get_split_key,
    split_validation_rows,
)

SPLITS = ("train", "validation", "test")
FORMS = ["jsonl", "csv", "tsv", "parquet"]
SENTIMENT = [{"id": "a", "text": "good", "label": 1}, {"id": "b", "text": "bad", "label": 0}]
TAGGED = [{"id": "a", "tokens": ["Ada", "Lovelace", "wrote"], "tags": ["B-PER", "I-PER", "O"]}]
ASKED = {
    "id": "q",
    "question": "Who?",
    "context": "Yes Ada did.",
    "answers": [{"text": "Ada", "answer_start": 4}] * 2,
}


def read(directory, file, content):
    """The test examples of a file alone."""
    write_file(directory / file, content)
    return find_dataset(str(directory / file)).load_split("test")


def labels_of(dataset, split="train"):
    return [example.label for example in dataset.load_split(split)]


def texts_of(dataset, split="train"):
    return [example.content for example in dataset.load_split(split)]


def labelled(*labels):
    return [{"text": "x", "label": label} for label in labels]


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_same_in_every_format_whatever_the_case_of_its_suffix(tmp_path, form):
    """An empty id or second text is none. Labels that are numbers are sorted as such."""
    rows = [
        {"id": "", "text": "x", "text_pair": "wet", "label": 10},
        {"id": "a", "text": "y", "text_pair": "", "label": 9},
        {"id": "", "text": "z", "text_pair": None, "label": 10},
    ]
    lower = find_dataset(write_splits(tmp_path / "lower", form, rows, test=rows[1:2]))
    assert (lower.name, lower.family, lower.labels, lower.train_on) == (
        "lower",
        TaskFamily.SC,
        ("9", "10"),
        "lower",
    )
    expected = [
        LabelledText("0", "x", 1, "wet"),
        LabelledText("a", "y", 0),
        LabelledText("2", "z", 1),
    ]
    assert lower.load_split("train") == lower.load_split("validation") == expected
    assert lower.load_split("test") == expected[1:2]
    upper = tmp_path / "upper"
    upper.mkdir()
    for file in (tmp_path / "lower").iterdir():
        (upper / f"{file.stem}.{form.upper()}.GZ").write_bytes(gzip.compress(file.read_bytes()))
        if form == "parquet":
            (upper / f"{file.stem}.PARQUET.GZ").unlink()
            (upper / f"{file.stem}.PARQUET").write_bytes(file.read_bytes())
    assert find_dataset(str(upper)).load_split("train") == expected


@pytest.mark.parametrize(
    "labels, first",
    [(["4.8", "0.4", "3"], "4.8"), (["-.5", "1"], "-.5"), (["1e-3", "nan"], "1e-3")],
)
def test_scores_as_text_need_the_task(tmp_path, labels, first):
    with pytest.raises(
        InputError,
        match=rf"label '{first}': found a number with a point, .* numbers need --task regression",
    ):
        read(tmp_path, "test.csv", labelled(*labels))


@pytest.mark.parametrize(
    ("form", "labels", "task"),
    [
        ("jsonl", [4.8, 3, -0.5], ""),
        ("parquet", [4.8, 3.0, -0.5], ""),
        ("csv", ["4.8", "3", "-.5"], "regression"),
        ("jsonl", [3, 4.8, "1e-1"], "regression"),
    ],
)
def test_numbers_are_labels_of_regression(tmp_path, form, labels, task):
    dataset = find_dataset(write_splits(tmp_path / "set", form, labelled(*labels)), task=task)
    assert dataset.family is TaskFamily.REGRESSION and dataset.labels == ("score",)
    found = [example.label for example in dataset.load_split("test")]
    assert found == [float(label) for label in labels]


@pytest.mark.parametrize(
    ("form", "key", "labels"),
    [
        ("jsonl", "labels", [["b", "a"], [], ["c"]]),
        ("parquet", "label", [["b", "a"], [], ["c"]]),
        ("jsonl", "labels", ["b|a", "", "c"]),
        ("csv", "labels", ["b | a", "", "c"]),
    ],
)
def test_a_text_may_have_any_number_of_labels(tmp_path, form, key, labels):
    rows = [{"text": "x", key: value} for value in labels]
    dataset = find_dataset(write_splits(tmp_path / "set", form, rows))
    assert (dataset.family, dataset.labels) == (TaskFamily.MULTI_LABEL, ("a", "b", "c"))
    assert [example.label for example in dataset.load_split("test")] == [(0, 1), (), (2,)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "labels 7: expected a list, or text with | between labels"),
        (["z"], "label 'z': outside the label set, expected one of a, b"),
        ([["a"]], "label ['a']: expected text or an integer"),
        ("a|", "label '': expected text or an integer"),
        (None, "key `labels`: found null, expected a value"),
        ([1, 0, 0], "labels [1, 0, 0]: found 0 twice, expected the names of the text's labels"),
        ([1.0, 0.0], "labels [1.0, 0.0]: found 1.0, expected the names of the text's labels"),
    ],
)
def test_bad_lists_of_labels_are_one_line(tmp_path, value, message):
    rows = [{"text": "x", "labels": ["a", "b"]}]
    other = [{"text": "x", "labels": value}]
    directory = write_splits(tmp_path / "set", "jsonl", rows, test=other)
    with pytest.raises(InputError, match=rf"test.jsonl:1: {re.escape(message)}"):
        find_dataset(directory).load_split("test")


@pytest.mark.parametrize("task", ["SC", "regression", "multi_label"])
@pytest.mark.parametrize("label", ["x" * 9000, [["x" * 9000]], 10**4000])
def test_errors_of_long_labels_are_short(tmp_path, task, label):
    directory = write_splits(tmp_path / "set", "jsonl", labelled("5"), test=labelled(label))
    with pytest.raises(InputError) as error:
        find_dataset(directory, task=task).load_split("test")
    assert len(str(error.value)) < 300 + len(str(tmp_path))


RANKED = [
    {"query": "q", "document": "a", "negatives": ["b", "c", "b"]},
    {"query": "q", "document": "c", "negatives": ["d"]},
    {"query": "r", "document": "a", "negatives": ["b"]},
]
JUDGED = [("q", "a", 1), ("q", "b", 0), ("q", "c", 1), ("q", "d", 0), ("r", "a", 1), ("r", "b", 0)]
QUERIES = [RankingQuery("q", ("a", "c"), ("b", "d")), RankingQuery("r", ("a",), ("b",))]


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("jsonl", RANKED),
        ("jsonl", [*RANKED, {"query": "s", "document": "a", "negatives": []}]),
        ("parquet", [{"anchor": q, "positive": d, "label": label} for q, d, label in JUDGED]),
        ("csv", [{"query": q, "document": d, "label": label} for q, d, label in JUDGED]),
        ("jsonl", [{"query": q, "document": d, "label": label == 1} for q, d, label in JUDGED]),
    ],
)
def test_rows_of_a_query_are_its_candidates(tmp_path, form, rows):
    """Also with a label for each document; queries that rank nothing are left out."""
    dataset = find_dataset(write_splits(tmp_path / "set", form, rows))
    assert (dataset.family, dataset.labels) == (TaskFamily.RERANKING, ("score",))
    study = find_dataset(str(tmp_path / "set"), pair_template="study")
    assert (study.fingerprint, study.pair_template) == (dataset.fingerprint, "")
    assert dataset.load_split("test") == QUERIES


def test_candidates_named_like_a_set_of_pairs_need_no_template(tmp_path):
    directory = write_splits(tmp_path / "set", "jsonl", RANKED)
    assert find_dataset(f"qqp={directory}").load_split("test") == QUERIES


def test_a_drawn_split_has_whole_queries(tmp_path):
    rows = [{"query": f"q{at // 2}", "document": f"{at}", "negatives": ["x"]} for at in range(80)]
    write_file(tmp_path / "mined.jsonl", rows)
    dataset = find_dataset(str(tmp_path / "mined.jsonl"), validation_fraction=0.1)
    splits = [dataset.load_split(split) for split in ("train", "validation", "test")]
    assert [len(examples) for examples in splits] == [32, 4, 4]
    assert len({example.query for examples in splits for example in examples}) == 40


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"query": "q"}, {}, "test.jsonl:1: found `query`, expected one column of document"),
        ({"query": "q", "document": "a", "label": 3}, {}, "test.jsonl:1: label 3: expected 1"),
        ({"query": "q", "document": "a", "label": ""}, {}, "label '': expected 1 for a relevant"),
        ({"query": "q", "document": "a"}, {}, "test.jsonl: found no query with a relevant"),
        (
            RANKED[0],
            {"pair_template": "{text} | {text_pair}"},
            "--pair-template .* of the task reranking",
        ),
    ],
)
def test_bad_candidates_are_one_line(tmp_path, row, options, message):
    directory = write_splits(tmp_path / "set", "jsonl", RANKED, test=[row])
    with pytest.raises(InputError, match=message):
        find_dataset(directory, **options).load_split("test")


def test_vectors_of_two_labels_are_refused(tmp_path):
    vectors = [{"text": "x", "labels": value} for value in ([1, 0], [0, 1])]
    message = r"train.jsonl:2: found lists of 0 and 1 up to here, expected the names"
    with pytest.raises(InputError, match=message):
        find_dataset(write_splits(tmp_path / "set", "jsonl", vectors))
    rows = [*vectors, {"text": "y", "labels": [1]}]
    assert find_dataset(write_splits(tmp_path / "set", "jsonl", rows)).labels == ("0", "1")


def test_class_names_of_lists_in_parquet_files_are_the_labels(tmp_path):
    kind = datasets.Sequence(datasets.ClassLabel(names=["joy", "anger"]))
    for key in ("label", "labels"):
        write_named(tmp_path / key / "train.parquet", key, kind, [{"text": "x", key: [1]}])
        found = find_dataset(str(tmp_path / key))
        assert found.family is TaskFamily.MULTI_LABEL and found.labels == ("joy", "anger")


def test_labels_may_be_indices_of_meta_json_and_must_occur(tmp_path):
    rows = [{"text": "x", "labels": [2, 0]}, {"text": "y", "labels": "c"}]
    directory = write_splits(tmp_path / "set", "jsonl", rows)
    write_file(tmp_path / "set/meta.json", {"labels": ["a", "b", "c"]})
    found = [example.label for example in find_dataset(directory).load_split("test")]
    assert found == [(0, 2), (2,)]
    with pytest.raises(InputError, match=r"train.jsonl:1: found no label up to here"):
        find_dataset(write_splits(tmp_path / "none", "jsonl", [{"text": "x", "labels": []}]))


@pytest.mark.parametrize("label", ["good", "", "nan", True, [1.0], 10**400])
def test_a_label_of_regression_is_a_finite_number(tmp_path, label):
    directory = write_splits(tmp_path / "set", "jsonl", labelled(0.5, label))
    with pytest.raises(InputError, match=r"train.jsonl:2: label .*: expected a (finite )?number"):
        find_dataset(directory).load_split("train")
    directory = write_splits(tmp_path / "large", "jsonl", labelled(0.5, -1e39))
    with pytest.raises(InputError, match=r"label -1e\+39: expected at most 3.4e\+38 in size"):
        find_dataset(directory).load_split("train")


def test_hidden_numbers_of_a_test_split_are_left_out(tmp_path, capsys):
    rows = labelled(4.8, 0.5, 1.0)
    directory = write_splits(tmp_path / "glue", "jsonl", rows, test=labelled(-1.0, -1.0))
    dataset = find_dataset(directory)
    assert "glue: test.jsonl is not used: its labels are hidden (-1)" in capsys.readouterr().out
    assert [example.label for example in dataset.load_split("test")] == [4.8, 0.5, 1.0]
    (tmp_path / "glue/valid.jsonl").unlink()
    with pytest.raises(InputError, match=r"test.jsonl: its labels are hidden \(-1\), expected"):
        find_dataset(directory)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine/train.jsonl"])
def test_a_single_file_is_split_with_each_label_in_proportion(tmp_path, name, capsys):
    rows = [
        {"id": at, "text": f"x{at}", "label": "yes" if at % 5 else "no", "more": at}
        for at in range(100)
    ]
    write_file(tmp_path / name, rows)
    path = str(tmp_path / name.partition("/")[0])
    dataset = find_dataset(path, validation_fraction=0.1)
    splits = {split: dataset.load_split(split) for split in ("train", "validation", "test")}
    counts = {
        split: Counter(dataset.labels[example.label] for example in examples)
        for split, examples in splits.items()
    }
    tenth = {"yes": 8, "no": 2}
    assert counts == {"train": {"yes": 64, "no": 16}, "validation": tenth, "test": tenth}
    ids = [example.id for examples in splits.values() for example in examples]
    assert sorted(map(int, ids)) == list(range(100)) and ids != sorted(ids, key=int)
    assert find_dataset(path, validation_fraction=0.1).load_split("test") == splits["test"]
    fingerprints = {find_dataset(path, validation_fraction=value).fingerprint for value in (0, 0.2)}
    assert len(fingerprints | {dataset.fingerprint}) == 3
    said = "is split (seed 42, equal texts together): 80 examples train, 10 validate, 10 test"
    assert said in capsys.readouterr().out


def test_numbers_are_split_evenly(tmp_path):
    rows = [{"text": f"x{at}", "label": at / 2} for at in range(40)]
    write_file(tmp_path / "rated.jsonl", rows)
    dataset = find_dataset(str(tmp_path / "rated.jsonl"), validation_fraction=0.25)
    for split in SPLITS:
        quarters = [int(example.label // 5) for example in dataset.load_split(split)]
        share = 5 if split == "train" else 2.5
        assert all(abs(quarters.count(quarter) - share) < 1 for quarter in range(4))


def split_file(tmp_path, rows, fraction):
    """Return the splits of a file of `rows`."""
    write_file(tmp_path / "rows.jsonl", rows)
    dataset = find_dataset(str(tmp_path / "rows.jsonl"), validation_fraction=fraction)
    return {split: dataset.load_split(split) for split in SPLITS}


def test_labels_of_texts_with_several_are_split_by_the_rarest(tmp_path):
    frequent = [{"text": f"x{at}", "labels": ["a"]} for at in range(80)]
    rare = [{"text": f"y{at}", "labels": ["a", "b"]} for at in range(20)]
    tagged = [{"tokens": [row["text"]], "tags": ["O"]} for row in frequent]
    tagged += [{"tokens": [row["text"], "z"], "tags": ["O", "B-X"]} for row in rare]
    for rows in (frequent + rare, tagged):
        splits = split_file(tmp_path, rows, 0.1)
        labels = {
            split: Counter(
                len(getattr(example, "label", None) or example.tags) for example in examples
            )
            for split, examples in splits.items()
        }
        tenth = {1: 8, 2: 2}
        assert labels == {"train": {1: 64, 2: 16}, "validation": tenth, "test": tenth}


@pytest.mark.parametrize(
    "make",
    [
        lambda at: {"text": f"x{at % 40}", "text_pair": f"{at}", "label": at % 3},
        lambda at: {"tokens": [f"x{at % 40}"], "tags": ["O"]},
        lambda at: {"question": f"{at}", "context": f"x{at % 40}", "is_impossible": True},
    ],
)
def test_equal_texts_are_in_one_split(tmp_path, make):
    splits = split_file(tmp_path, [make(at) for at in range(200)], 0.1)
    assert [len(splits[split]) for split in SPLITS] == [160, 20, 20]
    keys = [{get_split_key(example) for example in splits[split]} for split in SPLITS]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 40


def test_every_label_keeps_a_training_example(tmp_path):
    rows = [{"text": f"x{at}", "label": f"{at // 2}"} for at in range(20)]
    rows += [{"text": f"y{at}", "label": f"only {at}"} for at in range(10)]
    splits = split_file(tmp_path, rows, 0.4)
    assert {example.label for example in splits["train"]} == set(range(20))
    assert len(splits["validation"]) == len(splits["test"]) == 5


def test_only_a_single_file_that_is_large_enough_is_split(tmp_path):
    splits = write_splits(tmp_path / "set", "jsonl", labelled("a", "b"))
    found = "found train.jsonl, valid.jsonl, test.jsonl at .*set, expected a single file"
    retrieval = write_files(tmp_path / "ir", beir_files([("d", "", "x")], [("q", "x")], test=[]))
    for name, message in (
        (splits, found),
        (retrieval, "found retrieval data at .*ir, expected a single file"),
        ("sst2", "found a named data set at sst2"),
        ("org/name", "found a repository of the Hub at org/name"),
    ):
        with pytest.raises(InputError, match=rf"^--validation-fraction 0.1: {message}"):
            find_dataset(name, validation_fraction=0.1)
    dataset = find_dataset(str(tmp_path / "set/test.jsonl"), validation_fraction=0.1)
    message = r"test.jsonl: found 2 examples \(different texts: 1\), expected more"
    with pytest.raises(InputError, match=message):
        dataset.load_split("train")


@pytest.mark.parametrize("labels", [["4.8", "good"], ["1", "-1"], ["e"], ["nan", "inf"]])
def test_names_with_points_are_classes_if_one_is_no_number(tmp_path, labels):
    assert set(
        find_dataset(write_splits(tmp_path / "names", "csv", labelled(*labels))).labels
    ) == set(labels)


def test_a_class_with_a_spelling_of_hidden_labels_is_none(tmp_path):
    rows = labelled("-1.0", "good")
    directory = write_splits(tmp_path / "set", "jsonl", rows, test=labelled("-1.0"))
    assert labels_of(find_dataset(directory), "test") == [0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names, labels, indices", [
    (["3.9", "3.10"], ["3.10", "3.9"], [1, 0]),
    (["1", "0"], [0, 1, 1], [1, 0, 0]),
    (["low", "high"], [0, 1, 1], [0, 1, 1]),
])  # fmt: skip
def test_a_number_is_a_position_only_among_names_that_are_no_numbers(
    tmp_path, form, names, labels, indices
):
    directory = write_splits(tmp_path / "stars", form, labelled(*labels))
    write_file(tmp_path / "stars" / "meta.json", {"labels": names})
    assert labels_of(find_dataset(directory)) == indices


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_test_split_with_hidden_labels_is_not_used(tmp_path, capsys, form):
    rows = labelled(*[0, 1] * 20)
    found = find_dataset(
        write_splits(tmp_path / f"hidden_{form}", form, rows, test=labelled(*[-1] * 40))
    )
    assert [len(found.load_split(split)) for split in ("train", "validation", "test")] == [
        38,
        2,
        40,
    ]
    assert labels_of(found, "test")[:2] == [0, 1]
    assert (
        f"hidden_{form}: test.{form} is not used: its labels are hidden (-1)\n"
        in capsys.readouterr().out
    )


def test_minus_one_may_be_a_class(tmp_path):
    found = find_dataset(
        write_splits(tmp_path / "signs", "csv", labelled(-1, 1), test=labelled(-1))
    )
    assert labels_of(found, "test") == [0]


def test_pairs_become_one_text_by_a_template_and_the_studys_where_the_name_is_the_studys(tmp_path):
    alone = {"text": "It rains {now}.", "label": "no"}
    pair = alone | {"text_pair": "It is wet.", "label": "yes"}
    directory = write_splits(tmp_path / "rain", "jsonl", [alone, pair])
    templates = {
        "{text_pair} | {text}": "It is wet. | It rains {now}.",
        "{{{text}}} {text_pair}": "{It rains {now}.} It is wet.",
        "study": "Text 1: It rains {now}.\nText 2: It is wet.",
        "tokenizer": ("It rains {now}.", "It is wet."),
    }
    for template, joined in templates.items():
        assert texts_of(find_dataset(directory, pair_template=template)) == [
            "It rains {now}.",
            joined,
        ]
    studys = texts_of(find_dataset(f"mnli_m={directory}"))
    assert studys == ["It rains {now}.", "Premise: It rains {now}.\nHypothesis: It is wet."]
    for bad in ("{text}", "{text} {text_pair} {", "{text:>5d} {text_pair}", "{text.x} {text_pair}"):
        with pytest.raises(
            InputError, match=r"--pair-template .*: .*expected \{text\} and \{text_pair\}"
        ):
            find_dataset(directory, pair_template=bad)


def test_the_template_of_pairs_is_in_the_fingerprint_if_there_are_pairs_anywhere(tmp_path):
    alone = labelled("yes", "no")
    late = write_splits(tmp_path / "late", "jsonl", alone, test=[alone[0] | {"text_pair": "wet"}])
    never = write_splits(tmp_path / "never", "jsonl", alone)
    assert texts_of(find_dataset(late), "test") == [("x", "wet")]
    for template in ("{text} {text_pair}", PAIR_TEMPLATE):
        assert (
            find_dataset(late).fingerprint != find_dataset(late, pair_template=template).fingerprint
        )
    assert (
        find_dataset(never).fingerprint
        == find_dataset(never, pair_template=PAIR_TEMPLATE).fingerprint
    )


def test_tables_with_tabs_take_quotes_for_text(tmp_path):
    assert (
        read(tmp_path, "test.tsv", 'text\tlabel\nthe "best\t1\nworst\t0\n')[0].text == 'the "best'
    )
    words = [TaggedWords("0", ("Ada", "wrote"), (1, 0))]
    assert read(tmp_path, "words.tsv", "tokens\ttags\nAda wrote\tB-PER O\n") == words
    assert read(tmp_path, "columns.tsv", "# no sentence\nAda\tB-PER\nwrote\tO\n") == words


def test_csv_is_read_with_its_quotes(tmp_path):
    """Line ends in a cell are text; columns without a name may repeat."""
    assert read(tmp_path, "unnamed.csv", "text,label,,\na,x,,\n") == [LabelledText("0", "a", 0)]
    long = "long " * 50_000
    table = (
        '\ufeffid,text,label\r\na,"the ""best"", he said",1\r\n\r\nb,"two\r\nlines\rand a '
        f'tab\t\n",0\r\nc,{long},1\r\n'
    )
    assert read(tmp_path, "test.csv", table) == [
        LabelledText("a", 'the "best", he said', 1),
        LabelledText("b", "two\r\nlines\rand a tab\t\n", 0),
        LabelledText("c", long, 1),
    ]
    assert read(tmp_path, "words.csv", "tokens,tags\nAda wrote,B-PER O\n") == [
        TaggedWords("0", ("Ada", "wrote"), (1, 0))
    ]


def write_named(path, column, feature, rows):
    """Parquet with class names in its schema."""
    path.parent.mkdir(exist_ok=True)
    others = {
        "text": datasets.Value("string"),
        "tokens": datasets.Sequence(datasets.Value("string")),
    }
    features = {name: feature if name == column else others[name] for name in rows[0]}
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(path)


def test_parquet_gives_what_jsonl_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_ROWS_PER_BATCH", 3)
    texts = labelled(*range(10))
    question = ASKED | {"answers": {"text": ["Ada"], "answer_start": [4]}}
    for name, rows in (("texts", texts), ("tagged", TAGGED), ("asked", [question])):
        found = find_dataset(write_splits(tmp_path / name / "parquet", "parquet", rows))
        other = find_dataset(write_splits(tmp_path / name / "jsonl", "jsonl", rows))
        assert (found.family, found.labels) == (other.family, other.labels)
        assert found.load_split("train") == other.load_split("train")


def test_class_names_in_parquet_files_are_the_labels_and_must_be_those_of_train(tmp_path):
    """Even of names that are numbers, a number is a position."""
    for split, names in (("train", ["2", "1"]), ("valid", ["2", "1"]), ("test", ["1", "2"])):
        write_named(
            tmp_path / "stars" / f"{split}.parquet",
            "label",
            datasets.ClassLabel(names=names),
            labelled(0, 1),
        )
    directory = str(tmp_path / "stars")
    message = (
        r"test.parquet: names of column `label`: found 1, 2, expected those of .*train.parquet or "
        r"a meta.json"
    )
    with pytest.raises(InputError, match=message):
        find_dataset(directory)
    (tmp_path / "stars" / "test.parquet").unlink()
    assert find_dataset(directory).labels == ("2", "1") and labels_of(
        find_dataset(directory), "test"
    ) == [0, 1]
    write_file(tmp_path / "stars" / "meta.json", {"labels": ["1", "2"]})
    assert find_dataset(directory).labels == ("1", "2") and labels_of(
        find_dataset(directory), "test"
    ) == [0, 1]
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    write_named(
        tmp_path / "people.parquet", "tags", tags, [{"tokens": ["Ada", "wrote"], "tags": [1, 0]}]
    )
    found = find_dataset(str(tmp_path / "people.parquet"))
    assert found.labels == ("O", "B-PER") and found.load_split("test") == [
        TaggedWords("0", ("Ada", "wrote"), (1, 0))
    ]


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    table = pyarrow.table([["x"], ["x"], ["y"]], names=["text", "text", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    with pytest.raises(InputError, match=r"test.parquet: found 2 columns `text`, expected one"):
        find_dataset(str(tmp_path / "test.parquet"))


CONLL = """-DOCSTART- -X- O O

# not a hash alone
EU NNP I-NP B-ORG
# # B-NP O
rejects VBZ I-VP O

Ada NNP I-NP B-PER
"""
UNER = (
    "# sent_id = first\n# text = Ada is in\n1\tAda\tB-PER\t-\tann\n2\tis\tO\t-\tann\n\n# sent_id = "
    "second\n1\tIn\tO\t-\tann\n"
)


def test_tagged_words_of_every_format(tmp_path):
    tags = {"tags": ["O", "B-PER", "I-PER"], "pos_tags": ["NN"]}
    rows = [*TAGGED, {"tokens": ["a"], "tags": [2]}]  # also as a position
    write_splits(tmp_path / "rows", "jsonl", rows)
    write_file(tmp_path / "rows" / "meta.json", tags)
    found = find_dataset(str(tmp_path / "rows"))
    tagged = [
        TaggedWords("a", ("Ada", "Lovelace", "wrote"), (1, 2, 0)),
        TaggedWords("1", ("a",), (2,)),
    ]
    assert found.family is TaskFamily.TC and found.load_split("test") == tagged
    found = find_dataset(
        write_files(
            tmp_path / "conll", {"train.CONLL": CONLL, "valid.conll": CONLL, "test.txt": CONLL}
        )
    )
    assert found.labels == ("O", "B-ORG", "B-PER")
    assert found.load_split("train") == [
        TaggedWords("0", ("EU", "#", "rejects"), (1, 0, 0)),
        TaggedWords("1", ("Ada",), (2,)),
    ]
    assert found.load_split("test") == found.load_split("train")
    found = find_dataset(
        write_files(
            tmp_path / "uner",
            {f"en_ewt-ud-{split}.iob2": UNER for split in ("train", "dev", "test")},
        )
    )
    assert found.load_split("validation") == [
        TaggedWords("first", ("Ada", "is"), (1, 0)),
        TaggedWords("second", ("In",), (0,)),
    ]


@pytest.mark.parametrize(
    "form, template", [("conll", "{}  NN O \n"), ("iob2", "{}\tO\r\n"), ("csv", "{},O\n")]
)
def test_only_tabs_spaces_and_line_ends_separate_words(tmp_path, form, template):
    words = ["10\u00a0000", "\u2028", "a\u0085b", "\u3000"]
    header = "tokens,tags\n" if form == "csv" else ""
    sentences = read(
        tmp_path,
        f"test.{form}",
        "\ufeff" + header + "".join(template.format(word) for word in words),
    )
    assert [word for sentence in sentences for word in sentence.words] == words


@pytest.mark.parametrize(
    "file, encoding", [("test.csv", "latin1"), ("test.json", "cp1252"), ("test.jsonl", "utf-16le")]
)
def test_another_encoding_is_named_with_its_conversion(tmp_path, file, encoding):
    content = '{"data": [\n"caf…"]}' if encoding == "cp1252" else "text,label\ncafé,x\n"
    with pytest.raises(
        InputError,
        match=rf"{file}:?.*: .*not UTF-8.*; expected UTF-8, as after `iconv -f {encoding} -t",
    ):
        read(tmp_path, file, content.encode(encoding))


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_questions_a_row_and_as_squad(tmp_path, form):
    """Impossible ones have no answer, whatever they list."""

    def find(mark):
        content = squad([ASKED | {"is_impossible": mark}])
        if form == "jsonl":
            content = [
                ASKED
                | {"is_impossible": mark, "answers": {"text": ["Ada"] * 2, "answer_start": [4] * 2}}
            ]
        return read(tmp_path, f"test.{form}", content)

    answered = Question("q", "Who?", "Yes Ada did.", (Answer("Ada", 4), Answer("Ada", 4)))
    assert find(None) == find(False) == [answered]
    assert find(True) == [Question("q", "Who?", "Yes Ada did.", ())]
    with pytest.raises(
        InputError, match=r"test.*: key `is_impossible`: found \"false\", expected true or false"
    ):
        find("false")


BEIR_TEXTS = [(f"d{n}", "T" if n == 1 else "", "" if n == 4 else f"text {n}") for n in range(6)]
BEIR_QUERIES = [(f"q{n}", f"ask {n}") for n in range(40)]
BEIR_GRADES = {
    "train": [("q0", "d0", 2), ("q0", "d1", 0), ("q1", "d1", 1)],
    "dev": [("q2", "d1", 3), ("q2", "d2", 0), ("q3", "d2", 0)],
    "test": [("q4", "d4", 1)],
}


def beir(directory, changed=None, **qrels):
    """A BEIR set; with other grades of a split (None: without it) or other files."""
    grades = {split: rows for split, rows in (BEIR_GRADES | qrels).items() if rows is not None}
    return write_files(directory, beir_files(BEIR_TEXTS, BEIR_QUERIES, **grades) | (changed or {}))


@pytest.mark.parametrize("capitals", [False, True])
def test_retrieval_of_a_beir_directory(tmp_path, capitals):
    directory = beir(tmp_path / "b")
    if capitals:
        for file in [*(tmp_path / "b").glob("*.jsonl"), *(tmp_path / "b").glob("qrels/*")]:
            file.rename(file.with_suffix(file.suffix.upper()))
    found = find_dataset(directory)
    assert (found.family, found.train_on, found.fingerprint) == (
        TaskFamily.IR,
        "b",
        found.train_fingerprint,
    )
    assert found.load_split("train") == [
        Pair("q0/d0", "Query: ask 0", "Document: text 0"),
        Pair("q1/d1", "Query: ask 1", "Document: T. text 1"),
    ]
    # The documents that validation and test judge, relevant or not; a query with nothing relevant
    # asks for nothing.
    documents = {"d1": "Document: T. text 1", "d2": "Document: text 2", "d4": "Document: "}
    validation = RetrievalExamples(
        {"q2": "Query: ask 2"}, documents, {"q2": {"d1": 3}}, ignore_identical_ids=True
    )
    test = RetrievalExamples(
        {"q4": "Query: ask 4"}, documents, {"q4": {"d4": 1}}, ignore_identical_ids=True
    )
    assert [found.load_split(split) for split in ("validation", "test")] == [validation, test]
    whole = find_dataset(directory, whole_corpus=True)
    assert (
        list(whole.load_split("test").documents) == [f"d{n}" for n in range(6)]
        and whole.fingerprint != found.fingerprint
    )


def test_retrieval_is_validated_on_part_of_train_or_else_of_test(tmp_path):
    many = [(f"q{n}", f"d{n % 6}", 1) for n in range(40)]
    found = find_dataset(beir(tmp_path / "a", dev=None, train=many))
    trained = {pair.id.partition("/")[0] for pair in found.load_split("train")}
    validated = set(found.load_split("validation").queries)
    assert len(trained) == 38 and len(validated) == 2 and not trained & validated
    found = find_dataset(beir(tmp_path / "b", dev=None, train=None, test=many))
    halves = [set(found.load_split(split).queries) for split in ("validation", "test")]
    assert [len(half) for half in halves] == [20, 20] and not halves[0] & halves[1]
    with pytest.raises(
        InputError, match=r"no train split, expected train\.tsv; or train on another"
    ):
        found.load_split("train")


def test_texts_that_nothing_judges_are_not_looked_at(tmp_path):
    good = find_dataset(beir(tmp_path / "good"))
    odd = '{"_id": "d9", "text": 5}\n' + (tmp_path / "good" / "corpus.jsonl").read_text()
    found = find_dataset(beir(tmp_path / "odd", {"corpus.jsonl": odd}))
    assert found.load_split("test") == good.load_split("test")
    with pytest.raises(InputError, match=r"corpus.jsonl:1: key `text`: found 5"):
        find_dataset(str(tmp_path / "odd"), whole_corpus=True).load_split("test")


def test_a_split_of_one_is_too_small_to_share(tmp_path):
    one = [("q1", "d1", 1)]
    for directory, split, message in (
        (
            beir(tmp_path / "a", dev=None, train=one),
            "train",
            r"train.tsv: found 1, too few queries .* 2 at least or .* qrels/dev",
        ),
        (
            beir(tmp_path / "b", dev=None, train=None, test=one),
            "test",
            r"test.tsv: found 1, too few queries",
        ),
        (
            write_splits(tmp_path / "c", "jsonl", labelled("x"), valid=None),
            "train",
            r"train.jsonl: found 1, too few examples .* expected 2 at least or a file "
            r"validation.\*",
        ),
    ):
        with pytest.raises(InputError, match=message):
            find_dataset(directory).load_split(split)


def test_models_can_be_trained_on_other_pairs(tmp_path):
    evaluated = beir(tmp_path / "b")
    other = beir(tmp_path / "other", train=[("q5", "d5", 1)])
    found = find_dataset(evaluated, train_on=f"elsewhere={other}")
    assert (found.name, found.train_on) == ("b", "elsewhere")
    assert (
        found.fingerprint == find_dataset(evaluated).fingerprint
        and found.train_fingerprint == find_dataset(other).fingerprint
    )
    assert found.load_split("train") == [Pair("q5/d5", "Query: ask 5", "Document: text 5")]
    assert found.load_split("test") == find_dataset(evaluated).load_split("test")
    texts = write_splits(tmp_path / "t", "jsonl", SENTIMENT)
    # In a grid of several tasks
    assert find_dataset(texts, train_on=evaluated) == find_dataset(texts)
    with pytest.raises(InputError, match=r"--train-on .*: t is SC, expected retrieval data"):
        find_dataset(evaluated, train_on=texts)


@pytest.mark.parametrize("count", [1, 20, 10007])
def test_the_validation_share_is_that_of_the_study(count):
    train, validation = split_validation_rows(count)
    assert sorted(np.concatenate([train, validation]).tolist()) == list(range(count))
    if count > 1:
        cut = datasets.Dataset.from_dict({"row": range(count)}).train_test_split(
            train_size=0.95, seed=42
        )
        assert train.tolist() == cut["train"]["row"] and validation.tolist() == cut["test"]["row"]


@pytest.mark.parametrize(
    "other, said", [("test", "no validation file"), ("valid", "and valid.jsonl is the test split")]
)
def test_a_missing_split_is_made_as_the_study_makes_it(tmp_path, capsys, other, said):
    rows = [{"id": f"{n}", "text": "x", "label": n % 2} for n in range(40)]
    found = find_dataset(
        write_files(tmp_path / f"made_{other}", {"train.jsonl": rows, f"{other}.jsonl": SENTIMENT})
    )
    train = [example.id for example in found.load_split("train")]
    validation = [example.id for example in found.load_split("validation")]
    test = [example.id for example in found.load_split("test")]
    assert (len(train), len(validation), test) == (38, 2, ["a", "b"])
    assert sorted(train + validation, key=int) == [row["id"] for row in rows]
    [line] = capsys.readouterr().out.splitlines()  # said once, not for each split
    assert "5 % of train validate (seed 42)" in line and said in line


def test_a_file_alone_is_a_test_split(tmp_path):
    write_file(tmp_path / "xquad.en.json", squad([ASKED]))
    found = find_dataset(str(tmp_path / "xquad.en.json"))
    assert found.name == "xquad.en" and len(found.load_split("test")) == 1
    with pytest.raises(InputError, match=r"xquad.en.json: no train split"):
        found.load_split("train")


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    first = write_splits(tmp_path / "a", "jsonl", SENTIMENT)
    second = write_splits(tmp_path / "b", "jsonl", SENTIMENT)
    changed = write_splits(tmp_path / "c", "jsonl", SENTIMENT, test=SENTIMENT[:1])
    relabelled = write_splits(tmp_path / "d", "jsonl", SENTIMENT)
    write_file(tmp_path / "d" / "meta.json", {"labels": ["negative", "positive"]})
    assert find_dataset(first).fingerprint == find_dataset(second).fingerprint
    assert (
        len({find_dataset(directory).fingerprint for directory in (first, changed, relabelled)})
        == 3
    )


GOOD = '{"id": "a", "text": "good", "label": "yes"}\n'
BAD_FILES = [
    ("x.jsonl", GOOD + "{", r"x.jsonl:2: not JSON: .*; expected one object a line"),
    ("x.jsonl", GOOD + "[1]", r"x.jsonl:2: found a list, expected a JSON object"),
    ("x.jsonl", GOOD + '{"label": "no"}', r"x.jsonl:2: no key `text`; found `label`"),
    (
        "x.jsonl",
        GOOD + '{"text": 3, "label": "no"}',
        r"x.jsonl:2: key `text`: found 3, expected text",
    ),
    (
        "x.jsonl",
        GOOD + '{"text": "x", "label": 0.5}',
        r"x.jsonl:2: label 0.5: .* numbers need --task regression",
    ),
    ("x.jsonl", GOOD * 2, r"x.jsonl:2: id 'a': found at .*x.jsonl:1 too"),
    (
        "x.jsonl",
        GOOD + '{"text": "x", "label": [1]}',
        r"x.jsonl:2: label \[1\]: expected text or an integer",
    ),
    (
        "x.jsonl",
        '{"text": "a", "text": "b", "label": "x"}\n',
        r"x.jsonl:1: key 'text' twice, expected once",
    ),
    ("x.jsonl", GOOD.encode() + b'{"text": "\xff"}', r"x.jsonl:2: not UTF-8 text"),
    ("x.jsonl", GOOD + '{"a":' * 100_000, r"x.jsonl:2: not JSON: nested too deeply"),
    ("x.jsonl", f'{{"text": "x", "label": {"9" * 5000}}}', r"x.jsonl:1: not JSON"),
    ("x.jsonl", "", r"x.jsonl: holds no example"),
    (
        "x.jsonl",
        '{"sentence": "x"}',
        r"found rows with sentence, expected rows with text and label",
    ),
    ("x.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', r"x.jsonl:1: found 2 tokens and 1 tags"),
    (
        "x.jsonl",
        '{"tokens": ["a"], "tags": ["PER"]}',
        r"x.jsonl:1: tag 1: found 'PER', expected IOB2: O, B-TYPE or I-TYPE",
    ),
    (
        "x.jsonl",
        '{"tokens": "a", "tags": ["O"]}',
        r"x.jsonl:1: key `tokens`: found \"a\", expected a list",
    ),
    (
        "x.jsonl",
        '{"tokens": ["a"], "tags": [1]}',
        r"x.jsonl:1: tag 1: found 1, expected IOB2.*meta.json that lists the tags",
    ),
    ("x.jsonl", '{"tokens": ["a"], "tags": null}', r"x.jsonl:1: key `tags`: found null"),
    ("x.jsonl", '{"tokens": [1], "tags": ["O"]}', r"x.jsonl:1: token 1: found 1, expected text"),
    (
        "x.jsonl",
        [ASKED],
        r"x.jsonl:1: key `answers`: found .*, expected text and answer_start, a list each",
    ),
    (
        "x.jsonl",
        [ASKED | {"answers": {"text": ["Ada"], "answer_start": []}}],
        r"x.jsonl:1: answers: .* differ in length",
    ),
    ("x.conll", "Ada B-PER\nwrote BAD\nit O\nall O", r"x.conll:2: tag 'BAD': expected IOB2"),
    ("x.conll", "Ada B-PER\nwrote\n", r"x.conll:2: found 1 columns, expected the tag in column 2"),
    ("x.conll", "Ada\n", r"x.conll: found no line of a word and its tag"),
    ("x.tsv", "text\tlabel\nx\n", r"x.tsv:2: found 1 columns, expected 2 as in the header"),
    ("x.tsv", "id\ttext\tlabel\tid\n1\ta\tx\t2\n", r"x.tsv: found 2 columns `id`, expected one"),
    (
        "x.csv",
        "text;label\nx;1\n",
        r"x.csv:1: found ';' between columns, expected ','; replace it, or write JSONL",
    ),
    (
        "x.csv",
        'text,label\n"x\ny",1\nz\n',
        r"x.csv:4: found 1 columns, expected 2 as in the header",
    ),
    (
        "x.csv",
        'text,label\nx,1\n\n"y\nz,0\nw,1\n',
        r"x.csv:4: not CSV: unexpected end of data; expected cells with commas",
    ),
    ("x.csv", 'text,label\nx,1\n"y\nz",\nw,0\n', r"x.csv:3: label '': expected text or an integer"),
    ("x.csv", b'text,label\nx,1\n"y\n\xff",0\n', r"x.csv:4: not UTF-8 text"),
    ("x.parquet", "words\n", r"x.parquet:row 1: cannot be read as Parquet \(.*\)$"),
    (
        "x.parquet",
        [{"text": "x", "label": 1}, {"text": None, "label": 0}],
        r"x.parquet:row 2: key `text`: found null",
    ),
    (
        "x.json",
        squad([ASKED | {"answers": [{"text": "Ada", "answer_start": 3}]}]),
        r"question q: answer_start 3: found \" Ad\" in",
    ),
    (
        "x.json",
        squad([ASKED | {"answers": [{"text": "Ada", "answer_start": -8}]}]),
        r"question q: answer_start -8: found \"\"",
    ),
    ("x.json", '{"data": [', r"x.json: not JSON: .*; expected SQuAD's layout"),
    ("x.json", '{"data": [],\n "data": []}', r"x.json: key 'data' twice, expected once"),
    (
        "x.json",
        '{"data": [{"title": "T"}]}',
        r"x.json: data\[0\]: no key `paragraphs`; found `title`",
    ),
    (
        "x.json",
        squad([{"context": "c", "id": "q", "question": "q"}]),
        r"x.json: question q: no key `answers`",
    ),
    ("x.json", squad([{"context": "c", "question": "q"}]), r"paragraphs\[0\]: no key `id`"),
]


@pytest.mark.parametrize("file, content, message", BAD_FILES)
def test_bad_files(tmp_path, file, content, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, file, content)


TWO = {"labels": ["negative", "positive"]}
BAD_DIRECTORIES = [
    (
        {"train.jsonl": None, "test.jsonl": None, "README.md": "nothing"},
        r"found no file of a known format, expected train\.\*",
    ),
    ({"train.tsv": "x"}, r"found train.jsonl, train.tsv for the train split, expected one"),
    ({"test.jsonl": None}, r"x: no test split, expected a file test\.\*"),
    ({"meta.json": {"labels": ["x", "x"]}}, r"meta.json: key `labels`: expected a list of names"),
    ({"meta.json": "{"}, r"meta.json: not JSON"),
    (
        {"meta.json": '{"labels": ["a", "b"], "labels": ["b", "a"]}'},
        r"meta.json: not JSON \(key 'labels' twice\)",
    ),
    (
        {"train.jsonl": TAGGED, "meta.json": {"tags": ["O", "NOUN"]}},
        r"meta.json: key `tags`: found 'NOUN', expected IOB2",
    ),
    (
        {"train.jsonl": TAGGED, "meta.json": {"labels": ["B-PER", "I-PER"]}},
        r"meta.json: key `tags`: found no O",
    ),
    (
        {"train.jsonl": TAGGED, "test.jsonl": [{"tokens": ["a"], "tags": ["B-LOC"]}]},
        r"test.jsonl:1: label 'B-LOC': outside",
    ),
    (
        {"test.jsonl": labelled(2), "meta.json": TWO},
        r"test.jsonl:1: label 2: outside the label set, expected 0 to 1",
    ),
    (
        {"test.jsonl": labelled(-2), "meta.json": TWO},
        r"test.jsonl:1: label -2: outside the label set, expected 0 to 1",
    ),
    (
        {"test.jsonl": labelled("maybe"), "meta.json": TWO},
        r"label 'maybe': outside .*, expected one of negative, positive",
    ),
    (
        {"test.jsonl": labelled(0), "meta.json": {"labels": ["1", "2"]}},
        r"label 0: outside the label set, expected one of 1, 2",
    ),
    (
        {"test.jsonl": [{"tokens": [], "tags": []}], "train.jsonl": TAGGED},
        r"x: the test split is empty",
    ),
]


@pytest.mark.parametrize("changed, message", BAD_DIRECTORIES)
def test_bad_directories(tmp_path, changed, message):
    files = {
        "train.jsonl": SENTIMENT,
        "valid.jsonl": changed.get("train.jsonl", SENTIMENT),
        "test.jsonl": SENTIMENT,
    }
    if "test.jsonl" in changed and changed["test.jsonl"] is None:
        files["valid.jsonl"] = None
    with pytest.raises(InputError, match=message):
        find_dataset(write_files(tmp_path / "x", files | changed)).load_split("test")


@pytest.mark.parametrize("file, content, message", [
    ("qrels/dev.tsv", "q2\td9\t1",
     r"validation split: found none of the 1 relevant documents in corpus.jsonl"),
    ("qrels/train.tsv", "q2\td9\t1",
     r"train.tsv:1: document 'd9': not in corpus.jsonl, expected the _id of a doc"),
    ("qrels/dev.tsv", "q99\td1\t1",
     r"dev.tsv:1: query 'q99': not in queries.jsonl, expected the _id of a query"),
    ("qrels/dev.tsv", "q2\td1\t1\nq2\td1\t2",
     r"dev.tsv:2: query 'q2' and document 'd1': judged twice"),
    ("qrels/dev.tsv", "q2\t0\td1\t1",
     r"dev.tsv:1: found 'q2.*, expected query-id, corpus-id, score"),
    ("qrels/dev.tsv", f"q2\td1\t{'9' * 5000}", r"dev.tsv:1: found"),
    ("qrels/dev.tsv", "q2\td1\t0", r"the validation split is empty"),
    ("queries.jsonl", [{"_id": "q2", "text": "a"}, {"_id": "q2", "text": "b"}],
     r"queries.jsonl:2: _id 'q2': found at .*:1 too"),
    ("queries.jsonl", [{"id": "q2", "text": "a"}],
     r"queries.jsonl:1: no key `_id`; found `id`, `text`"),
])  # fmt: skip
def test_bad_retrieval_data(tmp_path, file, content, message):
    found = find_dataset(beir(tmp_path / "b", {file: content}))
    with pytest.raises(InputError, match=message):
        found.load_split("validation")


def test_tags_that_begin_inside_are_counted_and_empty_sentences_left_out(tmp_path, capsys):
    rows = [
        {"tokens": ["a", "b", "c"], "tags": ["I-PER", "I-PER", "B-ORG"]},
        {"tokens": [], "tags": []},
    ]
    assert [example.tags for example in read(tmp_path, "test.jsonl", rows)] == [(2, 2, 1)]
    said = capsys.readouterr().out
    assert "1 tags I- without a B-" in said and "1 sentences without a word are left out" in said


def test_judged_documents_that_are_not_in_the_corpus_are_counted(tmp_path, capsys):
    grades = [("q4", "d4", 1), ("q4", "gone", 2), ("q5", "gone", 1), ("q5", "lost", 0)]
    examples = find_dataset(beir(tmp_path / "b", test=grades)).load_split("test")
    assert examples.relevant == {"q4": {"d4": 1, "gone": 2}, "q5": {"gone": 1}}
    assert set(examples.documents) == {"d1", "d2", "d4"}
    line = "b: test split: 1 of 2 relevant documents are not in corpus.jsonl and count as misses\n"
    assert capsys.readouterr().out == line


def test_a_task_can_be_told(tmp_path):
    """Where rows have the keys of two; in vain where they have not."""
    directory = write_splits(
        tmp_path / "x", "jsonl", [row | {"text": "x", "label": "y"} for row in TAGGED]
    )
    assert find_dataset(directory).family is TaskFamily.TC
    assert find_dataset(directory, task="SC").load_split("train") == [LabelledText("a", "x", 0)]
    with pytest.raises(InputError, match=r"--task IR: .* holds no corpus.jsonl"):
        find_dataset(directory, task="IR")
    with pytest.raises(
        InputError, match=r"--task SC: .*b holds corpus.jsonl and queries.jsonl, expected --task IR"
    ):
        find_dataset(beir(tmp_path / "b"), task="SC")


def one_line(path):
    """Most of it is a hole in the file."""
    path.write_bytes(b'{"label": 1, "text": "')
    os.truncate(path, 10**9)


def one_compressed_line(path):
    with gzip.open(path, "wb", 1) as stream:
        for _ in range(70):
            stream.write(b"a" * (1 << 20))


@pytest.mark.parametrize("file, make, message", [
    ("train.jsonl", os.mkfifo, "no train split"),
    ("meta.json", os.mkfifo, r"meta.json: not a regular file"),
    ("train.jsonl", one_line, r"train.jsonl:1: longer than 67,108,864 bytes"),
    ("train.jsonl", one_compressed_line, r"train.jsonl:1: longer than 67,108,864 bytes"),
])  # fmt: skip
def test_files_that_would_harm_their_reader_are_one_line(tmp_path, file, make, message):
    directory = write_splits(tmp_path / "data", "jsonl", SENTIMENT)
    (tmp_path / "data" / file).unlink(missing_ok=True)
    make(tmp_path / "data" / file)
    with pytest.raises(InputError, match=message):
        find_dataset(directory).load_split("train")


@pytest.mark.parametrize("file, content", [
    ("columns.csv", f"text,label,{','.join(map(str, range(20_000)))}\nx,y{',1' * 20_000}\n"),
    ("labels.jsonl",
     "".join(f'{{"text": "x", "label": "{number} y"}}\n' for number in range(20_000))),
    ("digits.csv", f"text,label\nx,{'1' * 20_000}x\ny,0.5\n"),
    ("words.txt", "word " * 20_000 + "O\n" + "a word O\n" * 10_000),
], ids=["columns", "labels", "digits", "words"])  # fmt: skip
def test_large_files_take_no_quadratic_time(tmp_path, file, content):
    start = time.perf_counter()
    with contextlib.suppress(InputError):
        read(tmp_path, file, content)
    assert time.perf_counter() - start < 9
