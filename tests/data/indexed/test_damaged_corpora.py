"""A corpus that no preprocessing wrote ends in one line, whichever command opens it, and takes no memory by what it claims."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from test_verify import write_whole_corpus

from megaenc.data.indexed import verify
from megaenc.data.indexed.corpus import Corpus, parse_split
from megaenc.data.indexed.indexed_dataset import HEADER, MAGIC
from megaenc.errors import InputError
from megaenc.estimate.length_model import build_length_model, read_vocab_size
from megaenc.objectives.inspection import inspect
from megaenc.training.config_groups import DataConfig

COUNT = 4
LENGTHS, POINTERS, INDICES = HEADER.size, HEADER.size + 4 * COUNT, HEADER.size + 12 * COUNT
BIG = (1 << 62, (1 << 63) - 1, (1 << 64) - 1)


def header(sequences: int = COUNT, indices: int = COUNT + 1, code: int = 8) -> bytes:
    return HEADER.pack(MAGIC, 1, code, sequences, indices)


def overwritten(offset: int, kind: str, *values: int):
    """Put numbers at a byte of the .idx."""

    def damage(prefix: Path) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        content[offset : offset + struct.calcsize(f"<{len(values)}{kind}")] = struct.pack(f"<{len(values)}{kind}", *values)
        Path(f"{prefix}.idx").write_bytes(content)

    return damage


def instead(extension: str, content: bytes):
    """Put other bytes in the place of a file."""
    return lambda prefix: Path(f"{prefix}{extension}").write_bytes(content)


def replaced(extension: str, put):
    """Put something else in the place of a file."""

    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{extension}")
        path.unlink()
        put(path)

    return damage


def sidecar(**changes):
    """Change fields of the .json; None leaves a field out."""

    def damage(prefix: Path) -> None:
        values = json.loads(Path(f"{prefix}.json").read_text()) | changes
        Path(f"{prefix}.json").write_text(json.dumps({name: value for name, value in values.items() if value != "LEFT OUT"}))

    return damage


INDEX = {
    # damage of .idx and .bin, which all commands must find
    **{f"{count:,} sequences": overwritten(0, "B", *header(sequences=count)) for count in BIG},
    **{f"{count:,} documents": overwritten(0, "B", *header(indices=count)) for count in BIG},
    **{f"{count:,} of both": overwritten(0, "B", *header(count, count)) for count in BIG},
    "no sequence": overwritten(0, "B", *header(sequences=0)),
    "a size that would wrap around": overwritten(0, "B", *header((1 << 62) + COUNT, (1 << 61) + 5)),
    "another kind of number": overwritten(0, "B", *header(code=6)),
    "a negative length": overwritten(LENGTHS, "i", -5),
    "a negative length and a long one": overwritten(LENGTHS, "i", -5, 9),
    "a length beyond the .bin": overwritten(LENGTHS, "i", (1 << 31) - 1),
    "lengths beyond the .bin": overwritten(LENGTHS, "i", *[(1 << 31) - 1] * COUNT),
    "a last pointer beyond the .bin": overwritten(POINTERS + 8 * (COUNT - 1), "q", 1 << 40),
    "a first pointer below zero": overwritten(POINTERS, "q", -2),
    "a document beyond the sequences": overwritten(INDICES + 8, "q", 1 << 40),
    "a document below zero": overwritten(INDICES + 8, "q", -1),
    "documents that wrap around": overwritten(INDICES, "q", 0, (1 << 63) - 1, -2, 3, 4),
    "a last document that is another": overwritten(INDICES + 8 * COUNT, "q", 3),
    "no document at first": overwritten(INDICES, "q", 1),
    "an empty .idx": instead(".idx", b""),
    "an empty .bin": instead(".bin", b""),
    "an .idx of a header": instead(".idx", header()),
    "an .idx of zeros": instead(".idx", bytes(200)),
    "a .bin of one byte": instead(".bin", b"x"),
    **{f"a folder for {extension}": replaced(extension, os.mkdir) for extension in (".idx", ".bin")},
    **{f"a FIFO for {extension}": replaced(extension, os.mkfifo) for extension in (".idx", ".bin")},
    **{f"no {extension}": replaced(extension, lambda path: None) for extension in (".idx", ".bin")},
}
SIDECAR = {
    # damage of .json, and a word of the line
    "no JSON": (instead(".json", b"{"), "not JSON"),
    "nothing": (instead(".json", b""), "not JSON"),
    "no UTF-8": (instead(".json", b'{"\xff": 1}'), "not JSON"),
    "nesting": (instead(".json", b"[" * 100_000), "nested too deeply"),
    "a long number": (instead(".json", b"1" * 5000), "not JSON"),
    "a FIFO": (replaced(".json", os.mkfifo), "not a regular file"),
    "a folder": (replaced(".json", os.mkdir), "cannot be read"),
    **{f"a {kind.__name__}": (instead(".json", json.dumps(kind()).encode()), "expected an object") for kind in (list, int, str)},
    **{
        f"{name} left out": (sidecar(**{name: "LEFT OUT"}), name)
        for name in ("vocab_size", "dtype", "sha256", "tokens", "tokenizer")
    },
    **{
        f"vocab_size {size}": (sidecar(vocab_size=size), "vocab_size")
        for size in (0, -1, 1 << 40, 10**400, 1.5, True, "9", [], None)
    },
    **{f"eod {eod}": (sidecar(eod=eod), "eod") for eod in (-1, 1 << 70, 100, "0", [], True)},
    **{f"documents {count}": (sidecar(documents=count), "documents") for count in (-1, 1 << 70, "4", None, {}, float("nan"))},
    **{f"sha256 {value}": (sidecar(sha256=value), "sha256") for value in ({}, [], "x", {"bin": 3, "idx": "x"}, None)},
    **{f"tokenizer {value}": (sidecar(tokenizer=value), "tokenizer") for value in ({}, [], "x", {"name": 3}, None)},
    **{f"dtype {value}": (sidecar(dtype=value), "dtype") for value in ("float64", "O", "", 3, None, "a\nb")},
    **{f"format {value}": (sidecar(format=value), "format") for value in (2, "1", None, [])},
    **{f"sources {value}": (sidecar(sources=value), "sources") for value in ({}, "x", 3, None)},
}
READERS = {
    "pretrain": lambda prefix: Corpus.open(prefix),
    "verify": lambda prefix: verify.verify_corpus(prefix),
    "estimate": lambda prefix: (build_length_model(DATA(prefix), ()), read_vocab_size(DATA(prefix))),
}


def DATA(prefix: Path) -> DataConfig:
    return DataConfig(data_path=(str(prefix),), seq_length=64)


@pytest.fixture
def prefix(tmp_path):
    return Path(write_whole_corpus(tmp_path / "demo", [[10 + number] * 3 + [0] for number in range(COUNT)]))


def one_line(reader, prefix) -> str:
    """What a reader says, within a bound of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            READERS[reader](prefix)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    return str(error.value)


