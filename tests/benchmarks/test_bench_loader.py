"""The benchmark of data loading: made-up corpora, and one small run."""

import json

import loader
import numpy as np
import pytest

from megaenc.data.indexed.corpus import Corpus


def test_the_made_up_index_is_one_that_opens(tmp_path):
    lengths = loader.draw_lengths(5000, 100)
    assert lengths.min() >= 1
    assert 80 < lengths.mean() < 120
    loader.write_corpus(tmp_path / "a", lengths, np.full(2500, 2))
    assert np.array_equal(
        Corpus.open(tmp_path / "a").document_lengths, lengths[::2] + lengths[1::2]
    )


@pytest.mark.slow
def test_a_packing_is_measured(tmp_path):
    output = tmp_path / "loader.json"
    flags = [
        "--documents",
        "3000",
        "--tokens",
        "200000",
        "--seq-length",
        "128",
        "--micro-batch-size",
        "2",
        "--rounds",
        "1",
    ]
    flags += ["--seconds", "0.05", "--processes", "1", "--packings", "sentences"]
    loader.main([*flags, "--output", str(output)])
    results = json.loads(output.read_text())
    assert results["index"]["sentences"]["seconds"]["median"] > 0
    reading = results["reading"]["sentences"]
    assert reading["packs_tokens_per_second"]["median"] > 0
    assert reading["micro_batches_tokens_per_second"]["median"] > 0
