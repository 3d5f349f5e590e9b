"""Hidden tokens, one by one and in spans, for both objectives that hide: against a walk along the tokens, and in numbers."""

import hashlib
import math

import numpy as np
import pytest
from objective_helpers import MASK, SPECIAL, VOCABULARY, places_in_document, random_pack, within

from megaenc.counter_rng import SampleRandomness, uniforms
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import MaskedLanguageModeling, MaskedNextTokenPrediction

BERT = {"mask": 0.15, "random": 0.1, "keep": 0.1}
BOTH = (MaskedLanguageModeling, MaskedNextTokenPrediction)


def walk(kind, pack, draws, mask, span):
    """The places that are hidden, token by token: what happened to the token before decides on the next one's chance."""
    hidden, before, fresh = [], False, True
    for at, (token, place) in enumerate(zip(pack.tokens, places_in_document(pack), strict=True)):
        if place == 0:
            fresh = True
        if token in SPECIAL or (kind is MaskedNextTokenPrediction and place == 0):
            fresh = True
            continue
        chance = mask
        if span and not fresh:
            chance = 1 - 1 / span if before else mask / (span * (1 - mask))
        before, fresh = draws[at] < chance, False
        if before:
            hidden.append(at)
    return hidden


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("mask", "span"), [(0.4, 0), (0.4, 3), (0.15, 6), (0.5, 2), (0.9, 20), (1.0, 0)])
def test_hidden_places_against_a_walk(kind, mask, span):
    objective = kind(VOCABULARY, mask=mask, span=span)
    for sample in range(60):
        pack = random_pack(sample)
        expected = walk(kind, pack, uniforms(3, "mask", 64, counters=(sample, 2)), mask, span)
        actual = objective.targets(pack, SampleRandomness(3, sample, 2))
        assert (actual.predict_at + objective.shift).tolist() == expected
        assert actual.labels.tolist() == pack.tokens[expected].tolist()
        assert np.flatnonzero(actual.inputs != pack.tokens).tolist() == expected
        assert set(actual.inputs[expected]) <= {MASK}
        assert actual.predict_at.dtype == actual.labels.dtype == actual.inputs.dtype == np.int64


@pytest.mark.parametrize(("options", "digest"), [({}, "2e09c4eb87db8036"), (BERT, "2211b1693965d81c")])
def test_masks_without_spans_never_change(options, digest):
    """A run that goes on with another version of this package must see the masks it would have seen."""
    mask_hash = hashlib.sha256()
    for sample in range(8):
        pack = Pack(sample, 0, np.arange(2048) * 31 % 50, np.array([0, 700, 701, 2048], dtype=np.int32))
        actual = MaskedLanguageModeling(VOCABULARY, **options).targets(pack, SampleRandomness(5, sample, 0))
        for array in (actual.inputs, actual.predict_at, actual.labels):
            mask_hash.update(array.astype("<i8").tobytes())
    assert mask_hash.hexdigest().startswith(digest)


def test_mntp_hides_what_mlm_hides_but_for_first_tokens():
    for sample in range(20):
        pack = random_pack(sample)
        mlm, mntp = (kind(VOCABULARY, mask=0.5).targets(pack, SampleRandomness(0, sample, 0)) for kind in BOTH)
        assert set(mlm.predict_at) - set(mntp.predict_at + 1) <= set(pack.edges[:-1])
        assert set(mntp.predict_at + 1) == set(mlm.predict_at) - set(pack.edges[:-1])


MILLION = 1 << 20


@pytest.fixture(scope="module")
def packs():
    """A million tokens, documents of 64 tokens, one token in twenty special."""
    actual = []
    for sample in range(MILLION // 4096):
        rng = np.random.default_rng(sample)
        tokens = np.where(rng.random(4096) < 0.05, 7, rng.integers(10, 50, size=4096))
        actual.append(Pack(sample, 0, tokens, np.arange(0, 4097, 64, dtype=np.int32)))
    return actual


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("mask", "span"), [(0.4, 0), (0.4, 3), (0.15, 4)])
def test_every_kind_of_place_is_hidden_with_the_same_probability(packs, kind, mask, span):
    """The first token of a document, the token after a special one, those in the middle and at the end."""
    objective = kind(VOCABULARY, mask=mask, span=span)
    chosen, tokens = np.zeros(MILLION, dtype=bool), np.concatenate([pack.tokens for pack in packs])
    for pack in packs:
        actual = objective.targets(pack, SampleRandomness(0, pack.sample, 0))
        chosen[pack.sample * 4096 + actual.predict_at + objective.shift] = True
    place, special = np.arange(MILLION) % 64, tokens == 7
    assert not chosen[special].any()
    kinds = {
        "first": place == 0,
        "second": (place == 1) & ~np.roll(special, 1),
        "after a special token": (place > 0) & np.roll(special, 1),
        "middle": place == 30,
        "last": place == 63,
    }
    for name, members in kinds.items():
        members = members & ~special
        if name == "first" and kind is MaskedNextTokenPrediction:
            assert not chosen[members].any()
        else:
            assert within(chosen[members].sum(), members.sum(), mask), name
    ordinary = ~special & ~((place == 0) & (kind is MaskedNextTokenPrediction))
    # Neighbours in a chain go together: each count counts for fewer, so that its deviation is larger by this factor.
    together = 1 - 1 / span - mask / (span * (1 - mask)) if span else 0.0
    spread = math.sqrt(MILLION * mask * (1 - mask) * (1 + together) / (1 - together))
    assert abs(chosen.sum() - ordinary.sum() * mask) < 4.5 * spread


