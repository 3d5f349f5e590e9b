"""The certificate of an export: its content, and the errors that it finds."""

import hashlib
import json
from pathlib import Path

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaenc.convert import to_hf
from megaenc.convert.command import main
from megaenc.convert.param_mapping import (
    GatedMLPMapping,
    NeoBERTQKVMapping,
    ParamMapping,
    QKVMapping,
)
from megaenc.convert.verify_export import ProbeBatch

ROPE = {"rope_type": "default", "rope_theta": 160000.0}


NAMES = {"llama": "llama with stretched positions", "qwen3": "qwen3 with biases and YaRN"}


@pytest.fixture
def core(came_in):
    """Return a function of a family: the run directory of a bfloat16 model.

    Not to be changed.
    """
    return lambda family: came_in(NAMES.get(family, family), torch.bfloat16)[1]


@pytest.mark.parametrize(
    ("name", "flags", "kind", "attention", "dtype"),
    [
        ("llama", [], "EuroBertForMaskedLM", "bidirectional", "bfloat16"),
        (
            "llama",
            ["--as", "source", "--dtype", "fp32"],
            "LlamaForCausalLM",
            "bidirectional",
            "float32",
        ),
        ("llama", ["--as", "llama"], "LlamaForCausalLM", "causal", "bfloat16"),
        ("qwen3", [], "Qwen3ForCausalLM", "bidirectional", "bfloat16"),
        ("modernbert", [], "ModernBertForMaskedLM", "bidirectional", "bfloat16"),
        (
            "modernbert-decoder",
            ["--as", "modernbert-decoder"],
            "ModernBertDecoderForCausalLM",
            "causal",
            "bfloat16",
        ),
        ("neobert", ["--dtype", "fp32"], "NeoBERTLMHead", "bidirectional", "float32"),
    ],
)
def test_it_holds_checksums_differences_and_the_mask(name, flags, kind, attention, dtype, core):
    hf_models.to_hf(core(name), "hf", *flags)
    found = json.loads(Path("hf/conversion.json").read_text())
    assert (found["class"], found["attention"], found["compared"], found["dtype"]) == (
        kind,
        attention,
        "logits",
        dtype,
    )
    assert found["mask"] == dict.fromkeys(("megatron-core", "eager", "sdpa"), attention)
    for kernel in ("eager", "sdpa"):
        assert found["largest_difference"][kernel].keys() == {"with padding", "without padding"}
        assert max(found["largest_difference"][kernel].values()) < 1e-4
    assert found["largest"] > 1, "next to nothing would differ from next to nothing"
    tensors = load_file(Path("hf/model.safetensors"))
    sums = {
        key: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, tensor in tensors.items()
    }
    assert found["sha256"] == sums


def change_config(**values):
    """Return a patch after which config.json contradicts the model."""

    def change(monkeypatch):
        right = to_hf.build_export_config

        def wrong(*args, **kwargs):
            config = right(*args, **kwargs)
            for name, value in values.items():
                setattr(config, name, value)
            return config

        monkeypatch.setattr(to_hf, "build_export_config", wrong)

    return change


def change_weights(core, change, *rules):
    """Return a patch that applies `change` to the weights of `rules` named `core`."""

    def plant(monkeypatch):
        for rule in rules:
            right = rule.to_hf

            def wrong(self, tensor, model, right=right):
                parts = right(self, tensor, model)
                return change(*parts) if core in self.core else parts

            monkeypatch.setattr(rule, "to_hf", wrong)

    return plant


def turn(matrix):
    """Swap the upper and the lower half of the rows of a joint matrix."""
    return (matrix.roll(len(matrix) // 2, 0),)


def damage(monkeypatch):
    """Change one number of one weight on the disk."""
    right = to_hf.write_shards

    def wrong(directory, *rest):
        digests = right(directory, *rest)
        tensors = load_file(directory / "model.safetensors")
        tensors["model.norm.weight"][5] += 1
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return digests

    monkeypatch.setattr(to_hf, "write_shards", wrong)


WRONG = {
    "epsilon": (
        "llama",
        [],
        change_config(rms_norm_eps=1e-3),
        "eager attention, without padding: outputs differ by",
    ),
    "gate and up projection": (
        "llama",
        [],
        change_weights("fc1", lambda gate, up: (up, gate), GatedMLPMapping),
        "differ by",
    ),
    "a head of query at another place": (
        "llama",
        ["--as", "llama"],
        change_weights("qkv", lambda query, *others: (query.flip(0), *others), QKVMapping),
        "differ by",
    ),
    "mask": (
        "qwen3",
        [],
        change_config(is_causal=True),
        "eager attention is not bidirectional: position 0 does not attend to token 1",
    ),
    "a causal mask": (
        "qwen3",
        ["--as", "qwen3"],
        change_config(is_causal=False),
        "eager attention is not causal: position 0 attends to token 1",
    ),
    "a window that is longer than the texts": (
        "qwen3",
        [],
        change_config(
            use_sliding_window=True,
            sliding_window=64,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "field `sliding_window`: found 64, expected none",
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
        "outputs differ by",
    ),
    "a causal window of one more token": (
        "modernbert-decoder",
        ["--as", "modernbert-decoder"],
        change_config(sliding_window=18),
        "layer 1: field `sliding_window`: found 18, expected 17",
    ),
    "rows of NeoBERT's queries by halves": (
        "neobert",
        [],
        lambda monkeypatch: monkeypatch.setattr(NeoBERTQKVMapping, "to_hf", ParamMapping.to_hf),
        "outputs differ by",
    ),
    "queries and keys of ModernBERT": (
        "modernbert",
        [],
        change_weights("linear_qkv", turn, ParamMapping, QKVMapping),
        "outputs differ by",
    ),
    "damage": ("llama", [], damage, "`model.norm.weight` is not what was written"),
    "a layer too few": (
        "llama",
        [],
        change_config(num_hidden_layers=1),
        "finds unexpected keys: model.layers.1.",
    ),
    "no weights for a layer": (
        "llama",
        [],
        change_config(num_hidden_layers=3),
        "finds missing keys: model.layers.2.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_export_that_is_another_model_is_not_written(case, core, refusal, monkeypatch):
    name, flags, change, words = WRONG[case]
    change(monkeypatch)
    line = refusal(
        main, ["to-hf", "--load", core(name), "--output", "out/hf", "--dtype", "fp32", *flags]
    )
    assert words in line and "nothing is written" in line, line
    assert not list(Path("out").iterdir())


@pytest.mark.parametrize(
    ("vocab_size", "context", "window", "longest"),
    [(3, 1, None, 1), (258, 4, None, 4), (258, 2048, 64, 192), (128256, 2048, 1000, 2048)],
)
def test_probes_are_longer_than_a_window_and_change_a_token_each(
    vocab_size, context, window, longest
):
    probe = ProbeBatch.build(vocab_size, context, *([window] if window else []))
    assert len(probe.documents[0]) == longest and len(probe.documents[1]) > (window or 0)
    tokens = torch.cat([*probe.documents, *probe.variants])
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    changed = probe.variants[1:] != probe.variants[0]
    assert torch.equal(changed, torch.eye(len(changed), dtype=torch.bool))
