import bz2
import gzip
import json
import lzma
import random

import pytest
from backports import zstd
from text_helpers import TEXTS, parse_blocks, write_jsonl

from megaenc.data.sources import text_files
from megaenc.data.sources.text_files import FileBlock, LineBlock, find_line_start, read_line_blocks
from megaenc.errors import InputError


def texts_of(path, *between, **options):
    return [text for (text,) in parse_blocks(read_line_blocks(str(path), *between, **options))[0]]


def skippable_frame(kind):
    """Return a Zstandard frame without content, like the sizes that pzstd writes."""
    return (0x184D2A50 + kind).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"any"


def test_plain_gzip_and_zstd_hold_the_same(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    first = data[:500]
    second = data[500:]
    files = {
        "plain": data,
        "two-members.gz": gzip.compress(first) + gzip.compress(second),
        "first-empty.gz": gzip.compress(b"") + gzip.compress(data),
        "padded.gz": gzip.compress(data) + bytes(512),
        "two-frames.zst": zstd.compress(first) + zstd.compress(second),
        "skippable.zst": skippable_frame(0)
        + zstd.compress(first)
        + skippable_frame(5)
        + zstd.compress(second),
        "known-by-content-not-by-name": zstd.compress(data),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert texts_of(tmp_path / name) == TEXTS, name
        assert [block.position for block in read_line_blocks(str(tmp_path / name))][-1] == len(
            content
        )


@pytest.mark.parametrize("size", [1, 1000])
def test_a_file_is_read_in_blocks_and_in_parts_of_whole_lines(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text_files, "LINES_BYTES", size)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    data = path.read_bytes()
    blocks = list(read_line_blocks(str(path), before=7))
    assert b"".join(block.data for block in blocks) == data
    assert [json.loads(block.data.split(b"\n")[0])["id"] for block in blocks] == [
        block.first_line - 1 for block in blocks
    ]
    assert blocks[-1].position == len(data) + 7
    starts = [find_line_start(str(path), offset) for offset in range(len(data) + 1)]
    assert sorted(set(starts)) == [
        0,
        *[offset + 1 for offset, byte in enumerate(data) if byte == ord("\n")],
    ]
    assert all(start >= offset for offset, start in enumerate(starts))
    for start in set(starts):
        assert texts_of(path, 0, start) + texts_of(path, start, len(data)) == TEXTS
    with path.open("a") as stream:
        stream.write("wrong\n")
    assert texts_of(path, 0, len(data)) == TEXTS  # what is added later is not read
    with pytest.raises(InputError, match=rf"a\.jsonl:{len(TEXTS) + 1}: not JSON"):
        texts_of(path, starts[len(data) // 2], len(data) + 6)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_text_file_in_paragraphs_and_in_lines(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text_files, "LINES_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(
        "\ufeffOne.\n Two\u2028still.\r\n\r\n\t\nThree.\n\n\n\n\ufeffFour.\x0c".encode()
    )
    assert texts_of(path, sample_by="paragraph") == [
        "One.\n Two\u2028still.",
        "Three.",
        "\ufeffFour.\x0c",
    ]
    assert texts_of(path, sample_by="line") == [
        "One.",
        " Two\u2028still.",
        "Three.",
        "\ufeffFour.\x0c",
    ]


@pytest.mark.parametrize("paragraphs", [True, False])
def test_text_that_is_not_utf8_is_named_or_counted(tmp_path, paragraphs):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"good\n\ncaf\xe9\n\ngood")
    (block,) = read_line_blocks(str(path), sample_by="paragraph" if paragraphs else "line")
    with pytest.raises(InputError, match=r"latin\.txt:3: not UTF-8 \(byte 0xe9 at position 4\)"):
        block.parse(["text"], False)
    assert parse_blocks([block], skip_bad=True) == ([("good",), ("good",)], 1)
    file_block = FileBlock((str(path),), 0)
    with pytest.raises(InputError, match=r"latin\.txt: not UTF-8 \(byte 0xe9 at position 10\)"):
        file_block.parse(["text"], False)
    assert file_block.parse(["text"], True).skipped == 1


def test_a_text_file_is_a_document_with_all_its_characters(tmp_path):
    texts = ["", "\r\n One\r\n\x00\x0c\n\n", "\n"]
    paths = [tmp_path / name for name in ("a.txt", "b.txt.gz", "c.txt.zst")]
    for path, text, pack in zip(paths, texts, (bytes, gzip.compress, zstd.compress), strict=True):
        path.write_bytes(pack(text.encode()))
    actual = FileBlock(tuple(map(str, paths)), 0).parse(["text", "other"], False)
    assert actual.texts == [(text, text) for text in texts]


TWO_KEYS_THAT_ARE_NOT_ASKED_FOR = (
    b'{"id": 1, "id": 2, "meta": {"text": 1, "text": 2}, "kind": "text", "text": "good"}'
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "found a JSON list, expected an object with the key `text`"),
        (b'{"body": "x"}', "no key `text`; found `body`; set --json-key"),
        (b'{"text": 3}', "key `text`: found 3, expected text"),
        (b'{"text": "a", "text": "b"}', "found 2 keys `text`, expected one"),
        (b'{"text": "a", "id": 1, "text" :"b"}', "found 2 keys `text`, expected one"),
    ],
)
def test_a_bad_line_is_named_or_counted(line, message):
    block = LineBlock(
        "corpus.jsonl",
        0,
        11,
        TWO_KEYS_THAT_ARE_NOT_ASKED_FOR + b"\n\n" + line + b'\n{"text": "good too"}\n',
        0,
    )
    with pytest.raises(InputError) as error:
        block.parse(["text"], False)
    assert str(error.value).startswith("corpus.jsonl:13: ") and message in str(error.value)
    assert parse_blocks([block], skip_bad=True) == ([("good",), ("good too",)], 1)


