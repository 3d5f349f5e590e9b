"""A corpus is opened whole or refused in one line."""

import json
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import DOCUMENTS, VOCABULARY, write_corpus

from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError


def write_metadata(prefix: str, **changes) -> None:
    sidecar = {
        "format": 1,
        "tokenizer": {"name": "demo", "fingerprint": VOCABULARY.fingerprint, "eos_id": 0, "mask_id": 1},
        "vocab_size": 32,
        "eod": 0,
        "append_eod": False,
        "documents": 4,
        "sequences": 5,
        "tokens": 11,
        "empty_documents": 0,
        "skipped_lines": 0,
        "dtype": "uint16",
        "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
        "sha256": {"bin": "0" * 64, "idx": "0" * 64},
        "sources": [],
        "megaenc": "0.1.0",
    }
    Path(f"{prefix}.json").write_text(json.dumps(sidecar | changes))


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
    for number, sequences in enumerate(DOCUMENTS):
        flat = [token for sequence in sequences for token in sequence]
        for start in range(len(flat) + 1):
            for stop in range(start, len(flat) + 1):
                actual = corpus.tokens(number, start, stop)
                assert actual.dtype == np.int64
                assert actual.tolist() == flat[start:stop]


def test_tokens_stay_valid_after_the_corpus_is_gone(prefix):
    tokens = Corpus.open(prefix).tokens(1, 0, 6)
    assert tokens.tolist() == [10, 11, 12, 13, 14, 15]


def test_opens_with_its_sidecar(prefix):
    write_metadata(prefix)
    corpus = Corpus.open(prefix)
    corpus.check_vocabulary(VOCABULARY)
    assert corpus.tokens(0, 0, 3).tolist() == [5, 6, 7]


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_missing_file(prefix, extension):
    Path(prefix + extension).unlink()
    with pytest.raises(InputError, match=f"demo_text_document\\{extension}: no such file"):
        Corpus.open(prefix)


@pytest.mark.parametrize("typed", ["demo", "demo_text", "demo_text_document.bin"])
def test_missing_prefix_suggests_the_one_meant(prefix, typed):
    with pytest.raises(InputError, match=r"did you mean `.*demo_text_document`\?"):
        Corpus.open(Path(prefix).with_name(typed))


@pytest.mark.parametrize("size", [10, 34, 60, -1])
def test_truncated_idx(prefix, size):
    path = Path(prefix + ".idx")
    content = path.read_bytes()
    path.write_bytes(content[:size])
    expected = 34 if size == 10 else len(content)
    with pytest.raises(InputError, match=rf"\.idx: truncated: found {len(content[:size])} bytes, expected .*{expected}"):
        Corpus.open(prefix)


def test_truncated_bin(prefix):
    path = Path(prefix + ".bin")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"\.bin: truncated: found 19 bytes, expected 22"):
        Corpus.open(prefix)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"\.bin: found no tokens"):
        Corpus.open(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, b"PK", "found header"),
        (9, struct.pack("<Q", 2), "version 2; expected"),
        (17, b"\x07", "found dtype code 7"),
        (34, struct.pack("<i", -1), "negative length"),
        (34, struct.pack("<i", 4), r"\.bin: truncated: found 22 bytes, expected 24"),
        (34 + 5 * 4 + 4 * 8, struct.pack("<q", 2), "do not lie end to end"),
        (-8, struct.pack("<q", 4), "do not end at its last sequence"),
    ],
)
def test_damaged_idx(prefix, offset, value, complaint):
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    offset %= len(content)
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        Corpus.open(prefix)


@pytest.mark.parametrize(
    ("field", "value"),
    [("documents", 5), ("sequences", 4), ("tokens", 12), ("dtype", "int32"), ("bin_bytes", 24), ("idx_bytes", 1)],
)
def test_sidecar_of_another_corpus(prefix, field, value):
    write_metadata(prefix, **{field: value})
    with pytest.raises(InputError, match=rf"\.json: field `{field}`: found {value}, expected"):
        Corpus.open(prefix)


