"""Memory by hand, and what autograd really saves of a layer."""

import dataclasses

import pytest
import torch
from cases import SHAPE, WORK, case, rates

from megaenc.backend import KernelConfig, ParallelConfig
from megaenc.estimate.layout_case import ObjectiveWork
from megaenc.estimate.memory import (
    ALIGNMENT,
    CHUNK_BYTES,
    KEPT_KEYS,
    LOGIT_BYTES_AT_ONCE,
    LOGITS_AT_ONCE,
    QUERY_BLOCK,
    compute_max_memory,
    compute_save_cost,
    compute_stage_memory,
    layer_activation_bytes,
    micro_batches_in_flight,
    saved_keys_per_token,
    stage_activation_bytes,
)
from megaenc.model.config import ModelConfig

SMALL = ModelConfig(2, 64, 160, 8, 4)


def terms(memory):
    return {term.name: term.value for term in memory.terms}


def test_a_tiny_model_by_hand():
    """Parameters: 2 x (10,752 + 64) of layers, 32 of the last norm, 2 x 1,024 x 32 of the two vocabulary matrices."""
    parameters = 2 * 10_816 + 32 + 2 * 32_768
    assert SHAPE.parameter_count(1024) == parameters
    results = terms(compute_stage_memory(case(), WORK, case().build_stage(0), rates()))
    assert results["weights"] == 2 * parameters
    assert results["gradients"] == results["master weights"] == 4 * parameters
    assert results["AdamW's moments"] == 8 * parameters
    norms, projections = 2 * (2 * 32 + 4 + 2 * 32), 2 * (2 * 32 + 2 * 16)
    per_token = norms + projections + 4 * 4 + 3 * 2 * 80
    assert results["activations"] == 2 * 64 * per_token
    in_float32 = terms(compute_stage_memory(case(bf16=False), WORK, case().build_stage(0), rates()))
    assert in_float32["weights"] == 4 * parameters and "master weights" not in in_float32


def test_a_distributed_optimizer_is_shared_by_the_copies_of_the_model():
    complete, shared = (
        terms(compute_max_memory(case(gpus=4, use_distributed_optimizer=on), [WORK], rates())) for on in (False, True)
    )
    for name in ("master weights", "AdamW's moments"):
        assert shared[name] == complete[name] / 4
    assert shared["gradients"] == complete["gradients"]


def test_a_save_by_hand():
    """Of 14 bytes a parameter in bf16, 12 in float32, shared by data-parallel ranks with or without the distributed optimizer."""
    parameters = 2 * 10_816 + 32 + 2 * 32_768
    from megaenc.training.checkpoint.state_tensors import MAX_CHUNK_BYTES

    assert CHUNK_BYTES == MAX_CHUNK_BYTES
    one, many = compute_save_cost(case(), rates()), compute_save_cost(case(gpus=16), rates())
    assert one.total == many.total == 14 * parameters
    assert (one.ranks_per_node, one.synchronous, one.asynchronous) == (1, CHUNK_BYTES, 14 * parameters)
    assert (many.ranks_per_node, many.synchronous, many.asynchronous) == (8, 8 * CHUNK_BYTES, 8 * 14 * parameters / 16)
    host = compute_save_cost(case(gpus=2, bf16=False), rates(host=True))
    assert (host.total, host.synchronous, host.asynchronous) == (12 * parameters, 0, 12 * parameters)
    stages = compute_save_cost(case(gpus=2, pipeline_model_parallel_size=2), rates())
    assert stages.total == one.total and stages.asynchronous == 2 * 14 * (10_816 + 32 + 32_768)


