import gzip
import json

import pytest
import zstandard
from text_helpers import TEXTS, write_jsonl

from megaenc.data.readers import Block, input_bytes, parse_block, read_blocks, read_texts
from megaenc.errors import InputError


def texts_of(*paths):
    return list(read_texts(paths, "text"))


def test_plain_gzip_and_zstd_hold_the_same(tmp_path):
    plain = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    data = plain.read_bytes()
    half = len(data) // 2
    files = {
        "a.jsonl.gz": gzip.compress(data),
        "two-members.gz": gzip.compress(data[:half]) + gzip.compress(data[half:]),
        "a.jsonl.zst": zstandard.compress(data),
        "two-frames.zst": zstandard.compress(data[:half]) + zstandard.compress(data[half:]),
        "known-by-content-not-by-name": zstandard.compress(data),
    }
    assert texts_of(plain) == TEXTS
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert texts_of(tmp_path / name) == TEXTS, name
        assert [block.position for block in read_blocks([tmp_path / name])][-1] == len(content)
    assert texts_of(plain, tmp_path / "a.jsonl.gz") == TEXTS + TEXTS


@pytest.mark.parametrize("size", [1, 40, 1000])
def test_blocks_are_whole_lines_with_their_numbers(tmp_path, size):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    blocks = list(read_blocks([path, path], block_bytes=size))
    assert b"".join(block.data for block in blocks) == path.read_bytes() * 2
    for block in blocks:
        first = json.loads(block.data.split(b"\n")[0])
        assert first["id"] == block.first_line - 1
    assert blocks[-1].position == input_bytes([path, path])


def test_blank_lines_byte_order_mark_and_missing_last_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "two"}')
    assert texts_of(path) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"text", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "found a JSON list, expected an object with the key `text`"),
        (b'{"body": "x"}', "no key `text`; found `body`"),
        (b'{"text": 3}', "key `text`: found 3, expected text"),
        (b'{"text": null}', "key `text`: found null, expected text"),
    ],
)
def test_a_bad_line_is_named_or_counted(line, message):
    block = Block("corpus.jsonl", 11, b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n', 0)
    with pytest.raises(InputError) as error:
        parse_block(block, ["text"])
    assert str(error.value).startswith("corpus.jsonl:13: ") and message in str(error.value)
    documents = parse_block(block, ["text"], skip_bad_lines=True)
    assert documents.texts == [("good",), ("good too",)]
    assert documents.skipped == 1


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").touch()
    for path, message in [("missing", "no such file"), ("empty", "is empty"), (".", "not a file")]:
        with pytest.raises(InputError, match=message):
            input_bytes([tmp_path / path])
    data = write_jsonl(tmp_path / "a.jsonl", TEXTS * 50).read_bytes()
    for name, content in [("a.gz", gzip.compress(data)), ("a.zst", zstandard.compress(data))]:
        (tmp_path / name).write_bytes(content[:-20])
        with pytest.raises(InputError, match="broken compressed data"):
            texts_of(tmp_path / name)
