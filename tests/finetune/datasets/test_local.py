import contextlib
import gzip
import json
import os
import time

import datasets
import numpy as np
import pyarrow.parquet
import pytest

from megaenc.errors import InputError
from megaenc.finetune import predict
from megaenc.finetune.datasets import formats, parquet
from megaenc.finetune.datasets.formats import read_rows
from megaenc.finetune.datasets.local import PAIR_TEMPLATE
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.examples import (
    Answer,
    LabelledText,
    Pair,
    Question,
    RetrievalExamples,
    TaggedWords,
    TaskFamily,
    split_validation_rows,
)


def write(folder, **files):
    """Files by name (`__` stands for the dot, rows become JSONL, other objects JSON)."""
    for name, content in files.items():
        path = folder / name.replace("__", ".").replace("-slash-", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        elif not isinstance(content, str):
            content = json.dumps(content)
        path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return str(folder)


SENTIMENT = [{"id": "a", "text": "good", "label": 1}, {"id": "b", "text": "bad", "label": 0}]
TAGGED = [{"id": "a", "tokens": ["Ada", "Lovelace", "wrote"], "tags": ["B-PER", "I-PER", "O"]}]


def three(rows):
    return {"train__jsonl": rows, "valid__jsonl__gz": rows[:1], "test__jsonl": rows[-1:]}


def test_classified_texts_of_jsonl_with_the_labels_of_meta_json(tmp_path):
    found = find_dataset(write(tmp_path / "films", **three(SENTIMENT), meta__json={"labels": ["negative", "positive"]}))
    assert (found.name, found.family, found.labels, found.train_on) == ("films", TaskFamily.SC, ("negative", "positive"), "films")
    assert found.load_split("train") == [LabelledText("a", "good", 1), LabelledText("b", "bad", 0)]
    assert found.load_split("validation") == [LabelledText("a", "good", 1)]
    assert found.load_split("test") == [LabelledText("b", "bad", 0)]


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet"])
def test_an_empty_id_is_none_in_every_format(tmp_path, form):
    rows = [{"id": row_id, "text": "x", "label": "y"} for row_id in ("", "a", "")]
    found = find_dataset(write_rows(tmp_path / "x", form, rows))
    assert [example.id for example in found.load_split("test")] == ["0", "a", "2"]


def test_labels_without_meta_json_are_those_of_train_sorted(tmp_path):
    words = [{"text": "x", "label": "yes"}, {"text": "y", "label": "no"}]
    found = find_dataset(write(tmp_path / "words", **three(words)))
    assert found.labels == ("no", "yes") and [example.label for example in found.load_split("train")] == [1, 0]
    stars = [{"text": "x", "label": 10}, {"text": "y", "label": 9}, {"text": "z", "label": 10}]
    found = find_dataset(write(tmp_path / "stars", **three(stars)))
    assert found.labels == ("9", "10") and [example.label for example in found.load_split("train")] == [1, 0, 1]
    assert [example.id for example in found.load_split("train")] == ["0", "1", "2"]


def write_rows(folder, form, rows, *, names=None, **splits):
    """A folder of files in a format: `rows` are train, valid and test, or the rows of `splits`."""
    folder.mkdir()
    for split in ("train", "valid", "test"):
        split_rows = splits.get(split, rows)
        if form == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
        elif form == "parquet":
            datasets.Dataset.from_list(split_rows).to_parquet(folder / f"{split}.parquet")
        else:
            comma = {"csv": ",", "tsv": "\t"}[form]
            lines = [comma.join(split_rows[0]), *(comma.join(map(str, row.values())) for row in split_rows)]
            (folder / f"{split}.{form}").write_text("\n".join(lines) + "\n")
    if names:
        (folder / "meta.json").write_text(json.dumps({"labels": names}))
    return str(folder)


FORMS = ["jsonl", "csv", "tsv", "parquet"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labels, first", [
    (["4.8", "0.4", "3"], "4.8"), (["1", "2", "3.0"], "3.0"), (["-.5", "1"], "-.5"), (["1e-3", "nan"], "1e-3"),
])  # fmt: skip
def test_scores_as_text_are_refused_as_regression(tmp_path, form, labels, first):
    folder = write_rows(tmp_path / "scores", form, [{"text": "x", "label": label} for label in labels])
    with pytest.raises(InputError, match=rf"label '{first}': found a number with a point, .* regression is not supported"):
        find_dataset(folder)


@pytest.mark.parametrize("labels", [["4.8", "good"], ["1", "-1"], ["v1.0", "v2.0"], ["e"], ["nan", "inf"]])
def test_names_with_points_are_classes_if_one_is_no_number(tmp_path, labels):
    folder = write_rows(tmp_path / "names", "csv", [{"text": "x", "label": label} for label in labels])
    assert set(find_dataset(folder).labels) == set(labels)


def test_names_that_look_like_scores_are_classes_if_meta_json_lists_them(tmp_path):
    rows = [{"text": "x", "label": "3.10"}, {"text": "y", "label": "3.9"}]
    found = find_dataset(write_rows(tmp_path / "versions", "csv", rows, names=["3.9", "3.10"]))
    assert [example.label for example in found.load_split("train")] == [1, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names, labels, indices", [
    (None, [7, 3, 10], [1, 0, 2]),
    (["1", "2", "3"], [1, 3, 2], [0, 2, 1]),
    (["1", "0"], [0, 1, 1], [1, 0, 0]),
    (["low", "high"], [0, 1, 1], [0, 1, 1]),
])  # fmt: skip
def test_a_number_is_the_same_class_in_every_format(tmp_path, form, names, labels, indices):
    rows = [{"text": "x", "label": label} for label in labels]
    found = find_dataset(write_rows(tmp_path / "stars", form, rows, names=names))
    assert [example.label for example in found.load_split("train")] == indices


@pytest.mark.parametrize("form", FORMS)
def test_among_names_that_are_numbers_no_number_is_a_position(tmp_path, form):
    rows = [{"text": "x", "label": label} for label in (1, 0)]
    found = find_dataset(write_rows(tmp_path / "stars", form, rows, names=["1", "2", "3"]))
    with pytest.raises(InputError, match=r"label '?0'?: outside the label set, expected one of 1, 2, 3"):
        found.load_split("train")


def test_numbers_in_a_parquet_column_with_class_names_are_positions_even_of_numbers(tmp_path):
    stars = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["1", "2", "3"])})
    rows = [{"text": "x", "label": 1}, {"text": "y", "label": 0}]
    found = find_dataset(write_parquet(tmp_path / "stars", stars, train=rows, valid=rows, test=rows))
    assert [found.labels[example.label] for example in found.load_split("train")] == ["2", "1"]


@pytest.mark.parametrize("form", FORMS)
def test_a_test_split_with_hidden_labels_is_not_used(tmp_path, capsys, form):
    rows = [{"text": f"text {number}", "label": number % 2} for number in range(40)]
    hidden = [row | {"label": -1} for row in rows]
    found = find_dataset(write_rows(tmp_path / f"hidden_{form}", form, rows, test=hidden))
    assert [len(found.load_split(split)) for split in ("train", "validation", "test")] == [38, 2, 40]
    assert found.load_split("test")[1].label == 1
    assert f"hidden_{form}: test.{form} is not used: its labels are hidden (-1)\n" in capsys.readouterr().out


