"""The expected documents of a pack against packs that are really cut."""

import numpy as np
import pytest
from corpus_helpers import write_corpus

from megaenc.data.indexed.corpus import Corpus
from megaenc.data.packing.packed_dataset import SHORTEST_CHUNK, mean_squared_chunk_lengths
from megaenc.estimate.length_model import build_length_model, read_vocab_size
from megaenc.study.manifest.expand import expected_length_model
from megaenc.study.manifest.pretrain_args import build_run_config
from megaenc.training.config_groups import DataConfig


@pytest.mark.parametrize("lengths", [(1,), (65,), (10, 64, 65, 300)])
def test_squares_and_pieces_are_those_of_documents_cut_into_packs(lengths):
    drawn = np.random.default_rng(0).choice(lengths, 20_000)
    ends = np.cumsum(drawn)
    edges = np.unique(np.concatenate([ends, np.arange(0, ends[-1], 64)]))
    pieces = np.diff(np.concatenate([[0], edges[edges > 0]]))
    packs = ends[-1] / 64
    results = build_length_model(DataConfig(seq_length=64), lengths)
    assert results.squares == pytest.approx((pieces**2).sum() / packs, rel=0.02)
    assert results.pieces == pytest.approx(len(pieces) / packs, rel=0.02)
    assert results.local_pairs == 0
    for window in (1, 20, 63):
        pairs = sum(
            (pieces - distance).clip(0).sum() * (1 + (distance > 0))
            for distance in range(window + 1)
        )
        assert build_length_model(
            DataConfig(seq_length=64), lengths, window
        ).local_pairs == pytest.approx(pairs / packs, rel=0.02)


def test_random_lengths_are_counted_as_the_study_plan_counts_them():
    flags = build_run_config(
        {"model": "modernbert-base", "packing": "random-length", "seq_length": 2048}
    )
    results = build_length_model(flags.data, (7,), 64)  # what documents are makes no difference
    assert results.squares == pytest.approx(expected_length_model(flags).squares)
    assert results.local_pairs == pytest.approx(expected_length_model(flags).local_pairs)
    assert results.local_pairs == pytest.approx(2048 * 129 - 2 * 64 * 65, rel=0.005)
    assert results.pieces == 2


def test_a_corpus_tells_lengths_and_vocabulary(small_corpus):
    data = DataConfig(data_path=(str(small_corpus.prefix),), seq_length=64)
    lengths = Corpus.open(small_corpus.prefix).document_lengths
    results = build_length_model(data, ())
    assert read_vocab_size(data) == 400
    assert results.pieces == pytest.approx((lengths.mean() + 63) / lengths.mean())
    assert results.special == pytest.approx(64 / lengths.mean())  # one ends each document


def test_corpora_of_a_group_count_by_their_tempered_sizes(tmp_path):
    lengths = {"deu": [40] * 90, "isl": [8] * 50, "code": [100] * 3}
    for name, documents in lengths.items():
        write_corpus(tmp_path / name, [[[1] * length] for length in documents])
    words = ("0.5", str(tmp_path / "*[ul]"), "0.5", str(tmp_path / "code"))
    results = build_length_model(
        DataConfig(data_path=words, seq_length=64, blend_temperature=0.5), ()
    )
    shares = 0.5 * np.array([3600**0.5, 400**0.5]) / (3600**0.5 + 400**0.5)
    pieces = [(mean + 63) / mean for mean in (40, 8, 100)]
    assert results.pieces == pytest.approx(np.dot([*shares, 0.5], pieces))


@pytest.mark.parametrize("path", [("nowhere/*",), ("nowhere/corpus",)])
def test_without_any_word_of_them_each_pack_is_one(path):
    results = build_length_model(DataConfig(seq_length=64, data_path=path), ())
    assert (results.squares, results.pieces) == (64 * 64, 1)


@pytest.mark.parametrize("length", [2 * SHORTEST_CHUNK, 100])
def test_two_chunks_are_cut_anywhere(length):
    cuts = np.arange(SHORTEST_CHUNK, length - SHORTEST_CHUNK + 1)
    assert mean_squared_chunk_lengths(length) == (cuts**2 + (length - cuts) ** 2).mean()
