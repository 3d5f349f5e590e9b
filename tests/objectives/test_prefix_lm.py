"""Prefix targets against a loop over documents, and prefixes against the uniform distribution."""

import math

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, random_pack, within

from megaenc.counter_rng import SampleRandomness, uniforms
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import Attention, PrefixLanguageModeling


def pack_of(lengths, sample=0):
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Pack(sample, 0, np.arange(edges[-1], dtype=np.int64) % 50, edges)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.25, 0.5), (0.5, 0.5), (0, 0), (1, 1)])
def test_against_a_loop(low, high):
    objective = PrefixLanguageModeling(VOCABULARY, low=low, high=high)
    for sample in range(60):
        pack = random_pack(sample)
        draws = uniforms(3, "prefix", len(pack.edges) - 1, counters=(sample, 2))
        prefixes, expected = [], []
        for document, draw in enumerate(draws):
            start, stop = int(pack.edges[document]), int(pack.edges[document + 1])
            prefix = min(math.floor((low + (high - low) * draw) * (stop - start)), stop - start - 1)
            prefixes.append(prefix)
            rest = range(start + max(prefix, 1), stop)
            expected += [(at - 1, pack.tokens[at]) for at in rest if pack.tokens[at] not in SPECIAL]
        actual = objective.targets(pack, SampleRandomness(3, sample, 2))
        assert actual.prefixes.tolist() == prefixes
        assert list(zip(actual.predict_at, actual.labels, strict=True)) == expected
        assert np.array_equal(actual.inputs, pack.tokens)
        assert actual.prefixes.dtype == actual.predict_at.dtype == actual.labels.dtype == np.int64


def test_special_tokens_are_not_predicted_by_hand():
    """`[CLS] 8 9 [SEP]`, then a chunk of two documents: only text is predicted, the first token never."""
    pack = Pack(0, 0, np.array([7, 8, 9, 0, 10, 0, 7, 11, 0]), np.array([0, 4, 9], dtype=np.int32))
    actual = PrefixLanguageModeling(VOCABULARY, low=0.5, high=0.5).targets(pack, SampleRandomness(0, 0, 0))
    assert actual.prefixes.tolist() == [2, 2]
    assert (actual.predict_at.tolist(), actual.labels.tolist()) == ([1, 6], [9, 11])


def test_without_a_prefix_it_predicts_the_text_that_causal_modelling_predicts():
    from megaenc.objectives import CausalLanguageModeling

    for sample in range(20):
        pack, draws = random_pack(sample), SampleRandomness(0, sample, 0)
        actual = PrefixLanguageModeling(VOCABULARY, high=0).targets(pack, draws)
        expected = CausalLanguageModeling(VOCABULARY).targets(pack, draws)
        assert not actual.prefixes.any()
        is_text = expected.labels != VOCABULARY.eos_id
        assert np.array_equal(actual.inputs, expected.inputs)
        assert np.array_equal(actual.predict_at, expected.predict_at[is_text])
        assert np.array_equal(actual.labels, expected.labels[is_text])


def test_a_document_of_one_token_predicts_nothing():
    actual = PrefixLanguageModeling(VOCABULARY).targets(pack_of([1, 1, 1]), SampleRandomness(0, 0, 0))
    assert actual.prefixes.tolist() == [0, 0, 0] and len(actual.predict_at) == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.25, 0.75)])
def test_prefixes_are_uniform(low, high):
    objective = PrefixLanguageModeling(VOCABULARY, low=low, high=high)
    prefixes = [objective.targets(pack_of([16] * 256, sample), SampleRandomness(0, sample, 0)).prefixes for sample in range(256)]
    histogram = np.bincount(np.concatenate(prefixes), minlength=16)
    possible = range(int(low * 16), int(high * 16))
    assert histogram.sum() == histogram[possible].sum() == 65536
    assert all(within(histogram[prefix], 65536, 1 / len(possible)) for prefix in possible)


def test_wrong_options():
    assert PrefixLanguageModeling.attention is Attention.PREFIX == "prefix"
    with pytest.raises(InputError, match=r"prefix_lm: option `low`: found 0.5, expected at most high=0.25"):
        PrefixLanguageModeling(VOCABULARY, low=0.5, high=0.25)
    with pytest.raises(InputError, match=r"prefix_lm: option `high`: found 1.5, expected a number from 0 up to 1"):
        PrefixLanguageModeling(VOCABULARY, high=1.5)
