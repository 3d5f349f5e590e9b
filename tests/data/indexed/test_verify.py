"""Verification passes whole corpora and names file, place and value of damage."""

import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import DOCUMENTS, VOCABULARY, damage, write_corpus, write_whole_corpus

from megaenc.data.indexed import verify
from megaenc.data.indexed.indexed_dataset import HEADER
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError

EOD = 0
A_HUNDRED = Vocabulary(
    size=100, eos_id=EOD, mask_id=1, special_ids=(EOD, 1), fingerprint=VOCABULARY.fingerprint
)


def test_each_document_is_checked_for_all_of_its_special_tokens(tmp_path):
    """A document without one of its special tokens is named with the missing id."""
    special = {"mode": "template", "before": [1, 2], "after": [3, 0]}

    def check(document, index=7):
        documents = [[1, 2, *range(10, 10 + index), 3, 0] for index in range(12)]
        documents[index] = document
        verify.verify_corpus(
            write_whole_corpus(tmp_path / "template", documents, special_tokens=special)
        )

    whole = [1, 2, 10, 11, 12, 3, 0]
    check(whole)
    # Seven documents of 4 to 10 tokens come before it.
    found = {
        0: "first token (49 of the corpus), expected 1 (`special_tokens` in the .json)",
        1: "token 1 (50 of the corpus), expected 2 (`special_tokens` in the .json)",
        5: "token -2 (54 of the corpus), expected 3 (`special_tokens` in the .json)",
        6: "last token (55 of the corpus), expected it to end with 0 (`eod` in the .json)",
    }
    for place, error in found.items():
        message = re.escape(f"document 7: found id 5 as its {error}")
        with pytest.raises(InputError, match=message):
            check([*whole[:place], 5, *whole[place + 1 :]])
    with pytest.raises(InputError, match="document 7: found no token, expected 2"):
        check([1])
    for index in range(12):  # on all sides of the edges of pieces
        for place in (0, 1, -2, -1):
            document = [1, 2, *range(10, 10 + index), 3, 0]
            document[place] = 5
            with pytest.raises(InputError, match=f"document {index}: found id 5"):
                check(document, index)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make many pieces of corpora of a few hundred tokens."""
    monkeypatch.setattr(verify, "_CHUNK", 16)
    monkeypatch.setattr(verify, "_ENTRIES", 3)


@pytest.fixture
def prefix(tmp_path):
    """Write ten documents; document k has k + 1 tokens 10 + k and an end.

    Document 4 is tokens 14..18 of the corpus, and token 19 is its end.
    """
    return write_whole_corpus(
        tmp_path / "demo", [[10 + index] * (index + 1) + [EOD] for index in range(10)]
    )


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_whole_corpora_pass(tmp_path, dtype):
    for longest in (1, 50):
        documents = [
            [*range(2, 2 + length), EOD]
            for length in np.random.default_rng(0).integers(0, longest, size=40)
        ]
        tokens = sum(map(len, documents))
        read = []
        actual = verify.verify_corpus(
            write_whole_corpus(tmp_path / "demo", documents, dtype), A_HUNDRED, read.append
        )
        assert (actual.documents, actual.sequences, actual.tokens, actual.dtype) == (
            40,
            40,
            tokens,
            dtype,
        )
        assert actual.unchecked == ()
        assert (
            actual.bytes
            == sum(read)
            == tokens * np.dtype(dtype).itemsize + HEADER.size + 20 * 40 + 8
        )


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_corpus_of_megatron_cores_own_builder(tmp_path, dtype):
    prefix = write_corpus(tmp_path / "theirs", DOCUMENTS, dtype)
    actual = verify.verify_corpus(prefix)
    assert (actual.documents, actual.sequences, actual.tokens) == (4, 5, 11)
    assert actual.unchecked == ("sha256", "ends of documents", "token ids (give --tokenizer)")
    assert verify.verify_corpus(prefix, VOCABULARY).unchecked == ("sha256", "ends of documents")
    with pytest.raises(
        InputError,
        match=r"theirs\.bin: document 3, token 1 \(token 10 of the corpus\): "
        "found id 21, expected 0 to 20",
    ):
        verify.verify_corpus(prefix, Vocabulary(21, 0, 1, (0, 1), "f" * 64))


def test_every_flipped_bit_of_the_bin_is_found(prefix):
    """Only the hash shows a bit whose change makes another legal token."""
    intact = Path(f"{prefix}.bin").read_bytes()
    for token in (0, 7, 30, 64):
        damage(f"{prefix}.bin", 2 * token, bytes([intact[2 * token] ^ 1]))
        with pytest.raises(
            InputError,
            match=r"demo\.bin: .*found sha256 \w{12}, expected \w{12} \(by the \.json\); "
            "the file has changed",
        ):
            verify.verify_corpus(prefix)
        damage(f"{prefix}.bin", 0, intact)


def test_every_flipped_byte_of_the_idx_is_found(prefix):
    """The index contradicts itself for most bytes; the hash finds the others."""
    intact = Path(f"{prefix}.idx").read_bytes()
    places = []
    for offset in range(len(intact)):
        damage(f"{prefix}.idx", offset, bytes([intact[offset] ^ 1]))
        with pytest.raises(InputError, match=r"demo\.(idx|bin|json): ") as refusal:
            verify.verify_corpus(prefix)
        places.append(str(refusal.value))
        damage(f"{prefix}.idx", offset, intact[offset : offset + 1])
    verify.verify_corpus(prefix)
    lengths = HEADER.size
    documents = lengths + 12 * 10
    assert (
        "demo.idx: sequence 1: found pointer 4, "
        "expected 6 (from the lengths of the previous sequences" in places[lengths]
    )
    # Document 5 now seems to start with sequence 4.
    assert "demo.idx: found sha256" in places[documents + 5 * 8]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_id_that_no_tokenizer_has(tmp_path, dtype):
    """The hash tells an error of preprocessing from a file that changed later."""
    documents = [[10, 11, EOD], [12] * 20 + [EOD], [13, 100, EOD]]
    prefix = write_whole_corpus(tmp_path / "demo", documents, dtype)
    place = (
        r"demo\.bin: document 2, token 1 \(token 25 of the corpus\): "
        r"found id 100, expected 0 to 99 \(the tokenizer's ids\)"
    )
    with pytest.raises(InputError, match=place + "$"):
        verify.verify_corpus(prefix)
    if dtype == "int32":
        damage(f"{prefix}.bin", 4 * 25, struct.pack("<i", -1))
        with pytest.raises(
            InputError,
            match=r"token 25 of the corpus\): found id -1, expected 0 to 99.*; found sha256",
        ):
            verify.verify_corpus(prefix)


def test_a_document_without_a_token_has_no_end(tmp_path):
    for index in (0, 4, 9):
        documents = [[10, 11, EOD] for _ in range(10)]
        documents[index] = []
        with pytest.raises(
            InputError,
            match=rf"demo\.bin: document {index}: found no token, expected it to end with 0",
        ):
            verify.verify_corpus(write_whole_corpus(tmp_path / "demo", documents))


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """The peak for a corpus of 3 MB, read in pieces of 16 KB, is below a tenth of it."""
    monkeypatch.setattr(verify, "_CHUNK", 1 << 14)
    monkeypatch.setattr(verify, "_ENTRIES", 1 << 10)
    documents = [[7, 8, 9, EOD]] * 100_000
    prefix = write_whole_corpus(tmp_path / "demo", documents)
    size = sum(Path(prefix + extension).stat().st_size for extension in (".bin", ".idx"))
    assert size > 2_500_000
    tracemalloc.start()
    verify.verify_corpus(prefix)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 10


def test_the_command_looks_at_all_and_names_what_is_damaged(tmp_path, prefix, capfd):
    theirs = write_corpus(tmp_path / "theirs", DOCUMENTS)
    intact = write_whole_corpus(tmp_path / "whole", [[5, EOD]])
    other = write_whole_corpus(tmp_path / "other", [[5, EOD]])
    damage(f"{prefix}.bin", 0, b"\x0b")
    damage(f"{other}.bin", 0, b"\x0b")
    with pytest.raises(SystemExit) as stop:
        verify.main([prefix, intact, theirs, other])
    assert stop.value.code == 2
    captured = capfd.readouterr()
    first, second = captured.out.splitlines()
    assert first.startswith(f"{intact}: whole: 1 documents, 2 tokens of uint16, 0.0 MB at ")
    assert second.startswith(
        f"{theirs}: whole as far as can be checked without theirs.json: "
        "4 documents, 11 tokens of uint16"
    )
    assert second.endswith("; not checked: sha256, ends of documents, token ids (give --tokenizer)")
    assert (
        captured.err.startswith(f"error: {prefix}.bin: found sha256")
        and captured.err.count("\n") == 1
    )
    assert captured.err.endswith(f"; damaged too: {other}\n")