def test_damaged_compression_is_one_line(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "a.jsonl", TEXTS * 50).read_bytes()
    for name, content in [("a.gz", gzip.compress(data)), ("a.zst", zstd.compress(data))]:
        (tmp_path / name).write_bytes(content[:-20])
        with pytest.raises(
            InputError, match=r"broken compressed data: .*; expected a complete file"
        ):
            texts_of(tmp_path / name)
        with pytest.raises(InputError, match="broken compressed data"):
            FileBlock((str(tmp_path / name),), 0).parse(["text"], False)
    monkeypatch.setattr(text_files, "LINES_BYTES", 1000)
    with pytest.raises(InputError, match=r"broken compressed data after line [1-9]\d*: "):
        texts_of(tmp_path / "a.gz")


def test_what_is_no_utf8_is_called_by_its_name(tmp_path):
    path = tmp_path / "a.jsonl"
    for pack, kind in ((lzma.compress, "xz"), (bz2.compress, "bzip2")):
        path.write_bytes(pack(b"text"))
        words = (
            f"looks like {kind}-compressed data; "
            "expected UTF-8, as it is or compressed with gzip or Zst"
        )
        with pytest.raises(InputError, match=words):
            texts_of(path)
        with pytest.raises(InputError, match=words):
            FileBlock((str(path),), 0).parse(["text"], False)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            b'{"text": "a"}\n{"text": "b',
            b'{"text": "a"}\n{"text": "b and c"}\n{"text": "d"}\n',
            "a line that continues after byte 25",
        ),
        (b'{"text": "a"}', b'{"text": "a"}\n' * 200_000, "a line that continues after byte 13"),
        (b'{"text": "a"}\n' * 9, b'{"text": "a"}\n' * 8, "the end of the file before byte 126"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, before, after, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(after)
    with pytest.raises(
        InputError, match=rf"a\.jsonl: changed while it was read: found {message}; start again"
    ):
        texts_of(path, 0, len(before))


WELL_FORMED = [
    b'{"id":"a/b","n":-1.5e3,"k":[1,2,{"x":null}],'
    b'"text":"hello \\u00e9 \\ud83d\\ude00 \\n w\xc3\xb6rld","t":true}',
    b'{"text":"x","text":"y","f":NaN,"g":-Infinity,"h":0.0,"i":12345678901234567890123}',
    b' {"a" : {"text":1} , "text" : "q" }\r',
]
MISHAPS = rb"""" \ { } [ ] , : - 01 null NaN \ud800 1e400 1. .5 /**/ "text":"z",""".split()
MISHAPS += [
    b"\xff",
    b"\xed\xa0\x80",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\x1f",
    b"\x0b",
    b"9" * 5000,
    b"[" * 1100,
]


def test_the_quick_parser_takes_nothing_that_the_other_does_not():
    draw = random.Random(0)
    both = 0
    for _ in range(10_000):
        line = bytearray(draw.choice(WELL_FORMED))
        for _ in range(draw.randint(0, 2)):
            offset = draw.randrange(len(line) + 1)
            line[offset : offset + draw.choice([0, 0, 1, 3])] = draw.choice([*MISHAPS, b""])
        quick = text_files._parse_json_fast(bytes(line), ["text"])
        if quick is not None:
            assert text_files._parse_json(bytes(line), ["text"]) == quick, line
            both += 1
    assert both > 1500


def test_what_only_the_slow_parser_takes_is_read_too(tmp_path):
    path = tmp_path / "a.jsonl"
    for line in (
        '{"a": "\\ud800", "text": "x"}',
        '\ufeff{"text": "x"}',
        '{"text": "x", "n": NaN}',
        ' {"text": "x"} \r',
    ):
        path.write_text(f"{line}\n\r\n   \n{line}", encoding="utf-8", newline="")
        assert texts_of(path) == ["x", "x"]
