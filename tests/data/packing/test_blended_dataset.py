"""Each corpus of a blend is read as it is without the others.

The proportions are tested in test_corpus_order.py.
"""

from fractions import Fraction

import numpy as np
import pytest
from corpus_helpers import Numbered

from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.errors import InputError


def blend(weights, seq_length=8, seed=0):
    parts = [
        ConcatPackedDataset(Numbered([5, 9, 30, 2], name), np.arange(4), seq_length, seed)
        for name in range(len(weights))
    ]
    return BlendedDataset(parts, [Fraction(weight) for weight in weights])


def test_each_corpus_is_read_as_it_would_be_alone_in_any_order():
    packs = blend(["0.25", "0.75"])
    counts = [0, 0]
    places = []
    for sample in range(200):
        corpus = packs.corpus_of_sample(sample)
        places.append((corpus, counts[corpus]))
        counts[corpus] += 1
    assert counts == [50, 150] == packs.next_packs(200)
    datasets = blend(["0.25", "0.75"]).datasets
    for sample in np.random.default_rng(0).permutation(200).tolist():
        corpus, pack = places[sample]
        expected = datasets[corpus][pack]
        assert np.array_equal(packs[sample].tokens, expected.tokens) and np.array_equal(
            packs[sample].cu_seqlens, expected.cu_seqlens
        )
        assert (packs[sample].sample, packs[sample].epoch) == (sample, expected.epoch)


def test_repeats_begin_when_the_first_corpus_is_through():
    packs = blend(["0.25", "0.75"])
    through = packs.datasets[1].samples_before_repeat
    turns = [packs.corpus_of_sample(sample) for sample in range(packs.samples_before_repeat)]
    assert turns.count(1) == through and packs.corpus_of_sample(packs.samples_before_repeat) == 1


def test_a_corpus_leaves_after_its_last_pack():
    parts = blend(["1", "1"]).datasets
    packs = BlendedDataset(parts, [Fraction(3), Fraction(1)], limits=[6, 40])
    turns = [packs.corpus_of_sample(sample) for sample in range(packs.samples)]
    assert turns.count(0) == 6 and turns[9:] == [1] * 37
    assert np.array_equal(packs[45].tokens, parts[1][39].tokens)
    with pytest.raises(
        InputError, match="--blend-max-epochs: it ends all corpora after 46 packs, found pack 47"
    ):
        packs[46]
    later = packs.continue_from(100, [4, 10])
    assert (
        later.samples == 2 + 30
        and later.next_packs(100) == [4, 10]
        and later.next_packs(132) == [6, 40]
    )
