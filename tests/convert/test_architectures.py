"""config.json and ModelConfig, in both directions, with what is refused."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch

from megaenc.convert.architectures import (
    FAMILIES,
    build_export_config,
    describe_changed_fields,
    find_family,
    infer_objective,
    native_attention,
    parse_hf_config,
    to_model_config,
)
from megaenc.errors import InputError
from megaenc.model import ModelConfig
from megaenc.model.config import get_preset
from megaenc.objectives import Attention

SMALL = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2
)
WITH_BIAS = replace(SMALL, add_qkv_bias=True)
WITH_NORMS = replace(SMALL, qk_layernorm=True)
SLIDING = ["full_attention", "sliding_attention"]
GLOBAL_IN_0_1_3 = [*["full_attention"] * 2, *SLIDING[::-1], "sliding_attention"]
GLOBAL_LAST = [*["sliding_attention"] * 3, *["full_attention"] * 2]
YARN = {
    "full_attention": {"rope_theta": 1e4},
    "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
}
LINEAR = {
    "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=-8.0),
    "sliding_attention": dict(rope_theta=1e4),
}
LLAMA3 = dict(
    rope_type="llama3",
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
STRETCHED = dict(rotary_base=500000.0, use_rope_scaling=True, rope_scaling_factor=32.0)
EXTENDED = dict(yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=32)
QWEN3_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
MODERNBERT = replace(
    SMALL,
    num_layers=5,
    num_query_groups=4,
    rotary_base=160000.0,
    normalization="LayerNorm",
    activation="gelu",
    window_size=8,
    global_attn_every_n_layers=2,
    local_rotary_base=500.0,
    embedding_norm=True,
    prediction_head=True,
    output_layer_bias=True,
    untie_embeddings_and_output_weights=False,
)
ALL_GLOBAL = dict(
    window_size=None, global_attn_every_n_layers=None, local_rotary_base=None, first_global_layer=1
)
GEMMA3 = replace(
    SMALL,
    num_layers=7,
    kv_channels=16,
    qk_layernorm=True,
    rotary_base=1e6,
    apply_layernorm_1p=True,
    post_norms=True,
    activation="gelu_pytorch_tanh",
    window_size=8,
    global_attn_every_n_layers=3,
    first_global_layer=3,
    local_rotary_base=500.0,
    scale_embedding=True,
    untie_embeddings_and_output_weights=False,
)
MODELS = {
    "eurobert": [SMALL, WITH_BIAS],
    "llama": [
        SMALL,
        WITH_BIAS,
        replace(SMALL, **STRETCHED, kv_channels=16),
        replace(SMALL, **EXTENDED),
    ],
    "mistral": [SMALL, replace(SMALL, untie_embeddings_and_output_weights=False)],
    "qwen2": [WITH_BIAS, replace(WITH_BIAS, kv_channels=16, norm_epsilon=1e-6)],
    "qwen3": [
        WITH_NORMS,
        replace(WITH_NORMS, add_qkv_bias=True, kv_channels=16, rotary_base=1e6),
        replace(WITH_NORMS, **EXTENDED, rotary_base=1e6),
    ],
    "modernbert": [
        MODERNBERT,
        replace(
            MODERNBERT, **ALL_GLOBAL, norm_bias=True, output_layer_bias=False, activation="silu"
        ),
        replace(MODERNBERT, global_attn_every_n_layers=None, local_rotary_base=None),
        replace(MODERNBERT, global_attn_every_n_layers=5, local_rotary_base=None),
        replace(
            MODERNBERT,
            global_attn_every_n_layers=4,
            first_global_layer=2,
            activation="gelu_pytorch_tanh",
        ),
        replace(MODERNBERT, untie_embeddings_and_output_weights=True, norm_epsilon=1e-6),
    ],
    "gemma3_text": [
        GEMMA3,
        replace(
            GEMMA3,
            rotary_seq_len_interpolation_factor=8.0,
            query_pre_attn_scalar=24,
            kv_channels=None,
        ),
        replace(GEMMA3, **ALL_GLOBAL, activation="silu", untie_embeddings_and_output_weights=True),
        replace(GEMMA3, **ALL_GLOBAL | {"window_size": 1}, norm_epsilon=1e-6),
        replace(GEMMA3, global_attn_every_n_layers=6, first_global_layer=6, local_rotary_base=None),
    ],
}
MODELS["modernbert-decoder"] = MODELS["modernbert"]
NEOBERT = replace(SMALL, num_query_groups=4, output_layer_bias=True)
MODELS["neobert"] = [
    NEOBERT,
    replace(NEOBERT, norm_epsilon=1e-6, init_method_std=0.03, ffn_hidden_size=56),
]


class Tokenizer:
    """The ids that a config asks a tokenizer for."""

    pad_token_id = None
    bos_token_id = 1
    eos_token_id = 2
    mask_token_id = 3
    cls_token_id = sep_token_id = None


def exported(name, model, attention=None, **options):
    """Build transformers' config of `model` as the family `name`.

    It is bidirectional if the family can be.
    """
    attention = attention or (
        Attention.CAUSAL if name == "modernbert-decoder" else Attention.BIDIRECTIONAL
    )
    given = dict(vocab_size=90, context=128, tokenizer=Tokenizer, dtype=torch.float32)
    return build_export_config(FAMILIES[name], attention, model, **given | options)


def written(*given, **options):
    """Return the config.json of `exported` as a dict."""
    return exported(*given, **options).to_dict()


def read(values):
    family = find_family(values, "config.json")
    return to_model_config(parse_hf_config(values, "config.json"), family, "config.json")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_again(name):
    for model in MODELS[name]:
        values = written(name, model)
        assert read(values) == model
        assert values["architectures"] == [FAMILIES[name].architecture]
        context = values["max_length" if name == "neobert" else "max_position_embeddings"]
        assert (values["pad_token_id"], values["vocab_size"], context) == (2, 90, 128)


def test_no_option_of_a_family_is_ignored():
    """One of the models above has another value than the default of each option."""
    for layers in {FAMILIES[name].layers for name in MODELS}:
        models = [
            model for name in MODELS if FAMILIES[name].layers is layers for model in MODELS[name]
        ]
        unseen = [
            option
            for option in layers.OPTIONS
            if {getattr(model, option) for model in models} == {getattr(ModelConfig, option)}
        ]
        assert {*unseen} <= {"kv_channels"}, (
            layers
        )  # which ModernBERT and NeoBERT can have only as its default


def native(values):
    return native_attention(parse_hf_config(values, ""), find_family(values, ""))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "modernbert-decoder"])
def test_a_decoder_says_that_it_is_bidirectional(name):
    model = MODELS[name][0]
    values = written(name, model)
    assert native(values) == Attention.BIDIRECTIONAL
    if FAMILIES[name].is_encoder:
        assert (values["mask_token_id"], values["classifier_pooling"]) == (3, "mean")
        return
    said = "use_bidirectional_attention" if name == "gemma3_text" else "is_causal"
    assert values[said] is (said != "is_causal")
    causal = written(name, model, Attention.CAUSAL)
    assert native(causal) == Attention.CAUSAL
    # A key cache among the outputs cannot go to ONNX, nor continue a text that is read both ways.
    assert (values["use_cache"], causal["use_cache"]) == (False, True)


def test_what_it_was_trained_on_follows_from_mask_and_shift():
    causal = written("modernbert-decoder", MODERNBERT)
    assert "is_causal" not in causal, "transformers' class is only causal"
    ignored = written("llama", SMALL, Attention.CAUSAL) | {"use_bidirectional_attention": True}
    encoder = written("eurobert", SMALL)
    for values, objective in (
        (causal, "clm"),
        (ignored, "clm"),
        (encoder, "mlm"),
        (encoder | {"prediction_shift": 1}, "mntp"),
    ):
        assert infer_objective(parse_hf_config(values, ""), find_family(values, "")) == objective


@pytest.mark.parametrize(
    ("name", "pooling", "expected"),
    [
        ("eurobert", "late", "late"),
        ("eurobert", "cls", "mean"),
        ("modernbert", "cls", "cls"),
        ("neobert", "cls", "mean"),
    ],
)
def test_pooling_of_the_source_is_kept_if_the_family_has_it(name, pooling, expected):
    source = {"classifier_pooling": pooling}
    config = exported(name, MODELS[name][0], source=source)
    assert config.classifier_pooling == expected
    lines = describe_changed_fields(config, source, Tokenizer)
    change = (
        f'config.json: classifier_pooling "mean" instead of the {json.dumps(pooling)} '
        f"that came in, which this {name} model cannot have"
    )
    assert lines == ([] if pooling == expected else [change])


@pytest.mark.parametrize(
    ("field", "came", "expected", "reason"),
    [
        ("cls_token_id", 7, 7, None),
        ("cls_token_id", [7], None, "as in the tokenizer"),
        ("bos_token_id", None, 1, "as in the tokenizer"),
        ("eos_token_id", [2, 7], [2, 7], None),
        ("eos_token_id", [7, 8], 2, "as in the tokenizer"),
        ("pad_token_id", None, None, None),
        ("pad_token_id", 90, 2, "which this modernbert model cannot have"),
        ("mask_token_id", 7, 3, "as in the tokenizer"),
    ],
)
def test_special_ids_of_the_source_are_kept_unless_the_tokenizer_has_others(
    field, came, expected, reason
):
    config = exported("modernbert", MODERNBERT, source={field: came})
    assert config.to_dict()[field] == expected
    change = (
        f"config.json: {field} {json.dumps(expected)} "
        f"instead of the {json.dumps(came)} that came in, {reason}"
    )
    assert describe_changed_fields(config, {field: came}, Tokenizer) == ([change] if reason else [])


def test_fields_that_a_family_lacks_do_not_go_out():
    source = {"classifier_pooling": "cls", "cls_token_id": 7, "mask_token_id": 7}
    config = exported("llama", SMALL, Attention.CAUSAL, source=source)
    assert not source.keys() & config.to_dict().keys()
    assert describe_changed_fields(config, source, Tokenizer) == []


def test_a_tokenizer_without_bos_and_eos_gives_cls_and_sep():
    class Modern(Tokenizer):
        bos_token_id = eos_token_id = None
        cls_token_id = 4
        sep_token_id = 5
        pad_token_id = 6

    for name in ("eurobert", "modernbert", "modernbert-decoder"):
        values = written(name, MODELS[name][0], tokenizer=Modern)
        assert [values[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [4, 5, 6]


def test_fields_of_older_versions_are_understood():
    """Llama 3.2 and the study's models have `rope_theta` and `rope_scaling`."""
    values = written("llama", SMALL)
    del values["rope_parameters"]
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaling["original_max_position_embeddings"] = 8192
    old = values | {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    assert read(old) == replace(SMALL, **STRETCHED)
    assert read(values | {"rope_theta": 1e6, "rope_scaling": None}) == replace(
        SMALL, rotary_base=1e6
    )
    released = values | {
        "model_type": "sl_model",
        "rope_theta": 250000,
        "auto_map": {"AutoModel": "code.Model"},
    }
    assert read(released) == replace(SMALL, rotary_base=250000.0)


def rope(**values):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | values}