def test_minus_one_may_be_a_class(tmp_path):
    rows = [{"text": "x", "label": -1}, {"text": "y", "label": 1}]
    found = find_dataset(write_rows(tmp_path / "signs", "csv", rows, test=rows[:1]))
    assert found.load_split("test") == [LabelledText("0", "x", 0)]


def test_pairs_become_one_text_by_a_template_and_the_studys_where_the_name_is_the_studys(tmp_path):
    rows = [{"text": "It rains {now}.", "text_pair": "It is wet.", "label": "yes"}]
    folder = write(tmp_path / "rain", **three(rows))
    [default] = find_dataset(folder).load_split("train")
    assert default.content == ("It rains {now}.", "It is wet.")
    [own] = find_dataset(folder, pair_template="{text_pair} | {text}").load_split("train")
    assert own.text == "It is wet. | It rains {now}."
    [studys] = find_dataset(f"mnli_m={folder}").load_split("train")
    assert studys.text == "Premise: It rains {now}.\nHypothesis: It is wet."
    assert find_dataset(folder).fingerprint != find_dataset(folder, pair_template="{text_pair} | {text}").fingerprint
    with pytest.raises(InputError, match=r"--pair-template '\{text\}': found text, expected \{text\} and \{text_pair\}"):
        find_dataset(folder, pair_template="{text}")
    for bad in ("{text} {text_pair} {", "{text:>5d} {text_pair}", "{text.x} {text_pair}"):
        with pytest.raises(InputError, match=r"--pair-template .*: .*expected \{text\} and \{text_pair\}"):
            find_dataset(folder, pair_template=bad)
    assert (
        find_dataset(folder, pair_template="{{{text}}} {text_pair}").load_split("train")[0].text == "{It rains {now}.} It is wet."
    )


def test_pairs_are_read_wherever_they_are(tmp_path):
    alone, pair = {"text": "It rains.", "label": "no"}, {"text": "It rains.", "text_pair": "It is wet.", "label": "yes"}
    joined, wet = ("It rains.", "It is wet."), "Premise: It rains.\nHypothesis: It is wet."
    mixed = write(tmp_path / "mixed", **three([alone, pair, alone | {"text_pair": None}]))
    assert [example.content for example in find_dataset(mixed).load_split("train")] == ["It rains.", joined, "It rains."]
    assert [example.text for example in find_dataset(f"mnli_m={mixed}").load_split("train")] == ["It rains.", wet, "It rains."]
    late = write(tmp_path / "late", **three([alone, pair]) | {"train__jsonl": [alone, alone | {"label": "yes"}]})
    assert [example.content for split in ("train", "test") for example in find_dataset(late).load_split(split)] == [
        "It rains."
    ] * 2 + [joined]
    for template in ("{text} {text_pair}", PAIR_TEMPLATE):
        assert find_dataset(late).fingerprint != find_dataset(late, pair_template=template).fingerprint


@pytest.mark.parametrize("pair_template", ["tokenizer", "{text} | {text_pair}"])
def test_an_empty_second_text_is_none_in_every_format(tmp_path, pair_template):
    empty = [{"text": "It rains.", "text_pair": pair, "label": "no"} for pair in ("", None)]
    rows = [{"text": "It rains.", "text_pair": "Wet.", "label": "yes"}, *empty]
    table = "text,text_pair,label\nIt rains.,Wet.,yes\nIt rains.,,no\nIt rains.,,no\n"
    write(tmp_path, jsonl__jsonl=rows, csv__csv=table, tsv__tsv=table.replace(",", "\t"))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "parquet.parquet")
    for form in FORMS:
        examples = find_dataset(str(tmp_path / f"{form}.{form}"), pair_template=pair_template).load_split("test")
        assert [example.content for example in examples[1:]] == ["It rains.", "It rains."], form
        assert examples[0].content in (("It rains.", "Wet."), "It rains. | Wet.")
        predicted = predict._build_examples(TaskFamily.SC, list(read_rows(tmp_path / f"{form}.{form}")), pair_template)
        assert [example.content for example in predicted] == [example.content for example in examples]


@pytest.mark.parametrize("name, content, message", [
    ("test.jsonl", '{"text": "a", "text": "b", "label": "x"}\n', r"test.jsonl:1: key 'text' twice, expected once"),
    ("test.csv", "text,label,label\na,x,y\n", r"test.csv: found 2 columns `label`, expected one"),
    ("test.tsv", "id\ttext\tlabel\tid\n1\ta\tx\t2\n", r"test.tsv: found 2 columns `id`, expected one"),
    ("test.json", '{"data": [], "data": []}', r"test.json:?1?: key 'data' twice, expected once"),
    ("test.json", '{"data": [],\n "data": []}', r"test.json: key 'data' twice, expected once"),
])  # fmt: skip
def test_two_equal_columns_or_keys_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        find_dataset(str(tmp_path / name)).load_split("test")


@pytest.mark.parametrize("start", ["", "\n"])
def test_questions_may_stand_in_one_line_longer_than_a_row(tmp_path, monkeypatch, start):
    monkeypatch.setattr(formats, "_MAX_LINE_BYTES", 100)
    (tmp_path / "test.json").write_text(start + json.dumps(squad()))
    [question] = find_dataset(str(tmp_path / "test.json")).load_split("test")
    assert question.answers == (Answer("Ada", 4),) * 2


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet"])
def test_suffixes_in_capitals_are_the_same(tmp_path, form):
    rows = [{"text": "good", "label": "x"}, {"text": "bad", "label": "y"}]
    lower = find_dataset(write_rows(tmp_path / "lower", form, rows))
    write_rows(tmp_path / "data", form, rows)
    for file in (tmp_path / "data").iterdir():
        if form == "csv":
            file.with_name(f"{file.stem}.CSV.GZ").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
        else:
            file.rename(file.with_suffix(f".{form.upper()}"))
    upper = find_dataset(str(tmp_path / "data"))
    assert upper.load_split("train") == lower.load_split("train") and upper.labels == lower.labels


def test_suffixes_of_columns_squad_and_beir_in_capitals(tmp_path):
    (tmp_path / "test.CONLL").write_text("Ada B-PER\n")
    assert find_dataset(str(tmp_path / "test.CONLL")).load_split("test") == [TaggedWords("0", ("Ada",), (1,))]
    (tmp_path / "test.JSON").write_text(json.dumps(squad()))
    assert find_dataset(str(tmp_path / "test.JSON")).family is TaskFamily.QA
    folder = tmp_path / "retrieval"
    folder.mkdir()
    beir(folder)
    lower = find_dataset(str(folder)).load_split("test")
    for file in [*folder.glob("*.jsonl*"), *folder.glob("qrels/*")]:
        name, _, suffixes = file.name.partition(".")
        file.rename(file.with_name(f"{name}.{suffixes.upper()}"))
    assert find_dataset(str(folder)).load_split("test") == lower


