"""The objective of each step, and the errors of schedules that cannot be read."""

import dataclasses

import pytest
from objective_helpers import VOCABULARY

from megaenc.errors import InputError
from megaenc.objectives import CausalLanguageModeling, MaskedLanguageModeling, Schedule


def spans(text, train_iters):
    return [
        (phase.text, phase.first_step, phase.last_step)
        for phase in Schedule.build(text, train_iters, VOCABULARY).phases
    ]


@pytest.mark.parametrize(
    ("text", "train_iters", "expected"),
    [
        ("clm:0.25,mlm:0.75", 100, [("clm", 1, 25), ("mlm", 26, 100)]),
        # 0.25 * 42 = 10.5 and 0.5 * 5 = 2.5: half is rounded up.
        ("clm:0.25,mlm:0.75", 42, [("clm", 1, 11), ("mlm", 12, 42)]),
        # 0.15 * 10 = 1.5 in decimals; the float 0.15 is a little less and would give 1.
        ("clm:0.15,mlm:0.85", 10, [("clm", 1, 2), ("mlm", 3, 10)]),
        # 0.1 + 0.2 + 0.7 is 0.9999999999999999 in floats; ends at 3.5 and 10.5 of 35.
        ("clm:0.1,mlm:0.2,clm:.7", 35, [("clm", 1, 4), ("mlm", 5, 11), ("clm", 12, 35)]),
        # Boundaries are rounded, not lengths: 3.33 and 6.66 of 10 end at 3 and 7.
        ("clm:0.333,mlm:0.333,clm:0.334", 10, [("clm", 1, 3), ("mlm", 4, 7), ("clm", 8, 10)]),
        ("clm:10000,mlm:32000", 42000, [("clm", 1, 10000), ("mlm", 10001, 42000)]),
        ("mlm", 7, [("mlm", 1, 7)]),
        ("mlm:1", 1, [("mlm", 1, 1)]),
        ("mix ( clm : 2, mlm(mask=.3) : 4. ) : 1.0", 7, [("mix(clm:1,mlm(mask=0.3):2)", 1, 7)]),
        ("sum(clm:0.3,mlm:1)", 7, [("sum(clm:3,mlm:10)", 1, 7)]),
        ("sum(clm:2000000000,mlm:1000000000)", 7, [("sum(clm:2,mlm:1)", 1, 7)]),
        (
            "sum(clm:2):0.5,sum(clm:1,mlm(mask=0.3):1):0.5",
            2,
            [("clm", 1, 1), ("sum(clm:1,mlm(mask=0.3):1)", 2, 2)],
        ),
        ("mix(clm:0.3):0.5,clm:0.5", 2, [("clm", 1, 1), ("clm", 2, 2)]),
        ("mlm(mask=0.4 -> 0.15,keep=0)", 7, [("mlm(mask=0.4->0.15)", 1, 7)]),
        ("2x(clm:1,mlm:2)", 6, [("clm", 1, 1), ("mlm", 2, 3), ("clm", 4, 4), ("mlm", 5, 6)]),
        (
            "clm:1, 2 x ( mlm:1, 2x(clm:1) )",
            7,
            [
                (name, at, at)
                for at, name in enumerate(["clm", "mlm", "clm", "clm", "mlm", "clm", "clm"], 1)
            ],
        ),
        # Ends at 1.75, 3.5, 5.25 and 7 of 7 steps, whether they are written once or twice.
        ("2x(clm:0.25,mlm:.25)", 7, [("clm", 1, 2), ("mlm", 3, 4), ("clm", 5, 5), ("mlm", 6, 7)]),
        (
            " clm : 0.5 ,\tmlm ( mask = 0.15 , random=0.1,keep=.1 ) : 0.5 ",
            4,
            [("clm", 1, 2), ("mlm(mask=0.15,random=0.1,keep=0.1)", 3, 4)],
        ),
    ],
)
def test_phases(text, train_iters, expected):
    assert spans(text, train_iters) == expected


def test_at_every_step():
    schedule = Schedule.build("clm:0.25,mlm(mask=0.3):0.5,clm:0.25", 12, VOCABULARY)
    assert [schedule.phase_at(step).index for step in range(1, 13)] == [0] * 3 + [1] * 6 + [2] * 3
    assert schedule.objective(4) == MaskedLanguageModeling(VOCABULARY, mask=0.3)
    assert schedule.objective(12) == CausalLanguageModeling(VOCABULARY)
    for step in (0, 13):
        with pytest.raises(ValueError, match=f"step {step} is not one of 1..12"):
            schedule.objective(step)


