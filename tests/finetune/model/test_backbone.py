"""Tiny random models of every kind that people bring: what is read packed is what transformers reads padded."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from megaenc.errors import InputError
from megaenc.finetune.model import backbone as attention
from megaenc.finetune.model.backbone import Backbone, group_padded_lengths, pack_texts
from megaenc.finetune.model.load import load_backbone

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GEMMA3 = _GROUPED | {"head_dim": 24, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA3 |= {"pad_token_id": 0, "query_pre_attn_scalar": 20}
_LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
_IDS = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
_GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
# name: class of the config, its values, context
_KINDS = {
    "eurobert": ("EuroBertConfig", _GROUPED | {"pad_token_id": 0, "eos_token_id": 0}, 64),
    "llama": ("LlamaConfig", _GROUPED, 64),
    "llama read bidirectionally": ("LlamaConfig", _GROUPED | {"is_causal": False}, 64),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 16}, 64),
    "mistral with a window": ("MistralConfig", _GROUPED | {"sliding_window": 4}, 64),
    "mistral with a window read bidirectionally": ("MistralConfig", _GROUPED | {"sliding_window": 4, "is_causal": False}, 64),
    "modernbert": ("ModernBertConfig", _SIZES | _LOCAL | _IDS, 64),
    "ettin decoder with a window": ("ModernBertDecoderConfig", _SIZES | _LOCAL | _IDS, 64),
    "gemma3_text with a window": ("Gemma3TextConfig", _GEMMA3, 64),
    "gemma3_text with a window read bidirectionally": (
        "Gemma3TextConfig",
        _GEMMA3 | {"sliding_window": 6, "use_bidirectional_attention": True},
        64,
    ),
    "bert": ("BertConfig", _SIZES, 64),
    "roberta": ("RobertaConfig", _SIZES, 62),  # positions begin after the padding token's id, 1
    "gpt2": ("GPT2Config", _GPT2, 64),
}
_PADDED = {"deberta": ("DebertaV2Config", _SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, 64)}


def _save(folder, kind, model_class=None):
    """A random model as a folder with all that is looked for; its transformers model."""
    torch.manual_seed(0)
    name, values, _ = (_KINDS | _PADDED)[kind]
    config = getattr(transformers, name)(**values)
    model = (model_class or transformers.AutoModel.from_config)(config).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def _load(folder, attention, dtype=torch.float32):
    return load_backbone(str(folder), attention, device="cpu", dtype=dtype)


def _texts(*lengths):
    random = np.random.default_rng(7)
    return [random.integers(3, 300, length) for length in sorted(lengths)]


@torch.no_grad()
def _padded(model, texts, **how):
    """transformers' own states of the texts end to end, padded at the right by hand."""
    ids = torch.full((len(texts), max(map(len, texts))), 5)
    seen = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text)
        seen[row, : len(text)] = 1
    return model(input_ids=ids, attention_mask=seen, **how).last_hidden_state[seen.bool()]


@pytest.mark.parametrize("kind", [*_KINDS, *_PADDED])
def test_packed_states_are_those_of_the_model_read_its_own_way(tmp_path, kind):
    model = _save(tmp_path, kind)
    causal = "bidirectionally" not in kind
    causal &= kind.split()[0] in ("llama", "qwen3", "mistral", "ettin", "gpt2", "gemma3_text")
    backbone = _load(tmp_path, "causal" if causal else "bidirectional")
    assert backbone.is_packed == (kind in _KINDS)
    assert backbone.context_length == (_KINDS | _PADDED)[kind][2]
    assert backbone.hidden_size == 64
    texts = _texts(9, 3, 20, 1, 9)
    with torch.no_grad():
        found = backbone.compute_states(pack_texts(texts, "cpu"))
    torch.testing.assert_close(found, _padded(model, texts), rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("kind", _KINDS)
def test_each_state_depends_on_what_it_should(tmp_path, kind, attention):
    """Found by gradients, where the check at load changes tokens."""
    _save(tmp_path, kind)
    backbone = _load(tmp_path, attention)
    size = 4 if "window" in kind or kind == "modernbert" else 7
    texts = _texts(size, 2, size)
    embedded = []
    backbone.model.get_input_embeddings().register_forward_hook(lambda *call: embedded.append(call[2]))
    states = backbone.compute_states(pack_texts(texts, "cpu"))
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0))
    moved = torch.stack([torch.autograd.grad(s @ weights, embedded, retain_graph=True)[0][0].abs().sum(-1) for s in states])
    text = torch.tensor([0] * 2 + [1] * size + [2] * size)
    expected = text[:, None] == text
    assert torch.equal(moved > 1e-9, expected.tril() if attention == "causal" else expected)


