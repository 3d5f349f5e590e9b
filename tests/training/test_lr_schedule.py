"""The learning rate, by hand."""

import pytest

from megaenc.errors import InputError
from megaenc.training.lr_schedule import WSDSchedule, resolve_steps


def test_warm_up_plateau_and_decay_by_hand():
    rate = WSDSchedule(peak=1.0, warmup=4, decay=5, total=12)
    assert [rate(n) for n in range(1, 13)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_no_warm_up_and_all_decay():
    rate = WSDSchedule(peak=1.0, warmup=0, decay=4, total=4)
    assert [rate(n) for n in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]


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
