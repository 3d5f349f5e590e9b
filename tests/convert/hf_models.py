"""Small random models of every family, in directories as the Hub has them."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from megaenc.console import silence_libraries
from megaenc.convert.command import main

silence_libraries()

SHAPE = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=2500.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0
)
LLAMA3 |= dict(original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", rope_theta=2500.0, factor=4.0, original_max_position_embeddings=128)
TWO_KINDS = ("full_attention", "sliding_attention")
# What each family has that the others have not, tied and untied.
MODELS = {
    "eurobert": dict(model_type="eurobert", mask_token_id=1),
    "eurobert with biases": dict(model_type="eurobert", attention_bias=True, mask_token_id=1),
    "llama with stretched positions": dict(
        model_type="llama", rope_parameters=LLAMA3, head_dim=32, tie_word_embeddings=True
    ),
    "mistral": dict(model_type="mistral", sliding_window=None, head_dim=24),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=32),
    "qwen3 with biases and YaRN": dict(
        model_type="qwen3", head_dim=16, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    "modernbert": dict(model_type="modernbert", local_attention=32, tie_word_embeddings=True),
    "modernbert with norm biases": dict(
        model_type="modernbert", local_attention=20, layer_types=["sliding_attention"] * 2,
        norm_bias=True, decoder_bias=False, tie_word_embeddings=False,
        rope_parameters={kind: dict(rope_type="default", rope_theta=500.0) for kind in TWO_KINDS},
        hidden_activation="silu", classifier_activation="silu",
    ),
    "modernbert-decoder": dict(
        model_type="modernbert-decoder", local_attention=34, cls_token_id=0, sep_token_id=0,
        tie_word_embeddings=True,
    ),
    # 168 gives 112 inside the MLP.
    "neobert": dict(
        model_type="neobert", intermediate_size=168, norm_eps=1e-5, decoder_init_range=0.03,
        max_length=512,
    ),
    "gemma3": dict(
        model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=24, sliding_window=24,
        tie_word_embeddings=True,
        hidden_size=96,  # whose root is rounded in bfloat16
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": dict(rope_type="linear", rope_theta=5e4, factor=8.0),
            "sliding_attention": dict(rope_type="default", rope_theta=500.0),
        },
    ),
    "gemma3 read bidirectionally": dict(
        model_type="gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=40,
        use_bidirectional_attention=True, tie_word_embeddings=False,
        rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in TWO_KINDS},
    ),
}  # fmt: skip
ONLY_CAUSAL = ("modernbert-decoder",)
ENCODERS = ("eurobert", "modernbert", "neobert")
BIDIRECTIONAL = [
    n
    for n, given in MODELS.items()
    if given["model_type"] in ENCODERS or "use_bidirectional_attention" in given
]


def build(name: str, *, vocab_size: int = 400, **options):
    """Build the model `name` of MODELS with an output layer and random weights.

    The bias of attention's output is zero.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    import megaenc.hf.neobert_model  # noqa: F401, registers our class of NeoBERT

    given = SHAPE | dict(
        vocab_size=vocab_size,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    if MODELS[name]["model_type"] == "neobert":
        del given["max_position_embeddings"]
    config = AutoConfig.for_model(**(given | MODELS[name] | options))
    torch.manual_seed(0)
    model = (
        AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM
    ).from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("o_proj.bias"):
            torch.nn.init.zeros_(parameter)
        else:
            # Sharp attention, so that what it looks at matters.
            std = (
                0.3
                if parameter_name.endswith(("q_proj.weight", "k_proj.weight", "qkv.weight"))
                else 0.1
            )
            is_factor = (
                parameter_name.endswith("norm.weight") and config.model_type != "gemma3_text"
            )  # Gemma adds 1 itself
            torch.nn.init.normal_(parameter, mean=float(is_factor), std=std)
    return model


def write(model, directory: Path | str, tokenizer: Path, **how) -> Path:
    """Save `model` and a copy of the tokenizer in `directory`.

    `how` are arguments of save_pretrained.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # what a test counts on standard error is the command's
    model.save_pretrained(directory, **how)
    for file in tokenizer.iterdir():
        shutil.copy(file, directory)
    return Path(directory)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory's safetensors file."""
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def from_hf(directory: Path | str, output: Path | str, *flags: str) -> Path:
    """Convert a Hugging Face directory by the command; return the run directory."""
    main(["from-hf", "--input", str(directory), "--output", str(output), *flags])
    return Path(output)


def to_hf(run: Path | str, output: Path | str, *flags: str) -> Path:
    """Convert a run directory by the command; return the Hugging Face directory."""
    main(["to-hf", "--load", str(run), "--output", str(output), *flags])
    return Path(output)