def test_two_equal_keys_of_meta_json_are_refused(tmp_path):
    folder = write(tmp_path / "x", **three(SENTIMENT), meta__json='{"labels": ["a", "b"], "labels": ["b", "a"]}')
    with pytest.raises(InputError, match=r"meta.json: not JSON \(key 'labels' twice\)"):
        find_dataset(folder)


def test_columns_without_a_name_may_repeat(tmp_path):
    (tmp_path / "test.csv").write_text("text,label,,\na,x,,\n")
    assert find_dataset(str(tmp_path / "test.csv")).load_split("test") == [LabelledText("0", "a", 0)]


def test_without_pairs_the_template_changes_no_fingerprint(tmp_path):
    alone = write(tmp_path / "alone", **three([{"text": "It rains.", "label": "no"}, {"text": "It is wet.", "label": "yes"}]))
    assert find_dataset(alone).fingerprint == find_dataset(alone, pair_template=PAIR_TEMPLATE).fingerprint


def test_tables_with_a_header_take_quotes_for_text(tmp_path):
    table = 'text\tlabel\nthe "best\t1\nworst\t0\n'
    files = {"train__tsv": table, "dev__tsv": table, "test__tsv": table}
    found = find_dataset(write(tmp_path / "t", **files, meta__json={"labels": ["negative", "positive"]}))
    assert found.load_split("validation") == [LabelledText("0", 'the "best', 1), LabelledText("1", "worst", 0)]
    words = "tokens\ttags\nAda wrote\tB-PER O\n"
    found = find_dataset(write(tmp_path / "w", train__tsv=words, dev__tsv=words, test__tsv=words))
    assert found.load_split("test") == [TaggedWords("0", ("Ada", "wrote"), (1, 0))] and found.labels == ("O", "B-PER")
    columns = "# no sentence\nAda\tB-PER\nwrote\tO\n"
    found = find_dataset(write(tmp_path / "c", train__tsv=columns, dev__tsv=columns, test__tsv=columns))
    assert found.load_split("test") == [TaggedWords("0", ("Ada", "wrote"), (1, 0))]


@pytest.mark.parametrize("table, message", [
    ("sentence\tgold\nx\t1\n", r"train.tsv: found rows with sentence, gold, expected rows with text and label"),
    ("text\tgold\nx\t1\n", r"train.tsv:2: no key `label`; found `text`, `gold`"),
    ("text\tlabel\nx\n", r"train.tsv:2: found 1 columns, expected 2 as in the header"),
])  # fmt: skip
def test_bad_tables(tmp_path, table, message):
    with pytest.raises(InputError, match=message):
        find_dataset(write(tmp_path / "x", train__tsv=table, dev__tsv=table, test__tsv=table))


def test_csv_is_read_with_its_quotes(tmp_path):
    table = (
        f'\ufeffid,text,label\r\na,"the ""best"", he said",1\r\n\r\nb,"two\r\nlines\tand a tab",0\r\nc,{"long " * 50_000},1\r\n'
    )
    files = {"train__csv": table, "dev__csv": table, "test__csv": table}
    found = find_dataset(write(tmp_path / "t", **files, meta__json={"labels": ["negative", "positive"]}))
    assert found.load_split("validation") == [
        LabelledText("a", 'the "best", he said', 1),
        LabelledText("b", "two\r\nlines\tand a tab", 0),
        LabelledText("c", "long " * 50_000, 1),
    ]
    words = "tokens,tags\nAda wrote,B-PER O\n"
    found = find_dataset(write(tmp_path / "w", train__csv=words, dev__csv=words, test__csv=words))
    assert found.load_split("test") == [TaggedWords("0", ("Ada", "wrote"), (1, 0))]
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "test.csv.gz").write_bytes(gzip.compress(b"text,label,text_pair\nIt rains.,yes,It is wet.\n"))
    [pair] = find_dataset(str(packed)).load_split("test")
    assert pair.content == ("It rains.", "It is wet.")


@pytest.mark.parametrize("table, message", [
    ("sentence,gold\nx,1\n", r"train.csv: found rows with sentence, gold, expected rows with text and label"),
    ("text;label\nx;1\n", r"train.csv:1: found ';' between columns, expected ','; replace it, or write JSONL"),
    ('"text"\t"label"\n"x"\t1\n', r"train.csv:1: found '\\t' between columns, expected ','"),
    ('text,label\n"x\ny",1\nz\n', r"train.csv:4: found 1 columns, expected 2 as in the header"),
    ('text,label\nx,1\n\n"y\nz,0\nw,1\n', r"train.csv:4: not CSV: unexpected end of data; expected cells with commas"),
    ('text,label\nx,1\n"y"z,0\n', r"train.csv:3: not CSV: .*; expected cells with commas, quotes or line breaks in"),
    ('text,label\nx,1\n"y\nz",\nw,0\n', r"train.csv:3: label '': expected text or an integer"),
    ('text,label\nx,1\n"y\n\udcff",0\n', r"train.csv:4: not UTF-8 text"),
])  # fmt: skip
def test_bad_csv(tmp_path, table, message):
    folder = write(tmp_path / "x", dev__csv="text,label\nx,1\n", test__csv="text,label\nx,1\n")
    (tmp_path / "x" / "train.csv").write_bytes(table.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=message):
        find_dataset(folder).load_split("train")


def write_parquet(folder, features=None, **splits):
    folder.mkdir()
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet", batch_size=2)
    return str(folder)


def test_parquet_gives_what_jsonl_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_ROWS_PER_BATCH", 3)
    pairs = [{"id": f"{n}", "text": f"text {n}", "text_pair": "wet" if n % 2 else None, "label": n % 3} for n in range(10)]
    question = {"question": "Who?", "context": "Yes Ada did.", "answers": {"text": ["Ada"], "answer_start": [4]}}
    for name, rows in (("pairs", pairs), ("tagged", TAGGED), ("asked", [question])):
        found = find_dataset(write_parquet(tmp_path / name, train=rows, valid=rows[:1], test=rows))
        other = find_dataset(write(tmp_path / f"{name}2", **three(rows) | {"test__jsonl": rows}))
        assert (found.family, found.labels) == (other.family, other.labels)
        for split in ("train", "validation", "test"):
            assert found.load_split(split) == other.load_split(split)


def test_class_names_in_a_parquet_file_are_the_labels(tmp_path):
    labels = datasets.ClassLabel(names=["neg", "pos", "neutral"])
    films = datasets.Features({"text": datasets.Value("string"), "label": labels})
    rows = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
    found = find_dataset(write_parquet(tmp_path / "films", films, train=rows, valid=rows, test=rows))
    assert found.labels == ("neg", "pos", "neutral") and [example.label for example in found.load_split("train")] == [1, 0]
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    words = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "tags": tags})
    rows = [{"tokens": ["Ada", "wrote"], "tags": [1, 0]}]
    found = find_dataset(write_parquet(tmp_path / "people", words, train=rows, valid=rows, test=rows))
    assert found.labels == ("O", "B-PER") and found.load_split("test") == [TaggedWords("0", ("Ada", "wrote"), (1, 0))]