MODERNBERT_HUB = {
    "model_type": "modernbert",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000,
    "norm_eps": 1e-5,
}
MODERNBERT_HUB |= {
    "local_attention": 128,
    "num_hidden_layers": 22,
    "hidden_size": 768,
    "intermediate_size": 1152,
}
MODERNBERT_HUB |= {
    "num_attention_heads": 12,
    "local_rope_theta": 10000.0,
    "position_embedding_type": "sans_pos",
}
ETTIN_HUB = {
    "model_type": "modernbert-decoder",
    "global_attn_every_n_layers": 3,
    "sliding_window": 64,
    "is_causal": True,
}
ETTIN_HUB |= {
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "num_hidden_layers": 22,
    "causal_mask": True,
}
NEOBERT_HUB = {
    "model_type": "neobert",
    "dim_head": 64,
    "norm_eps": 1e-5,
    "decoder_init_range": 0.02,
    "hidden_size": 768,
}
NEOBERT_HUB |= {
    "kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased"},
    "max_length": 4096,
}
NEOBERT_HUB |= {
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "vocab_size": 30522,
}
# EmbeddingGemma's window is of both sides together.
GEMMA_HUB = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_scaling": None,
}
GEMMA_HUB |= {
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GEMMA_HUB |= {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_key_value_heads": 1,
    "num_attention_heads": 4,
}
GEMMA_270M = dict(num_hidden_layers=18, hidden_size=640, intermediate_size=2048)
GEMMA_1B = dict(num_hidden_layers=26, hidden_size=1152, intermediate_size=6912)
EMBEDDING_GEMMA = dict(
    num_hidden_layers=24, hidden_size=768, intermediate_size=1152, num_attention_heads=3
)
ETTIN = dict(window_size=63)
MMBERT = dict(local_rotary_base=None)


@pytest.mark.parametrize(
    ("values", "preset", "differs"),
    [
        (MODERNBERT_HUB, "modernbert-base", {}),
        (MODERNBERT_HUB | {"local_rope_theta": 160000}, "modernbert-base", MMBERT),
        (ETTIN_HUB, "modernbert-base", ETTIN),
        (
            ETTIN_HUB | {"local_attention": 30},
            "modernbert-base",
            ETTIN,
        ),  # it is the window, which counts the token itself
        (ETTIN_HUB | {"local_rope_theta": 160000}, "modernbert-base", ETTIN | MMBERT),
        (NEOBERT_HUB, "neobert-base", {}),
        (GEMMA_HUB | GEMMA_270M, "gemma3-270m", {}),
        (GEMMA_HUB | GEMMA_1B, "gemma3-1b", {}),
        (
            GEMMA_HUB | EMBEDDING_GEMMA | {"use_bidirectional_attention": True},
            "embeddinggemma-300m",
            {},
        ),
    ],
)
def test_models_as_they_are_on_the_hub(values, preset, differs):
    """The configs have fields of older versions and leftovers of their code."""
    assert read(values) == replace(get_preset(preset), **differs)


def test_yarn_as_it_is_on_the_hub():
    """Qwen3's instructions for long texts use the older fields.

    Without an original context, the model's own is used.
    """
    values = written("qwen3", WITH_NORMS)
    del values["rope_parameters"]
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1.0,
        "attention_factor": 0.1 * math.log(4) + 1,
    }
    expected = replace(WITH_NORMS, **EXTENDED, rotary_base=1e6)
    old = values | {
        "rope_theta": 1e6,
        "rope_scaling": scaling | {"original_max_position_embeddings": 32},
    }
    assert read(old) == expected
    inferred = replace(expected, yarn_original_max_position_embeddings=128)
    assert read(values | {"rope_theta": 1e6, "rope_scaling": scaling}) == inferred


