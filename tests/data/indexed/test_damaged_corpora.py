"""Damaged corpora are refused with one line and bounded memory by every command."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from corpus_helpers import damage, write_whole_corpus

from megaenc.data.indexed import verify
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.indexed_dataset import HEADER, MAGIC
from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.errors import InputError
from megaenc.estimate.length_model import build_length_model, read_vocab_size
from megaenc.objectives.inspection import inspect
from megaenc.training.config_groups import DataConfig

COUNT = 4
LENGTHS = HEADER.size
POINTERS = LENGTHS + 4 * COUNT
INDICES = LENGTHS + 12 * COUNT
NEGATIVE = "found sequences or documents of negative length"


def header(
    sequences: int = COUNT, indices: int = COUNT + 1, code: int = 8, version: int = 1
) -> bytes:
    return HEADER.pack(MAGIC, version, code, sequences, indices)


def pack(kind: str, *values: int) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


# The file, the first changed byte (None: all of it), the new bytes, the error of training, and that
# of `data verify` if it is longer.
INDEX = {
    "many sequences": (
        ".idx",
        0,
        header(sequences=1 << 62),
        "demo.idx: truncated: found 122 bytes",
        "",
    ),
    "a size that would wrap around": (
        ".idx",
        0,
        header((1 << 62) + COUNT, (1 << 61) + 5),
        "demo.idx: truncated",
        "",
    ),
    "no sequence": (".idx", 0, header(sequences=0), "demo.idx: too long for a text corpus", ""),
    "tokens without a sequence": (
        ".idx",
        None,
        header(0, 2) + bytes(16),
        "found no tokens, expected at least one document",
        "",
    ),
    "another kind of number": (".idx", 0, header(code=6), "demo.idx: found dtype code 6", ""),
    "another version": (".idx", 0, header(version=2), "version 2; expected", ""),
    "a negative length": (
        ".idx",
        LENGTHS,
        pack("i", -5),
        NEGATIVE,
        "sequence 0: found length -5, expected 0 or more",
    ),
    "a length beyond the .bin": (
        ".idx",
        LENGTHS,
        pack("i", (1 << 31) - 1),
        "demo.bin: truncated",
        "sequence 1: found pointer 8",
    ),
    "a pointer below zero": (
        ".idx",
        POINTERS,
        pack("q", -2),
        "do not lie end to end",
        "sequence 0: found pointer -2, expected 0",
    ),
    "a pointer beyond the .bin": (
        ".idx",
        POINTERS + 24,
        pack("q", 1 << 40),
        "do not lie end to end",
        "sequence 3: found pointer",
    ),
    "a document beyond the sequences": (
        ".idx",
        INDICES + 8,
        pack("q", 1 << 40),
        NEGATIVE,
        "document 2: found first sequence 2",
    ),
    "a document below zero": (
        ".idx",
        INDICES + 8,
        pack("q", -1),
        NEGATIVE,
        "document 1: found first sequence -1",
    ),
    "documents that wrap around": (
        ".idx",
        INDICES,
        pack("q", 0, (1 << 63) - 1, -2),
        NEGATIVE,
        "document 2: found first sequence",
    ),
    "no document at first": (
        ".idx",
        INDICES,
        pack("q", 1),
        NEGATIVE,
        "document 0: found first sequence 1, expected 0",
    ),
    "another last document": (
        ".idx",
        INDICES + 32,
        pack("q", 3),
        "do not end at its last",
        "the last document index is 3, expected 4",
    ),
    "a .idx of a part of its header": (
        ".idx",
        None,
        header()[:10],
        "truncated: found 10 bytes, expected a header of 34",
        "",
    ),
    "a .idx without its last byte": (
        ".idx",
        None,
        header() + bytes(87),
        "truncated: found 121 bytes, expected 122",
        "",
    ),
    "a .idx of zeros": (".idx", None, bytes(200), "demo.idx: found header", ""),
    "an empty .bin": (
        ".bin",
        None,
        b"",
        "demo.bin: found no tokens, expected at least one document with text",
        "",
    ),
    "a .bin of one byte": (
        ".bin",
        None,
        b"x",
        "demo.bin: truncated: found 1 bytes, expected 32",
        "",
    ),
}
MISSING = object()
SIDECAR = [
    (b"{", "not JSON"),
    (b"[]", "found a JSON list, expected an object"),
    ({"format": 2}, "field `format`: found 2, expected 1"),
    ({"tokens": MISSING}, "no field `tokens`"),
    ({"special_tokens": MISSING}, "no field `special_tokens`"),
    ({"tokenizer": {"name": "demo"}}, "no field `tokenizer.fingerprint`"),
    ({"tokenizer": {"name": 3}}, "field `tokenizer.name`: found 3, expected text"),
    ({"tokenizer": None}, "field `tokenizer`: found null, expected an object"),
    ({"sha256": {"bin": "0" * 64}}, "no field `sha256.idx`"),
    ({"vocab_size": 0}, "field `vocab_size`: found 0, expected 1 to 2147483648"),
    ({"vocab_size": 10**400}, "field `vocab_size`: found 1000"),
    ({"vocab_size": True}, "field `vocab_size`: found true, expected a whole number"),
    ({"eod": 100}, "field `eod`: found 100, expected 0 to 99 or null"),
    ({"eod": "0"}, 'field `eod`: found "0", expected a whole number or null'),
    ({"documents": float("nan")}, "field `documents`: found NaN, expected a whole number"),
    ({"documents": -1}, "field `documents`: found -1, expected 0 to"),
    ({"dtype": "a\nb"}, "field `dtype`: found"),
    ({"sources": "x"}, "field `sources`: found"),
    (
        {"special_tokens": {"mode": "eod", "before": [], "after": [10**6]}},
        "field `special_tokens`: found",
    ),
]
READERS = {
    "pretrain": lambda prefix: Corpus.open(prefix),
    "verify": lambda prefix: verify.verify_corpus(prefix),
    "estimate": lambda prefix: (
        build_length_model(build_data_config(prefix), ()),
        read_vocab_size(build_data_config(prefix)),
    ),
}


def build_data_config(prefix: Path) -> DataConfig:
    return DataConfig(data_path=(str(prefix),), seq_length=64)


def write_changed(prefix: Path, changes: bytes | dict) -> None:
    """Replace the bytes of the .json, or change some of its fields."""
    path = Path(f"{prefix}.json")
    if isinstance(changes, dict):
        values = json.loads(path.read_text()) | changes
        changes = json.dumps(
            {name: value for name, value in values.items() if value is not MISSING}
        ).encode()
    path.write_bytes(changes)


@pytest.fixture
def prefix(tmp_path):
    return Path(
        write_whole_corpus(tmp_path / "demo", [[10 + index] * 3 + [0] for index in range(COUNT)])
    )


def one_line(reader, prefix) -> str:
    """Return the error of a reader that must stay within a bound of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            READERS[reader](prefix)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("extension", "offset", "content", "trained", "verified"), INDEX.values(), ids=INDEX
)
def test_a_damaged_index_is_one_line(extension, offset, content, trained, verified, prefix):
    path = Path(f"{prefix}{extension}")
    if offset is None:
        path.write_bytes(b"")
    damage(path, offset or 0, content)
    assert trained in one_line("pretrain", prefix)
    assert trained in one_line("estimate", prefix)
    assert (verified or trained) in one_line("verify", prefix)