def test_class_names_that_differ_between_files_are_refused(tmp_path):
    def write_named(path, names):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        datasets.Dataset.from_list([{"text": "x", "label": 0}, {"text": "y", "label": 1}], features=features).to_parquet(path)

    for split, names in (("train", ["1", "0"]), ("valid", ["1", "0"]), ("test", ["0", "1"])):
        write_named(tmp_path / f"{split}.parquet", names)
    message = r"test.parquet: names of column `label`: found 0, 1, expected those of .*train.parquet or a meta.json"
    with pytest.raises(InputError, match=message):
        find_dataset(str(tmp_path))
    write_named(tmp_path / "test.parquet", ["1", "0"])
    found = find_dataset(str(tmp_path))
    assert found.labels == ("1", "0") and [example.label for example in found.load_split("test")] == [0, 1]
    write(tmp_path, meta__json={"labels": ["1", "0"]})
    assert [example.label for example in find_dataset(str(tmp_path)).load_split("test")] == [0, 1]
    write(tmp_path, meta__json={}, train__jsonl=[{"text": "x", "label": 0}, {"text": "y", "label": 1}])
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(InputError, match=r"valid.parquet: names of column `label`: found 1, 0, expected those of .*train.jsonl"):
        find_dataset(str(tmp_path))


@pytest.mark.parametrize("rows, message", [
    ([{"text": "x", "label": 1}, {"text": None, "label": 0}], r"train.parquet:row 2: key `text`: found null, expected text"),
    ([{"text": "x", "label": 0.5}], r"train.parquet:row 1: label 0.5: .* regression is not supported"),
    ([{"text": "x", "stars": 1}], r"train.parquet:row 1: no key `label`; found `text`, `stars`"),
    ([{"id": "a", "text": "x", "label": 1}] * 2, r"train.parquet:row 2: id 'a': found at .*train.parquet:row 1 too"),
    ([], r"train.parquet: holds no example"),
])  # fmt: skip
def test_bad_rows_of_parquet(tmp_path, rows, message):
    good = [{"text": "x", "label": 1}]
    with pytest.raises(InputError, match=message):
        find_dataset(write_parquet(tmp_path / "x", train=rows, valid=good, test=good)).load_split("train")


def test_a_file_that_is_not_parquet(tmp_path):
    with pytest.raises(InputError, match=r"test.parquet:row 1: cannot be read as Parquet \(.*\)$"):
        find_dataset(write(tmp_path / "x", test__parquet="words\n"))
    table = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match=r"twice.parquet: found 2 columns `text`, expected one"):
        find_dataset(str(tmp_path / "twice.parquet"))


def test_a_date_that_python_does_not_know_is_one_line(tmp_path):
    days = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"], "label": ["y"], "day": days}), tmp_path / "test.parquet")
    with pytest.raises(InputError, match=r"test.parquet:row 1: cannot be read as Parquet \(days=2147483647"):
        find_dataset(str(tmp_path / "test.parquet"))


CONLL = """-DOCSTART- -X- O O

# not a hash alone
EU NNP I-NP B-ORG
# # B-NP O
rejects VBZ I-VP O

Ada NNP I-NP B-PER
"""
UNER = "# sent_id = first\n# text = Ada is in\n1\tAda\tB-PER\t-\tann\n2\tis\tO\t-\tann\n\n# sent_id = second\n1\tIn\tO\t-\tann\n"


@pytest.mark.parametrize("rows", ["jsonl", "conll", "iob2"])
def test_tagged_words_of_every_format(tmp_path, rows):
    if rows == "jsonl":
        found = find_dataset(
            write(tmp_path / "x", **three(TAGGED), meta__json={"tags": ["O", "B-PER", "I-PER"], "pos_tags": ["NN"]})
        )
        assert found.load_split("test") == [TaggedWords("a", ("Ada", "Lovelace", "wrote"), (1, 2, 0))]
    elif rows == "conll":
        found = find_dataset(write(tmp_path / "x", train__conll=CONLL, valid__conll=CONLL, test__txt=CONLL))
        assert found.labels == ("O", "B-ORG", "B-PER")
        assert found.load_split("train") == [
            TaggedWords("0", ("EU", "#", "rejects"), (1, 0, 0)),
            TaggedWords("1", ("Ada",), (2,)),
        ]
        assert found.load_split("test") == found.load_split("train")
    else:
        files = {f"en_ewt-ud-{split}__iob2": UNER for split in ("train", "dev", "test")}
        found = find_dataset(write(tmp_path / "x", **files))
        assert found.load_split("validation") == [
            TaggedWords("first", ("Ada", "is"), (1, 0)),
            TaggedWords("second", ("In",), (0,)),
        ]
    assert found.family is TaskFamily.TC


ODD_SPACES = ["10\u00a0000", "\u2028", "a\u0085b", "\u3000", "x\u2029", "\u00a0"]


@pytest.mark.parametrize("form, template", [
    ("conll", "{} O\n"), ("conll", "{}  NN O \n"), ("iob2", "{}\tO\r\n"), ("tsv", "{}\tO\n"), ("csv", "{},O\n"),
    ("jsonl", '{{"tokens": ["{}"], "tags": ["O"]}}\r\n'),
])  # fmt: skip
def test_only_tabs_spaces_and_line_ends_separate_words(tmp_path, form, template):
    header = "tokens,tags\n" if form == "csv" else ""
    text = "\ufeff" + header + "".join(template.format(word) for word in ODD_SPACES)
    (tmp_path / f"test.{form}").write_bytes(text.encode())
    sentences = find_dataset(str(tmp_path / f"test.{form}")).load_split("test")
    assert [word for sentence in sentences for word in sentence.words] == ODD_SPACES


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
def test_only_line_feeds_end_lines(tmp_path, form):
    texts = [f"one{mark}two" for mark in "\x0b\x0c\x1c\x85\u2028\u2029\u00a0"]
    rows = [json.dumps({"text": text, "label": "x"}, ensure_ascii=False) for text in texts]
    if form != "jsonl":
        comma = {"csv": ",", "tsv": "\t"}[form]
        rows = [f"text{comma}label", *(f"{text}{comma}x" for text in texts)]
    (tmp_path / f"test.{form}").write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    assert [example.text for example in find_dataset(str(tmp_path / f"test.{form}")).load_split("test")] == texts


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_in_a_quoted_cell_are_text(tmp_path, end):
    texts = ["a\r\nb", "a\rb", "\r\r\n", "a\nb\r"]
    (tmp_path / "test.csv").write_bytes(end.join(["text,label", *(f'"{text}",x' for text in texts)]).encode())
    assert [example.text for example in find_dataset(str(tmp_path / "test.csv")).load_split("test")] == texts


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv", "conll"])
@pytest.mark.parametrize("encoding", ["latin1", "cp1252", "utf-16", "utf-16le", "utf-16be"])
def test_another_encoding_is_named_with_its_conversion(tmp_path, form, encoding):
    word = "caf…" if encoding == "cp1252" else "café"
    contents = {"csv": f"text,label\n{word},x\n", "tsv": f"text\tlabel\n{word}\tx\n", "conll": f"{word} O\n"}
    contents["jsonl"] = json.dumps({"text": word, "label": "x"}, ensure_ascii=False)
    contents["json"] = '{"data": [\n"' + word + '"]}'
    (tmp_path / f"test.{form}").write_bytes(contents[form].encode(encoding))
    with pytest.raises(InputError, match=rf"test.{form}:?.*: .*not UTF-8.*; expected UTF-8, as after `iconv -f {encoding} -t"):
        find_dataset(str(tmp_path / f"test.{form}")).load_split("test")


