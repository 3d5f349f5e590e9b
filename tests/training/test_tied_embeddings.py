"""Exports of new models with tied embeddings and ModernBERT's layers."""

import runs

from megaenc.convert.to_hf import to_hf
from megaenc.training.command import main

TIED = [
    *runs.SHORT_RUN,
    "--num-layers",
    "4",
    "--no-bf16",
    "--eval-interval",
    "0",
    "--exit-interval",
    "1",
]
TIED += ["--no-untie-embeddings-and-output-weights"]
MODERNBERT = [
    "--normalization", "LayerNorm", "--norm-bias", "--activation", "gelu", "--embedding-norm",
    "--prediction-head", "--output-layer-bias", "--num-query-groups", "4",
    "--window-size", "5", "--global-attn-every-n-layers", "3", "--local-rotary-base", "1000",
]  # fmt: skip


def test_a_new_modernbert_goes_out_as_one(small_corpus, tmp_path):
    """Its windows are shorter than the texts, and its embeddings are tied."""
    from transformers import ModernBertForMaskedLM

    main([*small_corpus.flags, *TIED, *MODERNBERT, "--save", str(tmp_path / "run")])
    to_hf(tmp_path / "run", tmp_path / "hf")
    model = ModernBertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert model.config.sliding_window == 5 and model.config.local_attention == 10
    assert model.config.layer_types == [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    assert model.decoder.weight is model.model.embeddings.tok_embeddings.weight
