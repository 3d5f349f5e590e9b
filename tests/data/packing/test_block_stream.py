"""Streams of shuffled blocks and their packs, against a walk over the documents."""

from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import open_data, read_in_any_order, write_corpus

from megaenc import counter_rng
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.packing import block_stream, builder
from megaenc.data.packing.block_stream import BlockStream, DocumentBlocks, choose_block_size
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.data.packing.token_stream import DocumentStream
from megaenc.errors import InputError


@pytest.fixture
def small_groups(monkeypatch):
    """Shuffle corpora of over 64 documents by blocks, in groups of 16 documents.

    A block has four or more documents.
    """
    monkeypatch.setattr(builder, "MOST_SHUFFLED", 64)
    monkeypatch.setattr(block_stream, "MOST_SHUFFLED", 64)
    monkeypatch.setattr(block_stream, "_GROUP_DOCUMENTS", 16)
    monkeypatch.setattr(block_stream, "_MOST_BLOCKS", 50)


@pytest.fixture
def prefix(tmp_path):
    """Write 203 documents, some empty; the last of 51 blocks of four has three.

    No two neighbouring tokens are equal.
    """
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 4, 203)
    counts[40:44] = 0  # an empty block
    lengths = draw.integers(1, 40, counts.sum())
    tokens = np.cumsum(np.random.default_rng(1).integers(1, 29, lengths.sum())) % 30 + 2
    sequences = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
    return write_corpus(
        tmp_path / "a", [[next(sequences) for _ in range(count)] for count in counts]
    )


class Identity:
    """Documents in memory whose tokens are the document's index."""

    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self):
        return len(self.offsets) - 1

    def block_offsets(self, size):
        return np.append(self.offsets[:-1:size], self.offsets[-1])

    def document_offsets(self, documents):
        return self.offsets[documents]

    def read_ranges(self, documents, begins, counts):
        assert (self.offsets[documents] <= begins).all() and (
            begins + counts <= self.offsets[documents + 1]
        ).all()
        return np.repeat(documents, counts)


def walk(corpus, blocks, seed, epoch, per_group):
    """Yield the documents with tokens of `epoch` in the specified order.

    Blocks are shuffled, then the documents of each group of blocks.
    """
    lengths = corpus.document_lengths
    with_text = []
    for index in blocks.indices:
        block = range(index * blocks.size, min((index + 1) * blocks.size, len(lengths)))
        with_text.append([document for document in block if lengths[document]])
    with_text = [block for block in with_text if block]
    order = [
        with_text[place]
        for place in counter_rng.permutation(seed, "blocks", len(with_text), counters=(epoch,))
    ]
    for group, first in enumerate(range(0, len(order), per_group)):
        documents = [document for block in order[first : first + per_group] for document in block]
        for place in counter_rng.permutation(
            seed, "documents", len(documents), counters=(epoch, group)
        ):
            yield documents[place]


@pytest.mark.parametrize("numbers", [np.arange(51), np.array([10, 50])], ids=["all", "two"])
def test_the_stream_is_the_walk_at_every_position(prefix, small_groups, numbers):
    corpus = Corpus.open(prefix)
    blocks = DocumentBlocks(4, numbers)
    stream = BlockStream(corpus, blocks, seed=3)
    tokens = []
    boundaries = [0]
    for epoch in range(3):
        order = list(walk(corpus, blocks, 3, epoch, per_group=4))
        assert stream.epoch_documents(epoch).tolist() == order
        for document in order:
            tokens += corpus.tokens(document, 0, int(corpus.document_lengths[document])).tolist()
            boundaries.append(len(tokens))
        assert len(tokens) == (epoch + 1) * stream.tokens_per_epoch
    for count in (1, 64, 700):
        for start in np.random.default_rng(2).permutation(len(tokens) - count)[:100].tolist():
            actual, actual_boundaries = stream.read(start, count)
            assert actual.dtype == np.int64 and actual_boundaries.dtype == np.int32
            assert actual.tolist() == tokens[start : start + count]
            inner = [
                boundary - start for boundary in boundaries if start < boundary < start + count
            ]
            assert actual_boundaries.tolist() == [0, *inner, count]