@pytest.mark.parametrize("reader", ["pretrain", "verify"])
@pytest.mark.parametrize("damage", INDEX)
def test_a_damaged_index_is_one_line(damage, reader, prefix):
    INDEX[damage](prefix)
    line = one_line(reader, prefix)
    assert "demo.idx" in line or "demo.bin" in line


@pytest.mark.parametrize("damage", INDEX)
def test_an_estimate_of_a_damaged_index_is_one_line(damage, prefix):
    INDEX[damage](prefix)
    if os.path.isfile(f"{prefix}.idx"):
        line = one_line("estimate", prefix)
        assert "demo.idx" in line or "demo.bin" in line
    else:  # an estimate needs no data
        assert "unknown" in build_length_model(DATA(prefix), ()).source


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", SIDECAR)
def test_a_damaged_sidecar_is_one_line(damage, reader, prefix):
    put, words = SIDECAR[damage]
    put(prefix)
    if reader == "estimate" and damage in ("dtype float64", "dtype O", "dtype "):
        return  # the type of the .bin is its .idx's
    line = one_line(reader, prefix)
    assert "demo.json" in line and words in line


@pytest.mark.parametrize("command", [verify.main, inspect.main])
@pytest.mark.parametrize(
    "damage", ["a negative length", "documents that wrap around", f"{1 << 62:,} sequences", "a FIFO for .bin"]
)
def test_the_commands_end_in_one_line(damage, command, prefix, refusal):
    INDEX[damage](prefix)
    assert "demo." in refusal(command, [prefix])


@pytest.mark.parametrize("command", [verify.main, inspect.main])
@pytest.mark.parametrize("name", ["x" * 300, "a**", "none", "[", "a\nb", "/proc/1/mem", "demo.idx"])
def test_a_prefix_that_is_none_is_one_line(name, command, prefix, refusal):
    words = "found a file" if name == "/proc/1/mem" else "no such file"
    assert words in refusal(command, [prefix.parent / name])


@pytest.mark.parametrize("text", ["1e1000000000,1,1", "99,1E+999999,0", "1,1", "nan,1,0", "-1,1,1", "1/0,1,1"])
def test_a_split_that_is_none_is_one_line(text):
    with pytest.raises(InputError, match="--split: found"):
        parse_split(text)


def test_whole_corpora_are_read(prefix):
    """So that the damage, and nothing else, is refused above."""
    assert len(Corpus.open(prefix)) == COUNT and verify.verify_corpus(prefix).documents == COUNT
    assert "4 documents" in build_length_model(DATA(prefix), ()).source and read_vocab_size(DATA(prefix)) == 100
    assert np.dtype(Corpus.open(prefix).dtype) == np.uint16
