"""The learning rate of each step: after the warm-up that of megatron-core."""

import pytest

from megaenc.errors import InputError
from megaenc.training.config_groups import OptimizerConfig
from megaenc.training.lr_schedule import DECAY_COEFFICIENTS, WSDSchedule, resolve_steps


def test_parts_that_overlap_are_refused():
    with pytest.raises(InputError, match="warm-up of 8 and decay of 5 steps do not fit in the 12 steps of the run"):
        WSDSchedule(peak=1.0, warmup=8, decay=5, total=12)


def test_steps_or_a_fraction_of_the_run():
    assert resolve_steps("lr-warmup", 7, None, 100) == 7
    assert resolve_steps("lr-warmup", None, 0.125, 100) == 13  # 12.5, half rounded up
    assert resolve_steps("lr-warmup", None, None, 100) == 5
    with pytest.raises(InputError, match="--lr-warmup-iters and --lr-warmup-fraction: found both"):
        resolve_steps("lr-warmup", 7, 0.1, 100)
    with pytest.raises(InputError, match=r"--lr-warmup-fraction: found 1\.5, expected 0 to 1"):
        resolve_steps("lr-warmup", None, 1.5, 100)


def schedule(total: int, **flags) -> WSDSchedule:
    """The schedule of these flags."""
    return WSDSchedule.from_config(OptimizerConfig(**flags), total)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "flags",
    [
        *({"lr_wsd_decay_style": style} for style in DECAY_COEFFICIENTS),
        *({"lr_decay_style": style} for style in ("linear", "cosine", "constant")),
    ],
)
def test_after_the_warm_up_rates_are_megatron_cores(flags):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    minimum = 0.0 if "constant" in flags.values() else 0.01
    config = OptimizerConfig(lr=0.3, min_lr=minimum, lr_warmup_iters=5, **flags)
    ours = WSDSchedule.from_config(config, 40)
    steps = ours.decay if config.lr_decay_style == "WSD" else None
    weight_decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant"}

    class Optimizer:
        param_groups = ()

    theirs = OptimizerParamScheduler(
        Optimizer(),
        *(0.0, config.lr, config.min_lr, 5, 40, config.lr_decay_style),
        **weight_decay,
        wsd_decay_steps=steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
    for step in range(6, 41):
        theirs.num_steps = step - 1
        assert ours(step) == pytest.approx(theirs.get_lr({}), rel=1e-12), step


def test_default_rates():
    rate = schedule(100)
    assert [rate(step) for step in (1, 2, 5, 6, 96, 97, 100)] == pytest.approx([4e-4, 8e-4, 2e-3, 2e-3, 2e-3, 1.6e-3, 4e-4])
    assert rate.describe() == "to 0.002 over 5 steps, constant, down over the last 5 steps to 0.0004 in the last"


@pytest.mark.parametrize("style", DECAY_COEFFICIENTS)
def test_identity_holds_the_schedule(style):
    rate = schedule(100, lr_wsd_decay_style=style, min_lr=1e-4)
    assert WSDSchedule.from_identity({"lr": 2e-3, "train_iters": 100, **rate.identity}) == rate
    with pytest.raises(ValueError, match="no learning rate"):
        WSDSchedule.from_identity({"lr": 2e-3, "train_iters": "100", **rate.identity})
