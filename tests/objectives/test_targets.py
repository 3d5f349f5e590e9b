"""Targets of every objective against a slow reference and expected statistics."""

import dataclasses
import hashlib
import itertools
import math

import numpy as np
import pytest
from objective_helpers import (
    MASK,
    PHRASES,
    SPECIAL,
    VOCABULARY,
    WORDS,
    places_in_document,
    random_pack,
    within,
    write_phrases,
)

from megaenc.counter_rng import SampleRandomness, uniforms
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import (
    CausalLanguageModeling,
    MaskedLanguageModeling,
    Schedule,
    check_targets,
    find,
)

TEXT_TOKENS = [token for token in range(VOCABULARY.size) if token not in SPECIAL]
LONGEST_FIRST = sorted(PHRASES, key=len, reverse=True)


def build(text):
    return Schedule.build(text, 1, WORDS).objective(1)


def bounds(pack):
    """Return the first token and the end of each document."""
    return list(itertools.pairwise(pack.cu_seqlens.tolist()))


# ---- Slow references: each returns the inputs, the positions of the labels and other fields.
# `draw(purpose)` gives the uniform numbers of all tokens; documents use the first ones.


def slow_clm(objective, pack, draw):
    """Return targets of `clm`: of special tokens, only the end is predicted."""
    predicted = []
    for at, (token, place) in enumerate(
        zip(pack.tokens.tolist(), places_in_document(pack), strict=True)
    ):
        if place > 0 and (token not in SPECIAL or token == VOCABULARY.eos_id):
            predicted.append(at)
    return pack.tokens.tolist(), predicted, {}


def slow_prefix(objective, pack, draw):
    prefixes = []
    predicted = []
    for (start, stop), ratio in zip(bounds(pack), draw("prefix"), strict=False):
        share = objective.low + (objective.high - objective.low) * ratio
        prefix = min(math.floor(share * (stop - start)), stop - start - 1)
        prefixes.append(prefix)
        predicted += [
            at for at in range(start + max(prefix, 1), stop) if pack.tokens[at] not in SPECIAL
        ]
    return pack.tokens.tolist(), predicted, {"prefixes": prefixes}


def slow_diffusion(objective, pack, draw):
    inputs = pack.tokens.tolist()
    predicted = []
    weights = []
    draws = draw("mask")
    for (start, stop), number in zip(bounds(pack), draw("ratio"), strict=False):
        ratio = objective.low + (objective.high - objective.low) * number
        for at in range(start, stop):
            if pack.tokens[at] not in SPECIAL and draws[at] < ratio:
                inputs[at] = MASK
                predicted.append(at)
                weights.append(np.float32(1 / ratio))
    return (
        inputs,
        predicted,
        {"weights": weights, "count": sum(token not in SPECIAL for token in pack.tokens.tolist())},
    )


def is_eligible(objective, pack):
    """Return whether each token may be hidden."""
    places = places_in_document(pack)
    return [
        token not in SPECIAL and place >= objective.shift
        for token, place in zip(pack.tokens.tolist(), places, strict=True)
    ]


def walk_spans(objective, pack, draws):
    """Return hidden tokens; the chance of each depends on the one before it."""
    hidden = []
    was_hidden = False
    is_fresh = True
    for at, (eligible, place) in enumerate(
        zip(is_eligible(objective, pack), places_in_document(pack), strict=True)
    ):
        is_fresh = is_fresh or place == 0
        if not eligible:
            is_fresh = True
            continue
        chance = objective.mask
        if objective.span and not is_fresh:
            chance = (
                1 - 1 / objective.span
                if was_hidden
                else objective.mask / (objective.span * (1 - objective.mask))
            )
        was_hidden = draws[at] < chance
        is_fresh = False
        if was_hidden:
            hidden.append(at)
    return hidden


def walk_units(objective, pack, draws):
    """Return hidden words or longest phrases; the draw of the first token decides."""
    tokens = pack.tokens.tolist()
    places = places_in_document(pack)
    eligible = is_eligible(objective, pack)

    def is_joined(at):
        return at < len(tokens) and eligible[at] and eligible[at - 1] and places[at] > 0

    hidden = []
    at = 0
    while at < len(tokens):
        end = at + 1
        if objective.unit == "word":
            while is_joined(end) and tokens[end] % 2 and tokens[end - 1] <= 40:
                end += 1
        else:
            for phrase in LONGEST_FIRST:
                if tuple(tokens[at : at + len(phrase)]) == phrase and all(
                    map(is_joined, range(at + 1, at + len(phrase)))
                ):
                    end = at + len(phrase)
                    break
        if eligible[at] and draws[at] < objective.mask:
            hidden += range(at, end)
        at = end
    return hidden


