"""What is made of measurements: the formulas then give back what was measured. Nothing here depends on how fast anything is."""

import dataclasses

import pytest
from cases import WORK, workload

from megaenc.errors import InputError
from megaenc.estimate.command import parse_estimate_config
from megaenc.estimate.hardware import TABLE
from megaenc.estimate.layout_case import LayoutCase, build_phases
from megaenc.estimate.length_model import build_length_model
from megaenc.estimate.memory import compute_max_memory
from megaenc.estimate.microbench import build_share_config, calibrate, fit_rates
from megaenc.estimate.step_time import compute_step_time
from megaenc.estimate.total import Workload

FLAGS = ["--gpu", "h100", "--model", "tiny", "--num-layers", "5", "--vocab-size", "1000", "--seq-length", "64"]
FLAGS += ["--micro-batch-size", "2", "--global-batch-size", "8", "--objective-schedule", "mlm", "--train-iters", "10"]

# As `measure` tells: of one row, in seconds, bytes and FLOP/s.
MADE_UP = {
    "base": 3e8, "peak": 1e11, "attention": 1e10, "products": 0.08, "predicted": 50,
    "data 1": 0.003, "forward and backward 1": 0.4, "whole 1": 0.9, "taken 1": 5e8,
    "data 4": 0.003, "forward and backward 4": 1.0, "whole 4": 2.3, "taken 4": 6.02e8,
    "reduce small": 1e-3, "reduce activations": 2e-3, "bytes activations": 1e6,
}  # fmt: skip


def made(*more):
    config = parse_estimate_config([*FLAGS, *more], "test").pretrain
    docs = build_length_model(config.data, ())
    expected = Workload(tuple(build_phases(config, 1000, docs)), 0, 0)
    case = LayoutCase.from_config(config, 1000, 2 if more else 1)
    return config, case, expected, docs


def test_a_step_is_made_of_the_measured_layers_and_ends():
    """A layer took (1 - 0.4) / 3 s, all else of a row 0.4 - 0.2 s and its data 0.003; an update 2.3 - 2 (1 + 0.003) s."""
    config, case, expected, _ = made()
    share = build_share_config(config, case)
    rates = fit_rates(MADE_UP, share, expected, True, 1, 1e10, None, "made up")
    work = dataclasses.replace(expected.works[0], predicted=25.0)
    results = compute_step_time(case, work, rates)
    parameters = [dataclasses.replace(case, split=(depth,)).build_stage(0).parameters for depth in (5, 4)]
    update = (2.3 - 2 * 1.003) * parameters[0] / parameters[1]
    assert results.seconds == pytest.approx(4 * (5 * 0.2 + 0.2 + 0.003) + update, rel=1e-3)


def test_memory_is_made_of_the_measured_layers_and_what_the_allocator_lost():
    config, case, expected, _ = made()
    rates = fit_rates(MADE_UP, build_share_config(config, case), expected, True, 1, 1e10, None, "made up")
    four = dataclasses.replace(case, split=(4,))
    work = dataclasses.replace(expected.works[0], predicted=25.0)
    results = compute_max_memory(four, [work], rates)
    assert results.total == pytest.approx(6.02e8)  # what was taken with four layers
    terms = {term.name: term.value for term in results.terms}
    assert terms["allocator"] > rates.pieces_of_kept * terms["activations"] > 0


def test_a_rank_of_two_has_half_of_every_layer_and_of_the_vocabulary():
    config, case, _, _ = made("--gpus", "2", "--tensor-model-parallel-size", "2")
    share = build_share_config(config, case)
    complete = case.build_stage(0)
    assert LayoutCase.from_config(share, share.shape.vocab_size, 1).build_stage(0).parameters == complete.parameters
    assert share.layout.tensor_model_parallel_size == 1 and share.shape.head_dim == config.shape.head_dim


def test_one_device_cannot_say_how_several_are_connected(monkeypatch):
    monkeypatch.setattr("megaenc.estimate.microbench.usable_core_count", lambda: 1)
    config, case, expected, docs = made("--gpus", "2", "--tensor-model-parallel-size", "2")
    with pytest.raises(InputError, match="--calibrate: found one device, expected several to measure the links between 2"):
        calibrate(config, case, expected, docs, None)
    rates = fit_rates(MADE_UP, build_share_config(config, case), expected, False, 1, 1e10, TABLE["h100"], "made up")
    assert rates.inside.bandwidth == 0.75 * 450e9 and rates.between.bandwidth == 0.75 * 50e9 and rates.devices == 8


@pytest.mark.slow
def test_this_machine_is_measured_in_two_processes():
    """No time is looked at but that it is one."""
    config, case, expected, docs = made("--gpus", "2", "--tensor-model-parallel-size", "2")
    config, case = dataclasses.replace(config, bf16=False), dataclasses.replace(case, bf16=False)
    rates = calibrate(config, case, expected, docs, None, seconds=0.01)
    assert rates.host and "2 at once" in rates.source
    assert 1e8 < rates.base < 2e9 and 0 <= rates.pieces < 1e9
    for name in ("peak", "gemm", "attention", "elementwise", "loss", "optimizer"):
        assert 0 < getattr(rates, name) < 1e16
    assert rates.inside.bandwidth > 0
    assert workload().works == [WORK]
