"""Memory by hand, and what autograd really saves of a layer."""

import dataclasses

import pytest
import torch
from cases import SHAPE, WORK, case

from megaenc.backend import KernelConfig, ParallelConfig
from megaenc.estimate.memory import (
    CHUNK_BYTES,
    LOGIT_BYTES_AT_ONCE,
    compute_max_memory,
    compute_save_cost,
    compute_stage_memory,
    layer_activation_bytes,
    micro_batches_in_flight,
    stage_activation_bytes,
)
from megaenc.estimate.work import ObjectiveWork
from megaenc.model.config import ModelConfig

SMALL = ModelConfig(2, 64, 160, 8, 4)
FOUR_LAYERS = ModelConfig(4, 64, 160, 8, 4)
TINY_PARAMETERS = 2 * 10_816 + 32 + 2 * 32_768


def test_a_tiny_model_by_hand():
    """Count 2 x (10,752 + 64) of layers, 32 of a norm, 2 x 1,024 x 32 of vocabulary."""
    parameters = TINY_PARAMETERS
    assert SHAPE.parameter_count(1024) == parameters
    results = compute_stage_memory(case(), WORK, case().build_stage(0)).terms
    assert results["weights"] == 2 * parameters
    assert results["gradients"] == results["master weights"] == 4 * parameters
    assert results["AdamW's moments"] == 8 * parameters
    norms = 2 * (2 * 32 + 4 + 2 * 32)
    projections = 2 * (2 * 32 + 2 * 16)
    per_token = norms + projections + 4 * 4 + 3 * 2 * 80
    assert results["activations"] == 2 * 64 * per_token
    in_float32 = compute_stage_memory(case(bf16=False), WORK, case().build_stage(0)).terms
    assert in_float32["weights"] == 4 * parameters and "master weights" not in in_float32


def test_a_distributed_optimizer_is_shared_by_the_copies_of_the_model():
    complete = compute_max_memory(case(gpus=4), [WORK]).terms
    shared = compute_max_memory(case(gpus=4, use_distributed_optimizer=True), [WORK]).terms
    for name in ("master weights", "AdamW's moments"):
        assert shared[name] == complete[name] / 4
    assert shared["gradients"] == complete["gradients"]


def test_a_save_by_hand():
    """A parameter has 14 bytes in bf16, 12 in float32, split over data-parallel ranks."""
    from megaenc.training.checkpoint.state_tensors import MAX_CHUNK_BYTES

    assert CHUNK_BYTES == MAX_CHUNK_BYTES
    complete = 14 * TINY_PARAMETERS
    many = compute_save_cost(case(gpus=16), 8)
    assert (many.total, many.synchronous, many.asynchronous) == (
        complete,
        8 * CHUNK_BYTES,
        8 * complete / 16,
    )
    in_float32 = compute_save_cost(case(gpus=2, bf16=False), 8)
    assert (in_float32.total, in_float32.asynchronous) == (
        12 * TINY_PARAMETERS,
        12 * TINY_PARAMETERS,
    )
    stages = compute_save_cost(case(gpus=2, pipeline_model_parallel_size=2), 8)
    assert (stages.total, stages.asynchronous) == (complete, 2 * 14 * (10_816 + 32 + 32_768))
    assert compute_save_cost(case(gpus=2, tensor_model_parallel_size=2), 8).total == complete


@pytest.mark.parametrize(
    ("stages", "batch", "layout", "in_flight"),
    [
        (4, 16, {}, [4, 3, 2, 1]),
        (4, 2, {}, [2, 2, 2, 1]),
        (
            2,
            16,
            {"num_layers_per_virtual_pipeline_stage": 2},
            [5 / 2, 3 / 2],
        ),  # of parts, two to a stage
    ],
)
def test_stages_hold_what_the_pipeline_has_in_flight(stages, batch, layout, in_flight):
    laid = case(
        ModelConfig(8, 32, 80, 4, 2),
        gpus=stages,
        batch=batch,
        pipeline_model_parallel_size=stages,
        **layout,
    )
    assert [micro_batches_in_flight(laid, stage) for stage in laid.build_stages()] == in_flight


