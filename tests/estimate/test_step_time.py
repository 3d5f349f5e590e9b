"""Time by hand: products, the pipeline's idle share, what is sent, and what hides behind computation."""

import dataclasses

import pytest
from cases import SHAPE, WORK, case, rates, workload

from megaenc.estimate.hardware import Link
from megaenc.estimate.step_time import communication_terms, compute_step_time, group_link, layer_bytes_moved
from megaenc.estimate.total import estimate_layout
from megaenc.model.config import ModelConfig

EIGHT = ModelConfig(8, 32, 80, 4, 2)
ENDLESS = {"loss": 1e30, "optimizer": 1e30}
BODY = dataclasses.replace(WORK, predicted=0.0)
"""Without a head."""


def seconds(step):
    return {term.name: term.value for term in step.terms}


def test_products_by_hand():
    """16 packs of 64 tokens: 6 x 2 x 10,752 operations a token, 6 x 2 x 2 s^2 x 32 of attention, 6 x 32 x 1,024 a guess."""
    results = compute_step_time(case(), WORK, rates())
    body, attention, head = 64 * 6 * 2 * 10_752, 6 * 2 * 2 * 64**2 * 32, 25.6 * 6 * 32 * 1024
    assert results.flops == pytest.approx(16 * (body + attention + head))
    named = seconds(results)
    assert named["matrix products"] == pytest.approx(16 * body / 5e11)
    assert named["attention"] == pytest.approx(16 * attention / 2e11)
    assert named["head"] == pytest.approx(16 * head / 5e11)
    assert results.seconds == pytest.approx(sum(named.values()))
    assert results.pipeline_bubble == 0 and results.sent == ()


def test_bytes_of_norms_are_those_of_their_kernels():
    """As counted by tests/model/kernels/interpreted/launches.py; torch's own LayerNorm moves half as many again."""
    layer_norm = dataclasses.replace(SHAPE, normalization="LayerNorm", activation="gelu")
    biases = dataclasses.replace(layer_norm, norm_bias=True)
    device = layer_bytes_moved(case(), host=False)
    more = 2 * 64 * 8 * 32  # bytes of 8 H for each token
    assert layer_bytes_moved(case(layer_norm), host=False) == device
    assert layer_bytes_moved(case(biases), host=False) - device == pytest.approx(more + 8 * 2 * 32)  # two biases
    assert layer_bytes_moved(case(layer_norm), host=True) - layer_bytes_moved(case(), host=True) == pytest.approx(more)


def test_muon_by_hand():
    """A layer's matrices: 2 of 32 x 32, 2 of 32 x 16, 3 of 32 x 80; 5 iterations of 4 m^2 n + 2 m^3 operations each."""
    flops = 5 * 2 * (2 * 6 * 32**3 + 2 * (4 * 16**2 * 32 + 2 * 16**3) + 3 * (4 * 32**2 * 80 + 2 * 32**3))
    one, two = (
        compute_step_time(dataclasses.replace(case(gpus=gpus, **layout), newton_schulz_steps=5), WORK, rates())
        for gpus, layout in ((1, {}), (2, {"use_distributed_optimizer": True}))
    )
    assert seconds(one)["orthogonalization"] == pytest.approx(flops / 5e11)
    assert seconds(two)["orthogonalization"] == pytest.approx(flops / 2 / 5e11)
    # A half of the momenta, of which each rank sends a half to the other, and as many updates back.
    assert seconds(two)["Muon's matrices"] == pytest.approx(2 * (2 * 2 * 10_752) / 2 / 2 / 1e10)
    plain = compute_step_time(case(), WORK, rates())
    assert "orthogonalization" not in seconds(plain)
    assert one.seconds - plain.seconds == pytest.approx(flops / 5e11)


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 8), (4, 8), (8, 16)])
def test_even_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(stages, count):
    laid = case(EIGHT, gpus=stages, batch=count, pipeline_model_parallel_size=stages)
    results = compute_step_time(laid, BODY, rates(**ENDLESS))
    assert results.pipeline_bubble == pytest.approx((stages - 1) / (count + stages - 1))


def test_interleaved_stages_idle_less():
    turns = {"num_layers_per_virtual_pipeline_stage": 2}
    plain, dealt = (
        compute_step_time(case(EIGHT, gpus=2, batch=4, pipeline_model_parallel_size=2, **more), BODY, rates(**ENDLESS))
        for more in ({}, turns)
    )
    assert plain.pipeline_bubble == pytest.approx(1 / 5)
    assert dealt.pipeline_bubble == pytest.approx(0.5 / 4.5)  # (p - 1) / v of m + (p - 1) / v


