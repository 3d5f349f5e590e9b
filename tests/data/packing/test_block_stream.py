"""Streams of shuffled blocks against a walk, document by document; their order counted; and packs of them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpus_helpers import VOCABULARY

from megaenc import counter_rng
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.packing import block_stream, builder
from megaenc.data.packing.block_stream import BlockStream, DocumentBlocks, choose_block_size
from megaenc.data.packing.builder import RunData
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.data.packing.token_stream import DocumentStream
from megaenc.errors import InputError


@pytest.fixture
def small_groups(monkeypatch):
    """Every corpus of more than 64 documents is shuffled by blocks of four or more, in groups of 16 documents."""
    monkeypatch.setattr(builder, "MOST_SHUFFLED", 64)
    monkeypatch.setattr(block_stream, "MOST_SHUFFLED", 64)
    monkeypatch.setattr(block_stream, "_GROUP_DOCUMENTS", 16)
    monkeypatch.setattr(block_stream, "_MOST_BLOCKS", 50)


def write(prefix, counts, lengths):
    """Documents of `counts` sequences of `lengths` tokens each, random ids of which no two neighbours are equal."""
    tokens = np.cumsum(np.random.default_rng(1).integers(1, 29, int(lengths.sum()))) % 30 + 2
    writer = IndexedWriter(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"), "uint16")
    writer.add_documents(tokens, lengths.astype(np.int32), counts)
    writer.finish()
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    """Of 203 documents, some empty; the last of 51 blocks of four has three."""
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 4, 203)
    counts[40:44] = 0  # an empty block
    return write(tmp_path / "a", counts, draw.integers(1, 40, counts.sum()))


class Identity:
    """Documents whose tokens are their numbers, in memory and not on disk."""

    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self):
        return len(self.offsets) - 1

    def block_offsets(self, size):
        return np.append(self.offsets[:-1:size], self.offsets[-1])

    def document_offsets(self, documents):
        return self.offsets[documents]

    def read_ranges(self, documents, begins, counts):
        assert (self.offsets[documents] <= begins).all() and (begins + counts <= self.offsets[documents + 1]).all()
        return np.repeat(documents, counts)


def walk(corpus, blocks, seed, epoch, per_group):
    """The documents with tokens of `epoch`, as the order is described: blocks, groups of blocks, documents of a group."""
    lengths = corpus.document_lengths
    with_text = [[d for d in range(b * blocks.size, min((b + 1) * blocks.size, len(lengths)))] for b in blocks.numbers]
    with_text = [[d for d in block if lengths[d]] for block in with_text if sum(lengths[d] for d in block)]
    order = [with_text[place] for place in counter_rng.permutation(seed, "blocks", len(with_text), counters=(epoch,))]
    for group in range(-(-len(order) // per_group)):
        documents = [d for block in order[group * per_group : (group + 1) * per_group] for d in block]
        for place in counter_rng.permutation(seed, "documents", len(documents), counters=(epoch, group)):
            yield documents[place]


@pytest.mark.parametrize("numbers", [np.arange(51), np.arange(0, 51, 3), np.array([10, 50])], ids=["all", "third", "two"])
def test_the_stream_is_the_walk_at_every_position(prefix, small_groups, numbers):
    corpus, blocks = Corpus.open(prefix), DocumentBlocks(4, numbers)
    stream, starts = BlockStream(corpus, blocks, seed=3), corpus._document_bounds[0]
    tokens, edges, documents = [], [0], []
    for epoch in range(3):
        order = list(walk(corpus, blocks, 3, epoch, per_group=4))
        assert stream.epoch_documents(epoch).tolist() == order
        documents.append(order)
        for document in order:
            tokens += corpus._tokens[starts[document] : starts[document + 1]].tolist()
            edges.append(len(tokens))
        assert len(tokens) == (epoch + 1) * stream.tokens_per_epoch
    assert sorted(documents[0]) == sorted(documents[1])
    assert documents[0] != documents[1] or len(documents[0]) < 3
    for count in (1, 64, 700):
        for start in np.random.default_rng(2).permutation(len(tokens) - count)[:150].tolist():
            actual, actual_edges = stream.read(start, count)
            assert actual.dtype == np.int64 and actual_edges.dtype == np.int32
            assert actual.tolist() == tokens[start : start + count]
            inner = [edge - start for edge in edges if start < edge < start + count]
            assert actual_edges.tolist() == [0, *inner, count]


def test_every_document_comes_once_an_epoch_and_its_order_is_new():
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 9, 30_000)
    stream = BlockStream(Identity(lengths), DocumentBlocks(8, np.arange(30_000 // 8)), seed=1)
    orders = [stream.epoch_documents(epoch) for epoch in range(2)]
    for epoch, order in enumerate(orders):
        assert np.array_equal(np.sort(order), np.flatnonzero(lengths))
        tokens, _ = stream.read(epoch * stream.tokens_per_epoch, stream.tokens_per_epoch)
        assert np.array_equal(tokens, np.repeat(order, lengths[order]))
    assert np.mean(orders[0] == orders[1]) < 0.001
    other = BlockStream(Identity(lengths), DocumentBlocks(8, np.arange(30_000 // 8)), seed=2).epoch_documents(0)
    assert np.mean(orders[0] == other) < 0.001


def test_places_of_documents_are_uniform():
    """Chi-square of (document, tenth of the epoch in which it comes) over many epochs; all documents have one token."""
    documents, epochs = 16_384, 400
    stream = BlockStream(Identity(np.ones(documents, np.int64)), DocumentBlocks(16, np.arange(documents // 16)), seed=5)
    followed = np.arange(0, documents, 336)  # first documents of different blocks
    places = np.empty((epochs, documents), dtype=np.int64)
    for epoch in range(epochs):
        places[epoch, stream.epoch_documents(epoch)] = np.arange(documents)
    counts = np.stack([np.bincount(column * 10 // documents, minlength=10) for column in places[:, followed].T])
    expected = epochs / 10
    freedom = 9 * len(followed)
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)
    # Neighbours in the corpus come in one group of 4,096, elsewhere independently.
    distances = np.abs(places[:, followed + 1] - places[:, followed]).ravel()
    assert distances.max() < 4096
    assert distances.mean() == pytest.approx(4096 / 3, rel=0.02)  # of two places drawn at random
    assert np.mean(distances == 1) < 5 * 2 / 4096


@pytest.mark.parametrize("packing", [ConcatPackedDataset, RandomLengthPackedDataset, SentencePackedDataset])
def test_packs_of_blocks(prefix, small_groups, packing):
    """Each token once an epoch (sentences: at most once), and a pack depends on its number only."""
    corpus, blocks = Corpus.open(prefix), DocumentBlocks(4, np.arange(1, 51, 2))
    corpus.read_ranges = lambda documents, begins, counts: np.concatenate(  # offsets for tokens
        [np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    )
    packs, again = (packing(corpus, blocks, 24, 7) for _ in range(2))
    count = packs.first_sample_of_epoch(2)
    read = [packs[sample] for sample in range(count)]
    for sample in np.random.default_rng(0).permutation(count).tolist():
        pack = again[sample]
        assert np.array_equal(pack.tokens, read[sample].tokens) and np.array_equal(pack.edges, read[sample].edges)
    used = [d for number in blocks.numbers for d in range(4 * number, min(4 * number + 4, 203))]
    starts = corpus._document_bounds[0]
    expected = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in used])
    tokens, counts = np.unique(np.concatenate([pack.tokens for pack in read]), return_counts=True)
    assert np.isin(tokens, expected).all() and counts.max() <= 3  # the last pack reaches into the third epoch
    if packing is not SentencePackedDataset:
        assert np.array_equal(tokens, np.sort(expected)) and counts.min() == 2 and counts.sum() == 24 * count
    else:
        sentences = np.cumsum(corpus.sequence_lengths) - corpus.sequence_lengths
        assert all(pack.tokens[0] in sentences for pack in read) and 0 < packs.dropped < 0.5


def test_many_packs_are_permuted_without_holding_their_order(small_groups):
    stream = BlockStream(Identity(np.full(400, 32)), DocumentBlocks(4, np.arange(100)), seed=1)
    assert np.array_equal(np.sort(stream.permute_packs(64, 0)), np.arange(64))
    order = stream.permute_packs(65, 0)
    assert isinstance(order, counter_rng.KeyedPermutation) and sorted(order[place] for place in range(65)) == list(range(65))
    packs = ConcatPackedDataset(Identity(np.full(400, 32)), DocumentBlocks(4, np.arange(100)), 32, 1)
    first, second = (np.array([packs[sample].tokens[0] for sample in range(400 * epoch, 400 * epoch + 400)]) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(400)) and (first != second).any()


@pytest.mark.parametrize(
    ("documents", "size"), [(1, 1), (1 << 19, 1), ((1 << 19) + 1, 2), (1_000_001, 2), (100_000_000, 256), (1_500_000_000, 4096)]
)
def test_a_corpus_has_at_most_half_a_million_blocks(documents, size):
    assert choose_block_size(documents) == size


def open_data(*data_path, split="80,20,0", packing="concat", order="blocks", seed=1):
    return RunData.open(data_path, VOCABULARY, split=split, packing=packing, seq_length=32, seed=seed, order=order)


def test_a_split_by_blocks_holds_every_document_once(prefix, small_groups):
    parts = builder.split_corpus(Corpus.open(prefix), (70, 20, 10), "blocks")
    assert {part.size for part in parts} == {8} and [len(part.numbers) for part in parts] == [18, 5, 3]
    assert sorted(np.concatenate([part.numbers for part in parts])) == list(range(26))
    data = open_data(prefix)
    assert data.has_blocks and isinstance(data.held_out.datasets[0].stream, BlockStream)
    [train], [held_out] = data.train_datasets, data.held_out.datasets
    total = int(data.corpora[0].document_lengths.sum())
    assert train.tokens_per_epoch + held_out.tokens_per_epoch == total and 0.6 < train.tokens_per_epoch / total < 0.9
    assert not set(train.stream.epoch_documents(0)) & set(held_out.stream.epoch_documents(0))
    other = open_data(prefix, seed=2, packing="random-length")
    assert np.array_equal(other.held_out[3].tokens, data.held_out[3].tokens)
    assert not np.array_equal(other.train[3].tokens, data.train[3].tokens)


def test_a_small_corpus_and_an_old_run_shuffle_documents(prefix, monkeypatch):
    small, old = open_data(prefix), open_data(prefix, order="documents")
    for data in (small, old):
        assert not data.has_blocks and isinstance(data.train_datasets[0].stream, DocumentStream)
    for sample in range(2 * small.train.samples_before_repeat):
        assert np.array_equal(small.train[sample].tokens, old.train[sample].tokens)
    monkeypatch.setattr(builder, "MOST_SHUFFLED", 64)
    blocks, again = open_data(prefix), open_data(prefix, order="documents")
    assert blocks.has_blocks and not again.has_blocks
    assert any(not np.array_equal(blocks.train[sample].tokens, old.train[sample].tokens) for sample in range(3))
    for sample in range(2 * small.train.samples_before_repeat):
        assert np.array_equal(again.train[sample].tokens, old.train[sample].tokens)
        assert np.array_equal(again.train[sample].edges, old.train[sample].edges)


def test_a_corpus_keeps_its_order_in_a_blend(prefix, small_groups, tmp_path):
    other = write(tmp_path / "b", np.ones(300, int), np.random.default_rng(3).integers(1, 30, 300))
    alone, blend = open_data(prefix).train, open_data("0.3", prefix, "0.7", other).train
    turns = [blend.corpus_of_sample(sample) for sample in range(200)]
    assert turns.count(0) == 60
    for number, sample in enumerate(np.flatnonzero(np.array(turns) == 0).tolist()):
        assert np.array_equal(blend[sample].tokens, alone[number].tokens)
        assert np.array_equal(blend[sample].edges, alone[number].edges)


def test_the_order_of_blocks_is_pinned(prefix, small_groups):
    """Edges and tokens of the first samples: a change here would silently give every run other data."""
    packs = [open_data(prefix).train[sample] for sample in range(4)]
    assert [int((pack.tokens * np.arange(1, 33)).sum()) for pack in packs] == [7498, 10162, 7739, 8120]
    assert [pack.edges.tolist() for pack in packs[1:3]] == [[0, 6, 30, 32], [0, 20, 32]]


@pytest.mark.parametrize("packing", ["concat", "sentences"])
def test_processes_of_a_machine_read_the_same(prefix, small_groups, packing, tmp_path, monkeypatch):
    unshared = open_data(prefix, packing=packing).train
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("megaenc.data.indexed.corpus.LEAST_SHARED", 0)
    monkeypatch.setattr("megaenc.data.packing.shared_memory.tempfile.tempdir", str(tmp_path))
    shared = [open_data(prefix, packing=packing) for _ in range(2)]
    for data in shared:
        for sample in range(2 * unshared.samples_before_repeat + 3):
            assert np.array_equal(data.train[sample].tokens, unshared[sample].tokens)
    assert not shared[1].corpora[0].block_offsets(8).flags.writeable


def test_no_tokens_and_a_changed_index(small_groups):
    with pytest.raises(InputError, match="found no tokens in 4 documents"):
        BlockStream(Identity(np.array([5] * 4 + [0] * 4)), DocumentBlocks(4, np.array([1])), seed=0)
    corpus = Identity(np.arange(1, 101))
    stream = BlockStream(corpus, DocumentBlocks(4, np.arange(25)), seed=0)
    corpus.offsets = corpus.offsets * 2
    with pytest.raises(InputError, match="has changed since it was opened"):
        stream.read(0, 8)


def test_memory_does_not_grow_with_the_corpus():
    """Of ten billion documents only the groups that are read: a formula stands in for their index."""
    documents = 10_000_000_000

    def offsets(numbers):
        return numbers * 500 + numbers * 7919 % 499

    size = choose_block_size(documents)
    corpus = SimpleNamespace(
        block_offsets=lambda size: offsets(np.minimum(np.arange(0, documents + size, size), documents)),
        document_offsets=offsets,
        read_ranges=lambda documents, begins, counts: np.repeat(documents, counts),
    )
    corpus = type("Formula", (), {"__len__": lambda self: documents, **{k: staticmethod(v) for k, v in vars(corpus).items()}})()
    packs = ConcatPackedDataset(corpus, DocumentBlocks(size, np.arange(-(-documents // size))), 2048, seed=1)
    assert packs.samples_before_repeat == -(-offsets(np.array([documents]))[0] // 2048)
    held = [value.nbytes for value in vars(packs.stream).values() if isinstance(value, np.ndarray)]
    assert sum(held) < 10_000_000
    assert len(packs[packs.samples_before_repeat - 1].tokens) == len(packs[0].tokens) == 2048


def test_batches_of_a_sorted_corpus_vary_little_more_than_random_ones():
    """Share of the first half of the documents in batches of 64 packs of four documents, of 16 blocks a group.

    Documents of one block are alike, so that the variance is 1 + 3 / 16 times that of independent documents: two documents of a
    pack share their block once in 16 times. Neighbours in the corpus meet in a pack three times in 4,096.
    """
    documents, batch = 1 << 18, 64
    packs = ConcatPackedDataset(Identity(np.full(documents, 8)), DocumentBlocks(256, np.arange(documents // 256)), 32, seed=1)
    tokens = np.stack([packs[sample].tokens[::8] for sample in range(batch * 150)])
    shares = (tokens < documents // 2).reshape(150, -1).mean(1)
    ratio = shares.var() / (0.25 / (4 * batch))
    assert ratio == pytest.approx(1 + 3 / 16, abs=4 * np.sqrt(2 / 150))
    ordered = np.sort(tokens, axis=1)
    assert (np.diff(ordered, axis=1) == 1).sum() == pytest.approx(tokens.size * 3 / 4096, rel=0.6)
    assert abs(np.corrcoef(tokens[:-1, 0], tokens[1:, 0])[0, 1]) < 0.05  # one pack and the next


def test_the_kernel_reads_no_pages_around_those_of_a_large_corpus(prefix, small_groups):
    for order, expected in (("documents", {False}), ("blocks", {True})):
        data = open_data(prefix, order=order)
        text = Path("/proc/self/smaps").read_text().split(f"{prefix}.bin")[1:]
        flags = [part.split("VmFlags:")[1].splitlines()[0].split() for part in text]
        assert {"rr" in words for words in flags[:1]} == expected, flags
        del data
