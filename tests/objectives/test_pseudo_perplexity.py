"""Pseudo-perplexity: passes hide every token once, few of a document at a time."""

import dataclasses
import math

import numpy as np
import pytest
from objective_helpers import MASK, SPECIAL, VOCABULARY, places_in_document, random_pack, within

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import (
    Attention,
    PseudoPerplexity,
    Schedule,
    build_pseudo_perplexities,
    check_targets,
    compute_perplexity,
)

MASKLESS = dataclasses.replace(VOCABULARY, mask_id=None)


def passes_of_tokens(pack, passes, ahead=0):
    """Return the passes that hide each token."""
    hidden_in = [[] for _ in pack.tokens]
    for number, part in enumerate(PseudoPerplexity(VOCABULARY, passes, ahead=ahead).parts):
        check_targets(part, pack, 0)
        targets = part.targets(pack, SampleRandomness(0, pack.sample, pack.epoch))
        assert targets.weights is targets.count is targets.prefixes is None
        for at, token in enumerate(targets.inputs.tolist()):
            if at in targets.predict_at + ahead:
                assert token == MASK
                hidden_in[at].append(number)
            else:
                assert token == pack.tokens[at]
    return hidden_in


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("passes", [1, 5, 64])
def test_every_token_that_is_not_special_is_hidden_once(passes, ahead):
    for sample in range(6):
        pack = random_pack(sample)
        hidden_in = passes_of_tokens(pack, passes, ahead)
        for token, place, numbers in zip(
            pack.tokens.tolist(), places_in_document(pack), hidden_in, strict=True
        ):
            assert len(numbers) == (token not in SPECIAL and place >= ahead)
        for start, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False):
            of_document = [number for numbers in hidden_in[start:end] for number in numbers]
            counts = np.bincount(of_document, minlength=passes)
            assert (
                counts.max() - counts.min() <= 1 + ahead
            )  # tokens that are never hidden may leave gaps


def test_tokens_are_spread_at_random():
    """Passes are uniform over positions, and neighbours share one no more often."""
    edges = np.array([0, 12], dtype=np.int32)
    rows = []
    for sample in range(400):
        hidden_in = passes_of_tokens(Pack(sample, 0, np.arange(20, 32), edges), 4)
        rows.append([number for [number] in hidden_in])
    rows = np.array(rows)
    assert all(
        within((rows[:, at] == number).sum(), 400, 1 / 4) for at in range(12) for number in range(4)
    )
    assert within(
        (rows[:, 1:] == rows[:, :-1]).sum(), 400 * 11, 2 / 11
    )  # two others of eleven are in the pass of a token
    assert len({tuple(row) for row in rows.tolist()}) == 400


@pytest.mark.parametrize(
    ("schedule", "texts"),
    [
        ("clm", ["pseudo_perplexity(passes=8)"]),
        ("clm:0.5,mlm(mask=0.2):0.5", ["pseudo_perplexity(passes=8)"]),
        ("diffusion", ["pseudo_perplexity(passes=8)"]),
        (
            "mix(mlm:1,mntp:1)",
            ["pseudo_perplexity(passes=8)", "pseudo_perplexity(passes=8,shift=1)"],
        ),
        ("prefix_lm", ["pseudo_perplexity(passes=8)", "pseudo_perplexity(passes=8,shift=1)"]),
    ],
)
def test_shifts_are_those_of_what_is_trained_in_both_directions(schedule, texts):
    trained = Schedule.build(schedule, 100, VOCABULARY).final_objectives().values()
    measures = build_pseudo_perplexities(trained, VOCABULARY, 8)
    assert (
        list(measures) == texts
        and [measure.shift for measure in measures.values()] == [0, 1][: len(texts)]
    )
    assert all(measure.attention is Attention.BIDIRECTIONAL for measure in measures.values())
    assert build_pseudo_perplexities(trained, VOCABULARY, 0) == {}


def test_without_a_mask_token_there_is_one_refusal():
    with pytest.raises(
        InputError,
        match=r"^--eval-pseudo-perplexity-passes 8: the tokenizer \(f{12}\) has no mask token",
    ):
        build_pseudo_perplexities((), MASKLESS, 8)
    assert build_pseudo_perplexities((), MASKLESS, 0) == {}
    with pytest.raises(InputError, match="pseudo_perplexity: the tokenizer"):
        PseudoPerplexity(MASKLESS, 8)


def test_perplexity_of_a_diverged_model_is_infinite():
    assert compute_perplexity(math.log(50)) == pytest.approx(50)
    assert compute_perplexity(1e4) == math.inf and math.isnan(compute_perplexity(math.nan))
