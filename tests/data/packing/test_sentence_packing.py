"""Packs that start at sentences, against a walk over the sentences."""

from types import SimpleNamespace

import numpy as np
import pytest
from corpus_helpers import Sentences, expected_packs, read_in_any_order

from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset

CORPORA = {
    "mixed": [[3, 5, 2], [1], [], [7, 7], [20], [0, 4, 0, 2], [6, 1, 1, 1, 9]],
    "shorter than a pack": [[2, 1], [1, 1]],
    "sentences longer than packs": [[30, 31], [9, 25]],
    "packs that end with sentences": [[4, 4, 8], [8, 8]],
}


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA.keys())
def test_every_pack_starts_at_a_sentence(documents):
    """The packs do not depend on the order in which they are read."""
    packs = SentencePackedDataset(Sentences(documents), np.arange(len(documents)), 8, seed=5)
    expected = expected_packs(documents, 8, 5, epochs=12)
    assert packs.first_sample_of_epoch(12) == len(expected)
    actual = read_in_any_order(packs, len(expected))
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
