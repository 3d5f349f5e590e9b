"""What config.json says of a model, read in both directions, and what it may not say."""

import dataclasses
import json
import math

import pytest
import torch

from megaenc.console import silence_libraries
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

silence_libraries()

SMALL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2)
WITH_BIAS = dataclasses.replace(SMALL, add_qkv_bias=True)
WITH_NORMS = dataclasses.replace(SMALL, qk_layernorm=True)
SLIDING = ["full_attention", "sliding_attention"]
GLOBAL_IN_0_1_3 = [*["full_attention"] * 2, *SLIDING[::-1], "sliding_attention"]
GLOBAL_LAST = [*["sliding_attention"] * 3, *["full_attention"] * 2]
YARN = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}
LINEAR = {"full_attention": dict(rope_type="linear", rope_theta=1e6, factor=-8.0), "sliding_attention": dict(rope_theta=1e4)}
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
STRETCHED = dict(rotary_base=500000.0, use_rope_scaling=True, rope_scaling_factor=32.0)
EXTENDED = dict(yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=32)
QWEN3_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
MODERNBERT = dataclasses.replace(
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
ALL_GLOBAL = dict(window_size=None, global_attn_every_n_layers=None, local_rotary_base=None, first_global_layer=1)
GEMMA3 = dataclasses.replace(
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
    "llama": [SMALL, WITH_BIAS, dataclasses.replace(SMALL, **STRETCHED, kv_channels=16), dataclasses.replace(SMALL, **EXTENDED)],
    "mistral": [SMALL, dataclasses.replace(SMALL, untie_embeddings_and_output_weights=False)],
    "qwen2": [WITH_BIAS, dataclasses.replace(WITH_BIAS, kv_channels=16, norm_epsilon=1e-6)],
    "qwen3": [
        WITH_NORMS,
        dataclasses.replace(WITH_NORMS, add_qkv_bias=True, kv_channels=16, rotary_base=1e6),
        dataclasses.replace(WITH_NORMS, **EXTENDED, rotary_base=1e6),
    ],
    "modernbert": [
        MODERNBERT,
        dataclasses.replace(MODERNBERT, **ALL_GLOBAL, norm_bias=True, output_layer_bias=False, activation="silu"),
        dataclasses.replace(MODERNBERT, global_attn_every_n_layers=None, local_rotary_base=None),
        dataclasses.replace(MODERNBERT, global_attn_every_n_layers=5, local_rotary_base=None),
        dataclasses.replace(MODERNBERT, global_attn_every_n_layers=4, first_global_layer=2, activation="gelu_pytorch_tanh"),
        dataclasses.replace(MODERNBERT, untie_embeddings_and_output_weights=True, norm_epsilon=1e-6),
    ],
    "gemma3_text": [
        GEMMA3,
        dataclasses.replace(GEMMA3, rotary_seq_len_interpolation_factor=8.0, query_pre_attn_scalar=24, kv_channels=None),
        dataclasses.replace(GEMMA3, **ALL_GLOBAL, activation="silu", untie_embeddings_and_output_weights=True),
        dataclasses.replace(GEMMA3, **ALL_GLOBAL | {"window_size": 1}, norm_epsilon=1e-6),
        dataclasses.replace(GEMMA3, global_attn_every_n_layers=6, first_global_layer=6, local_rotary_base=None),
    ],
}
MODELS["modernbert-decoder"] = MODELS["modernbert"]
NEOBERT = dataclasses.replace(SMALL, num_query_groups=4, output_layer_bias=True)
MODELS["neobert"] = [NEOBERT, dataclasses.replace(NEOBERT, norm_epsilon=1e-6, init_method_std=0.03, ffn_hidden_size=56)]


class Tokenizer:
    """The ids that a config asks a tokenizer for."""

    pad_token_id, bos_token_id, eos_token_id, mask_token_id = None, 1, 2, 3
    cls_token_id = sep_token_id = None


def exported(name, model, attention=None, **options):
    """transformers' config of `model` as the family `name`; bidirectional if the family can be."""
    attention = attention or (Attention.CAUSAL if name == "modernbert-decoder" else Attention.BIDIRECTIONAL)
    given = dict(vocab_size=90, context=128, tokenizer=Tokenizer, dtype=torch.float32)
    return build_export_config(FAMILIES[name], attention, model, **given | options)


def written(*given, **options):
    """config.json of `exported`, as a dict."""
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


def test_a_decoder_says_that_it_is_bidirectional():
    for name, [model, *_] in MODELS.items():
        values, family = written(name, model), FAMILIES[name]
        if name == "modernbert-decoder":  # transformers' class is only causal
            assert native_attention(parse_hf_config(values, ""), family) == Attention.CAUSAL and "is_causal" not in values
            continue
        assert native_attention(parse_hf_config(values, ""), family) == Attention.BIDIRECTIONAL
        if family.is_encoder:
            assert (values["mask_token_id"], values["classifier_pooling"]) == (3, "mean")
        else:
            field = "use_bidirectional_attention" if name == "gemma3_text" else "is_causal"
            assert values[field] is (field != "is_causal") and ("is_causal" in values) is (field == "is_causal")
            causal = written(name, model, Attention.CAUSAL)
            causal |= {} if name == "gemma3_text" else {"use_bidirectional_attention": True}  # which others ignore
            assert native_attention(parse_hf_config(causal, ""), family) == Attention.CAUSAL
            # A cache of keys among the outputs cannot go to ONNX, nor continue a text that is read both ways.
            assert (values["use_cache"], causal["use_cache"]) == (False, True)


@pytest.mark.parametrize(
    ("name", "pooling", "expected"),
    [
        ("eurobert", "late", "late"),
        ("eurobert", "bos", "bos"),
        ("eurobert", "cls", "mean"),
        ("modernbert", "cls", "cls"),
        ("modernbert", "late", "mean"),
        ("neobert", "cls", "mean"),
        ("modernbert", ["cls"], "mean"),
    ],
)
def test_pooling_of_the_source_is_kept_if_the_family_has_it(name, pooling, expected):
    source = {"classifier_pooling": pooling}
    config = exported(name, MODELS[name][0], source=source)
    assert config.classifier_pooling == expected
    lines = describe_changed_fields(config, source, Tokenizer)
    change = f'config.json: classifier_pooling "mean" instead of the {json.dumps(pooling)} that came in, which this {name} model'
    assert lines == ([] if pooling == expected else [f"{change} cannot have"])


@pytest.mark.parametrize(
    ("field", "came", "expected", "reason"),
    [
        ("cls_token_id", 7, 7, None),
        ("cls_token_id", 90, None, "as in the tokenizer"),
        ("cls_token_id", -1, None, "as in the tokenizer"),
        ("cls_token_id", [7], None, "as in the tokenizer"),
        ("cls_token_id", "7", None, "as in the tokenizer"),
        ("bos_token_id", 1, 1, None),
        ("bos_token_id", None, 1, "as in the tokenizer"),
        ("eos_token_id", [2, 7], [2, 7], None),
        ("eos_token_id", [7, 8], 2, "as in the tokenizer"),
        ("eos_token_id", [2, 90], 2, "as in the tokenizer"),
        ("pad_token_id", 7, 7, None),
        ("pad_token_id", None, None, None),
        ("pad_token_id", 90, 2, "which this modernbert model cannot have"),
        ("mask_token_id", 7, 3, "as in the tokenizer"),
    ],
)
def test_special_ids_of_the_source_are_kept_unless_the_tokenizer_has_others(field, came, expected, reason):
    config = exported("modernbert", MODERNBERT, source={field: came})
    assert config.to_dict()[field] == expected
    change = f"config.json: {field} {json.dumps(expected)} instead of the {json.dumps(came)} that came in, {reason}"
    assert describe_changed_fields(config, {field: came}, Tokenizer) == ([change] if reason else [])


def test_fields_that_a_family_lacks_do_not_go_out():
    source = {"classifier_pooling": "cls", "cls_token_id": 7, "mask_token_id": 7}
    config = exported("llama", SMALL, Attention.CAUSAL, source=source)
    assert not source.keys() & config.to_dict().keys()
    assert describe_changed_fields(config, source, Tokenizer) == []


def test_a_tokenizer_without_bos_and_eos_gives_cls_and_sep():
    class Modern(Tokenizer):
        bos_token_id = eos_token_id = None
        cls_token_id, sep_token_id, pad_token_id = 4, 5, 6

    for name in ("eurobert", "modernbert", "modernbert-decoder"):
        values = written(name, MODELS[name][0], tokenizer=Modern)
        assert [values[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [4, 5, 6]


def test_what_it_was_trained_on_follows_from_mask_and_shift():
    llama, encoder = written("llama", SMALL, Attention.CAUSAL), written("eurobert", SMALL)
    for values, objective in ((llama, "clm"), (encoder, "mlm"), (encoder | {"prediction_shift": 1}, "mntp")):
        assert infer_objective(parse_hf_config(values, ""), find_family(values, "")) == objective


def test_fields_of_older_versions_are_understood():
    """Llama 3.2 and the study's released models as they are on the Hub: `rope_theta`, `rope_scaling`, a type of their own."""
    values = written("llama", SMALL)
    del values["rope_parameters"]
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    old = values | {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    assert read(old) == dataclasses.replace(SMALL, **STRETCHED)
    assert read(values | {"rope_theta": 1e6, "rope_scaling": None}) == dataclasses.replace(SMALL, rotary_base=1e6)
    released = values | {"model_type": "sl_model", "rope_theta": 250000, "auto_map": {"AutoModel": "code.Model"}}
    assert read(released) == dataclasses.replace(SMALL, rotary_base=250000.0)


def rope(**values):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | values}


def test_yarn_as_it_is_on_the_hub():
    """Qwen3's instructions for long texts, in the older fields; the original context is the model's if it is not given."""
    values = written("qwen3", WITH_NORMS)
    del values["rope_parameters"]
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1.0}
    scaling["attention_factor"] = 0.1 * math.log(4) + 1
    old = values | {"rope_theta": 1e6, "rope_scaling": scaling | {"original_max_position_embeddings": 32}}
    assert read(old) == dataclasses.replace(WITH_NORMS, **EXTENDED, rotary_base=1e6)
    inferred = read(values | {"rope_theta": 1e6, "rope_scaling": scaling})
    assert inferred.yarn_original_max_position_embeddings == values["max_position_embeddings"] == 128


def test_modernbert_as_it_is_on_the_hub():
    """Fields of older versions: mmBERT's, whose local layers have the same base as the global ones."""
    hub = {"model_type": "modernbert", "global_attn_every_n_layers": 3, "global_rope_theta": 160000, "local_rope_theta": 160000}
    hub |= {"local_attention": 128, "num_hidden_layers": 22, "hidden_size": 768, "intermediate_size": 1152, "norm_eps": 1e-5}
    hub |= {"num_attention_heads": 12, "hidden_activation": "gelu", "layer_norm_eps": 1e-5, "position_embedding_type": "sans_pos"}
    base = get_preset("modernbert-base")
    assert read(hub) == dataclasses.replace(base, local_rotary_base=None)
    assert read(hub | {"local_rope_theta": 10000.0}) == base


def test_an_ettin_decoder_as_it_is_on_the_hub():
    """`sliding_window`, which counts the token itself, without `local_attention`, or beside it, where it is what counts."""
    hub = {"model_type": "modernbert-decoder", "global_attn_every_n_layers": 3, "sliding_window": 64, "is_causal": True}
    hub |= {"global_rope_theta": 160000.0, "local_rope_theta": 160000.0, "num_hidden_layers": 22, "causal_mask": True}
    base = dataclasses.replace(get_preset("modernbert-base"), window_size=63)
    assert read(hub) == dataclasses.replace(base, local_rotary_base=None)
    assert read(hub | {"local_rope_theta": 10000.0}) == base
    assert read(hub | {"local_attention": 30}) == dataclasses.replace(base, local_rotary_base=None)
    del hub["sliding_window"]
    assert read(hub | {"local_attention": 30}).window_size == 14


def test_neobert_as_it_is_on_the_hub():
    """With what its code has left there; the width inside the MLP is two thirds, up to a multiple of 8."""
    hub = {"model_type": "neobert", "architectures": ["NeoBERTLMHead"], "classifier_init_range": 0.02, "dim_head": 64}
    hub |= {"embedding_init_range": 0.02, "decoder_init_range": 0.02, "hidden_size": 768, "intermediate_size": 3072}
    hub |= {"kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased"}, "max_length": 4096, "norm_eps": 1e-5}
    hub |= {"num_attention_heads": 12, "num_hidden_layers": 28, "pad_token_id": 0, "vocab_size": 30522}
    assert read(hub) == get_preset("neobert-base")
    config = parse_hf_config(hub, "")
    assert config.max_position_embeddings == 4096 and infer_objective(config, FAMILIES["neobert"]) == "mlm"
    assert read(hub | {"intermediate_size": 160}).ffn_hidden_size == 112  # 106 and two thirds, rounded up
    code = written("neobert", NEOBERT)["auto_map"]
    assert code["AutoModelForMaskedLM"] == "chandar-lab/NeoBERT--model.NeoBERTLMHead"


def test_a_bias_of_the_output_layer_may_be_left_to_the_check_of_its_zeros():
    values = written("eurobert", NEOBERT)
    assert read(values) == dataclasses.replace(NEOBERT, output_layer_bias=False)
    assert FAMILIES["neobert"].without_output_bias(NEOBERT) == FAMILIES["modernbert"].without_output_bias(NEOBERT) == NEOBERT


def test_gemma3_as_it_is_on_the_hub():
    """Fields of older versions; EmbeddingGemma's window is of both sides together."""
    hub = {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None}
    hub |= {"rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window": 512, "sliding_window_pattern": 6}
    hub |= {"head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 1}
    hub |= {"cache_implementation": "hybrid", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "use_bidirectional_attention")
    for preset, *values in (
        ("gemma3-270m", 18, 640, 2048, 4, False),
        ("gemma3-1b", 26, 1152, 6912, 4, False),
        ("embeddinggemma-300m", 24, 768, 1152, 3, True),
    ):
        assert read(hub | dict(zip(names, values, strict=True))) == get_preset(preset)
    larger = hub | dict(zip(names, (62, 5376, 21504, 32, False), strict=True)) | {"num_key_value_heads": 16, "head_dim": 128}
    model = read(larger | {"query_pre_attn_scalar": 168, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (model.query_pre_attn_scalar, model.rotary_seq_len_interpolation_factor, model.kv_channels) == (168, 8.0, 128)
    assert [number for number, window in enumerate(model.layer_windows) if window is None] == list(range(5, 62, 6))


def test_a_window_of_gemma3_counts_the_token_itself_or_both_sides():
    for attention, sliding_window in ((Attention.CAUSAL, 9), (Attention.BIDIRECTIONAL, 16)):
        values = written("gemma3_text", GEMMA3, attention)
        assert values["sliding_window"] == sliding_window
        assert parse_hf_config(values, "").sliding_window == 9
        assert read(values) == GEMMA3


def test_a_window_that_no_layer_has_is_none():
    """Qwen2.5 has one for the layers from `max_window_layers` on, and no such layers."""
    asked = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    values = {name: value for name, value in written("qwen2", WITH_BIAS).items() if name != "layer_types"}
    assert read(values | asked) == WITH_BIAS
    with pytest.raises(InputError, match="`sliding_window`: found 64"):
        read(values | asked | {"max_window_layers": 1})


@pytest.mark.parametrize("field", ["num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings"])
def test_released_weights_must_say_what_their_tensors_do_not(field):
    """EuroBERT's own value would stand in for it otherwise, and the tensors would fit."""
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
        ("llama", {"model_type": "gemma"}, "`model_type`: found 'gemma', expected one of eurobert, llama, mistral, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "`hidden_act`: found 'gelu', expected silu"),
        ("eurobert", {"mlp_bias": True}, "`mlp_bias`: found true, expected false"),
        ("mistral", {"sliding_window": 64}, "`sliding_window`: found 64, expected none or at least the 128 tokens"),
        ("mistral", {"sliding_window": 64}, "set `max_position_embeddings` to 64 there to read no more tokens than the window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING}, "`sliding_window`: found 64"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "`layer_types`: found 'chunked_attention'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "`rope_type`: found 'dynamic'",
        ),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "found 0.5"),
        ("llama", {"quantization_config": {"bits": 4}}, "`quantization_config`: found {'bits': 4}, expected none"),
        ("llama", {"hidden_size": "wide"}, "'hidden_size' expected int, got str (value: 'wide')"),
        ("llama", {"model_type": []}, "`model_type`: found [], expected one of"),
        ("llama", rope(rope_theta=None), "`rope_theta`: found None, expected a number above 0"),
        ("llama", rope(rope_theta=-5), "`rope_theta`: found -5, expected a number above 0"),
        ("llama", rope(rope_theta=float("inf")), "`rope_theta`: found inf, expected a number above 0"),
        ("llama", rope(**LLAMA3, factor=None), "`factor`: found None, expected a number above 0"),
        ("llama", rope(**LLAMA3, factor=0.5), "--rope-scaling-factor: found 0.5, expected 1 or more"),
        ("llama", rope(**QWEN3_YARN | {"factor": 0.5}), "--yarn-rotary-scaling-factor: found 0.5, expected 1 or more"),
        ("llama", rope(**QWEN3_YARN | {"factor": None}), "`factor`: found None, expected a number above 0"),
        ("llama", rope(**QWEN3_YARN, beta_fast=16), "`beta_fast`: found 16, expected 32, the default of YaRN"),
        ("llama", rope(**QWEN3_YARN, beta_slow=2.0), "`beta_slow`: found 2.0, expected 1, the default of YaRN"),
        ("llama", rope(**QWEN3_YARN, mscale=1.0, mscale_all_dim=1.0), "`mscale_all_dim`: found 1.0, expected 0"),
        ("llama", rope(**QWEN3_YARN, truncate=False), "`truncate`: found False, expected True, the default of YaRN"),
        ("llama", rope(**QWEN3_YARN, attention_factor=1.0), "`attention_factor`: found 1.0, expected 1.13863, that of YaRN"),
        ("qwen3", rope(**QWEN3_YARN | {"original_max_position_embeddings": 31.5}), "found 31.5, expected a whole number"),
        ("qwen3", rope(**QWEN3_YARN | {"original_max_position_embeddings": 1 << 30}), "expected 1 to 1,048,576"),
        ("llama", {"rms_norm_eps": 0.0}, "`rms_norm_eps`: found 0.0, expected a number above 0"),
        ("llama", {"max_position_embeddings": 0}, "`max_position_embeddings`: found 0, expected a number above 0"),
        ("modernbert", {"attention_bias": True}, "`attention_bias`: found true, expected false"),
        ("modernbert", {"mlp_bias": True}, "`mlp_bias`: found true, expected false"),
        ("modernbert", {"classifier_bias": True}, "`classifier_bias`: found true, expected false"),
        ("modernbert", {"hidden_activation": "gelu_new"}, "`hidden_activation`: found 'gelu_new', expected gelu or silu or"),
        (
            "modernbert",
            {"classifier_activation": "silu"},
            "`classifier_activation`: found 'silu', expected `hidden_activation`'s",
        ),
        ("modernbert", {"local_attention": 1}, "`local_attention`: found 1, expected 2 or more tokens"),
        (
            "modernbert",
            {"layer_types": GLOBAL_IN_0_1_3},
            "`layer_types`: found full_attention in layers [0, 1, 3], expected m, m + n",
        ),
        ("modernbert", {"layer_types": GLOBAL_LAST}, "`layer_types`: found full_attention in layers [3, 4], expected m, m + n"),
        ("modernbert", {"rope_parameters": YARN}, "`rope_type` of sliding_attention: found 'yarn', expected default"),
        ("neobert", {"rope": False}, "`rope`: found False, expected True as in NeoBERT"),
        ("neobert", {"rms_norm": False}, "`rms_norm`: found False, expected True as in NeoBERT"),
        ("neobert", {"ngpt": True}, "`ngpt`: found True, expected False as in NeoBERT"),
        ("neobert", {"rope_theta": 5e5}, "`rope_theta`: found 500000.0, expected 10000.0 as in NeoBERT"),
        ("neobert", {"tie_word_embeddings": True}, "`tie_word_embeddings`: found True, expected False as in NeoBERT"),
        ("neobert", {"hidden_act": "gelu"}, "`hidden_act`: found 'gelu', expected swiglu"),
        ("neobert", {"dim_head": 16}, "`dim_head`: found 16, expected 8, hidden_size / num_attention_heads"),
        ("neobert", {"norm_eps": 0.0}, "`norm_eps`: found 0.0, expected a number above 0"),
        ("neobert", {"max_length": 0}, "`max_length`: found 0, expected a number above 0"),
        ("neobert", {"num_attention_heads": 0}, "`num_attention_heads`: found 0, expected a number above 0"),
        ("neobert", {"hidden_size": "wide"}, "'hidden_size' expected int, got str (value: 'wide')"),
        ("llama", {"model_type": "bert"}, "`model_type`: found 'bert', expected one of eurobert, llama, mistral, qwen2, qwen3"),
        ("modernbert-decoder", {"attention_bias": True}, "`attention_bias`: found true, expected false"),
        ("modernbert-decoder", {"is_causal": False}, "`is_causal`: found false, expected true: transformers' modernbert-decoder"),
        ("modernbert-decoder", {"sliding_window": 1}, "`sliding_window` (or half of `local_attention`): found 1, expected 2 or"),
        ("modernbert-decoder", {"sliding_window": None}, "`sliding_window` (or half of `local_attention`): found None, expected"),
        (
            "modernbert-decoder",
            {"layer_types": GLOBAL_LAST},
            "`layer_types`: found full_attention in layers [3, 4], expected m, m + n",
        ),
        ("modernbert", {"norm_eps": 0.0}, "`norm_eps`: found 0.0, expected a number above 0"),
        ("modernbert", {"num_attention_heads": 3}, "--hidden-size: found 32, expected a multiple of --num-attention-heads 3"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`: found 50.0, expected none"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "`final_logit_softcapping`: found 30.0, expected none"),
        ("gemma3_text", {"attention_bias": True}, "`attention_bias`: found true, expected false"),
        ("modernbert", {"is_causal": True}, "`is_causal`: found true, expected false: modernbert models are bidirectional"),
        ("llama", {"is_causal": None}, "`is_causal`: found None, expected true or false"),
        ("gemma3_text", {"is_causal": False}, "`is_causal`: found false, expected `use_bidirectional_attention` true"),
        ("gemma3_text", {"hidden_activation": "relu"}, "`hidden_activation`: found 'relu', expected gelu or silu or gelu_py"),
        ("gemma3_text", {"sliding_window": 1}, "`sliding_window`: found 1, expected 2 or more tokens"),
        (
            "gemma3_text",
            {"sliding_window": None, "use_bidirectional_attention": False},
            "`sliding_window`: found None, expected 2 or more tokens",
        ),
        ("gemma3_text", {"sliding_window": None}, "config.json: "),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "`query_pre_attn_scalar`: found 0, expected a number above 0"),
        (
            "gemma3_text",
            {"layer_types": [*GLOBAL_IN_0_1_3, *SLIDING]},
            "`layer_types`: found full_attention in layers [0, 1, 3, 5]",
        ),
        ("gemma3_text", {"rope_parameters": YARN}, "`rope_type` of sliding_attention: found 'yarn', expected default"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "`factor`: found -8.0, expected a number above 0"),
        ("gemma3_text", {"num_attention_heads": 3}, "(32) is not a multiple of the number of attention heads (3)"),
        ("llama", {"num_key_value_heads": 3}, "--num-attention-heads: found 4, expected a multiple of --num-query-groups 3"),
    ],
)
def test_what_cannot_be_computed_is_named(name, change, words):
    [model, *_] = MODELS[name]
    with pytest.raises(InputError) as error:
        read(written(name, model) | change)
    assert words in str(error.value) and str(error.value).startswith("config.json: ")


@pytest.mark.parametrize("name", ["low_freq_factor", "original_max_position_embeddings"])
def test_positions_stretched_in_another_way_are_refused(name):
    values = written("llama", dataclasses.replace(SMALL, **STRETCHED))
    values["rope_parameters"][name] = 2
    with pytest.raises(InputError, match=f"`{name}`: found 2, expected"):
        read(values)


@pytest.mark.parametrize(
    ("name", "attention", "model", "words"),
    [
        ("eurobert", "bidirectional", WITH_NORMS, "--as eurobert: has no norms of queries and keys; expected --as qwen3"),
        ("eurobert", "causal", SMALL, "--as eurobert: has no causal attention; expected --as llama or mistral"),
        ("mistral", "causal", WITH_BIAS, "has no biases of queries, keys and values; expected --as llama or qwen2"),
        ("qwen2", "causal", SMALL, "has no queries, keys and values without biases; expected --as llama or mistral"),
        ("llama", "causal", MODERNBERT, "--as llama: has no LayerNorm; expected --as modernbert-decoder"),
        ("eurobert", "bidirectional", MODERNBERT, "--as eurobert: has no LayerNorm; expected --as modernbert"),
        ("qwen2", "bidirectional", dataclasses.replace(WITH_BIAS, window_size=8), "has no attention windows; no family here"),
        ("modernbert", "bidirectional", SMALL, "--as modernbert: has no RMSNorm; expected --as eurobert or llama or mistral"),
        ("modernbert", "bidirectional", dataclasses.replace(MODERNBERT, **EXTENDED), "has no rotary positions scaled by YaRN"),
        ("modernbert", "causal", MODERNBERT, "--as modernbert: has no causal attention; expected --as modernbert-decoder"),
        ("neobert", "causal", NEOBERT, "--as neobert: has no causal attention; no family here has all layers of this model"),
        ("neobert", "bidirectional", SMALL, "has no output layer without bias; expected --as eurobert or llama or mistral"),
        ("neobert", "bidirectional", dataclasses.replace(NEOBERT, rotary_base=5e5), "has no base period of the rotary positions"),
        ("neobert", "bidirectional", dataclasses.replace(NEOBERT, num_query_groups=2), "has no queries that share keys and"),
        ("neobert", "bidirectional", dataclasses.replace(NEOBERT, ffn_hidden_size=50), "has no --ffn-hidden-size that is no"),
        ("neobert", "bidirectional", MODERNBERT, "--as neobert: has no LayerNorm; expected --as modernbert"),
        ("eurobert", "bidirectional", dataclasses.replace(NEOBERT, prediction_head=True), "has no prediction head; no family"),
        ("modernbert-decoder", "bidirectional", MODERNBERT, "has no bidirectional attention; expected --as modernbert"),
        ("modernbert-decoder", "causal", SMALL, "--as modernbert-decoder: has no RMSNorm; expected --as llama or mistral"),
        ("modernbert", "bidirectional", dataclasses.replace(MODERNBERT, num_query_groups=2), "has no queries that share keys"),
        ("modernbert", "bidirectional", dataclasses.replace(MODERNBERT, kv_channels=16), "has no heads of another width than"),
        ("llama", "causal", GEMMA3, "--as llama: has no norms of queries and keys; expected --as gemma3_text"),
        (
            "qwen3",
            "bidirectional",
            dataclasses.replace(WITH_NORMS, post_norms=True),
            "--as qwen3: has no norms after attention and MLP; no family here",
        ),
        ("modernbert", "bidirectional", GEMMA3, "--as modernbert: has no RMSNorm; expected --as gemma3_text"),
        ("gemma3_text", "causal", WITH_NORMS, "--as gemma3_text: has no norms by weight without + 1; expected --as qwen3"),
        ("gemma3_text", "causal", MODERNBERT, "--as gemma3_text: has no LayerNorm; expected --as modernbert-decoder"),
        ("gemma3_text", "prefix", GEMMA3, "--as gemma3_text: has no prefix attention"),
        (
            "gemma3_text",
            "causal",
            dataclasses.replace(GEMMA3, num_attention_heads=6),
            "has no heads whose number does not divide the hidden size; no family here",
        ),
        ("qwen3", "causal", SMALL, "has no queries and keys without norms; expected --as llama or mistral"),
    ],
)
def test_a_family_that_cannot_say_what_a_model_is_names_one_that_can(name, attention, model, words):
    with pytest.raises(InputError) as error:
        written(name, model, Attention(attention))
    assert words in str(error.value)


def test_zeros_stand_for_the_bias_that_training_has_not():
    assert FAMILIES["llama"].zero_bias_names(WITH_BIAS) == tuple(f"model.layers.{n}.self_attn.o_proj.bias" for n in range(2))
    assert not FAMILIES["qwen2"].zero_bias_names(WITH_BIAS) and not FAMILIES["llama"].zero_bias_names(SMALL)
