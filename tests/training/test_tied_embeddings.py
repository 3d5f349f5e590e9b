"""Exports of models with one matrix for the embedding and the output layer, and of ModernBERT's layers around it."""

import pytest
import runs
import torch
from safetensors import safe_open

from megaenc.convert.to_hf import to_hf
from megaenc.errors import InputError
from megaenc.training.command import main

TIED = [*runs.SHORT_RUN, "--num-layers", "4", "--no-bf16", "--eval-interval", "0", "--exit-interval", "1"]
TIED += ["--no-untie-embeddings-and-output-weights"]
MODERNBERT = [
    "--normalization", "LayerNorm", "--norm-bias", "--activation", "gelu", "--embedding-norm", "--prediction-head",
    "--output-layer-bias", "--num-query-groups", "4",
    "--window-size", "5", "--global-attn-every-n-layers", "3", "--local-rotary-base", "1000",
]  # fmt: skip


@pytest.fixture(scope="module")
def tied(small_corpus, tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("tied") / "run"
    main([*small_corpus.flags, *TIED, "--save", str(folder)])
    return folder


@pytest.mark.parametrize("architecture", ["eurobert", "llama"])
def test_the_export_is_tied(architecture, tied, tmp_path):
    from transformers import AutoModelForMaskedLM, LlamaForCausalLM

    to_hf(tied, tmp_path / "hf", architecture=architecture)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118, which is no dict
        embedding = file.get_tensor("model.embed_tokens.weight")
    kind = AutoModelForMaskedLM if architecture == "eurobert" else LlamaForCausalLM
    model = kind.from_pretrained(tmp_path / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)


def test_a_new_modernbert_goes_out_as_one(small_corpus, tied, tmp_path):
    """With windows shorter than its texts; no other family has its layers."""
    from transformers import ModernBertForMaskedLM

    main([*small_corpus.flags, *TIED, *MODERNBERT, "--save", str(tmp_path / "run")])
    to_hf(tmp_path / "run", tmp_path / "hf")
    model = ModernBertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert model.config.sliding_window == 5 and model.config.local_attention == 10
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert model.decoder.weight is model.model.embeddings.tok_embeddings.weight
    with pytest.raises(InputError, match="--as eurobert: has no LayerNorm; expected --as modernbert"):
        to_hf(tmp_path / "run", tmp_path / "no", architecture="eurobert")
    with pytest.raises(InputError, match="--as modernbert: has no RMSNorm; expected --as eurobert"):
        to_hf(tied, tmp_path / "no", architecture="modernbert")
