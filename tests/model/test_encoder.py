"""The packed encoder against a slow reference: attention, loss, initial weights."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megaenc.backend import ParallelConfig
from megaenc.model import ModelConfig
from megaenc.objectives import Attention

TINY = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2
)
CU_SEQLENS = [0, 5, 6, 20, 32]
PREFIXES = [
    2,
    0,
    13,
    4,
]  # of documents of 5, 1, 14 and 12 tokens: in the middle, none, all but one, in the middle
pytestmark = pytest.mark.usefixtures("one_process")


def build(vocab_size=100, seed=3, shape=TINY, length=32):
    from megaenc.model.encoder import build_encoder

    return build_encoder(shape, vocab_size, length, ParallelConfig(), torch.float32, seed=seed)


def packing(attention, prefixes):
    from megaenc.model.packed_sequences import PackedSequences

    return PackedSequences.from_cu_seqlens(CU_SEQLENS, attention, torch.device("cpu"), prefixes)


def forward(encoder, tokens, attention, predict_at=None, labels=None):
    from megaenc.model.linear_cross_entropy import Predictions

    positions = torch.cat(
        [torch.arange(stop - start) for start, stop in itertools.pairwise(CU_SEQLENS)]
    )
    prefixes = np.array(PREFIXES) if attention == Attention.PREFIX else None
    return encoder(
        tokens[None], positions, packing(attention, prefixes), Predictions(predict_at, labels)
    )


def sees(attention, at, other):
    """Return whether position `at` may look at position `other`."""
    document = sum(edge <= at for edge in CU_SEQLENS) - 1
    start = CU_SEQLENS[document]
    stop = CU_SEQLENS[document + 1]
    if not start <= other < stop:
        return False
    both_in_prefix = max(at, other) < start + PREFIXES[document]
    return {
        Attention.BIDIRECTIONAL: True,
        Attention.CAUSAL: other <= at,
        Attention.PREFIX: other <= at or both_in_prefix,
    }[attention]


POST_NORMS = dict(apply_layernorm_1p=True, post_norms=True)
GEMMA3 = POST_NORMS | dict(qk_layernorm=True, scale_embedding=True, activation="gelu_pytorch_tanh")
GEMMA3 |= dict(
    untie_embeddings_and_output_weights=False, global_attn_every_n_layers=3, first_global_layer=3
)
# Layers, their options, and how far the last layer's outputs reach.
REACHES = {
    "everything": (2, {}, 32),
    "a local layer": (1, dict(window_size=4), 4),
    "a local layer between global ones": (
        3,
        dict(window_size=4, global_attn_every_n_layers=2, local_rotary_base=500.0),
        32,
    ),
    "the first layer of gemma3": (1, GEMMA3 | dict(window_size=3), 3),
    "gemma3": (3, GEMMA3 | dict(window_size=3), 32),
}


@pytest.mark.parametrize(("layers", "options", "reach"), REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("attention", Attention)
def test_outputs_depend_on_what_mask_and_window_allow_and_on_nothing_else(
    attention, layers, options, reach
):
    """Change one token: only outputs of its document that see it may move."""
    encoder = build(shape=replace(TINY, num_layers=layers, **options)).eval()
    tokens = torch.arange(32) + 2
    with torch.no_grad():
        before = forward(encoder, tokens, attention)
        for changed in range(32):
            other = tokens.clone()
            other[changed] = 99
            moved = (
                (forward(encoder, other, attention) != before)
                .any(dim=1)
                .nonzero()
                .flatten()
                .tolist()
            )
            assert moved == [
                at
                for at in range(32)
                if sees(attention, at, changed) and abs(at - changed) <= reach
            ]


def test_norms_after_attention_and_mlp_record_nothing_without_gradients():
    encoder = build(shape=replace(TINY, **POST_NORMS))
    recorded = []
    for layer in encoder.decoder.layers:
        layer.mlp_bda.register_forward_hook(
            lambda module, inputs, output: recorded.append(output.requires_grad)
        )
    with torch.no_grad():
        forward(encoder, torch.arange(32), Attention.CAUSAL)
    assert recorded == [False, False]


def test_another_rotary_base_leaves_that_of_local_layers():
    def outputs(encoder):
        return forward(encoder, torch.arange(32) + 2, Attention.BIDIRECTIONAL)[:, :100]

    shape = replace(TINY, window_size=6, global_attn_every_n_layers=2, local_rotary_base=1e4)
    changed = build(shape=shape)
    changed.set_rotary_base(50.0)
    assert torch.equal(outputs(changed), outputs(build(shape=replace(shape, rotary_base=50.0))))


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "context"),
    [(128, 1e6, 4.0, 32768), (16, 1e4, 2.0, 64), (32, 1e4, 1.0, 128), (32, 1e4, 8.5, 3)],
)
def test_angles_of_yarn_are_those_of_transformers(head_dim, base, factor, context):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(
        rope_type="yarn", rope_theta=base, factor=factor, original_max_position_embeddings=context
    )
    config = Qwen3Config(
        head_dim=head_dim, rope_parameters=rope, max_position_embeddings=int(factor * context)
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    options = dict(yarn_rotary_scaling_factor=factor, yarn_original_max_position_embeddings=context)
    shape = replace(TINY, kv_channels=head_dim, rotary_base=base, **options)
    encoder = build(shape=shape, length=512)
    expected = torch.arange(512)[:, None] * frequencies
    torch.testing.assert_close(
        encoder.angles[:, 0, 0], torch.cat([expected, expected], 1), rtol=1e-6, atol=1e-6
    )
    assert encoder.rotation_scale == pytest.approx(scale, rel=1e-6)
    assert (factor == 1) == (scale == 1)


@pytest.mark.parametrize("post_norms", [False, True])
@pytest.mark.parametrize("attention", Attention)
def test_the_last_layer_leaves_out_what_predicts_nothing(attention, post_norms):
    """Losses and gradients are those of a last layer that computes every position."""
    shape = replace(TINY, window_size=3, global_attn_every_n_layers=2, post_norms=post_norms)
    selecting = build(shape=shape)
    complete = build(shape=shape)
    choices = [layer.selects_rows for layer in selecting.decoder.layers]
    assert selecting.selects_rows and choices == [False] * (TINY.num_layers - 1) + [True]
    complete.selects_rows = False
    predict_at = torch.tensor([0, 3, 7, 8, 30, 31])
    labels = torch.arange(6)
    sizes = []
    selecting.decoder.layers[-1].mlp.linear_fc2.register_forward_hook(
        lambda layer, inputs, output: sizes.append(len(inputs[0]))
    )
    tokens = torch.arange(32) + 2
    losses = [
        forward(encoder, tokens, attention, predict_at, labels)[0]
        for encoder in (selecting, complete)
    ]
    assert sizes == [6]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, here), there in zip(
        selecting.named_parameters(), complete.parameters(), strict=True
    ):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-5, atol=1e-6, msg=name)
    expected = forward(complete, tokens, attention)[predict_at]
    torch.testing.assert_close(forward(selecting, tokens, attention, predict_at), expected)


@pytest.mark.parametrize("prefixes", [None, [2, 2, 13, 4], [2, 0, -1, 4], [2, 0, 13]])
def test_prefixes_that_no_attention_can_use(prefixes):
    """Reject missing, too few, too long and negative prefixes, or any under causal."""
    prefixes = None if prefixes is None else np.array(prefixes)
    with pytest.raises(ValueError, match="prefixes"):
        packing(Attention.PREFIX, prefixes)
    with pytest.raises(ValueError, match="prefixes"):
        packing(Attention.CAUSAL, np.array(PREFIXES))


def test_padded_vocabulary_takes_no_part():
    encoder = build(vocab_size=100)
    tokens = torch.arange(32)
    assert encoder.output_layer.weight.shape[0] == 128
    logits = forward(encoder, tokens, Attention.BIDIRECTIONAL)
    assert (logits[:, 100:] == float("-inf")).all()
    expected = F.cross_entropy(logits[:, :100], tokens, reduction="sum")
    loss, _ = forward(encoder, tokens, Attention.BIDIRECTIONAL, labels=tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (encoder.output_layer.weight.grad[100:] == 0).all()


def test_loss_of_no_target_is_zero_and_can_go_backward():
    encoder = build()
    nothing = torch.tensor([], dtype=torch.long)
    loss, correct = forward(
        encoder, torch.arange(32), Attention.BIDIRECTIONAL, predict_at=nothing, labels=nothing
    )
    loss.backward()
    assert (loss.item(), int(correct)) == (0.0, 0)
    assert all((p.grad == 0).all() for p in encoder.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(
            normalization="LayerNorm", norm_bias=True, prediction_head=True, output_layer_bias=True
        ),
    ],
)
def test_initial_weights_follow_from_the_seed(options):
    shape = replace(TINY, **options)
    first = dict(build(seed=3, shape=shape).named_parameters())
    again = dict(build(seed=3, shape=shape).named_parameters())
    other = dict(build(seed=4, shape=shape).named_parameters())
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.dim() == 1:
            assert (parameter == (0 if name.endswith(".bias") else 1)).all()
        else:
            assert not torch.equal(parameter, other[name])
    assert (first["embedding.word_embeddings.weight"][100:] == 0).all()


@pytest.mark.parametrize(
    ("method", "cutoff", "cut"),
    [("normal", 2.0, 1), ("scaled", 2.0, 1), ("full_megatron", 3.0, 0.9866)],
)
def test_initial_weights_are_scaled_by_depth_and_cut(method, cutoff, cut):
    """Check each kind of weight; `cut` is the standard deviation after truncation."""
    shape = replace(
        TINY,
        num_layers=22,
        prediction_head=True,
        init_method=method,
        init_cutoff=cutoff,
        init_method_std=0.03,
    )
    values_of = {}
    for name, weight in build(shape=shape, vocab_size=640).named_parameters():
        kind = name.split(".", 3)[-1] if name.startswith("decoder.layers.") else name
        if weight.dim() == 2:
            values_of.setdefault(kind, []).append(weight.detach().numpy().ravel())
    expected = dict.fromkeys(values_of, 0.03)
    if method != "normal":
        expected["self_attention.linear_proj.weight"] = expected["mlp.linear_fc2.weight"] = (
            0.03 / math.sqrt(44)
        )
    if method == "full_megatron":
        expected["output_layer.weight"] = 1 / math.sqrt(32)
    assert len(values_of) == 7
    for kind, weights in values_of.items():
        values = np.concatenate(weights)
        assert values.std() == pytest.approx(
            cut * expected[kind], rel=4 / math.sqrt(2 * values.size)
        ), kind
        assert abs(values.mean()) < 4 * expected[kind] / math.sqrt(values.size), kind
        assert (abs(values).max() <= cutoff * expected[kind] * 1.0001) == (
            method == "full_megatron"
        ), kind
