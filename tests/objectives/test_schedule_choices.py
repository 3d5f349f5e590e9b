"""Phases that train more than one thing: options that change, mixtures, alternations of thousands of phases."""

import dataclasses
import itertools

import pytest
from counting import counted
from objective_helpers import VOCABULARY, random_pack, within

from megaenc.counter_rng import SampleRandomness
from megaenc.errors import InputError
from megaenc.objectives import (
    Attention,
    CausalLanguageModeling,
    MaskedLanguageModeling,
    Objective,
    Schedule,
    Targets,
    masking,
    option,
    registry,
)


def build(text, train_iters, seed=0):
    return Schedule.build(text, train_iters, VOCABULARY, seed)


def test_an_option_goes_from_the_first_step_to_the_last_in_a_straight_line():
    schedule = build("clm:10,mlm(mask=0.4->0.15,keep=0->0.1):11", 21)
    assert schedule.objective(10) == CausalLanguageModeling(VOCABULARY)
    assert schedule.objective(11) == MaskedLanguageModeling(VOCABULARY, mask=0.4)
    assert schedule.objective(21) == MaskedLanguageModeling(VOCABULARY, mask=0.15, keep=0.1)
    for step in range(11, 22):
        actual = schedule.objective(step)
        assert actual.mask == pytest.approx(0.4 - 0.025 * (step - 11))
        assert actual.keep == pytest.approx(0.01 * (step - 11))


def test_a_phase_of_one_step_has_the_first_value():
    assert build("mlm(mask=0.4->0.15)", 1).objective(1).mask == 0.4


def test_masks_follow_an_option_that_changes():
    """Every mask of the smaller share lies inside that of the larger one: the draws stay the same."""
    schedule, pack = build("mlm(mask=0.5->0.1)", 40), random_pack(3, 2048)
    masks = [set(schedule.objective(step).targets(pack, SampleRandomness(0, 3, 0)).predict_at) for step in range(1, 41)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(masks))
    assert len(masks[0]) / len(masks[-1]) == pytest.approx(5, rel=0.2)


