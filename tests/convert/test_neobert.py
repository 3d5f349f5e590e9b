"""NeoBERT's layers are EuroBERT's with other names and order of rows."""

import json
from pathlib import Path

import hf_models
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import EuroBertForMaskedLM

from megaenc.convert.architectures import FAMILIES, to_model_config
from megaenc.convert.command import main
from megaenc.hf.neobert_model import NeoBERTConfig, NeoBERTLMHead
from megaenc.model.config import get_preset


def bring_in(directory, small_corpus, bias):
    """Build a model whose output bias is scaled by `bias`, and its run directory.

    Its config has no token ids, as the released one.
    """
    model = hf_models.build("neobert", vocab_size=410).eval()
    model.decoder.bias.data *= bias
    hf_models.write(model, directory / "hf", small_corpus.tokenizer)
    config = json.loads((directory / "hf" / "config.json").read_text())
    config.pop("eos_token_id")
    config.pop("bos_token_id")
    (directory / "hf" / "config.json").write_text(json.dumps(config))
    hf_models.from_hf(directory / "hf", directory / "core")
    return model, directory / "core"


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_transformers_computes_it_as_eurobert(kernel, small_corpus, tmp_path):
    model, core = bring_in(tmp_path, small_corpus, 0)
    hf_models.to_hf(core, "eurobert", "--as", "eurobert")
    eurobert = EuroBertForMaskedLM.from_pretrained(Path("eurobert"), attn_implementation=kernel)
    model.set_attn_implementation(kernel)
    tokens = torch.arange(120).view(2, 60) * 7 % 400
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[1, 40:] = 0
    with torch.no_grad():
        found = model(tokens, attention_mask=mask).logits[mask.bool()]
        expected = eurobert(tokens, attention_mask=mask).logits[mask.bool()]
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_bias_that_eurobert_has_not_is_named(small_corpus, tmp_path, refusal):
    model, core = bring_in(tmp_path, small_corpus, 1)
    line = refusal(main, ["to-hf", "--load", core, "--output", "no", "--as", "eurobert"])
    size = f"{float(model.decoder.bias.abs().max()):.2g}"
    assert (
        "--as eurobert: has no bias of the output layer, and step 0 has one "
        f"of up to {size}; expected --as neobert" in line
    )
    assert not Path("no").exists()
    encoder = hf_models.to_hf(core, "encoder", "--as", "eurobert", "--encoder-only")
    assert not any("decoder" in name for name in hf_models.weights(encoder))


def test_parameters_are_counted():
    """The count is 245 million, as in the paper; the preset has as many."""
    with torch.device("meta"):
        model = NeoBERTLMHead(NeoBERTConfig())
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert get_preset("neobert-base").parameter_count(30522) == expected == 245_136_954


def test_flops_are_those_of_its_products():
    """Both passes have three times the FLOPs that torch counts in the forward pass."""
    model = hf_models.build("neobert", vocab_size=410)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(48)[None])
    shape = to_model_config(model.config, FAMILIES["neobert"], "")
    assert shape.training_flops(410, 48, [(0, 48, 48)]) == 3 * counter.get_total_flops()