def test_a_step_lasts_as_long_as_its_slowest_stage_and_the_way_through_the_others():
    laid = case(EIGHT, gpus=2, batch=8, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|tttttt" + "L")
    results = compute_step_time(laid, BODY, rates(**ENDLESS, inside=Link(1e30, 0.0)))
    layer = compute_step_time(case(EIGHT, batch=1), BODY, rates(**ENDLESS)).seconds / 8
    assert results.seconds == pytest.approx(8 * 6 * layer + 2 * layer)


def test_gradients_are_sent_twice_but_for_a_share():
    for copies in (2, 4, 8):
        laid = case(gpus=copies)
        [term] = communication_terms(laid, laid.build_stage(0), WORK)
        assert term.value == pytest.approx(2 * (copies - 1) / copies * 4 * laid.build_stage(0).parameters)
        assert seconds(compute_step_time(laid, WORK, rates()))["gradients' all-reduce"] == pytest.approx(term.value / 1e10)
    distributed = case(gpus=4, use_distributed_optimizer=True)
    [term] = communication_terms(distributed, distributed.build_stage(0), WORK)
    assert term.value == pytest.approx(3 / 4 * (4 + 2) * distributed.build_stage(0).parameters)


def test_tensor_parallel_ranks_send_four_rows_a_layer():
    laid = case(gpus=2, batch=1, tensor_model_parallel_size=2)
    [term] = communication_terms(laid, laid.build_stage(0), WORK)
    row = 64 * 32 * 2
    # Two layers, the embedding; the head's gradient, and four float32 of the softmax, of which each rank sends its own.
    assert term.value == pytest.approx((4 * 2 + 1) * row + 25.6 * (32 * 2 + 4 * 4))


@pytest.mark.parametrize(
    ("flags", "exchanges", "overlapping"),
    [
        ({}, 4 * 2 + 1, 2 * 2),
        ({"sequence_parallel": True}, 5 * 2 + 1.5, 2 * 2),  # the head's gather is half an exchange
        ({"recompute_granularity": "full"}, 6 * 2 + 1, 2 * 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 4 * 2 + 2 + 1, 2 * 2),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, 5 * 2 + 1, 2 * 2),
        ({"recompute_granularity": "selective"}, 4 * 2 + 1, 2 * 2),
    ],
)
def test_what_overlaps_with_products_is_two_exchanges_a_layer(flags, exchanges, overlapping):
    laid = case(gpus=2, batch=1, tensor_model_parallel_size=2, **flags)
    one, name = 64 * 32 * 2 / 1e10, "tensor-parallel all-reduce"
    head = 25.6 * (32 * 2 + 4 * 4) / 1e10
    on_host, on_device = (seconds(compute_step_time(laid, WORK, rates(gemm=1e9, host=host)))[name] for host in (True, False))
    assert on_host == pytest.approx(exchanges * one + head)
    assert on_host - on_device == pytest.approx(overlapping * one)


def test_a_tied_embedding_is_summed_over_first_and_last_stage():
    shape = dataclasses.replace(SHAPE, untie_embeddings_and_output_weights=False)
    name = "tied embedding's all-reduce"
    laid = case(shape, gpus=2, batch=2, pipeline_model_parallel_size=2)
    assert seconds(compute_step_time(laid, WORK, rates()))[name] == pytest.approx(4 * 1024 * 32 / 1e10)
    assert name not in seconds(compute_step_time(case(gpus=2, batch=2, pipeline_model_parallel_size=2), WORK, rates()))
    assert name not in seconds(compute_step_time(case(shape), WORK, rates()))


def test_what_overlaps_is_hidden_but_for_the_last_bucket_and_never_on_a_host():
    large = ModelConfig(24, 1024, 4096, 16, 16)
    laid = case(large, gpus=8, batch=8)
    early = case(large, gpus=8, batch=8, overlap_grad_reduce=True)
    name = "gradients' all-reduce"
    slow = rates(gemm=1e10)
    plain, hidden, host = (
        seconds(compute_step_time(laid, WORK, slow))[name],
        seconds(compute_step_time(early, WORK, slow))[name],
        seconds(compute_step_time(early, WORK, dataclasses.replace(slow, host=True)))[name],
    )
    assert hidden == pytest.approx(plain * 40e6 / laid.build_stage(0).parameters)
    assert host == plain


def test_groups_that_leave_their_node_share_its_links():
    mine = rates()
    assert group_link(mine, 1, 8) is mine.inside
    assert group_link(mine, 1, 16).bandwidth == 8e9  # all eight of a node, each with its own link
    assert group_link(mine, 4, 16).bandwidth == 2e9  # two of each node


def test_more_devices_take_less_time_and_more_device_hours():
    results = [estimate_layout(case(gpus=gpus), workload(), rates()) for gpus in (1, 2, 4, 8, 16)]
    times, hours = [one.seconds for one in results], [one.hours for one in results]
    assert times == sorted(times, reverse=True) and hours == sorted(hours)
    [phase] = results[0].phases
    assert {one.phases[0].flops for one in results} == {phase.flops} and phase.tokens == 100 * 16 * 64


def test_a_given_utilization_gives_the_hours():
    expected = dataclasses.replace(workload(), mfu=0.1)
    results = estimate_layout(case(gpus=4), expected, rates())
    assert results.seconds == pytest.approx(results.phases[0].flops / (0.1 * 1e12 * 4))


def test_recomputation_costs_a_forward_pass():
    plain, full = (compute_step_time(case(SHAPE, recompute_granularity=how), WORK, rates()) for how in (None, "full"))
    again = seconds(full)["computed again"]
    assert again == pytest.approx(
        seconds(plain)["matrix products"] / 3 + seconds(plain)["attention"] * 2 / 7 + seconds(plain)["norms, SwiGLU, copies"] / 3
    )
    assert full.flops == plain.flops  # what is repeated is not counted
