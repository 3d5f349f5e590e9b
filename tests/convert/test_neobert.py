"""NeoBERT's layers are EuroBERT's under other names, with rows of queries and keys in another order, up to a bias."""

import json
import math

import hf_models
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import EuroBertForMaskedLM

from megaenc.convert.command import main
from megaenc.convert.families.neobert import to_model_config
from megaenc.hf.neobert_model import NeoBERTConfig, NeoBERTLMHead, _rotate
from megaenc.model.config import get_preset


@pytest.fixture(scope="module")
def models(small_corpus, tmp_path_factory):
    """By whether its output layer has a bias of zeros: a model, its folder and the run folder made of it. Not to be changed."""
    found = {}
    for zeros in (False, True):
        folder = tmp_path_factory.mktemp("neobert")
        model = hf_models.build("neobert", vocab_size=410).eval()
        if zeros:
            torch.nn.init.zeros_(model.decoder.bias)
        hf_models.write(model, folder / "hf", small_corpus.tokenizer)
        main(["from-hf", "--input", str(folder / "hf"), "--output", str(folder / "core")])
        found[zeros] = model, folder / "core"
    return found


def test_neighbouring_numbers_turn_together():
    """By hand: the angles are the position times 1 and times 1 / 100 in a head of four numbers."""
    angles = torch.tensor([[[3.0, 0.03]]])
    turned = _rotate(torch.tensor([1.0, 0, 0, 2.0]).view(1, 1, 1, 4), torch.polar(torch.ones(1, 1, 2), angles))
    expected = torch.tensor([math.cos(3), math.sin(3), -2 * math.sin(0.03), 2 * math.cos(0.03)])
    torch.testing.assert_close(turned.flatten(), expected)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_transformers_computes_it_as_eurobert(kernel, models, tmp_path):
    model, core = models[True]
    main(["to-hf", "--load", str(core), "--output", str(tmp_path / "hf"), "--as", "eurobert"])
    eurobert, report = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation=kernel, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.set_attn_implementation(kernel)
    tokens, mask = torch.arange(120).view(2, 60) * 7 % 400, torch.ones(2, 60, dtype=torch.int64)
    mask[1, 40:] = 0
    with torch.no_grad():
        found, expected = (one(tokens, attention_mask=mask).logits[mask.bool()] for one in (model, eurobert))
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_config_without_eos_is_imported(models, small_corpus, tmp_path):
    """As the released one's."""
    folder = hf_models.write(models[True][0], tmp_path / "hf", small_corpus.tokenizer)
    config = json.loads((folder / "config.json").read_text())
    for name in ("eos_token_id", "bos_token_id"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    main(["from-hf", "--input", str(folder), "--output", str(tmp_path / "core")])
    assert (tmp_path / "core" / "run.json").exists()


def test_a_bias_that_eurobert_has_not_is_named(models, tmp_path, refusal):
    model, core = models[False]
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "hf", "--as", "eurobert"])
    size = f"{float(model.decoder.bias.abs().max()):.2g}"
    assert f"--as eurobert: has no bias of the output layer, and step 0 has one of up to {size}; expected --as neobert" in line
    assert not (tmp_path / "hf").exists()


def test_parameters_are_counted():
    """245 million, as its authors say, each of which the preset has too."""
    with torch.device("meta"):
        model = NeoBERTLMHead(NeoBERTConfig())
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert get_preset("neobert-base").parameter_count(30522) == expected == 245_136_954


def test_flops_are_those_of_its_products():
    """Of both passes, which are three times those of the forward pass that torch counts."""
    model = hf_models.build("neobert", vocab_size=410)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(48)[None])
    assert to_model_config(model.config, "").training_flops(410, 48, [(0, 48, 48)]) == 3 * counter.get_total_flops()