def cut(total, parts, draws):
    """Return the lengths of `parts` parts of `total` items, cut at the lowest draws."""
    cuts = sorted(sorted(range(1, total), key=lambda item: draws[item])[: parts - 1])
    return [after - before for before, after in itertools.pairwise([0, *cuts, total])]


def walk_corruption(objective, pack, draw):
    """Return T5's corruption, document by document."""
    visible_draws = draw("visible parts")
    hidden_draws = draw("hidden parts")
    chosen = []
    for (start, stop), rounding, turn in zip(
        bounds(pack), draw("rounding"), draw("rotation"), strict=False
    ):
        text = [at for at in range(start, stop) if pack.tokens[at] not in SPECIAL]
        hidden = int(len(text) * objective.mask + rounding)
        visible = len(text) - hidden
        spans = max(1, min(max(1, round(hidden / objective.span)), hidden, visible))
        pattern = []
        for shown, gone in zip(
            cut(visible, spans, visible_draws), cut(hidden, spans, hidden_draws), strict=True
        ):
            pattern += [False] * shown + [True] * gone
        visible_draws = visible_draws[visible:]
        hidden_draws = hidden_draws[hidden:]
        chosen += [
            at
            for place, at in enumerate(text)
            if pattern[(place + int(turn * len(text))) % len(text)]
        ]
    return chosen


def slow_masking(objective, pack, draw):
    if objective.name == "span_corruption":
        hidden = walk_corruption(objective, pack, draw)
    elif objective.unit == "token":
        hidden = walk_spans(objective, pack, draw("mask"))
    else:
        hidden = walk_units(objective, pack, draw("mask"))
    inputs = pack.tokens.tolist()
    for at in hidden:
        fate = draw("fate")[at]
        if fate < objective.random:
            inputs[at] = TEXT_TOKENS[int(draw("random token")[at] * len(TEXT_TOKENS))]
        elif fate >= objective.random + objective.keep:
            inputs[at] = MASK
    return inputs, hidden, {}


def slow_gpt_bert(objective, pack, draw):
    """Return targets: causal documents as `clm` without ends, others as `mntp`."""
    masked, hidden, _ = slow_masking(objective, pack, draw)
    eligible = is_eligible(objective, pack)
    inputs = []
    predicted = []
    weights = []
    prefixes = []
    for (start, stop), number in zip(bounds(pack), draw("causal"), strict=False):
        is_causal = number < objective.causal
        inputs += pack.tokens[start:stop].tolist() if is_causal else masked[start:stop]
        chosen = [at for at in range(start, stop) if (eligible[at] if is_causal else at in hidden)]
        predicted += chosen
        weights += [np.float32(1 if is_causal else 1 / objective.mask)] * len(chosen)
        prefixes.append(0 if is_causal else stop - start)
    return inputs, predicted, {"weights": weights, "prefixes": prefixes, "count": sum(eligible)}


REFERENCES = {
    "clm": slow_clm,
    "mlm": slow_masking,
    "mntp": slow_masking,
    "span_corruption": slow_masking,
    "prefix_lm": slow_prefix,
    "diffusion": slow_diffusion,
    "gpt_bert": slow_gpt_bert,
}
OBJECTIVES = [
    "clm", "mlm", "mlm(mask=1.0)", "mlm(mask=0.15,random=0.1,keep=0.1)",
    "mlm(mask=0.5,random=0.3,keep=0.7)", "mlm(span=3)",
    "mlm(mask=0.9,span=20)", "mlm(mask=0.5,span=2)", "mlm(mask=0.3,random=0.2,keep=0.3,unit=word)",
    "mlm(mask=0.5,unit=FILE)",
    "mntp", "mntp(mask=0.15,span=6,keep=0.5)", "mntp(mask=0.5,unit=word)",
    "mntp(mask=0.3,random=0.4,unit=FILE)",
    "prefix_lm", "prefix_lm(low=0.25,high=0.5)", "prefix_lm(high=0)", "prefix_lm(low=1)",
    "diffusion", "diffusion(low=0.3,high=0.8)", "span_corruption",
    "span_corruption(mask=0.5,span=2)",
    "span_corruption(mask=0.9,span=20,keep=0.2)", "gpt_bert",
    "gpt_bert(causal=0.5,mask=0.2,span=3,keep=0.5)",
]  # fmt: skip


def dense_pack(sample, length=64):
    """Return a pack of phrases, parts of phrases and single tokens."""
    pack = random_pack(sample, length)
    rng = np.random.default_rng(sample)
    phrases = [
        PHRASES[at][: rng.integers(1, 6)] for at in rng.integers(0, len(PHRASES), size=length)
    ]
    tokens = np.array([*itertools.chain(*phrases)])[:length]
    return dataclasses.replace(
        pack, tokens=np.where(rng.random(length) < 0.08, pack.tokens, tokens)
    )


