"""The certificate of an export: what it says, and what it does not let pass."""

import hashlib
import json

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaenc.convert import to_hf, verify_export
from megaenc.convert.command import main
from megaenc.convert.param_mapping import GatedMLPMapping, HeadQKVMapping, ParamMapping, QKVMapping
from megaenc.convert.verify_export import ProbeBatch

ROPE = {"rope_type": "default", "rope_theta": 160000.0}


@pytest.fixture(scope="module")
def core(small_corpus, tmp_path_factory):
    """Llama, Qwen3, ModernBERT, its decoder and NeoBERT, in bfloat16, that came in. By name: a run folder. Not to be changed."""
    folder, found = tmp_path_factory.mktemp("core"), {}
    for name in ("llama with stretched positions", "qwen3 with biases and YaRN", "modernbert", "modernbert-decoder", "neobert"):
        model = hf_models.build(name, vocab_size=410).bfloat16()
        hf = hf_models.write(model, folder / name / "hf", small_corpus.tokenizer)
        found[name.split()[0]] = folder / name / "core"
        main(["from-hf", "--input", str(hf), "--output", str(folder / name / "core")])
    return found


def proof(folder):
    return json.loads((folder / "conversion.json").read_text())


@pytest.mark.parametrize("flags", [[], ["--dtype", "fp32"]])
@pytest.mark.parametrize(
    ("name", "written", "kind", "attention"),
    [
        ("llama", [], "EuroBertForMaskedLM", "bidirectional"),
        ("llama", ["--as", "source"], "LlamaForCausalLM", "bidirectional"),
        ("llama", ["--as", "llama"], "LlamaForCausalLM", "causal"),
        ("qwen3", [], "Qwen3ForCausalLM", "bidirectional"),
        ("qwen3", ["--as", "qwen3"], "Qwen3ForCausalLM", "causal"),
        ("modernbert", [], "ModernBertForMaskedLM", "bidirectional"),
        ("modernbert-decoder", ["--as", "modernbert-decoder"], "ModernBertDecoderForCausalLM", "causal"),
        ("modernbert-decoder", [], "ModernBertForMaskedLM", "bidirectional"),
        ("neobert", [], "NeoBERTLMHead", "bidirectional"),
    ],
)
def test_it_holds_checksums_differences_and_the_mask(name, written, kind, attention, flags, core, tmp_path):
    main(["to-hf", "--load", str(core[name]), "--output", str(tmp_path / "hf"), *written, *flags])
    found = proof(tmp_path / "hf")
    assert (found["class"], found["attention"], found["compared"]) == (kind, attention, "logits")
    assert found["dtype"] == ("float32" if flags else "bfloat16")
    assert found["mask"] == dict.fromkeys(("megatron-core", "eager", "sdpa"), attention)
    for kernel in ("eager", "sdpa"):
        for what in ("with padding", "without padding"):
            assert found["largest_difference"][kernel][what] < 1e-4
    assert found["largest"] > 1, "next to nothing would differ from next to nothing"
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    sums = {key: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for key, tensor in tensors.items()}
    assert found["sha256"] == sums


def change_config(**values):
    """Let config.json say something else than the model is."""

    def change(monkeypatch):
        right = to_hf.build_export_config

        def wrong(*args, **kwargs):
            config = right(*args, **kwargs)
            for name, value in values.items():
                setattr(config, name, value)
            return config

        monkeypatch.setattr(to_hf, "build_export_config", wrong)

    return change


def swap(rule, name):
    """Let two weights of a rule take each other's place."""

    def change(monkeypatch):
        right = rule.to_hf

        def wrong(self, tensor, model):
            parts = right(self, tensor, model)
            return (parts[1], parts[0], *parts[2:]) if name in self.core else parts

        monkeypatch.setattr(rule, "to_hf", wrong)

    return change


def reorder(monkeypatch):
    """The heads of queries come in another order than that of their keys."""
    right = QKVMapping.to_hf

    def wrong(self, tensor, model):
        query, *others = right(self, tensor, model)
        return (query.flip(0), *others)

    monkeypatch.setattr(QKVMapping, "to_hf", wrong)


def turn_rows(name):
    """The upper and the lower half of a joint matrix's rows take each other's place."""

    def change(monkeypatch):
        for rule in (ParamMapping, QKVMapping):
            monkeypatch.setattr(rule, "to_hf", _turned(rule.to_hf, name))

    return change


