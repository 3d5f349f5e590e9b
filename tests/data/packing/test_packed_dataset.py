"""Packs against a walk, token by token, over the stream that they are cut from."""

import numpy as np
import pytest
from corpus_helpers import Numbered, expected_packs, read_in_any_order

from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.errors import InputError

LENGTHS = {
    "mixed": [5, 1, 0, 30, 7, 12, 2, 0, 9, 16],
    "shorter than a pack": [2, 0, 3],
    "one token": [1],
    "one long document": [100],
    "a whole number of packs": [8, 8, 16],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_packs_are_the_stream_cut_into_pieces(lengths):
    """Each epoch has its packs in random order, whatever order they are read in."""
    packs = ConcatPackedDataset(Numbered(lengths), np.arange(len(lengths)), 8, seed=7)
    epochs = 60 if sum(lengths) < 8 else 4
    expected = expected_packs([[1] * length for length in lengths], 8, 7, epochs)
    assert packs.first_sample_of_epoch(epochs) == len(expected)
    actual = read_in_any_order(packs, len(expected))
    assert sorted(actual) == sorted(expected)
    assert actual != expected or sum(lengths) < 2 * 8


def test_no_tokens():
    with pytest.raises(InputError, match="found no tokens in 2 documents"):
        ConcatPackedDataset(Numbered([0, 0, 5]), np.array([0, 1]), 8, seed=0)


def test_edges_are_the_earlier_name_of_cu_seqlens():
    pack = ConcatPackedDataset(Numbered([5, 3]), np.array([0, 1]), 8, seed=0)[0]
    assert pack.edges is pack.cu_seqlens


# ---- random-length: the study's way


def test_random_length_packs_are_the_same_tokens_in_two_chunks():
    source = Numbered(np.random.default_rng(1).integers(0, 50, size=300))
    documents = np.arange(300)
    concat = ConcatPackedDataset(source, documents, 64, seed=2)
    cut = RandomLengthPackedDataset(source, documents, 64, seed=2)
    again = RandomLengthPackedDataset(source, documents, 64, seed=2)
    other_seed = RandomLengthPackedDataset(source, documents, 64, seed=3)
    for sample in range(100):
        pack = cut[sample]
        assert (
            np.array_equal(pack.tokens, concat[sample].tokens)
            and pack.epoch == concat[sample].epoch
        )
        assert (
            pack.cu_seqlens.dtype == np.int32
            and len(pack.cu_seqlens) == 3
            and (np.diff(pack.cu_seqlens) >= 12).all()
        )
    assert [again[sample].cu_seqlens[1] for sample in (99, 0)] == [
        cut[sample].cu_seqlens[1] for sample in (99, 0)
    ]
    assert [other_seed[sample].cu_seqlens[1] for sample in range(9)] != [
        cut[sample].cu_seqlens[1] for sample in range(9)
    ]


def test_random_lengths_are_uniform():
    packs = RandomLengthPackedDataset(
        Numbered([1_000_000]), np.array([0]), 40, seed=0
    )  # cuts at 12 to 28: seventeen places
    samples = 17_000
    counts = np.bincount([packs[sample].cu_seqlens[1] for sample in range(samples)], minlength=29)
    assert counts[:12].sum() == 0 and counts.sum() == samples
    expected = samples / 17
    chi_square = ((counts[12:29] - expected) ** 2 / expected).sum()
    assert chi_square < 45.9  # 16 degrees of freedom: exceeded by chance once in ten thousand


def test_a_pack_too_short_for_two_chunks_is_refused():
    with pytest.raises(InputError, match="found --seq-length 23, expected at least 24"):
        RandomLengthPackedDataset(Numbered([100]), np.array([0]), 23, seed=0)
