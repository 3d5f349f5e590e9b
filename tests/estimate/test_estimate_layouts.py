"""Operations and hours by hand; suggested layouts fit, run and are read back."""

import dataclasses

import pytest
from cases import DEVICE, SHAPE, WORK, case, workload

from megaenc.estimate.devices import ASSUMED, DEVICES
from megaenc.estimate.total import (
    compute_idle_fraction,
    estimate_layout,
    find_simplest_layout,
    format_layout_flags,
)
from megaenc.model.config import ModelConfig
from megaenc.training.config import parse_config

EIGHT_LAYERS = ModelConfig(8, 256, 768, 8, 4)


def test_operations_by_hand():
    """Expect the sum for a pack of 64 tokens.

    6 x 2 x 10,752 a token, 6 x 2 x 2 s^2 x 32 for attention, 6 x 32 x 1,024 a prediction.
    """
    body = 64 * 6 * 2 * 10_752
    attention = 6 * 2 * 2 * 64**2 * 32
    head = 25.6 * 6 * 32 * 1024
    assert WORK.flops(SHAPE, 1024) == pytest.approx(body + attention + head)


def test_hours_are_flops_over_utilization():
    results = estimate_layout(case(gpus=4), workload(), DEVICE, 0.1)
    [phase] = results.phases
    assert phase.tokens == 100 * 16 * 64
    assert phase.flops == pytest.approx(100 * 16 * WORK.flops(SHAPE, 1024))
    assert results.seconds == pytest.approx(phase.flops / (0.1 * 1e12 * 4))
    assert results.hours == pytest.approx(results.seconds * 4 / 3600)
    # 16 packs on 3 ranks: 6 on one of them.
    assert estimate_layout(case(gpus=3), workload(), DEVICE, 0.1).seconds == pytest.approx(
        phase.flops / (0.1 * 1e12 * 16 / 6)
    )
    repeated = estimate_layout(case(gpus=4, recompute_granularity="full"), workload(), DEVICE, 0.1)
    assert repeated.seconds == pytest.approx(4 / 3 * results.seconds)


def test_the_utilization_is_that_of_the_nearest_size():
    assert DEVICES["h100"].utilization(150_000_000).share == 0.317
    assert DEVICES["h100"].utilization(7_000_000_000).share == 0.512
    assert DEVICES["b200"].utilization(1_000_000_000) == ASSUMED


@pytest.mark.parametrize(("stages", "count", "virtual"), [(2, 1, 1), (4, 8, 1), (2, 4, 2)])
def test_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(stages, count, virtual):
    """Interleaved parts of a stage divide p - 1."""
    parts = {"num_layers_per_virtual_pipeline_stage": 8 // stages // virtual} if virtual > 1 else {}
    laid = case(
        ModelConfig(8, 32, 80, 4, 2),
        gpus=stages,
        batch=count,
        pipeline_model_parallel_size=stages,
        **parts,
    )
    idle = (stages - 1) / virtual
    assert compute_idle_fraction(laid) == pytest.approx(idle / (count + idle))


def test_a_layout_that_does_not_fit_gets_one_that_does():
    laid = case(EIGHT_LAYERS, gpus=8, batch=64, micro=8)
    expected = workload(batch=64)
    complete = estimate_layout(laid, expected, DEVICE, 0.1)
    assert complete.fits
    small = dataclasses.replace(DEVICE, gib=complete.memory.total / 2**30)  # 94 % of it can be used
    assert not estimate_layout(laid, expected, small, 0.1).fits
    simplest = find_simplest_layout(laid, expected, small)
    assert estimate_layout(simplest, expected, small, 0.1).fits
    assert (simplest.global_batch_size, simplest.gpus) == (64, 8)
    config = parse_config(
        [word for word in format_layout_flags(simplest) if not word.startswith("--overlap")], "test"
    )
    assert config.micro_batch_size == simplest.micro_batch_size
    assert config.layout.tensor_model_parallel_size == simplest.tensor_parallel_size
    assert find_simplest_layout(laid, expected, dataclasses.replace(DEVICE, gib=2)) is None


def test_the_simplest_layout_has_the_largest_batch_without_model_parallelism():
    simplest = find_simplest_layout(
        case(EIGHT_LAYERS, gpus=4, batch=32, pipeline_model_parallel_size=2),
        workload(batch=32),
        DEVICE,
    )
    assert (simplest.tensor_parallel_size, simplest.num_stages, simplest.micro_batch_size) == (
        1,
        1,
        8,
    )
    assert not simplest.layout.recompute_granularity
