"""The step up to which two schedules train the same."""

import pytest
from counting import counted
from objectives.objective_helpers import VOCABULARY

from megaenc.objectives import Schedule
from megaenc.training.parent_run import first_differing_step


def difference(schedule, reference, last, seeds=(1, 1)):
    schedules = [
        Schedule.build(text, steps, VOCABULARY, seed)
        for (text, steps), seed in zip((schedule, reference), seeds, strict=True)
    ]
    return first_differing_step(*schedules, last)


@pytest.mark.parametrize(
    ("schedule", "reference", "last", "first"),
    [
        (("clm", 40), ("clm:15,mlm:5", 20), 15, None),
        (("clm", 40), ("clm:15,mlm:5", 20), 16, 16),
        (("clm:10,mlm:30", 40), ("clm:11,mlm:9", 20), 15, 11),
        (("mlm", 40), ("mlm(mask=0.3)", 20), 15, 1),
        (("clm:1,mlm:1,clm:1,mlm:37", 40), ("2x(clm:1,mlm:1),mlm:16", 20), 15, None),
        # A share that falls over 40 steps and one that falls over 20 part at the second step.
        (("mlm(mask=0.4->0.2):1.0", 40), ("mlm(mask=0.4->0.2):1.0", 20), 15, 2),
        (("mlm(mask=0.4->0.2):10,mlm:30", 40), ("mlm(mask=0.4->0.2):10,clm:10", 20), 10, None),
        # The draws of a mixture follow from the step: the same in a phase of another length, and
        # with weights of another size.
        (("mix(clm:1,mlm:3):1.0", 40), ("mix(clm:0.25,mlm:0.75):18,mlm:2", 20), 18, None),
    ],
)
def test_schedules_are_compared_by_what_each_step_trains(schedule, reference, last, first):
    assert difference(schedule, reference, last) == first


def test_other_draws_of_a_mixture_are_a_difference():
    mixture = ("mix(clm:1,mlm:1):1.0", 40)
    assert difference(mixture, mixture, 40, seeds=(1, 2)) is not None
    assert difference(mixture, ("mix(clm:1,mlm:3):1.0", 40), 40) is not None


def test_a_comparison_at_the_length_of_the_study_does_not_look_at_each_step_anew():
    step, calls = counted(
        difference,
        ("2100x(clm:10,mlm:10)", 42_000),
        ("1000x(clm:10,mlm:10),mlm:2000", 22_000),
        20_000,
    )
    assert step is None
    assert calls < 20 * 20_000
