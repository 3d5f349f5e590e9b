"""Packs against a walk, token by token, over the stream that they are cut from."""

from itertools import islice

import numpy as np
import pytest

from megaenc import counter_rng
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, Pack, RandomLengthPackedDataset
from megaenc.errors import InputError


class Numbered:
    """Documents in memory whose tokens say where they come from: 1000 * document + place."""

    def __init__(self, lengths):
        self.document_lengths = np.array(lengths, dtype=np.int64)

    def read_spans(self, documents, starts, stops):
        pieces = zip(documents, starts, stops, strict=True)
        return np.concatenate([1000 * document + np.arange(start, stop) for document, start, stop in pieces])


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
@pytest.mark.parametrize("seed", [0, 7])
def test_packs_are_the_stream_cut_into_pieces(lengths, seed):
    seq_length, documents = 8, np.arange(len(lengths))
    packs = ConcatPackedDataset(Numbered(lengths), documents, seq_length, seed)
    epochs = 60 if sum(lengths) < seq_length else 4
    count = packs.first_sample_of_epoch(epochs)
    actual = [packs[sample] for sample in range(count)]
    by_content = sorted((pack.tokens.tolist(), pack.edges.tolist(), pack.positions.tolist()) for pack in actual)
    assert by_content == sorted(expected_packs(lengths, documents, seq_length, seed, count))
    for sample, pack in enumerate(actual):
        assert (pack.sample, pack.epoch) == (sample, packs.epoch_of_sample(sample))
        assert pack.tokens.dtype == np.int64
        assert pack.edges.dtype == np.int32
        assert pack.positions.dtype == np.int64


def test_samples_of_an_epoch_are_the_packs_that_start_in_it_in_random_order():
    lengths = LENGTHS["mixed"]
    packs = ConcatPackedDataset(Numbered(lengths), np.arange(len(lengths)), 8, seed=3)
    per_epoch = sum(lengths)
    reference = [tokens for tokens, _, _ in expected_packs(lengths, range(len(lengths)), 8, 3, 60)]
    for epoch in range(4):
        starts = [pack for pack in range(60) if epoch * per_epoch <= pack * 8 < (epoch + 1) * per_epoch]
        samples = range(packs.first_sample_of_epoch(epoch), packs.first_sample_of_epoch(epoch + 1))
        assert list(samples) == starts
        visited = [packs[sample].tokens.tolist() for sample in samples]
        assert visited != [reference[pack] for pack in starts]
        assert sorted(visited) == sorted(reference[pack] for pack in starts)
        assert {packs[sample].epoch for sample in samples} == {epoch}


def test_every_token_comes_once_an_epoch():
    lengths = LENGTHS["mixed"]
    used = np.array([0, 2, 3, 4, 8])
    packs = ConcatPackedDataset(Numbered(lengths), used, 6, seed=1)
    epochs = 6  # six epochs are a whole number of packs of six tokens
    assert packs.tokens_per_epoch == sum(lengths[document] for document in used)
    tokens = np.concatenate([packs[sample].tokens for sample in range(packs.first_sample_of_epoch(epochs))])
    values, counts = np.unique(tokens, return_counts=True)
    assert values.tolist() == [1000 * document + offset for document in used for offset in range(lengths[document])]
    assert (counts == epochs).all()


def test_a_sample_depends_on_nothing_but_its_number():
    rng = np.random.default_rng(0)
    source = Numbered(rng.integers(0, 40, size=200))
    forwards = ConcatPackedDataset(source, np.arange(200), 16, seed=5)
    expected = [forwards[sample] for sample in range(700)]
    jumping = ConcatPackedDataset(source, np.arange(200), 16, seed=5)
    for sample in rng.permutation(700):
        actual = jumping[int(sample)]
        assert np.array_equal(actual.tokens, expected[sample].tokens)
        assert np.array_equal(actual.edges, expected[sample].edges)
    other = ConcatPackedDataset(source, np.arange(200), 16, seed=6)
    assert any(not np.array_equal(other[sample].tokens, expected[sample].tokens) for sample in range(3))


