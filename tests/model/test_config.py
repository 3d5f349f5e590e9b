"""Arithmetic on shapes: the study's table, and layouts that cannot divide a model."""

import dataclasses

import pytest

from megaenc.errors import InputError
from megaenc.model import PRESETS, ModelConfig, padded_vocab_size
from megaenc.model.config import get_preset


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters"),
    [
        ("210m", 128_256, 310.3e6),
        ("610m", 128_256, 755.6e6),
        ("1b", 128_256, 1.409e9),
        ("modernbert-base", 50_368, 149_655_232),
        ("modernbert-large", 50_368, 395_881_664),
        ("gemma3-270m", 262_144, 268_098_176),
        ("gemma3-1b", 262_144, 999_885_952),
        ("embeddinggemma-300m", 262_144, 302_863_104),
    ],
)
def test_parameters_are_the_published_ones(name, vocabulary, parameters):
    """The study's counts are exact; the others are those of transformers' models."""
    assert get_preset(name).parameter_count(vocabulary) == pytest.approx(
        parameters, rel=5e-4 if vocabulary == 128_256 else 0
    )


def test_parameters_without_a_head_are_those_of_the_study():
    assert get_preset("210m").parameter_count(128_256, lm_head=False) == pytest.approx(
        211.8e6, rel=5e-4
    )


@pytest.mark.parametrize("prefix", [0, 1, 30, 1000])
@pytest.mark.parametrize("window", [1, 64, 5000])
def test_attention_is_counted_by_the_pairs_within_its_windows(window, prefix):
    """A pair takes two products of 2 x width, forward once and backward twice."""
    model = dataclasses.replace(
        get_preset("210m"), window_size=window, global_attn_every_n_layers=5
    )  # 0, 5 and 10 of 12
    pairs = {
        reach: sum(
            min(at, reach) + 1 + min(reach, prefix - 1 - at) * (at < prefix) for at in range(1000)
        )
        for reach in (1000, window)
    }
    assert [number for number, one in enumerate(model.layer_windows) if one is None] == [0, 5, 10]
    counted = model.attention_flops(1000, prefix=prefix)
    # Half of the diagonal outside of the prefix is left out.
    exact = sum(
        count * (pairs[reach] - (1000 - prefix) / 2) for reach, count in ((1000, 3), (window, 9))
    )
    assert counted == 12 * model.query_size * exact


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma3-1b", "embeddinggemma-300m"])
def test_one_of_six_layers_of_gemma3_is_global(name):
    windows = get_preset(name).layer_windows
    assert [number for number, window in enumerate(windows) if window is None] == list(
        range(5, len(windows), 6)
    )


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("name", "untied"),
    [("tiny", True), ("tiny", False), ("modernbert-base", None), ("embeddinggemma-300m", None)],
)
def test_parameters_are_those_of_the_built_model(name, untied):
    import torch

    from megaenc.backend import ParallelConfig
    from megaenc.model.encoder import build_encoder

    model = dataclasses.replace(PRESETS[name], untie_embeddings_and_output_weights=untied)
    if untied is None:
        model = dataclasses.replace(PRESETS[name], num_layers=3, hidden_size=48, qk_layernorm=True)
        model = dataclasses.replace(model, norm_bias=model.normalization == "LayerNorm")
    vocab_size = 128 * model.make_vocab_size_divisible_by  # no padding
    encoder = build_encoder(model, vocab_size, 32, ParallelConfig(), torch.float32, seed=None)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == model.parameter_count(
        vocab_size
    )


