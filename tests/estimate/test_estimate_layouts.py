"""Operations and hours by hand; what is suggested fits, can be run, and is read back as it was written."""

import dataclasses

import pytest
from cases import SHAPE, WORK, case, rates, workload

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.errors import InputError
from megaenc.estimate.layout_case import HypotheticalLayout, format_split, parse_split
from megaenc.estimate.step_time import compute_step_time
from megaenc.estimate.total import estimate_layout, find_best_layout, format_layout_flags
from megaenc.model.config import ModelConfig
from megaenc.training.config import parse_config

EIGHT_LAYERS = ModelConfig(8, 256, 768, 8, 4)


@pytest.mark.parametrize("recomputation", [None, "full"])
def test_operations_by_hand(recomputation):
    """16 packs of 64 tokens: 6 x 2 x 10,752 a token, 6 x 2 x 2 s^2 x 32 of attention, 6 x 32 x 1,024 a guess.

    What is repeated is not counted.
    """
    body = 64 * 6 * 2 * 10_752
    attention = 6 * 2 * 2 * 64**2 * 32
    head = 25.6 * 6 * 32 * 1024
    step = compute_step_time(case(SHAPE, recompute_granularity=recomputation), WORK, rates())
    assert step.flops == pytest.approx(16 * (body + attention + head))


def test_a_given_utilization_gives_the_hours():
    results = estimate_layout(case(gpus=4), dataclasses.replace(workload(), mfu=0.1), rates())
    [phase] = results.phases
    assert phase.tokens == 100 * 16 * 64
    assert results.seconds == pytest.approx(phase.flops / (0.1 * 1e12 * 4))
    assert results.hours == pytest.approx(results.seconds * 4 / 3600)


@pytest.mark.parametrize(("stages", "count", "virtual"), [(2, 1, 1), (4, 8, 1), (2, 4, 2)])
def test_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(stages, count, virtual):
    """Interleaved parts of a stage divide p - 1."""
    body = dataclasses.replace(WORK, predicted=0.0)
    parts = {"num_layers_per_virtual_pipeline_stage": 8 // stages // virtual} if virtual > 1 else {}
    laid = case(ModelConfig(8, 32, 80, 4, 2), gpus=stages, batch=count, pipeline_model_parallel_size=stages, **parts)
    idle = (stages - 1) / virtual
    results = compute_step_time(laid, body, rates(loss=1e30, optimizer=1e30))
    assert results.pipeline_bubble == pytest.approx(idle / (count + idle))


@pytest.mark.parametrize(
    ("text", "layers", "stages"),
    [("Et*6|t*7|t*7|t*6L", 26, 4), ("E|t*13|t*13|L", 26, 4), ("Et|(tt|)*3tL", 8, 5), ("Ett|tt,|ttL", 6, 3)],
)
def test_megatrons_notation_is_read_as_megatron_reads_it(text, layers, stages):
    flags = {"pipeline_model_parallel_size": stages, "pipeline_model_parallel_layout": text}
    split = HypotheticalLayout(**flags).layers_per_chunk(layers)
    assert split == ParallelConfig(**flags).layers_per_chunk(layers)
    if len(split) == stages:
        assert parse_split(format_split(split), layers, stages) == split


@pytest.mark.parametrize("text", ["Ettt|ttL", "tt|ttL", "Ett|tt", "E(tt|ttL", "Ett||ttL", "Et|t|ttL"])
def test_what_says_no_split_is_refused(text):
    with pytest.raises(InputError, match=r"--pipeline-model-parallel-layout .*: (expected|found)"):
        parse_split(text, 4, 2)


def test_a_layout_that_does_not_fit_gets_one_that_does():
    laid = case(EIGHT_LAYERS, gpus=8, batch=64, micro=8)
    expected = workload(batch=64)
    complete = estimate_layout(laid, expected, rates())
    small = rates(memory=complete.memory.total * 0.6)
    assert not estimate_layout(laid, expected, small).fits
    results = find_best_layout(laid, expected, small)
    assert results.fits
    assert results.memory.total <= small.memory
    assert (results.case.global_batch_size, results.case.gpus) == (64, 8)
    config = parse_config([word for word in format_layout_flags(results.case) if not word.startswith("--overlap")], "test")
    assert config.micro_batch_size == results.case.micro_batch_size
    assert config.layout.tensor_model_parallel_size == results.case.tensor_parallel_size
    assert find_best_layout(laid, expected, rates(memory=2e6)) is None


def test_a_better_layout_divides_every_batch_of_a_ramp_up():
    laid = case(EIGHT_LAYERS, gpus=4, batch=32)
    expected = workload(batch=32)
    [phase] = expected.phases
    growing = dataclasses.replace(expected, phases=[dataclasses.replace(phase, batches=((4, 10), *phase.batches))])
    results = find_best_layout(laid, growing, rates())
    assert 4 % (results.case.micro_batch_size * results.case.data_parallel_size) == 0
    assert find_best_layout(laid, expected, rates()).case.micro_batch_size > results.case.micro_batch_size
