"""Packs that start at sentences, against a walk over the stream, sentence by sentence."""

from types import SimpleNamespace

import numpy as np
import pytest

from megaenc import counter_rng
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset


class Sentences:
    """Documents in memory, each a list of sentence lengths; a token is 10,000 * document + place."""

    def __init__(self, documents):
        self.sequence_lengths = np.array([length for document in documents for length in document], dtype=np.int32)
        self.first_sequences = np.cumsum([0, *map(len, documents)])
        self.document_lengths = np.array([sum(document) for document in documents], dtype=np.int64)

    def read_spans(self, documents, starts, stops):
        pieces = zip(documents, starts, stops, strict=True)
        return np.concatenate([10_000 * document + np.arange(start, stop) for document, start, stop in pieces])


def expected_packs(documents, seq_length, seed, epochs):
    """(epoch, tokens, edges) of the packs that start in the first `epochs` epochs, in the order of the stream."""
    nonempty = [number for number, document in enumerate(documents) if sum(document)]
    stream = []  # epoch, token, whether a sentence starts here, whether a document does
    for epoch in range(epochs + 40):
        for place in counter_rng.permutation(seed, "documents", len(nonempty), counters=(epoch,)):
            offset = 0
            for length in documents[nonempty[place]]:
                for at in range(length):
                    stream.append((epoch, 10_000 * nonempty[place] + offset + at, at == 0, offset + at == 0))
                offset += length
    packs, at = [], 0
    while stream[at][0] < epochs:
        piece = stream[at : at + seq_length]
        edges = [0] + [place for place in range(1, seq_length) if piece[place][3]] + [seq_length]
        packs.append((piece[0][0], [token for _, token, _, _ in piece], edges))
        at += seq_length
        while not stream[at][2]:
            at += 1
    return packs


CORPORA = {
    "mixed": [[3, 5, 2], [1], [], [7, 7], [20], [0, 4, 0, 2], [6, 1, 1, 1, 9]],
    "shorter than a pack": [[2, 1], [1, 1]],
    "sentences longer than packs": [[30, 31], [9, 25]],
    "packs that end with sentences": [[4, 4, 8], [8, 8]],
}


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA.keys())
def test_every_pack_starts_at_a_sentence(documents):
    """In whatever order the packs are read."""
    packs = SentencePackedDataset(Sentences(documents), np.arange(len(documents)), 8, seed=5)
    expected = expected_packs(documents, 8, 5, epochs=12)
    assert packs.first_sample_of_epoch(12) == len(expected)
    actual = []
    for sample in np.random.default_rng(0).permutation(len(expected)).tolist():
        pack = packs[sample]
        assert packs.first_sample_of_epoch(pack.epoch) <= sample < packs.first_sample_of_epoch(pack.epoch + 1)
        assert packs.epoch_of_sample(sample) == pack.epoch
        actual.append((pack.epoch, pack.tokens.tolist(), pack.edges.tolist()))
    assert sorted(actual) == sorted(expected)


def test_what_is_dropped_is_reported():
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 20, size=9).tolist() for _ in range(200)]
    packs = SentencePackedDataset(Sentences(documents), np.arange(200), 64, seed=1)
    walked = expected_packs(documents, 64, 1, epochs=1)
    used = {token for _, tokens, _ in walked for token in tokens}
    total = sum(map(sum, documents))
    assert packs.dropped == pytest.approx(1 - len(used) / total, abs=64 / total)
    assert 0.02 < packs.dropped < 0.15
    assert ConcatPackedDataset(Sentences(documents), np.arange(200), 64, seed=1).dropped == 0


def test_documents_of_one_sentence_each_are_sentences_if_their_sidecar_says_so():
    titles = Sentences([[5], [9], [4]])
    titles.metadata = SimpleNamespace(sentences={"method": "punkt"})
    assert len(SentencePackedDataset(titles, np.arange(3), 8, seed=0)[0].tokens) == 8