def test_a_model_that_cannot_be_read_so_is_refused(tmp_path):
    _save(tmp_path, "deberta")
    with pytest.raises(InputError, match=r"found bidirectional attention in deberta-v2, expected .* causal"):
        _load(tmp_path, "causal")


def test_a_decoder_of_the_padded_way_is_pointed_in_the_direction(tmp_path, monkeypatch):
    model = _save(tmp_path, "llama")
    monkeypatch.setattr(transformers.LlamaModel, "_can_set_attn_implementation", classmethod(lambda cls: False))
    backbone = _load(tmp_path, "bidirectional")
    assert not backbone.is_packed
    texts = _texts(3, 20, 5)
    with torch.no_grad():
        found = backbone.compute_states(pack_texts(texts, "cpu"))
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(
            found, _load(tmp_path, "bidirectional").compute_states(pack_texts(texts, "cpu")), rtol=0, atol=1e-4
        )
    assert (found - _padded(model, texts)).abs().max() > 0.01  # read causally


def test_a_model_that_computes_something_else_packed_is_padded(tmp_path, monkeypatch, capsys):
    """A model that loses the positions it is given."""
    _save(tmp_path, "llama")
    forward = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward

    def without_positions(self, x, position_ids):
        return forward(self, x, torch.arange(position_ids.shape[1]).expand_as(position_ids))

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding, "forward", without_positions)
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "apply_rotary_pos_emb", _absolute)
    assert not _load(tmp_path, "causal").is_packed
    assert "not packed: llama " in capsys.readouterr().out


def _absolute(query, key, cos, sin, unsqueeze_dim=1):
    """Positions that are not relative, so that where a text lies in a pack is seen."""
    return query + cos.unsqueeze(unsqueeze_dim), key + sin.unsqueeze(unsqueeze_dim)


def test_the_token_that_pads_is_trained(tmp_path):
    _save(tmp_path, "eurobert")  # pads with the token that ends texts
    backbone = _load(tmp_path, "bidirectional")
    backbone.compute_states(pack_texts([np.array([5, 6, 0])], "cpu")).sum().backward()
    assert backbone.model.embed_tokens.weight.grad[0].abs().sum() > 0


def test_dropout_is_the_config_s(tmp_path):
    _save(tmp_path, "bert")
    backbone = _load(tmp_path, "bidirectional")
    packed = pack_texts(_texts(5, 9), "cpu")
    assert torch.equal(backbone.compute_states(packed), backbone.compute_states(packed))
    backbone.train()
    assert not torch.equal(backbone.compute_states(packed), backbone.compute_states(packed))