def squad(*, start=4, impossible=None):
    asked = {"id": "q", "question": "Who?", "answers": [{"text": "Ada", "answer_start": start}] * 2}
    none = {"id": "n", "question": "When?", "answers": [], "plausible_answers": asked["answers"], "is_impossible": True}
    qas = [asked, none] if impossible else [asked]
    return {"version": "v", "data": [{"title": "T", "paragraphs": [{"context": "Yes Ada did.", "qas": qas}]}]}


def test_positions_of_tags_where_meta_json_lists_them(tmp_path):
    found = find_dataset(write(tmp_path / "x", **three([{"tokens": ["a"], "tags": [1]}]), meta__json={"tags": ["O", "B-PER"]}))
    assert found.load_split("test") == [TaggedWords("0", ("a",), (1,))]


def test_questions_a_row(tmp_path):
    row = {"question": "Who?", "context": "Yes Ada did.", "answers": {"text": ["Ada"], "answer_start": [4]}}
    found = find_dataset(write(tmp_path / "x", **three([row])))
    assert found.load_split("validation") == [Question("0", "Who?", "Yes Ada did.", (Answer("Ada", 4),))]
    uneven = row | {"answers": {"text": ["Ada"], "answer_start": []}}
    with pytest.raises(InputError, match=r"train.jsonl:1: answers: text and answer_start differ in length"):
        find_dataset(write(tmp_path / "y", **three([uneven]))).load_split("train")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "squad"])
def test_impossible_questions_have_no_answer_in_any_format(tmp_path, form):
    def find(mark):
        asked = {"id": "q", "question": "Who?", "is_impossible": mark}
        context, answer = "Yes Ada did.", {"text": "Ada", "answer_start": 4}
        row = asked | {"context": context, "answers": {key: [value] for key, value in answer.items()}}
        content = {"data": [{"paragraphs": [{"context": context, "qas": [asked | {"answers": [answer]}]}]}]}
        if form == "parquet":
            datasets.Dataset.from_list([row]).to_parquet(tmp_path / "test.parquet")
        else:
            write(tmp_path, **({"test__json": content} if form == "squad" else {"test__jsonl": [row]}))
        return find_dataset(str(next(tmp_path.glob("test.*")))).load_split("test")

    assert [find(mark)[0].answers for mark in (True, False, None)] == [(), (Answer("Ada", 4),), (Answer("Ada", 4),)]
    with pytest.raises(InputError, match=r"test.*: key `is_impossible`: found \"false\", expected true or false"):
        find("false")


def test_questions_of_squads_json_of_both_versions(tmp_path):
    files = {"train-v2__0__json": squad(impossible=True), "dev-v2__0__json__gz": squad(), "test__json": squad()}
    found = find_dataset(write(tmp_path / "s", **files))
    asked = Question("q", "Who?", "Yes Ada did.", (Answer("Ada", 4), Answer("Ada", 4)))
    assert found.family is TaskFamily.QA and found.labels == ()
    assert found.load_split("train") == [asked, Question("n", "When?", "Yes Ada did.", ())]
    assert found.load_split("validation") == found.load_split("test") == [asked]


def beir(folder, **more):
    corpus = [{"_id": f"d{n}", "title": "T" if n == 1 else "", "text": "" if n == 4 else f"text {n}"} for n in range(6)]
    queries = [{"_id": f"q{n}", "text": f"ask {n}"} for n in range(40)]
    head = "query-id\tcorpus-id\tscore\n"
    files = {
        "corpus__jsonl__gz": corpus,
        "queries__jsonl": queries,
        "qrels-slash-train__tsv": head + "q0\td0\t2\nq0\td1\t0\nq1\td1\t1\n",
        "qrels-slash-dev__tsv": head + "q2\td1\t3\nq2\td2\t0\nq3\td2\t0\n",
        "qrels-slash-test__tsv": head + "q4\td4\t1\n",
    }
    return write(folder, **{name: content for name, content in (files | more).items() if content})


def test_retrieval_of_a_beir_folder(tmp_path):
    found = find_dataset(beir(tmp_path / "b"))
    assert (found.family, found.train_on, found.fingerprint) == (TaskFamily.IR, "b", found.train_fingerprint)
    assert found.load_split("train") == [
        Pair("q0/d0", "Query: ask 0", "Document: text 0"),
        Pair("q1/d1", "Query: ask 1", "Document: T. text 1"),
    ]
    # The documents that validation and test judge, relevant or not; a query with nothing relevant asks for nothing.
    documents = {"d1": "Document: T. text 1", "d2": "Document: text 2", "d4": "Document: "}
    assert found.load_split("validation") == RetrievalExamples(
        {"q2": "Query: ask 2"}, documents, {"q2": {"d1": 3}}, ignore_identical_ids=True
    )
    assert found.load_split("test") == RetrievalExamples(
        {"q4": "Query: ask 4"}, documents, {"q4": {"d4": 1}}, ignore_identical_ids=True
    )
    whole = find_dataset(beir(tmp_path / "b"), whole_corpus=True)
    assert list(whole.load_split("test").documents) == [f"d{n}" for n in range(6)] and whole.fingerprint != found.fingerprint


def test_retrieval_is_validated_on_part_of_train_or_else_of_test(tmp_path):
    head = "query-id\tcorpus-id\tscore\n"
    many = head + "".join(f"q{n}\td{n % 6}\t1\n" for n in range(40))
    found = find_dataset(beir(tmp_path / "a", **{"qrels-slash-dev__tsv": "", "qrels-slash-train__tsv": many}))
    trained = {pair.id.partition("/")[0] for pair in found.load_split("train")}
    validated = set(found.load_split("validation").queries)
    assert len(trained) == 38 and len(validated) == 2 and not trained & validated
    found = find_dataset(
        beir(
            tmp_path / "b",
            **{name: "" for name in ("qrels-slash-dev__tsv", "qrels-slash-train__tsv")},
            **{"qrels-slash-test__tsv": many},
        )
    )
    halves = [set(found.load_split(split).queries) for split in ("validation", "test")]
    assert [len(half) for half in halves] == [20, 20] and not halves[0] & halves[1]
    with pytest.raises(InputError, match=r"no train split, expected train\.tsv; or train on another"):
        found.load_split("train")