def test_corpus_made_with_another_tokenizer(prefix):
    write_metadata(prefix, tokenizer={"name": "other", "fingerprint": "a" * 64, "eos_id": 0, "mask_id": 1})
    with pytest.raises(
        InputError, match=r"made with another tokenizer: found `other` \(aaaaaaaaaaaa\), expected .*\(ffffffffffff\)"
    ):
        Corpus.open(prefix).check_vocabulary(VOCABULARY)


def test_ids_beyond_the_vocabulary(prefix):
    small = Vocabulary(size=21, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint=VOCABULARY.fingerprint)
    with pytest.raises(InputError, match="holds token id 21, expected 0 to 20"):
        Corpus.open(prefix).check_vocabulary(small)
    write_metadata(prefix)
    with pytest.raises(InputError, match=r"field `vocab_size`: found 32, expected at most .* 21"):
        Corpus.open(prefix).check_vocabulary(small)


@pytest.mark.parametrize("documents", [1, 16, 17, 60])
def test_few_documents_and_many_are_joined_alike(tmp_path, documents):
    lengths = [1 + 7 * number % 5 for number in range(60)]
    ids = [[(13 * number + place) % 32 for place in range(length)] for number, length in enumerate(lengths)]
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", [[sequence] for sequence in ids]))
    chosen = np.random.default_rng(documents).permutation(60)[:documents]
    stops = np.array([lengths[number] for number in chosen])
    starts = stops // 2
    actual = corpus.read_spans(chosen, starts, stops)
    assert actual.dtype == np.int64
    assert actual.tolist() == [
        token for number, start, stop in zip(chosen, starts, stops, strict=True) for token in ids[number][start:stop]
    ]


@pytest.mark.parametrize("few", [0, 16], ids=["many documents", "few documents"])
def test_ids_are_checked_as_they_are_read(tmp_path, monkeypatch, few):
    monkeypatch.setattr("megaenc.data.indexed.corpus._MAX_SLICED_DOCUMENTS", few)
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_TOKENS", 2)
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", [[[1, 2, 3]], [[4, -5]]], np.int32))
    corpus.check_vocabulary(VOCABULARY)
    assert corpus.tokens(0, 0, 3).tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="document 1 holds token id -5"):
        corpus.tokens(1, 0, 2)
    assert corpus.read_spans(np.array([1, 0, 0]), np.array([0, 2, 0]), np.array([1, 3, 2])).tolist() == [4, 3, 1, 2]
    with pytest.raises(InputError, match="document 1 holds token id -5"):
        corpus.read_spans(np.array([0, 1, 0]), np.array([0, 1, 1]), np.array([3, 2, 2]))


@pytest.mark.parametrize(
    ("documents", "expected"),
    [([[[1]]] * 7, False), ([[[1]]] * 8, True), ([[[1]] * 8], True), ([[[1] * 511 * 8]], False), ([[[1] * 512 * 8]], True)],
    ids=["few", "documents", "sentences", "short", "packs"],
)
def test_processes_share_what_documents_sentences_or_packs_make_large(documents, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("megaenc.data.indexed.corpus.LEAST_SHARED", 8)
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", documents))
    assert not corpus.is_shared  # by one process
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert corpus.is_shared == expected


def test_split_is_fixed_exact_and_by_document():
    training, validation, test = split_documents(10_000, (98, 1, 1))
    assert [len(part) for part in (training, validation, test)] == [9800, 100, 100]
    assert np.array_equal(np.sort(np.concatenate([training, validation, test])), np.arange(10_000))
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in (training, validation, test))
    assert all(
        np.array_equal(*pair)
        for pair in zip(split_documents(50, (98, 1, 1)), split_documents(50, (0.98, 0.01, 0.01)), strict=True)
    )
    # The same on every machine and in every version: a run's held-out documents must stay held out.
    assert split_documents(12, (2, 1, 1))[1].tolist() == [0, 2, 8]