def test_neobert_has_its_own_width_and_the_code_of_its_authors():
    """The width inside the MLP is two thirds, rounded up to a multiple of 8."""
    assert (
        read(NEOBERT_HUB | {"intermediate_size": 160}).ffn_hidden_size == 112
    )  # 106 and two thirds, rounded up
    config = parse_hf_config(NEOBERT_HUB, "")
    assert (
        config.max_position_embeddings == 4096
        and infer_objective(config, FAMILIES["neobert"]) == "mlm"
    )
    assert (
        written("neobert", NEOBERT)["auto_map"]["AutoModelForMaskedLM"]
        == "chandar-lab/NeoBERT--model.NeoBERTLMHead"
    )


def test_the_largest_gemma3_scales_positions_and_scores():
    shape = dict(
        num_hidden_layers=62,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        head_dim=128,
    )
    shape |= dict(
        query_pre_attn_scalar=168,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        num_key_value_heads=16,
    )
    model = read(GEMMA_HUB | shape)
    assert (
        model.query_pre_attn_scalar,
        model.rotary_seq_len_interpolation_factor,
        model.kv_channels,
    ) == (168, 8.0, 128)
    assert [number for number, window in enumerate(model.layer_windows) if window is None] == list(
        range(5, 62, 6)
    )


def test_a_bias_of_the_output_layer_may_be_left_to_the_check_of_its_zeros():
    values = written("eurobert", NEOBERT)
    assert read(values) == replace(NEOBERT, output_layer_bias=False)
    assert (
        FAMILIES["neobert"].without_output_bias(NEOBERT)
        == FAMILIES["modernbert"].without_output_bias(NEOBERT)
        == NEOBERT
    )