@pytest.mark.parametrize("text", OBJECTIVES)
def test_targets_are_those_of_a_slow_reference(text, tmp_path):
    objective = build(text.replace("FILE", write_phrases(tmp_path / "phrases.npz")))
    predictions = 0
    for sample in range(60):
        pack = dense_pack(sample) if sample % 2 else random_pack(sample)

        def draw(purpose, sample=sample):
            return uniforms(3, purpose, 64, counters=(sample, 2)).tolist()

        inputs, predicted, rest = REFERENCES[objective.name](objective, pack, draw)
        actual = objective.targets(pack, SampleRandomness(3, sample, 2))
        assert actual.inputs.tolist() == inputs
        assert (actual.predict_at + objective.shift).tolist() == predicted
        assert actual.labels.tolist() == pack.tokens[predicted].tolist()
        assert actual.inputs.dtype == actual.predict_at.dtype == actual.labels.dtype == np.int64
        assert (
            actual.prefixes if actual.prefixes is None else actual.prefixes.tolist()
        ) == rest.get("prefixes")
        assert (actual.weights if actual.weights is None else actual.weights.tolist()) == rest.get(
            "weights"
        )
        assert actual.count == rest.get("count")
        check_targets(objective, pack, seed=3)
        predictions += len(predicted)
    assert predictions > 100


def test_without_an_end_token_clm_predicts_only_text():
    pack = Pack(0, 0, np.array([0, 10, 11, 0]), np.array([0, 4], dtype=np.int32))
    endless = CausalLanguageModeling(dataclasses.replace(VOCABULARY, eos_id=None))
    assert endless.targets(pack, SampleRandomness(0, 0, 0)).labels.tolist() == [10, 11]


def test_shifts_are_those_of_the_literature():
    names = ("clm", "mlm", "mntp", "prefix_lm")
    assert [find(name).shift for name in names] == [1, 0, 1, 1]


# ---- Numbers


MILLION = 1 << 20
LENGTH = 64


