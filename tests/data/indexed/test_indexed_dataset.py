import hashlib
from itertools import product

import numpy as np
import pytest
from text_helpers import contents, documents_of

from megaenc.data.indexed import indexed_dataset
from megaenc.data.indexed.indexed_dataset import IndexedWriter, token_dtype

DOCUMENTS = [[[1, 2], [3]], [[4]], [[5, 6, 7], [8], [9, 10]], [[65_499]]]


def write(prefix, *batches, dtype="uint16"):
    """Write documents, each a list of sequences; return the hashes."""
    writer = IndexedWriter(
        prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx"), dtype
    )
    for documents in batches:
        sequences = [sequence for document in documents for sequence in document]
        tokens = np.array([token for sequence in sequences for token in sequence], dtype)
        writer.add_documents(
            tokens,
            np.array(list(map(len, sequences)), np.int32),
            np.array(list(map(len, documents)), np.int32),
        )
    return writer.finish()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_finds_sequences_within_documents(tmp_path, dtype):
    hashes = write(tmp_path / "a", DOCUMENTS[:2], [], DOCUMENTS[2:], dtype=dtype)
    assert documents_of(tmp_path / "a") == DOCUMENTS
    assert [hashlib.sha256(data).hexdigest() for data in contents(tmp_path / "a")] == [
        hashes["bin"],
        hashes["idx"],
    ]


def test_joined_corpora_are_those_of_one_writer(tmp_path):
    write(tmp_path / "whole", DOCUMENTS)
    names = ["one", "two", "three"]
    parts = [
        write(tmp_path / name, part)
        for name, part in zip(names, (DOCUMENTS[:1], [], DOCUMENTS[1:]), strict=True)
    ]
    writer = IndexedWriter(tmp_path / "joined.bin", tmp_path / "joined.idx", "uint16")
    for name, hashes in zip(names, parts, strict=True):
        writer.append_corpus(tmp_path / f"{name}.bin", tmp_path / f"{name}.idx", hashes)
    assert (writer.documents, writer.sequences, writer.tokens) == (4, 7, 11)
    writer.finish()
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


@pytest.mark.parametrize("piece", [1, 1 << 24])
def test_a_corpus_is_joined_without_some_of_its_documents(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(indexed_dataset, "_PIECE_BYTES", piece)
    hashes = write(tmp_path / "part", DOCUMENTS)
    for index, keep in enumerate(product([False, True], repeat=len(DOCUMENTS))):
        write(
            tmp_path / "whole",
            [document for document, stays in zip(DOCUMENTS, keep, strict=True) if stays],
        )
        writer = IndexedWriter(tmp_path / f"{index}.bin", tmp_path / f"{index}.idx", "uint16")
        writer.append_corpus(tmp_path / "part.bin", tmp_path / "part.idx", hashes, np.array(keep))
        writer.finish()
        assert contents(tmp_path / f"{index}") == contents(tmp_path / "whole")


def test_vocabularies_from_65500_ids_are_stored_as_int32():
    assert (token_dtype(65_499), token_dtype(65_500)) == ("uint16", "int32")
