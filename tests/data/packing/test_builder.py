"""From `--data-path` to packs: blends, held-out text, reports and the order."""

import re
import shutil
from fractions import Fraction

import numpy as np
import pytest
from corpus_helpers import open_data, write_corpus

from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.data.packing.sentence_packing import SentencePackedDataset
from megaenc.errors import InputError


@pytest.fixture
def corpora(tmp_path):
    """Write 100 short documents, 50 longer ones and 20 of several sentences."""
    rng = np.random.default_rng(0)

    def documents(count, length, sentences=1):
        return [
            [rng.integers(2, 32, size=length).tolist() for _ in range(sentences)]
            for _ in range(count)
        ]

    return [
        write_corpus(tmp_path / name, texts)
        for name, texts in {
            "a": documents(100, 9),
            "b": documents(50, 40),
            "c": documents(20, 11, sentences=4),
        }.items()
    ]


def test_one_corpus_is_a_blend_of_one(corpora):
    data = open_data(corpora[0])
    (train,) = data.train.datasets
    (held_out,) = data.held_out.datasets
    assert isinstance(train, ConcatPackedDataset) and isinstance(held_out, ConcatPackedDataset)
    assert train.tokens_per_epoch == 80 * 9 and held_out.tokens_per_epoch == 20 * 9
    assert np.array_equal(data.train[31].tokens, train[31].tokens) and data.train[31].sample == 31
    assert data.fingerprint == data.corpora[0].fingerprint
    assert [(row.packs, row.share, row.epochs) for row in data.corpus_usage(45)] == [
        (45, 1.0, pytest.approx(2.0, abs=0.05))
    ]
    with pytest.raises(
        InputError, match="--split 0,1,0: leaves no text to train on, of 100 documents"
    ):
        open_data(corpora[0], split="0,1,0")


def test_a_blend_keeps_to_its_weights_and_says_how_often_each_corpus_is_read(corpora):
    data = open_data("0.25", corpora[0], "0.75", corpora[1])
    assert data.fractions == (Fraction(1, 4), Fraction(3, 4))
    rows = data.corpus_usage(1000)
    assert [(row.prefix, row.packs) for row in rows] == [(corpora[0], 250), (corpora[1], 750)]
    # 250 packs of 32 tokens out of 80 documents of 9; 750 out of 40 of 40.
    assert [row.epochs for row in rows] == [
        pytest.approx(250 * 32 / 720, rel=0.01),
        pytest.approx(750 * 32 / 1600, rel=0.01),
    ]
    assert open_data(corpora[0], corpora[1]).fractions == (
        Fraction(720, 2320),
        Fraction(1600, 2320),
    )  # by size


def test_held_out_text_does_not_depend_on_packing_or_seed(corpora):
    plain = open_data("1", corpora[0], "2", corpora[1])
    other = open_data("1", corpora[0], "2", corpora[1], packing="random-length", seed=5)
    assert isinstance(other.train.datasets[0], RandomLengthPackedDataset)
    for sample in range(20):
        assert np.array_equal(plain.held_out[sample].tokens, other.held_out[sample].tokens)
        assert np.array_equal(plain.held_out[sample].cu_seqlens, other.held_out[sample].cu_seqlens)
    assert open_data(corpora[0], split="1,0,0").held_out is None


def test_sentences_need_a_corpus_of_sentences(corpora):
    data = open_data(corpora[2], packing="sentences")
    assert isinstance(data.train.datasets[0], SentencePackedDataset)
    # 32 tokens are two sentences of 11 and 10 tokens of a third, whose last token is dropped.
    assert data.corpus_usage(5)[0].dropped == pytest.approx(1 / 33, abs=0.01)
    with pytest.raises(
        InputError,
        match="holds whole documents, expected one that was preprocessed with --split-sentences",
    ):
        open_data(corpora[2], corpora[0], packing="sentences")


