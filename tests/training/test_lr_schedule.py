"""Learning rates of all steps: megatron-core's after the warm-up."""

import re

import pytest
import runs

from megaenc.errors import InputError
from megaenc.training.lr_schedule import (
    DECAY_STYLES,
    WSD,
    LearningRateConfig,
    LearningRateSchedule,
    resolve_steps,
)

BUILT_IN = ("linear", "cosine", "minus_sqrt", "exponential")


def test_parts_that_overlap_are_refused():
    with pytest.raises(
        InputError, match="warm-up of 8 and decay of 5 steps do not fit in the 12 steps of the run"
    ):
        LearningRateSchedule(peak=1.0, warmup=8, decay=5, total=12)


def test_steps_or_a_fraction_of_the_run():
    assert resolve_steps("lr-warmup", 7, None, 100) == 7
    assert resolve_steps("lr-warmup", None, 0.125, 100) == 13  # 12.5, half rounded up
    assert resolve_steps("lr-warmup", None, None, 100) == 5
    with pytest.raises(InputError, match="--lr-warmup-iters and --lr-warmup-fraction: found both"):
        resolve_steps("lr-warmup", 7, 0.1, 100)


def schedule(total: int, **flags) -> LearningRateSchedule:
    """Return the schedule of these flags."""
    return LearningRateSchedule.from_config(LearningRateConfig(**flags), total)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "flags",
    [
        *({"lr_wsd_decay_style": style} for style in BUILT_IN),
        *({"lr_decay_style": style} for style in ("linear", "cosine", "constant")),
    ],
)
def test_after_the_warm_up_rates_are_megatron_cores(flags):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    minimum = 0.0 if "constant" in flags.values() else 0.01
    config = LearningRateConfig(lr=0.3, min_lr=minimum, lr_warmup_iters=5, **flags)
    ours = LearningRateSchedule.from_config(config, 40)
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
    assert [rate(step) for step in (1, 2, 5, 6, 96, 97, 100)] == pytest.approx(
        [4e-4, 8e-4, 2e-3, 2e-3, 2e-3, 1.6e-3, 4e-4]
    )
    assert (
        rate.describe()
        == "to 0.002 over 5 steps, constant, down over the last 5 steps to 0.0004 in the last"
    )


@pytest.mark.parametrize("style", BUILT_IN)
def test_identity_holds_the_schedule(style):
    rate = schedule(100, lr_wsd_decay_style=style, min_lr=1e-4)
    assert (
        LearningRateSchedule.from_identity({"lr": 2e-3, "train_iters": 100, **rate.identity})
        == rate
    )
    with pytest.raises(ValueError, match="no learning rate"):
        LearningRateSchedule.from_identity({"lr": 2e-3, "train_iters": "100", **rate.identity})


@pytest.mark.parametrize("page", ["flags.md", "starting-runs.md"])
def test_every_style_is_in_the_documents(page):
    text = (runs.ROOT / "docs" / page).read_text()
    assert [style for style in DECAY_STYLES._registered if style not in text] == []


def polynomial(elapsed: float, *, lr_warmup_fraction: float) -> float:
    """A style of a package, which reads a flag."""
    return (1 - elapsed) ** (10 * lr_warmup_fraction)


def two_numbers(elapsed: float, other: float) -> float:
    """A function that needs more than a style gets."""
    return elapsed * other


def endless(elapsed: float) -> float:
    """A style without a number at the start."""
    return 1 / elapsed if elapsed else float("inf")


def resolved(elapsed: float, *, lr_warmup_iters: int) -> float:
    """A style that reads what a run computes."""
    return elapsed * lr_warmup_iters


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with the style `polynomial` and objects that are no styles."""
    info = tmp_path / "rates-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rates\nVersion: 1.2\n")
    polynomial_style = f"{__name__}:polynomial"
    offers = {
        "polynomial": polynomial_style,
        "number": "math:pi",
        "constant": polynomial_style,
        **{name: f"{__name__}:{name}" for name in ("two_numbers", "endless", "resolved")},
        "other": "rates_of_none:f",
    }
    lines = [f"{name} = {place}" for name, place in offers.items()]
    (info / "entry_points.txt").write_text("\n".join(["[megaenc.lr_decay_styles]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_a_package_offers_a_style_that_reads_a_flag_and_is_part_of_the_identity():
    rate = schedule(100, lr_decay_style="polynomial", lr_warmup_fraction=0.2)
    assert rate(61) == pytest.approx(2e-3 * 0.5**2)
    assert rate.identity["lr_warmup_fraction"] == 0.2
    assert re.fullmatch(r"rates 1\.2 \([0-9a-f]{12}\)", rate.identity["lr_decay_package"])
    assert (
        LearningRateSchedule.from_identity({"lr": 2e-3, "train_iters": 100, **rate.identity})
        == rate
    )
    assert schedule(100, lr_wsd_decay_style="polynomial", lr_warmup_fraction=0.2).decay == 5


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"lr_decay_style": "cosin"},
            "unknown decay style `cosin`, expected one of .*; did you mean `cosine`?",
        ),
        ({"lr_wsd_decay_style": WSD}, "--lr-wsd-decay-style: unknown decay style `WSD`"),
        ({"lr_decay_style": "number"}, "package `rates` offers math:pi, which is no function"),
        ({"lr_wsd_decay_style": "constant"}, "which is called `constant`, which is no shape"),
        ({"lr_decay_style": "two_numbers"}, "`two_numbers` cannot be computed: TypeError"),
        ({"lr_decay_style": "endless"}, "decay style `endless` is inf after 0 of the decay"),
        (
            {"lr_decay_style": "resolved"},
            "reads `lr_warmup_iters`, which is no flag that a decay style can read",
        ),
        ({"lr_decay_style": "other"}, "package `rates` cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_what_is_no_style_is_one_line(flags, words):
    with pytest.raises(InputError, match=words):
        schedule(100, **flags)