def test_texts_that_nothing_judges_are_not_looked_at(tmp_path):
    good = find_dataset(beir(tmp_path / "good"))
    odd = [{"_id": "d9", "text": 5}] + [
        {"_id": f"d{n}", "title": "T" if n == 1 else "", "text": "" if n == 4 else f"text {n}"} for n in range(6)
    ]
    found = find_dataset(beir(tmp_path / "odd", corpus__jsonl__gz=odd))
    assert all(found.load_split(split) == good.load_split(split) for split in ("train", "validation", "test"))
    with pytest.raises(InputError, match=r"corpus.jsonl.gz:1: key `text`: found 5"):
        find_dataset(str(tmp_path / "odd"), whole_corpus=True).load_split("test")


def test_a_split_of_one_is_too_small_to_share(tmp_path):
    one = "q1\td1\t1\n"
    lacking = {"qrels-slash-dev__tsv": "", "qrels-slash-train__tsv": one}
    with pytest.raises(InputError, match=r"train.tsv: found 1, too few queries .* expected 2 at least or .* qrels/dev.tsv"):
        find_dataset(beir(tmp_path / "a", **lacking)).load_split("train")
    with pytest.raises(InputError, match=r"test.tsv: found 1, too few queries"):
        find_dataset(beir(tmp_path / "b", **lacking | {"qrels-slash-train__tsv": ""})).load_split("test")
    folder = write(tmp_path / "c", train__jsonl=[GOOD], test__jsonl=[GOOD])
    with pytest.raises(
        InputError, match=r"train.jsonl: found 1, too few examples .* expected 2 at least or a file validation.\*"
    ):
        find_dataset(folder).load_split("train")


def test_models_can_be_trained_on_other_pairs(tmp_path):
    evaluated, other = (
        beir(tmp_path / "b"),
        beir(tmp_path / "other", **{"qrels-slash-train__tsv": "query-id\tcorpus-id\tscore\nq5\td5\t1\n"}),
    )
    found = find_dataset(evaluated, train_on=f"elsewhere={other}")
    assert (found.name, found.train_on) == ("b", "elsewhere")
    assert found.fingerprint == find_dataset(evaluated).fingerprint and found.train_fingerprint == find_dataset(other).fingerprint
    assert found.load_split("train") == [Pair("q5/d5", "Query: ask 5", "Document: text 5")]
    assert found.load_split("test") == find_dataset(evaluated).load_split("test")
    texts = write(tmp_path / "t", **three(SENTIMENT))
    assert find_dataset(texts, train_on=evaluated) == find_dataset(texts)  # in a grid of several tasks
    with pytest.raises(InputError, match=r"--train-on .*: t is SC, expected retrieval data"):
        find_dataset(evaluated, train_on=texts)


@pytest.mark.parametrize("count", [1, 19, 20, 872, 10007])
def test_the_validation_share_is_that_of_the_study(count):
    if count > 1:
        cut = datasets.Dataset.from_dict({"row": range(count)}).train_test_split(train_size=0.95, seed=42)
        train, validation = split_validation_rows(count)
        assert train.tolist() == cut["train"]["row"] and validation.tolist() == cut["test"]["row"]
    assert sorted(np.concatenate(split_validation_rows(count)).tolist()) == list(range(count))


