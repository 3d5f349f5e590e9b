"""A corpus is whole, or one line says which file is damaged, where, what was found and what was expected."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import DOCUMENTS, VOCABULARY, write_corpus

from megaenc.data.indexed import verify
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.indexed_dataset import HEADER, IndexedWriter
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError

EOD = 0
A_HUNDRED = Vocabulary(size=100, eos_id=EOD, mask_id=1, special_ids=(EOD, 1), fingerprint=VOCABULARY.fingerprint)


def write_whole_corpus(prefix: Path, documents: list[list[int]], dtype: str = "uint16", vocab_size: int = 100) -> str:
    """A corpus of our own writer with its sidecar; end-of-document tokens are those in `documents`."""
    writer = IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype)
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int32)
    writer.add_documents(
        np.concatenate([np.array(tokens, dtype=np.uint32) for tokens in documents]), lengths, np.ones_like(lengths)
    )
    sha256 = writer.finish()
    sidecar = {
        "format": 1,
        "tokenizer": {"name": "demo", "fingerprint": VOCABULARY.fingerprint, "eos_id": EOD, "mask_id": 1},
        "vocab_size": vocab_size,
        "eod": EOD,
        "append_eod": True,
        "documents": writer.documents,
        "sequences": writer.documents,
        "tokens": writer.tokens,
        "empty_documents": 0,
        "skipped_lines": 0,
        "dtype": dtype,
        "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
        "sha256": sha256,
        "sources": [],
        "megaenc": "0.1.0",
    }
    Path(f"{prefix}.json").write_text(json.dumps(sidecar))
    return str(prefix)


def test_each_document_is_checked_for_all_of_its_special_tokens(tmp_path):
    """One document in the middle lacks one of them: the error names the document, what was found and what was expected."""
    prefix = tmp_path / "template"
    whole = [[1, 2, *range(10, 10 + number), 3, 0] for number in range(12)]
    special = {"mode": "template", "before": [1, 2], "after": [3, 0]}

    def check(documents: list[list[int]]) -> str:
        write_whole_corpus(prefix, documents)
        sidecar = Path(f"{prefix}.json")
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"special_tokens": special}))
        try:
            verify.verify_corpus(prefix)
        except InputError as error:
            return str(error)
        return ""

    assert check(whole) == ""
    found = {
        0: "document 7: found id 5 as its first token (56 of the corpus), expected 1 (`special_tokens` in the .json)",
        1: "document 7: found id 5 as its token 1 (57 of the corpus), expected 2 (`special_tokens` in the .json)",
        -2: "document 7: found id 5 as its token -2 (65 of the corpus), expected 3 (`special_tokens` in the .json)",
        -1: "document 7: found id 5 as its last token (66 of the corpus), expected it to end with 0 (`eod` in the .json)",
    }
    position = sum(len(document) for document in whole[:7])
    for place, error in found.items():
        wrong = [list(document) for document in whole]
        wrong[7][place] = 5
        at = position + (place if place >= 0 else len(wrong[7]) + place)
        numbers = f"({at} of the corpus)"
        assert error[: error.index("(")] in check(wrong) and numbers in check(wrong)
        assert error[error.index(")") :] in check(wrong)
    short = [*whole[:7], [1], *whole[8:]]
    assert "document 7: found no token, expected 2" in check(short)


def random_documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Ids 2..99, then the end of document."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(2, 100, size=length).tolist(), EOD] for length in rng.integers(0, longest, size=count)]


def damage(path: str, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file; an `offset` below zero counts from its end."""
    with open(path, "r+b") as stream:
        stream.seek(offset, 0 if offset >= 0 else 2)
        stream.write(content)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Corpora of a few hundred tokens are many pieces."""
    monkeypatch.setattr(verify, "_CHUNK", 16)
    monkeypatch.setattr(verify, "_ENTRIES", 3)


@pytest.fixture
def prefix(tmp_path):
    """Document k of ten holds k + 1 tokens 10 + k, then the end: document 4 is tokens 14..18 of the corpus, 19 its end."""
    return write_whole_corpus(tmp_path / "demo", [[10 + number] * (number + 1) + [EOD] for number in range(10)])


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("longest", [1, 3, 50])
def test_whole_corpora_pass(tmp_path, dtype, longest):
    documents = random_documents(40, longest)
    tokens = sum(map(len, documents))
    read = []
    actual = verify.verify_corpus(write_whole_corpus(tmp_path / "demo", documents, dtype), A_HUNDRED, read.append)
    assert (actual.documents, actual.sequences, actual.tokens, actual.dtype) == (40, 40, tokens, dtype)
    assert actual.unchecked == () and actual.bytes == sum(read) == tokens * np.dtype(dtype).itemsize + HEADER.size + 20 * 40 + 8


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_corpus_of_megatron_cores_own_builder(tmp_path, dtype):
    prefix = write_corpus(tmp_path / "theirs", DOCUMENTS, dtype)
    actual = verify.verify_corpus(prefix)
    assert (actual.documents, actual.sequences, actual.tokens) == (4, 5, 11)
    assert actual.unchecked == ("sha256", "ends of documents", "token ids (give --tokenizer)")
    assert verify.verify_corpus(prefix, VOCABULARY).unchecked == ("sha256", "ends of documents")
    with pytest.raises(
        InputError, match=r"theirs\.bin: document 3, token 1 \(token 10 of the corpus\): found id 21, expected 0 to 20"
    ):
        verify.verify_corpus(prefix, Vocabulary(21, 0, 1, (0, 1), "f" * 64))


@pytest.mark.parametrize("token", [0, 7, 8, 30, 64])
def test_every_flipped_bit_of_the_bin_is_found(prefix, token):
    """A bit that makes another legal token shows in the hash alone, wherever it is."""
    [before] = struct.unpack_from("<H", Path(f"{prefix}.bin").read_bytes(), 2 * token)
    damage(f"{prefix}.bin", 2 * token, struct.pack("<H", before ^ 1))
    with pytest.raises(
        InputError, match=r"demo\.bin: .*found sha256 \w{12}, expected \w{12} \(by the \.json\); the file has changed"
    ):
        verify.verify_corpus(prefix)


def test_every_flipped_byte_of_the_idx_is_found(prefix):
    """Byte by byte; nearly all are found by what the index says of itself, the rest by the hash."""
    intact = Path(f"{prefix}.idx").read_bytes()
    places = []
    for at in range(len(intact)):
        damage(f"{prefix}.idx", at, bytes([intact[at] ^ 1]))
        with pytest.raises(InputError, match=r"demo\.(idx|bin|json): ") as refusal:
            verify.verify_corpus(prefix)
        places.append(str(refusal.value))
        damage(f"{prefix}.idx", at, intact[at : at + 1])
    verify.verify_corpus(prefix)
    lengths, pointers, documents = HEADER.size, HEADER.size + 4 * 10, HEADER.size + 12 * 10
    assert "demo.idx: found header" in places[0]
    assert "demo.idx: sequence 1: found pointer 4, expected 6 (from the lengths of the previous sequences" in places[lengths]
    assert "demo.idx: sequence 3: found pointer 19, expected 18" in places[pointers + 3 * 8]
    assert "demo.idx: document 0: found first sequence 1, expected 0" in places[documents]
    assert "demo.idx: found sha256" in places[documents + 5 * 8]  # document 5 now seems to start with sequence 4


def test_indices_that_fall_or_end_wrongly(prefix):
    documents = HEADER.size + 12 * 10
    damage(f"{prefix}.idx", documents + 3 * 8, struct.pack("<q", 1))
    with pytest.raises(InputError, match=r"demo\.idx: document 3: found first sequence 1, expected 2 or more"):
        verify.verify_corpus(prefix)
    damage(f"{prefix}.idx", documents + 3 * 8, struct.pack("<qqq", 3, 4, 5))
    damage(f"{prefix}.idx", -8, struct.pack("<q", 12))
    with pytest.raises(InputError, match=r"demo\.idx: the last document index is 12, expected 10, the number of sequences"):
        verify.verify_corpus(prefix)


def test_a_negative_length(prefix):
    damage(f"{prefix}.idx", HEADER.size + 4 * 5, struct.pack("<i", -7))
    with pytest.raises(InputError, match=r"demo\.idx: sequence 5: found length -7, expected 0 or more"):
        verify.verify_corpus(prefix)


@pytest.mark.parametrize(
    ("extension", "cut", "words"),
    [
        (".bin", 2, r"demo\.bin: truncated: found 128 bytes, expected 130"),
        (".bin", 130, r"demo\.bin: found no tokens"),
        (".idx", 1, r"demo\.idx: truncated: found 241 bytes, expected 242"),
        (".idx", 240, r"demo\.idx: truncated: found 2 bytes, expected a header of 34"),
    ],
)
def test_a_truncated_file(prefix, extension, cut, words):
    path = Path(prefix + extension)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=words):
        verify.verify_corpus(prefix)


def test_tokens_without_a_sequence(prefix):
    Path(f"{prefix}.idx").write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 0, 2) + struct.pack("<qq", 0, 0))
    for check in (verify.verify_corpus, Corpus.open):
        with pytest.raises(InputError, match="found no tokens, expected at least one document with text"):
            check(prefix)


def test_a_missing_file(prefix):
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(InputError, match=r"demo\.bin: no such file"):
        verify.verify_corpus(prefix)


def test_the_bin_of_another_corpus(tmp_path, prefix):
    """The same shape, other tokens: only the hash can tell."""
    other = write_whole_corpus(tmp_path / "other", [[50 + number] * (number + 1) + [EOD] for number in range(10)])
    shutil.copy(f"{other}.bin", f"{prefix}.bin")
    Corpus.open(prefix)
    with pytest.raises(InputError, match=r"demo\.bin: found sha256"):
        verify.verify_corpus(prefix)


def test_the_json_of_another_corpus(tmp_path, prefix):
    other = write_whole_corpus(tmp_path / "other", [[50, EOD]] * 10)
    shutil.copy(f"{other}.json", f"{prefix}.json")
    with pytest.raises(InputError, match=r"demo\.json: field `tokens`: found 20, expected 65"):
        verify.verify_corpus(prefix)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_id_that_no_tokenizer_has(tmp_path, dtype):
    """In a whole file it is the preprocessing that was wrong, in a changed one the disk: the line tells which."""
    documents = [[10, 11, EOD], [12] * 20 + [EOD], [13, 100, EOD]]
    prefix = write_whole_corpus(tmp_path / "demo", documents, dtype, vocab_size=100)
    place = r"demo\.bin: document 2, token 1 \(token 25 of the corpus\): found id 100, expected 0 to 99 \(the tokenizer's ids\)"
    with pytest.raises(InputError, match=place + "$"):
        verify.verify_corpus(prefix)
    if dtype == "int32":
        damage(f"{prefix}.bin", 4 * 25, struct.pack("<i", -1))
        with pytest.raises(InputError, match=r"token 25 of the corpus\): found id -1, expected 0 to 99.*; found sha256"):
            verify.verify_corpus(prefix)


@pytest.mark.parametrize("missing", [0, 4, 9])
def test_a_document_without_its_end(tmp_path, missing):
    documents = [[10 + number] * (number + 1) + [EOD] for number in range(10)]
    documents[missing][-1] = 77
    last = sum(map(len, documents[: missing + 1])) - 1
    words = rf"demo\.bin: document {missing}: found id 77 as its last token \({last} of the corpus\), expected it to end with 0"
    with pytest.raises(InputError, match=words):
        verify.verify_corpus(write_whole_corpus(tmp_path / "demo", documents))


@pytest.mark.parametrize("empty", [0, 4, 9])
def test_a_document_without_a_token_has_no_end(tmp_path, empty):
    documents = [[10, EOD] for _ in range(10)]
    documents[empty] = []
    with pytest.raises(InputError, match=rf"demo\.bin: document {empty}: found no token, expected it to end with 0"):
        verify.verify_corpus(write_whole_corpus(tmp_path / "demo", documents))


def test_another_tokenizer(prefix):
    with pytest.raises(InputError, match="made with another tokenizer: found `demo`"):
        verify.verify_corpus(prefix, Vocabulary(100, 0, 1, (0, 1), "a" * 64))


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """Pieces of 64 KB and a corpus of 10 MB: what is held at once stays below a tenth of it."""
    monkeypatch.setattr(verify, "_CHUNK", 1 << 16)
    monkeypatch.setattr(verify, "_ENTRIES", 1 << 12)
    documents = [[7, 8, 9, EOD]] * 300_000
    prefix = write_whole_corpus(tmp_path / "demo", documents)
    size = sum(Path(prefix + extension).stat().st_size for extension in (".bin", ".idx"))
    assert size > 8_000_000
    tracemalloc.start()
    verify.verify_corpus(prefix)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 10


def test_the_command_says_one_line_a_corpus(tmp_path, prefix, capsys):
    theirs = write_corpus(tmp_path / "theirs", DOCUMENTS)
    verify.main([prefix, theirs])
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert first.startswith(f"{prefix}: whole: 10 documents, 65 tokens of uint16, 0.0 MB at ")
    assert second.startswith(f"{theirs}: whole as far as can be checked without theirs.json: 4 documents, 11 tokens of uint16")
    assert second.endswith("; not checked: sha256, ends of documents, token ids (give --tokenizer)")
    assert not captured.err


def test_the_command_looks_at_all_and_names_what_is_damaged(tmp_path, prefix, capfd):
    intact, other = (write_whole_corpus(tmp_path / name, [[5, EOD]]) for name in ("whole", "other"))
    damage(f"{prefix}.bin", 0, b"\x0b")
    damage(f"{other}.bin", 0, b"\x0b")
    with pytest.raises(SystemExit) as stop:
        verify.main([prefix, intact, other])
    captured = capfd.readouterr()
    assert stop.value.code == 2
    assert captured.out.startswith(f"{intact}: whole: 1 documents") and captured.out.count("\n") == 1
    assert captured.err.startswith(f"error: {prefix}.bin: found sha256") and captured.err.count("\n") == 1
    assert captured.err.endswith(f"; damaged too: {other}\n")


def test_the_command_checks_a_real_corpus_with_its_tokenizer(small_corpus, capsys):
    verify.main([str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer)])
    assert capsys.readouterr().out.startswith(f"{small_corpus.prefix}: whole: 300 documents")


def test_nothing_to_verify_is_one_line(refusal):
    assert "PREFIX" in refusal(verify.main, [])