def test_the_chunked_loss_is_the_models_own():
    from megaenc.model import linear_cross_entropy

    assert linear_cross_entropy.FUSED_CHUNK_BYTES == LOGIT_BYTES_AT_ONCE


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied):
    """The shapes have every option except tied vocabulary matrices."""
    from megaenc.model.encoder import build_encoder

    others = dict(
        normalization="LayerNorm",
        norm_bias=True,
        embedding_norm=True,
        prediction_head=True,
        output_layer_bias=True,
    )
    others |= dict(add_qkv_bias=True, qk_layernorm=True, untie_embeddings_and_output_weights=False)
    shape = ModelConfig(3, 64, 160, 8, 4, **(others if tied else {}))
    encoder = build_encoder(shape, 1000, 64, ParallelConfig(), torch.float32, seed=None)
    mine = case(shape, vocab_size=1000).build_stage(0).parameters
    assert mine == sum(parameter.numel() for parameter in encoder.parameters())
    stages = case(shape, gpus=3, vocab_size=1000, pipeline_model_parallel_size=3).build_stages()
    assert (
        sum(stage.parameters for stage in stages) - mine == tied * 1024 * 64
    )  # tied, the last stage has a copy
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


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("shape", "dtype", "modules"),
    [
        (SMALL, torch.float32, ()),
        (SMALL, torch.bfloat16, ("core_attn",)),
        (SMALL, torch.bfloat16, ("mlp",)),
        (SMALL, torch.float32, ("activation",)),
        (
            dataclasses.replace(SMALL, normalization="LayerNorm", activation="gelu"),
            torch.bfloat16,
            (),
        ),
        (
            ModelConfig(2, 96, 96, 4, 2, kv_channels=32, qk_layernorm=True),
            torch.float32,
            ("core_attn",),
        ),
        (GEMMA3, torch.bfloat16, ()),
        (GEMMA3, torch.float32, ("mlp",)),
    ],
)
def test_layers_keep_what_autograd_saves_of_them(shape, dtype, modules):
    """Count the storages of the second layer and of the last, which has 9 positions.

    Those shared with other layers or with the weights are not counted.
    """
    from megaenc.model.encoder import build_encoder
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences
    from megaenc.objectives import Attention

    rows = 256
    shape = dataclasses.replace(shape, num_layers=3)
    recompute = (
        {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    )
    kernels = KernelConfig(attention_backend="sdpa")
    encoder = build_encoder(
        shape, 512, rows, ParallelConfig(**recompute), dtype, seed=3, kernels=kernels
    )
    saved = {tensor.untyped_storage().data_ptr(): 0 for tensor in encoder.parameters()}
    keeping = []

    def pack(tensor):
        keeping.append(tensor)  # or its address would be given out again
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    results = []
    for layer in encoder.decoder.layers:
        layer.register_forward_hook(lambda *_: results.append(sum(saved.values())))
    packing = PackedSequences.from_cu_seqlens(
        [0, 100, 256], Attention.BIDIRECTIONAL, torch.device("cpu")
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(torch.arange(rows)[None], torch.arange(rows), packing, Predictions(torch.arange(9)))
    one = case(shape, micro=4, bf16=dtype == torch.bfloat16, **recompute)
    stage = one.build_stage(0)
    a_layer = stage_activation_bytes(one, stage, is_cpu=True) / 3
    assert results[1] - results[0] == pytest.approx(a_layer, rel=0.03)
    squares = (100**2 + 156**2) / 4
    a_pack = ObjectiveWork("mlm", 64, 9 / 4, squares, squares)
    last = stage_activation_bytes(one, stage, is_cpu=True, work=a_pack) - 2 * a_layer
    assert results[2] - results[1] == pytest.approx(last, rel=0.05)


def test_recomputation_keeps_less():
    """A recomputed layer keeps only its input, 64 tokens of 2 x 64 bytes."""

    def activations(**recompute):
        layout = case(FOUR_LAYERS, **recompute)
        return stage_activation_bytes(layout, layout.build_stage(0), is_cpu=True)

    full = activations(recompute_granularity="full")
    block = activations(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    )
    assert full == 4 * 64 * 2 * 64
    assert block == pytest.approx(activations() * 3 / 4 + full / 4)


def test_sequence_parallelism_shards_norms_and_borders():
    tensor_parallel = dict(gpus=2, tensor_model_parallel_size=2)
    plain = layer_activation_bytes(case(**tensor_parallel), is_cpu=False)
    sharded = layer_activation_bytes(case(**tensor_parallel, sequence_parallel=True), is_cpu=False)
    assert sharded["norms"] == plain["norms"] / 2
    assert all(sharded[name] == plain[name] for name in plain if name != "norms")
    one = layer_activation_bytes(case(), is_cpu=False)
    assert plain["mlp"] == one["mlp"] / 2 and plain["norms"] == one["norms"]
