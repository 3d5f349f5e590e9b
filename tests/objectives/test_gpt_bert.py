"""GPT-BERT against `clm` and `mntp`.

Causal documents are as under `clm` without ends, all others as under `mntp`, each kind with the same weight per token.
"""

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, random_pack, within

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives import GPTBERT, CausalLanguageModeling, MaskedNextTokenPrediction, check_targets


def by_position(targets):
    return dict(zip(targets.predict_at.tolist(), targets.labels.tolist(), strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": 0.5, "mask": 0.3}, {"causal": 0.5, "mask": 0.2, "span": 3.0, "keep": 0.5}])
def test_targets_are_those_of_a_slow_reference(options):
    objective = GPTBERT(VOCABULARY, **options)
    masking = {name: value for name, value in options.items() if name != "causal"}
    for sample in range(60):
        pack, randomness = random_pack(sample), SampleRandomness(3, sample, 2)
        clm = CausalLanguageModeling(VOCABULARY).targets(pack, randomness)
        mntp = MaskedNextTokenPrediction(VOCABULARY, **masking).targets(pack, randomness)
        eligible = MaskedNextTokenPrediction(VOCABULARY).eligible(pack)
        draws = randomness.uniforms("causal", len(pack.edges) - 1)
        inputs, predicted, weights, prefixes, count = [], {}, [], [], 0
        for document, (start, stop) in enumerate(zip(pack.edges[:-1].tolist(), pack.edges[1:].tolist(), strict=True)):
            is_causal = draws[document] < objective.causal
            source, weight = (clm, 1.0) if is_causal else (mntp, 1 / objective.mask)
            inputs += source.inputs[start:stop].tolist()
            chosen = {at: label for at, label in by_position(source).items() if start <= at < stop and label not in SPECIAL}
            predicted |= chosen
            weights += [np.float32(weight)] * len(chosen)
            prefixes.append(0 if is_causal else stop - start)
            count += len(chosen) if is_causal else int(eligible[start:stop].sum())
        actual = objective.targets(pack, randomness)
        assert actual.inputs.tolist() == inputs and by_position(actual) == predicted
        assert actual.weights.tolist() == weights and actual.prefixes.tolist() == prefixes and actual.count == count
        check_targets(objective, pack, seed=5)


def test_special_tokens_of_causal_documents_by_hand():
    """`[CLS] 8 9 [SEP]`, then a chunk of two documents: only text is predicted and counted, the first token never."""
    pack = Pack(0, 0, np.array([7, 8, 9, 0, 10, 0, 7, 11, 0]), np.array([0, 4, 9], dtype=np.int32))
    actual = GPTBERT(VOCABULARY, causal=1.0).targets(pack, SampleRandomness(0, 0, 0))
    assert (actual.predict_at.tolist(), actual.labels.tolist()) == ([0, 1, 6], [8, 9, 11])
    assert actual.weights.tolist() == [1.0, 1.0, 1.0]
    assert actual.count == 3


@pytest.mark.parametrize(("causal", "kind"), [(1.0, CausalLanguageModeling), (0.0, MaskedNextTokenPrediction)])
def test_the_ends_are_its_two_parts(causal, kind):
    for sample in range(20):
        pack, randomness = random_pack(sample), SampleRandomness(0, sample, 0)
        actual, expected = (
            GPTBERT(VOCABULARY, causal=causal).targets(pack, randomness),
            kind(VOCABULARY).targets(pack, randomness),
        )
        is_text = ~np.isin(expected.labels, SPECIAL)
        assert np.array_equal(actual.inputs, expected.inputs)
        assert np.array_equal(actual.predict_at, expected.predict_at[is_text])
        assert np.array_equal(actual.labels, expected.labels[is_text])


def test_statistics_over_a_million_tokens():
    """A tenth of the documents is causal, three tenths of the tokens of all others are hidden, and weights have the mean 1."""
    objective, length = GPTBERT(VOCABULARY, causal=0.1, mask=0.3), 32
    edges = np.arange(0, 2048 + 1, length, dtype=np.int32)
    rng = np.random.default_rng(0)
    causal, hidden, weights, counts = 0, 0, 0.0, 0
    for sample in range(512):
        pack = Pack(sample, 0, rng.integers(8, VOCABULARY.size, size=2048), edges)
        actual = objective.targets(pack, SampleRandomness(0, sample, 0))
        is_causal = actual.prefixes == 0
        causal += is_causal.sum()
        hidden += (~is_causal)[actual.predict_at // length].sum()
        weights, counts = weights + actual.weights.sum(dtype=np.float64), counts + actual.count
    documents = 512 * 64
    assert within(causal, documents, 0.1)
    assert within(hidden, (documents - causal) * (length - 1), 0.3)
    assert abs(weights / counts - 1) < 4.5 * np.sqrt(0.9 * 0.7 / 0.3 / counts)
