"""Tiny random models of every kind: packed states are transformers' padded ones."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from small_models import SIZES, save_model

from megaenc.errors import InputError
from megaenc.finetune.model import backbone as attention
from megaenc.finetune.model.backbone import group_padded_lengths, pack_texts
from megaenc.finetune.model.load import load_backbone

_GROUPED = {"num_key_value_heads": 2}
_GEMMA3 = _GROUPED | {"head_dim": 24, "sliding_window": 4, "query_pre_attn_scalar": 20}
_GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"]}
_LOCAL = {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_IDS = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BOTH_WAYS = {"is_causal": False}
# name: model_type, values of the config
_KINDS = {
    "eurobert": ("eurobert", _GROUPED | {"eos_token_id": 0}),
    "llama": ("llama", _GROUPED),
    "llama read bidirectionally": ("llama", _GROUPED | _BOTH_WAYS),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 16}),
    "mistral with a window": ("mistral", _GROUPED | {"sliding_window": 4}),
    "mistral with a window read bidirectionally": (
        "mistral",
        _GROUPED | {"sliding_window": 4} | _BOTH_WAYS,
    ),
    "modernbert": ("modernbert", _LOCAL),
    "ettin decoder with a window": ("modernbert-decoder", _LOCAL),
    "gemma3_text with a window": ("gemma3_text", _GEMMA3),
    "gemma3_text with a window read bidirectionally": (
        "gemma3_text",
        _GEMMA3 | {"sliding_window": 6, "use_bidirectional_attention": True},
    ),
    "bert": ("bert", {}),
    "roberta": ("roberta", {"pad_token_id": 1}),  # positions begin after the padding token's id
    "gpt2": ("gpt2", {}),
}
_PADDED = {"deberta": ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]})}


def _save(directory, kind, auto=transformers.AutoModel):
    """A random model with all files that are looked for, and as transformers' own."""
    model_type, values = (_KINDS | _PADDED)[kind]
    model = save_model(directory, model_type, None, auto, **_IDS | values)
    (directory / "tokenizer.json").write_text("{}")
    return model


def _load(directory, direction="bidirectional", dtype=torch.float32):
    return load_backbone(str(directory), direction, device="cpu", dtype=dtype)


def _texts(*lengths):
    random = np.random.default_rng(7)
    return [random.integers(3, 300, length) for length in sorted(lengths)]


@torch.no_grad()
def _packed(backbone, texts):
    return backbone.compute_states(pack_texts(texts, "cpu"))


@torch.no_grad()
def _padded(model, texts):
    """transformers' own states of the texts end to end, padded at the right by hand."""
    ids = torch.full((len(texts), max(map(len, texts))), 5)
    seen = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text)
        seen[row, : len(text)] = 1
    return model(input_ids=ids, attention_mask=seen).last_hidden_state[seen.bool()]


def _assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [*_KINDS, *_PADDED])
def test_packed_states_are_those_of_the_model_read_its_own_way(tmp_path, kind):
    model = _save(tmp_path, kind)
    causal = "bidirectionally" not in kind
    causal &= kind.split()[0] in ("llama", "qwen3", "mistral", "ettin", "gpt2", "gemma3_text")
    backbone = _load(tmp_path, "causal" if causal else "bidirectional")
    assert backbone.is_packed == (kind in _KINDS)
    assert (backbone.context_length, backbone.hidden_size) == (62 if kind == "roberta" else 64, 32)
    texts = _texts(9, 3, 20, 1, 9)
    _assert_close(_packed(backbone, texts), _padded(model, texts))


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("kind", _KINDS)
def test_each_state_depends_on_what_it_should(tmp_path, kind, direction):
    """Found by gradients, which reach every parameter; the check changes tokens."""
    _save(tmp_path, kind)
    backbone = _load(tmp_path, direction)
    size = 4 if "window" in kind or kind == "modernbert" else 7
    embedded = []
    backbone.model.get_input_embeddings().register_forward_hook(
        lambda *call: embedded.append(call[2])
    )
    states = backbone.compute_states(pack_texts(_texts(size, 2, size), "cpu"))
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0))
    moved = torch.stack(
        [
            torch.autograd.grad(s @ weights, embedded, retain_graph=True)[0][0].abs().sum(-1)
            for s in states
        ]
    )
    text = torch.tensor([0] * 2 + [1] * size + [2] * size)
    expected = text[:, None] == text
    assert torch.equal(moved > 1e-9, expected.tril() if direction == "causal" else expected)
    if kind == "qwen3":
        states.square().sum().backward()
        assert all(
            parameter.grad is not None and parameter.grad.abs().sum() > 0
            for parameter in backbone.parameters()
        )


def test_a_model_that_cannot_be_read_so_is_refused(tmp_path):
    _save(tmp_path, "deberta")
    with pytest.raises(
        InputError, match=r"found bidirectional attention in deberta-v2, expected .* causal"
    ):
        _load(tmp_path, "causal")


