"""What every objective keeps to, whichever it is."""

import numpy as np
import pytest
from objective_helpers import SPECIAL, VOCABULARY, random_pack

from megaenc.counter_rng import SampleRandomness
from megaenc.objectives import Attention, Schedule, check_targets, find

EVERY = [
    "clm", "mlm", "mlm(mask=0.15,random=0.1,keep=0.1)", "mlm(span=3)", "mntp", "mntp(span=3,keep=0.5)", "prefix_lm",
    "prefix_lm(low=0.5)", "diffusion", "span_corruption", "gpt_bert(causal=0.5)",
]  # fmt: skip


def targets_of(text):
    objective = Schedule.build(text, 1, VOCABULARY).objective(1)
    for sample in range(60):
        pack = random_pack(sample)
        yield objective, pack, objective.targets(pack, SampleRandomness(3, sample, 0))


@pytest.mark.parametrize("text", [text for text in EVERY if "keep" not in text])
def test_no_prediction_can_see_its_label(text):
    """Where attention reaches the label's place, the token there is hidden (unless some are to be kept, as BERT's 10 %)."""
    for objective, pack, actual in targets_of(text):
        starts = np.repeat(pack.edges[:-1], np.diff(pack.edges))
        for at in actual.predict_at:
            label_at = at + objective.shift
            if objective.attention is Attention.BIDIRECTIONAL:
                assert actual.inputs[label_at] == VOCABULARY.mask_id
            elif objective.attention is Attention.PREFIX:
                prefix_end = starts[at] + actual.prefixes[np.searchsorted(pack.edges, at, side="right") - 1]
                is_visible = label_at < prefix_end or label_at <= at
                assert not is_visible or actual.inputs[label_at] == VOCABULARY.mask_id
            else:
                assert label_at > at


@pytest.mark.parametrize("text", EVERY)
def test_targets_keep_to_the_rules_and_leave_the_pack_as_it_was(text):
    predictions = 0
    never_predicted = [token for token in SPECIAL if text != "clm" or token != VOCABULARY.eos_id]
    for objective, pack, actual in targets_of(text):
        assert (actual.prefixes is not None) == (objective.attention is Attention.PREFIX)
        assert not np.isin(actual.labels, never_predicted).any()
        assert not (actual.inputs != pack.tokens)[np.isin(pack.tokens, SPECIAL)].any()
        check_targets(objective, pack, seed=3)
        assert np.array_equal(pack.tokens, random_pack(pack.sample).tokens)
        predictions += len(actual.labels)
    assert predictions > 100


def test_shifts_are_those_of_the_literature():
    assert {name: find(name).shift for name in ("clm", "mlm", "mntp", "prefix_lm")} == {
        "clm": 1,
        "mlm": 0,
        "mntp": 1,
        "prefix_lm": 1,
    }
