import gzip
import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_helpers import (
    TEXTS,
    every_source,
    parse_blocks,
    text_directory,
    write_jsonl,
    write_parquet,
)

from megaenc.data.sources import arrow_tables, text_files
from megaenc.data.sources.resolve import (
    DocumentRange,
    InputConfig,
    partition_inputs,
    read_blocks,
    read_texts,
    resolve_inputs,
)
from megaenc.data.tokenizer.train_command import main as tokenizer_main
from megaenc.errors import InputError


def resolve_paths(*inputs, keys=("text",), **changes):
    return resolve_inputs(InputConfig(tuple(map(str, inputs)), **changes), keys)


def texts_of(*inputs, **changes):
    return list(read_texts(resolve_paths(*inputs, **changes), "text"))


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path):
    names = ["b.txt", "a/z.txt", "a/b/c.txt", "a.md", "B.text", "a-1/x.txt", "10.txt", "9.txt"]
    text_directory(
        tmp_path,
        {name: name for name in names}
        | {".hidden.txt": "no", ".git/x.txt": "no", "a/.b/c.txt": "no"},
    )
    assert texts_of(tmp_path) == sorted(names)


def test_suffixes_in_capitals_are_the_same(tmp_path):
    contents = {
        "A.JSONL": '{"text": "x"}',
        "b.Csv.GZ": "text\nx\n",
        "C.TSV": "text\nx\n",
        "D.MD": "x",
    }
    text_directory(tmp_path, contents)
    for name in contents:
        assert texts_of(tmp_path / name) == ["x"], name
    assert texts_of(tmp_path) == ["x"] * 4


def test_files_that_are_read_twice_are_named(tmp_path):
    directory = text_directory(tmp_path / "directory", {"b.txt": "b"})
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    copy = write_jsonl(tmp_path / "copy.jsonl", ["x"])
    linked = tmp_path / "linked.jsonl"
    os.link(path, linked)
    said = "--input: 1 files are read more than once: "
    assert resolve_paths(path, copy).messages == []
    assert resolve_paths(path, copy, linked).messages == [f"{said}{linked}"]
    assert (
        resolve_paths(directory, directory / "b.txt").messages[-1] == f"{said}{directory / 'b.txt'}"
    )


def test_linked_directories_are_read_once_and_loops_end(tmp_path):
    elsewhere = text_directory(tmp_path / "elsewhere", {"x.txt": "x", "deep/y.txt": "y"})
    directory = text_directory(tmp_path / "directory", {"b/b.txt": "b"})
    (directory / "c").symlink_to(elsewhere)
    (directory / "b" / "up").symlink_to(directory)
    (directory / "d").symlink_to(elsewhere / "deep")
    (directory / "nowhere.txt").symlink_to(tmp_path / "missing")
    assert texts_of(directory) == ["b", "x", "y"]
    assert resolve_paths(directory).messages[:2] == [
        f"{directory}: 1 left out, unknown kind of file: nowhere.txt",
        f"{directory}: 2 directories left out, read under another path: b/up, c/deep",
    ]


def test_what_is_of_no_known_kind_is_left_out_and_said_in_one_line(tmp_path):
    not_utf8 = os.fsdecode(b"caf\xe9.png")
    text_directory(
        tmp_path, {name: "x" for name in ("a.xlsx", "b/c.png", not_utf8, "e.tar.gz", "good.txt")}
    )
    remarks = resolve_paths(tmp_path).messages
    assert remarks == [
        f"{tmp_path}: 4 left out, unknown kind of file: a.xlsx, b/c.png, caf\ufffd.png and 1 more",
        f"{tmp_path}: 1 text",
    ]
    assert texts_of(tmp_path) == ["x"]


def test_what_a_document_is_in_text_files_can_be_chosen(tmp_path):
    text_directory(tmp_path, {"a.txt": "one\ntwo\n\nthree\n", "b.md": "four"})
    write_jsonl(tmp_path / "c.jsonl", ["kept\n\nwhole"])
    assert texts_of(tmp_path) == ["one\ntwo\n\nthree\n", "four", "kept\n\nwhole"]
    assert texts_of(tmp_path, sample_by="paragraph") == [
        "one\ntwo",
        "three",
        "four",
        "kept\n\nwhole",
    ]
    assert texts_of(tmp_path, sample_by="line") == ["one", "two", "three", "four", "kept\n\nwhole"]


