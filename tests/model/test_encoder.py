"""The packed encoder against the same thing done slowly: attention, loss and initial weights in one process."""

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

TINY = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2)
EDGES = [0, 5, 6, 20, 32]
PREFIXES = [2, 0, 13, 4]  # of documents of 5, 1, 14 and 12 tokens: in the middle, none, all but one, in the middle
pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def build(vocab_size=100, seed=3, shape=TINY):
    from megaenc.model.encoder import build_encoder

    return build_encoder(shape, vocab_size, 32, ParallelConfig(), torch.float32, seed=seed)


def packing(attention, edges=EDGES, prefixes=PREFIXES):
    from megaenc.model.packed_sequences import PackedSequences

    prefixes = np.array(prefixes) if attention == Attention.PREFIX else None
    return PackedSequences.from_edges(edges, attention, torch.device("cpu"), prefixes)


def forward(encoder, tokens, attention, predict_at=None, labels=None):
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(EDGES)])
    return encoder(tokens[None], positions, packing(attention), predict_at, labels)


def sees(attention, at, other, prefixes=PREFIXES):
    """Whether position `at` may look at position `other`."""
    document = sum(edge <= at for edge in EDGES) - 1
    start, stop = EDGES[document], EDGES[document + 1]
    if not start <= other < stop:
        return False
    both_in_prefix = max(at, other) < start + prefixes[document]
    return {
        Attention.BIDIRECTIONAL: True,
        Attention.CAUSAL: other <= at,
        Attention.PREFIX: other <= at or both_in_prefix,
    }[attention]


