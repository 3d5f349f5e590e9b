"""Span corruption: T5's algorithm in a loop over documents, exact counts, and every token hidden equally often."""

import itertools

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, random_pack, within

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives import SpanCorruption, check_targets


def cut(total, parts, draws):
    """Lengths of `parts` parts of `total` items, cut before the items 1.. with the smallest draws."""
    cuts = sorted(sorted(range(1, total), key=lambda item: draws[item])[: parts - 1])
    return [after - before for before, after in itertools.pairwise([0, *cuts, total])]


def hidden_positions(objective, pack, randomness):
    length = len(pack.tokens)
    visible_draws, hidden_draws = (randomness.uniforms(name, length).tolist() for name in ("visible parts", "hidden parts"))
    documents = len(pack.edges) - 1
    roundings, rotations = (randomness.uniforms(name, documents) for name in ("rounding", "rotation"))
    chosen = []
    for document, (start, stop) in enumerate(zip(pack.edges[:-1], pack.edges[1:], strict=True)):
        text = [at for at in range(start, stop) if pack.tokens[at] not in SPECIAL]
        hidden = int(len(text) * objective.mask + roundings[document])
        visible = len(text) - hidden
        spans = max(1, min(max(1, round(hidden / objective.span)), hidden, visible))
        pattern = []
        for shown, gone in zip(cut(visible, spans, visible_draws), cut(hidden, spans, hidden_draws), strict=True):
            pattern += [False] * shown + [True] * gone
        visible_draws, hidden_draws = visible_draws[visible:], hidden_draws[hidden:]
        rotation = int(rotations[document] * len(text))
        chosen += [at for place, at in enumerate(text) if pattern[(place + rotation) % len(text)]]
    return chosen


@pytest.mark.parametrize("options", [{}, {"mask": 0.5, "span": 2.0}, {"mask": 0.3, "span": 10.0}, {"mask": 0.9, "span": 20.0}])
def test_targets_are_those_of_a_slow_reference(options):
    objective = SpanCorruption(VOCABULARY, **options)
    for sample in range(60):
        pack, randomness = random_pack(sample), SampleRandomness(3, sample, 2)
        actual = objective.targets(pack, randomness)
        expected = hidden_positions(objective, pack, randomness)
        assert actual.predict_at.tolist() == expected and actual.labels.tolist() == pack.tokens[expected].tolist()
        inputs = pack.tokens.copy()
        inputs[expected] = VOCABULARY.mask_id
        assert np.array_equal(actual.inputs, inputs)
        check_targets(objective, pack, seed=5)


def test_statistics_over_a_million_tokens():
    """Every document has 20 hidden tokens in 7 spans, one of which may pass its end, and every place is equally likely."""
    objective, length = SpanCorruption(VOCABULARY, mask=20 / 128), 128
    edges = np.arange(0, 2048 + 1, length, dtype=np.int32)
    places = np.zeros(length)
    rng = np.random.default_rng(0)
    for sample in range(512):
        pack = Pack(sample, 0, rng.integers(8, VOCABULARY.size, size=2048), edges)
        hidden = np.zeros(2048, dtype=bool)
        hidden[objective.targets(pack, SampleRandomness(0, sample, 0)).predict_at] = True
        hidden = hidden.reshape(-1, length)
        assert (hidden.sum(axis=1) == 20).all()
        spans = (hidden & ~np.roll(hidden, 1, axis=1)).sum(axis=1)
        assert (spans == 7).all()  # 20 / 3, rounded
        places += hidden.sum(axis=0)
    assert all(within(count, 512 * 16, 20 / 128) for count in places)
