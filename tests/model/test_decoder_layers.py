"""What Llama, Qwen2 and Qwen3 have beyond EuroBERT: the encoder computes the same as transformers' models of that kind."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from whole_models import core_to_hf, hf_to_core

from megaenc import backend
from megaenc.model import ModelConfig
from megaenc.objectives import Attention

SMALL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2)
SHAPE = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
# A tenth of Llama 3's base period: at a head width of 8 and 40 positions, stretching then changes the angles that are used.
LLAMA3 = dict(rope_type="llama3", rope_theta=1000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)

YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=1024)
EXTENDED = dict(rotary_base=1000.0, yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=1024)

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama with stretched positions": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(rope_parameters=LLAMA3),
        dict(rotary_base=1000.0, use_rope_scaling=True, rope_scaling_factor=4.0),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, dict(add_qkv_bias=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16), dict(qk_layernorm=True, kv_channels=16)),
    "qwen3 with YaRN": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(head_dim=16, rope_parameters=YARN, max_position_embeddings=4096),
        dict(qk_layernorm=True, kv_channels=16, **EXTENDED),
    ),
}


@pytest.fixture(params=FAMILIES)
def pair(request, one_process):
    """transformers' model with weights that are all random, norms and biases too, and the encoder that holds the same."""
    from megaenc.model.encoder import build_encoder

    kind, config, options, shape = FAMILIES[request.param]
    torch.manual_seed(0)
    reference = kind(config(**SHAPE, **options, attn_implementation="eager")).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model = dataclasses.replace(SMALL, **shape)
    encoder = build_encoder(model, 90, 4096, backend.ParallelConfig(), torch.float32, seed=0)  # rows of padding are zero
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    core = hf_to_core(weights, model)
    state = encoder.state_dict()
    assert {name for name in state if not name.endswith("_extra_state")} == core.keys()
    for name, tensor in core.items():
        state[name][: len(tensor)] = tensor
    encoder.load_state_dict(state)
    back = core_to_hf(state, model, 90)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    return reference, encoder


def logits(encoder, tokens, positions, attention):
    from megaenc.model.packed_sequences import PackedSequences

    packing = PackedSequences.from_edges([0, len(tokens)], attention, torch.device("cpu"))
    return encoder(tokens[None], positions, packing, None)[:, :90]


@pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.BIDIRECTIONAL])
def test_logits_and_gradients_are_those_of_transformers(pair, attention):
    reference, encoder = pair
    tokens = torch.randint(0, 90, (40,))
    positions = torch.arange(40) * 100  # far apart, so that long periods matter
    seen = torch.ones(40, 40, dtype=torch.bool)
    seen = seen.tril() if attention == Attention.CAUSAL else seen
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    expected = reference(input_ids=tokens[None], position_ids=positions[None], attention_mask=mask).logits[0]
    found = logits(encoder, tokens, positions, attention)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    (expected.logsumexp(-1) - expected[:, 7]).sum().backward()
    (found.logsumexp(-1) - found[:, 7]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    names = dict(reference.named_parameters())
    for name, gradient in core_to_hf(gradients, encoder_model(encoder), 90).items():
        torch.testing.assert_close(gradient, names[name].grad, rtol=1e-4, atol=1e-4)
        assert names[name].grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "context"),
    [(128, 1e6, 4.0, 32768), (16, 1e4, 2.0, 64), (32, 1e4, 1.0, 128), (32, 1e4, 8.5, 3)],
)
def test_angles_of_yarn_are_those_of_transformers(head_dim, base, factor, context, one_process):
    from megaenc.model.encoder import build_encoder

    rope = dict(rope_type="yarn", rope_theta=base, factor=factor, original_max_position_embeddings=context)
    config = Qwen3Config(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=int(factor * context))
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    options = dict(yarn_rotary_scaling_factor=factor, yarn_original_max_position_embeddings=context)
    model = dataclasses.replace(SMALL, kv_channels=head_dim, rotary_base=base, **options)
    encoder = build_encoder(model, 90, 512, backend.ParallelConfig(), torch.float32, seed=0)
    expected = torch.arange(512)[:, None] * frequencies
    torch.testing.assert_close(encoder.angles[:, 0, 0], torch.cat([expected, expected], 1), rtol=1e-6, atol=1e-6)
    assert encoder.rotation_scale == pytest.approx(scale, rel=1e-6)
    assert (factor == 1) == (scale == 1)


def encoder_model(encoder):
    config = encoder.config
    return dataclasses.replace(
        SMALL, add_qkv_bias=config.add_qkv_bias, qk_layernorm=config.qk_layernorm, kv_channels=config.kv_channels
    )