def test_canonical_is_equal_where_the_phases_are():
    def canonical(text):
        return Schedule.build(text, 100, VOCABULARY).canonical

    assert (
        canonical("clm:0.25,mlm:0.75")
        == "clm:25,mlm(mask=0.4,random=0.0,keep=0.0,span=0.0,unit=token):75"
    )
    assert canonical("clm:25, mlm(keep=0,mask=0.40):75") == canonical("clm:0.25,mlm:0.75")
    assert canonical("mlm") == canonical("mlm:1.0") == canonical("mlm:100")
    assert canonical("mlm(mask=0.3)") != canonical("mlm")
    assert (
        canonical("mix(clm:0.3,mlm:0.7)")
        == canonical("mix(clm:3,mlm:7):1.0")
        != canonical("mix(clm:0.4,mlm:0.6)")
    )
    assert (
        canonical("2x(clm:20,mlm:30)")
        == canonical("clm:0.2,mlm:0.3,clm:0.2,mlm:0.3")
        != canonical("clm:40,mlm:60")
    )
    assert (
        canonical("mlm(mask=0.4->0.4)")
        == canonical("mlm")
        != canonical("mlm(mask=0.4->0.3)")
        != canonical("mlm(mask=0.3)")
    )
    for text in (
        "mlm",
        "clm:0.25,mlm(mask=0.3):0.75",
        "mix(clm:1,mlm(mask=0.3):2):0.5,2x(prefix_lm(low=0->0.5):0.25)",
        "sum(clm:1,mlm:4)",
    ):
        assert canonical(canonical(text)) == canonical(text)


