import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from text_helpers import TEXTS, contents, corpus_settings, write_jsonl

from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.preprocess.command import preprocess
from megaenc.data.preprocess.work_directory import WorkDirectory
from megaenc.data.sources import resolve
from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.errors import InputError


@pytest.fixture
def settings(tmp_path, tokenizer_directory):
    """Return the settings for forty documents in four parts."""
    corpus = write_jsonl(
        tmp_path / "corpus.jsonl", [f"{number} {text}" for number in range(8) for text in TEXTS]
    )
    return corpus_settings(corpus, tokenizer_directory, partitions=4)


def record_ranges(monkeypatch):
    """Record the document ranges that are read, one list a part."""
    ranges = []
    real = resolve.read_blocks

    def read_blocks(inputs, document_ranges):
        ranges.append(document_ranges)
        return real(inputs, document_ranges)

    monkeypatch.setattr(resolve, "read_blocks", read_blocks)
    return ranges


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# A preprocessing command that sends itself a signal at the third part's second block, or before it
# renames a file.
KILLED = """
import os, signal, sys
# A background job inherits that the signal is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from megaenc.data.preprocess import command as preprocess
from megaenc.data.sources import resolve, text_files
text_files.BLOCK_BYTES = text_files.LINES_BYTES = 300
signal_number, place = int(sys.argv.pop()), sys.argv.pop()
parts = []
def read_blocks(inputs, document_ranges, real=resolve.read_blocks):
    parts.append(document_ranges)
    for at, block in enumerate(real(inputs, document_ranges)):
        if place == "block" and len(parts) == 3 and at == 1:
            os.kill(os.getpid(), signal_number)
        yield block
resolve.read_blocks = read_blocks
def rename(source, target, real=os.replace):
    if str(target).endswith("out_text_document." + place):
        os.kill(os.getpid(), signal_number)
    real(source, target)
os.replace = rename
preprocess.main(sys.argv[1:])
"""


def run_killed(settings, place, number):
    """Run the command until it sends itself a signal; return the process's result."""
    words = [
        "--input",
        *settings.input,
        "--output-prefix",
        settings.output_prefix,
        "--tokenizer",
        settings.tokenizer,
    ]
    words += ["--append-eod", "--workers", "2", "--partitions", "4", place, str(int(number))]
    return subprocess.run(
        [sys.executable, "-c", KILLED, *words], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_after_a_kill_the_same_command_makes_the_missing_parts(
    tmp_path, settings, expected_contents, monkeypatch, capsys, number, code
):
    ended = run_killed(settings, "block", number)
    assert ended.returncode == code, ended.stderr
    # The workers go without a word.
    assert ended.stderr == ("stopped\n" if number == signal.SIGINT else "")
    assert ("2 of 4 partitions are done; run the same command to resume" in ended.stdout) == (
        number == signal.SIGINT
    )
    directory = tmp_path / "out_parts"
    assert [name for name in names(directory) if name.endswith(".json")] == [
        "part-00001.json",
        "part-00002.json",
        "plan.json",
    ]
    assert not any(name.startswith("out_text_document") for name in names(tmp_path))
    ranges = record_ranges(monkeypatch)
    (prefix,) = preprocess(settings)
    assert len(ranges) == 2
    assert "2 of 4 partitions exist; writing the others" in capsys.readouterr().out
    assert contents(prefix) == expected_contents
    assert read_corpus_metadata(prefix).documents == 40
    assert not directory.exists()


def interrupted(settings, monkeypatch, after):
    """Run, and stop after `after` parts as Ctrl-C does."""
    with monkeypatch.context() as patch:
        real = resolve.read_blocks
        count = []

        def read_blocks(inputs, document_ranges):
            count.append(document_ranges)
            if len(count) > after:
                raise KeyboardInterrupt
            return real(inputs, document_ranges)

        patch.setattr(resolve, "read_blocks", read_blocks)
        with pytest.raises(KeyboardInterrupt):
            preprocess(settings)


def test_parts_of_another_command_are_refused_by_field(tmp_path, settings, monkeypatch):
    interrupted(settings, monkeypatch, after=1)
    directory = tmp_path / "out_parts"
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path / "other")
    before = names(directory)
    changes = {
        "special_tokens": {"append_eod": False},
        "partitions": {"partitions": 3},
        "encoding": {"encoding": "latin1"},
        "sentences": {"split_sentences": True},
        "tokenizer": {"tokenizer": str(tmp_path / "other")},
        "files": {},
    }
    for field, change in changes.items():
        if field == "files":
            write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
        with pytest.raises(
            InputError,
            match=rf"plan\.json: field `{field}`: found .*, expected .*; give the first command",
        ):
            preprocess(dataclasses.replace(settings, **change))
        assert names(directory) == before


def test_a_stop_before_the_first_part_leaves_nothing(tmp_path, settings, monkeypatch):
    interrupted(settings, monkeypatch, after=0)
    assert names(tmp_path) == ["corpus.jsonl"]


