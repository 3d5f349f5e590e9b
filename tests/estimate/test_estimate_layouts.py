"""What is suggested fits, can be run, and is read back as it was written."""

import dataclasses

import pytest
from cases import WORK, case, rates, workload

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.errors import InputError
from megaenc.estimate.layout_case import HypotheticalLayout, format_split, parse_split
from megaenc.estimate.total import balance_stages, estimate_layout, find_best_layout, format_layout_flags
from megaenc.model.config import PRESETS, ModelConfig
from megaenc.training.config import parse_config


@pytest.mark.parametrize(
    ("text", "layers", "stages"),
    [("Et*6|t*7|t*7|t*6L", 26, 4), ("E|t*13|t*13|L", 26, 4), ("Et|(tt|)*3tL", 8, 5), ("Ett|tt,|ttL", 6, 3), ("Et|t|t|tL", 4, 2)],
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


def test_the_stage_with_a_large_head_has_fewer_layers():
    shape = dataclasses.replace(PRESETS["610m"])
    laid = case(shape, gpus=4, vocab_size=128_256, pipeline_model_parallel_size=4)
    split = balance_stages(laid, WORK, rates())
    assert sum(split) == 26 and split[-1] < min(split[:-1])
    assert parse_split(format_split(split), 26, 4) == split
    faster = dataclasses.replace(laid, split=split)
    assert estimate_layout(faster, workload(), rates()).seconds < estimate_layout(laid, workload(), rates()).seconds


def test_a_layout_that_does_not_fit_gets_one_that_does():
    laid, expected = case(ModelConfig(8, 256, 768, 8, 4), gpus=8, batch=64, micro=8), workload(batch=64)
    complete = estimate_layout(laid, expected, rates())
    small = rates(memory=complete.memory.total * 0.6)
    own, results = estimate_layout(laid, expected, small), find_best_layout(laid, expected, small)
    assert not own.fits and results.fits and results.memory.total <= small.memory
    assert results.case.global_batch_size == 64 and results.case.gpus == 8
    config = parse_config([word for word in format_layout_flags(results.case) if not word.startswith("--overlap")], "test")
    assert config.micro_batch_size == results.case.micro_batch_size
    assert config.layout.tensor_model_parallel_size == results.case.tensor_parallel_size
    assert find_best_layout(laid, expected, rates(memory=2e6)) is None


def test_no_layout_is_better_than_the_best():
    laid, expected = case(ModelConfig(8, 256, 768, 8, 4), gpus=4, batch=32), workload(batch=32)
    results = find_best_layout(laid, expected, rates())
    assert results.seconds <= estimate_layout(laid, expected, rates()).seconds
    again = find_best_layout(results.case, expected, rates())
    assert again.case == results.case


def test_a_better_layout_divides_every_batch_of_a_ramp_up():
    laid, expected = case(ModelConfig(8, 256, 768, 8, 4), gpus=4, batch=32, micro=1), workload(batch=32)
    (phase,) = expected.phases
    growing = dataclasses.replace(expected, phases=[dataclasses.replace(phase, batches=((4, 10), *phase.batches))])
    results = find_best_layout(laid, growing, rates())
    assert 4 % (results.case.micro_batch_size * results.case.data_parallel_size) == 0
    assert find_best_layout(laid, expected, rates()).case.micro_batch_size > results.case.micro_batch_size