# The piece in brackets is where the error must point.
@pytest.mark.parametrize(
    ("marked", "complaint"),
    [
        ("mlm:0.8,clm:[0.3],mlm:0.3", "shares add up to 1.4, expected 1"),
        ("mlm:0.3,clm:[0.6]", "shares add up to 0.9, expected 1"),
        ("clm:20,mlm:[70]", "steps add up to 90, expected 100, the steps of the run"),
        (
            "mlm:[1]",
            (
                "steps add up to 1, expected 100, the steps of the run; `1` is one step, write "
                "1.0 for the whole run"
            ),
        ),
        ("clm:0.5,mlm:[50]", "found steps after a share, expected one kind"),
        ("mlm:0.999,clm:[0.001]", "0.001 of 100 steps is no step, expected at least one"),
        ("clm:[0.0],mlm:1.0", "zero share 0.0, expected more than zero"),
        ("[]", "empty, expected an objective such as mlm"),
        ("[mln]:1.0", "; did you mean `mlm`?"),
        ("clm [0.5]", "found `0.5`, expected `:`"),
        ("clm:0.5,mlm[]", "found the end, expected `:` and the share or the steps of `mlm`"),
        (
            "clm:[]",
            "found the end, expected a share with a point (0.25) or a whole number of steps",
        ),
        ("clm:[50%],mlm:50%", "found `50%`, expected a share with a point"),
        ("clm:0.5,mlm:0.5[,]", "nothing follows the comma, expected another phase"),
        ("clm:0.5,[,]mlm:0.5", "found `,`, expected the name of an objective"),
        ("mlm:0.5[:]0.5", "found `:`, expected `,` and another phase, or the end"),
        ("mlm[(]mask=0.3", "this parenthesis is never closed"),
        (
            "sum[:]1.0",
            "found `:`, expected `(` and the objectives of the sum, such as sum(clm:0.3,mlm:0.7)",
        ),
        (
            "sum(mlm:1,[mix](clm:1)):1.0",
            "a mixture in a mixture or sum, expected the name of an objective",
        ),
        ("mlm(mask=0.3)[)]:1.0", "found `)`, expected `:`"),
        ("mlm([)]", "found `)`, expected an option such as mask=0.3"),
        ("mlm(mask[)]", "found `)`, expected `=` and the value of `mask`"),
        ("mlm(mask=[)]", "found `)`, expected the value of `mask`"),
        ("mlm(mask=0.3 [0.4])", "found `0.4`, expected `,` and another option, or `)`"),
        ("mlm(mask=0.3,[mask]=0.2)", "option `mask` is given twice"),
        (
            "mlm([msk]=0.3)",
            (
                "mlm: option `msk`: unknown, expected mask, random, keep, span, unit; did you "
                "mean `mask`?"
            ),
        ),
        (
            "clm:0.5,mlm(keep=0.1,mask=[1.5]):0.5",
            "mlm: option `mask`: found 1.5, expected a number, more than 0 and at most 1",
        ),
        ("clm([mask]=0.3)", "clm: option `mask`: unknown, expected no options"),
        # Options that change
        ("mlm(mask=0.4->[]", "found the end, expected the value of `mask` at the end of the phase"),
        (
            "mlm(mask=0.4->[1.5])",
            "mlm: option `mask`: found 1.5, expected a number, more than 0 and at most 1",
        ),
        ("mlm(mask=0.4->0.3[->]0.2)", "found `->`, expected `,` and another option, or `)`"),
        (
            "mlm(span=[1]->4)",
            "mlm: option `span`: found 1 with mask=0.4, expected 0 or from 1.667 up",
        ),
        (
            "mlm(span=0->[4])",
            (
                "at step 2 of the phase: mlm: option `span`: found 0.040404 with mask=0.4, "
                "expected 0 or from 1.667"
            ),
        ),
        # Mixtures
        (
            "mix[]",
            (
                "found the end, expected `(` and the objectives of the mixture, such as "
                "mix(clm:0.3,mlm:0.7)"
            ),
        ),
        ("mix(clm[)]", "found `)`, expected `:` and the weight of `clm`"),
        ("mix(clm:[-1],mlm:2)", "found `-1`, expected a weight above zero"),
        (
            "mix(clm:1 [mlm])",
            "found `mlm`, expected `,` and another objective with its weight, or `)`",
        ),
        ("mix(clm:1,mlm(mask=[2]):2)", "mlm: option `mask`: found 2.0, expected"),
        (
            "clm:0.5,mix(clm:1,mlm:2)[]",
            "found the end, expected `:` and the share or the steps of `mix(clm:1,mlm:2)`",
        ),
        # Sums
        (
            "sum([clm]:1000000000,mlm:1)",
            (
                "the weights of this sum are 1000000000:1 as whole numbers, expected at most "
                "16777216 each; use fewer digits"
            ),
        ),
        ("sum(clm:1,[mlm]:16777217)", "the weights of this sum are 1:16777217 as whole numbers"),
        # Repetitions
        ("[0]x(clm:1)", "zero repetitions, expected more than zero"),
        ("[101]x(clm:1)", "makes 101 phases of 100 steps, expected at least a step for each"),
        (
            "[99]x(99999999x(clm:1))".replace("[99]x(99999999", "99x([99999999]"),
            "makes 99999999 phases of 100 steps",
        ),
        ("5x(clm:0.05,mlm:[0.25])", "shares add up to 1.5, expected 1"),
        (
            "2x([)]",
            (
                "found `)`, expected the name of an objective, `mix(`, `sum(` or a repetition "
                "such as `5x(`"
            ),
        ),
        ("[2x] clm:50", "found `2x`, expected the name of an objective"),
        ("2x(clm:25,mlm:25[:]0.3)", "found `:`, expected `,` and another phase, or `)`"),
    ],
)
def test_errors_point_at_the_character(marked, complaint):
    text = marked.replace("[", "").replace("]", "")
    with pytest.raises(InputError) as caught:
        Schedule.build(text, 100, VOCABULARY)
    message = str(caught.value)
    assert message.startswith(
        f"--objective-schedule: at character {marked.index('[') + 1} of '{text}': "
    )
    assert complaint in message
    assert message.endswith(f"(here: {marked})")
    assert "\n" not in message


def test_repetitions_that_would_never_end_to_be_read():
    text = "1x(" * 30 + "clm:100" + ")" * 30
    with pytest.raises(
        InputError,
        match=r"at character 61 of .*: a repetition in more than 20 others, expected fewer",
    ):
        Schedule.build(text, 100, VOCABULARY)
    assert spans(text.replace("1x(" * 30, "1x(" * 20).replace(")" * 30, ")" * 20), 100) == [
        ("clm", 1, 100)
    ]


def test_a_tokenizer_without_mask_token_is_refused_at_the_phase_that_needs_one():
    causal = dataclasses.replace(VOCABULARY, mask_id=None)
    assert len(Schedule.build("clm", 100, causal).phases) == 1
    with pytest.raises(
        InputError,
        match=(
            r"at character 10 of 'clm:0.25,mlm:0.75': mlm: the tokenizer \(ffffffffffff\) has no "
            r"mask token"
        ),
    ):
        Schedule.build("clm:0.25,mlm:0.75", 100, causal)


def test_run_without_steps():
    with pytest.raises(InputError, match="--train-iters: found 0, expected at least 1"):
        Schedule.build("mlm", 0, VOCABULARY)