YARN = {"yarn_rotary_scaling_factor": 2.0, "yarn_original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "complaint"),
    [
        (
            dict(num_attention_heads=3),
            1,
            "--hidden-size: found 256, expected a multiple of --num-attention-heads 3",
        ),
        (
            dict(num_query_groups=3),
            1,
            "--num-attention-heads: found 4, expected a multiple of --num-query-groups 3",
        ),
        (dict(num_layers=0), 1, "--num-layers: found 0, expected 1 or more"),
        (dict(rotary_base=-5.0), 1, "--rotary-base: found -5.0, expected more than 0"),
        (dict(norm_epsilon=float("nan")), 1, "--norm-epsilon: found nan, expected a finite number"),
        (dict(hidden_size=20), 1, "expected an even head width"),
        (
            {},
            4,
            "--num-query-groups: found 2, expected a multiple of --tensor-model-parallel-size 4",
        ),
        (
            dict(rope_scaling_factor=32.0),
            1,
            "--rope-scaling-factor: found 32.0, expected --use-rope-scaling with it",
        ),
        (
            dict(**YARN, use_rope_scaling=True),
            1,
            "--use-rope-scaling: found True, expected only one of it and --yarn",
        ),
        (
            dict(YARN, yarn_rotary_scaling_factor=0.5),
            1,
            "--yarn-rotary-scaling-factor: found 0.5, expected 1 or more",
        ),
        (
            dict(yarn_rotary_scaling_factor=2.0),
            1,
            "--yarn-rotary-scaling-factor: found 2.0, expected --yarn-original-max-pos",
        ),
        (
            dict(yarn_original_max_position_embeddings=8),
            1,
            "position-embeddings: found 8, expected --yarn-rotary-scaling-fac",
        ),
        (
            dict(YARN, yarn_original_max_position_embeddings=0),
            1,
            "position-embeddings: found 0, expected 1 to 1,048,576",
        ),
        (
            dict(YARN, rotary_base=1.0),
            1,
            "--rotary-base: found 1.0, expected more than 1 with --yarn-rotary-scaling-factor",
        ),
        (
            dict(norm_bias=True),
            1,
            "--norm-bias: found True, expected --normalization LayerNorm with it",
        ),
        (dict(window_size=0), 1, "--window-size: found 0, expected 1 or more"),
        (
            dict(global_attn_every_n_layers=3),
            1,
            "--global-attn-every-n-layers: found 3, expected --window-size with it",
        ),
        (
            dict(local_rotary_base=1e4),
            1,
            "--local-rotary-base: found 10000.0, expected --window-size with it",
        ),
        (
            dict(window_size=8, global_attn_every_n_layers=1),
            1,
            "--global-attn-every-n-layers: found 1, expected 2 or more",
        ),
        (
            dict(window_size=8, local_rotary_base=0.0),
            1,
            "--local-rotary-base: found 0.0, expected more than 0",
        ),
        (
            dict(window_size=8, local_rotary_base=5.0),
            1,
            "--local-rotary-base: found 5.0, expected --global-attn-every-n-layers w",
        ),
        (
            dict(window_size=8, first_global_layer=3),
            1,
            "--first-global-layer: found 3, expected --global-attn-every-n-layers w",
        ),
        (
            dict(window_size=8, global_attn_every_n_layers=2, first_global_layer=0),
            1,
            "--first-global-layer: found 0, expected 1 or",
        ),
        (
            dict(first_global_layer=2),
            1,
            "--first-global-layer: found 2, expected --global-attn-every-n-layers with it",
        ),
        (
            dict(window_size=8, rotary_seq_len_interpolation_factor=8.0),
            1,
            (
                "--rotary-seq-len-interpolation-factor: found 8.0, expected "
                "--global-attn-every-n-layers with it"
            ),
        ),
        (
            dict(rotary_seq_len_interpolation_factor=float("nan")),
            1,
            "--rotary-seq-len-interpolation-factor: found nan, expected a finite number",
        ),
        (dict(query_pre_attn_scalar=0), 1, "--query-pre-attn-scalar: found 0, expected 1 or more"),
        (
            dict(normalization="LayerNorm", apply_layernorm_1p=True),
            1,
            "--apply-layernorm-1p: found True, expected --normalization RMSNorm with it",
        ),
        (
            dict(ffn_hidden_size=771),
            2,
            "--ffn-hidden-size: found 771, expected a multiple of --tensor-model",
        ),
    ],
)
def test_shape_that_cannot_be(changes, tensor_parallel, complaint):
    with pytest.raises(InputError, match=complaint):
        ModelConfig(**changes).check(tensor_parallel)


def test_unknown_preset_lists_the_known():
    assert get_preset("610M") is PRESETS["610m"]
    with pytest.raises(InputError, match="unknown preset True, expected one of 210m"):
        get_preset(True)  # from a YAML file
    with pytest.raises(
        InputError,
        match="unknown preset 'huge', expected one of 210m, 610m, 1b, small, tiny, modern",
    ):
        get_preset("huge")


def test_vocabulary_is_padded_for_each_rank():
    assert padded_vocab_size(8192, 128, 2) == 8192
    assert padded_vocab_size(128_256, 128, 4) == 128_512
