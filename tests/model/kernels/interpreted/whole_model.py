"""A small encoder with our kernels: losses and gradients are those of torch."""

import dataclasses
import os
from itertools import pairwise

import pytest
import torch

from megaenc.backend import KernelConfig, ParallelConfig
from megaenc.model import ModelConfig
from megaenc.objectives import Attention

assert os.environ.get("TRITON_INTERPRET") == "1", "expected to be started by test_interpreted.py"
CU_SEQLENS = [0, 5, 6, 17]
KEPT = ParallelConfig()
SHAPE = ModelConfig(
    num_layers=2, hidden_size=48, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2
)
pytestmark = pytest.mark.usefixtures("one_process")
OBJECTIVES = {
    "clm": (Attention.CAUSAL, torch.tensor([at for at in range(17) if at + 1 not in CU_SEQLENS])),
    "mlm": (Attention.BIDIRECTIONAL, torch.tensor([0, 3, 5, 9, 16])),
}


def outcome(objective, fused, layout=KEPT, **shape):
    """Return loss, correct predictions and the gradient of every weight."""
    from megaenc.model.encoder import build_encoder
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences

    kernels = KernelConfig(fused_kernels=fused)
    encoder = build_encoder(
        dataclasses.replace(SHAPE, **shape), 100, 17, layout, torch.float32, seed=3, kernels=kernels
    ).train()
    names = {
        name
        for name, is_used in dataclasses.asdict(encoder.fused).items()
        if is_used and name != "sum"
    }
    norms = {"layer_norm"} if "normalization" in shape else {"norm"}
    norms -= {"layer_norm"} if "norm_bias" in shape else set()  # torch's own
    activation = {"geglu"} if "activation" in shape else {"swiglu"}
    assert names == (norms | activation | {"rotary", "loss"} if fused else set())
    attention, predict_at = OBJECTIVES[objective]
    torch.manual_seed(0)
    tokens = torch.randint(0, 100, (1, 17))
    labels = torch.randint(0, 100, (len(predict_at),))
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(CU_SEQLENS)])
    packing = PackedSequences.from_cu_seqlens(CU_SEQLENS, attention, torch.device("cpu"))
    loss, correct = encoder(tokens, positions, packing, Predictions(predict_at, labels))
    loss.backward()
    return (
        loss.detach(),
        correct,
        {name: weight.grad for name, weight in encoder.named_parameters()},
    )


OTHER = {"qk_layernorm": True, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False}
MODERNBERT = {
    "normalization": "LayerNorm",
    "activation": "gelu",
    "embedding_norm": True,
    "prediction_head": True,
}
MODERNBERT |= {
    "output_layer_bias": True,
    "window_size": 3,
    "global_attn_every_n_layers": 2,
    "local_rotary_base": 500.0,
}
GEMMA3 = OTHER | {
    "add_qkv_bias": False,
    "apply_layernorm_1p": True,
    "post_norms": True,
    "activation": "gelu_pytorch_tanh",
}
GEMMA3 |= {"scale_embedding": True, "query_pre_attn_scalar": 7, "window_size": 3}
CASES = {
    "clm": ("clm", {}),
    "mlm": ("mlm", {}),
    "other shape": ("mlm", OTHER),
    "modernbert": ("mlm", MODERNBERT),
}
CASES |= {"gemma3": ("clm", GEMMA3), "biases of norms": ("mlm", MODERNBERT | {"norm_bias": True})}


@pytest.mark.parametrize(("objective", "shape"), CASES.values(), ids=CASES)
def test_losses_and_gradients_are_the_same(objective, shape):
    here = outcome(objective, True, **shape)
    there = outcome(objective, False, **shape)
    atol = (
        1e-5 if "scale_embedding" in shape else 1e-6
    )  # which scales the gradient of the embedding too
    torch.testing.assert_close(here, there, rtol=1e-5, atol=atol)
    assert all(gradient.abs().max() > 0 for gradient in here[2].values())


def test_computed_again_nothing_changes():
    kept = outcome("mlm", fused=True)
    for modules in ((), ("core_attn", "mlp")):
        layout = ParallelConfig(
            recompute_granularity="selective" if modules else "full", recompute_modules=modules
        )
        torch.testing.assert_close(outcome("mlm", fused=True, layout=layout), kept, rtol=0, atol=0)
