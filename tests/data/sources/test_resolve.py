import gzip
import json
import os
import subprocess
import sys
import time
from itertools import chain

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_helpers import TEXTS, write_csv, write_jsonl

from megaenc.data.sources import arrow_tables, resolve, text_files
from megaenc.data.sources.resolve import DocumentRange, InputConfig, partition_inputs, read_blocks, read_texts, resolve_inputs
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.data.tokenizer.train_command import main as tokenizer_main
from megaenc.errors import InputError


def resolve_paths(*inputs, keys=("text",), **changes):
    return resolve_inputs(InputConfig(tuple(map(str, inputs)), **changes), keys)


def texts_of(*inputs, **changes):
    return list(read_texts(resolve_paths(*inputs, **changes), "text"))


def text_folder(folder, texts):
    """A file for each (path, text)."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def parquet(path, texts, row_group_size=2):
    pq.write_table(pa.table({"text": texts}), path, row_group_size=row_group_size)
    return path


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    names = ["b.txt", "a/z.txt", "a/b/c.txt", "a.md", "B.text", "a-1/x.txt", "10.txt", "9.txt"]
    text_folder(tmp_path, {name: name for name in names} | {".hidden.txt": "no", ".git/x.txt": "no", "a/.b/c.txt": "no"})
    assert texts_of(tmp_path) == sorted(names)


@pytest.mark.parametrize("name", ["A.JSONL", "A.CSV", "A.TSV", "A.TXT", "A.MD", "A.PARQUET", "a.csv.GZ", "A.JSONL.ZST", "a.Tsv"])
def test_suffixes_in_capitals_are_the_same(tmp_path, name):
    kind = name.split(".")[1].lower()
    if kind == "parquet":
        parquet(tmp_path / name, ["x", "y"])
    elif kind == "jsonl":
        write_jsonl(tmp_path / name, ["x", "y"])
    else:
        (tmp_path / name).write_text("text\nx\ny\n" if kind in ("csv", "tsv") else "x\ny")
    texts = ["x\ny"] if kind in ("txt", "md") else ["x", "y"]
    assert texts_of(tmp_path / name) == texts_of(tmp_path) == texts


def test_files_that_are_read_twice_are_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    os.link(path, tmp_path / "linked.jsonl")
    copy = write_jsonl(tmp_path / "copy.jsonl", ["x"])
    said = "--input: 1 files are read more than once: "
    assert resolve_paths(path, copy).messages == []
    assert resolve_paths(path, copy, path).messages == [f"{said}{path}"]
    assert resolve_paths(path, tmp_path / "linked.jsonl").messages == [f"{said}{tmp_path / 'linked.jsonl'}"]
    folder = text_folder(tmp_path / "folder", {"b.txt": "b"})
    assert resolve_paths(folder, folder / "b.txt").messages[-1] == f"{said}{folder / 'b.txt'}"


def test_linked_folders_are_read_once_and_loops_end(tmp_path):
    elsewhere = text_folder(tmp_path / "elsewhere", {"x.txt": "x", "deep/y.txt": "y"})
    folder = text_folder(tmp_path / "folder", {"b/b.txt": "b"})
    (folder / "c").symlink_to(elsewhere)
    (folder / "b" / "up").symlink_to(folder)
    (folder / "d").symlink_to(elsewhere / "deep")
    (folder / "nowhere.txt").symlink_to(tmp_path / "missing")
    assert texts_of(folder) == ["b", "x", "y"]
    assert resolve_paths(folder).messages[:2] == [
        f"{folder}: 1 left out, unknown kind of file: nowhere.txt",
        f"{folder}: 2 folders left out, read under another path: b/up, c/deep",
    ]


def test_many_folders_take_no_time_of_their_square(tmp_path, monkeypatch):
    entries = [f"{number:05}" for number in range(20_000)]
    monkeypatch.setattr(os, "walk", lambda folder, **options: iter([(str(folder), list(entries), ["a.txt"])]))
    monkeypatch.setattr(resolve, "_folder_identity", lambda folder: str(folder))
    monkeypatch.setattr(resolve, "_is_saved_dataset", lambda path: False)
    (tmp_path / "a.txt").write_text("x")
    started = time.process_time()
    assert len(resolve._find_files(tmp_path, [])) == 1
    assert time.process_time() - started < 1


def test_what_is_of_no_known_kind_is_left_out_and_said_in_one_line(tmp_path):
    text_folder(tmp_path, {name: "x" for name in ("a.xlsx", "b/c.png", "d", "e.tar.gz", "good.txt")})
    remarks = resolve_paths(tmp_path).messages
    assert remarks == [
        f"{tmp_path}: 4 left out, unknown kind of file: a.xlsx, b/c.png, d and 1 more",
        f"{tmp_path}: 1 text",
    ]
    assert texts_of(tmp_path) == ["x"]


def test_names_that_are_not_utf8_do_not_break_the_line(tmp_path):
    for name in (b"caf\xe9.png", b"caf\xe9.txt"):
        (tmp_path / os.fsdecode(name)).write_text("x")
    (remark, _) = resolve_paths(tmp_path).messages
    assert "caf\ufffd.png" in remark.encode().decode()
    assert texts_of(tmp_path) == ["x"]


def test_kinds_are_told_by_name_and_parquet_by_its_first_bytes(tmp_path):
    write_jsonl(tmp_path / "lines", TEXTS)
    parquet(tmp_path / "table", TEXTS)
    (tmp_path / "b.md").write_bytes(TEXTS[0].encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(TEXTS[1].encode()))
    assert texts_of(tmp_path / "lines", tmp_path / "table") == TEXTS * 2
    assert texts_of(tmp_path / "b.md", tmp_path / "c.txt.gz") == TEXTS[:2]


def test_what_a_document_is_in_text_files_can_be_chosen(tmp_path):
    text_folder(tmp_path, {"a.txt": "one\ntwo\n\nthree\n", "b.md": "four"})
    write_jsonl(tmp_path / "c.jsonl", ["kept\n\nwhole"])
    assert texts_of(tmp_path) == ["one\ntwo\n\nthree\n", "four", "kept\n\nwhole"]
    assert texts_of(tmp_path, sample_by="paragraph") == ["one\ntwo", "three", "four", "kept\n\nwhole"]
    assert texts_of(tmp_path, sample_by="line") == ["one", "two", "three", "four", "kept\n\nwhole"]


def test_saved_data_sets_are_found_in_folders_and_have_splits(tmp_path):
    parts = {"train": TEXTS[:3], "test": TEXTS[3:]}
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()})
    both.save_to_disk(tmp_path / "all" / "both")
    write_jsonl(tmp_path / "all" / "a.jsonl", TEXTS[:1])
    assert texts_of(tmp_path / "all" / "both") == TEXTS[:3]
    assert texts_of(tmp_path / "all" / "both", dataset_split="test") == TEXTS[3:]
    assert texts_of(tmp_path / "all") == [TEXTS[0], *TEXTS[:3]]
    with pytest.raises(InputError, match=r"no split `dev` \(--dataset-split\); found `train`, `test`"):
        resolve_paths(tmp_path / "all" / "both", dataset_split="dev")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "missing.jsonl: no such file or folder; expected JSONL, CSV, TSV, Parquet or text files, a folder"),
        ("empty.txt", "empty.txt: is empty; expected"),
        ("nothing", "nothing: holds nothing to read; expected"),
        ("pictures", "pictures: holds nothing to read but a.png; expected"),
        ("pipe", "pipe: not a file; expected"),
        ("bad.parquet", "bad.parquet: cannot be read as Parquet"),
        ("other.parquet", "other.parquet: no column `text`; found `body`, `n`; set --json-key"),
        ("other.csv", "other.csv: no column `text`; found `body`, `n`; set --json-key"),
        ("twice.tsv.gz", "twice.tsv.gz: found 2 columns `text`, expected one"),
        ("excel.csv", "excel.csv:1: looks like UTF-16 text, not UTF-8; expected UTF-8, or --encoding utf-16"),
        ("quote.csv", "quote.csv:1: not CSV: unexpected end of data; expected cells with commas, quotes or"),
        ("numbers.parquet", "numbers.parquet: column `text`: found int64, expected text"),
        ("twice.parquet", "twice.parquet: found 2 columns `text`, expected one"),
        ("n" * 300, "n: no such file or folder"),
        ("broken", "broken: cannot be read as a saved data set"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing" / ".git").mkdir(parents=True)
    text_folder(
        tmp_path, {"pictures/a.png": "x", "bad.parquet": "x", "broken/state.json": "{}", "broken/dataset_info.json": "{}"}
    )
    text_folder(tmp_path, {"other.csv": "body,n\nx,1\n", "quote.csv": '"text\nx\n'})
    (tmp_path / "twice.tsv.gz").write_bytes(gzip.compress(b"text\tid\ttext\n"))
    (tmp_path / "excel.csv").write_bytes("text\nx\n".encode("utf-16"))
    os.mkfifo(tmp_path / "pipe")
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(InputError) as error:
        resolve_paths(tmp_path / name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_empty_file_in_a_folder_is_no_mistake(tmp_path):
    text_folder(tmp_path, {"a.txt": "", "b.jsonl": "", "b.csv": "", "c.txt": "text"})
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
    for name in ("HuggingFaceFW/fineweb-edu", "imdb", "no-such-folder/corpus"):
        with pytest.raises(InputError, match="asked"):
            resolve_paths(name, dataset_config="sample-10BT")
    assert calls[0] == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", ("text",))
    for name in ("./imdb", "/imdb", "a/b/c", "corpus/missing", "missing.jsonl", "owner/missing.txt.gz", "a b"):
        with pytest.raises(InputError, match="no such file or folder"):
            resolve_paths(name)
    assert len(calls) == 3


def test_a_hub_that_does_not_answer_is_one_line(tmp_path):
    command = [sys.executable, "-m", "megaenc", "tokenizer", "--input", "HuggingFaceFW/fineweb-edu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [*command, "--dataset-config", "sample-10BT", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "error: HuggingFaceFW/fineweb-edu: neither an existing file or folder nor a data set on the Hugging Face Hub "
        "(config sample-10BT, split train): "
    )
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def everything(tmp_path):
    """One input of each kind, small."""
    folder = text_folder(tmp_path / "folder", {"a.txt": "first", "b.txt": "second " * 9, "c.txt": "third"})
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    write_jsonl(tmp_path / "packed", TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "packed").read_bytes()))
    parquet(tmp_path / "c.parquet", TEXTS)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=2)
    table = write_csv(tmp_path / "d.csv", TEXTS)
    return [tmp_path / "a.jsonl", folder, tmp_path / "b.jsonl.gz", table, tmp_path / "c.parquet", tmp_path / "saved"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_parts_are_the_whole_in_order(tmp_path, monkeypatch, count):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    inputs = resolve_paths(*everything(tmp_path))
    want = list(read_texts(inputs, "text"))
    assert len(want) == 28
    parts = partition_inputs(inputs, count)
    assert 1 <= len(parts) <= count and all(parts)
    pieces = []
    for part in parts:
        blocks = list(read_blocks(inputs, part))
        pieces.append([text for block in blocks for (text,) in block.parse(["text"], False).texts])
    assert all(pieces)
    assert list(chain(*pieces)) == want
    positions = [block.position for part in parts for block in read_blocks(inputs, part)]
    assert positions == sorted(positions) and positions[-1] == inputs.size == inputs.known_size


def test_parts_are_alike_in_bytes(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"{number:05}" for number in range(3000)])
    parquet(tmp_path / "b.parquet", [f"{number:050}" for number in range(3000)], row_group_size=100)
    inputs = resolve_paths(tmp_path / "a.jsonl", tmp_path / "b.parquet")
    ends = [list(read_blocks(inputs, part))[-1].position for part in partition_inputs(inputs, 4)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert max(sizes) < 1.1 * inputs.size / 4


def test_a_long_line_is_in_one_part(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["short", "long " * 1000, "short", "short"])
    parts = partition_inputs(resolve_paths(tmp_path / "a.jsonl"), 10)
    assert len(parts) < 4
    assert parts[0][0].start == 0


def test_the_tokenizer_learns_the_same_from_every_source(tmp_path, capsys):
    folder = text_folder(tmp_path / "folder", {})
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    inputs = [write_jsonl(tmp_path / "a.jsonl", TEXTS), parquet(tmp_path / "b.parquet", TEXTS), folder, tmp_path / "saved"]
    learnt = []
    for number, path in enumerate(inputs):
        output = tmp_path / f"tokenizer-{number}"
        tokenizer_main(["--input", str(path), "--vocab-size", "300", "--output", str(output)])
        learnt.append(load_tokenizer(output).backend_tokenizer.to_str())
    assert len(set(learnt)) == 1
    assert f"{folder}: 5 text" in capsys.readouterr().out


def test_a_file_that_changes_is_noticed(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.txt"]
    write_jsonl(paths[0], TEXTS)
    for path in paths[1:]:
        path.write_text("text")
    inputs = resolve_paths(*paths)
    before = list(inputs.file_stats())
    assert [name for name, _, _ in before] == [str(path) for path in paths]
    assert list(resolve_paths(*paths).file_stats()) == before
    inputs.check_unchanged()
    os.utime(paths[1], ns=(1, 1))
    after = list(resolve_paths(*paths).file_stats())
    assert after[0] == before[0] and after[1] != before[1]
    assert list(inputs.file_stats()) == before, "what was found is what is compared with"
    with pytest.raises(InputError, match=r"b\.txt: changed while it was read: found another modification time"):
        inputs.check_unchanged()
    # A part answers for what it is read from alone.
    inputs.check_unchanged([DocumentRange(0, 0, 10)])
    assert resolve_paths(paths[0]).origins == [{"path": "a.jsonl", "bytes": paths[0].stat().st_size}]
    paths[0].write_text("shorter")
    with pytest.raises(InputError, match=r"a\.jsonl: changed while it was read: found 7 bytes, expected [1-9]"):
        inputs.check_unchanged([DocumentRange(0, 0, 10)])
    paths[2].unlink()
    with pytest.raises(InputError, match=r"c\.txt: changed while it was read: No such file or directory; start again"):
        inputs.check_unchanged([DocumentRange(2, 0, 1)])


def test_a_part_of_a_folder_answers_for_its_own_files(tmp_path):
    text_folder(tmp_path, {"a.txt": "a", "b.txt": "b"})
    inputs = resolve_paths(tmp_path)
    (tmp_path / "b.txt").write_text("longer")
    inputs.check_unchanged([DocumentRange(0, 0, 1)])
    with pytest.raises(InputError, match=r"b\.txt: changed"):
        inputs.check_unchanged([DocumentRange(0, 1, 2)])


def test_a_saved_data_set_without_splits_has_none_to_choose(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"saved: has no splits, expected one named `test` \(--dataset-split\)"):
        resolve_paths(tmp_path / "saved", dataset_split="test")


ODD_TEXTS = ["Café, naïve\xa0Ångström", "one\x85two", "", "last"]


def write_encoded(folder, encoding):
    """The same texts as lines, paragraphs and rows in `encoding`, with CRLF."""
    header = '"id";"text"'
    contents = {
        "a.csv": [header, *(f'{number};"{text}"' for number, text in enumerate(ODD_TEXTS))],
        "a.tsv": ["id;text", *(f"{number};{text}" for number, text in enumerate(ODD_TEXTS))],
        "a.jsonl": [json.dumps({"text": text}, ensure_ascii=False) for text in ODD_TEXTS],
        "a.txt": [text for text in ODD_TEXTS if text],
    }
    for name, lines in contents.items():
        (folder / name).write_bytes("\r\n".join(lines).encode(encoding))
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))


@pytest.mark.parametrize("encoding", ["latin1", "cp1252", "utf-16", "utf-16le", "utf-16be", "utf-8", "UTF8", "utf-8-sig"])
def test_files_of_any_encoding_and_delimiter(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 3)  # inside of characters
    texts = [text.replace("\x85", "…") for text in ODD_TEXTS] if encoding == "cp1252" else ODD_TEXTS
    monkeypatch.setattr(sys.modules[__name__], "ODD_TEXTS", texts)
    write_encoded(tmp_path, encoding)
    for suffix in ("", ".gz"):
        assert texts_of(tmp_path / f"a.jsonl{suffix}", encoding=encoding) == texts
        for name in ("a.csv", "a.tsv"):
            assert texts_of(tmp_path / f"{name}{suffix}", encoding=encoding, delimiter=";") == texts
        lines = [text for text in texts if text]
        assert texts_of(tmp_path / f"a.txt{suffix}", encoding=encoding, sample_by="line") == lines
        assert texts_of(tmp_path / f"a.txt{suffix}", encoding=encoding) == ["\r\n".join(lines)]


@pytest.mark.parametrize(("encoding", "guess"), [
    ("latin1", "its --encoding, such as latin1"), ("cp1252", "its --encoding, such as cp1252"),
    ("utf-16", "--encoding utf-16"), ("utf-16le", "--encoding utf-16le"), ("utf-16be", "--encoding utf-16be"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_another_encoding_is_named(tmp_path, encoding, guess, name):
    path = tmp_path / name
    path.write_bytes(("text\n" + ("x … y" if encoding == "cp1252" else "x é y") + "\n").encode(encoding))
    for changes in ({}, {"sample_by": "line"})[: 1 + name.endswith("txt")]:
        with pytest.raises(InputError, match=rf"not UTF-8.*; expected UTF-8, or {guess}$"):
            texts_of(path, **changes)


def test_commands_read_an_encoding_and_a_delimiter(tmp_path):
    (tmp_path / "a.csv").write_bytes("id;text\n1;Café au lait\n".encode("cp1252"))
    write_jsonl(tmp_path / "a.jsonl", ["Café au lait"])
    tokenizer_main(["--input", f"{tmp_path}/a.csv", "--encoding", "cp1252", "--delimiter", ";", "--output", f"{tmp_path}/csv"])
    tokenizer_main(["--input", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/jsonl"])
    csv_tokenizer, jsonl_tokenizer = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("csv", "jsonl"))
    assert csv_tokenizer == jsonl_tokenizer


def test_encodings_and_delimiters_that_do_not_fit(tmp_path):
    lines = tmp_path / "a.jsonl"
    write_jsonl(lines, TEXTS)
    for encoding in ("klingon", "zip", "hex", "\0"):
        with pytest.raises(InputError, match=r"--encoding .*: unknown, expected the name of an encoding, such as utf-8"):
            resolve_paths(lines, encoding=encoding)
    with pytest.raises(InputError, match=r"a.jsonl: not ascii \(.*\); give the text's own --encoding"):
        lines.write_text('{"text": "é"}', encoding="utf-8")
        texts_of(lines, encoding="ascii")
    for delimiter in ("", "||", '"', "\n"):
        with pytest.raises(InputError, match=r"--delimiter .*: expected one character, such as ';'"):
            resolve_paths(lines, delimiter=delimiter)
    with pytest.raises(InputError, match="--delimiter ';': none of --input is a CSV or TSV file"):
        resolve_paths(lines, delimiter=";")
    with pytest.raises(InputError, match="--encoding utf-16: none of --input is a JSONL, CSV, TSV or text file"):
        resolve_paths(parquet(tmp_path / "a.parquet", TEXTS), encoding="UTF-16")


def test_a_byte_order_mark_is_no_document(tmp_path):
    for name, changes in (("a.txt", {"sample_by": "line"}), ("a.txt", {"sample_by": "paragraph"}), ("a.jsonl", {})):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf\n\n" + (b'{"text": "x"}' if "json" in name else b"x"))
        assert texts_of(tmp_path / name, **changes) == ["x"]
