"""Named validation corpora: documents, and their text in packs of any length."""

import numpy as np
import pytest
from corpus_helpers import VOCABULARY, write_corpus

from megaenc.data.indexed.corpus import Corpus, split_documents
from megaenc.data.packing.builder import split_corpus
from megaenc.data.packing.validation_sets import ValidationSet, parse_valid_data_path
from megaenc.errors import InputError


@pytest.fixture
def prefix(tmp_path):
    """Write a corpus of 40 documents of 5 to 30 tokens."""
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(2, 32, size=length).tolist()] for length in rng.integers(5, 31, size=40)
    ]
    return write_corpus(tmp_path / "corpus", documents)


def open_set(prefix, train_fingerprints=(), split="80,20,0", order="documents", opened=None):
    options = {"split": split, "order": order, "train_fingerprints": train_fingerprints}
    return ValidationSet.open(
        "web", prefix, VOCABULARY, **options, opened={} if opened is None else opened
    )


def text(held_out, seq_length, samples):
    packs = held_out.pack(seq_length)
    return np.concatenate([packs[sample].tokens for sample in range(samples)])


def test_a_corpus_only_for_validation_is_whole(prefix):
    held_out = open_set(prefix)
    corpus = Corpus.open(prefix)
    tokens = np.concatenate(
        [
            corpus.tokens(index, 0, int(length))
            for index, length in enumerate(corpus.document_lengths)
        ]
    )
    assert (
        held_out.documents.tolist() == list(range(40))
        and held_out.describe() == f"web (all documents of {prefix})"
    )
    assert sorted(text(held_out, 1, len(tokens))) == sorted(tokens)


def test_a_corpus_is_opened_once_and_has_the_documents_of_a_split_that_gives_all(
    prefix, monkeypatch
):
    opened = {}
    whole_corpus = open_set(prefix, opened=opened)
    assert open_set(prefix, opened=opened).corpus is whole_corpus.corpus and len(opened) == 1
    assert np.array_equal(whole_corpus.documents, split_corpus(whole_corpus.corpus, (0, 1, 0))[1])
    # As in validation.jsonl of earlier versions.
    assert whole_corpus.identity == [whole_corpus.corpus.fingerprint, "0,1,0"]
    monkeypatch.setattr("megaenc.data.packing.builder.MOST_SHUFFLED", 8)
    blocks = open_set(prefix, order="blocks").documents
    expected = split_corpus(whole_corpus.corpus, (0, 1, 0), "blocks")[1]
    assert blocks.size == expected.size and np.array_equal(blocks.indices, expected.indices)


def test_of_a_corpus_that_is_trained_on_only_held_out_documents_are_used(prefix):
    held_out = open_set(prefix, train_fingerprints=[Corpus.open(prefix).fingerprint])
    assert held_out.documents.tolist() == split_documents(40, (80, 20, 0))[1].tolist()
    assert held_out.describe() == f"web (held-out documents of {prefix})"
    assert held_out.identity != open_set(prefix).identity
    with pytest.raises(
        InputError, match="the run trains on it, and --split 1,0,0 leaves no text of it"
    ):
        open_set(prefix, train_fingerprints=[Corpus.open(prefix).fingerprint], split="1,0,0")


def test_packs_of_any_length_begin_with_the_same_text(prefix):
    held_out = open_set(prefix)
    short = text(held_out, 16, 16)
    assert np.array_equal(short, text(held_out, 64, 4)) and np.array_equal(
        short, text(held_out, 128, 2)
    )
    cu_seqlens = [held_out.pack(64)[sample].cu_seqlens.tolist() for sample in range(4)]
    assert all(len(row) > 2 for row in cu_seqlens)  # documents are shuffled, and told apart


def test_names_come_before_prefixes():
    words = ["web=data/web=2_text_document", "law.v2=/data/law"]
    assert parse_valid_data_path(words) == {
        "web": "data/web=2_text_document",
        "law.v2": "/data/law",
    }
    assert parse_valid_data_path([]) == {}