def test_saved_data_sets_are_found_in_directories_and_have_splits(tmp_path):
    parts = {"train": TEXTS[:3], "test": TEXTS[3:]}
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    )
    both.save_to_disk(tmp_path / "all" / "both")
    write_jsonl(tmp_path / "all" / "a.jsonl", TEXTS[:1])
    assert texts_of(tmp_path / "all" / "both") == TEXTS[:3]
    assert texts_of(tmp_path / "all" / "both", dataset_split="test") == TEXTS[3:]
    assert texts_of(tmp_path / "all") == [TEXTS[0], *TEXTS[:3]]
    with pytest.raises(
        InputError, match=r"no split `dev` \(--dataset-split\); found `train`, `test`"
    ):
        resolve_paths(tmp_path / "all" / "both", dataset_split="dev")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        InputError, match=r"saved: has no splits, expected one named `test` \(--dataset-split\)"
    ):
        resolve_paths(tmp_path / "saved", dataset_split="test")


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "nothing" / ".git").mkdir(parents=True)
    contents = {
        "empty.txt": "",
        "pictures/a.png": "x",
        "bad.parquet": "x",
        "other.csv": "body,n\nx,1\n",
    }
    text_directory(
        tmp_path, contents | {"broken/state.json": "{}", "broken/dataset_info.json": "{}"}
    )
    (tmp_path / "twice.tsv.gz").write_bytes(gzip.compress(b"text\tid\ttext\n"))
    os.mkfifo(tmp_path / "pipe")
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    messages = {
        "missing.jsonl": "no such file or directory; "
        "expected JSONL, CSV, TSV, Parquet or text files, a directory",
        "empty.txt": "is empty; expected",
        "nothing": "holds nothing to read; expected",
        "pictures": "holds nothing to read but a.png; expected",
        "pipe": "not a file; expected",
        "bad.parquet": "cannot be read as Parquet",
        "other.parquet": "no column `text`; found `body`, `n`; set --json-key",
        "other.csv": "no column `text`; found `body`, `n`; set --json-key",
        "twice.tsv.gz": "found 2 columns `text`, expected one",
        "twice.parquet": "found 2 columns `text`, expected one",
        "numbers.parquet": "column `text`: found int64, expected text",
        "n" * 300: "no such file or directory",
        "broken": "cannot be read as a saved data set",
    }
    for name, message in messages.items():
        with pytest.raises(InputError) as error:
            resolve_paths(tmp_path / name)
        assert f"{name}:" in str(error.value) and message in str(error.value)
        assert "\n" not in str(error.value)


def test_an_empty_file_in_a_directory_is_no_mistake(tmp_path):
    text_directory(tmp_path, {"a.txt": "", "b.jsonl": "", "b.csv": "", "c.txt": "text"})
    assert texts_of(tmp_path) == ["", "text"]
    (tmp_path / "c.txt").unlink()
    assert [len(part) for part in partition_inputs(resolve_paths(tmp_path), 3)] == [3]