def test_a_group_has_its_weight_and_its_corpora_their_tempered_shares(corpora, tmp_path):
    """Held-out text has the same shares, and a small corpus does not end it."""
    pattern = str(tmp_path / "[ab]")
    data = open_data("0.6", pattern, "0.4", corpora[2], temperature=0.5)
    roots = np.sqrt([720, 1600])
    assert np.allclose(list(map(float, data.fractions)), [*(0.6 * roots / roots.sum()), 0.4])
    packs = np.array([row.packs for row in data.corpus_usage(1000)])
    assert np.abs(packs - 1000 * np.array(data.fractions, float)).max() < 2
    assert data.train.sources == data.held_out.sources == (pattern, pattern, corpora[2])
    held_out = data.held_out
    assert held_out.samples == sum(part.samples_before_repeat for part in held_out.datasets)
    assert {held_out[sample].epoch for sample in range(held_out.samples)} == {0}
    for suffix in (".bin", ".idx"):
        shutil.copy(corpora[0] + suffix, tmp_path / f"again{suffix}")
    with pytest.raises(
        InputError, match=r"again has the same text as .*/a, expected each corpus once"
    ):
        open_data(corpora[0], corpora[1], str(tmp_path / "again"))


def test_what_changes_the_order_of_a_blend_changes_its_fingerprint(corpora, tmp_path):
    words = ["0.6", str(tmp_path / "[ab]"), "0.4", corpora[2]]
    options = [{}, {"temperature": 0.5}, {"max_epochs": 2}, {"max_epochs": 3}]
    blends = [open_data(*words, **option) for option in options]
    assert len({blend.fingerprint for blend in blends}) == 4
    assert re.fullmatch(
        "[0-9a-f]{24} of 3 corpora of at most 2 epochs", blends[2].fingerprint
    )  # model cards have its beginning
    one_to_three = open_data("1", corpora[0], "3", corpora[1]).fingerprint
    assert (
        one_to_three
        == open_data("0.25", corpora[0], "0.75", corpora[1], temperature=0.5).fingerprint
    )  # no group
    assert one_to_three != open_data("3", corpora[0], "1", corpora[1]).fingerprint
    assert (
        open_data(corpora[0], max_epochs=2).fingerprint == open_data(corpora[0]).fingerprint
    )  # the same packs
    # A limit of epochs does not change the held-out text.
    assert blends[0].held_out_fingerprint == blends[0].fingerprint == blends[2].held_out_fingerprint
    assert blends[1].held_out_fingerprint != blends[0].held_out_fingerprint
    for sample in range(40):
        assert np.array_equal(blends[0].held_out[sample].tokens, blends[2].held_out[sample].tokens)


def test_no_corpus_is_read_more_often_than_allowed(corpora):
    """Each corpus gives all packs of its first two epochs, whatever its weight."""
    data = open_data("0.2", corpora[0], "0.8", corpora[1], max_epochs=2)
    read = [
        (data.train.corpus_of_sample(sample), data.train[sample].epoch)
        for sample in range(data.train.samples)
    ]
    assert {epoch for _, epoch in read} == {0, 1}
    for index, part in enumerate(data.train_datasets):
        assert sum(corpus == index for corpus, _ in read) == part.first_sample_of_epoch(2)
    assert [row.epochs for row in data.corpus_usage(data.train.samples)] == [2.0] * len(
        data.corpora
    )


def test_the_order_of_a_blend_is_pinned(corpora):
    """Corpus, epoch, edges and tokens of the first samples do not change."""
    train = open_data("0.3", corpora[0], "0.7", corpora[1]).train
    assert [train.corpus_of_sample(sample) for sample in range(10)] == [
        1,
        0,
        1,
        1,
        0,
        1,
        1,
        1,
        0,
        1,
    ]
    assert [int((train[sample].tokens * np.arange(1, 33)).sum()) for sample in range(4)] == [
        7702,
        7864,
        7860,
        8538,
    ]
    cut = open_data("0.3", corpora[0], "0.7", corpora[1], packing="random-length").train
    assert [train[1].cu_seqlens.tolist(), cut[1].cu_seqlens.tolist()] == [
        [0, 9, 18, 27, 32],
        [0, 13, 32],
    ]


def test_more_corpora_than_open_files_are_refused(corpora, monkeypatch):
    monkeypatch.setattr("megaenc.machine.resource.getrlimit", lambda kind: (64, 200))
    with pytest.raises(
        InputError,
        match=r"ulimit -Hn: found a limit of 200 open files, expected [0-9,]+ .* 2 corpora",
    ):
        open_data(*corpora[:2])
