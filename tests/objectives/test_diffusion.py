"""Masked diffusion: a ratio for each document, the inverse of it as weight, and a divisor of all tokens that are not special."""

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, random_pack, within

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import MaskedDiffusion, check_targets


@pytest.mark.parametrize("options", [{}, {"low": 0.3, "high": 0.8}, {"low": 0.5, "high": 0.5}])
def test_targets_are_those_of_a_slow_reference(options):
    objective = MaskedDiffusion(VOCABULARY, **options)
    for sample in range(60):
        pack, randomness = random_pack(sample), SampleRandomness(3, sample, 2)
        ratios, draws = randomness.uniforms("ratio", len(pack.edges) - 1), randomness.uniforms("mask", len(pack.tokens))
        inputs, predict_at, weights, count = pack.tokens.tolist(), [], [], 0
        for document, (start, stop) in enumerate(zip(pack.edges[:-1], pack.edges[1:], strict=True)):
            ratio = objective.low + (objective.high - objective.low) * ratios[document]
            for at in range(start, stop):
                if pack.tokens[at] not in SPECIAL:
                    count += 1
                    if draws[at] < ratio:
                        inputs[at] = VOCABULARY.mask_id
                        predict_at.append(at)
                        weights.append(np.float32(1 / ratio))
        actual = objective.targets(pack, randomness)
        assert actual.inputs.tolist() == inputs and actual.predict_at.tolist() == predict_at
        assert actual.labels.tolist() == pack.tokens[predict_at].tolist()
        assert actual.weights.dtype == np.float32 and actual.weights.tolist() == weights
        assert actual.count == actual.loss_count == count
        check_targets(objective, pack, seed=5)


def test_statistics_over_a_million_tokens():
    """Ratios are uniform, a token is hidden with its document's ratio, and the weights of a token have the mean 1."""
    objective, length = MaskedDiffusion(VOCABULARY, low=0.05), 64
    edges = np.arange(0, 2048 + 1, length, dtype=np.int32)
    rng = np.random.default_rng(0)
    hidden, ratios, weight_sums = [], [], []
    for sample in range(512):
        pack = Pack(sample, 0, rng.integers(8, VOCABULARY.size, size=2048), edges)
        randomness = SampleRandomness(0, sample, 0)
        actual = objective.targets(pack, randomness)
        hidden.append(np.bincount(actual.predict_at // length, minlength=len(edges) - 1))
        ratios.append(0.05 + 0.95 * randomness.uniforms("ratio", len(edges) - 1))
        weight_sums.append(actual.weights.sum(dtype=np.float64))
        assert actual.count == 2048
    hidden, ratios = np.concatenate(hidden), np.concatenate(ratios)
    for low in np.arange(0.05, 1, 0.19):
        inside = (ratios >= low) & (ratios < low + 0.19)
        assert within(inside.sum(), len(ratios), 0.2)
        assert within(hidden[inside].sum(), inside.sum() * length, ratios[inside].mean())
    # The variance of a token's weight is E[1/t] - 1, with E[1/t] = ln(1 / low) / (1 - low).
    deviation = np.sqrt((np.log(1 / 0.05) / 0.95 - 1) / 2**20)
    assert abs(sum(weight_sums) / 2**20 - 1) < 4.5 * deviation


def test_options_that_leave_no_ratio_are_refused():
    with pytest.raises(InputError, match=r"option `low`: found 0\.5 with high=0\.2, expected at most as much"):
        MaskedDiffusion(VOCABULARY, low=0.5, high=0.2)
    with pytest.raises(InputError, match="option `low`: found 0, expected a number above 0 up to 1"):
        MaskedDiffusion(VOCABULARY, low=0)