@pytest.mark.parametrize("other", ["test", "valid"])
def test_a_missing_split_is_made_as_the_study_makes_it(tmp_path, capsys, other):
    rows = [{"id": f"{n}", "text": f"text {n}", "label": n % 2} for n in range(40)]
    last = [{"id": "last", "text": "last", "label": 0}]
    found = find_dataset(write(tmp_path / f"made_{other}", train__jsonl=rows, **{f"{other}__jsonl": last}))
    parts = [[example.id for example in found.load_split(split)] for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [38, 2, 1] and parts[2] == ["last"]
    assert sorted(parts[0] + parts[1], key=int) == [row["id"] for row in rows]
    [line] = capsys.readouterr().out.splitlines()  # said once, not for each split
    assert "5 % of train validate (seed 42)" in line and ("valid.jsonl is the test split" in line) == (other == "valid")


def test_a_file_alone_is_a_test_split(tmp_path):
    write(tmp_path, xquad__en__json=squad())
    found = find_dataset(str(tmp_path / "xquad.en.json"))
    assert found.name == "xquad.en" and len(found.load_split("test")) == 1
    with pytest.raises(InputError, match=r"xquad.en.json: no train split"):
        found.load_split("train")


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    first, second = (write(tmp_path / name, **three(SENTIMENT)) for name in ("a", "b"))
    changed = write(tmp_path / "c", **three([*SENTIMENT, {"id": "c", "text": "fine", "label": 1}]))
    relabelled = write(tmp_path / "d", **three(SENTIMENT), meta__json={"labels": ["negative", "positive"]})
    assert find_dataset(first).fingerprint == find_dataset(second).fingerprint
    assert len({find_dataset(folder).fingerprint for folder in (first, changed, relabelled)}) == 3


GOOD = {"id": "a", "text": "good", "label": "yes"}
BAD_ROWS = {
    "a broken line": ("{", r"train.jsonl:2: not JSON: .*; expected one object a line"),
    "no object": ("[1]", r"train.jsonl:2: found a list, expected a JSON object"),
    "no text": ('{"label": "no"}', r"train.jsonl:2: no key `text`; found `label`"),
    "no label": ('{"text": "x"}', r"train.jsonl:2: no key `label`; found `text`"),
    "text of another type": ('{"text": 3, "label": "no"}', r"train.jsonl:2: key `text`: found 3, expected text"),
    "a number with a point": ('{"text": "x", "label": 0.5}', r"train.jsonl:2: label 0.5: .* regression is not supported"),
    "a duplicate id": ('{"id": "a", "text": "x", "label": "no"}', r"train.jsonl:2: id 'a': found at .*train.jsonl:1 too"),
    "an odd label": ('{"text": "x", "label": [1]}', r"train.jsonl:2: label \[1\]: expected text or an integer"),
}


@pytest.mark.parametrize("row, message", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_of_texts(tmp_path, row, message):
    folder = write(tmp_path / "x", train__jsonl=json.dumps(GOOD) + "\n" + row, valid__jsonl=[GOOD], test__jsonl=[GOOD])
    with pytest.raises(InputError, match=message):
        find_dataset(folder).load_split("train")


@pytest.mark.parametrize("label, message", [
    (2, "label 2: outside the label set, expected 0 to 1"),
    (-2, "label -2: outside the label set, expected 0 to 1"),
    ("maybe", "label 'maybe': outside the label set, expected one of negative, positive"),
    ("7", "label '7': outside the label set, expected 0 to 1"),
])  # fmt: skip
def test_labels_outside_the_label_set(tmp_path, label, message):
    files = three(SENTIMENT) | {"test__jsonl": [{"text": "x", "label": label}]}
    found = find_dataset(write(tmp_path / "x", **files, meta__json={"labels": ["negative", "positive"]}))
    with pytest.raises(InputError, match=r"test.jsonl:1: " + message):
        found.load_split("test")
    assert len(found.load_split("train")) == 2


BAD_TAGS = {
    "lengths": ({"tokens": ["a", "b"], "tags": ["O"]}, r"test.jsonl:1: found 2 tokens and 1 tags"),
    "malformed": ({"tokens": ["a"], "tags": ["PER"]}, r"test.jsonl:1: tag 1: found 'PER', expected IOB2: O, B-TYPE or I-TYPE"),
    "unknown": ({"tokens": ["a"], "tags": ["B-LOC"]}, r"test.jsonl:1: label 'B-LOC': outside .* expected one of O, B-PER, I-PER"),
    "no list": ({"tokens": "a", "tags": ["O"]}, r"test.jsonl:1: key `tokens`: found \"a\", expected a list"),
    "a position": ({"tokens": ["a"], "tags": [1]}, r"test.jsonl:1: tag 1: found 1, expected IOB2.*meta.json that lists the tags"),
    "null": ({"tokens": ["a"], "tags": None}, r"test.jsonl:1: key `tags`: found null"),
    "a number": ({"tokens": [1], "tags": ["O"]}, r"test.jsonl:1: token 1: found 1, expected text"),
    "no tags": ({"tokens": ["a"]}, r"test.jsonl:1: no key `tags`; found `tokens`"),
}


@pytest.mark.parametrize("row, message", BAD_TAGS.values(), ids=BAD_TAGS)
def test_bad_rows_of_tags(tmp_path, row, message):
    found = find_dataset(write(tmp_path / "x", **three(TAGGED) | {"test__jsonl": [row]}))
    with pytest.raises(InputError, match=message):
        found.load_split("test")


@pytest.mark.parametrize("text, message", [
    ("Ada B-PER\nwrote BAD\nit O\nall O", r"train.conll:2: tag 'BAD': expected IOB2"),
    ("Ada B-PER\nwrote\n", r"train.conll:2: found 1 columns, expected the tag in column 2"),
    ("Ada\n", r"train.conll: found no line of a word and its tag"),
])  # fmt: skip
def test_bad_columns(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        find_dataset(write(tmp_path / "x", train__conll=text, test__conll=CONLL)).load_split("train")


def test_tags_that_begin_inside_are_counted_and_empty_sentences_left_out(tmp_path, capsys):
    rows = [{"tokens": ["a", "b", "c"], "tags": ["I-PER", "I-PER", "B-ORG"]}, {"tokens": [], "tags": []}]
    found = find_dataset(write(tmp_path / "x", **three(rows) | {"valid__jsonl__gz": rows}))
    assert [example.tags for example in found.load_split("validation")] == [(2, 2, 1)]
    said = capsys.readouterr().out
    assert "1 tags I- without a B-" in said and "1 sentences without a word are left out" in said
    with pytest.raises(InputError, match="x: the test split is empty"):
        found.load_split("test")


BAD_SQUAD = {
    "another place": (
        squad(start=3),
        r"train.json: question q: answer_start 3: found \" Ad\" in the context, .* the answer \"Ada\"",
    ),
    "before the start": (squad(start=-3), r"question q: answer_start -3: found \"\" in the context"),
    "no data": ({"questions": []}, r"found rows with questions, expected rows with text and label"),
    "cut short": ('{"data": [', r"train.json: not JSON: .*; expected SQuAD's layout"),
    "no paragraphs": ({"data": [{"title": "T"}]}, r"train.json: data\[0\]: no key `paragraphs`; found `title`"),
    "no answers": (
        {"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "q", "question": "q"}]}]}]},
        r"train.json: question q: no key `answers`",
    ),
    "no id": ({"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]}, r"paragraphs\[0\]: no key `id`"),
}


@pytest.mark.parametrize("content, message", BAD_SQUAD.values(), ids=BAD_SQUAD)
def test_bad_questions(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        find_dataset(write(tmp_path / "x", train__json=content, valid__json=squad(), test__json=squad())).load_split("train")


@pytest.mark.parametrize("name, content, message", [
    ("qrels-slash-dev__tsv", "q2\td9\t1", r"validation split: found none of the 1 relevant documents in corpus.jsonl.gz"),
    ("qrels-slash-train__tsv", "q2\td9\t1", r"train.tsv:1: document 'd9': not in corpus.jsonl.gz, expected the _id of a doc"),
    ("qrels-slash-dev__tsv", "q99\td1\t1", r"dev.tsv:1: query 'q99': not in queries.jsonl, expected the _id of a query"),
    ("qrels-slash-dev__tsv", "q2\td1\t1\nq2\td1\t2", r"dev.tsv:2: query 'q2' and document 'd1': judged twice"),
    ("qrels-slash-dev__tsv", "q2\t0\td1\t1", r"dev.tsv:1: found 'q2.*, expected query-id, corpus-id, score"),
    ("qrels-slash-dev__tsv", "q2\td1\thigh", r"dev.tsv:1: found"),
    ("qrels-slash-dev__tsv", "q2\td1\t--1", r"dev.tsv:1: found"),
    ("corpus__jsonl__gz", [{"_id": f"d{n}", "text": ""} for n in (0, 1, 2, 4, 4)], r"gz:5: _id 'd4': found at .*gz:4 too"),
    ("qrels-slash-dev__tsv", "q2\td1\t0", r"the validation split is empty"),
    ("queries__jsonl", [{"_id": "q2", "text": "a"}, {"_id": "q2", "text": "b"}], r"queries.jsonl:2: _id 'q2': found at .*:1 too"),
    ("queries__jsonl", [{"id": "q2", "text": "a"}], r"queries.jsonl:1: no key `_id`; found `id`, `text`"),
])  # fmt: skip
def test_bad_retrieval_data(tmp_path, name, content, message):
    found = find_dataset(beir(tmp_path / "b", **{name: content}))
    with pytest.raises(InputError, match=message):
        found.load_split("validation")


def test_judged_documents_that_are_not_in_the_corpus_are_counted(tmp_path, capsys):
    found = find_dataset(beir(tmp_path / "b", **{"qrels-slash-test__tsv": "q4\td4\t1\nq4\tgone\t2\nq5\tgone\t1\nq5\tlost\t0\n"}))
    examples = found.load_split("test")
    assert examples.relevant == {"q4": {"d4": 1, "gone": 2}, "q5": {"gone": 1}}
    assert set(examples.documents) == {"d1", "d2", "d4"}
    line = "b: test split: 1 of 2 relevant documents are not in corpus.jsonl.gz and count as misses\n"
    assert capsys.readouterr().out == line


def test_folders_that_hold_no_data_set(tmp_path):
    for name, files, message in [
        ("empty", {"README__md": "nothing"}, r"found no file of a known format, expected train\.\*"),
        (
            "twice",
            {"train__jsonl": SENTIMENT, "train__tsv": "x"},
            r"found train.jsonl, train.tsv for the train split, expected one",
        ),
        ("other", {"train__jsonl": [{"sentence": "x"}]}, r"found rows with sentence, expected rows with text and label"),
        ("blank", {"train__jsonl": ""}, r"train.jsonl: holds no example"),
        ("meta", three(SENTIMENT) | {"meta__json": {"labels": ["x", "x"]}}, r"meta.json: key `labels`: expected a list of names"),
        ("broken", three(SENTIMENT) | {"meta__json": "{"}, r"meta.json: not JSON"),
        ("words", three(TAGGED) | {"meta__json": {"tags": ["O", "NOUN"]}}, r"meta.json: key `tags`: found 'NOUN', expected IOB2"),
        ("inside", three(TAGGED) | {"meta__json": {"labels": ["B-PER", "I-PER"]}}, r"meta.json: key `tags`: found no O"),
        ("count", {"train__jsonl": [{"tokens": ["a"], "tags": 5}]}, r"train.jsonl:1: key `tags`: found 5, expected a list"),
        ("deep", {"train__json": "[" * 100_000}, r"train.json:?1?: not JSON: .*"),
        ("alone", {"train__jsonl": SENTIMENT}, r"alone: no test split, expected a file test\.\*"),
    ]:
        with pytest.raises(InputError, match=message):
            find_dataset(write(tmp_path / name, **files)).load_split("test")
    with pytest.raises(InputError, match=r"--task IR: .* holds no corpus.jsonl"):
        find_dataset(write(tmp_path / "x", **three(SENTIMENT)), task="IR")
    with pytest.raises(InputError, match=r"--task SC: .*b holds corpus.jsonl and queries.jsonl, expected --task IR"):
        find_dataset(beir(tmp_path / "b"), task="SC")


def test_a_task_can_be_told_where_rows_have_the_keys_of_two(tmp_path):
    rows = [row | {"text": "x", "label": "y"} for row in TAGGED]
    folder = write(tmp_path / "x", **three(rows))
    assert find_dataset(folder).family is TaskFamily.TC
    assert find_dataset(folder, task="SC").load_split("train") == [LabelledText("a", "x", 0)]


def line_of(size):
    """One that is that long, most of it a hole in the file."""

    def make(path):
        path.write_bytes(b'{"label": 1, "text": "')
        os.truncate(path, size)

    return make


def compressed(path):
    with gzip.open(path.with_suffix(".jsonl.gz"), "wb", 1) as stream:
        for _ in range(70):
            stream.write(b"a" * (1 << 20))


ROWS = "".join(json.dumps(row) + "\n" for row in SENTIMENT)
DIGITS = "9" * 5000
HOSTILE = {
    "FIFO": ("train.jsonl", os.mkfifo, "no train split"),
    "folder": ("train.jsonl", os.mkdir, "no train split"),
    "loop": ("train.jsonl", lambda path: path.symlink_to(path.name), "no train split"),
    "not UTF-8": ("train.jsonl", ROWS.encode() + b'{"text": "\xff"}', r"train.jsonl:3: not UTF-8 text"),
    "zeros": ("train.jsonl", bytes(100), r"train.jsonl:1: not JSON"),
    "deep": ("train.jsonl", ROWS + '{"a":' * 100_000, r"train.jsonl:3: not JSON: nested too deeply"),
    "a line without end": ("train.jsonl", line_of(10**9), r"train.jsonl:1: longer than 67,108,864 bytes"),
    "a compressed line without end": ("train.jsonl", compressed, r"train.jsonl.gz:1: longer than 67,108,864 bytes"),
    "a number without end": ("train.jsonl", f'{ROWS}{{"text": "x", "label": {DIGITS}}}', r"train.jsonl:3: not JSON"),
    "label beyond": ("test.jsonl", '{"text": "x", "label": 99}', r"test.jsonl:1: label 99: outside the label set"),
    "label below": ("test.jsonl", '{"text": "x", "label": -2}', r"test.jsonl:1: label -2: outside the label set"),
    "label in digits": ("test.jsonl", f'{{"text": "x", "label": "{DIGITS}"}}', r"test.jsonl:1: label '9+': outside"),
    "label is NaN": ("test.jsonl", '{"text": "x", "label": NaN}', r"test.jsonl:1: label nan: found a number with a point"),
    "meta is a FIFO": ("meta.json", os.mkfifo, r"meta.json: not a regular file"),
    "meta is deep": ("meta.json", "[" * 100_000, r"meta.json: not JSON .nested too deeply."),
    "meta is not UTF-8": ("meta.json", b"\xff", r"meta.json: not JSON .not UTF-8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_would_harm_their_reader_are_one_line(case, tmp_path):
    name, content, message = HOSTILE[case]
    folder = tmp_path / "data"
    write(folder, train__jsonl=SENTIMENT, valid__jsonl=SENTIMENT, test__jsonl=SENTIMENT)
    (folder / name).unlink(missing_ok=True)
    if callable(content):
        content(folder / name)
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        for split in ("train", "test"):
            find_dataset(str(folder)).load_split(split)


LARGE = {
    "columns": ("csv", f"text,label,{','.join(map(str, range(20_000)))}\nx,y{',1' * 20_000}\n"),
    "labels": ("jsonl", "".join(f'{{"text": "x", "label": "{number} y"}}\n' for number in range(40_000))),
    "digits": ("csv", f"text,label\nx,{'1' * 20_000}x\ny,0.5\n"),
    "words": ("txt", "word " * 20_000 + "O\n" + "a word O\n" * 10_000),
}


@pytest.mark.parametrize("form, content", LARGE.values(), ids=LARGE)
def test_large_files_take_no_quadratic_time(tmp_path, form, content):
    (tmp_path / f"test.{form}").write_text(content)
    start = time.perf_counter()
    with contextlib.suppress(InputError):
        find_dataset(str(tmp_path / f"test.{form}")).load_split("test")
    assert time.perf_counter() - start < 9


def test_a_value_nested_too_deeply_to_be_quoted_is_named_by_its_type():
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(InputError, match=r"^x:1: key `text`: found a deep list, expected text$"):
        formats.get_value({"text": value}, "text", "x:1", str)


def test_digits_without_end_are_a_name_like_any_other(tmp_path):
    rows = [{"text": "a", "label": DIGITS}, {"text": "b", "label": "1"}]
    assert find_dataset(write(tmp_path / "x", **three(rows))).labels == ("1", DIGITS)
    (tmp_path / "b").mkdir()
    beir(tmp_path / "b")
    (tmp_path / "b" / "qrels" / "test.tsv").write_text(f"q\td\t{DIGITS}\n")
    with pytest.raises(InputError, match=r"test.tsv:1: found 'q.*expected query-id, corpus-id, score"):
        find_dataset(str(tmp_path / "b")).load_split("test")


def test_half_a_surrogate_pair_is_a_label_like_any_other(tmp_path):
    folder = write(
        tmp_path / "x", train__jsonl='{"text": "a", "label": "\\ud800"}\n{"text": "b", "label": "c"}\n', test__jsonl=SENTIMENT
    )
    assert set(find_dataset(folder).labels) == {"c", "\ud800"}


@pytest.mark.parametrize("given", ["a/../b={}", "..={}", ".={}", "a\n={}", "a b={}", "\x1b[2J={}", "={}/..", "{}/."])
def test_no_name_leads_out_of_the_results(given, tmp_path):
    folder = tmp_path / "data"
    write(folder, **three(SENTIMENT))
    try:
        name = find_dataset(given.format(folder)).name
    except InputError:
        return
    assert name == "data" and "/" not in name