def _turned(right, name):
    def wrong(self, tensor, model):
        parts = right(self, tensor, model)
        return (parts[0].roll(len(parts[0]) // 2, 0),) if name in self.core else parts

    return wrong


def damage(monkeypatch):
    """One number of one weight is another on the disk."""
    right = to_hf.write_shards

    def wrong(folder, *rest):
        digests = right(folder, *rest)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][5] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return digests

    monkeypatch.setattr(to_hf, "write_shards", wrong)


WRONG = {
    "epsilon": ("llama", [], change_config(rms_norm_eps=1e-3), "eager attention, without padding: logits differ by"),
    "positions": (
        "llama",
        [],
        change_config(rope_parameters=dict(rope_type="default", rope_theta=2500.0)),
        "eager attention, without padding: logits differ by",
    ),
    "gate and up projection": ("llama", [], swap(GatedMLPMapping, "fc1"), "differ by"),
    "a head of query at another place": ("llama", ["--as", "llama"], reorder, "differ by"),
    "mask": (
        "qwen3",
        [],
        change_config(is_causal=True),
        "eager attention is not bidirectional: position 0 does not attend to token 1",
    ),
    "a window that is longer than the texts": (
        "qwen3",
        [],
        change_config(use_sliding_window=True, sliding_window=64, layer_types=["full_attention", "sliding_attention"]),
        "field `sliding_window`: found 64, expected none",
    ),
    "a layer with a window": (
        "qwen3",
        [],
        change_config(layer_types=["full_attention", "sliding_attention"]),
        "field `layer_types`: found sliding_attention, expected full_attention",
    ),
    "a longer window": (
        "modernbert",
        [],
        change_config(local_attention=48),
        "layer 1: field `sliding_window`: found 24, expected 16",
    ),
    "a window in another layer": (
        "modernbert",
        [],
        change_config(layer_types=["sliding_attention", "full_attention"]),
        "layer 0: field `sliding_window`: found 16, expected none",
    ),
    "positions of local layers": (
        "modernbert",
        [],
        change_config(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), ROPE)),
        "logits differ by",
    ),
    "a causal window of one more token": (
        "modernbert-decoder",
        ["--as", "modernbert-decoder"],
        change_config(sliding_window=18),
        "layer 1: field `sliding_window`: found 18, expected 17",
    ),
    "queries of ModernBERT's decoder": ("modernbert-decoder", ["--as", "modernbert-decoder"], reorder, "differ by"),
    "rows of NeoBERT's queries by halves": (
        "neobert",
        [],
        lambda monkeypatch: monkeypatch.setattr(HeadQKVMapping, "to_hf", ParamMapping.to_hf),
        "logits differ by",
    ),
    "queries and keys of ModernBERT": ("modernbert", [], turn_rows("linear_qkv"), "logits differ by"),
    "gate and up projection of ModernBERT": ("modernbert", [], turn_rows("linear_fc1"), "logits differ by"),
    "damage": ("llama", [], damage, "`model.norm.weight` is not what was written"),
    "a layer too few": ("llama", [], change_config(num_hidden_layers=1), "finds unexpected keys: model.layers.1."),
    "no weights for a layer": ("llama", [], change_config(num_hidden_layers=3), "finds missing keys: model.layers.2."),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_export_that_is_another_model_is_not_written(case, core, tmp_path, refusal, monkeypatch):
    name, flags, change, words = WRONG[case]
    change(monkeypatch)
    line = refusal(main, ["to-hf", "--load", core[name], "--output", tmp_path / "out" / "hf", "--dtype", "fp32", *flags])
    assert words in line and "nothing is written" in line, line
    assert not list((tmp_path / "out").iterdir())


def test_a_mask_that_leaks_is_named():
    sees = torch.ones(3, 3, dtype=torch.bool)
    verify_export._check_mask(sees, to_hf.Attention.BIDIRECTIONAL, "x")
    verify_export._check_mask(sees.triu(), to_hf.Attention.CAUSAL, "x")
    for found, attention, words in (
        (sees.triu(), "BIDIRECTIONAL", "x is not bidirectional: position 0 does not attend to token 1"),
        (sees, "CAUSAL", "x is not causal: position 0 attends to token 1"),
    ):
        with pytest.raises(verify_export._VerificationError, match=words):
            verify_export._check_mask(found, to_hf.Attention[attention], "x")


@pytest.mark.parametrize(("window", "longest"), [(4, 32), (64, 192), (1000, 2048)])
def test_probes_are_longer_than_a_window(window, longest):
    """The first two of three documents, if the context is."""
    documents = ProbeBatch.build(258, 2048, window).documents
    assert len(documents[0]) == longest and len(documents[1]) > window


@pytest.mark.parametrize(("vocab_size", "context"), [(258, 4), (128256, 2048), (3, 1)])
def test_what_is_changed_in_a_probe_is_another_token(vocab_size, context):
    probe = ProbeBatch.build(vocab_size, context)
    assert max(len(document) for document in probe.documents) == min(32, context) == len(probe.documents[0])
    assert all(int(document.min()) >= 0 and int(document.max()) < vocab_size for document in probe.documents)
    changed = probe.variants[1:] != probe.variants[0]
    assert torch.equal(changed, torch.eye(len(changed), dtype=torch.bool))
