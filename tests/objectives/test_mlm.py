"""Masks against a loop over positions, and against the binomial distribution over a million tokens."""

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, within

from megaenc.counter_rng import SampleRandomness, uniforms
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives import Attention, MaskedLanguageModeling

BERT = {"mask": 0.15, "random": 0.1, "keep": 0.1}


def make_pack(sample, length, tokens=None):
    if tokens is None:
        tokens = np.random.default_rng(sample).integers(0, VOCABULARY.size, size=length)
    return Pack(sample, 0, np.asarray(tokens, dtype=np.int64), np.array([0, length], dtype=np.int32))


@pytest.mark.parametrize(
    "options", [{}, {"mask": 1.0}, BERT, {"mask": 0.5, "random": 1.0}, {"mask": 0.5, "random": 0.3, "keep": 0.7}]
)
def test_against_a_loop(options):
    objective = MaskedLanguageModeling(VOCABULARY, **options)
    ordinary = [token for token in range(VOCABULARY.size) if token not in SPECIAL]
    for sample in range(20):
        pack = make_pack(sample, 64)
        draws = {purpose: uniforms(3, purpose, 64, counters=(sample, 2)) for purpose in ("mask", "fate", "random token")}
        inputs, predict_at, labels = [], [], []
        for place, token in enumerate(pack.tokens.tolist()):
            if token in SPECIAL or draws["mask"][place] >= objective.mask:
                inputs.append(token)
                continue
            predict_at.append(place)
            labels.append(token)
            if draws["fate"][place] < objective.random:
                inputs.append(ordinary[int(draws["random token"][place] * len(ordinary))])
            else:
                inputs.append(token if draws["fate"][place] < objective.random + objective.keep else VOCABULARY.mask_id)
        before = pack.tokens.copy()
        actual = objective.targets(pack, SampleRandomness(3, sample, 2))
        assert actual.inputs.tolist() == inputs
        assert actual.predict_at.tolist() == predict_at
        assert actual.labels.tolist() == labels
        assert actual.inputs.dtype == actual.predict_at.dtype == actual.labels.dtype == np.int64
        assert np.array_equal(pack.tokens, before)


@pytest.mark.parametrize("options", [{"mask": 0.4}, {"mask": 0.2}, BERT])
def test_statistics_over_a_million_tokens(options):
    objective = MaskedLanguageModeling(VOCABULARY, **options)
    packs = [make_pack(sample, 2048) for sample in range(512)]
    all_targets = [objective.targets(pack, SampleRandomness(0, pack.sample, 0)) for pack in packs]
    tokens = np.concatenate([pack.tokens for pack in packs])
    inputs = np.concatenate([actual.inputs for actual in all_targets])
    chosen = np.concatenate([np.isin(np.arange(2048), actual.predict_at) for actual in all_targets])
    ordinary = ~np.isin(tokens, SPECIAL)
    assert not (chosen & ~ordinary).any()
    assert within(chosen.sum(), ordinary.sum(), objective.mask)
    # Independent: neighbours are chosen together as often as chance has it, and both halves of the packs alike.
    pairs = ordinary[0::2] & ordinary[1::2]
    assert within((chosen[0::2] & chosen[1::2]).sum(), pairs.sum(), objective.mask**2)
    by_half = chosen.reshape(512, 2, 1024).sum(axis=(0, 2)), ordinary.reshape(512, 2, 1024).sum(axis=(0, 2))
    assert all(within(hits, trials, objective.mask) for hits, trials in zip(*by_half, strict=True))

    count, labels, replacements = chosen.sum(), tokens[chosen], inputs[chosen]
    assert np.array_equal(inputs[~chosen], tokens[~chosen])
    assert not np.isin(replacements[replacements != VOCABULARY.mask_id], SPECIAL).any()
    if objective.random:
        assert within((replacements == VOCABULARY.mask_id).sum(), count, 1 - objective.random - objective.keep)
        replaced = (replacements != VOCABULARY.mask_id) & (replacements != labels)
        assert within(replaced.sum(), count, objective.random * 46 / 47)  # one in 47 draws the token that was there
        histogram = np.bincount(replacements[replaced], minlength=VOCABULARY.size)[~np.isin(np.arange(VOCABULARY.size), SPECIAL)]
        assert all(within(hits, replaced.sum(), 1 / 47) for hits in histogram)
    else:
        assert (replacements == VOCABULARY.mask_id).all()


def test_masks_differ_by_sample_epoch_and_seed_alone():
    objective, pack = MaskedLanguageModeling(VOCABULARY), make_pack(0, 512)
    masks = {
        key: objective.targets(pack, SampleRandomness(*key)).predict_at.tobytes()
        for key in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]
    }
    assert len(set(masks.values())) == 4
    assert objective.targets(pack, SampleRandomness(0, 0, 0)).predict_at.tobytes() == masks[0, 0, 0]


def test_pack_without_targets():
    actual = MaskedLanguageModeling(VOCABULARY).targets(make_pack(0, 6, [0, 1, 7, 0, 1, 7]), SampleRandomness(0, 0, 0))
    assert actual.inputs.tolist() == [0, 1, 7, 0, 1, 7]
    assert actual.predict_at.shape == actual.labels.shape == (0,)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mask": 0}, "option `mask`: found 0, expected a number above 0 up to 1"),
        ({"mask": 1.5}, "option `mask`: found 1.5, expected"),
        ({"mask": float("nan")}, "option `mask`: found nan, expected"),
        ({"mask": "0.3"}, "option `mask`: found 0.3, expected a number"),
        ({"mask": True}, "option `mask`: found true, expected a number"),
        ({"random": -0.1}, "option `random`: found -0.1, expected a number from 0 up to 1"),
        ({"random": 0.7, "keep": 0.4}, r"option `keep`: found random \+ keep = 1.1, expected at most 1"),
    ],
)
def test_wrong_options(options, complaint):
    with pytest.raises(InputError, match=f"mlm: {complaint}"):
        MaskedLanguageModeling(VOCABULARY, **options)


def test_options_from_a_schedule():
    assert MaskedLanguageModeling.from_texts(VOCABULARY, {"mask": "1", "keep": ".5"}).describe() == "mlm(mask=1.0,keep=0.5)"
    with pytest.raises(
        InputError, match="mlm: option `masks`: unknown, expected mask, random, keep, span, unit; did you mean `mask`"
    ):
        MaskedLanguageModeling.from_texts(VOCABULARY, {"masks": "0.3"})


def test_needs_a_mask_token():
    assert MaskedLanguageModeling.attention is Attention.BIDIRECTIONAL == "bidirectional"
    with pytest.raises(InputError, match=r"mlm: the tokenizer \(ffffffffffff\) has no mask token"):
        MaskedLanguageModeling(Vocabulary(size=50, eos_id=0, mask_id=None, special_ids=(0,), fingerprint="f" * 64))