@pytest.fixture
def toy(monkeypatch):
    """A plug-in with an option of every kind."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @registry.register
    @dataclasses.dataclass(frozen=True)
    class Toy(Objective):
        name = "toy"
        attention = Attention.CAUSAL
        depth: int = option(1, "a whole number", low=1, high=9)
        rate: float = option(0.5, "a number")
        fast: bool = option(False, "a switch")
        word: str = option("a", "a word")

        def targets(self, pack, randomness):
            return Targets(pack.tokens, pack.edges[:-1].astype(int), pack.tokens[pack.edges[:-1]])

    return Toy


def test_numbers_of_any_objective_can_change_and_whole_ones_are_rounded(toy):
    schedule = build("toy(depth=1->4,rate=-1->1)", 7)
    assert [schedule.objective(step).depth for step in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]  # 1, 1.5, 2, ...: half up
    assert [schedule.objective(step).rate for step in (1, 4, 7)] == [-1, 0, 1]
    assert [type(schedule.objective(step).depth) for step in (1, 2)] == [int, int]


@pytest.mark.parametrize("marked", ["toy(fast=false->[true])", "toy(word=a->[b])", "toy(fast=true->[true])"])
def test_what_is_no_number_cannot_change(toy, marked):
    text = marked.replace("[", "").replace("]", "")
    with pytest.raises(InputError, match="is not a number and cannot change, expected one value") as caught:
        build(text, 10)
    assert str(caught.value).startswith(f"--objective-schedule: at character {marked.index('[') + 1} of '{text}': toy: option `")
    assert str(caught.value).endswith(f"(here: {marked})")


def test_tables_of_the_vocabulary_are_made_once():
    schedule, pack = build("mlm(mask=0.4->0.15,random=0.1)", 50), random_pack(0)
    masking.text_token_mask.cache_clear()
    masking.text_token_ids.cache_clear()
    for step in range(1, 51):
        schedule.objective(step).targets(pack, SampleRandomness(0, step, 0))
    assert masking.text_token_mask.cache_info().misses == masking.text_token_ids.cache_info().misses == 1


def test_a_mixture_draws_by_weight():
    steps = 100_000
    schedule = build("mix(clm:0.3,mlm:0.6,prefix_lm:0.1)", steps)
    (phase,) = schedule.phases
    assert phase.shares == pytest.approx((0.3, 0.6, 0.1)) and sum(phase.shares) == pytest.approx(1)
    drawn = [schedule.text_at(step) for step in range(1, steps + 1)]
    for text, share in zip(("clm", "mlm", "prefix_lm"), phase.shares, strict=True):
        assert within(drawn.count(text), steps, share)
    for first in (0, 1):  # one step's draw says nothing about the next one's
        pairs = list(zip(drawn[first::2], drawn[first + 1 :: 2], strict=False))
        assert within(pairs.count(("clm", "clm")), len(pairs), 0.09)


def test_draws_follow_from_seed_and_step_alone():
    def drawn(text, train_iters, seed):
        schedule = build(text, train_iters, seed)
        return [schedule.text_at(step) for step in range(101, 201)]

    reference = drawn("mix(clm:1,mlm:1)", 200, seed=1)
    assert drawn("mlm:100,mix(clm:5,mlm:5):100", 200, seed=1) == reference
    assert drawn("mix(clm:1,mlm:1)", 1000, seed=1) == reference
    assert drawn("mix(clm:1,mlm:1)", 200, seed=2) != reference


def test_what_is_said_of_a_step_is_what_it_trains():
    schedule = build("mix(clm:1,mlm(mask=0.4->0.2):1):50,mntp:50", 100)
    kinds = {"clm": "clm", "mlm(mask=0.4->0.2)": "mlm", "mntp": "mntp"}
    for step in range(1, 101):
        assert schedule.objective(step).name == kinds[schedule.text_at(step)]
    masks = [schedule.objective(step).mask for step in range(1, 51) if schedule.objective(step).name == "mlm"]
    assert masks == sorted(masks, reverse=True) and 0.2 <= masks[-1] < 0.22 and 0.38 < masks[0] <= 0.4


def test_each_step_of_a_sum_trains_all_of_its_objectives():
    schedule = build("sum(clm:0.5,mlm(mask=0.4->0.2):1.5):3,mlm:2", 5)
    for step, mask in ((1, 0.4), (2, 0.3), (3, 0.2)):
        (one, clm), (three, mlm) = schedule.objectives(step)
        assert (one, three, clm.name, mlm.mask) == (1, 3, "clm", pytest.approx(mask))
        assert schedule.text_at(step) == "sum(clm:1,mlm(mask=0.4->0.2):3)"
    assert schedule.objectives(4) == ((1, schedule.objective(4)),)
    with pytest.raises(ValueError, match="step 1 trains sum"):
        schedule.objective(1)
    assert schedule.phases[0].shares == (0.5, 0.5) and [phase.passes for phase in schedule.phases] == [2, 1]
    assert build("sum(clm:1,mlm:1)", 5).canonical != build("mix(clm:1,mlm:1)", 5).canonical


def test_every_objective_that_can_be_trained_is_listed_once_with_options_at_their_end():
    schedule = build("3x(clm:10,mlm(mask=0.4->0.2):10),mix(mlm(mask=0.2):1,prefix_lm:1):40", 100)
    assert list(schedule.final_objectives()) == ["clm", "mlm(mask=0.2)", "prefix_lm"]
    assert schedule.final_objectives()["mlm(mask=0.2)"] == MaskedLanguageModeling(VOCABULARY, mask=0.2)


def test_choices_say_what_a_phase_may_train():
    schedule = build("mix(clm:0.25,mlm(mask=0.4->0.2):0.75):60,mntp:40", 100)
    mixed, unmixed = schedule.phases
    assert [choice.text for choice in mixed.choices] == ["clm", "mlm(mask=0.4->0.2)"] and mixed.shares == (0.25, 0.75)
    assert [(choice.start.mask, choice.end.mask) for choice in mixed.choices[1:]] == [(0.4, 0.2)]
    assert unmixed.shares == (1.0,) and unmixed.choices[0].start == unmixed.choices[0].end


@pytest.mark.parametrize(
    ("text", "train_iters"), [("50000x(clm:1,mlm:1)", 100_000), ("50000x(clm:0.00001,mlm(mask=0.4->0.15):0.00001)", 10**6)]
)
def test_a_hundred_thousand_phases(text, train_iters):
    schedule, calls = counted(build, text, train_iters)
    assert len(schedule.phases) == 100_000 and schedule.phases[-1].last_step == train_iters
    assert calls < 50 * 100_000, "the work of a phase grows with their number"
    assert len(schedule.canonical) < 200 and len(schedule.final_objectives()) == 2


def test_canonical_of_many_phases_is_equal_where_they_are():
    def canonical(text):
        return build(text, 400).canonical

    assert canonical("20x(clm:10,mlm:10)") == canonical(",".join(["clm:0.025,mlm:0.025"] * 20))
    others = [
        "20x(mlm:10,clm:10)",
        "20x(clm:9,mlm:11)",
        "20x(clm:10,mlm(mask=0.3):10)",
        "19x(clm:10,mlm:10),clm:20",
        "10x(clm:20,mlm:20)",
    ]
    assert len({canonical(text) for text in [*others, "20x(clm:10,mlm:10)"]}) == 6