@pytest.mark.parametrize(
    "packing", [ConcatPackedDataset, RandomLengthPackedDataset, SentencePackedDataset]
)
def test_packs_of_blocks(prefix, small_groups, packing):
    """Each token comes once an epoch (in sentences at most once), in any read order."""
    corpus = Corpus.open(prefix)
    blocks = DocumentBlocks(4, np.arange(1, 51, 2))
    corpus.read_ranges = lambda documents, begins, counts: np.concatenate(  # offsets for tokens
        [np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    )
    packs = packing(corpus, blocks, 24, 7)
    count = packs.first_sample_of_epoch(2)
    in_order = [packs[sample] for sample in range(count)]
    read = read_in_any_order(packing(corpus, blocks, 24, 7), count)
    assert read == [
        (pack.epoch, pack.tokens.tolist(), pack.cu_seqlens.tolist()) for pack in in_order
    ]
    boundaries = corpus.block_offsets(4)
    expected = np.concatenate(
        [np.arange(boundaries[index], boundaries[index + 1]) for index in blocks.indices]
    )
    tokens, counts = np.unique([tokens for _, tokens, _ in read], return_counts=True)
    assert (
        np.isin(tokens, expected).all() and counts.max() <= 3
    )  # the last pack reaches into the third epoch
    if packing is SentencePackedDataset:
        sentences = np.cumsum(corpus.sequence_lengths) - corpus.sequence_lengths
        assert all(tokens[0] in sentences for _, tokens, _ in read) and 0 < packs.dropped < 0.5
    else:
        assert np.array_equal(tokens, expected) and counts.min() == 2 and counts.sum() == 24 * count


def test_many_packs_are_permuted_without_holding_their_order(small_groups):
    packs = ConcatPackedDataset(
        Identity(np.full(400, 32)), DocumentBlocks(4, np.arange(100)), 32, 1
    )
    assert isinstance(packs.stream.permute_packs(400, 0), counter_rng.KeyedPermutation)
    first, second = np.split(np.array([packs[sample].tokens[0] for sample in range(800)]), 2)
    assert sorted(first) == sorted(second) == list(range(400)) and (first != second).any()


def test_a_corpus_has_at_most_half_a_million_blocks():
    sizes = {1: 1, 1 << 19: 1, (1 << 19) + 1: 2, 1_500_000_000: 4096}
    assert {documents: choose_block_size(documents) for documents in sizes} == sizes


def test_a_split_by_blocks_holds_every_document_once(prefix, small_groups):
    parts = builder.split_corpus(Corpus.open(prefix), (70, 20, 10), "blocks")
    assert {part.size for part in parts} == {8} and [len(part.indices) for part in parts] == [
        18,
        5,
        3,
    ]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(26))
    data = open_data(prefix, order="blocks")
    [train] = data.train_datasets
    [held_out] = data.held_out.datasets
    assert isinstance(held_out.stream, BlockStream)
    assert (
        train.tokens_per_epoch + held_out.tokens_per_epoch == data.corpora[0].document_lengths.sum()
    )
    assert not set(train.stream.epoch_documents(0)) & set(held_out.stream.epoch_documents(0))


def test_a_small_corpus_and_an_old_run_shuffle_documents(prefix, monkeypatch):
    small = open_data(prefix, order="blocks")
    monkeypatch.setattr(builder, "MOST_SHUFFLED", 64)
    old = open_data(prefix, order="documents")
    assert open_data(prefix, order="blocks").has_blocks
    for data in (small, old):
        assert not data.has_blocks and isinstance(data.train_datasets[0].stream, DocumentStream)
    for sample in range(2 * small.train.samples_before_repeat):
        assert np.array_equal(small.train[sample].tokens, old.train[sample].tokens)
        assert np.array_equal(small.train[sample].cu_seqlens, old.train[sample].cu_seqlens)