def test_16_bit_parameters_remember_what_they_were(tmp_path):
    model = _save(tmp_path, "eurobert")
    backbone = _load(tmp_path, "bidirectional", torch.bfloat16)
    assert backbone.compute_states(pack_texts(_texts(4), "cpu")).dtype == torch.bfloat16
    assert torch.equal(backbone.model.embed_tokens.weight.unrounded, model.embed_tokens.weight)
    assert not hasattr(backbone.model.norm.weight, "unrounded")  # ones: nothing was lost
    assert backbone.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_study_s_models_are_read_without_their_code(tmp_path):
    model = _save(tmp_path, "eurobert")
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"model_type": "sl_model", "auto_map": {"AutoModel": "modeling.SLModel"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "modeling.py").write_text("raise SystemExit('this must never run')")
    texts = _texts(4, 6)
    with torch.no_grad():
        found = _load(tmp_path, "bidirectional").compute_states(pack_texts(texts, "cpu"))
    torch.testing.assert_close(found, _padded(model, texts), rtol=0, atol=1e-4)


def test_a_folder_saved_with_a_head_is_read_without_it(tmp_path):
    model = _save(tmp_path, "bert", transformers.BertForMaskedLM)
    texts = _texts(4, 6)
    with torch.no_grad():
        found = _load(tmp_path, "bidirectional").compute_states(pack_texts(texts, "cpu"))
    torch.testing.assert_close(found, _padded(model.bert, texts), rtol=0, atol=1e-4)


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def _no_config(folder):
    (folder / "config.json").unlink()


def _another_kind(folder):
    bert = transformers.BertConfig(**_SIZES).to_dict()
    (folder / "config.json").write_text(json.dumps(bert | {"model_type": "bert", "architectures": ["BertModel"]}))


def _encoder_and_decoder(folder):
    transformers.T5Config().save_pretrained(folder)


def _unknown(folder):
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')


def _torn(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_no_weights, r"no \*\.safetensors, expected"),
        (_no_tokenizer, r"no tokenizer\.json, expected"),
        (_no_config, r"no config\.json, expected"),
        (_another_kind, r"weights are missing \(embeddings\..*, \.\.\.\), expected those of a bert model"),
        (_encoder_and_decoder, "found a t5 model, expected an encoder or a decoder"),
        (_unknown, "config.json: field `model_type`: found 'unheard_of'"),
        (_torn, "model.safetensors: not a complete safetensors file"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path, harm, message):
    _save(tmp_path, "llama")
    harm(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        _load(tmp_path, "bidirectional")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith((f"--model {tmp_path}: ", f"{tmp_path}/"))


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        _load(tmp_path / "nowhere", "bidirectional")


def test_texts_of_like_length_are_padded_together():
    assert group_padded_lengths(((2, 3), (1, 11), (1, 12), (3, 200), (1, 220), (1, 221))) == [
        [3, 3, 11],
        [12],
        [200, 200, 200, 220],
        [221],
    ]


def test_megatron_stays_out():
    """Models are fine-tuned where only transformers is."""
    code = "import sys, megaenc.finetune.train; print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_gradients_reach_every_parameter(tmp_path):
    _save(tmp_path, "qwen3")
    backbone = _load(tmp_path, "bidirectional")
    assert isinstance(backbone, Backbone)
    backbone.compute_states(pack_texts(_texts(4, 6, 4), "cpu")).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in backbone.parameters())


def test_a_kernel_that_does_not_do_is_not_used(tmp_path, monkeypatch, capsys):
    """What an accelerator's kernel for 16 bits might do, here in the place of the one for processors."""
    _save(tmp_path, "eurobert")
    by_length, words = attention._sdpa_by_length, []
    for wrong, said in (
        (lambda *given: (_ for _ in ()).throw(RuntimeError("head dimension 8\nand more")), "fails: head dimension 8"),
        (lambda *given: by_length(*given) * 2, "computes other states"),
    ):
        broken = {torch.bfloat16: wrong, torch.float32: by_length}
        monkeypatch.setattr(attention, "_sdpa_by_length", lambda q, *rest, broken=broken: broken[q.dtype](q, *rest))
        with pytest.raises(InputError, match=said) as refused:
            _load(tmp_path, "bidirectional", torch.bfloat16)
        words.append(str(refused.value))
    assert all("expected --precision fp32" in word for word in words)
