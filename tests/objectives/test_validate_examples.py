"""Wrong answers of other objectives are reported before a run, with the position."""

from dataclasses import dataclass

import numpy as np
import pytest

from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives import (
    Attention,
    Objective,
    SoftLabels,
    Targets,
    check_targets,
    option,
    register,
)

VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)
PACK = Pack(3, 0, np.arange(2, 14), np.array([0, 5, 12], dtype=np.int32))


def build_objective(targets, shift=0, attention=Attention.BIDIRECTIONAL, classes=0):
    """Return an objective with targets `targets(pack)`, or with these fields.

    Fields of `Targets` that are not given predict nothing.
    """

    @dataclass(frozen=True)
    class Made(Objective):
        name = "made"

        def targets(self, pack, randomness):
            if callable(targets):
                return targets(pack)
            return Targets(
                **({"inputs": pack.tokens, "predict_at": at(), "labels": at()} | targets)
            )

    Made.shift = shift
    Made.attention = attention
    Made.classes = classes
    return Made(VOCABULARY)


def at(*places):
    return np.array(places, dtype=np.int64)


def floats(*rows):
    return np.array(rows, dtype=np.float32)


def third(**parts):
    """Return fields that predict the token at position 3."""
    return {"predict_at": at(3), "labels": PACK.tokens[[3]]} | parts


def softly(ids, probabilities=None):
    """Return fields that predict the token at position 3 with soft labels."""
    return third(
        soft_labels=SoftLabels(ids, floats([1.0]) if probabilities is None else probabilities)
    )


def test_soft_labels_that_add_up_pass():
    check_targets(
        build_objective(softly(at(3, 9, 3)[None], floats([0.5, 0.4995, 0]))), PACK, seed=0
    )


RANDOM = np.random.default_rng()


@pytest.mark.parametrize(
    ("targets", "how", "complaint"),
    [
        # a next-token objective that forgot its shift
        (
            {"predict_at": at(0), "labels": at(3)},
            {},
            "position 0 should predict id 3, but 0 further (`shift`)",
        ),
        (
            {"predict_at": at(4), "labels": at(7)},
            {"shift": 1},
            "position 4 predicts a token of another document",
        ),
        ({"predict_at": at(-1), "labels": at(2)}, {}, "`predict_at` is not increasing from 0"),
        ({"predict_at": at(3, 3), "labels": at(5, 5)}, {}, "`predict_at` is not increasing from 0"),
        (
            {"predict_at": at(12), "labels": at(2)},
            {},
            "`predict_at` is not increasing from 0 or more to less than 12",
        ),
        ({"inputs": PACK.tokens + 60}, {}, "`inputs` holds the id 73, expected 0 to 63"),
        (
            {"predict_at": at(1, 2), "labels": at(3)},
            {},
            "`predict_at` holds 2 positions and `labels` 1",
        ),
        (
            {"predict_at": at(1, 2), "labels": at(2, 3)},
            {"classes": 3},
            "`labels` holds 3, expected 0 to 2",
        ),
        (
            softly(at(3)[None]) | {"labels": at(1)},
            {"classes": 3},
            "`soft_labels.ids` holds 3, expected 0 to 2",
        ),
        ({"prefixes": at(0, 0)}, {}, "under bidirectional attention `prefixes` is given"),
        ({}, {"attention": Attention.PREFIX}, "under prefix attention `prefixes` is missing"),
        ({"prefixes": at(6, 0)}, {"attention": Attention.PREFIX}, "0 to its length"),
        (
            third(weights=np.ones(1)),
            {},
            "`weights` is float64[1], expected float32[1], one for each label",
        ),
        (
            third(weights=floats(np.inf)),
            {},
            "`weights` holds inf, expected finite numbers of 0 or more",
        ),
        (third(count=0), {}, "`count` is 0, expected a whole number above 0"),
        (
            softly(at(3)[None], np.ones((1, 1))),
            {},
            "`soft_labels.probabilities` is float64[1, 1], expected float32",
        ),
        (softly(at(64)[None]), {}, "`soft_labels.ids` holds 64, expected 0 to 63"),
        (
            softly(at(3, 4)[None], floats([1.5, -0.5])),
            {},
            "`soft_labels.probabilities` holds -0.5, expected finite",
        ),
        (
            softly(at(3, 4)[None], floats([0.5, 0.498])),
            {},
            "of prediction 0 add up to 0.998, expected 1",
        ),
        (
            softly(at(3)[None], [[1.0]]),
            {},
            "`soft_labels.probabilities` is list, expected float32[1, K]",
        ),
        (
            lambda p: Targets(
                p.tokens,
                **softly(RANDOM.integers(0, 64, (1, 20)), np.full((1, 20), 0.05, dtype=np.float32)),
            ),
            {},
            "gives other targets when called again",
        ),
        (
            lambda p: p.nothing,
            {},
            "raises AttributeError: 'Pack' object has no attribute 'nothing'",
        ),
        (
            lambda p: Targets(RANDOM.permutation(p.tokens), at(), at()),
            {},
            "gives other targets when called again",
        ),
    ],
)
def test_what_breaks_it_is_named(targets, how, complaint):
    with pytest.raises(InputError) as error:
        check_targets(build_objective(targets, **how), PACK, seed=0)
    assert str(error.value).startswith("objective `made`, pack 3: ") and complaint in str(
        error.value
    )


def test_a_pack_is_not_to_be_changed():
    def spoils(pack):
        pack.tokens[0] = 1
        return Targets(pack.tokens, at(), at())

    with pytest.raises(InputError, match="changes the pack, expected a copy"):
        check_targets(
            build_objective(spoils), Pack(0, 0, np.arange(2, 9), np.array([0, 7])), seed=0
        )


def body(**members):
    return {
        "name": "mine",
        "attention": Attention.CAUSAL,
        "targets": lambda self, pack, randomness: None,
        **members,
    }


@pytest.mark.parametrize(
    ("members", "decorated", "complaint"),
    [
        ({"shift": -1}, True, "has shift -1, expected"),
        ({"shift": True}, True, "has shift True, expected"),
        ({}, False, "is no dataclass"),
        (
            {"share": 0.5, "__annotations__": {"share": float}},
            True,
            "`share` that is not declared with megaenc.objectives.option",
        ),
        (
            {"describe": option(1, "x"), "__annotations__": {"describe": int}},
            True,
            "option `describe`, which is a name of the class Objective",
        ),
    ],
)
def test_a_class_that_is_no_objective_is_refused(members, decorated, complaint):
    kind = type("Mine", (Objective,), body(**members))
    with pytest.raises(ValueError) as error:
        register(dataclass(frozen=True)(kind) if decorated else kind)
    assert complaint in str(error.value)