def test_a_decoder_of_the_padded_way_is_pointed_in_the_direction(tmp_path, monkeypatch):
    model = _save(tmp_path, "llama")
    with monkeypatch.context() as patched:
        patched.setattr(
            transformers.LlamaModel, "_can_set_attn_implementation", classmethod(lambda cls: False)
        )
        backbone = _load(tmp_path)
        assert not backbone.is_packed
        texts = _texts(3, 20, 5)
        found = _packed(backbone, texts)
    _assert_close(found, _packed(_load(tmp_path), texts))
    assert (found - _padded(model, texts)).abs().max() > 0.01  # read causally


def test_a_model_that_computes_something_else_packed_is_padded(tmp_path, monkeypatch, capsys):
    """A model that ignores its positions depends on the place of a text in a pack."""
    _save(tmp_path, "llama")
    module = transformers.models.llama.modeling_llama
    forward = module.LlamaRotaryEmbedding.forward

    def without_positions(self, x, position_ids):
        return forward(self, x, torch.arange(position_ids.shape[1]).expand_as(position_ids))

    def absolute(query, key, cos, sin, unsqueeze_dim=1):
        return query + cos.unsqueeze(unsqueeze_dim), key + sin.unsqueeze(unsqueeze_dim)

    monkeypatch.setattr(module.LlamaRotaryEmbedding, "forward", without_positions)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", absolute)
    assert not _load(tmp_path, "causal").is_packed
    assert "not packed: llama " in capsys.readouterr().out


def test_dropout_is_the_config_s(tmp_path):
    _save(tmp_path, "bert")
    backbone = _load(tmp_path)
    texts = _texts(5, 9)
    assert torch.equal(_packed(backbone, texts), _packed(backbone, texts))
    backbone.train()
    assert not torch.equal(_packed(backbone, texts), _packed(backbone, texts))


def test_16_bit_parameters_remember_what_they_were(tmp_path):
    model = _save(tmp_path, "eurobert")
    backbone = _load(tmp_path, dtype=torch.bfloat16)
    assert _packed(backbone, _texts(4)).dtype == torch.bfloat16
    assert torch.equal(backbone.model.embed_tokens.weight.unrounded, model.embed_tokens.weight)
    assert not hasattr(backbone.model.norm.weight, "unrounded")  # ones: nothing was lost
    assert backbone.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_directory_with_code_or_a_head_is_read_without_them(tmp_path):
    """As the study's models have."""
    texts = _texts(4, 6)
    model = _save(tmp_path / "eurobert", "eurobert")
    config = tmp_path / "eurobert" / "config.json"
    values = json.loads(config.read_text()) | {
        "model_type": "sl_model",
        "auto_map": {"AutoModel": "modeling.SLModel"},
    }
    config.write_text(json.dumps(values))
    (tmp_path / "eurobert" / "modeling.py").write_text("raise SystemExit('this must never run')")
    _assert_close(_packed(_load(tmp_path / "eurobert"), texts), _padded(model, texts))
    model = _save(tmp_path / "bert", "bert", transformers.AutoModelForMaskedLM)
    _assert_close(_packed(_load(tmp_path / "bert"), texts), _padded(model.bert, texts))


@pytest.mark.parametrize(("config", "message"), [
    (transformers.BertConfig(**SIZES, vocab_size=300),
     r"weights are missing \(embeddings\..*, \.\.\.\), expected those of a b"),
    (transformers.T5Config(), "found a t5 model, expected an encoder or a decoder"),
])  # fmt: skip
def test_a_directory_of_another_model_is_refused(tmp_path, config, message):
    _save(tmp_path, "llama")
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        _load(tmp_path)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"--model {tmp_path}: ")


def test_texts_of_like_length_are_padded_together():
    lengths = ((2, 3), (1, 11), (1, 12), (3, 200), (1, 220), (1, 221))
    assert group_padded_lengths(lengths) == [[3, 3, 11], [12], [200, 200, 200, 220], [221]]


@pytest.mark.slow
def test_megatron_stays_out():
    """Models are fine-tuned where only transformers is."""
    code = (
        "import sys, megaenc.finetune.train; print([name for name in sys.modules if "
        "name.split('.')[0] == 'megatron'])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def _fail(query):
    raise RuntimeError("head dimension 8\nand more")


@pytest.mark.parametrize(
    "wrong, said",
    [(_fail, "fails: head dimension 8"), (lambda *given: 0 * given[0], "computes other states")],
)
def test_a_kernel_that_does_not_do_is_not_used(tmp_path, monkeypatch, wrong, said):
    """Faults of a 16-bit kernel of accelerators, in place of the one for processors."""
    _save(tmp_path, "eurobert")
    by_length = attention._sdpa_by_length

    def broken(query, *rest):
        return by_length(query, *rest) if query.dtype == torch.float32 else wrong(query)

    monkeypatch.setattr(attention, "_sdpa_by_length", broken)
    with pytest.raises(InputError, match=f"{said}.*expected --precision fp32"):
        _load(tmp_path, dtype=torch.bfloat16)
