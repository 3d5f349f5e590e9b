"""Costs: operations as training counts them, hours, bytes, and the critical path."""

import manifests
import numpy as np
import pytest
from manifests import TOY, graph

from megaenc.backend import ParallelConfig
from megaenc.estimate.work import ObjectiveWork
from megaenc.model.config import ModelConfig, get_preset
from megaenc.study.manifest.expand import expected_length_model
from megaenc.study.manifest.pretrain_args import build_run_config
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.cost import compute_study_cost
from megaenc.study.plan.training_cost import compute_training_cost

HARDWARE = {"tokens_per_second": 512, "finetune_seconds": 36, "devices": 2}


def pack_flops(flags, vocab_size, predicted, attended):
    """Return the operations of a pack.

    A share is predicted, and a share of the squared lengths seen both ways.
    """
    length = flags.data.seq_length
    squares = expected_length_model(flags).squares
    return ObjectiveWork("", length, predicted * length, squares, attended * squares).flops(
        flags.shape, vocab_size
    )


def test_operations_are_those_that_training_counts():
    """`ModelConfig.training_flops` on packs cut as the study does, and on whole ones."""
    flags = build_run_config({"model": "610m", "packing": "random-length", "seq_length": 2048})
    rng = np.random.default_rng(0)
    cuts = [int(cut) for cut in rng.integers(12, 2048 - 12 + 1, 4000)]
    for attended, predicted in ((0.0, 1.0), (1.0, 0.4)):
        spans = [
            [(0, round(attended * cut), cut), (cut, cut + round(attended * (2048 - cut)), 2048)]
            for cut in cuts
        ]
        counted = [
            get_preset("610m").training_flops(128_256, round(predicted * 2048), span)
            for span in spans
        ]
        assert pack_flops(flags, 128_256, predicted, attended) == pytest.approx(
            np.mean(counted), rel=2e-3
        )
    config = build_run_config({"model": "610m", "seq_length": 512})
    counted = get_preset("610m").training_flops(1000, 512, [(0, 512, 512)])
    assert pack_flops(config, 1000, 1.0, 1.0) == pytest.approx(counted)


def test_a_phase_is_counted_with_its_own_objective(tmp_path):
    plan = graph(tmp_path)
    run = plan.runs["toy-clm-100-mlm40-400"]
    flags = run.model.config
    clm = 8 * pack_flops(flags, 1024, 1.0, 0.0)
    mlm = 8 * pack_flops(flags, 1024, 0.4, 1.0)
    assert compute_training_cost(plan.manifest, run.model, 0, 400).flops == pytest.approx(
        100 * clm + 300 * mlm
    )
    assert compute_training_cost(plan.manifest, run.model, 60, 110).flops == pytest.approx(
        40 * clm + 10 * mlm
    )
    assert clm > mlm  # a head over every position


def test_a_sum_costs_as_much_as_its_objectives_and_counts_its_tokens_once(tmp_path):
    entries = [
        {"size": "toy", "steps": 400, "schedule": text}
        for text in ("sum(clm:1,mlm(mask=0.4):2)", "mlm(mask=0.4)", "clm")
    ]
    plan = graph(tmp_path, *entries, hardware=HARDWARE)
    both, mlm, clm = (
        compute_training_cost(plan.manifest, model, 0, 400) for model in plan.manifest.models
    )
    assert both.flops == pytest.approx(mlm.flops + clm.flops) and both.tokens == mlm.tokens
    assert both.device_hours == pytest.approx(2 * mlm.device_hours)


def test_the_models_of_the_study_of_objectives_have_equal_flops(monkeypatch):
    """FLOPs counted with all positions in the last layer, as the study did."""
    monkeypatch.setattr(ParallelConfig, "selects_rows", False)
    manifest = read_manifest(manifests.STUDY / "objectives.yaml")
    flops = [
        compute_training_cost(manifest, model, 0, model.steps).flops for model in manifest.models
    ]
    assert len(flops) == 16 and flops == pytest.approx([flops[0]] * 16, rel=5e-4)


def test_hours_bytes_and_waits(tmp_path):
    """A step of 8 packs of 64 tokens takes a second of one device; a run has two."""
    entries = [
        {"size": "toy", "steps": 400, "clm_share": 1.0},
        TOY | {"clm_steps": 100},
        {"after": "toy-clm-400", "steps": 100, "mask": 0.4},
    ]
    cost = compute_study_cost(graph(tmp_path, *entries, hardware=HARDWARE))
    assert cost.with_sharing.device_hours == pytest.approx(800 / 3600)
    assert cost.without_sharing.device_hours == pytest.approx(900 / 3600)
    assert cost.finetune_hours == pytest.approx(3 * 2 * 2 * 3 * 36 / 3600)
    parameters = ModelConfig(2, 64, 128, 2, 1).parameter_count(1024)
    # Three ends and the step of the branch, in float32
    assert cost.disk["checkpoints with optimizer"] == 4 * 12 * parameters
    assert cost.disk["exports"] == 3 * 4 * parameters
    assert cost.longest_chain.hours == pytest.approx((400 / 2 + 100 / 2 + 36) / 3600)
    assert cost.longest_chain.stages[:2] == (
        "pretrain/toy-clm-400",
        "pretrain/toy-clm-dec400-mlm40-500",
    )
    assert cost.longest_chain_run_by_run.hours == pytest.approx((400 / 2 + 300 / 2 + 36) / 3600)
    name = "toy-clm-100-mlm40-400"
    assert cost.longest_chain_run_by_run.stages[1:] == (
        f"pretrain/{name}",
        f"export/{name}",
        f"finetune/{name}@demo_sc",
    )


def test_bf16_keeps_master_weights_and_without_a_rate_no_hours_are_made_up(tmp_path):
    sizes = {"toy": manifests.BASE["sizes"]["toy"] | {"bf16": True}}
    cost = compute_study_cost(graph(tmp_path, TOY, sizes=sizes))
    parameters = ModelConfig(2, 64, 128, 2, 1).parameter_count(1024)
    assert list(cost.disk.values())[:2] == [14 * parameters, 2 * parameters]
    assert (
        cost.with_sharing.device_hours,
        cost.finetune_hours,
        cost.longest_chain_run_by_run.hours,
    ) == (None, None, None)
    of_sizes = compute_study_cost(graph(tmp_path, hardware={"tokens_per_second_of": {"toy": 512}}))
    assert of_sizes.with_sharing.device_hours == pytest.approx(of_sizes.with_sharing.steps / 3600)