def test_a_name_is_the_hubs_only_where_it_cannot_be_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    calls = []

    def load_stream(name, *rest):
        calls.append((name, *rest))
        raise InputError("asked")

    monkeypatch.setattr(arrow_tables, "HubDataset", load_stream)
    for name in ("HuggingFaceFW/fineweb-edu", "imdb", "no-such-directory/corpus"):
        with pytest.raises(InputError, match="asked"):
            resolve_paths(name, dataset_config="sample-10BT")
    assert calls[0] == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", ("text",))
    for name in (
        "./imdb",
        "/imdb",
        "a/b/c",
        "corpus/missing",
        "missing.jsonl",
        "owner/missing.txt.gz",
        "a b",
    ):
        with pytest.raises(InputError, match="no such file or directory"):
            resolve_paths(name)
    assert len(calls) == 3


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    def load_dataset(*names, **options):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError) as error:
        resolve_paths("HuggingFaceFW/fineweb-edu", dataset_config="sample-10BT")
    assert str(error.value).startswith(
        "HuggingFaceFW/fineweb-edu: neither an existing file or directory "
        "nor a data set on the Hugging Face Hub (config sample-10BT, split train): "
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_parts_are_the_whole_in_order(tmp_path, monkeypatch, count):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    paths, want = every_source(tmp_path)
    inputs = resolve_paths(*paths)
    parts = partition_inputs(inputs, count)
    assert 1 <= len(parts) <= count and (count > 3 or len(parts) == count)
    texts = []
    positions = [0]
    for part in parts:
        blocks = list(read_blocks(inputs, part))
        positions += [block.position for block in blocks]
        pieces = [text for (text,) in parse_blocks(blocks)[0]]
        assert pieces
        texts += pieces
    assert texts == want
    assert positions == sorted(positions) and positions[-1] == inputs.size == inputs.known_size


def test_a_file_that_changes_is_noticed(tmp_path):
    """Only changed files of the part's documents are errors."""
    directory = text_directory(tmp_path / "directory", {"a.txt": "a", "b.txt": "b", "c.txt": "c"})
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    inputs = resolve_paths(lines, directory)
    before = list(inputs.file_stats())
    inputs.check_unchanged()
    os.utime(directory / "b.txt", ns=(1, 1))
    assert list(inputs.file_stats()) == before, "what was found is what is compared with"
    inputs.check_unchanged([DocumentRange(0, 0, 10), DocumentRange(1, 0, 1)])
    lines.write_text("shorter")
    (directory / "c.txt").unlink()
    changes = {
        "b.txt: changed while it was read: found another modification time": DocumentRange(1, 1, 2),
        "a.jsonl: changed while it was read: found 7 bytes, expected ": DocumentRange(0, 0, 10),
        "c.txt: changed while it was read: No such file or directory; start again": DocumentRange(
            1, 2, 3
        ),
    }
    for message, part in changes.items():
        with pytest.raises(InputError, match=message):
            inputs.check_unchanged([part])
    with pytest.raises(InputError, match="changed while it was read"):
        inputs.check_unchanged()


def write_encoded(directory, texts, encoding):
    """Write the texts as lines, paragraphs and rows in `encoding`, with CRLF."""
    contents = {
        "a.csv": ['"id";"text"', *(f'{index};"{text}"' for index, text in enumerate(texts))],
        "a.tsv": ["id;text", *(f"{index};{text}" for index, text in enumerate(texts))],
        "a.jsonl": [json.dumps({"text": text}, ensure_ascii=False) for text in texts],
        "a.txt": [text for text in texts if text],
    }
    for name, lines in contents.items():
        (directory / name).write_bytes("\r\n".join(lines).encode(encoding))
        (directory / f"{name}.gz").write_bytes(gzip.compress((directory / name).read_bytes()))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16be", "utf-8-sig"])
def test_files_of_any_encoding_and_delimiter(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 3)  # inside of characters
    texts = ["Café, naïve\xa0Ångström", "one…two", "", "last"]
    write_encoded(tmp_path, texts, encoding)
    lines = [text for text in texts if text]
    for suffix in ("", ".gz"):
        assert texts_of(tmp_path / f"a.jsonl{suffix}", encoding=encoding) == texts
        for name in ("a.csv", "a.tsv"):
            assert texts_of(tmp_path / f"{name}{suffix}", encoding=encoding, delimiter=";") == texts
        assert texts_of(tmp_path / f"a.txt{suffix}", encoding=encoding, sample_by="line") == lines
        assert texts_of(tmp_path / f"a.txt{suffix}", encoding=encoding) == ["\r\n".join(lines)]


@pytest.mark.parametrize(
    ("encoding", "guess"),
    [
        ("cp1252", "its --encoding, such as cp1252"),
        ("utf-16", "--encoding utf-16"),
        ("utf-16be", "--encoding utf-16be"),
    ],
)
def test_another_encoding_is_named(tmp_path, encoding, guess):
    for name, changes in (("a.csv", {}), ("a.txt", {}), ("a.txt", {"sample_by": "line"})):
        (tmp_path / name).write_bytes("text\nx … y\n".encode(encoding))
        with pytest.raises(InputError, match=rf"not UTF-8.*; expected UTF-8, or {guess}$"):
            texts_of(tmp_path / name, **changes)


def test_commands_read_an_encoding_and_a_delimiter(tmp_path):
    (tmp_path / "a.csv").write_bytes("id;text\n1;Café au lait\n".encode("cp1252"))
    write_jsonl(tmp_path / "a.jsonl", ["Café au lait"])
    tokenizer_main(
        [
            "--input",
            f"{tmp_path}/a.csv",
            "--encoding",
            "cp1252",
            "--delimiter",
            ";",
            "--output",
            f"{tmp_path}/csv",
        ]
    )
    tokenizer_main(["--input", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/jsonl"])
    tokenizers = {(tmp_path / name / "tokenizer.json").read_bytes() for name in ("csv", "jsonl")}
    assert len(tokenizers) == 1


def test_encodings_and_delimiters_that_do_not_fit(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    table = write_parquet(tmp_path / "a.parquet", TEXTS)
    refusals = [
        (
            lines,
            {"encoding": "klingon"},
            "--encoding .*: unknown, expected the name of an encoding, such as utf-8",
        ),
        (lines, {"encoding": "zip"}, "--encoding .*: unknown"),
        (lines, {"delimiter": "||"}, "--delimiter .*: expected one character, such as ';'"),
        (lines, {"delimiter": '"'}, "--delimiter .*: expected one character"),
        (lines, {"delimiter": ";"}, "--delimiter ';': none of --input is a CSV or TSV file"),
        (
            table,
            {"encoding": "UTF-16"},
            "--encoding utf-16: none of --input is a JSONL, CSV, TSV or text file",
        ),
        (
            lines,
            {"encoding": "ascii"},
            r"a.jsonl: not ascii \(.*\); give the text's own --encoding",
        ),
    ]
    lines.write_text('{"text": "é"}', encoding="utf-8")
    for path, changes, message in refusals:
        with pytest.raises(InputError, match=message):
            texts_of(path, **changes)
