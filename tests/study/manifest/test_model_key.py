"""Names of models: what they stand for, and back."""

import pytest

from megaenc.study.manifest.model_key import ModelKey, format_model_name, parse_model_name

NAMES = {
    "210m-clm-42k": ModelKey("210M", clm_steps=42_000),
    "610m-mlm40-42k": ModelKey("610M", mlm_steps=42_000, mask_ratio=0.4),
    "610m-clm-10k-mlm40-42k": ModelKey("610M", 10_000, 32_000, mask_ratio=0.4),
    "610m-clm-dec42k-mlm40-64k": ModelKey("610M", 42_000, 0, 22_000, 0.4),
    "610m-mlm40-dec42k-mlm40-64k": ModelKey("610M", 0, 42_000, 22_000, 0.4),
    "610m-clm-42k-1000": ModelKey("610M", clm_steps=1_000, decayed=False),
    "tiny-mlm12.5-150": ModelKey("tiny", mlm_steps=150, mask_ratio=0.125),
    "tiny-clm-100-mlm40-400-250": ModelKey("tiny", 100, 150, mask_ratio=0.4, decayed=False),
    "tiny-clm-dec100-mlm40-150-20": ModelKey("tiny", 100, 0, 20, 0.4, decayed=False),
    "two-layers-clm-100-mlm40-dec200-mlm40-250": ModelKey("two-layers", 100, 100, 50, 0.4),
    "610m-mlm40-42k-1000-seed3": ModelKey(
        "610M", mlm_steps=1_000, mask_ratio=0.4, decayed=False, seed=3
    ),
}


@pytest.mark.parametrize(("name", "setting"), NAMES.items())
def test_a_name_says_what_the_model_is_and_is_made_of_it(name, setting):
    assert parse_model_name(name) == setting
    assert format_model_name(parse_model_name(name)) == name


def test_what_comes_after_an_intermediate_checkpoint_does_not_make_it_another():
    before_the_switch = parse_model_name("tiny-clm-100-mlm40-400-50")
    assert before_the_switch == parse_model_name("tiny-clm-400-50")
    assert format_model_name(before_the_switch) == "tiny-clm-400-50"


@pytest.mark.parametrize(
    "name",
    [
        "bert-base",
        "clm-42k",  # no size
        "610m-clm",
        "610m-mlm-42k",  # no mask ratio
        "610m-mlm0-42k",
        "610m-mlm40-10k-clm-42k",  # the columns have CLM first
        "610m-clm-42k-mlm40-10k",  # steps count on
        "610m-clm-dec42k",  # nothing after the end
        "610m-mlm40-dec42k-mlm20-64k",  # two mask ratios, one column
        "610m-clm-42k-42000",  # the end is no intermediate
        "610M-clm-42k",
    ],
)
def test_other_names_stand_for_nothing(name):
    assert parse_model_name(name) is None


def test_an_objective_that_the_columns_cannot_say_is_spelled_as_its_schedule():
    alternating = ModelKey(
        "610M", 21_000, 21_000, mask_ratio=0.4, schedule="21x(clm:1000,mlm:1000)"
    )
    assert format_model_name(alternating) == "610m-21x-clm-1000-mlm-1000-42k"
    detour = ModelKey("610M", 0, 42_000, 22_000, 0.4, schedule="clm:10000,mlm:12000")
    assert format_model_name(detour) == "610m-mlm40-dec42k-clm-10000-mlm-12000-64k"


def test_what_cannot_be_named_says_so():
    with pytest.raises(ValueError, match="without a mask ratio"):
        format_model_name(ModelKey("610M", mlm_steps=42_000))
    with pytest.raises(ValueError, match="not before the end of its run, step 42000"):
        format_model_name(ModelKey("610M", clm_steps=64_000, decayed=False))


def test_steps_and_share():
    model = parse_model_name("610m-clm-10k-mlm40-dec40k-mlm40-64k")
    assert (model.steps, model.clm_share) == (64_000, 0.25)
    assert parse_model_name("610m-clm-42k").clm_share == 1
    assert (
        sorted([parse_model_name("610m-mlm40-42k"), parse_model_name("210m-clm-42k")])[0].size
        == "210M"
    )