@pytest.mark.parametrize(
    "put", [os.mkdir, os.mkfifo, lambda path: None], ids=["directory", "FIFO", "nothing"]
)
def test_what_is_no_file_is_one_line(put, prefix):
    for extension in (".json", ".bin", ".idx"):
        path = Path(f"{prefix}{extension}")
        path.unlink()
        put(path)
        if extension == ".json" and not path.exists():
            with pytest.raises(
                InputError, match=r"demo\.json: no such file; expected a corpus made by"
            ):
                read_corpus_metadata(prefix)
        else:
            words = (
                "demo.json: cannot be read"
                if extension == ".json"
                else f"demo{extension}: no such file"
            )
            assert words in one_line("pretrain", prefix)
            assert words in one_line("verify", prefix)


@pytest.mark.parametrize(("changes", "words"), SIDECAR, ids=range(len(SIDECAR)))
def test_a_damaged_sidecar_is_one_line(changes, words, prefix):
    write_changed(prefix, changes)
    for reader in READERS:
        line = one_line(reader, prefix)
        assert "demo.json" in line and words in line


def test_a_sidecar_of_another_corpus_is_one_line(prefix):
    whole = Path(f"{prefix}.json").read_bytes()
    for field, value in {
        "documents": 5,
        "sequences": 5,
        "tokens": 17,
        "dtype": "int32",
        "bin_bytes": 34,
        "idx_bytes": 1,
    }.items():
        write_changed(prefix, {field: value})
        for reader in ("pretrain", "verify"):
            assert f"demo.json: field `{field}`: found {value}, expected" in one_line(
                reader, prefix
            )
        Path(f"{prefix}.json").write_bytes(whole)


@pytest.mark.parametrize("command", [verify.main, inspect.main])
def test_a_prefix_that_is_none_is_one_line(command, prefix, refusal):
    for name in ("x" * 300, "a**", "[", "a\nb", "demo.idx"):
        assert "no such file" in refusal(command, [prefix.parent / name])
    assert "found a file" in refusal(command, ["/proc/1/mem"])


def test_whole_corpora_are_read(prefix):
    """The refusals above are due to the damage, not to the reader."""
    assert len(Corpus.open(prefix)) == COUNT
    assert verify.verify_corpus(prefix).documents == COUNT
    assert "4 documents" in build_length_model(build_data_config(prefix), ()).source
    assert read_vocab_size(build_data_config(prefix)) == 100
