import json

import numpy as np
import pytest

from megaenc.bench import loader
from megaenc.data.indexed.corpus import Corpus


def test_the_made_up_index_is_one_that_opens(tmp_path):
    lengths = loader.draw_lengths(5000, 100)
    assert lengths.dtype == np.int32 and lengths.min() >= 1 and 80 < lengths.mean() < 120
    loader.write_corpus(tmp_path / "a", lengths, np.ones(5000, np.int32))
    assert (tmp_path / "a.bin").stat().st_size == 2 * lengths.sum()
    corpus = Corpus.open(tmp_path / "a")
    assert np.array_equal(corpus.document_lengths, lengths)
    loader.write_corpus(tmp_path / "a", lengths, np.full(2500, 2))
    assert np.array_equal(Corpus.open(tmp_path / "a").document_lengths, lengths[::2] + lengths[1::2])


def test_an_index_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_CHUNK", 1000)
    loader.write_index(tmp_path / "a", 2500, 100)
    corpus = Corpus.open(tmp_path / "a")
    assert len(corpus) == 2500 and 80 < corpus.document_lengths.mean() < 120 and corpus.document_lengths.min() >= 1
    assert np.array_equal(corpus.document_offsets(np.arange(2501)), np.cumsum([0, *corpus.document_lengths]))
    assert not np.array_equal(corpus.document_lengths[:1000], corpus.document_lengths[1000:2000])


SMALL = ["--documents", "3000", "--tokens", "200000", "--seq-length", "128", "--micro-batch-size", "2", "--rounds", "1"]
SMALL += ["--seconds", "0.05"]


@pytest.mark.slow
def test_every_packing_is_measured(tmp_path):
    output = tmp_path / "loader.json"
    loader.main([*SMALL, "--processes", "1", "--output", str(output)])
    results = json.loads(output.read_text())
    for packing in loader.PACKINGS:
        assert results["index"][packing]["seconds"]["median"] > 0 and results["index"][packing]["peak_gib"]["median"] > 0
        reading = results["reading"][packing]
        assert reading["packs_tokens_per_second"]["median"] > 0 and reading["micro_batches_tokens_per_second"]["median"] > 0
    assert "3,000 documents" in loader.format_table(results)


def test_documents_have_the_mean_length_that_is_asked_for(tmp_path):
    for mean in (50, 400):
        (folder := tmp_path / str(mean)).mkdir()
        settings = loader.LoaderBenchConfig(documents=20_000, tokens=20_000 * mean, mean_length=mean)
        for prefix in loader._write_corpora(settings, folder).values():
            lengths = Corpus.open(prefix).document_lengths
            assert len(lengths) == 20_000 and abs(lengths.mean() / mean - 1) < 0.05


@pytest.mark.slow
def test_processes_that_share_the_index_are_measured_together(tmp_path):
    output = tmp_path / "loader.json"
    loader.main([*SMALL, "--processes", "2", "--packings", "concat", "--output", str(output)])
    results = json.loads(output.read_text())
    together, single = results["index_together"]["concat"], results["index"]["concat"]
    assert together["seconds"]["median"] > 0
    assert together["gib"]["median"] < 2 * single["peak_gib"]["median"]  # libraries are in memory once, at the least
    assert "of 2 processes" in loader.format_table(results)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--documents", "0"], "--documents 0: expected more than 0"),
        (["--processes", "100000"], "--processes: found 100,000, expected at most "),
        (["--packings", "padded"], "--packings padded: expected some of concat, random-length, sentences"),
        (["--packings", "random-length", "--seq-length", "20", "--documents", "100", "--tokens", "5000"], "--seq-length 20"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, refusal, flags, message):
    assert message in refusal(loader.main, [*flags, "--output", tmp_path / "loader.json"])
