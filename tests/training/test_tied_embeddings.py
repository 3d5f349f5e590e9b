"""One matrix for the embedding and the output layer, wherever its two uses are, and ModernBERT's layers around them."""

import numpy as np
import pytest
import runs
import torch
from safetensors import safe_open

from megaenc.convert.to_hf import to_hf
from megaenc.errors import InputError
from megaenc.training.command import main

RUN = [
    *runs.SHORT_RUN, "--num-layers", "4", "--train-iters", "12", "--eval-interval", "12", "--no-bf16",
    "--no-untie-embeddings-and-output-weights",
]  # fmt: skip
PP2 = ["--pipeline-model-parallel-size", "2"]
MODERNBERT = [
    "--normalization", "LayerNorm", "--norm-bias", "--activation", "gelu", "--embedding-norm", "--prediction-head",
    "--output-layer-bias", "--num-query-groups", "4",
    "--window-size", "5", "--global-attn-every-n-layers", "3", "--local-rotary-base", "1000",
]  # fmt: skip
MODELS = {"llama": [], "modernbert": MODERNBERT}
INTERLEAVED = "PP2, interleaved, DP2, distributed optimizer"
LAYOUTS = {
    "TP2 SP": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "TP2 PP2": (4, [*PP2, "--tensor-model-parallel-size", "2"]),
    INTERLEAVED: (4, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1", "--use-distributed-optimizer"]),
}
CASES = [("llama", "TP2 PP2"), ("llama", INTERLEAVED), ("modernbert", "TP2 PP2")]
CASES += [pytest.param("modernbert", layout, marks=pytest.mark.slow) for layout in ("TP2 SP", INTERLEAVED)]


@pytest.fixture(scope="module")
def references(small_corpus, tmp_path_factory):
    """By model: a run in one process without a stop."""
    folder = tmp_path_factory.mktemp("one")
    for model, flags in MODELS.items():
        main([*small_corpus.flags, *RUN, *flags, "--save", str(folder / model)])
    return {model: folder / model for model in MODELS}


@pytest.fixture
def reference(references):
    return references["llama"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_step_is_that_of_one_process(model, layout, small_corpus, references, tmp_path):
    """And it goes on in one process."""
    (processes, flags), reference = LAYOUTS[layout], references[model]
    command = [*small_corpus.flags, *RUN, *MODELS[model], "--save", str(tmp_path / "run"), "--exit-interval", "8"]
    runs.script(runs.PRETRAIN, [*command, *flags], processes=processes)
    main(command)
    assert len(runs.metrics(tmp_path / "run")) == 12
    runs.assert_same_curve(tmp_path / "run", reference, tolerance=1e-4)


@pytest.mark.parametrize("architecture", ["eurobert", "llama"])
def test_the_export_is_tied(architecture, small_corpus, reference, tmp_path):
    from transformers import AutoModelForMaskedLM, LlamaForCausalLM

    to_hf(reference, tmp_path / "hf", architecture=architecture)
    with safe_open(tmp_path / "hf" / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118, which is no dict
        embedding = file.get_tensor("model.embed_tokens.weight")
    kind = AutoModelForMaskedLM if architecture == "eurobert" else LlamaForCausalLM
    model = kind.from_pretrained(tmp_path / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    np.testing.assert_array_equal(model.lm_head.weight.detach(), embedding)
    with torch.no_grad():
        logits = model(torch.arange(1, 33)[None]).logits
    assert logits.shape == (1, 32, embedding.shape[0]) and float(logits.std()) > 0


def test_a_new_modernbert_goes_out_as_one(references, tmp_path):
    """With windows shorter than its texts; no other family has its layers."""
    from transformers import ModernBertForMaskedLM

    to_hf(references["modernbert"], tmp_path / "hf")
    model = ModernBertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert model.config.sliding_window == 5 and model.config.local_attention == 10
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert model.decoder.weight is model.model.embeddings.tok_embeddings.weight
    with pytest.raises(InputError, match="--as eurobert: has no LayerNorm; expected --as modernbert"):
        to_hf(references["modernbert"], tmp_path / "no", architecture="eurobert")
    with pytest.raises(InputError, match="--as modernbert: has no RMSNorm; expected --as eurobert"):
        to_hf(references["llama"], tmp_path / "no", architecture="modernbert")


def test_first_loss_is_not_that_of_two_matrices(small_corpus, reference, tmp_path):
    flags = [*RUN[:-1], "--exit-interval", "1", "--eval-interval", "0", "--save", str(tmp_path / "run")]
    main([*small_corpus.flags, *flags])
    assert abs(runs.metrics(tmp_path / "run")[0]["loss"] / runs.metrics(reference)[0]["loss"] - 1) > 1e-5