def softmax_over_what_is_seen(query, key, value, attention, prefixes=PREFIXES):
    """[32, 4, 8], a position and a head at a time."""
    rows = []
    for at in range(32):
        seen = [other for other in range(32) if sees(attention, at, other, prefixes)]
        for head in range(4):
            scores = key[seen, 0, head // 2] @ query[at, 0, head] / math.sqrt(8)
            rows.append(scores.softmax(0) @ value[seen, 0, head // 2])
    return torch.stack(rows).view(32, 4, 8)


def query_key_value():
    return [torch.randn(32, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def core_attention():
    from megaenc.model.layer import PackedAttention
    from megaenc.model.layer_spec import build_transformer_config

    return PackedAttention(build_transformer_config(TINY, ParallelConfig(), torch.float32), 1, None, "self")


@pytest.mark.parametrize("attention", Attention)
def test_attention_is_softmax_inside_documents(attention):
    """With its gradients."""
    inputs = query_key_value()
    found = core_attention()(*inputs, None, packed_seq_params=packing(attention)).view(32, 4, 8)
    expected = softmax_over_what_is_seen(*inputs, attention)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(32, 4, 8)
    here, there = (torch.autograd.grad((output * upstream).sum(), inputs) for output in (found, expected))
    torch.testing.assert_close(here, there)


def moved_by_each_token(encoder, attention):
    """Yield (token, outputs that move if it changes), one token at a time."""
    tokens = torch.arange(32) + 2
    with torch.no_grad():
        before = forward(encoder, tokens, attention)
        for changed in range(32):
            other = tokens.clone()
            other[changed] = 99
            yield changed, (forward(encoder, other, attention) != before).any(dim=1).nonzero().flatten().tolist()


@pytest.mark.parametrize("attention", Attention)
def test_outputs_depend_on_what_the_mask_allows_and_on_nothing_else(attention):
    for changed, moved in moved_by_each_token(build().eval(), attention):
        assert moved == [at for at in range(32) if sees(attention, at, changed)]


@pytest.mark.parametrize("window", [1, 4, 12])
@pytest.mark.parametrize("attention", Attention)
def test_a_local_layer_passes_on_its_window_and_a_global_one_everything(attention, window):
    """The outputs after one local layer, and after a local between two global ones."""
    for layers, is_local in ((1, True), (3, False)):
        others = {} if is_local else dict(global_attn_every_n_layers=2, local_rotary_base=500.0)
        shape = replace(TINY, num_layers=layers, window_size=window, **others)
        for changed, moved in moved_by_each_token(build(shape=shape).eval(), attention):
            near = [at for at in range(32) if not is_local or abs(at - changed) <= window]
            assert moved == [at for at in near if sees(attention, at, changed)]


@pytest.mark.parametrize("attention", Attention)
def test_no_token_is_seen_past_the_windows_of_gemma3(attention):
    """Each of its local layers passes on a window, to either side if the mask allows, and the third layer everything."""
    options = dict(qk_layernorm=True, apply_layernorm_1p=True, post_norms=True, scale_embedding=True, window_size=3)
    options |= dict(activation="gelu_pytorch_tanh", untie_embeddings_and_output_weights=False)
    for layers, reach in ((1, 3), (2, 6), (3, 32)):
        shape = replace(TINY, num_layers=layers, global_attn_every_n_layers=3, first_global_layer=3, **options)
        for changed, moved in moved_by_each_token(build(shape=shape).eval(), attention):
            near = [at for at in range(32) if abs(at - changed) <= reach]
            if attention == Attention.PREFIX:  # in two layers, back to the prefix and on to its end
                assert {at for at in moved if not sees(attention, at, changed)} <= {at for at in near if at < changed}
            else:
                assert moved == [at for at in near if sees(attention, at, changed)]


def test_a_recomputed_gemma3_layer_has_the_same_gradients():
    """Its norms after attention and MLP record gradients only where its layer does."""
    shape = replace(TINY, apply_layernorm_1p=True, post_norms=True, window_size=3)
    plain, again = build(shape=shape), build(shape=shape)
    again.decoder.config.recompute_granularity = "full"
    again.decoder.config.recompute_method = "uniform"
    again.decoder.config.recompute_num_layers = 2
    tokens = torch.arange(32) + 2
    for encoder in (plain, again):
        forward(encoder, tokens, Attention.CAUSAL).logsumexp(-1).sum().backward()
    for here, there in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad) and here.grad.any()
    with torch.no_grad():
        assert not forward(plain, tokens, Attention.CAUSAL).requires_grad
        recorded = []
        for layer in plain.decoder.layers:
            layer.mlp_bda.register_forward_hook(lambda module, inputs, output: recorded.append(output.requires_grad))
        forward(plain, tokens, Attention.CAUSAL)
    assert recorded == [False, False]


def test_rotary_positions_of_local_layers_have_their_own_base():
    tokens, shape = torch.arange(32) + 2, replace(TINY, num_layers=2, window_size=6, global_attn_every_n_layers=2)
    same, other, all_other = (
        forward(build(shape=replace(shape, **bases)), tokens, Attention.BIDIRECTIONAL)[:, :100]
        for bases in ({"local_rotary_base": 1e4}, {"local_rotary_base": 50.0}, {"rotary_base": 50.0})
    )
    assert torch.equal(same, forward(build(shape=shape), tokens, Attention.BIDIRECTIONAL)[:, :100])
    assert not torch.allclose(same, other, atol=1e-5) and not torch.allclose(all_other, other, atol=1e-5)

    changed = build(shape=replace(shape, local_rotary_base=1e4))
    changed.set_rotary_base(50.0)
    expected = forward(build(shape=replace(shape, rotary_base=50.0, local_rotary_base=1e4)), tokens, Attention.BIDIRECTIONAL)
    assert torch.equal(forward(changed, tokens, Attention.BIDIRECTIONAL), expected)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("attention", Attention)
def test_recomputed_layers_have_the_same_gradients(attention, how):
    """The attention and its prefixes survive the way back, on which megatron-core runs layers, or their attention, again."""
    shape = replace(TINY, window_size=3, global_attn_every_n_layers=2, embedding_norm=True)
    plain, again = build(shape=shape), build(shape=shape)
    if how == "full":
        again.decoder.config.recompute_granularity = "full"
        again.decoder.config.recompute_method = "uniform"
        again.decoder.config.recompute_num_layers = 1
    calls = []
    for layer in again.decoder.layers:
        layer.self_attention.checkpoint_core_attention = how == "selective"
        layer.self_attention.core_attention.register_forward_hook(lambda *_: calls.append(1))
    for encoder in (plain, again):
        forward(encoder, torch.arange(32) + 2, attention).logsumexp(-1).sum().backward()
    assert len(calls) == 2 * TINY.num_layers, "once forward, once again on the way back"
    for here, there in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad)


@pytest.mark.parametrize("post_norms", [False, True])
@pytest.mark.parametrize("attention", Attention)
def test_the_last_layer_leaves_out_what_predicts_nothing(attention, post_norms):
    """Losses and gradients are those of a last layer that computes every position."""
    shape = replace(TINY, window_size=3, global_attn_every_n_layers=2, post_norms=post_norms)
    selecting, complete = build(shape=shape), build(shape=shape)
    choices = [layer.selects_rows for layer in selecting.decoder.layers]
    assert selecting.selects_rows and choices == [False] * (TINY.num_layers - 1) + [True]
    complete.selects_rows = False
    predict_at, labels = torch.tensor([0, 3, 7, 8, 30, 31]), torch.arange(6)
    sizes = []
    selecting.decoder.layers[-1].mlp.linear_fc2.register_forward_hook(lambda layer, inputs, output: sizes.append(len(inputs[0])))
    tokens = torch.arange(32) + 2
    losses = [forward(encoder, tokens, attention, predict_at, labels)[0] for encoder in (selecting, complete)]
    assert sizes == [6]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, here), there in zip(selecting.named_parameters(), complete.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-5, atol=1e-6, msg=name)
    nothing = torch.tensor([], dtype=torch.int64)
    assert float(forward(selecting, tokens, attention, nothing, nothing)[0]) == 0


def test_prefixes_that_no_attention_can_use():
    for attention, prefixes in (
        (Attention.PREFIX, None),
        (Attention.CAUSAL, [2, 0, 13, 4]),
        (Attention.PREFIX, [2, 2, 13, 4]),  # longer than its document
        (Attention.PREFIX, [2, 0, -1, 4]),
        (Attention.PREFIX, [2, 0, 13]),
    ):
        from megaenc.model.packed_sequences import PackedSequences

        with pytest.raises(ValueError, match="prefixes"):
            PackedSequences.from_edges(EDGES, attention, torch.device("cpu"), None if prefixes is None else np.array(prefixes))


def test_sparse_head_gives_the_rows_of_the_full_one():
    encoder, tokens, at = build(), torch.arange(32), torch.tensor([0, 7, 31])
    torch.testing.assert_close(
        forward(encoder, tokens, Attention.CAUSAL, predict_at=at), forward(encoder, tokens, Attention.CAUSAL)[at]
    )
    assert forward(encoder, tokens, Attention.CAUSAL, predict_at=torch.tensor([], dtype=torch.long)).shape == (0, 128)


def test_padded_vocabulary_takes_no_part():
    encoder, tokens = build(vocab_size=100), torch.arange(32)
    assert encoder.output_layer.weight.shape[0] == 128
    logits = forward(encoder, tokens, Attention.BIDIRECTIONAL)
    assert (logits[:, 100:] == float("-inf")).all()
    expected = F.cross_entropy(logits[:, :100], tokens, reduction="sum")
    loss, _ = forward(encoder, tokens, Attention.BIDIRECTIONAL, labels=tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (encoder.output_layer.weight.grad[100:] == 0).all()


def test_loss_of_no_target_is_zero_and_can_go_backward():
    encoder, nothing = build(), torch.tensor([], dtype=torch.long)
    loss, correct = forward(encoder, torch.arange(32), Attention.BIDIRECTIONAL, predict_at=nothing, labels=nothing)
    loss.backward()
    assert (loss.item(), int(correct)) == (0.0, 0)
    assert all((p.grad == 0).all() for p in encoder.parameters())


@pytest.mark.parametrize(
    "options", [{}, dict(normalization="LayerNorm", norm_bias=True, prediction_head=True, output_layer_bias=True)]
)
def test_initial_weights_are_normal_and_follow_from_the_seed(options):
    encoder, again, other = (build(seed=seed, shape=replace(TINY, **options)) for seed in (3, 3, 4))
    weights = dict(encoder.named_parameters())
    for name, parameter in weights.items():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
        if parameter.dim() == 1:
            assert (parameter == (0 if name.endswith(".bias") else 1)).all()
        else:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])
    values = np.concatenate([p.detach().numpy()[:100].ravel() for p in weights.values() if p.dim() == 2])
    assert abs(values.mean()) < 4 * 0.02 / math.sqrt(values.size)
    assert values.std() == pytest.approx(0.02, rel=4 / math.sqrt(2 * values.size))
    assert (weights["embedding.word_embeddings.weight"][100:] == 0).all()


@pytest.mark.parametrize(
    ("method", "cutoff", "cut"), [("scaled", 2.0, 1), ("full_megatron", 2.0, 0.8796), ("full_megatron", 3.0, 0.9866)]
)
def test_initial_weights_are_scaled_by_depth_and_cut(method, cutoff, cut):
    """By every kind of weight of 22 layers; `cut`: standard deviation of a standard normal cut there, by its formula."""
    shape = replace(TINY, num_layers=22, prediction_head=True, init_method=method, init_cutoff=cutoff, init_method_std=0.03)
    values_of = {}
    for name, weight in build(shape=shape, vocab_size=640).named_parameters():
        kind = name.split(".", 3)[-1] if name.startswith("decoder.layers.") else name
        if weight.dim() == 2:
            values_of.setdefault(kind, []).append(weight.detach().numpy().ravel())
    expected = dict.fromkeys(values_of, 0.03)
    expected["self_attention.linear_proj.weight"] = expected["mlp.linear_fc2.weight"] = 0.03 / math.sqrt(44)
    if method == "full_megatron":
        expected["output_layer.weight"] = 1 / math.sqrt(32)
    assert len(values_of) == 7
    for kind, weights in values_of.items():
        values = np.concatenate(weights)
        assert values.std() == pytest.approx(cut * expected[kind], rel=4 / math.sqrt(2 * values.size)), kind
        assert abs(values.mean()) < 4 * expected[kind] / math.sqrt(values.size), kind
        assert (abs(values).max() <= cutoff * expected[kind] * 1.0001) == (method == "full_megatron"), kind


def test_init_method_std_scales_every_matrix():
    wide, usual = (dict(build(shape=replace(TINY, init_method_std=std)).named_parameters()) for std in (0.1, 0.02))
    for name, parameter in wide.items():
        torch.testing.assert_close(parameter, usual[name] * (5 if parameter.dim() == 2 else 1))
