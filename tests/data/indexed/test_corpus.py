"""Corpora are opened whole or refused with one line."""

import dataclasses
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import DOCUMENTS, VOCABULARY, damage, write_corpus, write_whole_corpus

from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.errors import InputError


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path / "demo_text_document", DOCUMENTS)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_are_spans_of_sequences(tmp_path, dtype):
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", DOCUMENTS, dtype))
    assert corpus.metadata is None
    assert len(corpus) == 4
    assert corpus.document_lengths.dtype == np.int64
    assert corpus.document_lengths.tolist() == [3, 6, 0, 2]
    for index, sequences in enumerate(DOCUMENTS):
        flat = [token for sequence in sequences for token in sequence]
        for start in range(len(flat) + 1):
            for stop in range(start, len(flat) + 1):
                actual = corpus.tokens(index, start, stop)
                assert actual.dtype == np.int64
                assert actual.tolist() == flat[start:stop]


def test_missing_prefix_suggests_the_one_meant(prefix):
    for typed in ("demo", "demo_text", "demo_text_document.bin"):
        with pytest.raises(InputError, match=r"did you mean `.*demo_text_document`\?"):
            Corpus.open(Path(prefix).with_name(typed))


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, prefix):
    """Another fingerprint or size in the .json is refused; without .json the ids tell."""
    made = Corpus.open(write_whole_corpus(tmp_path / "made", [[5, 21, 0]], vocab_size=32))
    made.check_vocabulary(VOCABULARY)
    with pytest.raises(
        InputError,
        match=r"made with another tokenizer: found `demo` \(ffffffffffff\), "
        r"expected .*\(aaaaaaaaaaaa\)",
    ):
        made.check_vocabulary(dataclasses.replace(VOCABULARY, fingerprint="a" * 64))
    small = dataclasses.replace(VOCABULARY, size=21)
    with pytest.raises(InputError, match=r"field `vocab_size`: found 32, expected at most .* 21"):
        made.check_vocabulary(small)
    with pytest.raises(InputError, match="holds token id 21, expected 0 to 20"):
        Corpus.open(prefix).check_vocabulary(small)


@pytest.mark.parametrize("few", [0, 16], ids=["many documents", "few documents"])
def test_ids_are_checked_as_they_are_read(tmp_path, monkeypatch, few):
    monkeypatch.setattr("megaenc.data.indexed.corpus._MAX_SLICED_DOCUMENTS", few)
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_TOKENS", 2)
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", [[[1, 2, 3]], [[4, -5]]], np.int32))
    corpus.check_vocabulary(VOCABULARY)
    documents = np.array([1, 0, 0])
    assert corpus.read_spans(documents, np.array([0, 2, 0]), np.array([1, 3, 2])).tolist() == [
        4,
        3,
        1,
        2,
    ]
    with pytest.raises(InputError, match="document 1 holds token id -5"):
        corpus.read_spans(documents, np.array([1, 0, 0]), np.array([2, 3, 2]))


def test_split_is_fixed_exact_and_by_document():
    training, validation, test = split_documents(10_000, (98, 1, 1))
    assert [len(part) for part in (training, validation, test)] == [9800, 100, 100]
    assert np.array_equal(np.sort(np.concatenate([training, validation, test])), np.arange(10_000))
    assert all(
        (np.diff(part) > 0).all() and part.dtype == np.int64
        for part in (training, validation, test)
    )
    assert all(
        np.array_equal(*pair)
        for pair in zip(
            split_documents(50, (98, 1, 1)), split_documents(50, (0.98, 0.01, 0.01)), strict=True
        )
    )
    # The same on every machine and in every version: a run's held-out documents must stay held out.
    assert split_documents(12, (2, 1, 1))[1].tolist() == [0, 2, 8]


def test_every_part_of_the_split_gets_a_document_where_there_are_enough():
    def sizes(count, fractions):
        return [len(part) for part in split_documents(count, fractions)]

    assert sizes(3, (98, 1, 1)) == [1, 1, 1]
    assert sizes(2, (99, 1, 0)) == [1, 1, 0]
    assert sizes(1, (99, 1, 0)) == [1, 0, 0]
    assert sizes(0, (1, 1, 1)) == [0, 0, 0]


def test_parse_split():
    assert parse_split("99,1,0") == (99, 1, 0)
    assert parse_split("0.98, 0.01, 0.01")[1] == Fraction(1, 100)
    for wrong in (
        "",
        "99,1",
        "99,1,x",
        "-1,1,1",
        "0,0,0",
        "1/0,1,1",
        "nan,1,0",
        "1e1000000000,1,1",
    ):
        with pytest.raises(InputError, match=f"--split: found `{wrong}`"):
            parse_split(wrong)


@pytest.mark.parametrize("checked", [1 << 24, 2], ids=["checked", "too large to check"])
def test_offsets_are_read_for_some_documents(tmp_path, monkeypatch, checked):
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_SEQUENCES", checked)
    draw = np.random.default_rng(0)
    texts = [[[1] * draw.integers(1, 9) for _ in range(draw.integers(0, 4))] for _ in range(100)]
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", [*texts, []], np.int32))
    expected = np.cumsum([0, *(sum(map(len, text)) for text in texts), 0])
    pairs = np.stack([np.arange(40, 60), np.arange(41, 61)], axis=1)
    assert np.array_equal(corpus.document_offsets(pairs), expected[pairs])
    for size in (1, 7, 101, 128):
        assert corpus.block_offsets(size).tolist() == [*expected[:101:size], expected[-1]]
    assert np.array_equal(corpus.document_lengths, np.diff(expected))


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (34 + 5 * 4 + 8, struct.pack("<q", 20)),
        (34 + 5 * 12 + 8, struct.pack("<q", 9)),
        (34 + 4, struct.pack("<i", -1)),
    ],
    ids=["pointer", "document", "length"],
)
def test_damage_inside_a_large_index_is_found_where_it_is_read(
    prefix, monkeypatch, offset, content
):
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_SEQUENCES", 2)
    damage(f"{prefix}.idx", offset, content)
    corpus = Corpus.open(prefix)
    assert corpus.document_offsets(np.array([3, 4])).tolist() == [9, 11]
    if offset == 34 + 4:  # only the lengths of all sequences show it
        with pytest.raises(InputError, match="negative length"):
            corpus.document_lengths  # noqa: B018
    else:
        with pytest.raises(
            InputError,
            match=r"end to end in .bin; the file is damaged, check it with `megaenc data verify`",
        ):
            corpus.block_offsets(1)
        with pytest.raises(InputError, match=r"end to end in .bin"):
            corpus.document_offsets(np.arange(5))


def test_the_first_text_of_a_foreign_corpus_decides_whether_eos_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megaenc.data.indexed.corpus._DOCUMENTS_PER_SEARCH", 2)
    for last in (9, 5):
        corpus = Corpus.open(
            write_corpus(tmp_path / f"corpus{last}", [[], [], [], [[3, last]], [[9]]])
        )
        expected = SpecialTokens("eod", after=(9,)) if last == 9 else SpecialTokens()
        assert corpus.find_special_tokens(9) == expected