@pytest.mark.parametrize(("mask", "span"), [(0.4, 3), (0.15, 4), (0.5, 2), (0.3, 10)])
def test_runs_have_geometric_lengths_with_the_mean_asked_for(mask, span):
    """In one document of a million tokens without special ones, every run but a last one ends by itself."""
    pack = Pack(0, 0, np.full(MILLION, 20), np.array([0, MILLION], dtype=np.int32))
    actual = MaskedLanguageModeling(VOCABULARY, mask=mask, span=span).targets(pack, SampleRandomness(1, 0, 0))
    chosen = np.zeros(MILLION + 2, dtype=int)
    chosen[1 + actual.predict_at] = 1
    turns = np.diff(chosen)
    lengths = np.flatnonzero(turns == -1) - np.flatnonzero(turns == 1)
    runs = len(lengths)
    assert runs == pytest.approx(MILLION * mask / span, rel=0.02)
    assert abs(lengths.sum() - runs * span) < 4.5 * math.sqrt(runs * span * (span - 1))
    goes_on = 1 - 1 / span
    for length in range(1, 31):
        assert within((lengths == length).sum(), runs, (1 - goes_on) * goes_on ** (length - 1)), length
    assert within((lengths > 30).sum(), runs, goes_on**30)
    # Gaps are geometric too: the chain forgets everything but the token before.
    gaps = np.flatnonzero(turns == 1)[1:] - np.flatnonzero(turns == -1)[:-1]
    begins = mask / (span * (1 - mask))
    for length in range(1, 11):
        assert within((gaps == length).sum(), len(gaps), begins * (1 - begins) ** (length - 1)), length


def test_shares_of_random_and_kept_tokens_inside_spans(packs):
    objective = MaskedNextTokenPrediction(VOCABULARY, mask=0.4, span=4, random=0.2, keep=0.3)
    actual = [objective.targets(pack, SampleRandomness(0, pack.sample, 0)) for pack in packs]
    replacements = np.concatenate([one.inputs[one.predict_at + 1] for one in actual])
    labels = np.concatenate([one.labels for one in actual])
    assert within((replacements == MASK).sum(), len(labels), 0.5)
    assert within((replacements == labels).sum(), len(labels), 0.3 + 0.2 / 47)  # one random token in 47 is the one that was there
    assert not np.isin(replacements[replacements != MASK], SPECIAL).any()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mask": 0.4, "span": 1.5}, "found 1.5 with mask=0.4, expected 0 or from 1.667 up"),
        ({"mask": 0.25, "span": 1}, "found 1 with mask=0.25, expected 0 or from 1.334 up"),
        ({"mask": 1.0, "span": 3}, "found 3 with mask=1, expected 0: every token is hidden"),
        ({"span": -1}, "found -1, expected a number from 0"),
    ],
)
def test_spans_that_cannot_be(options, complaint):
    with pytest.raises(InputError, match=f"mlm: option `span`: {complaint}"):
        MaskedLanguageModeling(VOCABULARY, **options)


@pytest.mark.parametrize("mask", [0.1, 0.25, 0.3, 0.4, 0.5, 0.95])
def test_the_smallest_span_that_is_named_can_be_used(mask):
    with pytest.raises(InputError) as caught:
        MaskedLanguageModeling(VOCABULARY, mask=mask, span=1)
    named = float(str(caught.value).removesuffix(" up").rpartition(" ")[2])
    assert 1 / (1 - mask) <= named < 1 / (1 - mask) + 0.0011
    MaskedLanguageModeling(VOCABULARY, mask=mask, span=named)


def test_at_the_smallest_span_tokens_are_hidden_one_by_one():
    """A token's chance then is the same whatever came before it."""
    in_spans, independent = (MaskedLanguageModeling(VOCABULARY, mask=0.5, span=span) for span in (2, 0))
    for sample in range(10):
        pack = random_pack(sample)
        actual = [one.targets(pack, SampleRandomness(0, sample, 0)).predict_at.tolist() for one in (in_spans, independent)]
        assert actual[0] == actual[1]