def test_stages_hold_what_the_pipeline_has_in_flight():
    four = case(ModelConfig(8, 32, 80, 4, 2), gpus=4, batch=16, pipeline_model_parallel_size=4)
    assert [micro_batches_in_flight(four, stage) for stage in four.build_stages()] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(dataclasses.replace(four, global_batch_size=2), stage) for stage in four.build_stages()] == [
        2,
        2,
        2,
        1,
    ]
    turns = case(ModelConfig(8, 32, 80, 4, 2), gpus=2, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert [micro_batches_in_flight(turns, stage) for stage in turns.build_stages()] == [5 / 2, 3 / 2]  # of parts, two to a stage


def test_the_chunked_loss_is_the_models_own():
    from megaenc.model import linear_cross_entropy

    assert (linear_cross_entropy.CHUNK_LOGITS, linear_cross_entropy.FUSED_CHUNK_BYTES) == (
        LOGITS_AT_ONCE,
        LOGIT_BYTES_AT_ONCE,
    )


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("layout", [{}, {"num_layers": 3}])
def test_parameters_are_those_of_the_model(layout):
    from megaenc.model.encoder import build_encoder

    others = dict(normalization="LayerNorm", norm_bias=True, embedding_norm=True, prediction_head=True, output_layer_bias=True)
    for tied in (False, True):
        shape = ModelConfig(3, 64, 160, 8, 4, add_qkv_bias=tied, qk_layernorm=tied, untie_embeddings_and_output_weights=not tied)
        shape = dataclasses.replace(shape, **others) if tied else shape
        encoder = build_encoder(shape, 1000, 64, ParallelConfig(), torch.float32, seed=None)
        mine = case(shape, vocab_size=1000).build_stage(0).parameters
        assert mine == sum(parameter.numel() for parameter in encoder.parameters())
        stages = case(shape, gpus=3, vocab_size=1000, pipeline_model_parallel_size=3).build_stages()
        assert sum(stage.parameters for stage in stages) - mine == tied * 1024 * 64  # tied, the last stage has a copy
        assert case(shape, vocab_size=1024).build_stage(0).parameters == shape.parameter_count(1024)


GEMMA3 = dataclasses.replace(
    SMALL,
    kv_channels=16,
    qk_layernorm=True,
    apply_layernorm_1p=True,
    post_norms=True,
    activation="gelu_pytorch_tanh",
    scale_embedding=True,
    untie_embeddings_and_output_weights=False,
)
HEADS_NORMALISED = [ModelConfig(2, 96, 96, heads, 2, kv_channels=32, qk_layernorm=True) for heads in (2, 4)]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [SMALL, *HEADS_NORMALISED, dataclasses.replace(SMALL, normalization="LayerNorm", activation="gelu"), GEMMA3]
)
@pytest.mark.parametrize(
    "modules", [(), ("core_attn",), ("mlp",), ("activation",)], ids=lambda modules: " ".join(modules) or "all"
)
@pytest.mark.parametrize("attention", ["sdpa", "onednn"])
def test_layers_keep_what_autograd_saves_of_them(attention, dtype, shape, modules):
    """The second layer's own storages, on the host, and those of the third, the last, which computes 9 positions.

    What they share with others or with the weights is not counted.
    """
    from megaenc.model.encoder import build_encoder
    from megaenc.model.packed_sequences import PackedSequences
    from megaenc.objectives import Attention

    rows, shape = 256, dataclasses.replace(shape, num_layers=3)
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    kernels = KernelConfig(attention_backend=attention)
    encoder = build_encoder(shape, 512, rows, ParallelConfig(**recompute), dtype, seed=3, kernels=kernels)
    saved, keeping = {tensor.untyped_storage().data_ptr(): 0 for tensor in encoder.parameters()}, []

    def pack(tensor):
        keeping.append(tensor)  # or its address would be given out again
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    results = []
    for layer in encoder.decoder.layers:
        layer.register_forward_hook(lambda *_: results.append(sum(saved.values())))
    packing = PackedSequences.from_edges([0, 100, 256], Attention.BIDIRECTIONAL, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(torch.arange(rows)[None], torch.arange(rows), packing, torch.arange(9))
    one = case(shape, micro=4, bf16=dtype == torch.bfloat16, **recompute)
    squares, stage = 100**2 + 156**2, one.build_stage(0)
    work = ObjectiveWork("mlm", 256, 9, squares, squares)
    keys = saved_keys_per_token(one, work) if attention == "onednn" else None
    a_layer = stage_activation_bytes(one, stage, host=True, saved_keys=keys)[0] / 3
    assert results[1] - results[0] == pytest.approx(a_layer, rel=0.03)
    a_pack = dataclasses.replace(work, tokens=64, predicted=9 / 4)
    last = stage_activation_bytes(one, stage, host=True, work=a_pack, saved_keys=keys)[0] - 2 * a_layer
    assert results[2] - results[1] == pytest.approx(last, rel=0.05)


def test_saved_probabilities_by_hand():
    """Documents of 480 tokens, padded to 512, bidirectional and causal; long ones; layers with a window."""
    local = dataclasses.replace(SMALL, window_size=8, global_attn_every_n_layers=2)
    for shape, visible, length, expected in (
        (SMALL, 1, 480, 512),
        (SMALL, 0, 480, (512 + 256) / 2),
        (SMALL, 1, 2016, 512),
        (SMALL, 1, 8160, 128),
        (local, 1, 480, (512 + 256 + 16) / 2),
    ):
        squares = float(length * 4800)
        assert saved_keys_per_token(case(shape), ObjectiveWork("mlm", 4800, 1.0, squares, visible * squares)) == expected
    from megaenc.model.attention import onednn

    assert (onednn.KEPT_KEYS, onednn._QUERY_BLOCK, onednn._ALIGNMENT) == (KEPT_KEYS, QUERY_BLOCK, ALIGNMENT)
    kept, others = (
        terms(compute_stage_memory(case(), WORK, case().build_stage(0), rates(host=True, saves_probabilities=on)))["activations"]
        for on in (True, False)
    )
    assert kept - others == 2 * 64 * (2 * 4 * 96 - 2 * 32 - 4 * 4)  # two layers; documents of 64 tokens


def test_recomputation_keeps_less():
    shape = ModelConfig(4, 64, 160, 8, 4)
    plain, core, mlp, full, block = (
        stage_activation_bytes(one, one.build_stage(0), host=True)[0]
        for one in (
            case(shape),
            case(shape, recompute_granularity="selective"),
            case(shape, recompute_granularity="selective", recompute_modules=("mlp",)),
            case(shape, recompute_granularity="full"),
            case(shape, recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
        )
    )
    assert plain > core > mlp > full == 4 * 64 * 2 * 64  # what enters each of 4 layers, 64 tokens of 2 x 64 bytes
    assert block == pytest.approx(plain * 3 / 4 + full / 4)


def test_sequence_parallelism_shards_norms_and_borders():
    plain, sharded = (
        layer_activation_bytes(case(gpus=2, tensor_model_parallel_size=2, sequence_parallel=on), host=False)
        for on in (False, True)
    )
    assert sharded["norms"] == plain["norms"] / 2
    assert all(sharded[name] == plain[name] for name in plain if name != "norms")
    one = layer_activation_bytes(case(), host=False)
    assert plain["mlp"] == one["mlp"] / 2 and plain["norms"] == one["norms"]
