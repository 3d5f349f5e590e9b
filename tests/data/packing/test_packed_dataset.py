"""Packs against a walk, token by token, over the stream that they are cut from."""

from itertools import islice

import numpy as np
import pytest
from corpus_helpers import Numbered

from megaenc import counter_rng
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.errors import InputError


def stream(lengths, documents, seed):
    """Every token of the endless stream as (token, whether a document starts here)."""
    documents = [document for document in documents if lengths[document] > 0]
    epoch = 0
    while True:
        for place in counter_rng.permutation(seed, "documents", len(documents), counters=(epoch,)):
            document = documents[place]
            for offset in range(lengths[document]):
                yield 1000 * document + offset, offset == 0
        epoch += 1


def expected_packs(lengths, documents, seq_length, seed, count):
    """The first `count` packs in the order of the stream: tokens, edges, positions."""
    tokens = stream(lengths, documents, seed)
    packs = []
    for _ in range(count):
        piece = list(islice(tokens, seq_length))
        edges = [0] + [place for place, (_, starts) in enumerate(piece) if starts and place > 0] + [seq_length]
        positions = []
        for place in range(seq_length):
            positions.append(0 if place in edges else positions[-1] + 1)
        packs.append(([token for token, _ in piece], edges, positions))
    return packs


LENGTHS = {
    "mixed": [5, 1, 0, 30, 7, 12, 2, 0, 9, 16],
    "shorter than a pack": [2, 0, 3],
    "one token": [1],
    "one long document": [100],
    "a whole number of packs": [8, 8, 16],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_packs_are_the_stream_cut_into_pieces(lengths):
    """Each epoch has the packs that start in it, in random order, in whatever order they are read."""
    packs = ConcatPackedDataset(Numbered(lengths), np.arange(len(lengths)), 8, seed=7)
    epochs = 60 if sum(lengths) < 8 else 4
    expected = expected_packs(lengths, range(len(lengths)), 8, 7, packs.first_sample_of_epoch(epochs))
    read = {sample: packs[sample] for sample in np.random.default_rng(0).permutation(len(expected)).tolist()}
    is_in_order = True
    for epoch in range(epochs):
        numbers = [number for number in range(len(expected)) if number * 8 // sum(lengths) == epoch]
        assert numbers == [*range(packs.first_sample_of_epoch(epoch), packs.first_sample_of_epoch(epoch + 1))]
        actual = []
        for sample in numbers:
            pack = read[sample]
            assert (pack.sample, pack.epoch) == (sample, epoch) and packs.epoch_of_sample(sample) == epoch
            assert (pack.tokens.dtype, pack.edges.dtype, pack.positions.dtype) == (np.int64, np.int32, np.int64)
            actual.append((pack.tokens.tolist(), pack.edges.tolist(), pack.positions.tolist()))
        assert sorted(actual) == sorted(expected[number] for number in numbers)
        is_in_order = is_in_order and actual == [expected[number] for number in numbers]
    assert not is_in_order or sum(lengths) < 2 * 8


def test_no_tokens():
    with pytest.raises(InputError, match="found no tokens in 2 documents"):
        ConcatPackedDataset(Numbered([0, 0, 5]), np.array([0, 1]), 8, seed=0)


# ---- random-length: the study's way


def test_random_length_packs_are_the_same_tokens_in_two_chunks():
    source = Numbered(np.random.default_rng(1).integers(0, 50, size=300))
    concat = ConcatPackedDataset(source, np.arange(300), 64, seed=2)
    cut, again, other = (RandomLengthPackedDataset(source, np.arange(300), 64, seed=seed) for seed in (2, 2, 3))
    for sample in range(100):
        pack = cut[sample]
        assert np.array_equal(pack.tokens, concat[sample].tokens) and pack.epoch == concat[sample].epoch
        assert pack.edges.dtype == np.int32 and len(pack.edges) == 3 and (np.diff(pack.edges) >= 12).all()
    assert [again[sample].edges[1] for sample in (99, 0)] == [cut[sample].edges[1] for sample in (99, 0)]
    assert [other[sample].edges[1] for sample in range(9)] != [cut[sample].edges[1] for sample in range(9)]


def test_random_lengths_are_uniform():
    packs = RandomLengthPackedDataset(Numbered([1_000_000]), np.array([0]), 40, seed=0)  # cuts at 12 to 28: seventeen places
    samples = 17_000
    counts = np.bincount([packs[sample].edges[1] for sample in range(samples)], minlength=29)
    assert counts[:12].sum() == 0 and counts.sum() == samples
    expected = samples / 17
    chi_square = ((counts[12:29] - expected) ** 2 / expected).sum()
    assert chi_square < 45.9  # 16 degrees of freedom: exceeded by chance once in ten thousand


def test_a_pack_too_short_for_two_chunks_is_refused():
    with pytest.raises(InputError, match="found --seq-length 23, expected at least 24"):
        RandomLengthPackedDataset(Numbered([100]), np.array([0]), 23, seed=0)