@pytest.mark.parametrize(
    ("count", "fractions", "sizes"),
    [
        (2, (99, 1, 0), [1, 1, 0]),
        (3, (98, 1, 1), [1, 1, 1]),
        (1, (99, 1, 0), [1, 0, 0]),
        (5, (1, 0, 0), [5, 0, 0]),
        (0, (1, 1, 1), [0, 0, 0]),
    ],
)
def test_every_part_of_the_split_gets_a_document_where_there_are_enough(count, fractions, sizes):
    assert [len(part) for part in split_documents(count, fractions)] == sizes


def test_parse_split():
    assert parse_split("99,1,0") == (99, 1, 0)
    assert parse_split("0.98, 0.01, 0.01")[1] == Fraction(1, 100)
    for wrong in ("", "99", "99,1", "99,1,x", "-1,1,1", "0,0,0", "1,1,1,1", "1/0,1,1"):
        with pytest.raises(InputError, match=f"--split: found `{wrong}`"):
            parse_split(wrong)


@pytest.mark.parametrize("checked", [1 << 24, 2], ids=["checked", "too large to check"])
def test_offsets_are_read_for_some_documents(tmp_path, monkeypatch, checked):
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_SEQUENCES", checked)
    draw = np.random.default_rng(0)
    texts = [[[1] * draw.integers(1, 9) for _ in range(draw.integers(0, 4))] for _ in range(100)] + [[]]
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", texts, np.int32))
    expected = np.cumsum([0, *(sum(map(len, text)) for text in texts)])
    numbers = np.arange(102)
    assert corpus.document_offsets(numbers).tolist() == expected.tolist()
    pairs = np.stack([numbers[40:60], numbers[41:61]], axis=1)
    assert np.array_equal(corpus.document_offsets(pairs), expected[pairs])
    for size in (1, 2, 7, 64, 101, 128):
        assert corpus.block_offsets(size).tolist() == [*expected[:101:size], expected[-1]]
    assert "_document_bounds" not in vars(corpus)  # nothing has read the whole index
    assert np.array_equal(corpus.document_lengths, np.diff(expected))
    spans = [50, 3], [0, 0], [1, 1]
    assert corpus.read_ranges(numbers[spans[0]], expected[spans[0]], np.array([1, 1])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("offset", "value"),
    [(34 + 5 * 4 + 8, struct.pack("<q", 20)), (34 + 5 * 12 + 8, struct.pack("<q", 9)), (34 + 5 * 12 + 8, struct.pack("<q", -1))],
    ids=["pointer", "document", "negative"],
)
def test_damage_inside_a_large_index_is_found_where_it_is_read(prefix, monkeypatch, offset, value):
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_SEQUENCES", 2)
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    corpus = Corpus.open(prefix)
    for read in (lambda: corpus.block_offsets(1), lambda: corpus.document_offsets(np.arange(5))):
        with pytest.raises(InputError, match=r"end to end in .bin; the file is damaged, check it with `megaenc data verify`"):
            read()
    assert corpus.document_offsets(np.array([3, 4])).tolist() == [9, 11]


def test_all_of_a_large_index_is_checked_when_all_of_it_is_read(prefix, monkeypatch):
    monkeypatch.setattr("megaenc.data.indexed.corpus._CHECKED_SEQUENCES", 2)
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    content[38:42] = struct.pack("<i", -1)
    path.write_bytes(content)
    corpus = Corpus.open(prefix)
    with pytest.raises(InputError, match="negative length"):
        corpus.document_lengths  # noqa: B018


def test_the_first_text_of_a_foreign_corpus_decides_whether_eos_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megaenc.data.indexed.corpus._DOCUMENTS_PER_SEARCH", 2)
    for last in (9, 5):
        corpus = Corpus.open(write_corpus(tmp_path / f"corpus{last}", [[], [], [], [[3, last]], [[9]]]))
        expected = SpecialTokens("eod", after=(9,)) if last == 9 else SpecialTokens()
        assert corpus.find_special_tokens(9) == expected
