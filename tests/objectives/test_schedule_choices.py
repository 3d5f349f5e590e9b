"""Phases of several objectives: changed options, mixtures and alternations."""

import dataclasses

import pytest
from counting import counted
from objective_helpers import VOCABULARY, within

from megaenc.errors import InputError
from megaenc.objectives import (
    Attention,
    CausalLanguageModeling,
    MaskedLanguageModeling,
    Objective,
    Schedule,
    Targets,
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


@pytest.fixture
def toy(monkeypatch):
    """Register a plug-in with an option of every kind."""
    monkeypatch.setattr(registry.OBJECTIVES, "_registered", dict(registry.OBJECTIVES._registered))

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
            return Targets(
                pack.tokens, pack.cu_seqlens[:-1].astype(int), pack.tokens[pack.cu_seqlens[:-1]]
            )

    return Toy


def test_numbers_of_any_objective_can_change_and_whole_ones_are_rounded(toy):
    schedule = build("toy(depth=1->4,rate=-1->1)", 7)
    assert [schedule.objective(step).depth for step in range(1, 8)] == [
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]  # 1, 1.5, 2, ...: half up
    assert [schedule.objective(step).rate for step in (1, 4, 7)] == [-1, 0, 1]
    assert [type(schedule.objective(step).depth) for step in (1, 2)] == [int, int]


@pytest.mark.parametrize(
    "marked", ["toy(fast=false->[true])", "toy(word=a->[b])", "toy(fast=true->[true])"]
)
def test_what_is_no_number_cannot_change(toy, marked):
    text = marked.replace("[", "").replace("]", "")
    with pytest.raises(
        InputError, match="is not a number and cannot change, expected one value"
    ) as caught:
        build(text, 10)
    assert str(caught.value).startswith(
        f"--objective-schedule: at character {marked.index('[') + 1} of '{text}': toy: option `"
    )
    assert str(caught.value).endswith(f"(here: {marked})")


def test_a_mixture_draws_by_weight():
    steps = 20_000
    schedule = build("mix(clm:0.3,mlm:0.6,prefix_lm:0.1)", steps)
    drawn = [schedule.text_at(step) for step in range(1, steps + 1)]
    for text, share in (("clm", 0.3), ("mlm", 0.6), ("prefix_lm", 0.1)):
        assert within(drawn.count(text), steps, share)
    pairs = list(
        zip(drawn[::2], drawn[1::2], strict=True)
    )  # one step's draw says nothing about the next one's
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
    masks = [
        schedule.objective(step).mask
        for step in range(1, 51)
        if schedule.objective(step).name == "mlm"
    ]
    assert (
        masks == sorted(masks, reverse=True) and 0.2 <= masks[-1] < 0.22 and 0.38 < masks[0] <= 0.4
    )


def test_each_step_of_a_sum_trains_all_of_its_objectives():
    schedule = build("sum(clm:0.5,mlm(mask=0.4->0.2):1.5):3,mlm:2", 5)
    for step, mask in ((1, 0.4), (2, 0.3), (3, 0.2)):
        (one, clm), (three, mlm) = schedule.objectives(step)
        assert (one, three, clm.name, mlm.mask) == (1, 3, "clm", pytest.approx(mask))
    assert schedule.text_at(3) == "sum(clm:1,mlm(mask=0.4->0.2):3)"
    assert schedule.objectives(4) == ((1, schedule.objective(4)),)
    with pytest.raises(ValueError, match="step 1 trains sum"):
        schedule.objective(1)
    assert schedule.phases[0].fractions == (0.5, 0.5) and [
        phase.passes for phase in schedule.phases
    ] == [2, 1]


def test_every_objective_that_can_be_trained_is_listed_once_with_options_at_their_end():
    schedule = build("3x(clm:10,mlm(mask=0.4->0.2):10),mix(mlm(mask=0.2):1,prefix_lm:1):40", 100)
    assert list(schedule.final_objectives()) == ["clm", "mlm(mask=0.2)", "prefix_lm"]
    assert schedule.final_objectives()["mlm(mask=0.2)"] == MaskedLanguageModeling(
        VOCABULARY, mask=0.2
    )


def test_a_hundred_thousand_phases():
    schedule, calls = counted(build, "50000x(clm:1,mlm(mask=0.4->0.15):1)", 100_000)
    assert len(schedule.phases) == 100_000 and schedule.phases[-1].last_step == 100_000
    assert calls < 50 * 100_000, "the work of a phase grows with their number"
    assert len(schedule.canonical) < 200 and len(schedule.final_objectives()) == 2