def test_the_order_of_blocks_is_pinned(prefix, small_groups):
    """Edges and tokens of the first samples do not change between versions."""
    packs = [open_data(prefix, order="blocks").train[sample] for sample in range(4)]
    assert [int((pack.tokens * np.arange(1, 33)).sum()) for pack in packs] == [
        7498,
        10162,
        7739,
        8120,
    ]
    assert [pack.cu_seqlens.tolist() for pack in packs[1:3]] == [[0, 6, 30, 32], [0, 20, 32]]


def test_no_tokens_and_a_changed_index(small_groups):
    with pytest.raises(InputError, match="found no tokens in 4 documents"):
        BlockStream(Identity(np.array([5] * 4 + [0] * 4)), DocumentBlocks(4, np.array([1])), seed=0)
    corpus = Identity(np.arange(1, 101))
    stream = BlockStream(corpus, DocumentBlocks(4, np.arange(25)), seed=0)
    corpus.offsets = corpus.offsets * 2
    with pytest.raises(InputError, match="has changed since it was opened"):
        stream.read(0, 8)


class Formula:
    """Ten billion documents of about 500 tokens, with a formula as their index."""

    def __len__(self):
        return 10_000_000_000

    def document_offsets(self, documents):
        return documents * 500 + documents * 7919 % 499

    def block_offsets(self, size):
        return self.document_offsets(np.minimum(np.arange(0, len(self) + size, size), len(self)))

    def read_ranges(self, documents, begins, counts):
        return np.repeat(documents, counts)


def test_memory_does_not_grow_with_the_corpus():
    corpus = Formula()
    size = choose_block_size(len(corpus))
    packs = ConcatPackedDataset(
        corpus, DocumentBlocks(size, np.arange(-(-len(corpus) // size))), 2048, seed=1
    )
    assert packs.samples_before_repeat == -(-corpus.document_offsets(len(corpus)) // 2048)
    held = [value.nbytes for value in vars(packs.stream).values() if isinstance(value, np.ndarray)]
    assert sum(held) < 10_000_000
    assert len(packs[packs.samples_before_repeat - 1].tokens) == len(packs[0].tokens) == 2048


def test_batches_of_a_sorted_corpus_vary_little_more_than_random_ones():
    """The share of one half of the documents varies little between batches.

    A batch has 64 packs of four documents, a group 16 blocks. Documents of one block are alike, so
    that the variance is 1 + 3 / 16 times that of independent documents: two documents of a pack
    share their block once in 16 times.
    """
    documents = 1 << 18
    packs = ConcatPackedDataset(
        Identity(np.full(documents, 8)),
        DocumentBlocks(256, np.arange(documents // 256)),
        32,
        seed=1,
    )
    tokens = np.stack([packs[sample].tokens[::8] for sample in range(64 * 100)])
    fractions = (tokens < documents // 2).reshape(100, -1).mean(1)
    assert fractions.var() / (0.25 / (4 * 64)) == pytest.approx(
        1 + 3 / 16, abs=4 * np.sqrt(2 / 100)
    )
    assert abs(np.corrcoef(tokens[:-1, 0], tokens[1:, 0])[0, 1]) < 0.05  # one pack and the next


def test_the_kernel_reads_no_pages_around_those_of_a_large_corpus(prefix, small_groups):
    for order in ("documents", "blocks"):
        data = open_data(prefix, order=order)
        mapped = Path("/proc/self/smaps").read_text().split(f"{prefix}.bin")[1]
        flags = mapped.split("VmFlags:")[1].splitlines()[0].split()
        assert ("rr" in flags) == (order == "blocks")
        del data