def test_pieces_of_a_long_document_do_not_meet_in_a_batch():
    packs = ConcatPackedDataset(Numbered([100_000]), np.array([0]), 100, seed=0)
    first_tokens = np.array([packs[sample].tokens[0] for sample in range(1000)])
    neighbours = np.mean(np.abs(np.diff(first_tokens)) == 100)
    assert neighbours < 0.01  # by chance one pair in five hundred


def test_epochs_follow_one_another_in_new_orders():
    packs = ConcatPackedDataset(Numbered([4] * 50), np.arange(50), 200, seed=0)
    first, second = packs[0].tokens, packs[1].tokens
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.sort(second))


def test_no_tokens():
    with pytest.raises(InputError, match="found no tokens in 2 documents"):
        ConcatPackedDataset(Numbered([0, 0, 5]), np.array([0, 1]), 8, seed=0)


def test_positions():
    pack = Pack(0, 0, np.arange(7), np.array([0, 3, 4, 7], dtype=np.int32))
    assert pack.positions.tolist() == [0, 1, 2, 0, 0, 1, 2]


# ---- random-length: the study's way


def test_random_length_packs_are_the_same_tokens_in_two_chunks():
    rng = np.random.default_rng(1)
    source, documents = Numbered(rng.integers(0, 50, size=300)), np.arange(300)
    concat, cut = ConcatPackedDataset(source, documents, 64, seed=2), RandomLengthPackedDataset(source, documents, 64, seed=2)
    for sample in range(300):
        concat_pack, pack = concat[sample], cut[sample]
        assert np.array_equal(pack.tokens, concat_pack.tokens) and pack.epoch == concat_pack.epoch
        assert pack.edges.dtype == np.int32 and len(pack.edges) == 3 and (np.diff(pack.edges) >= 12).all()
    again = RandomLengthPackedDataset(source, documents, 64, seed=2)
    assert [again[sample].edges[1] for sample in (299, 0)] == [cut[sample].edges[1] for sample in (299, 0)]
    other = RandomLengthPackedDataset(source, documents, 64, seed=3)
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


def cut_piece_by_piece(stream, start, count):
    """`Stream.read` as it was written at first: a document after the other."""
    tokens, edges = np.empty(count, dtype=np.int64), [0]
    while edges[-1] < count:
        epoch, begin = divmod(start + edges[-1], stream.tokens_per_epoch)
        order, ends = stream.epoch_order(epoch)
        end = min(begin + count - edges[-1], stream.tokens_per_epoch)
        first, last = np.searchsorted(ends, (begin, end - 1), side="right")
        for place in range(first, last + 1):
            document = int(stream.documents[order[place]])
            offset = int(ends[place]) - int(stream.corpus.document_lengths[document])
            piece = stream.corpus.tokens(document, max(begin - offset, 0), min(end, int(ends[place])) - offset)
            tokens[edges[-1] : edges[-1] + len(piece)] = piece
            edges.append(edges[-1] + len(piece))
    return tokens, np.array(edges, dtype=np.int32)


def test_packs_of_a_corpus_on_disk_are_those_cut_piece_by_piece(tmp_path):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 4, 200)  # of sequences, none in some documents
    lengths = draw.integers(1, 40, counts.sum()).astype(np.int32)
    writer = IndexedWriter(tmp_path / "a.bin", tmp_path / "a.idx", "uint16")
    writer.add_documents(draw.integers(0, 60_000, lengths.sum()), lengths, counts)
    writer.finish()
    stream = ConcatPackedDataset(Corpus.open(tmp_path / "a"), np.arange(200), 64, seed=5).stream
    for start in [*range(0, 3 * stream.tokens_per_epoch, 41), stream.tokens_per_epoch - 1]:
        for count in (1, 64, 700):
            for actual, expected in zip(stream.read(start, count), cut_piece_by_piece(stream, start, count), strict=True):
                assert actual.dtype == expected.dtype and np.array_equal(actual, expected)