def test_a_window_of_gemma3_counts_the_token_itself_or_both_sides():
    for attention, sliding_window in ((Attention.CAUSAL, 9), (Attention.BIDIRECTIONAL, 16)):
        values = written("gemma3_text", GEMMA3, attention)
        assert values["sliding_window"] == sliding_window
        assert parse_hf_config(values, "").sliding_window == 9
        assert read(values) == GEMMA3


@pytest.mark.parametrize(
    "field", ["num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings"]
)
def test_released_weights_must_say_what_their_tensors_do_not(field):
    """EuroBERT's default would replace the missing value, and the tensors would fit."""
    values = written("eurobert", SMALL)
    del values["rope_parameters"]
    released = values | {"model_type": "sl_model", "rope_theta": 250000}
    read(released)
    del released[field]
    with pytest.raises(InputError, match=f"config.json: field `{field}`: missing, expected"):
        read(released)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "`hidden_act`: found 'gelu', expected silu"),
        ("eurobert", {"mlp_bias": True}, "`mlp_bias`: found true, expected false"),
        (
            "mistral",
            {"sliding_window": 64},
            "set `max_position_embeddings` to 64 there to read no more tokens than the window",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "`layer_types`: found 'chunked_attention'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "`rope_type`: found 'dynamic'",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "found 0.5",
        ),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            "`quantization_config`: found {'bits': 4}, expected none",
        ),
        ("llama", rope(rope_theta=-5), "`rope_theta`: found -5, expected a number above 0"),
        (
            "llama",
            rope(**LLAMA3, factor=0.5),
            "--rope-scaling-factor: found 0.5, expected 1 or more",
        ),
        (
            "llama",
            rope(**LLAMA3 | {"low_freq_factor": 2}, factor=8.0),
            "`low_freq_factor`: found 2, expected 1.0",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING},
            "`sliding_window`: found 64",
        ),
        (
            "llama",
            rope(**QWEN3_YARN | {"factor": 0.5}),
            "--yarn-rotary-scaling-factor: found 0.5, expected 1 or more",
        ),
        (
            "llama",
            rope(**QWEN3_YARN, beta_fast=16),
            "`beta_fast`: found 16, expected 32, the default of YaRN",
        ),
        (
            "llama",
            rope(**QWEN3_YARN, mscale=1.0, mscale_all_dim=1.0),
            "`mscale_all_dim`: found 1.0, expected 0",
        ),
        (
            "llama",
            rope(**QWEN3_YARN, attention_factor=1.0),
            "`attention_factor`: found 1.0, expected 1.13863, that of YaRN",
        ),
        (
            "qwen3",
            rope(**QWEN3_YARN | {"original_max_position_embeddings": 31.5}),
            "found 31.5, expected a whole number",
        ),
        (
            "llama",
            {"max_position_embeddings": 0},
            "`max_position_embeddings`: found 0, expected a number above 0",
        ),
        ("modernbert", {"attention_bias": True}, "`attention_bias`: found true, expected false"),
        ("modernbert", {"mlp_bias": True}, "`mlp_bias`: found true, expected false"),
        (
            "modernbert",
            {"hidden_activation": "gelu_new"},
            "`hidden_activation`: found 'gelu_new', expected gelu or silu or",
        ),
        (
            "modernbert",
            {"classifier_activation": "silu"},
            "`classifier_activation`: found 'silu', expected `hidden_activation`'s",
        ),
        (
            "modernbert",
            {"local_attention": 1},
            "`local_attention`: found 1, expected 2 or more tokens",
        ),
        ("neobert", {"rope": False}, "`rope`: found False, expected True as in NeoBERT"),
        (
            "neobert",
            {"rope_theta": 5e5},
            "`rope_theta`: found 500000.0, expected 10000.0 as in NeoBERT",
        ),
        ("neobert", {"hidden_act": "gelu"}, "`hidden_act`: found 'gelu', expected swiglu"),
        (
            "neobert",
            {"dim_head": 16},
            "`dim_head`: found 16, expected 8, hidden_size / num_attention_heads",
        ),
        ("neobert", {"max_length": 0}, "`max_length`: found 0, expected a number above 0"),
        (
            "modernbert-decoder",
            {"is_causal": False},
            "`is_causal`: found false, expected true: transformers' modernbert-decoder",
        ),
        (
            "modernbert-decoder",
            {"sliding_window": 1},
            "`sliding_window` (or half of `local_attention`): found 1, expected 2 or",
        ),
        (
            "modernbert-decoder",
            {"layer_types": GLOBAL_LAST},
            "`layer_types`: found full_attention in layers [3, 4], expected m, m + n",
        ),
        (
            "modernbert",
            {"num_attention_heads": 3},
            "--hidden-size: found 32, expected a multiple of --num-attention-heads 3",
        ),
        (
            "gemma3_text",
            {"final_logit_softcapping": 30.0},
            "`final_logit_softcapping`: found 30.0, expected none",
        ),
        ("gemma3_text", {"attention_bias": True}, "`attention_bias`: found true, expected false"),
        (
            "modernbert",
            {"is_causal": True},
            "`is_causal`: found true, expected false: modernbert models are bidirectional",
        ),
        ("llama", {"is_causal": None}, "`is_causal`: found None, expected true or false"),
        (
            "gemma3_text",
            {"is_causal": False},
            "`is_causal`: found false, expected `use_bidirectional_attention` true",
        ),
        (
            "gemma3_text",
            {"sliding_window": None, "use_bidirectional_attention": False},
            "`sliding_window`: found None, expected 2 or more tokens",
        ),
        (
            "gemma3_text",
            {"query_pre_attn_scalar": 0},
            "`query_pre_attn_scalar`: found 0, expected a number above 0",
        ),
        (
            "gemma3_text",
            {"rope_parameters": YARN},
            "`rope_type` of sliding_attention: found 'yarn', expected default",
        ),
        (
            "gemma3_text",
            {"rope_parameters": LINEAR},
            "`factor`: found -8.0, expected a number above 0",
        ),
        (
            "llama",
            {"num_key_value_heads": 3},
            "--num-attention-heads: found 4, expected a multiple of --num-query-groups 3",
        ),
    ],
)
def test_what_cannot_be_computed_is_named(name, change, words):
    [model, *_] = MODELS[name]
    with pytest.raises(InputError) as error:
        read(written(name, model) | change)
    assert words in str(error.value) and str(error.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("name", "attention", "model", "words"),
    [
        (
            "eurobert",
            "bidirectional",
            WITH_NORMS,
            "--as eurobert: has no norms of queries and keys; expected --as qwen3",
        ),
        (
            "eurobert",
            "causal",
            SMALL,
            "--as eurobert: has no causal attention; expected --as llama or mistral",
        ),
        (
            "mistral",
            "causal",
            WITH_BIAS,
            "has no biases of queries, keys and values; expected --as llama or qwen2",
        ),
        (
            "qwen2",
            "bidirectional",
            replace(WITH_BIAS, window_size=8),
            "has no attention windows; no family here",
        ),
        (
            "modernbert",
            "bidirectional",
            SMALL,
            "--as modernbert: has no RMSNorm; expected --as eurobert or llama or mistral",
        ),
        (
            "modernbert",
            "bidirectional",
            replace(MODERNBERT, **EXTENDED),
            "has no rotary positions scaled by YaRN",
        ),
        (
            "neobert",
            "bidirectional",
            SMALL,
            "has no output layer without bias; expected --as eurobert or llama or mistral",
        ),
        (
            "neobert",
            "bidirectional",
            replace(NEOBERT, rotary_base=5e5),
            "has no rotary positions of another base period",
        ),
        (
            "neobert",
            "bidirectional",
            replace(NEOBERT, ffn_hidden_size=50),
            "has no --ffn-hidden-size that is no",
        ),
        (
            "neobert",
            "bidirectional",
            replace(NEOBERT, num_query_groups=2),
            "has no queries that share keys",
        ),
        (
            "eurobert",
            "bidirectional",
            replace(NEOBERT, prediction_head=True),
            "has no prediction head; no family",
        ),
        (
            "modernbert-decoder",
            "bidirectional",
            MODERNBERT,
            "has no bidirectional attention; expected --as modernbert",
        ),
        (
            "modernbert",
            "bidirectional",
            replace(MODERNBERT, num_query_groups=2),
            "has no queries that share keys",
        ),
        (
            "gemma3_text",
            "causal",
            WITH_NORMS,
            "--as gemma3_text: has no norms by weight without + 1; expected --as qwen3",
        ),
        ("gemma3_text", "prefix", GEMMA3, "--as gemma3_text: has no prefix attention"),
        (
            "gemma3_text",
            "causal",
            replace(GEMMA3, num_attention_heads=6),
            "has no heads whose number does not divide the hidden size; no family here",
        ),
        (
            "qwen3",
            "causal",
            SMALL,
            "has no queries and keys without norms; expected --as llama or mistral",
        ),
    ],
)
def test_a_family_that_cannot_say_what_a_model_is_names_one_that_can(name, attention, model, words):
    with pytest.raises(InputError) as error:
        written(name, model, Attention(attention))
    assert words in str(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_a_family_does_not_list_is_refused_with_another_value(name):
    """Families list all that is read from config.json: new fields are not ignored."""
    family = FAMILIES[name]
    model = MODELS[name][0]
    config = parse_hf_config(written(name, model), "config.json")
    assert family.layers.read_fields(config, "config.json").keys() <= set(family.layers.OPTIONS)
    assert family.unsupported_feature(model, family.attentions[0]) is None
    others = [field.name for field in fields(ModelConfig) if field.name not in family.options]
    assert {"post_norms", "scale_embedding", "normalization"} <= {*others}
    for other in others:
        assert family.unsupported_feature(
            replace(model, **{other: "another"}), family.attentions[0]
        ), other