@pytest.fixture(scope="module")
def packs():
    """Return a million tokens in documents of 64, one token in twenty special."""
    made = []
    for sample in range(MILLION // 4096):
        rng = np.random.default_rng(sample)
        tokens = np.where(rng.random(4096) < 0.05, 7, rng.integers(10, 50, size=4096))
        made.append(Pack(sample, 0, tokens, np.arange(0, 4097, LENGTH, dtype=np.int32)))
    return made


# The fraction of tokens that are predicted, and of these the fraction that is masked.
SHARES = {
    "mlm": (0.4, 1),
    "mlm(mask=0.15,random=0.1,keep=0.1)": (0.15, 0.8),
    "mlm(mask=0.15,unit=word)": (0.15, 1),
    "mntp(mask=0.4,span=4,random=0.2,keep=0.3)": (0.4, 0.5),
    "span_corruption": (0.15, 1),
    "diffusion(low=0.05)": (0.525, 1),
    "gpt_bert(causal=0.1,mask=0.3)": (0.1 + 0.9 * 0.3, None),
}


@pytest.mark.parametrize("text", SHARES)
def test_statistics_over_a_million_tokens(text, packs):
    """Every position of a document is predicted equally often; the mean weight is 1."""
    share, masked = SHARES[text]
    objective = build(text)
    tokens = np.concatenate([pack.tokens for pack in packs])
    is_eligible = tokens != 7
    is_eligible[::LENGTH] &= objective.shift == 0
    is_predicted = np.zeros(MILLION, dtype=bool)
    replacements = []
    weights = []
    for pack in packs:
        actual = objective.targets(pack, SampleRandomness(0, pack.sample, 0))
        is_predicted[4096 * pack.sample + actual.predict_at + objective.shift] = True
        replacements.append(actual.inputs[actual.predict_at + objective.shift])
        if actual.weights is not None:
            weights.append(actual.weights.sum(dtype=np.float64) - actual.count)
    replacements = np.concatenate(replacements)
    assert not is_predicted[~is_eligible].any()

    place = np.arange(MILLION) % LENGTH
    after_special = np.roll(~is_eligible, 1)
    for members in (
        place == 0,
        (place == 1) & ~after_special,
        (place > 1) & after_special,
        place == 30,
        place == 63,
    ):
        of_kind = members & is_eligible
        if of_kind.any():
            assert within(is_predicted[of_kind].sum(), of_kind.sum(), share)
    # Documents are independent of each other, the tokens of one need not be.
    surplus = (is_predicted - share * is_eligible).reshape(-1, LENGTH).sum(axis=1)
    assert abs(surplus.mean()) < 4.5 * surplus.std() / math.sqrt(len(surplus))
    if weights:
        assert abs(np.mean(weights)) < 4.5 * np.std(weights) / math.sqrt(len(weights))
    if masked is not None:
        assert within((replacements == MASK).sum(), len(replacements), masked) or masked == 1
        labels = tokens[is_predicted]
        # One random token in 47 is the one that was there.
        kept = getattr(objective, "keep", 0) + getattr(objective, "random", 0) / 47
        assert within((replacements == labels).sum(), len(labels), kept) or kept == 0
        assert masked < 1 or (replacements == MASK).all()
        assert not np.isin(replacements[replacements != MASK], SPECIAL).any()


@pytest.mark.parametrize(("mask", "span"), [(0.4, 3), (0.3, 10)])
def test_runs_have_geometric_lengths_with_the_mean_asked_for(mask, span):
    """The one document has no special tokens, so only the last run can be cut."""
    pack = Pack(0, 0, np.full(MILLION, 20), np.array([0, MILLION], dtype=np.int32))
    actual = MaskedLanguageModeling(VOCABULARY, mask=mask, span=span).targets(
        pack, SampleRandomness(1, 0, 0)
    )
    chosen = np.zeros(MILLION + 2, dtype=int)
    chosen[1 + actual.predict_at] = 1
    turns = np.diff(chosen)
    lengths = np.flatnonzero(turns == -1) - np.flatnonzero(turns == 1)
    assert len(lengths) == pytest.approx(MILLION * mask / span, rel=0.02)
    goes_on = 1 - 1 / span
    for length in range(1, 31):
        assert within(
            (lengths == length).sum(), len(lengths), (1 - goes_on) * goes_on ** (length - 1)
        ), length


@pytest.mark.parametrize(
    ("name", "options", "digest"),
    [
        ("mlm", {}, "2e09c4eb87db8036"),
        ("mlm", {"mask": 0.15, "random": 0.1, "keep": 0.1}, "2211b1693965d81c"),
        ("span_corruption", {}, "0b5e94f1fb51a0b3"),
        ("span_corruption", {"mask": 0.9, "span": 20, "keep": 0.2}, "97d4eec17394120f"),
    ],
)
def test_masks_never_change(name, options, digest):
    """A run that is resumed by a later version must see the same masks."""
    mask_hash = hashlib.sha256()
    for sample in range(8):
        pack = Pack(
            sample, 0, np.arange(2048) * 31 % 50, np.array([0, 700, 701, 2048], dtype=np.int32)
        )
        actual = find(name)(VOCABULARY, **options).targets(pack, SampleRandomness(5, sample, 0))
        for array in (actual.inputs, actual.predict_at, actual.labels):
            mask_hash.update(array.astype("<i8").tobytes())
    assert mask_hash.hexdigest().startswith(digest)


# ---- Options


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (
            "mlm",
            {"mask": 0},
            "option `mask`: found 0, expected a number, more than 0 and at most 1",
        ),
        ("mlm", {"mask": float("nan")}, "option `mask`: found nan, expected"),
        ("mlm", {"mask": "0.3"}, "option `mask`: found 0.3, expected a number"),
        ("mlm", {"mask": True}, "option `mask`: found true, expected a number"),
        (
            "mlm",
            {"random": 0.7, "keep": 0.4},
            r"option `keep`: found random \+ keep = 1.1, expected at most 1",
        ),
        (
            "mlm",
            {"mask": 0.25, "span": 1},
            "option `span`: found 1 with mask=0.25, expected 0 or from 1.334 up",
        ),
        (
            "mlm",
            {"mask": 1.0, "span": 3},
            "option `span`: found 3 with mask=1, expected 0: every token is hidden",
        ),
        (
            "span_corruption",
            {"mask": 1},
            "option `mask`: found 1, expected a number, more than 0 and less than 1",
        ),
        (
            "span_corruption",
            {"mask": 0.9},
            "option `span`: found 3 with mask=0.9, expected from 10 up$",
        ),
        (
            "span_corruption",
            {"unit": "word"},
            "option `unit`: found word with span=3, expected token$",
        ),
        (
            "diffusion",
            {"low": 0.5, "high": 0.2},
            r"option `low`: found 0\.5 with high=0\.2, expected at most as much",
        ),
        (
            "prefix_lm",
            {"low": 0.5, "high": 0.25},
            r"option `low`: found 0.5, expected at most high=0.25",
        ),
    ],
)
def test_options_that_cannot_be(name, options, complaint):
    with pytest.raises(InputError, match=f"{name}: {complaint}"):
        find(name)(VOCABULARY, **options)