def test_a_bad_line_leaves_the_parts_before_it_and_is_named_by_its_number(
    tmp_path, settings, capsys
):
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join([*lines[:38], "wrong", *lines[39:]]))
    with pytest.raises(InputError, match=r"corpus\.jsonl:39: not JSON"):
        preprocess(settings)
    assert "3 of 4 partitions are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"thesis.tex": "years"}, "holds `thesis.tex`, expected only partitions of a corpus"),
        ({"part-00001-text.bin": "years"}, "holds no plan.json of a corpus"),
        (
            {"plan.json": '{"steps": 3}', "merged": "{}"},
            "plan.json: field `input`: found null, expected",
        ),
    ],
)
def test_a_directory_of_somebody_else_is_left_alone(tmp_path, settings, files, message):
    (tmp_path / "out_parts").mkdir()
    for name, content in files.items():
        (tmp_path / "out_parts" / name).write_text(content)
    with pytest.raises(InputError) as error:
        preprocess(settings)
    assert re.search(rf"out_parts[:/] ?{message}", str(error.value))
    assert {
        name: (tmp_path / "out_parts" / name).read_text() for name in names(tmp_path / "out_parts")
    } == files


NOTES = ["", "{", "[]", "null", '{"bytes": 3}', "[" * 100_000, "\udcff", None]
"""What may stand in the place of a part's note; None: a FIFO."""


def write_damage(path, text):
    path.unlink(missing_ok=True)
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text, errors="surrogateescape")


def test_a_part_that_is_cut_or_has_a_damaged_note_is_missing(tmp_path):
    parts = WorkDirectory(tmp_path, {"input": "a"}, ["text"], "uint16", 1)
    parts.open()
    ones = np.array([1], np.int32)
    with parts.new_partition(0) as partition:
        partition.writers[0].add_documents(ones.astype(np.uint16), ones, ones)
        partition.counts = {"documents": 1}
    assert parts.missing_partitions() == []
    path = tmp_path / "part-00001.json"
    note = path.read_text()
    values = (3, [], ["x"], [{}], {"a": "b"}, [{"bin": 3, "idx": None}], None)
    changed = [
        json.dumps(json.loads(note) | {name: value})
        for name in json.loads(note)
        for value in values
    ]
    for damaged in (*NOTES, *changed):
        write_damage(path, damaged)
        assert parts.missing_partitions() == [0], damaged
    write_damage(path, note)
    assert parts.missing_partitions() == []
    os.truncate(tmp_path / "part-00001-text.bin", 1)
    assert parts.missing_partitions() == [0]


def test_a_damaged_plan_is_one_line(tmp_path):
    (tmp_path / "part-00001.json").touch()
    store = WorkDirectory(tmp_path, {"keys": ["text"]}, ["text"], "uint16", 1)
    for plan in NOTES:
        write_damage(tmp_path / "plan.json", plan)
        with pytest.raises(InputError, match=r"plan\.json: .*expected .* remove /"):
            store.open()
    write_damage(tmp_path / "plan.json", '{"keys": ["text"]}')
    store.open()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_part_that_was_changed_is_not_taken(
    tmp_path, settings, expected_contents, monkeypatch, suffix
):
    interrupted(settings, monkeypatch, after=3)
    path = tmp_path / "out_parts" / f"part-00001-text.{suffix}"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        InputError,
        match=rf"part-00001-text\.{suffix}: sha256 is .* remove .*part-00001\.json and run",
    ):
        preprocess(settings)
    assert not (tmp_path / "out_text_document.json").exists()
    (tmp_path / "out_parts" / "part-00001.json").unlink()
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents


@pytest.mark.parametrize(
    ("last", "renamed"),
    [pytest.param("json", ["bin"], marks=pytest.mark.slow), ("idx", ["bin", "json"])],
)
def test_a_kill_between_the_renames_is_made_good(
    tmp_path, settings, expected_contents, last, renamed
):
    assert run_killed(settings, last, signal.SIGKILL).returncode == -9
    leftovers = [name for name in names(tmp_path) if name.startswith("out_text_document")]
    assert leftovers == [f"out_text_document.{suffix}" for suffix in renamed]
    # Somebody else's file in the place of a half-renamed one is not theirs to overwrite.
    ours = (tmp_path / "out_text_document.bin").read_bytes()
    (tmp_path / "out_text_document.bin").write_bytes(ours[::-1])
    with pytest.raises(InputError, match=r"out_text_document\.bin: exists already"):
        preprocess(settings)
    (tmp_path / "out_text_document.bin").write_bytes(ours)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents and not (tmp_path / "out_parts").exists()


def test_fewer_parts_where_the_input_has_no_more_places(tmp_path, settings, capsys):
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS[:2])
    (prefix,) = preprocess(dataclasses.replace(settings, partitions=50))
    assert (
        "--partitions 50: the input can be split into at most 2 partitions"
        in capsys.readouterr().out
    )
    assert read_corpus_metadata(prefix).documents == 2


def test_parts_may_be_on_another_disk(tmp_path, settings, expected_contents):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out_parts").symlink_to(tmp_path / "disk")
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents
    assert not (tmp_path / "disk").exists()
